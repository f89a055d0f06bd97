"""Runs on several devices and processes have the results of one device, print once, and stop together."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jgraph import processes
from jgraph.checkpoint.store import Checkpoints
from jgraph.data import Batches
from jgraph.errors import ConfigError
from jgraph.launchers import Launch
from jgraph.processes import Connection, connect, devices_of_ranks, unused_gpus
from jgraph.train import _trainer
from jgraph.train.__main__ import main
from jgraph.train._strategy import make_mesh
from jgraph.train.config import DistributedConfig, OptimizerConfig, ParallelConfig, TrainConfig
from jgraph.train.rundir import RunDir
from jgraph.train.setup import TrainSetup
from jgraph_models.gpt import GPTConfig
from tests import tiny
from tests.train import test_capacity as capacity

pytestmark = pytest.mark.long

FLAGS = (*tiny.FLAGS, "--model.compute-dtype", "float32", "--num-microbatches", "2", "--optimizer.eps", "1e-3")

# --- Process settings ---

WRONG = [
    (
        {"coordinator": "a:1", "num_processes": 2},
        "process_id",
        "`distributed.process_id` is None: must be set together with `distributed.coordinator`",
    ),
    (
        {"num_processes": 2, "process_id": 0},
        "coordinator",
        "`distributed.coordinator` is None: must be set together with `distributed.num_processes`",
    ),
    (
        {"process_id": 0},
        "coordinator",
        "`distributed.coordinator` is None: must be set together with `distributed.process_id`",
    ),
    (
        {"coordinator": "a:1", "num_processes": 2, "process_id": 2},
        "process_id",
        "`distributed.process_id` is 2: must be at least 0 and less than `distributed.num_processes` 2",
    ),
    (
        {"coordinator": "a:1", "num_processes": 2, "process_id": -1},
        "process_id",
        "`distributed.process_id` is -1: must be at least 0 and less than `distributed.num_processes` 2",
    ),
    (
        {"coordinator": "a:1", "num_processes": 0, "process_id": 0},
        "num_processes",
        "`distributed.num_processes` is 0: must be positive",
    ),
    (
        {"coordinator": "a:1", "num_processes": 2, "process_id": 0, "setup": "off"},
        "setup",
        "`distributed.setup` is off: must be auto if `distributed.coordinator` is set",
    ),
    ({"timeout": 0.5}, "timeout", "`distributed.timeout` is 0.5: must be at least 1 and at most 3600"),
    *(
        (
            {"local_devices": devices},
            "local_devices",
            f"`distributed.local_devices` is {devices}: must be auto, all, or different indices of GPUs such as 0,1",
        )
        for devices in ("", "none", "0,", "-1", "1,1", "0 1")
    ),
    *(
        (
            {"coordinator": address, "num_processes": 2, "process_id": 0},
            "coordinator",
            f"`distributed.coordinator` is {address}: must be HOST:PORT of process 0",
        )
        for address in ("localhost", "localhost:", ":1234", "localhost:none", "localhost:0", "localhost:65536")
    ),
]


@pytest.mark.parametrize(("fields", "field", "message"), WRONG)
def test_wrong_process_settings_are_refused_with_the_field_to_change(fields, field, message):
    with pytest.raises(ConfigError) as error:
        DistributedConfig(**fields)
    assert (error.value.field, str(error.value)) == (f"distributed.{field}", message)


def test_a_launcher_without_the_address_of_process_zero_needs_flags(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="Open MPI 5 does not provide it") as error:
        connect()
    assert "`distributed.process_id` $OMPI_COMM_WORLD_RANK" in str(error.value)
    assert connect(setup="off") is None
    assert not jax.distributed.is_initialized()


def test_a_port_in_use_is_refused():
    with socket.create_server(("", 0)) as server:
        coordinator = f"localhost:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"is {coordinator}: must have a port that is free"):
            connect(coordinator=coordinator, num_processes=2, process_id=0)


def test_a_gpu_that_is_not_visible_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="is 2: must be less than the number of visible GPUs, 2"):
        connect(coordinator=f"localhost:{free_port()}", num_processes=2, process_id=0, local_devices="2")


def test_a_failed_connection_is_reported_in_one_line():
    code = """if True:
        from jgraph.train.config import DistributedConfig
        from jgraph.processes import connect
        from jgraph.errors import ConfigError
        try:
            connect(coordinator="localhost:1", num_processes=2, process_id=1, patience=1)
        except ConfigError as e:
            print(e)
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(
        "`distributed.coordinator` is localhost:1: the processes could not be connected: no connection"
    )
    assert len(run.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("wait", "reason"), [(0, "UNAVAILABLE: no answer of a"), (60, r"no connection after 0\.05 s")], ids=["an error", "silence"]
)
def test_a_service_of_jax_that_does_not_start_is_reported_in_one_line(monkeypatch, wait, reason):
    def initialize(**_):
        time.sleep(wait)
        raise RuntimeError("UNAVAILABLE: no answer\n of a")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    coordinator = f"localhost:{free_port()}"
    message = rf"^`distributed.coordinator` is {coordinator}: the processes could not be connected: {reason}; check that all"
    with pytest.raises(ConfigError, match=message) as error:
        connect(coordinator=coordinator, num_processes=1, process_id=0, patience=0.05)
    assert error.value.field == "distributed.coordinator"


@pytest.mark.parametrize(
    ("variables", "unused"),
    [({"SLURM_GPUS_ON_NODE": "8"}, 6), ({"CUDA_VISIBLE_DEVICES": "3,1,0"}, 1), ({"SLURM_GPUS_ON_NODE": "1"}, 0)],
)
def test_gpus_of_this_machine_that_no_process_uses_are_counted(monkeypatch, variables, unused):
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    assert unused_gpus() == 0
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert unused_gpus() == unused


@pytest.mark.parametrize(
    ("platforms", "backend", "visible", "count"),
    [(None, "cpu", None, 2), (None, "cpu", "1", 1), (None, "cpu", "", 0), (None, "gpu", None, 0), ("cpu", "cpu", None, 0)],
)
def test_gpus_that_jax_does_not_start_are_counted(monkeypatch, tmp_path, platforms, backend, visible, count):
    for i in range(2):
        (tmp_path / f"nvidia{i}").touch()
    monkeypatch.setattr(processes, "_GPU_FILES", f"{tmp_path}/nvidia[0-9]*")
    chosen = SimpleNamespace(jax_platforms=platforms)
    monkeypatch.setattr(processes, "jax", SimpleNamespace(config=chosen, default_backend=lambda: backend))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert processes.refused_gpus() == count


def test_the_header_of_a_run_names_its_processes_and_warns_of_unused_gpus(monkeypatch):
    monkeypatch.setattr(_trainer, "unused_gpus", lambda: 6)
    monkeypatch.setattr(_trainer, "refused_gpus", lambda: 2)
    monkeypatch.setattr(_trainer, "_devices", lambda setup: "2 devices")
    lines: list[str] = []
    reporter: Any = SimpleNamespace(begins=lambda *_, **__: None, line=lines.append, warn=lines.append)
    layout = SimpleNamespace(own=SimpleNamespace(params={}))
    setup: Any = SimpleNamespace(config=TrainConfig(), step=SimpleNamespace(bound=SimpleNamespace(layout=layout)))
    _trainer._describe(setup, None, Connection(Launch("torchrun", "a:1", 2, 1), None, {}), ["", "a line"], reporter)  # pyright: ignore[reportArgumentType]
    assert lines == [
        "the run uses the CPU, and this machine has 2 NVIDIA GPUs: JAX_PLATFORMS=cuda shows why JAX does not use them, "
        "JAX_PLATFORMS=cpu hides this warning",
        "processes  2, by variables of torchrun; process 1 listens at a:1 and runs on the CPU",
        "no process uses 6 of the GPUs of this machine: see `distributed.local_devices`",
        "a line",
    ]


def test_a_run_of_one_process_with_a_coordinator_has_no_mesh_on_one_device(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert make_mesh(ParallelConfig(), is_pipeline=False, is_sharded=False) is None


# --- Several devices of one process ---


@pytest.mark.parametrize("dp", [0, 3, 4])
def test_a_number_of_data_ranks_that_does_not_divide_a_microbatch_is_refused(dp):
    with pytest.raises(ConfigError, match=f"`dp` is {dp}: must be") as error:
        TrainConfig.from_fields(batch_size=12, num_microbatches=6, dp=dp)
    assert error.value.field == "dp"


def test_more_ranks_than_devices_are_refused():
    with pytest.raises(ConfigError) as error:
        TrainSetup.from_config(TrainConfig.from_fields(dp=32))
    assert str(error.value) == f"`dp` 32 needs 32 devices, but only {jax.device_count()} are available"


def test_more_ranks_than_one_cpu_are_refused_with_the_variable_that_simulates_them(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"only 1 is available; .* JAX_NUM_CPU_DEVICES=4$"):
        devices_of_ranks(4, flags="`fsdp` 4")


def test_a_number_of_ranks_that_processes_cannot_share_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    with pytest.raises(ConfigError, match=r"^`dp` 4 needs 4 devices: must be a multiple of the 3 processes$") as error:
        devices_of_ranks(4, flags="`dp` 4")
    assert error.value.field == "dp"


def weights_and_losses(dp: int) -> tuple[list[np.ndarray], list[float]]:
    """Trains a small model for five steps. Returns its weights and losses."""
    config = TrainConfig.from_fields(
        steps=5,
        batch_size=16,
        num_microbatches=4,
        seq_len=16,
        dp=dp,
        model=GPTConfig(num_layers=2, d_model=32, num_heads=2, num_kv_heads=2, d_ff=64, vocab_size=64, compute_dtype="float32"),
        # With AdamW's default eps, rounding decides the sign of an update if the gradient is nearly zero.
        optimizer=OptimizerConfig(eps=1e-3, warmup_steps=1, learning_rate=1e-2),
    )
    setup = TrainSetup.from_config(config)
    tokens = np.random.default_rng(0).integers(0, 64, 4000).astype(np.uint8)
    batches = Batches(tokens, batch_size=16, seq_len=16, seed=0)
    step = setup.compile_step()
    state, losses = setup.init(), []
    for i in range(config.steps):
        state, metrics = step(state, setup.step.place(batches[i]))
        losses.append(float(metrics.loss))
    assert all(leaf.sharding.device_set == set(jax.devices()[:dp]) for leaf in jax.tree.leaves(state))
    return jax.device_get(jax.tree.leaves(state.params)), losses


def test_replicas_have_the_weights_and_losses_of_one_device():
    (weights, losses), (expected, expected_losses) = weights_and_losses(4), weights_and_losses(1)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    for ours, theirs in zip(weights, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


# --- Several processes ---


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def start(run_dir, *flags: str, **how) -> list[subprocess.Popen[str]]:
    """Starts a tiny data-parallel run of two processes. Arguments as for `start_two`."""
    return start_two(*FLAGS, "--run-dir", str(run_dir), "--dp", "2", *flags, **how)


TRAIN = ("-m", "jgraph.train")


def start_two(
    *flags: str, count: int = 2, odd_flags: tuple[str, ...] = (), odd_program: tuple[int, tuple[str, ...]] = (0, TRAIN)
) -> list[subprocess.Popen[str]]:
    """Starts a run of two processes with one device each, or of `count`.

    Only the processes after the first get `odd_flags`. `odd_program` has the number of a process and its arguments of Python.
    """
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    address = ("--distributed.coordinator", f"localhost:{free_port()}", "--distributed.num-processes", str(count))
    return [
        subprocess.Popen(
            [
                *(sys.executable, *(odd_program[1] if process == odd_program[0] else TRAIN), *flags, *address),
                *("--distributed.process-id", str(process), *(odd_flags if process else ())),
            ],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(count)
    ]


def finish(processes: list[subprocess.Popen[str]], seconds: float = 120) -> list[tuple[int, str, str]]:
    """Returns exit code, stdout and stderr of each process, which must end within some time."""
    try:
        outputs = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    # Gloo, which implements collectives between CPUs, prints to stdout when it connects.
    outs = ["".join(line for line in out.splitlines(True) if not line.startswith("[Gloo]")) for out, _ in outputs]
    return [(process.returncode, out, err) for process, out, (_, err) in zip(processes, outs, outputs, strict=True)]


def assert_same_losses(run_dir, other):
    ours, theirs = (
        np.array([(step, loss, np.nan if held is None else held) for step, loss, held in tiny.losses(path)], float)
        for path in (run_dir, other)
    )
    np.testing.assert_allclose(ours, theirs, rtol=2e-6)


def amax_history(run_dir):
    """Returns the state of delayed scaling in a run's last checkpoint."""
    config = RunDir(run_dir).saved_config(field="run")
    checkpoints = Checkpoints(run_dir / "checkpoints", 1)
    _, state = checkpoints.restore_latest(TrainSetup.from_config(config).step.canonical.shapes())
    checkpoints.close()
    return jax.device_get(state.observed)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Trains one process on two devices. Returns the run directory and the flags."""
    run_dir = tmp_path_factory.mktemp("whole")
    recipe = ("--precision", "fp8", "--fp8.recipe", "delayed", "--fp8.history", "4")
    flags = (*recipe, "--steps", "8", "--eval-every", "5", "--checkpoint-every", "4")
    assert tiny.train(run_dir, *FLAGS, *flags, "--dp", "2") == 0
    return run_dir, flags


@pytest.mark.once
def test_two_processes_resume_in_fp8_like_one_process_with_two_devices(whole, tmp_path):
    # They read a checkpoint of one process, and one process reads theirs.
    shutil.copytree(whole[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "8")
    (code, out, err), quiet = finish(start(tmp_path / "run", *whole[1], "--sample-tokens", "8"))
    assert (code, err) == (0, "")
    assert quiet == (0, "", "")
    assert "on 2 cpu devices of 2 processes" in out
    assert "resumed from step 4" in out
    assert "sample text for the held-out prompt" in out
    assert_same_losses(tmp_path / "run", whole[0])
    two, one = (amax_history(path) for path in (tmp_path / "run", whole[0]))
    jax.tree.map(np.testing.assert_array_equal, two, one)
    assert (one.window > 0).all()


@pytest.mark.once
def test_two_processes_with_sharded_experts_have_the_losses_of_one_device(tmp_path):
    mixture = ("--model.mlp", "swiglu", "--model.moe.num-experts", "4", "--model.moe.d-ff", "16", "--model.moe.capacity", "2")
    losses = ("--model.moe.balance-loss", "0.1", "--model.moe.z-loss", "0.01")
    flags = (*FLAGS, *mixture, *losses, "--num-microbatches", "1", "--steps", "3", "--sample-tokens", "0", "--run-dir")
    (code, _, err), quiet = finish(start_two(*flags, str(tmp_path / "two"), "--dp", "2", "--ep", "2"))
    assert (code, err, quiet) == (0, "", (0, "", ""))
    assert main([*flags, str(tmp_path / "one")]) == 0
    assert_same_losses(tmp_path / "two", tmp_path / "one")
    norms = ([entry["grad_norm"] for entry in tiny.entries(tmp_path / run)] for run in ("two", "one"))
    np.testing.assert_allclose(*norms, rtol=2e-6)


PLACING = """if True:
    import sys
    import jax, numpy as np, optax
    import jgraph
    from jgraph.processes import connect

    process = int(sys.argv[2])
    connect(coordinator=sys.argv[1], num_processes=2, process_id=process)
    # Devices of the two processes alternate along the axis, so each feeds two separate parts of every microbatch.
    devices = np.array(jax.devices()).reshape(2, 2).T.ravel()
    strategy = jgraph.Replicated(jax.sharding.Mesh(devices, ("data",)), {"w": np.float32(0)})

    def loss(params, batch, key):
        mine = jax.numpy.sum(batch)
        return jgraph.Loss(mine * params["w"], 1.0, {"squares": jax.lax.psum(mine, "data") ** 2})

    step = jgraph.train_step(loss, optax.sgd(1.0), strategy, num_microbatches=2)
    rows, own = np.arange(16, dtype=np.float32), step.batch_rows(16)
    batch = step.place(rows[own])
    run, state = step.compile(rows), step.init({"w": np.float32(0)})
    state, metrics = run(state, batch)
    parts = [shard.data.ravel().astype(int).tolist() for shard in batch.addressable_shards]
    print("found:", [own.tolist(), parts, float(metrics.aux["squares"])])
"""


@pytest.mark.once
def test_processes_with_alternating_devices_feed_the_rows_listed_by_the_step():
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    address, how = f"localhost:{free_port()}", {"env": environ, "text": True}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [
        subprocess.Popen([sys.executable, "-c", PLACING, address, str(process)], **how, **pipes) for process in range(2)
    ]
    squares = (sum(range(8)) ** 2 + sum(range(8, 16)) ** 2) / 2
    expected = [
        [[0, 1, 4, 5, 8, 9, 12, 13], [[0, 1, 8, 9], [4, 5, 12, 13]], squares],
        [[2, 3, 6, 7, 10, 11, 14, 15], [[2, 3, 10, 11], [6, 7, 14, 15]], squares],
    ]
    for (code, out, err), found in zip(finish(processes), expected, strict=True):
        assert (code, out, err) == (0, f"found: {found}\n", "")


@pytest.mark.once
def test_two_processes_replay_a_halted_step_with_the_losses_of_one(tmp_path):
    small, large, flags = tmp_path / "small", tmp_path / "large", ("--dp", "2", "--log-every", "14")
    assert main([*capacity.flags_of(large, 1.0), *flags]) == 0
    (code, out, err), quiet = finish(start_two(*capacity.flags_of(small, 0.25), *flags))
    assert (code, err, quiet) == (0, "", (0, "", ""))
    assert capacity.replay_lines(out)
    assert_same_losses(small, large)


@pytest.mark.once
def test_a_signal_to_one_process_stops_both_at_the_same_saved_step(tmp_path):
    processes = start(tmp_path / "run", "--steps", "100000", "--log-every", "3", "--checkpoint-every", "100000")
    tiny.wait_for(lambda: tiny.num_lines(tmp_path / "run" / "metrics.jsonl") > 3, process=processes[1])
    processes[1].send_signal(signal.SIGTERM)
    (code, out, err), quiet = finish(processes)
    assert (code, err) == (143, "")
    assert quiet == (143, "", "")
    last = tiny.entries(tmp_path / "run")[-1]["step"]
    assert f"stopped by SIGTERM at step {last}" in out
    assert (tmp_path / "run" / "checkpoints" / str(last)).is_dir()


@pytest.mark.once
def test_an_error_in_one_process_ends_both_with_one_line_each(tmp_path):
    (code, out, err), (other_code, other_out, other_err) = finish(start(tmp_path / "run", odd_flags=("--data", "no/such")))
    assert (code, out, err) == (
        2,
        "reading the data\ntracing the model\n",
        "jgraph.train: error: process 1 failed and printed the reason; this one stops, too\n",
    )
    assert (other_code, other_out) == (2, "")
    assert "--data is no/such: no such file" in other_err
    assert not (tmp_path / "run").exists()


# --- A process that is gone ---

ENDLESS = ("--steps", "100000", "--num-microbatches", "1", "--checkpoint-every", "5", "--distributed.timeout", "1")


def wait_for_steps(run_dir, processes: list[subprocess.Popen[str]], count: int = 12) -> None:
    try:
        tiny.wait_for(lambda: tiny.num_lines(run_dir / "metrics.jsonl") >= count, process=processes[0], seconds=300)
    except AssertionError:  # the runs would not end
        for process in processes:
            process.kill()
        raise


def assert_ended_by(ended: tuple[int, str, str], process: int, what: str, run_dir) -> None:
    """Checks the exit code and the only line of `process`, which ends because of another one."""
    code, _, err = ended
    assert code == 75
    assert err.startswith(f"jgraph.train: error: process {process}: {what}; the last step that finished here is "), err
    (saved,) = re.findall(
        rf"; run the same command again to resume from the last complete checkpoint, {run_dir}/checkpoints/(\d+)\n$", err
    )
    assert int(saved) % 5 == 0
    assert err.count("\n") == 1


@pytest.mark.once
@pytest.mark.parametrize(("count", "killed"), [(2, 0), (3, 1)])
def test_a_killed_process_ends_the_others_with_one_line_each(tmp_path, count, killed):
    run_dir = tmp_path / "run"
    processes = start(run_dir, *ENDLESS, "--dp", str(count), "--batch-size", str(2 * count), count=count)
    wait_for_steps(run_dir, processes)
    processes[killed].kill()
    ended = finish(processes, seconds=60)
    gone = f"process {killed} is gone: it was killed, or its machine is lost"
    for process in range(count):
        if process != killed:
            assert_ended_by(ended[process], process, gone, run_dir)
    assert (run_dir / "lock").exists() == (killed == 0)


DIES = """if True:
    import os, signal, sys
    from jgraph.train import _trainer
    from jgraph.train.__main__ import main

    _trainer.check_devices = lambda: os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(main())
"""


@pytest.mark.once
def test_a_process_that_is_killed_at_the_start_ends_the_others_which_leave_the_lock_of_another_run(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "lock").write_text("another run")
    (code, _, err), _ = finish(start(run_dir, *ENDLESS, odd_program=(1, ("-c", DIES))), seconds=60)
    assert code == 75
    gone = "process 1 is gone: it was killed, or its machine is lost; no step has finished since the start"
    again = "there is no complete checkpoint: run the same command again to start from the beginning"
    assert err == f"jgraph.train: error: process 0: {gone}; {again}\n"
    assert (run_dir / "lock").read_text() == "another run"


RAISES = """if True:
    import sys
    from jgraph.train import _callbacks
    from jgraph.train.__main__ import main

    def finished(self, steps):
        if steps and steps[-1][0] >= 12:
            raise ValueError("bad luck")
        self.done = max([self.done, *(number for number, _ in steps)])

    _callbacks.Progress.finished = finished
    sys.exit(main())
"""


@pytest.mark.once
@pytest.mark.parametrize("raises", [0, 1])
def test_an_exception_in_one_process_is_printed_there_and_ends_the_other_with_one_line(tmp_path, raises):
    run_dir = tmp_path / "run"
    ended = finish(start(run_dir, *ENDLESS, "--dp", "2", odd_program=(raises, ("-c", RAISES))), seconds=60)
    code, _, err = ended[raises]
    assert code == 1
    assert err.splitlines()[-1] == "ValueError: bad luck"
    assert_ended_by(ended[1 - raises], 1 - raises, f"process {raises} ended with an error, which it prints", run_dir)


@pytest.mark.once
def test_a_stopped_process_ends_the_others_by_the_time_limit_for_hangs(tmp_path):
    run_dir = tmp_path / "run"
    processes = start(run_dir, *ENDLESS, "--dp", "2", "--hang-seconds", "5")
    wait_for_steps(run_dir, processes)
    processes[1].send_signal(signal.SIGSTOP)
    # Longer than `--distributed.timeout`, after which the other is lost only if its machine does not answer.
    processes[0].wait(60)
    processes[1].send_signal(signal.SIGCONT)
    (code, _, err), continued = finish(processes, seconds=60)
    assert code == 75
    assert "did not finish within 5 s: the devices hang" in err
    assert_ended_by(continued, 1, "process 0 ended with an error, which it prints", run_dir)


@pytest.mark.once
def test_a_signal_to_a_process_that_waits_for_a_killed_one_does_not_keep_it(tmp_path):
    run_dir = tmp_path / "run"
    processes = start(run_dir, *ENDLESS, "--dp", "2")
    wait_for_steps(run_dir, processes)
    processes[0].send_signal(signal.SIGSTOP)
    processes[1].kill()
    processes[0].send_signal(signal.SIGTERM)
    processes[0].send_signal(signal.SIGCONT)
    ended = finish(processes, seconds=60)
    assert_ended_by(ended[0], 0, "process 1 is gone: it was killed, or its machine is lost", run_dir)


@pytest.mark.once
def test_processes_with_different_flags_are_refused(tmp_path):
    for code, _, err in finish(start(tmp_path / "run", odd_flags=("--seed", "1"))):
        assert code == 2
        assert "process 1 was started with other flags" in err


def test_process_settings_survive_the_saved_config():
    config = TrainConfig.from_fields(distributed=DistributedConfig(coordinator="a:1", num_processes=2, process_id=1))
    assert TrainConfig.from_dict(config.to_dict()) == config
