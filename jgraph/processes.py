"""Several processes as one run: connected before a backend starts, and of one mind wherever they could go different ways.

Arguments, Slurm or Open MPI say which processes there are; `jax.distributed` connects them. Alone, nothing here does anything.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from jgraph.errors import ConfigError

# A job's processes start within this of one another; where one ends with an error, the others end this much later.
_PATIENCE_SECONDS = 300
_SHUTDOWN_SECONDS = 60


def launcher(environ: Mapping[str, str]) -> Literal["slurm", "ompi"] | None:
    """Returns jax's name for the launcher that started this process as one of several; None if none did."""
    # In the shell of an allocation SLURM_NTASKS counts the tasks that a step could have; the step that the shell is has one.
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    if {"SLURM_PROCID", "SLURM_STEP_NODELIST"} <= environ.keys() and int(tasks) > 1:
        return "slurm"
    return "ompi" if int(environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1 else None


def connect(
    *,
    setup: Literal["auto", "off"] = "auto",
    coordinator: str = "",
    num_processes: int | None = None,
    process_id: int | None = None,
    patience: float = _PATIENCE_SECONDS,
) -> None:
    """Connects to the other processes, if there are any and nobody has done so before. No backend may have been started.

    Under Slurm and Open MPI a process gets one GPU, that of its place on the machine; with a coordinator it gets all it sees.

    Args:
        setup: connect where arguments, Slurm or Open MPI tell of other processes, or never.
        coordinator: HOST:PORT at which process 0 can be reached; with it, the next two.
        num_processes: processes of the run.
        process_id: which of them this one is, from 0.
        patience: seconds to wait for the others.

    Raises:
        ConfigError: the others are not there in time, the port is taken, or the environment does not say enough.
    """
    found = launcher(os.environ) if setup == "auto" and not coordinator else None
    if jax.distributed.is_initialized() or not (coordinator or found):
        return
    if found == "ompi" and "OMPI_MCA_orte_hnp_uri" not in os.environ:
        raise ConfigError(
            "`distributed.coordinator` is None: must be given, because Open MPI 5 does not say where process 0 is; as must "
            "`distributed.num_processes` $OMPI_COMM_WORLD_SIZE and `distributed.process_id` $OMPI_COMM_WORLD_RANK",
            field="distributed.coordinator",
        )
    where = f"`distributed.coordinator` is {coordinator}" if coordinator else f"started by {found}"
    if process_id == 0:
        _check_free(coordinator)
    # SIGTERM is a wish to stop, which the trainer grants; jax's service would take it for itself.
    jax.config.update("jax_enable_preemption_service", False)
    error = _initialize(
        patience,
        coordinator_address=coordinator or None,
        num_processes=num_processes,
        process_id=process_id,
        cluster_detection_method=found or "deactivate",
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )
    if error:
        raise ConfigError(
            f"{where}: the processes could not be connected: {error}; check that all of them are running, that "
            "`distributed.coordinator` HOST:PORT, if given, is the same for all, and that the others reach that host and port",
            field="distributed.coordinator",
        )


def devices_of_ranks(count: int, *, flags: str) -> list[Any]:
    """Returns a `jax.Device` for each rank, as many of every process, in the order of the processes.

    Args:
        count, flags: how many ranks, and the flags that ask for them, for the error.

    Raises:
        ConfigError: there are fewer devices, or some process would have none or fewer than another.
    """
    processes, available = jax.process_count(), jax.device_count()
    needs = f"{flags} needs {count} device{'s' if count > 1 else ''}"
    if count > available:
        raise ConfigError(f"{needs}, but only {available} {'is' if available == 1 else 'are'} available", field="dp")
    if count % processes:
        raise ConfigError(f"{needs}: must be a multiple of the {processes} processes", field="dp")
    return [device for process in range(processes) for device in jax.local_devices(process)[: count // processes]]


def is_process_zero() -> bool:
    """Tells whether this process is the one that writes files and talks."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def all_gather_scalar(value: int) -> list[int]:
    """Returns the int32 that each process gives, by process: the same list for all, once all have given theirs."""
    if not jax.distributed.is_initialized():
        return [value]
    return np.ravel(multihost_utils.process_allgather(np.int32(value))).tolist()


@contextlib.contextmanager
def all_or_raise() -> Iterator[None]:
    """Raises on every process if any process raised inside, where none may wait for another.

    Raises:
        ConfigError: another process raised, and this one did not.
    """
    try:
        yield
    except Exception:
        all_gather_scalar(1)
        raise
    failed = [process for process, has_failed in enumerate(all_gather_scalar(0)) if has_failed]
    if failed:
        raise ConfigError(f"process {failed[0]} cannot go on, and says why; so this one does not either", field="")


def _initialize(patience: float, **arguments: Any) -> str:
    """Runs jax.distributed.initialize, and returns its error; empty if it has none."""
    # In a thread, with no time-out of its own: jax would abort the process.
    problem = [f"no connection after {patience:g} s"]

    def initialize():
        try:
            jax.distributed.initialize(initialization_timeout=10 * int(patience) + 60, **arguments)
            problem[0] = ""
        except Exception as e:
            problem[0] = " ".join(str(e).split())

    thread = threading.Thread(target=initialize, daemon=True)
    thread.start()
    thread.join(patience)
    return problem[0]


def _check_free(coordinator: str) -> None:
    port = int(coordinator.rpartition(":")[2])
    try:
        socket.create_server(("", port)).close()  # jax would crash
    except OSError as e:
        raise ConfigError(
            f"`distributed.coordinator` is {coordinator}: must have a port that is free on this machine ({e.strerror})",
            field="distributed.coordinator",
        ) from e
