"""Checkpoints: a layout that fits any devices, written and verified."""

from jgraph.checkpoint.canonical import CanonicalLayout as CanonicalLayout
from jgraph.checkpoint.reader import CheckpointReader as CheckpointReader
from jgraph.checkpoint.store import Checkpoints as Checkpoints
from jgraph.checkpoint.store import check_space as check_space
