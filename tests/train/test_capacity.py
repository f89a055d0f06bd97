"""A step that exceeds the expert capacity halts, is compiled with more capacity, and is replayed with the same losses."""

import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from jgraph.train import _capacity, _trainer
from jgraph.train.__main__ import main
from jgraph.train._capacity import Halt
from jgraph.train.config import TrainConfig
from tests import own, tiny

# Number of spaces among the 128 tokens of each batch: 28 28 30 24 27 22 23 30 34 27 23 24 23 24. At SMALL, 32 fit.
FLAGS = shlex.split("--batch-size 4 --seq-len 32 --eval-batches 2 --sample-tokens 0 --steps 14 --checkpoint-every 7")
SMALL, LARGE, OVERFULL = 0.25, 1.0, 9


def flags_of(run_dir: Path, factor: float | None, module: str = "Spilling") -> list[str]:
    """Writes a text of letters and spaces beside the run directory. Returns the flags of a run on it."""
    text = run_dir.with_suffix(".txt")
    text.write_bytes(np.random.default_rng(18).choice(np.frombuffer(b"abcdefgh  ", np.uint8), 20_000).tobytes())
    sizes = () if factor is None else ("--model.moe.capacity", str(factor))
    return [*FLAGS, "--data", str(text), "--run-dir", str(run_dir), "--model.module", f"tests.own:{module}", *sizes]


def run(run_dir: Path, *flags: str, factor: float = SMALL) -> int:
    return main([*flags_of(run_dir, factor), *flags])


def replay_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "the capacity allows" in line]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Returns the losses of a run that has enough capacity from the start."""
    run_dir = tmp_path_factory.mktemp("large")
    assert run(run_dir, "--log-every", "1", factor=LARGE) == 0
    return tiny.losses(run_dir)


# The halt is found at once, four steps later, or when a checkpoint is saved.
@pytest.mark.parametrize(
    "flags",
    [
        "--log-every 1",
        *(
            pytest.param(flags, marks=pytest.mark.long)
            for flags in ("--log-every 14", "--log-every 14 --checkpoint-every 5 --eval-every 10")
        ),
    ],
)
def test_a_halted_step_is_replayed_with_more_capacity_and_the_losses_do_not_change(tmp_path, capsys, expected, flags):
    assert run(tmp_path, *flags.split()) == 0
    (line,) = replay_lines(capsys.readouterr().out)
    assert f"step {OVERFULL}: a device sends 34 expert rows to another, but the capacity allows 32" in line
    assert line.endswith("repeating the step with --model.moe.capacity 0.34")
    found = {step: loss for step, loss, _ in tiny.losses(tmp_path)}
    assert found == {step: loss for step, loss, _ in expected if step in found}
    assert len(tiny.losses(tmp_path)) == len(found)
    assert tiny.losses(tmp_path)[-1] == expected[-1]
    assert all(entry["skipped"] == 0 for entry in tiny.entries(tmp_path))


@pytest.mark.long
def test_a_killed_run_resumes_with_the_configured_capacity_and_the_same_losses(tmp_path, capsys, expected):
    assert run(tmp_path, "--log-every", "1") == 0
    shutil.rmtree(tmp_path / "checkpoints" / "14")
    capsys.readouterr()
    assert run(tmp_path, "--log-every", "1") == 0
    assert tiny.losses(tmp_path) == expected
    shutil.rmtree(tmp_path / "checkpoints" / "14")
    capsys.readouterr()
    assert run(tmp_path, "--log-every", "1", factor=0.34) == 0
    assert replay_lines(capsys.readouterr().out) == []
    assert tiny.losses(tmp_path) == expected


@pytest.mark.long
def test_a_run_that_stops_before_it_finds_the_halt_is_saved_before_the_halted_step(tmp_path, capsys, expected, monkeypatch):
    def agreed_stop(stop, watchdog, every):
        def stops(done):
            stop.name = "SIGTERM" if done == OVERFULL + 1 else ""
            return bool(stop.name)

        return stops

    with monkeypatch.context() as patch:
        patch.setattr(_trainer, "agreed_stop", agreed_stop)
        assert run(tmp_path, "--log-every", "14") == 143
    out = capsys.readouterr().out
    assert len(replay_lines(out)) == 1
    assert f"stopped by SIGTERM at step {OVERFULL - 1}" in out
    assert run(tmp_path, "--log-every", "14") == 0
    assert tiny.losses(tmp_path)[-1] == expected[-1]


@pytest.mark.long
@pytest.mark.once
def test_all_devices_halt_at_the_same_step(tmp_path, capsys):
    flags = ("--dp", "2", "--fsdp", "2", "--log-every", "1", "--num-microbatches", "1")
    assert run(tmp_path / "large", *flags, factor=LARGE) == 0
    capsys.readouterr()
    assert run(tmp_path / "small", *flags, factor=0.2) == 0
    assert replay_lines(capsys.readouterr().out)
    assert tiny.losses(tmp_path / "small") == tiny.losses(tmp_path / "large")


@pytest.mark.long
@pytest.mark.once
def test_a_profile_with_a_halted_step_is_recorded_again(tmp_path, capsys, expected):
    assert run(tmp_path, "--log-every", "1", "--profile", f"{OVERFULL - 2}:{OVERFULL + 1}", "--steps", "18") == 0
    out = capsys.readouterr().out
    assert len(replay_lines(out)) == 1
    assert f"profile of steps {OVERFULL} to {OVERFULL + 2}:" in out
    found = {step: loss for step, loss, _ in tiny.losses(tmp_path)}
    assert found.keys() == {*range(1, 19)} - {*range(OVERFULL - 1, OVERFULL + 3)}


def test_a_halt_of_a_model_without_capacity_ends_the_run_with_one_line(tmp_path, capsys):
    assert main(flags_of(tmp_path, None, "Stuck")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "(step 1 needs 1)" in line


def test_capacity_grows_to_a_quarter_more_than_needed_and_at_most_to_all_rows(tmp_path):
    config = TrainConfig.from_fields(
        module="tests.own:Spilling", model=own.SpillingSettings(own.SpillingMoE(0.5)), batch_size=4, seq_len=32
    )
    grown, _ = _capacity.grown(config, Halt(3, 65))
    assert grown.model.moe.capacity == 0.64
    assert _capacity.grown(grown, Halt(3, 120))[0].model.moe.capacity == 1.0
    for needed in (64, 1):
        with pytest.raises(ValueError, match=r"more rows than `model\.moe\.capacity` allows"):
            _capacity.grown(config, Halt(3, needed))
