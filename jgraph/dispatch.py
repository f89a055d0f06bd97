"""Devices that programs are handed to: whether there are any, and whether the next may come before the last is done."""

from typing import TypeVar

import jax

from jgraph.errors import ConfigError

T = TypeVar("T")


def check_devices() -> None:
    """Starts the backend. Raises ConfigError where there is none, as with JAX_PLATFORMS=cuda and no GPU."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as e:  # a platform that jax knows and has no plugin for is an assertion of jax's
        platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        reason = (str(e).strip() or "jax cannot use it here").splitlines()[0]
        raise ConfigError(
            f"JAX_PLATFORMS is {platforms}: must name a platform whose devices are here, or be unset ({reason})", field=""
        ) from e


def in_turn(results: T) -> T:
    """Returns the results of a program; waits for them first where the next program must not be handed over before.

    CPU devices share one pool of threads, and a rank that waits in a collective keeps its thread. Ranks of two programs can
    so take all threads, each waiting for one that has none left. GPUs have queues: there, this returns at once.
    """
    leaf = next(iter(jax.tree.leaves(results)), None)
    if leaf is not None and len(devices := leaf.devices()) > 1 and next(iter(devices)).platform == "cpu":
        jax.block_until_ready(results)
    return results
