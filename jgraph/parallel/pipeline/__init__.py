"""A schedule as one program: all microbatches through all stages of all ranks, in one jitted SPMD function."""

from jgraph.parallel.pipeline.autotune import choose as choose
from jgraph.parallel.pipeline.autotune import find_schedule as find_schedule
from jgraph.parallel.pipeline.autotune import measure as measure
from jgraph.parallel.pipeline.partition import PipelineModel as PipelineModel
from jgraph.parallel.pipeline.partition import StageAssignment as StageAssignment
from jgraph.parallel.pipeline.partition import split_embedding as split_embedding
from jgraph.parallel.pipeline.program import Pipeline as Pipeline
