"""Models that are not the library's, through the command line."""

import shlex
import shutil

import numpy as np
import pytest

from jgraph.train import main
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
def test_a_model_with_dropout_and_running_statistics_learns_and_goes_on_as_if_never_stopped(tmp_path, module, strategy):
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
def test_a_batch_norm_over_the_batch_axes_has_the_same_losses_over_any_devices(tmp_path):
    layouts = {"one": (), "data": ("--dp", "4"), "fsdp": ("--fsdp", "4")}
    for name, flags in layouts.items():
        assert run(tmp_path / name, "Synced", "--steps", "3", "--model.width", "8", "--model.rate", "0", *flags) == 0
    one, *others = (np.array(tiny.losses(tmp_path / name), float) for name in layouts)
    assert np.isfinite(one[-1]).all()
    for losses in others:
        np.testing.assert_allclose(losses, one, rtol=1e-6)


@pytest.mark.long
@pytest.mark.once
def test_running_statistics_of_layers_are_the_same_in_a_pipeline(tmp_path):
    settings = ("--num-microbatches", "4", "--model.width", "8")
    assert run(tmp_path / "one", "Stacked", *settings) == 0
    assert run(tmp_path / "two", "Stacked", *settings, "--pp", "2", "--schedule", "auto") == 0
    one, two = (np.array(tiny.losses(tmp_path / name), float) for name in ("one", "two"))
    # The last has a held-out loss too, which reads the statistics.
    assert np.isfinite(one[-1]).all()
    np.testing.assert_allclose(two, one, rtol=1e-4)


def test_settings_of_a_model_are_flags_with_their_help(capsys):
    assert main(["--model.module", "tests.own:Normed", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--model.width" in out
    assert "Columns of the table." in out
    assert "--model.num-heads" not in out


def test_a_model_without_settings_can_be_trained_and_has_no_flags(tmp_path, capsys):
    assert run(tmp_path / "run", "Bare") == 0
    assert run(tmp_path / "other", "Bare", "--model.width", "8") == 2
    assert "--model.width" in capsys.readouterr().err


def test_a_model_that_says_nothing_of_pipelines_is_refused_in_one_with_its_flag(tmp_path, capsys):
    assert run(tmp_path / "run", "Normed", "--pp", "2", "--num-microbatches", "4") == 2
    assert "--pp is 2: must be 1 for tests.own:Normed" in capsys.readouterr().err


def test_a_model_that_says_nothing_of_making_layers_again_is_refused(tmp_path, capsys):
    assert run(tmp_path, "Normed", "--remat", "layer") == 2
    assert "--remat is layer: must be nothing for tests.own:Normed" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.once
def test_the_dispatch_engine_is_refused_by_its_flag_for_a_model_that_reduces_over_replicas(tmp_path, capsys):
    flags = ("--pp", "2", "--dp", "2", "--num-microbatches", "2", "--pp-engine", "dispatch")
    assert run(tmp_path, "StackedWithMean", *flags) == 2
    assert "--pp-engine is dispatch: must be program" in capsys.readouterr().err
