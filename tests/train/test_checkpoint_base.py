"""Runs with `checkpoint_base` reference store adapters only, and read the frozen weights from where they came from."""

import contextlib
import math
import shutil
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from safetensors.numpy import load_file, save_file

import jgraph
from jgraph import evaluate, export, sample
from jgraph.adapters import separated
from jgraph.checkpoint import Checkpoints
from jgraph.errors import CheckpointError, ConfigError
from jgraph.interop.folder import WEIGHTS_FILE
from jgraph.train.config import LoRAConfig, TrainConfig
from jgraph.train.initial import initial_weights
from jgraph.train.rundir import RunDir
from jgraph.train.saved import read_frozen
from jgraph.train.setup import TrainSetup
from tests import tiny
from tests.interop.test_interop import FLAGS, QWEN3, make, train
from tests.train import test_distributed as distributed
from tests.train.test_resharding import assert_same_bits

pytestmark = pytest.mark.once

LORA = ("--lora.rank", "2")
REFERENCE = ("--checkpoint-base", "reference")
STEPS = ("--steps", "4", "--checkpoint-every", "2")


def flags(runs):
    return ("--init-from", str(runs / "folder"), *LORA, *STEPS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Trains from a folder in bfloat16 with scanned layers. Returns a directory with the runs `copy` and `reference`."""
    path = tmp_path_factory.mktemp("runs")
    make(path / "folder", QWEN3, dtype="bfloat16")
    assert train(path / "copy", *flags(path)) == 0
    assert train(path / "reference", *flags(path), *REFERENCE) == 0
    return path


@pytest.fixture
def stopped(runs, tmp_path):
    """Returns a copy of the run `reference` as it was after two of its four steps."""
    shutil.copytree(runs / "reference", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    return tmp_path / "run"


def restored(run, **layout):
    """Restores the newest checkpoint of a run, perhaps on other devices. Returns the step and the canonical state."""
    config = RunDir(run).saved_config(field="run").changed(**layout)
    setup = TrainSetup.from_config(config)
    read = partial(read_frozen, config, setup.model.shapes)
    with contextlib.closing(Checkpoints(run / "checkpoints", 2, read_frozen=read)) as checkpoints:
        return checkpoints.restore_latest(setup.step.canonical.shapes())


def content(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def size_of(directory):
    return sum(map(len, content(directory).values()))


@pytest.fixture
def moved(runs):
    """Moves the folder away for one test. Returns its new path."""
    (runs / "folder").rename(runs / "moved")
    yield runs / "moved"
    (runs / "folder").unlink(missing_ok=True)
    (runs / "moved").rename(runs / "folder")


def assert_refused(runs, run, message, capsys):
    """Asserts that all commands that read frozen weights print one line with a message, and change nothing."""
    before = content(run / "checkpoints")
    commands = {
        "train": lambda: train(run, *flags(runs), *REFERENCE),
        "evaluate": lambda: evaluate.main([str(run)]),
        "sample": lambda: sample.main([str(run), "--prompt", "a"]),
        "export": lambda: export.main([str(run), "--to", str(run.parent / "to")]),
    }
    for name, command in commands.items():
        capsys.readouterr()
        assert command() == 2
        err = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        assert len(err) == 1, name
        assert message in err[0]
    with pytest.raises(CheckpointError, match=message):
        jgraph.load(run)
    assert content(run / "checkpoints") == before
    assert not (run.parent / "to").exists()


@pytest.mark.long
def test_the_frozen_weights_are_not_in_the_checkpoints(runs):
    config = RunDir(runs / "reference").saved_config(field="run")
    base: Any = separated(TrainSetup.from_config(config).model.shapes)[0]
    frozen = 2 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(base))
    copied, referred = (size_of(runs / name / "checkpoints" / "base") for name in ("copy", "reference"))
    assert copied > 0.7 * frozen  # Orbax compresses
    assert referred < 0.1 * frozen
    assert "state" in {path.name for path in (runs / "reference" / "checkpoints" / "4").iterdir()}


@pytest.mark.long
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(runs, stopped, capsys):
    assert train(stopped, *flags(runs), *REFERENCE) == 0
    assert "resumed from step 2" in capsys.readouterr().out
    step, state = restored(stopped)
    _, expected = restored(runs / "copy")
    assert step == 4
    assert_same_bits(state, expected)
    for run, to in ((stopped, "resumed"), (runs / "copy", "uninterrupted")):
        assert export.main([str(run), "--to", str(stopped.parent / to)]) == 0
    assert content(stopped.parent / "resumed") == content(stopped.parent / "uninterrupted")


@pytest.mark.long
@pytest.mark.parametrize("layout", [{"fsdp": 4}, {"tp": 2, "fsdp": 2}, {"pp": 2, "num_microbatches": 2}])
def test_other_layouts_restore_the_same_state(runs, layout):
    (_, state), (_, expected) = (restored(runs / name, **layout) for name in ("reference", "copy"))
    assert_same_bits(state, expected)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(lambda leaf: leaf.sharding, expected)


@pytest.mark.long
def test_a_base_that_was_moved_is_refused_until_it_is_linked(runs, stopped, moved, capsys):
    assert_refused(runs, stopped, f"move the files back to {runs / 'folder'}, or put a link there", capsys)
    # Adapters alone can be saved without their base.
    assert export.main([str(stopped), "--to", str(stopped.parent / "adapter"), "--weights", "adapter"]) == 0
    (runs / "folder").symlink_to(moved)
    assert jgraph.load(stopped).source.endswith("after 2 steps")


@pytest.mark.long
def test_a_base_with_one_changed_value_is_refused(runs, stopped, capsys):
    file = runs / "folder" / WEIGHTS_FILE
    before = file.read_bytes()
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][5, 3] *= 2
    save_file(tensors, file, {"format": "pt"})
    try:
        assert_refused(runs, stopped, f"refers to the weights in {runs / 'folder'}, which have changed: .params", capsys)
    finally:
        file.write_bytes(before)
    assert jgraph.load(stopped).source.endswith("after 2 steps")


@pytest.mark.long
def test_a_new_run_reserves_no_room_for_the_base(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=150_000))
    assert train(tmp_path / "copy", *flags(runs)) == 2
    assert "bytes for 3 checkpoints, and 150,000 are free" in capsys.readouterr().err
    assert train(tmp_path / "reference", *flags(runs), *REFERENCE) == 0


@pytest.mark.long
def test_the_base_may_be_a_checkpoint_of_another_run_with_or_without_adapters(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    first = tmp_path / "first"
    assert train(first, *tiny.FLAGS, "--steps", "1") == 0
    lora = (*LORA, "--lora.base-dtype", "bfloat16", "--steps", "1", *REFERENCE)
    assert train(tmp_path / "second", "--continue-from", "first", *lora) == 0
    assert train(tmp_path / "third", "--continue-from", "second", *lora) == 0
    monkeypatch.chdir("/")
    expected = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), jgraph.load(first).params)
    assert_same_bits(separated(jgraph.load(tmp_path / "third").params)[0], expected)
    (first / "checkpoints" / "1").rename(first / "checkpoints" / "2")
    capsys.readouterr()
    assert evaluate.main([str(tmp_path / "third")]) == 2
    assert f"move the files back to {first / 'checkpoints' / '1'}" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_with_frozen_layers_refers_to_them(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(runs)
    frozen = ("--init-from", "folder", "--freeze", "embedding_VD", "--steps", "1")
    for name, choice in (("copy", ()), ("reference", REFERENCE)):
        assert train(tmp_path / name, *frozen, *choice) == 0
    monkeypatch.chdir(tmp_path)
    (_, state), (_, expected) = (restored(tmp_path / name) for name in ("reference", "copy"))
    assert_same_bits(state, expected)
    assert size_of(tmp_path / "reference") < size_of(tmp_path / "copy") - 256 * 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora": LoRAConfig(rank=2)}, r"must be copy in a run without given weights \(`init_from` or `continue_from`\)"),
        ({"init_from": "folder"}, r"must be copy in a run without frozen weights \(`lora.rank` or `freeze`\)"),
    ],
)
def test_a_run_without_a_base_cannot_refer_to_it(fields, message):
    with pytest.raises(ConfigError, match=f"`checkpoint_base` is reference: {message}"):
        TrainConfig.from_fields(checkpoint_base="reference", **fields)


@pytest.mark.long
def test_merged_adapters_of_another_run_are_not_a_base(runs, tmp_path):
    config = RunDir(runs / "copy").saved_config(field="run")
    fields = {"init_from": "", "continue_from": str(runs / "copy"), "run_dir": str(tmp_path), "checkpoint_base": "reference"}
    with pytest.raises(ConfigError, match="must be copy, because the adapters of the run `continue_from` are added"):
        initial_weights(config.changed(**fields, lora=LoRAConfig(rank=4, base_dtype="bfloat16")))


@pytest.mark.long
def test_two_processes_begin_refuse_and_resume_together(runs, tmp_path, moved):
    command = (*FLAGS, "--data", "python-docs", *flags(runs), *REFERENCE, "--run-dir", str(tmp_path / "run"), "--fsdp", "2")
    link = runs / "folder"
    link.symlink_to(moved)
    for begins in (True, False):
        (code, out, err), quiet = distributed.finish(distributed.start_two(*command))
        assert (code, err, quiet) == (0, "", (0, "", ""))
        assert ("resumed from step 2" in out) is not begins
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    link.unlink()
    for code, _, err in distributed.finish(distributed.start_two(*command)):
        assert code == 2
        assert len(err.splitlines()) == 1
        assert "refer to frozen weights that cannot be read" in err
