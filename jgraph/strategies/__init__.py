"""Strategies: place parameters on devices, and compute the gradients of a batch."""

from jgraph.strategies._fully_sharded import FullySharded as FullySharded
from jgraph.strategies._replicated import Replicated as Replicated
from jgraph.strategies.base import Strategy as Strategy
from jgraph.strategies.objective import Loss as Loss
from jgraph.strategies.tensor_parallel import Split as Split, TensorParallel as TensorParallel
