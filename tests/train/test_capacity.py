"""A run whose step halts for want of room: compiled again with more, replayed from there, and the curve shows nothing of it."""

import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from jgraph.train import capacity, trainer
from jgraph.train.__main__ import main
from jgraph.train.capacity import Halt
from jgraph.train.config import TrainConfig
from tests import own, tiny

# Of the 128 tokens of a batch, so many are spaces: 28 28 30 24 27 22 23 30 34 27 23 24 23 24. At SMALL, 32 fit.
FLAGS = shlex.split("--batch-size 4 --seq-len 32 --eval-batches 2 --sample-tokens 0 --steps 14 --checkpoint-every 7")
SMALL, LARGE, OVERFULL = 0.25, 1.0, 9


def flags_of(run_dir: Path, room: float | None, module: str = "Spilling") -> list[str]:
    """Of a run on letters and spaces, which are written beside it."""
    text = run_dir.with_suffix(".txt")
    text.write_bytes(np.random.default_rng(18).choice(np.frombuffer(b"abcdefgh  ", np.uint8), 20_000).tobytes())
    sizes = () if room is None else ("--model.moe.capacity", str(room))
    return [*FLAGS, "--data", str(text), "--run-dir", str(run_dir), "--model.module", f"tests.own:{module}", *sizes]


def run(run_dir: Path, *flags: str, room: float = SMALL) -> int:
    return main([*flags_of(run_dir, room), *flags])


def told(text: str) -> list[str]:
    return [line for line in text.splitlines() if "the capacity allows" in line]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """The losses of every step of a run with room from the start."""
    run_dir = tmp_path_factory.mktemp("large")
    assert run(run_dir, "--log-every", "1", room=LARGE) == 0
    return tiny.losses(run_dir)


# Every step is settled, or found to have halted four steps later, or where the state is saved and the run ends.
@pytest.mark.parametrize("flags", ["--log-every 1", "--log-every 14", "--log-every 14 --checkpoint-every 5 --eval-every 10"])
def test_a_step_without_room_is_replayed_with_more_and_the_curve_is_that_of_a_run_with_room(tmp_path, capsys, wanted, flags):
    assert run(tmp_path, *flags.split()) == 0
    (line,) = told(capsys.readouterr().out)
    assert f"step {OVERFULL}: a device sends 34 expert rows to another, but the capacity allows 32" in line
    assert line.endswith("repeating the step with --model.moe.capacity 0.34")
    found = {step: loss for step, loss, _ in tiny.losses(tmp_path)}
    assert found == {step: loss for step, loss, _ in wanted if step in found}
    assert len(tiny.losses(tmp_path)) == len(found)
    assert tiny.losses(tmp_path)[-1] == wanted[-1]
    assert all(entry["skipped"] == 0 for entry in tiny.entries(tmp_path))


def test_a_killed_run_resumes_with_the_configured_capacity_and_the_same_losses(tmp_path, capsys, wanted):
    assert run(tmp_path, "--log-every", "1") == 0
    shutil.rmtree(tmp_path / "checkpoints" / "14")
    capsys.readouterr()
    assert run(tmp_path, "--log-every", "1") == 0
    assert tiny.losses(tmp_path) == wanted
    shutil.rmtree(tmp_path / "checkpoints" / "14")
    capsys.readouterr()
    assert run(tmp_path, "--log-every", "1", room=0.34) == 0
    assert told(capsys.readouterr().out) == []
    assert tiny.losses(tmp_path) == wanted


def test_a_run_that_is_stopped_before_it_has_looked_is_saved_before_the_step_that_halted(tmp_path, capsys, wanted, monkeypatch):
    def agreed_stop(stop, watchdog, every):
        def stops(done):
            stop.name = "SIGTERM" if done == OVERFULL + 1 else ""
            return bool(stop.name)

        return stops

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "agreed_stop", agreed_stop)
        assert run(tmp_path, "--log-every", "14") == 143
    out = capsys.readouterr().out
    assert len(told(out)) == 1
    assert f"stopped by SIGTERM at step {OVERFULL - 1}" in out
    assert run(tmp_path, "--log-every", "14") == 0
    assert tiny.losses(tmp_path)[-1] == wanted[-1]


@pytest.mark.once
def test_devices_halt_together(tmp_path, capsys):
    flags = ("--dp", "2", "--fsdp", "2", "--log-every", "1", "--num-microbatches", "1")
    assert run(tmp_path / "large", *flags, room=LARGE) == 0
    capsys.readouterr()
    assert run(tmp_path / "small", *flags, room=0.2) == 0
    assert told(capsys.readouterr().out)
    assert tiny.losses(tmp_path / "small") == tiny.losses(tmp_path / "large")


@pytest.mark.once
def test_a_profile_with_a_step_that_halts_is_taken_again(tmp_path, capsys, wanted):
    assert run(tmp_path, "--log-every", "1", "--profile", f"{OVERFULL - 2}:{OVERFULL + 1}", "--steps", "18") == 0
    out = capsys.readouterr().out
    assert len(told(out)) == 1
    assert f"profile of steps {OVERFULL} to {OVERFULL + 2}:" in out
    found = {step: loss for step, loss, _ in tiny.losses(tmp_path)}
    assert found.keys() == {*range(1, 19)} - {*range(OVERFULL - 1, OVERFULL + 3)}


def test_a_model_that_halts_for_no_want_of_room_ends_the_run_in_one_line(tmp_path, capsys):
    assert main(flags_of(tmp_path, None, "Stuck")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "(step 1 needs 1)" in line


def test_room_grows_by_a_quarter_more_than_was_needed_up_to_all_rows(tmp_path):
    config = TrainConfig.of(module="tests.own:Spilling", model=own.Rooms(own.Room(0.5)), batch_size=4, seq_len=32)
    grown, _ = capacity.grown(config, Halt(3, 65))
    assert grown.model.moe.capacity == 0.64
    assert capacity.grown(grown, Halt(3, 120))[0].model.moe.capacity == 1.0
    for needed in (64, 1):
        with pytest.raises(ValueError, match=r"more rows than `model\.moe\.capacity` allows"):
            capacity.grown(config, Halt(3, needed))
