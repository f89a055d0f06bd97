"""Checkpoints that can be restored on other devices, written and verified."""

from jgraph.checkpoint.canonical import CanonicalLayout as CanonicalLayout
from jgraph.checkpoint.reader import CheckpointReader as CheckpointReader
from jgraph.checkpoint.store import Checkpoints as Checkpoints
