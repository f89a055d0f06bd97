"""User models in the command line."""

import contextlib
import io
import json
import shlex
import shutil
import sys

import numpy as np
import pytest

import jgraph
from jgraph import evaluate, export, sample
from jgraph.errors import ConfigError
from jgraph.report import __main__ as report
from jgraph.train.__main__ import main
from jgraph.train.config import TrainConfig
from jgraph.train.rundir import RunDir
from tests import tiny

FLAGS = shlex.split("--batch-size 4 --seq-len 32 --log-every 1 --eval-batches 2 --sample-tokens 0 --steps 30")


def run(run_dir, module, *flags):
    model = ("--model.module", f"tests.own:{module}", "--optimizer.learning-rate", "0.03")
    return main([*FLAGS, "--run-dir", str(run_dir), *model, *flags])


@pytest.mark.long
@pytest.mark.once
@pytest.mark.parametrize(
    ("module", "strategy"),
    [
        pytest.param("Normed", (), marks=pytest.mark.once),
        ("Normed", ("--fsdp", "2", "--num-microbatches", "2")),
        pytest.param("Linen", ("--dp", "2"), marks=pytest.mark.once),
    ],
    ids=["NNX, one", "NNX, fsdp", "Linen, dp"],
)
def test_a_model_with_dropout_and_running_statistics_learns_and_resumes_exactly(tmp_path, module, strategy):
    settings = ("--model.width", "8", "--model.rate", "0.1", "--checkpoint-every", "10", "--checkpoint-keep", "3", *strategy)
    assert run(tmp_path, module, *settings) == 0
    losses = tiny.losses(tmp_path)
    assert losses[-1][1] < losses[0][1]
    for step in ("20", "30"):
        shutil.rmtree(tmp_path / "checkpoints" / step)
    assert run(tmp_path, module, *settings) == 0
    assert tiny.losses(tmp_path) == losses


@pytest.mark.long
@pytest.mark.once
def test_a_batch_norm_over_the_batch_axes_has_the_same_losses_on_any_devices(tmp_path):
    layouts = {"one": (), "data": ("--dp", "4"), "fsdp": ("--fsdp", "4")}
    for name, flags in layouts.items():
        assert run(tmp_path / name, "Synced", "--steps", "3", "--model.width", "8", "--model.rate", "0", *flags) == 0
    one, *others = (np.array(tiny.losses(tmp_path / name), float) for name in layouts)
    assert np.isfinite(one[-1]).all()
    for losses in others:
        np.testing.assert_allclose(losses, one, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--pp-engine", "dispatch", "--schedule", "1f1b")], ids=["program", "dispatch"])
def test_a_pipeline_with_dropout_trains(tmp_path, flags):
    settings = ("--steps", "2", "--num-microbatches", "2", "--model.width", "8", "--pp", "2", "--schedule", "auto")
    assert run(tmp_path, "StackedWithDropout", *settings, *flags) == 0
    assert np.isfinite(np.array(tiny.losses(tmp_path), float)[-1]).all()


@pytest.mark.long
@pytest.mark.once
def test_running_statistics_of_layers_are_the_same_in_a_pipeline(tmp_path):
    settings = ("--num-microbatches", "2", "--model.width", "8")
    assert run(tmp_path / "one", "Stacked", *settings) == 0
    # `auto` measures layers with running statistics in the test above.
    assert run(tmp_path / "two", "Stacked", *settings, "--pp", "2", "--schedule", "zb-h1") == 0
    one, two = (np.array(tiny.losses(tmp_path / name), float) for name in ("one", "two"))
    # The last entry also has a held-out loss, which uses the running statistics.
    assert np.isfinite(one[-1]).all()
    np.testing.assert_allclose(two, one, rtol=1e-4)


def test_model_settings_are_flags_with_help(capsys):
    assert main(["--model.module", "tests.own:Normed", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--model.width" in out
    assert "Columns of the table." in out
    assert "--model.num-heads" not in out


@pytest.mark.long
def test_a_model_without_settings_can_be_trained_and_has_no_flags(tmp_path, capsys):
    assert run(tmp_path / "run", "Bare") == 0
    assert run(tmp_path / "other", "Bare", "--model.width", "8") == 2
    assert "--model.width" in capsys.readouterr().err


def test_a_model_without_pipeline_support_is_refused_with_the_flag(tmp_path, capsys):
    assert run(tmp_path / "run", "Normed", "--pp", "2", "--num-microbatches", "4") == 2
    assert "--pp is 2: must be 1 for tests.own:Normed" in capsys.readouterr().err


def test_a_model_without_remat_support_is_refused_with_the_flag(tmp_path, capsys):
    assert run(tmp_path, "Normed", "--remat", "layer") == 2
    assert "--remat is layer: must be nothing for tests.own:Normed" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.once
def test_the_dispatch_engine_is_refused_for_a_model_that_reduces_over_replicas(tmp_path, capsys):
    flags = ("--pp", "2", "--dp", "2", "--num-microbatches", "2", "--pp-engine", "dispatch")
    assert run(tmp_path, "StackedWithMean", *flags) == 2
    assert "--pp-engine is dispatch: must be program" in capsys.readouterr().err


# --- Modules that a run directory names are not imported ---

STRANGER = """
from pathlib import Path
from jgraph_models.gpt import GPT as Model
Path(__file__).with_name("imported").touch()
"""
OF_STRANGER = ("--steps", "2", "--data", "synthetic", "--model.mlp", "swiglu", "--sample-tokens", "4")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains a model of `stranger.py` and copies that file into the run directory. Returns the directory and the output."""
    path = tmp_path_factory.mktemp("runs") / "of a stranger"
    modules = path.with_name("modules")
    modules.mkdir()
    (modules / "stranger.py").write_text(STRANGER)
    sys.path.insert(0, str(modules))
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert tiny.train(path, *OF_STRANGER, "--model.module", "stranger:Model") == 0
    finally:
        sys.path.remove(str(modules))
    shutil.copy(modules / "stranger.py", path)
    return path, out.getvalue()


@pytest.fixture
def stranger(trained, tmp_path, monkeypatch):
    """Copies that run. The copy is the working directory and the first entry of `sys.path`."""
    path = tmp_path / "run"
    shutil.copytree(trained[0], path)
    monkeypatch.chdir(path)
    monkeypatch.syspath_prepend(str(path))
    monkeypatch.delitem(sys.modules, "stranger", raising=False)
    return path


COMMANDS = {
    "sample": (sample.main, "{run} --prompt The --max-tokens 2"),
    "evaluate": (evaluate.main, "{run} --data synthetic --eval-batches 1"),
    "export": (export.main, "{run} --to {out}"),
    "train that resumes": (main, "--run-dir {run} --steps 2 --data synthetic"),
    "train that begins with its weights": (main, "--continue-from {run} --run-dir {out} --steps 1 --sample-tokens 0"),
}


def command(name, path, *flags):
    act, args = COMMANDS[name]
    return act([*shlex.split(args.format(run=path, out=path.with_name("out"))), *flags])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_does_not_import_the_module_named_by_a_run_directory(stranger, capsys, name):
    assert command(name, stranger) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "pass --model.module stranger:Model" in err
    assert not (stranger / "imported").exists()
    assert not stranger.with_name("out").exists()


def test_a_run_is_loaded_only_if_the_caller_names_its_module(stranger):
    for module in ("", "stranger:Other"):
        with pytest.raises(ConfigError, match="pass `module` stranger:Model") as error:
            jgraph.load(stranger, module=module)
        assert error.value.field == "module"
    assert not (stranger / "imported").exists()
    assert jgraph.load(stranger, module="stranger:Model").config.module == "stranger:Model"
    assert (stranger / "imported").exists()


@pytest.mark.long
def test_every_command_imports_a_module_named_by_its_caller(trained, stranger, capsys):
    given = ("--model.module", "stranger:Model")
    for name in COMMANDS:
        same = OF_STRANGER + tuple(tiny.FLAGS) if name == "train that resumes" else ()
        assert command(name, stranger, *given, *same) == 0, capsys.readouterr().err
        shutil.rmtree(stranger.with_name("out"), ignore_errors=True)
    assert f"python -m jgraph.sample {trained[0]} {' '.join(given)} --prompt" in trained[1].replace("\n", " ")


def test_a_report_needs_no_module(stranger):
    assert report.main([str(stranger)]) == 0
    assert not (stranger / "imported").exists()


@pytest.mark.parametrize("module", ["stranger:Model; rm -rf .", "stranger:Model\x1b[2J", 5, None, {"a": 1}, ""])
def test_an_invalid_module_name_is_not_suggested_as_a_flag(stranger, capsys, module):
    fields = json.loads((stranger / "config.json").read_text())
    (stranger / "config.json").write_text(json.dumps(fields | {"module": module}))
    for name in COMMANDS:
        assert command(name, stranger) == 2
        err = capsys.readouterr().err
        assert (err.count("\n"), "pass --model.module" in err, "\x1b" in err) == (1, False, False), err


def test_a_run_of_a_built_in_model_refuses_another_module(tmp_path, capsys):
    config = TrainConfig.from_fields(run_dir=str(tmp_path / "run"))
    RunDir(tmp_path / "run").write(config, {}, {})
    assert sample.main([str(tmp_path / "run"), "--prompt", "x", "--model.module", "tests.unimportable:GPT"]) == 2
    assert "--model.module is tests.unimportable:GPT: must be jgraph_models.gpt:GPT" in capsys.readouterr().err
