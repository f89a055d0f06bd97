"""`--graph measure` of a run: when it measures, that it changes no number, and that a run keeps to its choice."""

import json
import shutil

import pytest

from jgraph.training import graph
from jgraph.training.config import TrainConfig
from jgraph.training.graph import measure_graph
from jgraph.training.setup import TrainSetup
from tests import tiny

pytestmark = [pytest.mark.long, pytest.mark.once]

FLAGS = ("--steps", "6", "--checkpoint-every", "3", "--dp", "2", "--sample-tokens", "0", "--graph", "measure")


def counts_as_gpus(patch, found):
    """CPU devices are taken for ones whose choices differ; those that were measured go to `found`."""

    def measured(*args, **kwargs):
        found.append(measure_graph(*args, **kwargs))
        return found[-1]

    patch.setattr(graph, "has_command_buffers", lambda: True)
    patch.setattr(graph, "measure_graph", measured)


@pytest.fixture
def measurements(monkeypatch):
    """What a test's own run measures."""
    counts_as_gpus(monkeypatch, found := [])
    return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A run that measured and then lost its last checkpoint, and what it measured."""
    run_dir, found = tmp_path_factory.mktemp("measured") / "run", []
    with pytest.MonkeyPatch.context() as patch:
        counts_as_gpus(patch, found)
        assert tiny.train(run_dir, *FLAGS) == 0
    shutil.rmtree(run_dir / "checkpoints" / "6")
    return run_dir, found


@pytest.fixture
def half(tmp_path, measured):
    """The same, as a run of the test's own."""
    return shutil.copytree(measured[0], tmp_path / "run")


def kept(run_dir) -> dict:
    return json.loads((run_dir / "graph.json").read_text())


def test_without_command_buffers_nothing_is_measured_and_the_default_is_taken(tmp_path, capsys):
    assert tiny.train(tmp_path / "run", *FLAGS) == 0
    assert "every choice is the same program on a cpu, without command buffers; takes auto" in capsys.readouterr().out
    assert not (tmp_path / "run" / "graph.json").exists()


def test_measuring_leaves_the_losses_as_they_are_and_keeps_what_it_found(measured, tmp_path):
    run_dir, (found,) = measured
    assert tiny.train(tmp_path / "plain", *FLAGS[:-1], "auto") == 0
    assert tiny.losses(run_dir) == tiny.losses(tmp_path / "plain")
    assert kept(run_dir)["graph"] == found.graph
    assert kept(run_dir)["milliseconds"] == {name: 1e3 * seconds for name, seconds in found.seconds.items()}
    assert json.loads((run_dir / "config.json").read_text())["graph"] == "measure"


def test_a_run_that_goes_on_takes_its_choice_without_measuring(half, measurements, capsys):
    (half / "graph.json").write_text(json.dumps(kept(half) | {"graph": "full"}))
    assert tiny.train(half, *FLAGS, "--log-every", "2") == 0
    assert f"takes full, as measured before ({half / 'graph.json'})" in capsys.readouterr().out
    assert not measurements


@pytest.mark.parametrize("change", ["devices", "damage"])
def test_other_devices_and_a_damaged_file_are_measured_again(half, measurements, change):
    flags = FLAGS
    if change == "devices":
        flags = [*FLAGS, "--dp", "4"]
    else:
        (half / "graph.json").write_text("{")
    assert tiny.train(half, *flags) == 0
    (found,) = measurements
    assert kept(half)["graph"] == found.graph


def test_a_setup_compiles_before_anything_is_measured():
    setup = TrainSetup.of(TrainConfig(graph="measure", module="tests.odd:Mute", batch_size=4, seq_len=8))
    assert setup.options("gpu") == TrainSetup.of(TrainConfig(module="tests.odd:Mute", batch_size=4, seq_len=8)).options("gpu")
    assert setup.compile_step().as_text()
