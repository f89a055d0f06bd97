"""Packed rows have the loss and gradients of separate documents in padded rows, in every layout."""

import dataclasses
import shutil
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jgraph.data import apart
from jgraph.errors import ConfigError
from jgraph.train import _validation
from jgraph.train.config import OptimizerConfig, TrainConfig
from jgraph.train.setup import TrainSetup
from jgraph_models.gpt import GPT, GPTConfig
from tests import tiny

CONFIG = GPTConfig(
    num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, d_ff=48, vocab_size=31, qk_norm="head", compute_dtype="float32"
)
# Document lengths in each row: some have one or two tokens, and the end of a row cuts off its last document.
LENGTHS = [[9, 1, 2, 5], [17], [4, 4, 9], [1, 1, 8, 7]]
ROWS, S = len(LENGTHS), 17
TOKENS = np.random.default_rng(0).integers(0, 31, (ROWS, S)).astype(np.int32)


def packed(lengths=LENGTHS) -> dict[str, np.ndarray]:
    firsts = np.zeros((ROWS, S), bool)
    for row, own in zip(firsts, lengths, strict=True):
        assert sum(own) == S
        row[np.cumsum([0, *own[:-1]])] = True
    return apart(TOKENS, firsts)


def padded_loss(model: GPT) -> jax.Array:
    """Returns the mean loss over all predicted tokens with each document alone in a padded row."""
    ends = [(row, *np.cumsum([0, *own])[i : i + 2]) for row, own in enumerate(LENGTHS) for i in range(len(own))]
    tokens, counts = np.zeros((len(ends), S), np.int32), np.zeros((len(ends), S - 1), bool)
    for i, (row, start, stop) in enumerate(ends):
        tokens[i, : stop - start] = TOKENS[row, start:stop]
        counts[i, : stop - start - 1] = True
    logp = jax.nn.log_softmax(model.logits(tokens[:, :-1]))
    losses = -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.sum(losses * counts) / counts.sum()


@pytest.fixture(scope="module")
def weights() -> Any:
    graphdef, params = nnx.split(GPT(CONFIG, rngs=nnx.Rngs(0)), nnx.Param)
    # Large weights, so that attention to another document changes the loss.
    return graphdef, jax.tree.map(lambda leaf: 4 * leaf if leaf.ndim > 1 else leaf, nnx.to_pure_dict(params))


@pytest.fixture(scope="module")
def padded(weights) -> Any:
    graphdef, params = weights
    return jax.jit(jax.value_and_grad(lambda params: padded_loss(nnx.merge(graphdef, params))))(params)


@pytest.fixture(scope="module")
def loss_and_grads(weights) -> Any:
    graphdef, _ = weights
    return jax.jit(jax.value_and_grad(lambda params, batch: nnx.merge(graphdef, params).loss(batch)))


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * np.abs(b).max()), found[1], expected[1])


@pytest.mark.long
def test_packed_rows_have_the_loss_and_gradients_of_padded_rows(weights, padded, loss_and_grads):
    assert_same(loss_and_grads(weights[1], packed()), padded)


@pytest.mark.parametrize("wrong", ["a boundary one token early", "a boundary one token late", "every target counts"])
def test_the_comparison_detects_wrong_boundaries_and_weights(weights, padded, loss_and_grads, wrong):
    shift = {"early": -1, "late": 1}.get(wrong.split()[-1], 0)
    batch = packed([[9 + shift, 1, 2, 5 - shift], *LENGTHS[1:]])
    if wrong == "every target counts":
        batch["weights"] = np.ones_like(batch["weights"])
    assert abs(float(loss_and_grads(weights[1], batch)[0]) - float(padded[0])) > 1e-4


def config_of(**fields: Any) -> TrainConfig:
    return TrainConfig.from_fields(
        **{"batch_size": ROWS, "seq_len": S - 1, "data_documents": "separate", "model": CONFIG} | fields,
        optimizer=OptimizerConfig(clip_norm=1e9),
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"num_microbatches": 2, "dp": 2, "remat": "layer"}, marks=pytest.mark.once),
        pytest.param({"num_microbatches": 2, "fsdp": 2}, marks=pytest.mark.once),
        {"num_microbatches": 2, "pp": 2, "fsdp": 2, "remat": "layer"},
        pytest.param({"num_microbatches": 2, "pp": 2, "pp_engine": "dispatch", "schedule": "1f1b"}, marks=pytest.mark.once),
    ],
    ids=lambda layout: " ".join(f"{name}={value}" for name, value in layout.items()),
)
def test_every_layout_has_the_loss_and_the_gradients_of_padded_rows(weights, padded, layout):
    setup = TrainSetup.from_config(config_of(**layout))
    step, state = setup.compile_step(), setup.step.init(weights[1])
    held = jax.jit(partial(_validation.loss, setup))(state, _validation.place_whole(setup, packed()))
    np.testing.assert_allclose(held, padded[0], rtol=2e-6)
    _, metrics = step(state, setup.step.place(packed()))
    np.testing.assert_allclose(metrics.loss, padded[0], rtol=2e-6)
    sums = [float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(setup.step.bound.layout.pack(padded[1]))]
    np.testing.assert_allclose(metrics.grad_square_sums, sums, rtol=5e-5)


@pytest.mark.long
def test_scanned_layers_have_the_same_loss(weights, padded):
    _, params = weights
    blocks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["blocks"].values())
    graphdef, _ = nnx.split(GPT(dataclasses.replace(CONFIG, scan_layers=True), rngs=nnx.Rngs(0)), nnx.Param)
    found = jax.jit(lambda params: nnx.merge(graphdef, params).loss(packed()))(params | {"blocks": blocks})
    np.testing.assert_allclose(found, padded[0], rtol=2e-6)


@pytest.mark.parametrize("attention", ["cudnn", "fused"])
def test_an_attention_kernel_without_document_support_is_refused(attention):
    config = dataclasses.replace(CONFIG, attention=attention, num_kv_heads=4, qk_norm="none", compute_dtype="bfloat16")
    with pytest.raises(ConfigError) as error:
        _validation.check_loss(TrainSetup.from_config(config_of(model=config)))
    assert error.value.field == "model.attention"


@pytest.mark.parametrize(("layout", "field"), [({}, "module"), ({"pp": 2, "num_microbatches": 4}, "data_documents")])
def test_a_model_without_document_support_is_refused(layout, field):
    with pytest.raises(ConfigError) as error:
        _validation.check_loss(TrainSetup.from_config(config_of(module="tests.own:Stacked", model=None, **layout)))
    assert error.value.field == field


@pytest.mark.long
@pytest.mark.once
def test_a_run_resumes_with_the_losses_of_an_uninterrupted_run(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(f"{i} " * (3 + i % 9) for i in range(400)))
    flags = (
        "--data",
        str(text),
        "--data.documents",
        "separate",
        "--steps",
        "4",
        "--checkpoint-every",
        "2",
        "--eval-every",
        "2",
    )
    assert tiny.train(tmp_path / "run", *flags) == 0
    losses = tiny.losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    assert tiny.train(tmp_path / "run", *flags, "--fsdp", "2") == 0
    np.testing.assert_allclose(np.array(tiny.losses(tmp_path / "run"), float), np.array(losses, float), rtol=2e-3)
    assert tiny.train(tmp_path / "joined", *flags, "--data.documents", "joined") == 0
    assert abs(tiny.losses(tmp_path / "joined")[0][1] - losses[0][1]) > 1e-3
