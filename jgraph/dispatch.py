"""Checks that devices are available, and when the next program may be dispatched."""

import os
import warnings
from typing import TypeVar

import jax

from jgraph.device import cpu_threads, ordered
from jgraph.errors import ConfigError

_T = TypeVar("_T")


def check_devices() -> None:
    """Starts JAX's default backend. Several CPU devices then run the collectives of a program in one order.

    XLA's default scheduler for CPUs lets each device choose the order of collectives that do not depend on each other. Devices
    that wait in different collectives can wait forever. The flag works in XLA_FLAGS, which XLA reads once, and not as an option
    of one program. Each device keeps a thread while it waits in a collective, so XLA's CPU client gets four threads per device,
    unless the environment variable NPROC is set.

    Raises:
        ConfigError: If the platforms in JAX_PLATFORMS have no device on this machine, e.g. `cuda` without a GPU.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    count = getattr(jax.config, "jax_num_cpu_devices", 1)
    if count > 1:
        os.environ.setdefault("NPROC", cpu_threads(count))
    if (count > 1 or "host_platform_device_count" in flags) and not _is_started():
        os.environ["XLA_FLAGS"] = ordered(flags)
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as e:  # JAX asserts that it has a plugin for the platform
        platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
        reason = (str(e).strip() or "jax cannot use it here").splitlines()[0]
        raise ConfigError(
            f"JAX_PLATFORMS is {platforms}: must be a platform with devices on this machine, or unset ({reason})", field=""
        ) from e


def warn_unordered() -> None:
    """Warns if CPU devices may run the collectives of one program in different orders."""
    flags, flag = os.environ.get("XLA_FLAGS", ""), ordered("")
    if jax.default_backend() == "cpu" and ordered(flags) != flags:
        warnings.warn(f"CPU devices may wait for each other forever: set XLA_FLAGS={flag} before the start", stacklevel=3)


def _is_started() -> bool:
    """True if a backend of JAX runs. JAX then refuses another number of CPU devices."""
    count = getattr(jax.config, "jax_num_cpu_devices", -1)
    try:
        jax.config.update("jax_num_cpu_devices", count + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


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
