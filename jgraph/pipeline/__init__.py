"""A schedule as one program: all microbatches through all stages of all ranks, in one jitted SPMD function."""

from jgraph.pipeline.parts import Layout as Layout
from jgraph.pipeline.parts import Parts as Parts
from jgraph.pipeline.program import Pipeline as Pipeline
