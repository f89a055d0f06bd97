"""Pipeline parallelism: a model in stages, and a schedule as one SPMD program or as executables that the host starts."""

from jgraph.pipeline._autotune import choose as choose, find_schedule as find_schedule, measure as measure
from jgraph.pipeline._partition import (
    PipelineModel as PipelineModel,
    StageAssignment as StageAssignment,
    split_embedding as split_embedding,
)
from jgraph.pipeline._program import Pipeline as Pipeline
from jgraph.pipeline._strategy import Pipelined as Pipelined
