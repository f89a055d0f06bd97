"""Devices of a CPU run the collectives of a program in one order."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import jgraph
from jgraph.device import ordered
from jgraph.dispatch import check_devices
from tests import tiny
from tests.train.test_distributed import free_port

FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler"


def test_the_flag_for_one_order_is_added_to_those_of_the_user():
    assert ordered("") == f"{FLAG}=false"
    assert ordered("--xla_dump_to=dump") == f"--xla_dump_to=dump {FLAG}=false"
    assert ordered(f"{FLAG}=true") == f"{FLAG}=true"


@pytest.mark.long
@pytest.mark.parametrize("simulated", [{"JAX_NUM_CPU_DEVICES": "2"}, {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}])
def test_simulated_devices_start_with_one_order(simulated):
    code = "import os, jax, jgraph.dispatch as d; d.check_devices(); print(jax.device_count(), os.environ['XLA_FLAGS'])"
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    out = subprocess.run([sys.executable, "-c", code], env=kept | simulated, check=True, capture_output=True, text=True).stdout
    assert out.split() == ["2", *simulated.get("XLA_FLAGS", "").split(), f"{FLAG}=false"]


@pytest.mark.long
@pytest.mark.once
def test_a_process_with_one_device_of_several_starts_with_one_order():
    code = f"import os, jax, jgraph.dispatch as d; jax.distributed.initialize('localhost:{free_port()}', 1, 0); "
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    command = [sys.executable, "-c", code + "d.check_devices(); print(jax.device_count(), os.environ['XLA_FLAGS'])"]
    out = subprocess.run(command, env=kept, check=True, capture_output=True, text=True).stdout
    assert out.split() == ["1", f"{FLAG}=false"]


def test_a_partitioned_step_warns_if_the_backend_has_started_without_the_flag(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    jax.devices()
    check_devices()
    assert os.environ["XLA_FLAGS"] == "", "XLA would not read it"
    params = {"w": jnp.zeros((8, 4))}
    strategy = jgraph.TensorParallel(
        jgraph.Replicated(jax.make_mesh((1, 2), ("data", "tensor")), params), {"w": jgraph.Split(axis=1)}
    )
    step = jgraph.train_step(lambda params, batch, key: jnp.mean(batch @ params["w"]), optax.sgd(1.0), strategy)
    with pytest.warns(UserWarning, match=rf"may wait for each other forever: set XLA_FLAGS={FLAG}=false"):
        step.compile(jnp.ones((4, 8)))


@pytest.mark.long
@pytest.mark.once
def test_a_run_with_independent_collectives_in_a_loop_does_not_hang(tmp_path):
    """A soak: without the flag, 8 of 11 long runs of this layout hung on one machine, and none on another."""
    layout = ("--model.scan-layers", "--model.num-layers", "2", "--remat", "layer", "--tp", "2", "--cp", "2")
    flags = ("--data", "synthetic", "--steps", "600", "--log-every", "100", "--eval-every", "600", "--hang-seconds", "60")
    process = tiny.start(tmp_path / "run", *layout, *flags, num_devices=4, XLA_FLAGS="")
    assert tiny.finish(process, seconds=400)[::2] == (0, "")
    assert tiny.entries(tmp_path / "run")[-1]["step"] == 600
