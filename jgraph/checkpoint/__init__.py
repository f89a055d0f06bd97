"""Checkpoints that can be restored on other devices, written and verified."""

from jgraph.checkpoint.canonical import CanonicalLayout as CanonicalLayout
from jgraph.checkpoint.store import CheckpointReader as CheckpointReader, Checkpoints as Checkpoints
