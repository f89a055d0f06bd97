"""Named configurations. They are defined next to the models, which determine their sizes."""

import contextlib
import importlib
from dataclasses import asdict
from typing import Any

from jgraph.errors import require
from jgraph.train.config import TrainConfig
from jgraph.train.rundir import differences

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


def changed_settings(config: TrainConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Finds the settings of a run that are not defaults.

    Args:
        config: The configuration of a run.

    Returns:
        Two dicts from the dotted name of a setting, such as "moe.capacity" or "optimizer.beta1", to its value. The first has
        the settings of the model that differ from the defaults of their dataclass, or all settings if the dataclass has fields
        without a default. The second has the settings outside `model` and `distributed` that differ from the preset
        `config.preset`. If that is empty, it has those that differ from the defaults of `TrainConfig`.
    """
    model: Any = config.model
    base = PRESETS[config.preset] if config.preset else TrainConfig(module=config.module)
    base = base.changed(model=model, distributed=config.distributed)
    defaults: dict[str, Any] = {}
    with contextlib.suppress(TypeError):  # some settings have no default
        defaults = {} if model is None else asdict(type(model)())
    sizes = {} if model is None else differences(asdict(model), defaults)
    return sizes, differences(config.to_dict(), base.to_dict())
