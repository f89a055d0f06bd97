"""`--pp-engine auto` of a run: it times the best of both engines, tells of it, and a run keeps to its choice."""

import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jgraph.errors import JgraphError
from jgraph.pipeline import autotune
from jgraph.schedule import Candidate, generate
from jgraph.train import engine
from jgraph.train.config import TrainConfig
from jgraph.train.rundir import RunDir
from tests import tiny

pytestmark = [pytest.mark.long, pytest.mark.once]

FLAGS = ("--steps", "6", "--checkpoint-every", "3", "--pp", "2", "--batch-size", "8", "--num-microbatches", "4")
FLAGS = (*FLAGS, "--model.num-layers", "2", "--sample-tokens", "0", "--pp-engine", "auto")


@pytest.fixture
def seconds(monkeypatch):
    """What is timed, and how long a step with it takes: less by the host."""
    found = []

    def prepared(config, sources, layers):
        found.append(config)
        return lambda: {"program": 2.0, "dispatch": 1.0}[config.pipeline.pp_engine]

    monkeypatch.setattr(engine, "_prepared", prepared)
    return found


def kept(run_dir) -> dict:
    return json.loads((run_dir / "engine.json").read_text())


def test_a_run_takes_the_faster_engine_and_goes_on_with_it_without_measuring(tmp_path, seconds, capsys):
    assert tiny.train(tmp_path / "run", *FLAGS) == 0
    assert {config.pipeline.pp_engine for config in seconds} == {"program", "dispatch"}
    assert (kept(tmp_path / "run")["engine"], kept(tmp_path / "run")["schedule"]) == ("dispatch", "aligned")
    assert "dispatched: the host hands over" in capsys.readouterr().out
    (tmp_path / "run" / "checkpoints" / "6").rename(tmp_path / "aside")
    assert tiny.train(tmp_path / "run", *FLAGS) == 0
    assert "takes dispatch, aligned, as measured before" in capsys.readouterr().out
    assert len(seconds) == 2


class Lines(list):
    """A reporter that keeps what it is told."""

    line = list.append


def settled(tmp_path, **fields) -> tuple[TrainConfig, dict, str]:
    """The run with its engine, what is kept, and what was said."""
    config = TrainConfig.of(pp=2, num_microbatches=4, pp_engine="auto", run_dir=str(tmp_path), **fields)
    said = Lines()
    return *engine.settle_engine(config, None, RunDir(tmp_path), said), "\n".join(said)  # pyright: ignore[reportArgumentType]


def test_where_one_takes_too_long_to_compile_nothing_is_timed(tmp_path, monkeypatch):
    decided = threading.Event()
    timed = []

    def prepared(config, sources, layers):
        if config.pipeline.pp_engine == "program":
            assert decided.wait(60)
        return lambda: timed.append(config) or 1.0

    monkeypatch.setattr(engine, "_LONGEST", 0.5)
    monkeypatch.setattr(engine, "_prepared", prepared)
    config, told, said = settled(tmp_path)
    decided.set()
    assert config.pipeline.pp_engine == told["engine"] == "dispatch"
    assert "not compiled after" in said
    assert not timed


def test_what_fails_is_out_with_its_error(tmp_path, monkeypatch):
    def fails(config, sources, layers):
        if config.pipeline.pp_engine == "program":
            raise JgraphError("no such luck")
        return lambda: 1.0

    monkeypatch.setattr(engine, "_prepared", fails)
    config, _, said = settled(tmp_path)
    assert config.pipeline.pp_engine == "dispatch"
    assert "no such luck" in said


def test_where_only_one_program_can_do_it_nothing_is_timed(tmp_path, seconds):
    config, told, said = settled(tmp_path, fsdp=2)
    assert config.pipeline.pp_engine == "program"
    assert "takes program" in said
    assert not told
    assert not seconds


@pytest.fixture
def predicted(monkeypatch):
    """Candidates whose predictions a test sets, and what was prepared of them; with few layers a step takes a tenth."""
    rows, prepared = [], []

    def predict(layers):
        return SimpleNamespace(candidates=[replace(row, makespan=row.makespan / (10 if layers else 1)) for row in rows])

    def prepare(config, sources, layers):
        prepared.append((config.pipeline.pp_engine, config.pipeline.schedule, layers))
        return lambda: {"zb-v": 0.11, "aligned": 0.13, "gpipe": 0.12}[config.pipeline.schedule]

    monkeypatch.setattr(engine, "predictor", lambda config: predict)
    monkeypatch.setattr(engine, "_prepared", prepare)
    return rows, prepared


def row(name: str, player: str, makespan: float, chunks: int = 1) -> Candidate:
    return Candidate(name, chunks, "", makespan=makespan, engine=player)


def test_the_best_of_both_engines_are_timed_with_a_layer_a_stage_and_count_as_predicted(tmp_path, predicted):
    rows, prepared = predicted
    rows += [row("aligned", "program", 1.0, 2), row("gpipe", "program", 1.01), row("zb-v", "dispatch", 1.1, 2)]
    config, told, _ = settled(tmp_path, schedule="auto")
    assert sorted(prepared) == [("dispatch", "zb-v", 4), ("program", "aligned", 4)]
    assert (config.pipeline.pp_engine, config.pipeline.schedule, config.pipeline.chunks) == ("dispatch", "zb-v", 2)
    measured = {line.split()[0]: line for line in reversed(told["table"])}
    assert "measured 1300.00, from 130.00 with 4 layers" in measured["program"]
    assert measured["dispatch"].endswith("measured 1100.00, from 110.00 with 4 layers  taken")


def test_an_engine_far_behind_is_not_compiled_and_the_table_says_so(tmp_path, predicted):
    rows, prepared = predicted
    rows += [row("aligned", "program", 1.0, 2), row("gpipe", "program", 1.01), row("zb-v", "dispatch", 5.7, 2)]
    config, _, said = settled(tmp_path, schedule="auto")
    assert sorted(prepared) == [("program", "aligned", 4), ("program", "gpipe", 2)]
    assert config.pipeline.schedule == "gpipe"
    assert "5.7 x the fastest: not measured" in said


def test_what_is_handed_over_takes_the_host_as_long_as_was_measured():
    """On an H200's host, 1f1b of 16 microbatches on two ranks: a GPT of 12 layers 57.2 ms, an MLP of 8 layers 17.4 to 18.8."""
    schedule = generate("1f1b", pp=2, microbatches=16)
    assert autotune.host_seconds(schedule, 12 * 67) == pytest.approx(57.2e-3, rel=0.05)
    assert autotune.host_seconds(schedule, 8 * 28) == pytest.approx(18e-3, rel=0.05)


def test_of_all_schedules_the_best_of_each_engine_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "_SECONDS", 0.001)
    monkeypatch.setattr(engine, "_NEAR", float("inf"))
    assert tiny.train(tmp_path / "run", *FLAGS, "--schedule", "auto") == 0
    found = kept(tmp_path / "run")
    timed = [row for row in found["table"] if "measured" in row]
    assert sorted(row.split()[0] for row in timed) == ["dispatch", "program"]
    assert all("predicted" in row for row in found["table"])
    assert len(found["table"]) > 8
