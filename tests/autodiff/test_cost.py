"""Tests the FLOPs of forward, dgrad and wgrad, and the sizes of residuals and stashes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgraph
from jgraph_models.gpt import Block
from jgraph_models.rotary import rotary
from tests.autodiff.stages import STAGES, config, gpt_block, gradient_like, hidden, mlp, mlp_params, normal, scanned

# N tokens, D model, F hidden


def flops(run, *args) -> float:
    return jax.jit(run).lower(*args).compile().cost_analysis()["flops"]


def parts(stage, params, x):
    """Returns the FLOPs of forward, dgrad, wgrad and of `jax.vjp` with both."""
    split = jgraph.split_backward(stage)
    spec = split.spec(params, x)
    dy = spec.y
    return (
        flops(split.forward, params, x),
        flops(split.dgrad, params, spec.residuals, dy),
        flops(split.wgrad, params, spec.residuals.after_dgrad(), spec.stash),
        flops(lambda params, x, dy: (lambda y, vjp: (y, vjp(dy)))(*jax.vjp(stage, params, x)), params, x, dy),
    )


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def test_forward_dgrad_and_wgrad_of_an_mlp_have_equal_flops():
    N, D, F = 512, 1024, 4096
    params = {"up": shape(D, F), "down": shape(F, D), "bias": shape(D)}
    forward, dgrad, wgrad, joint = parts(mlp, params, shape(1, N, D))
    theory = 2 * N * D * F * 2
    for part in (forward, dgrad, wgrad):
        assert part == pytest.approx(theory, rel=0.02)
    assert dgrad + wgrad <= 1.005 * (joint - forward)


@pytest.mark.long
def test_a_gpt_block_has_the_expected_flops():
    T, D, F = 256, 1024, 4096
    settings = config(d_model=D, d_ff=F, num_heads=8, num_kv_heads=8)
    graph, params = nnx.split(nnx.eval_shape(lambda: Block(settings, rngs=nnx.Rngs(0))))
    table = rotary(T, settings.head_size, settings.rope_theta)
    forward, dgrad, wgrad, joint = parts(lambda p, x: nnx.merge(graph, p)(x, table), params, shape(2, T, D))
    weights = 2 * (2 * T) * (4 * D * D + 2 * D * F)
    # XLA's attention on a CPU computes all T x T scores: two matmuls forward, four backward.
    attention = 2 * (2 * T) * T * D * 2
    assert forward == pytest.approx(weights + attention, rel=0.02)
    assert dgrad == pytest.approx(weights + 2 * attention, rel=0.02)
    assert wgrad == pytest.approx(weights, rel=0.02)
    assert dgrad + wgrad <= 1.005 * (joint - forward)


@pytest.mark.long
def test_experts_have_the_expected_flops_and_saved_arrays():
    stage, rows = STAGES["grouped experts"](), 2 * 2 * 16
    # On a CPU each of the three experts multiplies all rows. up counts as two matmuls of this size, down as one.
    product = 3 * 2 * rows * 32 * 64
    assert [int(part // product) for part in parts(stage.run, stage.params, stage.x)] == [3, 3, 3, 9]
    spec = jgraph.split_backward(stage.run).spec(stage.params, stage.x)
    assert leaves(spec.residuals.dgrad) == sorted(
        [
            ((32, 3), "float32"),  # router logits, and the maximum and the sum of their softmax
            ((32,), "float32"),
            ((32,), "float32"),
            ((32, 2), "float32"),  # weights and indices of the experts of each token
            ((32, 2), "int32"),
            ((64,), "int32"),  # the order of the rows
            ((64, 32), "float32"),  # the experts' outputs, for the gradient of the weights
        ]
    )
    assert leaves(spec.residuals.wgrad) == sorted(
        [
            ((2, 16, 32), "float32"),  # x
            ((64, 32), "float32"),  # its rows by expert, and the number of rows of each expert
            ((3,), "int32"),
            ((64, 128), "float32"),  # gate and up, to recompute the SwiGLU
        ]
    )
    assert leaves(spec.stash.arrays) == [((32, 3), "float32"), ((64, 32), "float32"), ((64, 128), "float32")]


def test_scanned_layers_recompute_no_matmul():
    N, D, F, layers = 256, 1024, 4096, 4
    params = {"up": shape(layers, D, F), "down": shape(layers, F, D), "bias": shape(layers, D)}
    forward, dgrad, wgrad, _ = parts(scanned().run, params, shape(1, N, D))
    body = 2 * N * D * F * 2
    # XLA counts the body of a loop once. wgrad computes all layers without a loop.
    assert forward == pytest.approx(body, rel=0.02)
    assert dgrad == pytest.approx(body, rel=0.02)
    assert wgrad == pytest.approx(layers * body, rel=0.02)


def leaves(arrays) -> list[tuple[tuple[int, ...], str]]:
    return sorted((leaf.shape, str(leaf.dtype)) for leaf in arrays)


def test_a_gelu_saves_only_its_input():
    spec = jgraph.split_backward(mlp).spec(mlp_params(), hidden())
    assert leaves(spec.residuals.dgrad) == []
    assert leaves(spec.residuals.wgrad) == [((2, 16, 32), "float32"), ((2, 16, 64), "float32")]
    assert leaves(spec.stash.arrays) == [((2, 16, 32), "float32"), ((2, 16, 64), "float32")]


def test_a_gpt_block_saves_the_expected_arrays():
    stage = gpt_block(compute_dtype="bfloat16")
    spec = jgraph.split_backward(stage.run).spec(stage.params, hidden().astype(jnp.bfloat16))
    B, T, D, F, heads, K = 2, 16, 32, 64, 4, 8
    low, high = "bfloat16", "float32"
    assert leaves(spec.residuals.dgrad) == sorted(
        [
            ((B, T, 3 * D), low),  # queries, keys, values before the rotation
            ((B, heads, T, 1, T), high),  # XLA's attention: scores, and the maximum and the sum of the softmax
            ((1, B, heads, T), high),
            ((1, B, heads, T), high),
        ]
    )
    assert leaves(spec.residuals.wgrad) == sorted(
        [
            ((B, T, D), low),  # x, to recompute the output of the first norm
            ((B, T), high),  # mean square of that norm
            ((B, heads, K, 1, T), low),  # output of attention
            ((B, T, D), low),  # output projection of attention
            ((B, T), high),  # mean square of the second norm
            ((B * T, F), low),  # the pre-activation of the MLP, a matrix on CPUs, to recompute the GELU
        ]
    )
    # The last two are of the MLP, which computes matrices on CPUs.
    shapes = [(B, T, 3 * D), (B, T, D), (B * T, F), (B * T, D)]
    assert leaves(spec.stash.arrays) == sorted((shape, low) for shape in shapes)
    assert spec.nbytes() == {
        "forward_dgrad": 2 * B * T * 3 * D + 4 * B * heads * T * T + 2 * 4 * B * heads * T,
        "forward_wgrad": 2 * B * T * (3 * D + F) + 2 * 4 * B * T,
        "stash": 2 * B * T * (5 * D + F),
    }


@pytest.mark.parametrize("recompute", ["elementwise", pytest.param("nothing", marks=pytest.mark.once)])
@pytest.mark.parametrize(
    "name", ["mlp", "gpt block", "scan", "weight in pieces", "checkpoint", pytest.param("nnx.scan", marks=pytest.mark.once)]
)
def test_every_saved_array_depends_on_the_microbatch(name, recompute):
    stage = STAGES[name]()
    split = jgraph.split_backward(stage.run, recompute=recompute)
    kept = []
    for seed in (11, 12):
        y, residuals = split.forward(stage.params, normal(seed, *stage.x.shape), *stage.extra)
        stash = split.dgrad(stage.params, residuals, jax.tree.map(lambda leaf, seed=seed: leaf * seed, gradient_like(y)))[2]
        kept.append([*residuals.dgrad, *residuals.wgrad, *stash.arrays])
    assert kept[0]
    for first, second in zip(*kept, strict=True):
        assert not np.array_equal(first, second)


def test_the_spec_has_the_shapes_of_the_results():
    stage = gpt_block()
    split = jgraph.split_backward(stage.run)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (stage.params, stage.x))
    spec = split.spec(*shapes)
    y, residuals = split.forward(stage.params, stage.x)
    stash = split.dgrad(stage.params, residuals, y)[2]
    for expected, found in zip(
        jax.tree.leaves((spec.y, spec.residuals, spec.stash)), jax.tree.leaves((y, residuals, stash)), strict=True
    ):
        assert (expected.shape, expected.dtype) == (found.shape, found.dtype)
    assert spec.delayed == tuple(f"{p}/kernel/value" for p in ("attention/out", "attention/qkv", "mlp/down", "mlp/up"))


def kept_bytes(policy) -> int:
    stage = gpt_block()
    run = stage.run if policy is None else jax.checkpoint(stage.run, policy=policy)
    nbytes = jgraph.split_backward(run, recompute="nothing").spec(stage.params, stage.x).nbytes()
    return nbytes["forward_dgrad"] + nbytes["forward_wgrad"]


@pytest.mark.long
def test_the_checkpoint_policy_of_a_stage_selects_the_saved_arrays():
    policies = jax.checkpoint_policies
    everything, products, nothing = map(kept_bytes, (None, policies.dots_saveable, policies.nothing_saveable))
    assert nothing == 2 * 16 * 32 * 4  # the input
    assert nothing < products < everything
