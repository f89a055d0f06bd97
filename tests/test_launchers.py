"""Launchers are recognized by their environment variables, and each process gets its GPUs."""

import pytest

from jgraph.errors import ConfigError
from jgraph.launchers import Launch, flags_needed, launched, num_gpus

SLURM = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "12",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "node[007-008]",
    "SLURM_STEP_TASKS_PER_NODE": "8,4",
}
# As mpirun of Open MPI 5.0.11, mpiexec of MPICH 5.0.2 and prterun set them.
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-vm-15891@1",
    "PRTE_LAUNCHED": "1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
# As torchrun of PyTorch 2.13 sets them.
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
KUBEFLOW = {
    "JAX_COORDINATOR_ADDRESS": "gpt-node-0-0.gpt:6666",
    "JAX_COORDINATOR_PORT": "6666",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
}
JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "JAX_COORDINATOR_ADDRESS": "gpt-workers-0-0.gpt:6666",
    "JAX_NUM_PROCESSES": "2",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}
URI = "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"
IPV6 = "1314521088.0;tcp6://[fe80::b9b:ac5d,2620:10d::2]:43370"


@pytest.mark.parametrize(
    ("environ", "name", "host", "process", "local"),
    [
        (SLURM, "Slurm", "node007", (12, 9), (1, 4)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "10"}, "Slurm", "node007", (10, 9), (1, 4)),
        (SLURM | {"SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "b1,a[2,4]"}, "Slurm", "b1", (12, 9), (1, 8)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "1(x12)"}, "Slurm", "node007", (12, 9), (1, 1)),
        (SLURM | {"SLURM_STEP_NODELIST": "r[1-3]-ib"}, "Slurm", "r1-ib", (12, 9), (1, 4)),
        (OPEN_MPI, "Open MPI", None, (4, 3), (1, 2)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "Open MPI", "localhost", (4, 3), (1, 4)),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": URI}, "Open MPI", "10.96.0.1", (4, 3), (1, 2)),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "9.0;tcp://10.9.0.1:34911"}, "Open MPI", "10.9.0.1", (4, 3), (1, 2)),
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": IPV6}, "Open MPI", "[fe80::b9b:ac5d]", (4, 3), (1, 2)),
        (HYDRA, "MPI", None, (2, 1), (1, 2)),
        ({"PMIX_RANK": "1", "PRTE_LAUNCHED": "1"}, "PRRTE", None, (0, 1), (0, 1)),
        (KUBEFLOW, "Kubernetes", "gpt-node-0-0.gpt", (2, 1), (0, 1)),
        (JOBSET, "Kubernetes", "gpt-workers-0-0.gpt", (2, 1), (0, 1)),
        (TORCHRUN, "torchrun", "node1", (8, 5), (1, 4)),
        # torchrun on every node of Slurm or in every pod, mpirun in an allocation, and srun with MPI.
        (SLURM | JOBSET | TORCHRUN, "torchrun", "node1", (8, 5), (1, 4)),
        (SLURM | OPEN_MPI, "Open MPI", None, (4, 3), (1, 2)),
        (SLURM | {"PMIX_RANK": "9", "PMI_SIZE": "12", "PMI_RANK": "9"}, "Slurm", "node007", (12, 9), (1, 4)),
    ],
)
def test_a_launcher_tells_the_processes_and_the_host_of_process_zero(environ, name, host, process, local):
    found = launched(environ)
    assert (found.name, (found.num_processes, found.process_id)) == (name, process)
    assert (found.local_rank, found.local_size) == local
    assert (found.coordinator.rpartition(":")[0] or None) == host


@pytest.mark.parametrize(
    "environ",
    [
        {},
        SLURM | {"SLURM_NTASKS": "1"},
        # The shell of an allocation with four tasks, and an sbatch script.
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        TORCHRUN | {"WORLD_SIZE": "1"},
        # PyTorch's variables without torchrun, and a Job of independent pods.
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"JOB_COMPLETION_INDEX": "1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        # srun of one task with PMIx.
        SLURM | {"SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"},
    ],
)
def test_one_process_has_no_launcher(environ):
    assert launched(environ) is None


def test_a_port_is_that_of_the_job_and_outside_the_ports_of_clients():
    def port(environ: dict[str, str]) -> int:
        return int(launched(environ).coordinator.rpartition(":")[2])

    # torchrun counts restarts on each machine.
    same = [TORCHRUN, TORCHRUN | {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "2"}]
    others = [TORCHRUN | {"MASTER_PORT": "29501"}, TORCHRUN | {"TORCHELASTIC_RUN_ID": "b"}]
    assert [port(environ) == port(TORCHRUN) for environ in (*same, *others)] == [True, True, False, False]
    assert port(SLURM | {"SLURM_PROCID": "0"}) == port(SLURM) != port(SLURM | {"SLURM_STEP_ID": "1"})
    assert all(60999 < port(environ) < 2**16 and port(environ) != 29500 for environ in (TORCHRUN, SLURM, *others))
    assert port(KUBEFLOW) == 6666


def launch(local_rank: int, local_size: int, **fields) -> Launch:
    return Launch("Slurm", "a:1", 16, 0, local_rank, local_size, **fields)


@pytest.mark.parametrize(
    ("process", "choice", "visible", "devices"),
    [
        (launch(0, 1), "auto", 8, None),
        (launch(3, 8), "auto", 8, (3,)),
        (launch(1, 2), "auto", 8, (4, 5, 6, 7)),
        (launch(1, 3), "auto", 8, (2, 3)),
        # The launcher shows each process its own.
        (launch(3, 8), "auto", 1, None),
        (launch(1, 2, is_bound=True), "auto", 4, None),
        # GPUs of another vendor.
        (launch(3, 8), "auto", 0, (3,)),
        (launch(3, 8), "all", 8, None),
        (launch(3, 8), "0,7", 8, (0, 7)),
    ],
)
def test_a_process_gets_its_share_of_the_gpus_of_its_machine(process, choice, visible, devices):
    assert process.devices(choice, visible) == devices


@pytest.mark.parametrize(
    ("variable", "is_bound"),
    [
        ({}, False),
        ({"SLURM_GPU_BIND": "none"}, False),
        ({"SLURM_GPU_BIND": "single:1"}, True),
        ({"SLURM_GPUS_PER_TASK": "1"}, True),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"}, True),
    ],
)
def test_slurm_may_bind_gpus_to_tasks(variable, is_bound):
    assert launched(SLURM | variable).is_bound is is_bound


@pytest.mark.parametrize(("shown", "count"), [(None, 8), ("", 0), ("3", 1), ("0,1,2", 3), ("GPU-5d2c,GPU-77aa", 2)])
def test_cuda_restricts_the_visible_gpus(shown, count):
    assert num_gpus({} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}, 8) == count


@pytest.mark.parametrize(
    ("environ", "needed"),
    [
        (OPEN_MPI, "`distributed.num_processes` $OMPI_COMM_WORLD_SIZE and `distributed.process_id` $OMPI_COMM_WORLD_RANK"),
        (HYDRA, "`distributed.num_processes` $PMI_SIZE and `distributed.process_id` $PMI_RANK"),
        ({"PMIX_RANK": "1", "PRTE_LAUNCHED": "1"}, "`distributed.process_id` $PMIX_RANK"),
    ],
)
def test_a_launcher_without_an_address_needs_flags_that_the_error_names(environ, needed):
    error = flags_needed(launched(environ))
    assert isinstance(error, ConfigError)
    assert error.field == "distributed.coordinator"
    assert str(error).startswith("`distributed.coordinator` is None: must be HOST:PORT of process 0, because ")
    assert needed in str(error)
