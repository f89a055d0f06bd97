"""Named configurations. They are defined next to the models, which determine their sizes."""

import importlib
from dataclasses import replace
from typing import Literal, TypeAlias

from jgraph.errors import require
from jgraph.train.config import TrainConfig

PRESETS: dict[str, TrainConfig] = importlib.import_module("jgraph_models.presets").PRESETS


Trained: TypeAlias = Literal["from scratch", "given weights", "adapters"]
RATES: dict[Trained, float] = {"given weights": 2e-5, "adapters": 2e-4}
"""Default peak learning rates of a run that starts with the weights of a folder, and of a run with LoRA."""


def preset(name: str, *, trains: Trained = "from scratch") -> TrainConfig:
    """Returns a named configuration. Given weights and adapters get a learning rate of `RATES`.

    Examples:
        >>> preset("cpu-tiny").input.batch_size
        8
    """
    require(name in PRESETS, "preset", name, f"one of {', '.join(PRESETS)}")
    found = PRESETS[name]
    if trains == "from scratch":
        return found
    return found.changed(optimizer=replace(found.optimizer, learning_rate=RATES[trains]))
