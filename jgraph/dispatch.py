"""Checks that devices are available, and when the next program may be dispatched."""

import os
from typing import TypeVar

import jax

from jgraph.errors import ConfigError

_T = TypeVar("_T")


def check_devices() -> None:
    """Starts JAX's default backend, with enough threads for the collectives of several CPU devices.

    XLA's CPU client has as many threads as cores, or the number in the environment variable NPROC. A device keeps a thread for
    each collective that it waits in, and collectives that do not depend on each other wait at once. With too few threads,
    all of them may wait.

    Raises:
        ConfigError: If the platforms in JAX_PLATFORMS have no device on this machine, e.g. `cuda` without a GPU.
    """
    count = getattr(jax.config, "jax_num_cpu_devices", 1)
    if count > 1:
        os.environ.setdefault("NPROC", str(max(4 * count, os.cpu_count() or 1)))
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as e:  # JAX asserts that it has a plugin for the platform
        platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        reason = (str(e).strip() or "jax cannot use it here").splitlines()[0]
        raise ConfigError(
            f"JAX_PLATFORMS is {platforms}: must be a platform with devices on this machine, or unset ({reason})", field=""
        ) from e


def in_turn(results: _T) -> _T:
    """Returns its argument unchanged. Waits until the arrays in it are computed if they are on several CPU devices.

    Call it with the results of a jitted function before the next program is dispatched.

    All CPU devices of JAX share one thread pool. A device that waits for the others in a collective keeps its thread. Two
    programs at once can therefore deadlock: all threads wait for devices that get no thread. On GPUs, programs run one after
    the other, so this function does not wait.

    Args:
        results: A pytree of `jax.Array`. The first leaf determines the devices.

    Returns:
        `results`, without a copy. It returns without waiting if there are no leaves, or the arrays are on GPUs or on one CPU
        device.
    """
    leaf = next(iter(jax.tree.leaves(results)), None)
    if leaf is not None and len(devices := leaf.devices()) > 1 and next(iter(devices)).platform == "cpu":
        jax.block_until_ready(results)
    return results
