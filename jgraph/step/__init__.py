"""The training step for any loop: gradients of a strategy, clipping, an optax update, a gate for finite values."""

from jgraph.step.compiled import CompiledStep as CompiledStep
from jgraph.step.state import StepMetrics as StepMetrics, TrainState as TrainState
from jgraph.step.train_step import TrainStep as TrainStep, train_step as train_step
from jgraph.step.transform import elementwise as elementwise
