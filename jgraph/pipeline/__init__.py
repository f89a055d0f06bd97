"""A schedule as one program: all microbatches through all stages of all ranks, in one jitted SPMD function."""

from jgraph.pipeline.choice import choose as choose
from jgraph.pipeline.choice import find_schedule as find_schedule
from jgraph.pipeline.parts import Layout as Layout
from jgraph.pipeline.parts import Parts as Parts
from jgraph.pipeline.parts import split_embedding as split_embedding
from jgraph.pipeline.program import Pipeline as Pipeline
