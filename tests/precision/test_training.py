"""`python -m jgraph.train --precision fp8`: its log, its errors, and resumption on other devices."""

import pytest

from jgraph.errors import ConfigError
from jgraph.pipeline import _autotune
from jgraph.precision.config import FP8Config
from jgraph.schedule import NAMES
from jgraph.train.config import TrainConfig
from jgraph.train.setup import TrainSetup
from tests import tiny
from tests.train.test_pipeline_training import config_of

RUN = ("--data", "synthetic", "--batch-size", "8", "--checkpoint-every", "3", "--sample-tokens", "0")


def test_an_fp8_recipe_without_fp8_precision_is_refused():
    with pytest.raises(ConfigError) as error:
        TrainConfig.from_fields(fp8=FP8Config(margin=1))
    assert error.value.field == "fp8.margin"


def test_a_model_without_an_fp8_matmul_is_refused_with_the_precision_flag(tmp_path, capsys):
    assert tiny.train(tmp_path, *RUN, "--precision", "fp8", "--model.d-model", "24", "--model.d-ff", "40") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--precision is fp8" in line
    assert "not all multiples of 16" in line


def test_a_gpu_without_fp8_requires_the_emulate_option(monkeypatch):
    from jgraph.train import setup

    monkeypatch.setattr(setup.jax, "default_backend", lambda: "gpu")
    with pytest.raises(ConfigError) as error:
        setup.fp8_recipe(TrainConfig.from_fields(precision="fp8"))
    assert error.value.field == "precision"
    assert setup.fp8_recipe(TrainConfig.from_fields(precision="fp8", fp8=FP8Config(emulate=True))) is not None


def test_mxfp8_is_refused_on_a_hopper_gpu_without_emulation(monkeypatch):
    from jgraph.train import setup

    class Hopper:
        device_kind = "NVIDIA H200"

    monkeypatch.setattr(setup.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(setup.jax, "devices", lambda: [Hopper()])
    with pytest.raises(ConfigError, match=r"`fp8\.recipe` is mxfp8: must be current or delayed on NVIDIA H200") as error:
        setup.fp8_recipe(TrainConfig.from_fields(precision="fp8", fp8=FP8Config(recipe="mxfp8")))
    assert error.value.field == "fp8.recipe"
    emulated = FP8Config(recipe="mxfp8", emulate=True)
    assert setup.fp8_recipe(TrainConfig.from_fields(precision="fp8", fp8=emulated)) == emulated
    Hopper.device_kind = "NVIDIA B200"
    assert setup.fp8_recipe(TrainConfig.from_fields(precision="fp8", fp8=FP8Config(recipe="mxfp8"))) is not None


@pytest.mark.long
@pytest.mark.once
def test_a_run_logs_the_fp8_matmuls_the_emulation_on_cpus_and_that_it_does_not_reshard_fp8_weights(tmp_path, capsys):
    assert tiny.train(tmp_path, *RUN, "--steps", "2", "--precision", "fp8", "--fsdp", "2", "--gather-per", "pass") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "fp8 (current scaling): 4 of 4 matmuls with parameters; emulated in bfloat16" in out
    assert "weights in FP8 stay gathered for the backward" in out


@pytest.mark.long
@pytest.mark.once
def test_a_run_of_a_user_model_resumes_with_delayed_scaling(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text("from jgraph_models.gpt import GPT as Model\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = (*RUN, "--model.module", "mine:Model", "--precision", "fp8", "--fp8.recipe", "delayed", "--steps", "1")
    assert tiny.train(tmp_path / "run", *flags) == 0
    assert tiny.train(tmp_path / "run", *flags) == 0, capsys.readouterr().err


@pytest.mark.long
@pytest.mark.once
def test_auto_measures_schedules_with_fp8_layers(monkeypatch):
    monkeypatch.setattr(_autotune, "_SECONDS", 0.001)
    fp8 = FP8Config(recipe="delayed")
    setup = TrainSetup.from_config(config_of(pp=2, schedule="auto", precision="fp8", fp8=fp8, num_layers=3, num_microbatches=2))
    assert setup.step.bound.pipeline.schedule.name in NAMES


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_the_dispatch_engine_accepts_every_fp8_recipe(recipe):
    config = TrainConfig.from_fields(
        precision="fp8", fp8=FP8Config(recipe=recipe), pp=2, num_microbatches=4, pp_engine="dispatch"
    )
    assert config.pipeline.pp_engine == "dispatch"


@pytest.mark.parametrize(("flag", "value"), [("--fp8.keep", "blocks/0/*"), ("--fp8.blocks", "inner")])
def test_a_pipeline_refuses_an_fp8_recipe_for_some_layers_with_its_flag(tmp_path, capsys, flag, value):
    pipeline = ("--pp", "2", "--num-microbatches", "2", "--model.num-layers", "3")
    assert tiny.train(tmp_path, *RUN, *pipeline, "--precision", "fp8", flag, value) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert flag in line
