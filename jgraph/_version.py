"""The installed version. A module of its own, because `importlib.metadata` takes longer to import than `jgraph`."""

from importlib import metadata

__version__ = metadata.version("jgraph")
