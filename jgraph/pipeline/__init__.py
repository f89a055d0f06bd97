"""A schedule as one program: all microbatches through all stages of all ranks, in one jitted SPMD function."""

from jgraph.pipeline.autotune import choose as choose
from jgraph.pipeline.autotune import find_schedule as find_schedule
from jgraph.pipeline.autotune import measure as measure
from jgraph.pipeline.partition import PipelineModel as PipelineModel
from jgraph.pipeline.partition import StageAssignment as StageAssignment
from jgraph.pipeline.partition import split_embedding as split_embedding
from jgraph.pipeline.program import Pipeline as Pipeline
from jgraph.pipeline.strategy import Pipelined as Pipelined
