"""The training step for any loop: gradients of a strategy, clipping, and an optax update that is applied only if finite."""

from jgraph.step.compiled import CompiledStep as CompiledStep
from jgraph.step.state import StepMetrics as StepMetrics, TrainState as TrainState
from jgraph.step.train_step import TrainStep as TrainStep, train_step as train_step
from jgraph.step.transform import elementwise as elementwise
