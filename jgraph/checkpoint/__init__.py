"""Checkpoints that can be restored on other devices, written and verified."""

from jgraph.checkpoint.canonical import CanonicalLayout as CanonicalLayout
from jgraph.checkpoint.store import (
    CheckpointReader as CheckpointReader,
    Checkpoints as Checkpoints,
    check_space as check_space,
    hide_tracebacks as hide_tracebacks,
)
