"""Strategies: how parameters lie on devices, and how the gradients of a batch are computed and compiled."""

from jgraph.strategies.base import FullySharded as FullySharded
from jgraph.strategies.base import Replicated as Replicated
from jgraph.strategies.base import Strategy as Strategy
from jgraph.strategies.objective import Loss as Loss
