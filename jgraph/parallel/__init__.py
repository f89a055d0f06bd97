"""A training step over devices: replicated, fully sharded, or as a pipeline."""

from jgraph.parallel.compiled import CompiledStep as CompiledStep
from jgraph.parallel.objective import Loss as Loss
from jgraph.parallel.pipeline import PipelineModel as PipelineModel
from jgraph.parallel.pipeline import split_embedding as split_embedding
from jgraph.parallel.pipelined import Pipelined as Pipelined
from jgraph.parallel.state import StepMetrics as StepMetrics
from jgraph.parallel.state import TrainState as TrainState
from jgraph.parallel.step import TrainStep as TrainStep
from jgraph.parallel.step import train_step as train_step
from jgraph.parallel.strategy import FullySharded as FullySharded
from jgraph.parallel.strategy import Replicated as Replicated
from jgraph.parallel.strategy import Strategy as Strategy
from jgraph.parallel.transform import elementwise as elementwise
