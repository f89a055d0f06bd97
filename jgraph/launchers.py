"""What the launcher of a process says about it, from environment variables: its number, process 0, and its GPUs. No JAX."""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jgraph.errors import ConfigError

Name = Literal["flags", "torchrun", "Open MPI", "Slurm", "MPI", "PRRTE", "Kubernetes"]
# Outside the range from which Linux takes the ports of clients, which ends at 60999.
_FIRST_PORT = 61440


@dataclass(frozen=True)
class Launch:
    """A process of a run of several processes."""

    name: Name
    # HOST:PORT of process 0; empty if unknown
    coordinator: str
    # 0 if unknown
    num_processes: int
    process_id: int
    # the number of this process on its machine, and the number of processes there; 0 and 1 if unknown
    local_rank: int = 0
    local_size: int = 1
    # True if the launcher shows this process its own GPUs only
    is_bound: bool = False

    def devices(self, choice: str, visible: int) -> tuple[int, ...] | None:
        """Returns the GPUs of this process among the `visible` ones; None for all. `choice` is `auto`, `all` or indices."""
        if choice not in ("auto", "all"):
            return tuple(map(int, choice.split(",")))
        # No GPU is visible on a machine without GPUs, or with those of another vendor.
        share = visible // self.local_size if visible else 1
        # With fewer visible GPUs than processes, the launcher has bound this process to its own.
        if choice == "all" or self.local_size == 1 or self.is_bound or not share:
            return None
        return tuple(range(self.local_rank * share, (self.local_rank + 1) * share))


def launched(environ: Mapping[str, str]) -> Launch | None:
    """Returns what the launcher says about this process; None if there is none, or if it has started only one."""
    # A launcher that starts another leaves its variables, so the innermost comes first: torchrun and mpirun run under Slurm.
    # srun sets the variables of MPI, too.
    for launch in (_torchrun, _open_mpi, _slurm, _mpi, _kubernetes):
        if (found := launch(environ)) and found.num_processes != 1:
            return found
    return None


def flags_needed(launch: Launch) -> ConfigError:
    """Returns the error about a launcher that does not tell the address of process 0."""
    why, size, rank = _WITHOUT_ADDRESS[launch.name]
    return ConfigError(
        f"`distributed.coordinator` is None: must be HOST:PORT of process 0, because {why}; also pass "
        f"`distributed.num_processes` {size} and `distributed.process_id` {rank}",
        field="distributed.coordinator",
    )


_WITHOUT_ADDRESS = {
    "Open MPI": ("Open MPI 5 does not provide it on several machines", "$OMPI_COMM_WORLD_SIZE", "$OMPI_COMM_WORLD_RANK"),
    "MPI": ("mpiexec does not provide it", "$PMI_SIZE", "$PMI_RANK"),
    "PRRTE": ("prterun does not provide it", "(the -n of prterun)", "$PMIX_RANK"),
}


def _torchrun(environ: Mapping[str, str]) -> Launch | None:
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    # The agent listens on MASTER_PORT itself. Its count of restarts differs between machines, and so is not part of the port.
    port = _port(environ["TORCHELASTIC_RUN_ID"], environ["MASTER_PORT"])
    return Launch(
        "torchrun",
        f"{environ['MASTER_ADDR']}:{port}",
        int(environ["WORLD_SIZE"]),
        int(environ["RANK"]),
        int(environ["LOCAL_RANK"]),
        int(environ["LOCAL_WORLD_SIZE"]),
    )


def _open_mpi(environ: Mapping[str, str]) -> Launch | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    size, local_size = int(environ["OMPI_COMM_WORLD_SIZE"]), int(environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    # Open MPI 4 has the addresses of mpirun, such as 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911, or tcp6://[fe80::1,…]:34911.
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    host = re.search(r"tcp6?://\[?([^,\]]+?)(?:[,\]]|:\d+$)", uri)
    coordinator = ""
    if host:
        coordinator = f"{_bracketed(host[1])}:{_port(uri.partition(';')[0])}"
    elif size == local_size:
        coordinator = f"localhost:{_port(environ.get('PMIX_NAMESPACE', ''))}"
    rank, local_rank = int(environ["OMPI_COMM_WORLD_RANK"]), int(environ["OMPI_COMM_WORLD_LOCAL_RANK"])
    return Launch("Open MPI", coordinator, size, rank, local_rank, local_size)


def _slurm(environ: Mapping[str, str]) -> Launch | None:
    if not {"SLURM_PROCID", "SLURM_STEP_NODELIST"} <= environ.keys():
        return None
    # In the shell of an allocation, SLURM_NTASKS is the number of tasks that a step may have, but the shell is a single task.
    tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))
    port = _port(*(environ.get(f"SLURM_{name}", "") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")))
    sizes = _counts(environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "1")))
    node = int(environ.get("SLURM_NODEID", "0"))
    return Launch(
        "Slurm",
        f"{_first_host(environ['SLURM_STEP_NODELIST'])}:{port}",
        int(tasks),
        int(environ["SLURM_PROCID"]),
        int(environ.get("SLURM_LOCALID", "0")),
        sizes[node] if node < len(sizes) else 1,
        is_bound="SLURM_GPUS_PER_TASK" in environ
        or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
        or environ.get("SLURM_GPU_BIND", "none") != "none",
    )


def _mpi(environ: Mapping[str, str]) -> Launch | None:
    if "PMI_SIZE" not in environ:
        # PRRTE without Open MPI.
        is_prrte = "PRTE_LAUNCHED" in environ and "OMPI_COMM_WORLD_SIZE" not in environ
        return Launch("PRRTE", "", 0, int(environ["PMIX_RANK"])) if is_prrte else None
    local = int(environ.get("MPI_LOCALRANKID", "0")), int(environ.get("MPI_LOCALNRANKS", "1"))
    return Launch("MPI", "", int(environ["PMI_SIZE"]), int(environ["PMI_RANK"]), *local)


def _kubernetes(environ: Mapping[str, str]) -> Launch | None:
    # Kubeflow's runtime `jax-distributed` sets the variables of JAX. In a JobSet, the file sets the address and the number, and
    # Kubernetes the index. A pod has one process.
    process = environ.get("JAX_PROCESS_ID", environ.get("JOB_COMPLETION_INDEX"))
    if process is None or not {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES"} <= environ.keys():
        return None
    return Launch("Kubernetes", environ["JAX_COORDINATOR_ADDRESS"], int(environ["JAX_NUM_PROCESSES"]), int(process))


def num_gpus(environ: Mapping[str, str], on_machine: int) -> int:
    """Returns the GPUs of a machine that a process may use, by the variables of CUDA."""
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    return on_machine if shown is None else len([name for name in shown.split(",") if name])


def _port(*names: str) -> int:
    """Returns a port for a job. The same for all its processes, and probably not that of another job."""
    return _FIRST_PORT + zlib.crc32(" ".join(names).encode()) % 2**12


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _first_host(nodes: str) -> str:
    """Returns the first host of a list of Slurm, such as `node[01-03,7]-ib,login`."""
    first = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^\[,]*)", nodes)
    assert first is not None  # every part may be empty
    return "".join(part or "" for part in first.groups())


def _counts(text: str) -> list[int]:
    """Expands counts of Slurm, such as `8(x2),4`."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]
