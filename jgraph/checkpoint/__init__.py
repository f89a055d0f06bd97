"""Checkpoints that can be restored on other devices, written and verified."""

from jgraph.checkpoint.canonical import CanonicalLayout as CanonicalLayout
from jgraph.checkpoint.store import CheckpointReader as CheckpointReader
from jgraph.checkpoint.store import Checkpoints as Checkpoints
from jgraph.checkpoint.store import check_space as check_space
from jgraph.checkpoint.store import hide_tracebacks as hide_tracebacks
