"""Processes with one GPU each have the losses of one process with all, and stop together with a checkpoint that one reads."""

import functools
import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests import tiny
from tests.gpu import ranks
from tests.profile.checks import check
from tests.train.test_distributed import finish, free_port, wait_for_steps

pytestmark = pytest.mark.gpu


@functools.cache
def count() -> int:
    """Returns the number of processes: 4, or 2 with fewer GPUs."""
    gpus = len(jax.devices())
    if gpus < 2:
        pytest.skip(f"needs 2 GPUs, found {gpus}")
    return 4 if gpus >= 4 else 2


def start(*arguments: str) -> list[subprocess.Popen[str]]:
    """Starts processes with the variables of torchrun, so that each uses the GPU of its number."""
    size = str(count())
    environ = os.environ | {
        "TORCHELASTIC_RUN_ID": "tests",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "XLA_CLIENT_MEM_FRACTION": "0.1",  # this process has most of the memory
        "JAX_NUM_CPU_DEVICES": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count())
    ]


def test_processes_with_one_gpu_each_have_the_losses_of_one_process_with_all():
    ended = finish(start("-m", "tests.gpu.ranks"), seconds=150)
    configs = ranks.layouts(count())
    dense, experts = (ranks.losses(configs[name]) for name in ("dp", "ep"))
    for code, out, err in ended:
        assert code == 0, err
        found = json.loads(out.splitlines()[-1])
        assert found.keys() == configs.keys()
        for name, values in found.items():
            np.testing.assert_allclose(values, experts if name == "ep" else dense, rtol=1e-5, err_msg=name)


def test_stopped_processes_leave_a_profile_and_a_checkpoint_that_one_process_resumes(tmp_path, capsys):
    run_dir = tmp_path / "run"
    flags = ("--batch-size", str(count()), "--eval-every", "100000", "--optimizer.warmup-steps", "1")
    command = ("-m", "jgraph.train", *tiny.FLAGS, *flags, "--run-dir", str(run_dir), "--fsdp", str(count()))
    processes = start(*command, "--steps", "100000", "--profile", "3:6")
    wait_for_steps(run_dir, processes)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    ended = finish(processes, seconds=60)
    for code, _, err in ended:
        assert code == 143, err
    out = ended[0][1]
    assert f"of {count()} processes" in out
    *_, last = tiny.entries(run_dir)
    assert f"stopped by SIGTERM at step {last['step']}" in out
    check(json.loads((run_dir / "profile" / "profile.json").read_text()))
    assert tiny.train(run_dir, *flags, "--steps", str(last["step"] + 1), "--optimizer.extend", "constant") == 0
    assert f"resumed from step {last['step']}\n" in capsys.readouterr().out
    *_, before, after = tiny.entries(run_dir)
    assert before == last
    assert after["loss"] < tiny.entries(run_dir)[0]["loss"]
