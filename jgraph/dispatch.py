"""Checks that devices are available, and when the next program may be dispatched."""

import os
import warnings
from typing import TypeVar

import jax

from jgraph.device import cpu_threads, ordered
from jgraph.errors import ConfigError

_T = TypeVar("_T")


def check_devices() -> None:
    """Starts JAX's default backend, with one order of collectives on CPU devices. Raises ConfigError if it has no device."""
    flags = os.environ.get("XLA_FLAGS", "")
    count = getattr(jax.config, "jax_num_cpu_devices", 1)
    if count > 1:
        # A device keeps a thread of XLA's CPU client while it waits in a collective, so the client gets four per device.
        os.environ.setdefault("NPROC", cpu_threads(count))
    # XLA's default scheduler for CPUs lets each device choose the order of collectives that do not depend on each other.
    # Devices that wait in different collectives can wait forever. The flag works in XLA_FLAGS, which XLA reads once, and not
    # as an option of one program.
    several = count > 1 or "host_platform_device_count" in flags or jax.distributed.is_initialized()
    if several and not _is_started():
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
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.default_backend() == "cpu" and ordered(flags) != flags:
        wrong = f"CPU devices may wait for each other forever: set XLA_FLAGS={ordered('')} before the start"
        warnings.warn(wrong, stacklevel=3)


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
    """Waits for the results of a program on several CPU devices before the next program is dispatched. Returns `results`.

    The first leaf of the pytree determines the devices. Does not wait for arrays on GPUs or on one CPU device.
    """
    # All CPU devices of JAX share one thread pool, and a device that waits in a collective keeps its thread. Two programs at
    # once can therefore deadlock: all threads wait for devices that get no thread. On GPUs, programs run one after the other.
    leaf = next(iter(jax.tree.leaves(results)), None)
    if leaf is not None and len(devices := leaf.devices()) > 1 and next(iter(devices)).platform == "cpu":
        jax.block_until_ready(results)
    return results
