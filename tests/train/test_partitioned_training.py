"""Tensor and context parallelism have the training results of one device, in every layout and for all kinds of models."""

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

from jgraph.errors import ConfigError, JgraphError
from jgraph.moe import MoEConfig
from jgraph.precision.config import FP8Config
from jgraph.train.config import LoRAConfig, OptimizerConfig, TrainConfig
from jgraph.train.setup import TrainSetup
from jgraph_models import gpt
from jgraph_models.gpt import GPTConfig
from tests.train.test_pipeline_training import Trained, assert_same, trained

STEPS = 20
# One layer, because compilation takes most of the time; two in a loop and in a pipeline.
MODEL = GPTConfig(num_layers=1, d_model=32, num_heads=4, num_kv_heads=4, d_ff=64, vocab_size=64, compute_dtype="float32")
# With AdamW's default eps, rounding decides the sign of an update if the gradient is nearly zero. Every step is clipped,
# because large steps amplify rounding errors. The largest measured error is 1e-6, of a gradient norm.
OPTIMIZER = OptimizerConfig(eps=1e-3, warmup_steps=1, learning_rate=3e-3, clip_norm=0.1)
PIPELINE = {"pp": 2, "num_microbatches": 4}
# Devices of the axis `tensor` share the tokens of a sequence, because they cannot share one row.
ONE_ROW = {"tp": 2, "num_microbatches": 8}


def config(model: dict[str, Any] | None = None, **fields: Any) -> TrainConfig:
    """Returns a configuration of `STEPS` steps. `model` overrides settings of the model."""
    fields = {"steps": STEPS, "batch_size": 8, "seq_len": 16, "seed": 2} | fields
    changes = {"num_layers": 2 if "pp" in fields else 1} | (model or {})
    return TrainConfig.from_fields(**fields, model=dataclasses.replace(MODEL, **changes), optimizer=OPTIMIZER)


@functools.cache
def on_one_device(num_layers: int = 1) -> Trained:
    return trained(config({"num_layers": num_layers}))


def layouts(*rows: dict[str, Any]) -> list[Any]:
    return [pytest.param(row, id=" ".join(f"{name}={value}" for name, value in row.items())) for row in rows]


def assert_same_on_one_device(fields: dict[str, Any]):
    ours = trained(config(**fields))
    assert ours.setup.step.num_devices == ours.setup.config.parallel.num_devices > 1
    assert_same(ours, on_one_device(ours.setup.config.model.num_layers))


@pytest.mark.long
def test_the_compared_run_learns_and_every_step_is_clipped():
    assert on_one_device().losses[-1] < on_one_device().losses[0] - 0.3
    assert min(on_one_device().grad_norms) > OPTIMIZER.clip_norm


def test_twenty_steps_equal_one_device():
    assert_same_on_one_device({"fsdp": 2, "cp": 2, "tp": 2})


# With the layout above, every two mesh axes are together in a layout, each axis has two and four devices, microbatches
# come with each axis, and `gather_per` "pass" with the axes `context` and `tensor`.
@pytest.mark.long
@pytest.mark.parametrize(
    "fields",
    layouts(
        {"tp": 2},
        {"cp": 2},
        ONE_ROW,
        {"cp": 2, "tp": 4},
        {"cp": 4, "tp": 2},
        {"dp": 4, "cp": 2},
        {"fsdp": 4, "cp": 2, "gather_per": "pass", "num_microbatches": 2},
        {"fsdp": 2, "tp": 4, "gather_per": "pass", "num_microbatches": 2},
        {"dp": 2, "fsdp": 2, "tp": 2, "num_microbatches": 2},
        {"cp": 2, **ONE_ROW},
    ),
)
def test_twenty_steps_of_other_layouts_equal_one_device(fields):
    assert_same_on_one_device(fields)


@pytest.mark.long
@pytest.mark.parametrize(("fields", "axes"), [({}, {"0"}), (ONE_ROW, {"1"})], ids=["rows", "tokens"])
def test_activations_are_gathered_along_rows_or_else_along_tokens(fields, axes):
    setup = TrainSetup.from_config(config({"scan_layers": True}, **{"tp": 2} | fields))
    hlo = setup.compile_step().executable.as_text()
    # Gathered arrays with fewer axes are parameters.
    found = re.findall(r"= \w+\[\d+,\d+,[\d,]+\][^=]* all-gather(?:-start)?\(.*?dimensions=\{(\d)\}", hlo)
    assert set(found) == axes


TURNS = {"tensor_overlap": "turns"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ({}, {"tp": 4, "remat": "layer"}),
        ({}, {"tp": 2, "data_documents": "separate"}),
        ({"mlp": "swiglu", "qk_norm": "head", "attention_bias": "qkv"}, {"fsdp": 2, "tp": 2}),
    ],
    ids=["tp=4 remat", "documents", "fsdp=2 qwen"],
)
def test_sequences_in_turns_have_the_results_of_one_device(model, fields):
    one = {name: value for name, value in fields.items() if name == "data_documents"}
    assert_same(trained_on(1, 1, model | TURNS, fields), trained_on(1, 1, model, one))


def exchanges(model: dict[str, Any], **fields: Any) -> int:
    """Returns the number of permutes in a step of one layer."""
    setup = TrainSetup.from_config(config({"num_layers": 1} | model, **{"tp": 2} | fields))
    return setup.step.lower(setup.batch()).as_text().count("collective_permute")


@pytest.mark.long
def test_sequences_take_turns_only_if_asked_and_if_each_device_has_some():
    # Tokens and results of two stages, forward and backward.
    assert exchanges(TURNS) == 8
    for model, fields in (({"tensor_overlap": "none"}, {}), (TURNS, {"cp": 2}), (TURNS, ONE_ROW)):
        assert exchanges(model, **fields) == 0, (model, fields)


@pytest.mark.long
def test_auto_takes_turns_with_large_matmuls_only(monkeypatch):
    results = 4 * 16 * (4 + 4 + 4) * 8 // 2  # sequences and tokens of a device, heads and their size
    monkeypatch.setattr(gpt, "_LARGE", results)
    assert exchanges({}) == 8
    assert exchanges({"scan_layers": True}) == exchanges({"moe": MoEConfig(num_experts=4), "mlp": "swiglu"}) == 0
    assert exchanges({}, lora=LoRAConfig(rank=2)) == exchanges({}, precision="fp8", fp8=FP8Config(emulate=True)) == 0
    monkeypatch.setattr(gpt, "_LARGE", results + 1)
    assert exchanges({}) == 0


@pytest.mark.parametrize("fields", [{"lora": LoRAConfig(rank=2)}, {"precision": "fp8"}], ids=["lora", "fp8"])
def test_turns_are_refused_where_matmuls_are_replaced(fields):
    with pytest.raises(ConfigError, match=r"`model\.tensor_overlap` is turns: must be auto or none in FP8 and with LoRA"):
        TrainSetup.from_config(config(TURNS, tp=2, **fields))


@pytest.mark.parametrize("fields", [{"scan_layers": True}, {"moe": MoEConfig(num_experts=4)}], ids=["scanned", "experts"])
def test_turns_are_refused_for_other_models(fields):
    with pytest.raises(ConfigError, match=r"`model\.tensor_overlap` is turns: must be auto or none with"):
        dataclasses.replace(MODEL, mlp="swiglu", **TURNS, **fields)


# --- Kinds of models ---

EVERYTHING = {
    "mlp": "swiglu",
    "num_kv_heads": 2,
    "attention_bias": "qkv",
    "qk_norm": "head",
    "head": "untied",
    "scan_layers": True,
    "num_layers": 2,
}


def separated(tokens_BS: np.ndarray) -> dict[str, np.ndarray]:
    """Returns a batch of two documents per row, with another boundary in each row, and random weights."""
    B, T = tokens_BS.shape[0], tokens_BS.shape[1] - 1
    second_B1 = np.arange(1, B + 1)[:, None]
    starts_BT = np.where(np.arange(T) < second_B1, 0, second_B1).astype(np.int32)
    weights_BT = np.random.default_rng(int(tokens_BS.sum())).random((B, T), np.float32)
    return {"tokens": tokens_BS, "starts": starts_BT, "weights": weights_BT}


def trained_on(tp: int, cp: int, model: dict[str, Any], fields: dict[str, Any]) -> Trained:
    separate = fields.get("data_documents") == "separate"
    return trained(config(model, **{"steps": 5, "tp": tp, "cp": cp} | fields), separated if separate else np.asarray)


MORE = {"loss_chunk": 16, "vocab_size": 61}
SEPARATE, MICROBATCHES, REMAT = {"data_documents": "separate"}, {"num_microbatches": 2}, {"remat": "layer"}


# The first case has every setting. In the others, each setting is on twice, and no two settings are on in the same two cases.
# So each setting is tried with and without each other one, except that microbatches always come with `qk_norm`.
@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (EVERYTHING | MORE, SEPARATE | MICROBATCHES | REMAT),
        ({"mlp": "swiglu", "num_kv_heads": 2, "attention_bias": "qkv", "qk_norm": "head"}, MICROBATCHES),
        ({"mlp": "swiglu", "head": "untied", "scan_layers": True, "num_layers": 2, "loss_chunk": 16}, {}),
        ({"num_kv_heads": 2, "head": "untied", "vocab_size": 61}, SEPARATE),
        ({"attention_bias": "qkv", "scan_layers": True, "num_layers": 2, "vocab_size": 61}, REMAT),
        ({"qk_norm": "head", "loss_chunk": 16}, SEPARATE | MICROBATCHES | REMAT),
    ],
    ids=str,
)
def test_kinds_of_models_equal_one_device(model, fields):
    assert_same(trained_on(2, 2, model, fields), trained_on(1, 1, model, fields))


@functools.cache
def in_full_precision() -> Trained:
    return trained_on(1, 1, {}, {"steps": 3, "seed": 3})


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_emulated_fp8_equals_fp8_on_one_device(recipe):
    # Few steps, because a difference of 1e-7 rarely changes the FP8 number that an activation is rounded to; then the gradient
    # norms differ by 1e-4. The third step uses a history of two steps.
    fields = {"precision": "fp8", "fp8": FP8Config(recipe=recipe, emulate=True, history=4), "steps": 3, "seed": 3}
    ours, theirs = trained_on(2, 2, {}, fields), trained_on(1, 1, {}, fields)
    assert_same(ours, theirs)
    for a, b in zip(*(jax.tree.leaves(jax.device_get(run.state.observed)) for run in (ours, theirs)), strict=True):
        assert recipe == "current" or b.any()
        np.testing.assert_allclose(a, b, rtol=1e-6)
    # The gradients are those of FP8.
    full = in_full_precision()
    assert np.abs(np.array(ours.grad_norms) / full.grad_norms - 1).max() > 1e-4


@pytest.mark.long
def test_bfloat16_has_nearly_the_losses_of_one_device():
    fields, low = {"steps": STEPS}, {"compute_dtype": "bfloat16"}
    ours, theirs = trained_on(2, 2, low, fields), trained_on(1, 1, low, fields)
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=2**-9)
    # float32 differs by at most 1e-6.
    assert np.abs(np.array(ours.losses) / on_one_device().losses - 1).max() > 1e-5


# --- Refusals ---


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"tp": 3}, "tp", "`tp` is 3: must divide the 4 heads or units of blocks/0/attention/out/kernel, axis -2"),
        (
            {"tp": 4, "model": {"num_kv_heads": 2}},
            "tp",
            "`tp` is 4: must divide the 2 heads or units of blocks/0/attention/qkv/kernel, axis -1",
        ),
        ({"cp": 4, "seq_len": 12}, "cp", "`cp` is 4: must be such that 2 x `cp` divides `seq_len` 12"),
        ({"tp": 2, "pp_engine": "dispatch"} | PIPELINE, "pp_engine", "`pp_engine` is dispatch: must be program with `tp` 2"),
        ({"cp": 2, "pp_engine": "dispatch"} | PIPELINE, "pp_engine", "`pp_engine` is dispatch: must be program with `cp` 2"),
        (
            {"tp": 2, "fsdp": 2, "shard_rules": ("*/up/kernel=1",)},
            "shard_rules",
            "`shard_rules` shards blocks/0/mlp/up/kernel along axis 1: must be another axis, because this one is split over "
            "another mesh axis",
        ),
        ({"tp": 4, "cp": 4}, "", "`cp` 4 `tp` 4"),
        ({"tp": 0}, "tp", "`tp` is 0: must be positive"),
    ],
    ids=str,
)
def test_a_layout_that_is_not_supported_is_refused_in_one_line(fields, field, message):
    with pytest.raises(JgraphError) as error:
        TrainSetup.from_config(config(**fields))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    if field:
        assert isinstance(error.value, ConfigError)
        assert error.value.field == field


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tp", "`tp` is 2: must be 1 for {module}, which has no tensor_rules(config) and no partition name `tensor`"),
        ("cp", "`cp` is 2: must be 1 for {module}, which has no attribute `splits_sequences`"),
    ],
)
def test_a_model_without_support_is_refused_in_one_line(name, message):
    module = "tests.own:Bare"
    with pytest.raises(ConfigError) as error:
        TrainSetup.from_config(TrainConfig.from_fields(module=module, batch_size=4, seq_len=16, **{name: 2}))
    assert (str(error.value), error.value.field) == (message.format(module=module), name)


def test_a_pipeline_of_a_model_without_rules_is_refused_in_one_line():
    with pytest.raises(ConfigError) as error:
        TrainSetup.from_config(TrainConfig.from_fields(module="tests.own:Stacked", batch_size=8, seq_len=16, tp=2, **PIPELINE))
    message = "`tp` is 2: must be 1 in a pipeline for tests.own:Stacked, which has no tensor_rules(config)"
    assert (str(error.value), error.value.field) == (message, "tp")
