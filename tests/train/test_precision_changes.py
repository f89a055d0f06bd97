"""Runs that enter, leave and calibrate FP8, through the commands of a user."""

import json
from functools import partial

import jax
import numpy as np
import pytest

from jgraph import evaluate
from jgraph.precision.config import FP8Config
from jgraph.train import _validation
from jgraph.train.__main__ import parse
from jgraph.train._functional import batch_shapes
from jgraph.train.config import TrainConfig
from jgraph.train.saved import SavedRun
from jgraph.train.setup import TrainSetup
from tests import tiny
from tests.train.test_pipeline_training import Trained, batches_of, trained

pytestmark = pytest.mark.long

RUN = ("--data", "synthetic", "--batch-size", "8", "--checkpoint-every", "2", "--eval-every", "2", "--steps", "4")
DELAYED = ("--precision", "fp8", "--fp8.recipe", "delayed", "--fp8.history", "8")
CALIBRATE = (*DELAYED, "--fp8.compute", "calibrate")
RECIPES = {
    "bf16": (),
    "delayed": DELAYED,
    "current": ("--precision", "fp8"),
    "e4m3": ("--precision", "fp8", "--fp8.format", "e4m3", "--fp8.blocks", "inner", "--fp8.first", "0", "--fp8.last", "0"),
}


def train(run_dir, *flags):
    assert tiny.train(run_dir, *RUN, *flags) == 0
    return [(loss, heldout) for _, loss, heldout in tiny.losses(run_dir)]


def window(run_dir):
    """Returns the amax history of the newest checkpoint as [H, S, 3]."""
    saved = SavedRun(run_dir, None)
    try:
        like = TrainSetup.from_config(saved.config).step.canonical.shapes()
        return np.asarray(saved.place(observed=like.observed)["observed"].window)
    finally:
        saved.close()


@pytest.mark.once
def test_a_run_continues_in_every_other_precision(tmp_path):
    before, untrained = tmp_path / "start", train(tmp_path / "start")[0][0]
    for name in ("delayed", "current", "bf16", "e4m3"):
        first_loss = train(tmp_path / name, *RECIPES[name], "--continue-from", str(before))[0][0]
        assert first_loss < untrained - 0.5, name
        before = tmp_path / name


def trained_with(*flags: str) -> Trained:
    """Trains without the command, which also compiles the initial state and an evaluation of every layout."""
    config = parse([*tiny.FLAGS, *RUN, *flags])
    assert config is not None
    return trained(config)


def heldout_loss(run: Trained) -> float:
    tokens = batches_of(run.setup.config)[run.setup.config.steps].astype(np.int32)
    batch = _validation.place_whole(run.setup, tokens)
    return float(jax.jit(partial(_validation.loss, run.setup))(run.state, batch))


def window_after(run: Trained) -> np.ndarray:
    """Returns the amax history of a state as [H, S, 3]."""
    return np.asarray(run.setup.step.canonical.of(run.state).observed.window)


@pytest.mark.parametrize("layout", [(), ("--fsdp", "2"), ("--pp", "2", "--num-microbatches", "2", "--model.num-layers", "2")])
def test_calibration_trains_like_bf16_bit_for_bit_and_fills_the_histories_of_fp8(layout):
    plain, calibrated, fp8 = (trained_with(*layout, *precision) for precision in ((), CALIBRATE, DELAYED))
    assert calibrated.losses == plain.losses != fp8.losses
    if not layout:
        assert heldout_loss(calibrated) == heldout_loss(plain)
    observed, in_fp8 = window_after(calibrated), window_after(fp8)
    assert (observed[:4] > 0).all()
    # At the first step, all weights and the input of the first matmul are equal. Later matmuls read results of FP8 matmuls.
    np.testing.assert_array_equal(observed[3, :, 1], in_fp8[3, :, 1])
    assert observed[3, 0, 0] == in_fp8[3, 0, 0]


@pytest.mark.once
def test_a_calibrated_run_resumes_in_fp8_with_its_histories(tmp_path, capsys):
    train(tmp_path, *CALIBRATE)
    before = window(tmp_path)
    assert "calibration: only observed, not in FP8" in " ".join(capsys.readouterr().out.split())
    train(tmp_path, *DELAYED, "--steps", "6", "--optimizer.extend", "constant")
    assert "emulated in bfloat16" in capsys.readouterr().out
    np.testing.assert_array_equal(window(tmp_path)[2:6], before[:4])


@pytest.mark.once
def test_another_run_takes_over_the_histories_of_a_calibrated_run(tmp_path):
    train(tmp_path / "calibrated", *CALIBRATE)
    train(tmp_path / "fp8", *DELAYED, "--continue-from", str(tmp_path / "calibrated"))
    np.testing.assert_array_equal(window(tmp_path / "fp8")[4:], window(tmp_path / "calibrated")[:4])


@pytest.mark.once
def test_an_fp8_run_is_evaluated_in_the_dtype_of_the_model(tmp_path):
    run = train(tmp_path / "run", *DELAYED)
    assert evaluate.main([str(tmp_path / "run"), "--json", str(tmp_path / "result.json")]) == 0
    assert json.loads((tmp_path / "result.json").read_text())["loss"] == pytest.approx(run[-1][1], rel=1e-6)
    setup = TrainSetup.from_config(TrainConfig.from_fields(precision="fp8", fp8=FP8Config(recipe="delayed")))
    batch = batch_shapes(setup.config.input, 1)
    text = str(jax.make_jaxpr(lambda state, batch: _validation.loss(setup, state, batch))(setup.step.state, batch))
    assert "bf16" in text
    assert "f8_" not in text
    assert "f8_" in str(jax.make_jaxpr(setup.step.jitted())(setup.step.state, setup.batch()))
