"""Entries in TensorBoard event files and in Weights & Biases. A fake replaces the wandb package."""

import importlib.util
import json
import struct
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from jgraph.errors import ConfigError
from jgraph.train._trackers import TensorBoard, Wandb, check_installed
from jgraph.train.config import TrainConfig
from jgraph.train.rundir import RunDir
from tests import tiny


@pytest.fixture
def wandb(monkeypatch):
    """Replaces the package by a fake. `runs` has the arguments of each `init`, `logged` has the entries."""
    fake = ModuleType("wandb")
    fake.__spec__ = ModuleSpec("wandb", None)
    fake.runs, fake.logged, fake.finished = [], [], 0
    fake.Error = type("Error", (Exception,), {})

    def finish():
        fake.finished += 1

    def init(**kwargs):
        fake.runs.append(kwargs)
        define = {"define_metric": lambda name, step_metric=None: None, "log": fake.logged.append, "finish": finish}
        return SimpleNamespace(id=kwargs["id"] or "new", **define)

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.fixture
def run_dir(tmp_path):
    """Returns a run directory with a configuration."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.write(TrainConfig(), {}, {})
    return run_dir


def shown(directory: Path) -> list[tuple[int, str, float]]:
    """Returns the (step, name, value) tuples in TensorBoard. A file hides older entries from its first step on."""
    from tensorboardX.proto.event_pb2 import Event  # imported here because it imports torch if installed

    found = []
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.WhichOneof("what") == "session_log":
                found = [one for one in found if one[0] < event.step]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


@pytest.mark.long
def test_every_tracker_gets_the_entries_of_metrics_jsonl(tmp_path, wandb):
    assert tiny.train(tmp_path / "run", "--steps", "2", "--log", "tensorboard", "wandb") == 0
    entries = tiny.entries(tmp_path / "run")
    numbers = [{name: value for name, value in entry.items() if value is not None} for entry in entries]
    assert wandb.logged == numbers
    expected = [(entry["step"], name, value) for entry in numbers for name, value in entry.items() if name != "step"]
    events = shown(tmp_path / "run" / "tensorboard")
    assert [event[:2] for event in events] == [one[:2] for one in expected]
    assert [event[2] for event in events] == pytest.approx([one[2] for one in expected])
    (kwargs,) = wandb.runs
    assert (kwargs["name"], kwargs["config"]["steps"], wandb.finished) == ("run", 2, 1)


def test_events_after_the_checkpoint_of_a_resumed_run_are_hidden(run_dir):
    for done, losses in ((0, [5.0, 4.0, 3.0]), (2, [2.0])):
        log = TensorBoard(run_dir, done)
        for step, loss in enumerate(losses, done + 1):
            log.add({"step": step, "loss": loss, "mfu": None})
        log.close()
    assert shown(run_dir.tensorboard) == [(1, "loss", 5.0), (2, "loss", 4.0), (3, "loss", 2.0)]


def test_a_resumed_run_keeps_its_wandb_run_and_a_restarted_run_gets_a_new_one(run_dir, wandb):
    Wandb(run_dir, 0).close()
    assert json.loads(run_dir.wandb.read_text()) == {"id": "new"}
    Wandb(run_dir, 2).close()
    run_dir.reset()
    Wandb(run_dir, 2).close()
    assert [(kwargs["id"], kwargs["resume"]) for kwargs in wandb.runs] == [(None, None), ("new", "allow"), (None, None)]


def test_a_failed_start_of_wandb_is_a_config_error_of_log(run_dir, wandb, monkeypatch):
    def refuse(**kwargs):
        raise wandb.Error("no api key")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ConfigError, match="no api key") as error:
        Wandb(run_dir, 0)
    assert error.value.field == "log"


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_tracker_that_is_not_installed_is_refused_before_the_run_starts(tmp_path, monkeypatch, capsys, name, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda module, *rest: None if module == package else find(module, *rest))
    with pytest.raises(ConfigError, match=rf"jgraph\[{name}\]") as error:
        check_installed((name,))
    assert error.value.field == "log"
    assert tiny.train(tmp_path / "run", "--log", name) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_refused():
    with pytest.raises(ConfigError) as error:
        TrainConfig.from_fields(log=("comet",))  # pyright: ignore[reportArgumentType]
    assert error.value.field == "log"
