"""Connects the processes of a run, and lets them agree on values and errors.

Arguments, Slurm or Open MPI identify the processes, and `jax.distributed` connects them before a backend starts. In a run of
one process every function here returns at once.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from jgraph.errors import ConfigError
from jgraph.types import JaxDevice

# The processes of a job start within this time of each other.
_PATIENCE_SECONDS = 300
# If one process ends with an error, the others end after this time.
_SHUTDOWN_SECONDS = 60


def launcher(environ: Mapping[str, str]) -> Literal["slurm", "ompi"] | None:
    """Returns the launcher that started this process as one of several; None if there is none."""
    # In the shell of an allocation, SLURM_NTASKS is the number of tasks that a step may have, but the shell is a single task.
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    if {"SLURM_PROCID", "SLURM_STEP_NODELIST"} <= environ.keys() and int(tasks) > 1:
        return "slurm"
    return "ompi" if int(environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1 else None


def connect(
    *,
    setup: Literal["auto", "off"] = "auto",  # off: ignore Slurm and Open MPI, so that only a coordinator connects
    coordinator: str = "",  # HOST:PORT of process 0, the same for all; then the next two are required
    num_processes: int | None = None,
    process_id: int | None = None,
    patience: float = _PATIENCE_SECONDS,  # for the other processes
) -> None:
    """Connects to the other processes, if any, and blocks until all have called it. Call it before JAX's backend starts."""
    # Under Slurm and Open MPI, a process gets one GPU, by its local rank. With a coordinator it gets all visible GPUs.
    found = launcher(os.environ) if setup == "auto" and not coordinator else None
    if jax.distributed.is_initialized() or not (coordinator or found):
        return
    if found == "ompi" and "OMPI_MCA_orte_hnp_uri" not in os.environ:
        raise ConfigError(
            "`distributed.coordinator` is None: must be HOST:PORT of process 0, because Open MPI 5 does not provide it; "
            "also pass `distributed.num_processes` $OMPI_COMM_WORLD_SIZE and `distributed.process_id` $OMPI_COMM_WORLD_RANK",
            field="distributed.coordinator",
        )
    source = f"`distributed.coordinator` is {coordinator}" if coordinator else f"started by {found}"
    if process_id == 0:
        try:
            socket.create_server(("", int(coordinator.rpartition(":")[2]))).close()  # otherwise JAX crashes
        except OSError as e:
            must = f"must have a port that is free on this machine ({e.strerror})"
            raise ConfigError(f"{source}: {must}", field="distributed.coordinator") from e
    # The trainer handles SIGTERM. JAX's service would intercept it.
    jax.config.update("jax_enable_preemption_service", False)
    initialize = partial(
        jax.distributed.initialize,
        coordinator_address=coordinator or None,
        num_processes=num_processes,
        process_id=process_id,
        cluster_detection_method=found or "deactivate",
        # JAX aborts the process when its own timeout expires.
        initialization_timeout=10 * int(patience) + 60,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )
    error = _error_of(initialize, patience)
    if error:
        raise ConfigError(
            f"{source}: the processes could not be connected: {error}; check that all of them are running, that "
            "`distributed.coordinator` HOST:PORT, if given, is the same for all, and that the others reach that host and port",
            field="distributed.coordinator",
        )


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


def _error_of(initialize: Callable[[], None], patience: float) -> str:
    """Runs a function in a thread. Returns its error, or an empty string."""
    problem = [f"no connection after {patience:g} s"]

    def run():
        try:
            initialize()
            problem[0] = ""
        except Exception as e:
            problem[0] = " ".join(str(e).split())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(patience)
    return problem[0]
