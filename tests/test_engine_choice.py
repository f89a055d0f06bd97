"""`--pp-engine auto` of a run: it times the best of both engines, tells of it, and a run keeps to its choice."""

import json

import pytest

from jgraph.parallel.pipeline import autotune
from jgraph.training import engine
from tests import tiny

pytestmark = [pytest.mark.long, pytest.mark.once]

FLAGS = ("--steps", "6", "--checkpoint-every", "3", "--pp", "2", "--batch-size", "8", "--num-microbatches", "4")
FLAGS = (*FLAGS, "--model.num-layers", "2", "--sample-tokens", "0", "--pp-engine", "auto")


@pytest.fixture
def seconds(monkeypatch):
    """What is timed, and how long a step with it takes: less by the host."""
    found = []

    def seconds(config, corpus):
        found.append(config)
        return {"program": 2.0, "dispatch": 1.0}[config.pp_engine]

    monkeypatch.setattr(engine, "_seconds", seconds)
    return found


def kept(run_dir) -> dict:
    return json.loads((run_dir / "engine.json").read_text())


def test_a_run_takes_the_faster_engine_and_goes_on_with_it_without_measuring(tmp_path, seconds, capsys):
    assert tiny.train(tmp_path / "run", *FLAGS) == 0
    assert [config.pp_engine for config in seconds] == ["program", "dispatch"]
    assert (kept(tmp_path / "run")["engine"], kept(tmp_path / "run")["schedule"]) == ("dispatch", "aligned")
    assert "dispatched: the host hands over" in capsys.readouterr().out
    (tmp_path / "run" / "checkpoints" / "6").rename(tmp_path / "aside")
    assert tiny.train(tmp_path / "run", *FLAGS) == 0
    assert "takes dispatch, aligned, as measured before" in capsys.readouterr().out
    assert len(seconds) == 2


def test_what_takes_too_long_is_not_measured_and_what_fails_is_out(tmp_path, seconds, monkeypatch, capsys):
    monkeypatch.setattr(engine, "_LONGEST", -1.0)
    assert tiny.train(tmp_path / "slow", *FLAGS) == 0
    assert kept(tmp_path / "slow")["engine"] == "program"
    assert "not measured after" in capsys.readouterr().out

    def fails(config, corpus):
        if config.pp_engine == "program":
            raise engine.JgraphError("no such luck")
        return 1.0

    monkeypatch.setattr(engine, "_seconds", fails)
    assert tiny.train(tmp_path / "failed", *FLAGS) == 0
    assert kept(tmp_path / "failed")["engine"] == "dispatch"
    assert "no such luck" in capsys.readouterr().out


def test_where_only_one_program_can_do_it_nothing_is_timed(tmp_path, seconds, capsys):
    assert tiny.train(tmp_path / "run", *FLAGS, "--fsdp", "2") == 0
    assert "takes program" in capsys.readouterr().out
    assert not seconds
    assert not (tmp_path / "run" / "engine.json").exists()


def test_of_all_schedules_the_best_of_each_engine_is_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "_SECONDS", 0.0)
    monkeypatch.setattr(autotune, "_SECONDS", 0.001)
    assert tiny.train(tmp_path / "run", *FLAGS, "--schedule", "auto") == 0
    found = kept(tmp_path / "run")
    timed = [row for row in found["table"] if "measured" in row["measured"]]
    assert sorted(row["engine"].strip() for row in timed) == ["dispatch", "program"]
    assert all("predicted" in row["predicted"] for row in found["table"])
    assert len(found["table"]) > 8
