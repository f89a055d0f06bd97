"""Named configurations. They are defined next to the models, which determine their sizes."""

import importlib

from jgraph.errors import require
from jgraph.train.config import TrainConfig

PRESETS: dict[str, TrainConfig] = importlib.import_module("jgraph_models.presets").PRESETS


def preset(name: str) -> TrainConfig:
    """Returns a named configuration.

    >>> preset("cpu-tiny").input.batch_size
    8

    Args:
        name: A key of `PRESETS`.

    Returns:
        The configuration. Change it with `TrainConfig.changed`.

    Raises:
        ConfigError: If there is no preset of this name. The message lists the names.
    """
    require(name in PRESETS, "preset", name, f"one of {', '.join(PRESETS)}")
    return PRESETS[name]
