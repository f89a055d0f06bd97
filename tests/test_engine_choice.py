"""`--pp-engine auto` of a run: it times the best of both engines, tells of it, and a run keeps to its choice."""

import json
import threading

import pytest

from jgraph.errors import JgraphError
from jgraph.parallel.pipeline import autotune
from jgraph.training import engine
from jgraph.training.config import TrainConfig
from jgraph.training.rundir import RunDir
from tests import tiny

pytestmark = [pytest.mark.long, pytest.mark.once]

FLAGS = ("--steps", "6", "--checkpoint-every", "3", "--pp", "2", "--batch-size", "8", "--num-microbatches", "4")
FLAGS = (*FLAGS, "--model.num-layers", "2", "--sample-tokens", "0", "--pp-engine", "auto")


@pytest.fixture
def seconds(monkeypatch):
    """What is timed, and how long a step with it takes: less by the host."""
    found = []

    def prepared(config, corpus):
        found.append(config)
        return lambda: {"program": 2.0, "dispatch": 1.0}[config.pp_engine]

    monkeypatch.setattr(engine, "_prepared", prepared)
    return found


def kept(run_dir) -> dict:
    return json.loads((run_dir / "engine.json").read_text())


def test_a_run_takes_the_faster_engine_and_goes_on_with_it_without_measuring(tmp_path, seconds, capsys):
    assert tiny.train(tmp_path / "run", *FLAGS) == 0
    assert {config.pp_engine for config in seconds} == {"program", "dispatch"}
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
    config = TrainConfig(pp=2, num_microbatches=4, pp_engine="auto", run_dir=str(tmp_path), **fields)
    said = Lines()
    return *engine.settle_engine(config, None, RunDir(tmp_path), said), "\n".join(said)  # pyright: ignore[reportArgumentType]


def test_what_takes_too_long_to_compile_is_not_measured(tmp_path, monkeypatch):
    measured = threading.Event()

    def prepared(config, corpus):
        if config.pp_engine == "program":
            assert measured.wait(60)
        return lambda: measured.set() or 1.0

    monkeypatch.setattr(engine, "_LONGEST", 0.0)
    monkeypatch.setattr(engine, "_prepared", prepared)
    config, told, said = settled(tmp_path)
    assert config.pp_engine == told["engine"] == "dispatch"
    assert "not compiled after" in said


def test_what_fails_is_out_with_its_error(tmp_path, monkeypatch):
    def fails(config, corpus):
        if config.pp_engine == "program":
            raise JgraphError("no such luck")
        return lambda: 1.0

    monkeypatch.setattr(engine, "_prepared", fails)
    config, _, said = settled(tmp_path)
    assert config.pp_engine == "dispatch"
    assert "no such luck" in said


def test_where_only_one_program_can_do_it_nothing_is_timed(tmp_path, seconds):
    config, told, said = settled(tmp_path, fsdp=2)
    assert config.pp_engine == "program"
    assert "takes program" in said
    assert not told
    assert not seconds


def test_of_all_schedules_the_best_of_each_engine_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(autotune, "_SECONDS", 0.001)
    assert tiny.train(tmp_path / "run", *FLAGS, "--schedule", "auto") == 0
    found = kept(tmp_path / "run")
    timed = [row for row in found["table"] if "measured" in row["measured"]]
    assert sorted(row["engine"].strip() for row in timed) == ["dispatch", "program"]
    assert all("predicted" in row["predicted"] for row in found["table"])
    assert len(found["table"]) > 8
