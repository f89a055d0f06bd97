"""Connects the processes of a run, and lets them agree on values and errors.

Arguments or a launcher identify the processes, and `jax.distributed` connects them before a backend starts. In a run of
one process every function here returns at once.
"""

import contextlib
import glob
import os
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from jgraph import peers
from jgraph.errors import ConfigError
from jgraph.launchers import Launch, flags_needed, launched, num_gpus
from jgraph.types import JaxDevice

# The processes of a job start within this time of each other.
_PATIENCE_SECONDS = 300
# The processes wait for each other before the exit handler of JAX does.
_SHUTDOWN_SECONDS = 60
_NEVER = 10**8
_GPU_FILES = "/dev/nvidia[0-9]*"


@dataclass(frozen=True)
class Connection:
    """The connection of this process to the others."""

    launch: Launch
    # GPUs of this process among the visible ones; None for all
    devices: tuple[int, ...] | None
    sockets: peers.Sockets

    def __str__(self) -> str:
        """Describes the processes in the header of a run."""
        launch = self.launch
        ids = ", ".join(map(str, self.devices or ()))
        gpus = f"uses GPU{'s' if ',' in ids else ''} {ids}" if ids else "uses all visible GPUs"
        devices = gpus if jax.default_backend() == "gpu" else "runs on the CPU"
        by = "flags" if launch.name == "flags" else f"variables of {launch.name}"
        return f"{launch.num_processes}, by {by}; process {launch.process_id} listens at {launch.coordinator} and {devices}"


def connect(
    *,
    setup: Literal["auto", "off"] = "auto",  # off: ignore launchers, so that only a coordinator connects
    coordinator: str = "",  # HOST:PORT of process 0, the same for all; then the next two are required
    num_processes: int | None = None,
    process_id: int | None = None,
    local_devices: str = "auto",  # see `Launch.devices`
    timeout: float = 15.0,  # seconds without an answer of another machine until it is lost
    patience: float = _PATIENCE_SECONDS,  # for the other processes
) -> Connection | None:
    """Connects to the other processes, if any, and blocks until all have called it. Call it before JAX's backend starts."""
    launch = launched(os.environ) if setup == "auto" else None
    if num_processes is not None and process_id is not None:
        told = launch if launch and launch.num_processes in (0, num_processes) and launch.process_id == process_id else None
        launch = replace(told or Launch("flags", "", 0, 0), name="flags", coordinator=coordinator)
        launch = replace(launch, num_processes=num_processes, process_id=process_id)
    if jax.distributed.is_initialized() or launch is None:
        return None
    if not launch.coordinator:
        raise flags_needed(launch)
    source = f"`distributed.coordinator` is {coordinator}" if coordinator else f"started by {launch.name}"
    visible = _visible_gpus()
    devices = launch.devices(local_devices, visible)
    if devices and visible <= max(devices) and visible:
        must = f"must be less than the number of visible GPUs, {visible}"
        raise ConfigError(f"`distributed.local_devices` is {local_devices}: {must}", field="distributed.local_devices")
    # The trainer handles SIGTERM. JAX's service would intercept it.
    jax.config.update("jax_enable_preemption_service", False)
    server = None if launch.process_id else _listen(launch, source)
    try:
        sockets, address = _meet(launch, server, patience)
        _in_time(
            partial(
                jax.distributed.initialize,
                coordinator_address=address,
                num_processes=launch.num_processes,
                process_id=launch.process_id,
                local_device_ids=devices,
                cluster_detection_method="deactivate",
                # JAX aborts the process, with a stack of C++, when one of its own timeouts expires.
                initialization_timeout=10 * int(patience) + 60,
                heartbeat_timeout_seconds=_NEVER,
                shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
            ),
            patience,
        )
    except (OSError, RuntimeError, ValueError) as e:
        raise ConfigError(
            f"{source}: the processes could not be connected: {' '.join(str(e).split())}; check that all of them are running, "
            "that `distributed.coordinator` HOST:PORT, if given, is the same for all, and that the others reach that host",
            field="distributed.coordinator",
        ) from e
    for each in sockets.values():
        peers.keep_alive(each, timeout)
    return Connection(launch, devices, sockets)


def _listen(launch: Launch, source: str) -> socket.socket:
    try:
        return peers.listen(int(launch.coordinator.rpartition(":")[2]))
    except OSError as e:
        must = f"must have a port that is free on this machine ({e.strerror})"
        at = "" if launch.name == "flags" else f", at {launch.coordinator}"
        raise ConfigError(f"{source}{at}: {must}", field="distributed.coordinator") from e


def _meet(launch: Launch, server: socket.socket | None, patience: float) -> tuple[peers.Sockets, str]:
    """Connects the processes. Returns the connections of this one, and the address at which JAX connects."""
    if server is None:
        host, _, port = launch.coordinator.rpartition(":")
        host = host.strip("[]")
        connection = peers.join((host, int(port)), launch.process_id, launch.num_processes, patience)
        service = peers.hear_port(connection, patience)
        return {0: connection}, f"localhost:{peers.shield((host, service))}"
    with server, peers.listen(0) as free:
        sockets = peers.accept_all(server, launch.num_processes, patience)
        service = free.getsockname()[1]
    peers.tell_port(sockets, service)
    return sockets, f"localhost:{service}"


def unused_gpus() -> int:
    """Returns the number of GPUs of this machine that no process uses. Collective: every process must call it."""
    machines = all_gather_scalar(zlib.crc32(socket.gethostname().encode()) >> 1)
    counts = all_gather_scalar(jax.local_device_count())
    if jax.default_backend() != "gpu":
        return 0
    used = sum(count for machine, count in zip(machines, counts, strict=True) if machine == machines[jax.process_index()])
    # Slurm sets the number of GPUs of the job. The files may include those of other jobs.
    here = int(os.environ.get("SLURM_GPUS_ON_NODE") or _visible_gpus())
    return max(0, here - used)


def refused_gpus() -> int:
    """Returns the number of GPUs that this process may use, if JAX fell back to the CPU; else 0."""
    # JAX continues on the CPU if a GPU does not start, unless its platforms are named.
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    return 0 if platforms or jax.default_backend() != "cpu" else _visible_gpus()


def _visible_gpus() -> int:
    return num_gpus(os.environ, len(glob.glob(_GPU_FILES)))


def devices_of_ranks(count: int, *, flags: str) -> list[JaxDevice]:
    """Returns one device for each of `count` ranks, equally many of each process. The same on every process."""
    # `flags` names the flags with the number of ranks, for the error, e.g. `--dp 2 --fsdp 4`.
    processes, available = jax.process_count(), jax.device_count()
    needs = f"{flags} needs {count} device{'s' if count > 1 else ''}"
    if count > available:
        is_cpu = available == 1 and jax.default_backend() == "cpu"
        hint = f"; to simulate them on the CPU, set JAX_NUM_CPU_DEVICES={count}" if is_cpu else ""
        raise ConfigError(f"{needs}, but only {available} {'is' if available == 1 else 'are'} available{hint}", field="dp")
    if count % processes:
        raise ConfigError(f"{needs}: must be a multiple of the {processes} processes", field="dp")
    return [device for process in range(processes) for device in jax.local_devices(process)[: count // processes]]


def is_process_zero() -> bool:
    """True on process 0, and in a run of one process. Only this process prints and writes shared files."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def all_gather_scalar(value: int) -> list[int]:
    """Gathers one int32 from every process, in their order. Collective: blocks until every process has called it."""
    if not jax.distributed.is_initialized():
        return [value]
    return np.ravel(multihost_utils.process_allgather(np.int32(value))).tolist()


@contextlib.contextmanager
def all_or_raise() -> Iterator[None]:
    """Raises on every process if any process raises an Exception inside the block. For `with`."""
    # Collective: every process must enter the block, which must not contain collectives. Its end waits for all processes. A
    # process that raised keeps its own exception.
    try:
        yield
    except Exception:
        all_gather_scalar(1)
        raise
    failed = [process for process, has_failed in enumerate(all_gather_scalar(0)) if has_failed]
    if failed:
        raise ConfigError(f"process {failed[0]} failed and printed the reason; this one stops, too", field="")


def _in_time(function: Callable[[], None], seconds: float) -> None:
    """Calls a function. Raises its error, or TimeoutError if it takes longer."""
    error: list[Exception] = [TimeoutError(f"no connection after {seconds:g} s")]

    def run():
        try:
            function()
            error.clear()
        except Exception as e:
            error[:] = [e]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if error:
        raise error[0]
