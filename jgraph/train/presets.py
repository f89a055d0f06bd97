"""Named configurations. They are defined next to the models, which determine their sizes."""

import importlib
from dataclasses import replace
from typing import Literal

from jgraph.errors import require
from jgraph.train.config import TrainConfig

PRESETS: dict[str, TrainConfig] = importlib.import_module("jgraph_models.presets").PRESETS


FINE_TUNING_RATE = 2e-5
"""Peak learning rate of a run that starts with given weights and has the preset of a tiny model."""


def preset(name: str, *, weights: Literal["random", "given"] = "random") -> TrainConfig:
    """Returns a named configuration.

    Args:
        name: A key of `PRESETS`, for example "cpu-tiny".
        weights: With `given`, the preset of a tiny model has the learning rate `FINE_TUNING_RATE`, because the weights are
            those of another, usually larger model.

    Returns:
        The configuration, which is immutable. Its method `changed` returns a copy with other values.

    Raises:
        ConfigError: If there is no preset of this name. The message lists the names.

    Examples:
        >>> preset("cpu-tiny").input.batch_size
        8
    """
    require(name in PRESETS, "preset", name, f"one of {', '.join(PRESETS)}")
    found = PRESETS[name]
    if weights == "random" or not name.endswith("-tiny"):
        return found
    return found.changed(optimizer=replace(found.optimizer, learning_rate=FINE_TUNING_RATE))
