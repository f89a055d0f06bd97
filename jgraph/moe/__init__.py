"""Mixtures of experts: the settings, and statistics of a step. The layer is `jgraph.MoE`."""

from jgraph.moe.config import MoEConfig as MoEConfig
