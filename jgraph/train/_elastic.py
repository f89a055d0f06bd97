"""The axis of the mesh that is `auto`: it takes all devices that the other axes leave, and the microbatches follow. No JAX."""

from typing import Any

from jgraph.errors import ConfigError, require
from jgraph.train.config import TrainConfig


def placed(config: TrainConfig, available: int, most: int | None) -> tuple[TrainConfig, str]:
    """Replaces `auto` by a number of devices. Also returns a line about it, empty without `auto`.

    Divides the microbatches so that no device gets more than `most` sequences of one; None for any number.
    """
    parallel = config.parallel
    name = parallel.auto
    if not name:
        return config, ""
    size, rest = divmod(available, parallel.num_devices)
    others = " x ".join(f"`{other}` {count}" for other, count in parallel.sizes.items() if count > 1)
    allowed = f"a number on {available} devices, because {others} does not divide them; or start on other devices"
    require(size > 0 and rest == 0, name, "auto", allowed)
    fields: dict[str, Any] = {name: size}
    if name == "fsdp" and size == 1:
        fields |= {"gather_per": "step", "shard_rules": ()}  # they have no effect on one device
    try:
        config = config.changed(**fields)
    except ConfigError as e:
        advice = f"start on another number of devices, or set `{name}` to a number"
        raise ConfigError(f"{e}; `{name}` auto takes {size} of {available} devices: {advice}", field=e.field) from e
    share = config.sequences_per_device
    parts = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= (most or share))
    config = config.changed(num_microbatches=config.input.num_microbatches * parts)
    count = config.input.num_microbatches
    microbatches = f"{count} microbatch{'es' if count > 1 else ''} of {config.sequences_per_device} sequences per device"
    return config, f"`{name}` auto: {size} of {available} devices, {microbatches}"
