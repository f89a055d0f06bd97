"""Named configurations. Their sizes are a model's, so they are where the models are."""

import importlib

from jgraph.errors import require
from jgraph.training.config import TrainConfig

PRESETS: dict[str, TrainConfig] = importlib.import_module("jgraph_models.presets").PRESETS


def preset(name: str) -> TrainConfig:
    """Returns the named configuration. Raises ConfigError, which lists the names, for any other name.

    >>> jgraph.preset("cpu-tiny").batch_size
    8
    """
    require(name in PRESETS, "preset", name, f"one of {', '.join(PRESETS)}")
    return PRESETS[name]
