"""The files for cluster managers have the fields that belong together, and the command lines that they start are valid."""

import re
import shlex
import subprocess

import pytest
import yaml

from jgraph.launchers import launched
from jgraph.train.__main__ import parse
from jgraph.train.config import TrainConfig
from tests.tiny import ROOT

CLUSTER = ROOT / "examples/cluster"
GPUS = 8
# Values of variables in command lines.
VALUES = {"shared": "/shared", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}


def config_of(script: str) -> TrainConfig:
    """Parses the command line of the training in a shell script."""
    script = re.sub(r"\$\(.*\):", "10.0.0.1:", script.replace("\\\n", " "))
    (line,) = re.findall(r"-m jgraph\.train (.*)$", script, re.MULTILINE)
    config = parse(shlex.split(re.sub(r"\$\{?(\w+)\}?", lambda variable: VALUES[variable[1]], line)))
    assert config is not None
    return config


def assert_whole(config: TrainConfig, gpus: int) -> None:
    """Checks that a run uses all GPUs, on shared disks."""
    assert config.parallel.fsdp == gpus
    assert config.preset == "gpt-1b3"


@pytest.mark.parametrize("name", ["slurm.sbatch", "torchrun.sh"])
def test_a_script_has_no_syntax_errors(name):
    done = subprocess.run(["bash", "-n", str(CLUSTER / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_file_of_slurm_starts_one_process_per_node_with_all_its_gpus():
    script = (CLUSTER / "slurm.sbatch").read_text()
    fields = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script, re.MULTILINE))
    assert len(fields) == script.count("#SBATCH")
    assert (fields["ntasks-per-node"], fields["gpus-per-node"]) == ("1", str(GPUS))
    assert {"requeue", "time", "output"} <= fields.keys()
    assert fields["signal"].startswith("TERM@")
    assert script.index("#SBATCH --output") < script.index("shared=")
    config = config_of(script)
    assert_whole(config, int(fields["nodes"]) * GPUS)
    assert config.output.run_dir.startswith("/shared/")
    assert config.compile.compile_cache.startswith("/shared/")
    found = launched(
        {
            "SLURM_NTASKS": fields["nodes"],
            "SLURM_PROCID": "1",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "1",
            "SLURM_STEP_NODELIST": "node[01-02]",
            "SLURM_STEP_TASKS_PER_NODE": f"1(x{fields['nodes']})",
        }
    )
    assert found.devices("auto", GPUS) is None


def test_the_file_of_kubernetes_tells_each_pod_its_number_and_the_first_pod():
    file = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())
    assert (file["kind"], file["apiVersion"]) == ("JobSet", "jobset.x-k8s.io/v1alpha2")
    (job,) = file["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (spec["completionMode"], spec["backoffLimit"], job["replicas"]) == ("Indexed", 0, 1)
    (container,) = spec["template"]["spec"]["containers"]
    name = file["metadata"]["name"]
    found = launched({each["name"]: each["value"] for each in container["env"]} | {"JOB_COMPLETION_INDEX": "1"})
    assert found.coordinator.rpartition(":")[0] == f"{name}-{job['name']}-0-0.{name}"
    assert found.num_processes == spec["completions"] == spec["parallelism"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == GPUS
    assert found.devices("auto", gpus) is None
    config = config_of(shlex.join(container["command"]))
    assert_whole(config, found.num_processes * gpus)
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert config.output.run_dir.startswith(f"{mounts['shared']}/")
    # Only errors of configuration stop the set.
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [2]}
    assert rule["action"] == "FailJob"
    (policy,) = file["spec"]["failurePolicy"]["rules"]
    assert policy == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}


def test_the_file_of_skypilot_passes_the_processes_by_flags():
    file = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
    config = config_of(file["run"])
    assert_whole(config, file["num_nodes"] * int(file["resources"]["accelerators"].partition(":")[2]))
    assert file["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    (mount,) = file["volumes"]
    assert config.output.run_dir.startswith(f"{mount}/")
    distributed = config.distributed
    assert (distributed.coordinator, distributed.num_processes, distributed.process_id) == ("10.0.0.1:6666", 2, 1)


def test_the_line_of_torchrun_starts_one_process_per_gpu():
    script = (CLUSTER / "torchrun.sh").read_text()
    (count,) = re.findall(r"--nproc-per-node (\d+)", script)
    assert_whole(config_of(script), int(count))
