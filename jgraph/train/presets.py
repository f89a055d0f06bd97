"""Named configurations. They are defined next to the models, which determine their sizes."""

import importlib

from jgraph.errors import require
from jgraph.train.config import TrainConfig

PRESETS: dict[str, TrainConfig] = importlib.import_module("jgraph_models.presets").PRESETS


def preset(name: str) -> TrainConfig:
    """Returns a named configuration.

    Args:
        name: A key of `PRESETS`, for example "cpu-tiny".

    Returns:
        The configuration, which is immutable. Its method `changed` returns a copy with other values.

    Raises:
        ConfigError: If there is no preset of this name. The message lists the names.

    Examples:
        >>> preset("cpu-tiny").input.batch_size
        8
    """
    require(name in PRESETS, "preset", name, f"one of {', '.join(PRESETS)}")
    return PRESETS[name]
