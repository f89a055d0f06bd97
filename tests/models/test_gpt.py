"""GPT: shapes, dtypes, causality, and variants. `tests/parity/` compares its numbers with PyTorch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jgraph.errors import ConfigError
from jgraph.mesh import on_ranks
from jgraph.train import presets
from jgraph_models.gpt import GPT, MLP, GPTConfig, attention_kernel

CONFIG = GPTConfig(
    num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, d_ff=48, vocab_size=61, mlp="swiglu", head="untied",
    compute_dtype="float32",
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 17)).astype(np.int32)


@functools.cache
def split(config, seed=0):
    """Returns the graphdef and the parameters. Computed once."""
    graphdef, params = nnx.split(GPT(config, rngs=nnx.Rngs(seed)), nnx.Param)
    return graphdef, nnx.to_pure_dict(params)


def loss_and_grads(graphdef, params):
    return jax.jit(jax.value_and_grad(lambda p: nnx.merge(graphdef, p).loss(TOKENS)))(params)


@functools.cache
def logits_of(config):
    """Returns the compiled function from parameters and tokens to logits."""
    graphdef, _ = split(config)
    return jax.jit(lambda params, tokens: nnx.merge(graphdef, params).logits(tokens))


def replace(**changes):
    return dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_logits_and_loss_are_float32(compute_dtype):
    model = GPT(replace(compute_dtype=compute_dtype), rngs=nnx.Rngs(0))
    logits, loss = nnx.eval_shape(lambda model: (model.logits(TOKENS), model.loss(TOKENS)), model)
    assert (logits.shape, logits.dtype) == ((2, 17, 61), jnp.float32)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


def test_a_program_has_each_rotary_table_once():
    config = replace(num_layers=4)
    graphdef, params = split(config)
    gradient = jax.jit(jax.grad(lambda params: nnx.merge(graphdef, params).loss(TOKENS)))
    tables = [const for const in gradient.trace(params).jaxpr.consts if np.shape(const)[:1] == (16,)]
    assert sorted(map(np.shape, tables)) == [(16, 4), (16, 4)]


def test_hidden_states_are_in_the_compute_dtype():
    model = GPT(replace(compute_dtype="bfloat16"), rngs=nnx.Rngs(0))
    assert nnx.eval_shape(lambda model: model.hidden(TOKENS), model).dtype == jnp.bfloat16


@pytest.mark.parametrize("changes", [{}, {"mlp": "gelu", "head": "tied"}], ids=["swiglu", "gelu"])
def test_bfloat16_compute_keeps_weights_and_gradients_in_float32(changes):
    graphdef, params = split(replace(compute_dtype="bfloat16", **changes))
    _, grads = jax.eval_shape(lambda p: loss_and_grads(graphdef, p), params)
    assert {leaf.dtype for leaf in jax.tree.leaves((params, grads))} == {jnp.dtype(jnp.float32)}


@pytest.mark.long
def test_the_loss_in_bfloat16_is_close_to_float32():
    graphdef, params = split(CONFIG)
    in_bfloat16, _ = split(replace(compute_dtype="bfloat16"))
    # Rounding to bfloat16 changes a number by up to 1/256. The loss is a mean over 32 tokens of numbers near log(61) = 4.1.
    loss = jax.jit(lambda graph, params: nnx.merge(graph, params).loss(TOKENS), static_argnums=0)
    found, expected = float(loss(in_bfloat16, params)), float(loss(graphdef, params))
    assert found == pytest.approx(expected, rel=1 / 256)


def test_the_loss_is_the_mean_cross_entropy_of_the_logits_and_nearly_uniform_at_first():
    graphdef, params = split(CONFIG)

    @jax.jit
    def losses(params):
        model = nnx.merge(graphdef, params)
        logp_BTV = jax.nn.log_softmax(model.logits(TOKENS[:, :-1]))
        return model.loss(TOKENS), -jnp.take_along_axis(logp_BTV, TOKENS[:, 1:, None], axis=-1).mean()

    loss, expected = map(float, losses(params))
    assert loss == pytest.approx(expected, rel=1e-6)
    # A new model predicts nearly uniformly.
    assert loss == pytest.approx(np.log(61), rel=0.02)


# --- Scanned layers ---


@pytest.fixture(scope="module")
def scanned_and_unrolled():
    """Returns (loss, gradients) of both models with the same weights. Gradients of blocks are stacked."""

    def stacked(tree):
        return tree | {
            "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *(tree["blocks"][i] for i in sorted(tree["blocks"])))
        }

    unrolled, params = split(CONFIG)
    scanned, shapes = split(replace(scan_layers=True))
    assert jax.tree.map(jnp.shape, stacked(params)) == jax.tree.map(jnp.shape, shapes)
    loss, grads = loss_and_grads(unrolled, params)
    return loss_and_grads(scanned, stacked(params)), (loss, stacked(grads))


@pytest.mark.long
def test_scanned_layers_have_the_loss_of_unrolled_layers(scanned_and_unrolled):
    (scanned, _), (unrolled, _) = scanned_and_unrolled
    assert scanned == pytest.approx(float(unrolled), rel=1e-6)


@pytest.mark.long
def test_scanned_layers_have_the_gradients_of_unrolled_layers(scanned_and_unrolled):
    (_, scanned), (_, unrolled) = scanned_and_unrolled
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max()), scanned, unrolled)


def test_scanned_layers_start_with_different_weights():
    _, params = split(replace(scan_layers=True))
    first, second = params["blocks"]["mlp"]["up"]["kernel"]
    assert not np.allclose(first, second)


def test_a_cpu_does_not_transpose_gradients_of_hidden_activations():
    graphdef, params = nnx.split(MLP(replace(mlp="gelu"), rngs=nnx.Rngs(0)))
    x_BTD = jnp.ones((2, 8, 32))
    gradient = jax.jit(jax.grad(lambda params: jnp.sum(nnx.merge(graphdef, params)(x_BTD) ** 2)))
    hlo = gradient.lower(params).compile().as_text()
    assert "f32[16,48]" in hlo
    assert "f32[48,16]" not in hlo


# --- Attention ---


@pytest.mark.parametrize("position", [1, 8, 16])
def test_a_token_does_not_change_the_logits_before_it(position):
    changed = TOKENS.copy()
    changed[:, position] = (changed[:, position] + 1) % 61
    before, after = (logits_of(CONFIG)(split(CONFIG)[1], tokens) for tokens in (TOKENS, changed))
    np.testing.assert_array_equal(before[:, :position], after[:, :position])
    assert (before[:, position:] != after[:, position:]).any(axis=(0, 2)).all(), "all later logits change"


def test_grouped_query_attention_equals_repeated_keys_and_values():
    _, params = split(CONFIG)

    def repeat_kv(path, leaf):
        if "qkv" not in jax.tree_util.keystr(path):
            return leaf
        query, key, value = jnp.split(leaf.reshape(32, 8, 8), [4, 6], axis=1)
        return jnp.concatenate([query, key.repeat(2, axis=1), value.repeat(2, axis=1)], axis=1).reshape(32, -1)

    repeated = jax.tree_util.tree_map_with_path(repeat_kv, params)
    expected, actual = logits_of(replace(num_kv_heads=4))(repeated, TOKENS), logits_of(CONFIG)(params, TOKENS)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_attention_depends_only_on_relative_positions():
    """The logits of a text that repeats one token are the same at every position."""
    logits = logits_of(CONFIG)(split(CONFIG)[1], np.full(TOKENS.shape, 7, np.int32))
    np.testing.assert_allclose(logits, jnp.broadcast_to(logits[:, :1], logits.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_the_default_attention_on_a_cpu_is_xla(compute_dtype):
    assert attention_kernel(replace(compute_dtype=compute_dtype), 64) == "xla"


def test_the_default_attention_on_a_gpu_is_cudnn(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert attention_kernel(replace(compute_dtype="bfloat16"), 64) == "cudnn"


def test_the_default_attention_in_float32_on_a_gpu_is_xla(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert attention_kernel(CONFIG, 64) == "xla"


@pytest.mark.parametrize("changes", [{"attention": "fused"}, {"attention": "flash"}, {"norm": "fused"}], ids=str)
def test_fused_kernels_have_the_same_loss_and_gradients(changes):
    graphdef, params = split(replace(num_kv_heads=4))
    fused, _ = split(replace(num_kv_heads=4, **changes))
    for one, other in zip(*(jax.tree.leaves(loss_and_grads(graph, params)) for graph in (graphdef, fused)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kernel", ["xla", "cudnn", "flash", "fused"])
def test_a_named_attention_kernel_is_used(kernel, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert attention_kernel(replace(attention=kernel, compute_dtype="bfloat16", num_kv_heads=4), 64) == kernel


def test_a_head_size_that_cudnn_does_not_support_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    config = replace(d_model=40, num_heads=4, compute_dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"head size 10 is a multiple of 8 .* or choose `model.attention` xla"):
        attention_kernel(config, 64)


@pytest.mark.long
@pytest.mark.parametrize("scan_layers", [False, True])
def test_remat_saves_fewer_residuals_and_has_the_same_gradients(scan_layers):
    def trained(remat):
        model = GPT(replace(num_layers=4, scan_layers=scan_layers), rngs=nnx.Rngs(0))
        model.remat = remat
        graphdef, params = nnx.split(model, nnx.Param)
        residuals = jax.eval_shape(lambda p: jax.vjp(lambda p: nnx.merge(graphdef, p).loss(TOKENS), p)[1], params)
        return sum(leaf.size for leaf in jax.tree.leaves(residuals)), loss_and_grads(graphdef, params)

    (kept, expected), (few, found) = trained("nothing"), trained("layer")
    weights = sum(leaf.size for leaf in jax.tree.leaves(expected[1]))
    assert few - weights < 0.3 * (kept - weights)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_chunk_of_the_loss_must_divide_the_tokens_of_each_device():
    mesh, spec = Mesh(np.array(jax.devices()[:2])[None], ("data", "context")), PartitionSpec()

    def trace(chunk):
        graphdef, params = split(replace(loss_chunk=chunk))
        jax.eval_shape(on_ranks(lambda params: nnx.merge(graphdef, params).loss(TOKENS), mesh, (spec,), spec), params)

    trace(16)  # each device has 16 of 32 tokens
    with pytest.raises(ConfigError, match=r"`model\.loss_chunk` is 32: must be a divisor of the 16 tokens"):
        trace(32)


# --- Sizes ---


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        *[("gpt-124m", 124e6), ("gpt-350m", 354e6), ("gpt-1b3", 1.3e9), ("gpt-7b", 6.6e9)],
        *[("llama3-1b", 1.236e9), ("llama3-8b", 8.030e9), ("qwen3-0.6b", 0.596e9), ("qwen3-8b", 8.191e9)],
    ],
)
def test_a_preset_has_the_published_number_of_parameters(preset, published):
    config = presets.preset(preset).model

    def count(num_layers: int) -> int:
        sized = dataclasses.replace(config, num_layers=num_layers)
        params = nnx.split(nnx.eval_shape(lambda: GPT(sized, rngs=nnx.Rngs(0))), nnx.Param)[1]
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    # All layers have the same shapes, and building 36 of them takes seconds.
    layer = count(2) - count(1)
    assert count(1) + (config.num_layers - 1) * layer == pytest.approx(published, rel=0.015)


def test_a_tied_head_has_no_parameter():
    untied, tied = split(CONFIG)[1], split(replace(head="tied"))[1]
    assert untied.keys() - tied.keys() == {"head_DV"}


def test_the_same_seed_has_the_same_weights():
    jax.tree.map(np.testing.assert_array_equal, split(CONFIG)[1], split.__wrapped__(CONFIG)[1])


def test_another_seed_has_other_weights():
    first, second = split(CONFIG)[1], split(CONFIG, seed=1)[1]
    assert not np.array_equal(first["embedding_VD"], second["embedding_VD"])
