"""Runs survive signals, kill -9, damaged checkpoints and nonfinite losses."""

import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jgraph.data import Batches, load
from jgraph.train._loop import Loop
from jgraph.train._signals import StopRequest
from tests import tiny
from tests.checkpoint.test_checkpoint import flip_a_byte, truncate
from tests.faulty import POISON

pytestmark = pytest.mark.long

LONG = ("--steps", "500", "--eval-every", "200", "--checkpoint-every", "40")
SHORT = ("--steps", "12", "--eval-every", "6", "--checkpoint-every", "4")


def train_until(name: str, run_dir: Path, *flags: str) -> int:
    """Trains in this process, which gets a signal after 20 more log entries. Outside the run, the signal is ignored."""
    metrics, number, ended = run_dir / "metrics.jsonl", getattr(signal, name), threading.Event()
    least = tiny.num_lines(metrics) + 20

    def send():
        while tiny.num_lines(metrics) <= least and not ended.wait(0.002):
            pass
        time.sleep(random.Random(name).uniform(0, 0.2))
        os.kill(os.getpid(), number)

    before, sender = signal.signal(number, signal.SIG_IGN), threading.Thread(target=send)
    sender.start()
    try:
        return tiny.train(run_dir, *flags)
    finally:
        ended.set()
        sender.join()
        signal.signal(number, before)


@pytest.mark.once
def test_a_stopped_and_killed_run_resumes_with_the_same_losses(tmp_path, capsys):
    whole = ("--steps", "160", "--eval-every", "80", "--checkpoint-every", "160")
    assert tiny.train(tmp_path / "whole", *whole) == 0
    flags = (*whole, "--checkpoint-every", "5")  # frequent, so that a signal may arrive during a save
    run_dir, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"

    def assert_stops(name):
        capsys.readouterr()
        assert train_until(name, run_dir, *flags) == 128 + getattr(signal, name)
        out, err = capsys.readouterr()
        assert err == ""
        assert f"stopped by {name} at step {tiny.num_lines(metrics)}" in out
        assert (run_dir / "checkpoints" / str(tiny.num_lines(metrics))).is_dir()

    assert_stops("SIGTERM")
    process, done = tiny.start(run_dir, *flags), tiny.num_lines(metrics)
    tiny.wait_for(lambda: tiny.num_lines(metrics) > done + 20, process=process)
    time.sleep(random.Random("SIGKILL").uniform(0, 0.2))
    process.kill()
    assert process.communicate(timeout=120)[1] == ""
    assert_stops("SIGINT")
    assert 40 < tiny.num_lines(metrics) < 160
    assert tiny.train(run_dir, *flags) == 0
    assert tiny.losses(run_dir) == tiny.losses(tmp_path / "whole")


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """Returns the directory of a run with twelve steps."""
    run_dir = tmp_path_factory.mktemp("short")
    assert tiny.train(run_dir, *SHORT) == 0
    return run_dir


@pytest.mark.once
def test_a_damaged_checkpoint_is_named_and_the_run_resumes_from_the_previous_one(short, tmp_path, capsys):
    shutil.copytree(short, tmp_path / "run")
    truncate(tmp_path / "run" / "checkpoints" / "12")
    capsys.readouterr()
    assert tiny.train(tmp_path / "run", *SHORT) == 0
    out = capsys.readouterr().out
    assert f"warning: checkpoint {tmp_path / 'run' / 'checkpoints' / '12'} is damaged" in out
    assert "resumed from step 8" in out
    assert tiny.losses(tmp_path / "run") == tiny.losses(short)


@pytest.mark.once
def test_if_every_checkpoint_is_damaged_one_line_suggests_no_resume(short, tmp_path, capsys):
    shutil.copytree(short, tmp_path / "run")
    for step in ("8", "12"):
        flip_a_byte(tmp_path / "run" / "checkpoints" / step)
    capsys.readouterr()
    assert tiny.train(tmp_path / "run", *SHORT) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "checkpoints/8" in err
    assert "checkpoints/12" in err
    assert "--no-resume" in err
    assert tiny.train(tmp_path / "run", *SHORT, "--no-resume") == 0


def test_a_run_that_failed_before_its_first_checkpoint_starts_over_with_a_lower_rate(tmp_path, capsys):
    flags = ("--steps", "8", "--optimizer.warmup-steps", "0")
    assert tiny.train(tmp_path / "run", *flags, "--optimizer.learning-rate", "1e30") == 1
    err = capsys.readouterr().err
    assert "there is no checkpoint yet; try a lower --optimizer.learning-rate, or" in err
    assert tiny.entries(tmp_path / "run")
    assert tiny.train(tmp_path / "run", *flags, "--optimizer.learning-rate", "0.01") == 0
    assert [entry["step"] for entry in tiny.entries(tmp_path / "run")] == list(range(1, 9))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["optimizer"]["learning_rate"] == 0.01


def test_a_run_out_of_memory_in_its_first_step_starts_over_with_a_smaller_batch(tmp_path, capsys, monkeypatch):
    def exhausted(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.")

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "run", exhausted)
        assert tiny.train(tmp_path / "run", "--steps", "2") == 2
    assert (tmp_path / "run" / "config.json").exists()
    assert "use a smaller batch or more microbatches (RESOURCE_EXHAUSTED" in capsys.readouterr().err
    assert tiny.train(tmp_path / "run", "--steps", "2", "--batch-size", "2") == 0


def test_a_second_run_in_the_directory_is_refused_and_the_first_is_not_affected(tmp_path, capsys):
    process = tiny.start(tmp_path / "run", *LONG)
    tiny.wait_for(lambda: tiny.num_lines(tmp_path / "run" / "metrics.jsonl") > 5, process=process)
    second = tiny.train(tmp_path / "run", *LONG)
    process.send_signal(signal.SIGTERM)
    code, _, err = tiny.finish(process, seconds=120)
    assert (code, err) == (143, "")
    assert second == 2
    assert f"process {process.pid} on {socket.gethostname()} is writing there" in capsys.readouterr().err
    entries = tiny.entries(tmp_path / "run")
    assert [entry["step"] for entry in entries] == list(range(1, len(entries) + 1))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.json", "metrics.jsonl", "checkpoints"}


@pytest.fixture
def poisoned(tmp_path) -> tuple[str, ...]:
    """Returns flags for the faulty model and for a text with its bad token in one training document."""
    documents = [f"{i} lazy dogs jump over {i * i} quick brown foxes, and {i + 1} foxes sleep." for i in range(200)]
    poison = next(i for i, text in enumerate(documents) if hashlib.sha256((text + chr(POISON)).encode()).digest()[0] > 128)
    documents[poison] += chr(POISON)
    path = tmp_path / "poisoned.txt"
    path.write_text("\n<|endoftext|>\n".join(documents))
    return ("--data", str(path), "--model.module", "tests.faulty:Bigram")


def poisoned_steps(path: str, steps: int) -> list[int]:
    corpus = load(path, seq_len=32, vocab_size=256)
    batches = Batches(corpus.train, batch_size=4, seq_len=32, seed=0)
    return [step for step in range(1, steps + 1) if np.any(batches[step - 1] == POISON)]


def test_a_nonfinite_loss_stops_the_run_and_names_the_step(tmp_path, poisoned, capsys):
    flags = (*poisoned, "--steps", "120", "--checkpoint-every", "5", "--log-every", "7")
    first = poisoned_steps(poisoned[1], 120)[0]
    assert first > 5, "the test needs a checkpoint before the bad step"
    for _ in range(2):  # the second run resumes and reads the same batch
        assert tiny.train(tmp_path / "run", *flags) == 1
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1
        assert f"step {first}: the loss is nan and the gradient of small matrices (float32) is not finite" in err
        assert f"checkpoint of step {(first - 1) // 5 * 5} is kept" in err
        assert "--on-nonfinite skip" in err
        steps = [int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit()]
        assert max(steps) == (first - 1) // 5 * 5


def test_skip_resumes_a_stopped_run_and_counts_the_bad_steps(tmp_path, poisoned, capsys):
    flags = (*poisoned, "--steps", "120", "--checkpoint-every", "5")
    bad = poisoned_steps(poisoned[1], 120)
    assert tiny.train(tmp_path / "run", *flags) == 1
    capsys.readouterr()
    assert tiny.train(tmp_path / "run", *flags, "--on-nonfinite", "skip") == 0
    out = capsys.readouterr().out
    assert all(f"step {step}: the loss is nan" in out for step in bad)
    assert f"{len(bad)} updates" in out
    entries = tiny.entries(tmp_path / "run")
    assert [entry["step"] for entry in entries if entry["loss"] is None] == bad
    assert [entry["skipped"] for entry in entries] == [sum(step <= i for step in bad) for i in range(1, 121)]
    assert entries[-1]["loss"] < entries[0]["loss"]
    # A skipped update does not advance the schedule: the next update has the same learning rate.
    rates = {entry["step"]: entry["learning_rate"] for entry in entries}
    assert [rates[step + 1] for step in bad if step < 120] == [rates[step] for step in bad if step < 120]
    assert len(set(rates.values())) > 60


def test_the_count_of_skipped_steps_survives_a_resume(tmp_path, poisoned, capsys):
    flags = (*poisoned, "--steps", "120", "--checkpoint-every", "5", "--on-nonfinite", "skip")
    bad = poisoned_steps(poisoned[1], 120)
    assert any(step <= 115 for step in bad), "the test needs a skipped step before the checkpoint"
    assert tiny.train(tmp_path / "run", *flags) == 0
    whole = [entry["skipped"] for entry in tiny.entries(tmp_path / "run")]
    (tmp_path / "run" / "checkpoints" / "120").rename(tmp_path / "aside")
    capsys.readouterr()
    assert tiny.train(tmp_path / "run", *flags) == 0
    out = capsys.readouterr().out
    assert "resumed from step 115" in out
    assert [entry["skipped"] for entry in tiny.entries(tmp_path / "run")] == whole
    assert f"{len(bad)} updates" in out


@pytest.mark.once
def test_a_run_with_hanging_devices_ends_by_itself_and_resumes_with_the_same_losses(tmp_path, poisoned):
    flags = (*poisoned[:-1], "tests.faulty:Hanging", "--steps", "30", "--checkpoint-every", "5", "--dp", "2")
    hangs = poisoned_steps(poisoned[1], 30)[0]
    assert hangs > 5, "the test needs a checkpoint before the bad step"
    assert tiny.train(tmp_path / "whole", *flags) == 0
    process = tiny.start(tmp_path / "run", *flags, "--hang-seconds", "6", num_devices=2, JGRAPH_TESTS_HANG="1")
    code, _, err = tiny.finish(process, seconds=120)
    line = next(line for line in err.splitlines() if line.startswith("jgraph.train: error: "))
    assert code == 75
    assert f"step {hangs}" in line
    groups = ("{{0,1}}", "mesh['data'=2] {'data'}")  # printed by XLA before and after jax 0.12
    assert any(f"collectives: 1 all-reduce over {group};" in line for group in groups)
    assert f"the last complete checkpoint, {tmp_path / 'run' / 'checkpoints' / str((hangs - 1) // 5 * 5)};" in line
    assert "--hang-seconds" in line
    assert [entry["step"] for entry in tiny.entries(tmp_path / "run")] == list(range(1, hangs))
    assert not (tmp_path / "run" / "lock").exists()
    assert tiny.train(tmp_path / "run", *flags) == 0
    assert tiny.losses(tmp_path / "run") == tiny.losses(tmp_path / "whole")


FULL = """
import resource, sys
from pathlib import Path

import jax

import jgraph
from tests import tiny


def limited(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


path = Path(sys.argv[1])
arrays = {str(i): jax.random.normal(jax.random.key(i), (300, 40)) for i in range(12)}
for name, size in (("config", 1000), ("metrics", 8000)):
    limited(size)
    assert tiny.train(path / name, "--steps", "60", "--eval-every", "100", "--compile-cache", "off") == 2
for step in range(3):
    limited(resource.RLIM_INFINITY)
    checkpoints = jgraph.Checkpoints(path / str(step), 1)
    limited(40_000)
    try:
        checkpoints.save(1, arrays)
        checkpoints.close()
    except jgraph.JgraphError as e:
        print(e, file=sys.stderr)
limited(resource.RLIM_INFINITY)
"""


@pytest.mark.once
def test_a_failed_write_is_reported_in_one_line_with_the_file_and_flag(tmp_path):
    environ = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    process = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], env=environ, capture_output=True, text=True, timeout=200
    )
    config, metrics, *checkpoints = process.stderr.splitlines()
    assert process.returncode == 0, process.stderr
    message = "jgraph.train: error: --run-dir is {}: cannot be written (File too large)"
    assert config == message.format(tmp_path / "config" / "config.json")
    assert metrics == message.format(tmp_path / "metrics" / "metrics.jsonl")
    assert "\n" in (tmp_path / "metrics" / "metrics.jsonl").read_text(), "some entries were written"
    assert len(checkpoints) == 3, "one line each, and no traceback of Orbax"
    for step, line in enumerate(checkpoints):
        assert f"checkpoints in {tmp_path / str(step)} cannot be written: a file is larger than" in line


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_while_xla_compiles_ends_the_run_at_once_and_changes_no_earlier_run(short, tmp_path, name):
    run_dir, dump = tmp_path / "run", tmp_path / "dump"
    if name == "SIGINT":
        shutil.copytree(short, run_dir)
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    flags = "--model.num-layers", "12", "--no-resume", "--compile-cache", "off"
    process = tiny.start(run_dir, *flags, XLA_FLAGS=f"{os.environ['XLA_FLAGS']} --xla_dump_to={dump}")
    # XLA writes its input when it begins to compile.
    tiny.wait_for(lambda: any(dump.glob("*.jit_step.before_optimizations.txt")), process=process)
    process.send_signal(getattr(signal, name))
    code, out, err = tiny.finish(process, seconds=120)
    assert (code, err) == (128 + getattr(signal, name), "")
    phases = ["compiling the training step", f"stopped by {name} while compiling the training step; nothing was trained"]
    assert out.splitlines()[-2:] == phases
    shutil.rmtree(dump)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before


def test_the_second_ctrl_c_interrupts_at_once_and_the_handlers_are_restored():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert stop.name == ""
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.name == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
