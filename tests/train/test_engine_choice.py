"""Tests of `pp_engine` auto: the engine with the smallest predicted time is taken, printed and stored."""

import json
from types import SimpleNamespace

import pytest

from jgraph.pipeline import autotune
from jgraph.schedule import Candidate, generate, write
from jgraph.train import engine
from jgraph.train.config import TrainConfig
from tests import tiny

pytestmark = [pytest.mark.long, pytest.mark.once]

FLAGS = ("--steps", "6", "--checkpoint-every", "3", "--pp", "2", "--batch-size", "8", "--num-microbatches", "4")
FLAGS = (*FLAGS, "--model.num-layers", "2", "--sample-tokens", "0", "--pp-engine", "auto")


@pytest.fixture
def rows(monkeypatch):
    """Candidates with predictions that a test sets."""
    rows: list[Candidate] = []
    monkeypatch.setattr(engine, "measured_choice", lambda config: SimpleNamespace(candidates=rows))
    return rows


def row(name: str, player: str, makespan: float | None, chunks: int = 1, verdict: str = "") -> Candidate:
    return Candidate(name, chunks, verdict, makespan=makespan, engine=player)


def settled(**fields) -> tuple[TrainConfig, str]:
    """Returns the configuration with its engine, and the printed lines."""
    config = TrainConfig.of(pp=2, num_microbatches=4, pp_engine="auto", **fields)
    lines: list[str] = []
    return engine.settle_engine(config, SimpleNamespace(line=lines.append)), "\n".join(lines)  # pyright: ignore[reportArgumentType]


def chosen(config: TrainConfig) -> tuple[str, str, int]:
    return config.pipeline.pp_engine, config.pipeline.schedule, config.pipeline.chunks


def test_run_takes_the_engine_with_the_smaller_prediction_and_resumes(tmp_path, rows, capsys):
    rows += [row("aligned", "dispatch", 1.0), row("aligned", "program", 2.0)]
    assert tiny.train(tmp_path / "run", *FLAGS) == 0
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (stored["pp_engine"], stored["schedule"]) == ("dispatch", "aligned")
    assert "dispatched: the host hands over" in capsys.readouterr().out
    (tmp_path / "run" / "checkpoints" / "6").rename(tmp_path / "aside")
    rows.reverse()
    assert tiny.train(tmp_path / "run", *FLAGS) == 0
    out = capsys.readouterr().out
    assert "takes program, aligned" in out
    assert "resumed from step 3" in out


def test_program_is_taken_without_a_measurement_if_the_settings_require_it(monkeypatch):
    monkeypatch.delattr(engine, "measured_choice")
    config, printed = settled(fsdp=2)
    assert config.pipeline.pp_engine == "program"
    assert "the only engine that supports the other settings" in printed


def test_program_is_taken_for_a_schedule_from_a_file(tmp_path):
    path = tmp_path / "schedule.json"
    write(generate("1f1b", pp=2, microbatches=4), path)
    config, printed = settled(schedule=str(path))
    assert chosen(config) == ("program", str(path), 1)
    assert "no time is predicted" in printed


def test_fastest_candidate_that_fits_is_taken(rows):
    rows += [row("zb-v", "dispatch", 1.1, 2), row("gpipe", "program", 1.3)]
    rows += [row("1f1b", "dispatch", 1.0, 1, "needs 7 bytes more than the limit"), row("zb-h2", "program", None)]
    config, printed = settled(schedule="auto", memory_limit=1.0)
    assert chosen(config) == ("dispatch", "zb-v", 2)
    assert "takes dispatch, zb-v with 2 chunks" in printed
    assert "1100.00 with dispatch (zb-v with 2 chunks), 1300.00 with program (gpipe with 1 chunk)" in printed


def test_named_schedule_is_kept(rows):
    rows += [row("zb-v", "dispatch", 1.1, 2), row("1f1b", "program", 1.2), row("1f1b", "dispatch", 1.3)]
    assert chosen(settled(schedule="1f1b")[0]) == ("program", "1f1b", 1)


def test_host_seconds_agree_with_measurements():
    """On an H200's host, 1f1b of 16 microbatches on two ranks: a GPT of 12 layers 57.2 ms, an MLP of 8 layers 17.4 to 18.8."""
    schedule = generate("1f1b", pp=2, microbatches=16)
    assert autotune.host_seconds(schedule, 12 * 67) == pytest.approx(57.2e-3, rel=0.05)
    assert autotune.host_seconds(schedule, 8 * 28) == pytest.approx(18e-3, rel=0.05)


def test_run_predicts_all_schedules_with_both_engines(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(autotune, "_SECONDS", 0.001)
    assert tiny.train(tmp_path / "run", *FLAGS, "--schedule", "auto") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "auto: takes" in line]
    assert " with program (" in line
    assert " with dispatch (" in line
    assert json.loads((tmp_path / "run" / "config.json").read_text())["pp_engine"] in ("program", "dispatch")
