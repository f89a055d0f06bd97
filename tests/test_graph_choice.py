"""`--graph measure` of a run: when it measures, that it changes no number, and that a run keeps to its choice."""

import json

import pytest

from jgraph.training import graph
from jgraph.training.config import TrainConfig
from jgraph.training.graph import measure_graph
from jgraph.training.setup import TrainSetup
from tests import tiny

pytestmark = [pytest.mark.long, pytest.mark.once]

FLAGS = ("--steps", "6", "--checkpoint-every", "3", "--dp", "2", "--sample-tokens", "0", "--graph", "measure")


@pytest.fixture
def measurements(monkeypatch):
    """Choices that were measured; two CPU devices are taken for ones whose choices differ."""
    found = []

    def measured(*args, **kwargs):
        found.append(measure_graph(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(graph, "has_command_buffers", lambda: True)
    monkeypatch.setattr(graph, "measure_graph", measured)
    return found


@pytest.fixture
def half(tmp_path, measurements, capsys):
    """A run that measured and then lost its last checkpoint."""
    assert tiny.train(tmp_path / "run", *FLAGS) == 0
    (tmp_path / "run" / "checkpoints" / "6").rename(tmp_path / "aside")
    capsys.readouterr()
    return tmp_path / "run"


def kept(run_dir) -> dict:
    return json.loads((run_dir / "graph.json").read_text())


def test_without_command_buffers_nothing_is_measured_and_the_default_is_taken(tmp_path, capsys):
    assert tiny.train(tmp_path / "run", *FLAGS) == 0
    assert "every choice is the same program on a cpu, without command buffers; takes auto" in capsys.readouterr().out
    assert not (tmp_path / "run" / "graph.json").exists()


def test_measuring_leaves_the_losses_as_they_are_and_keeps_what_it_found(half, tmp_path, measurements):
    assert tiny.train(tmp_path / "plain", *FLAGS[:-1], "auto") == 0
    assert tiny.losses(half) == tiny.losses(tmp_path / "plain")
    (found,) = measurements
    assert kept(half)["graph"] == found.graph
    assert kept(half)["milliseconds"] == {name: 1e3 * seconds for name, seconds in found.seconds.items()}
    assert json.loads((half / "config.json").read_text())["graph"] == "measure"


def test_a_run_that_goes_on_takes_its_choice_without_measuring(half, measurements, capsys):
    (half / "graph.json").write_text(json.dumps(kept(half) | {"graph": "full"}))
    assert tiny.train(half, *FLAGS, "--log-every", "2") == 0
    assert f"takes full, as measured before ({half / 'graph.json'})" in capsys.readouterr().out
    assert len(measurements) == 1


@pytest.mark.parametrize("change", ["devices", "damage"])
def test_other_devices_and_a_damaged_file_are_measured_again(half, measurements, change):
    flags = FLAGS
    if change == "devices":
        flags = [*FLAGS, "--dp", "4"]
    else:
        (half / "graph.json").write_text("{")
    assert tiny.train(half, *flags) == 0
    assert len(measurements) == 2
    assert kept(half)["graph"] == measurements[1].graph


def test_a_setup_compiles_before_anything_is_measured():
    setup = TrainSetup.of(TrainConfig(graph="measure", module="tests.odd:Mute", batch_size=4, seq_len=8))
    assert setup.options("gpu") == TrainSetup.of(TrainConfig(module="tests.odd:Mute", batch_size=4, seq_len=8)).options("gpu")
    assert setup.compile_step().as_text()
