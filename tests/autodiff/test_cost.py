"""No FLOP twice, no byte too many."""

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
    """FLOPs of forward, dgrad, wgrad, and of all of it by `jax.vjp`."""
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


def test_an_mlp_costs_a_third_each():
    N, D, F = 512, 1024, 4096
    params = {"up": shape(D, F), "down": shape(F, D), "bias": shape(D)}
    forward, dgrad, wgrad, joint = parts(mlp, params, shape(1, N, D))
    theory = 2 * N * D * F * 2
    for part in (forward, dgrad, wgrad):
        assert part == pytest.approx(theory, rel=0.02)
    assert dgrad + wgrad <= 1.005 * (joint - forward)


def test_a_gpt_block_costs_what_theory_says():
    T, D, F = 256, 1024, 4096
    settings = config(d_model=D, d_ff=F, num_heads=8, num_kv_heads=8)
    graph, params = nnx.split(nnx.eval_shape(lambda: Block(settings, rngs=nnx.Rngs(0))))
    table = rotary(T, settings.head_size, settings.rope_theta)
    forward, dgrad, wgrad, joint = parts(lambda p, x: nnx.merge(graph, p)(x, table), params, shape(2, T, D))
    weights = 2 * (2 * T) * (4 * D * D + 2 * D * F)
    # XLA's attention on a CPU computes the whole square: two products forward, four back.
    attention = 2 * (2 * T) * T * D * 2
    assert forward == pytest.approx(weights + attention, rel=0.02)
    assert dgrad == pytest.approx(weights + 2 * attention, rel=0.02)
    assert wgrad == pytest.approx(weights, rel=0.02)
    assert dgrad + wgrad <= 1.005 * (joint - forward)


def test_experts_cost_a_third_each_and_keep_what_theory_lists():
    stage, rows = STAGES["grouped experts"](), 2 * 2 * 16
    # On a CPU each of the three experts multiplies all rows; up is two products, down one.
    product = 3 * 2 * rows * 32 * 64
    assert [int(part // product) for part in parts(stage.run, stage.params, stage.x)] == [3, 3, 3, 9]
    spec = jgraph.split_backward(stage.run).spec(stage.params, stage.x)
    assert leaves(spec.residuals.dgrad) == sorted(
        [
            ((32, 3), "float32"),  # the router's logits, their largest and the softmax's sum
            ((32,), "float32"),
            ((32,), "float32"),
            ((32, 2), "float32"),  # of each token the weights and numbers of its experts
            ((32, 2), "int32"),
            ((64,), "int32"),  # the order of the rows
            ((64, 32), "float32"),  # the experts' outputs, for the gradient of the weights
        ]
    )
    assert leaves(spec.residuals.wgrad) == sorted(
        [
            ((2, 16, 32), "float32"),  # x
            ((64, 32), "float32"),  # its rows by expert, and how many each has
            ((3,), "int32"),
            ((64, 128), "float32"),  # gate and up, from which the SwiGLU is made again
        ]
    )
    assert leaves(spec.stash.arrays) == [((32, 3), "float32"), ((64, 32), "float32"), ((64, 128), "float32")]


def test_no_product_is_in_two_parts():
    split = jgraph.split_backward(mlp)
    params, x = mlp_params(), hidden()
    spec = split.spec(params, x)
    compiled = {
        "forward": jax.jit(split.forward).lower(params, x),
        "dgrad": jax.jit(split.dgrad).lower(params, spec.residuals, spec.y),
        "wgrad": jax.jit(split.wgrad).lower(params, spec.residuals, spec.stash),
    }
    counts = {name: lowered.compile().cost_analysis()["flops"] for name, lowered in compiled.items()}
    product = 2 * 32 * 32 * 64
    # Two products each; what is over them is elementwise, less than half a product.
    assert {name: int(count // product) for name, count in counts.items()} == {"forward": 2, "dgrad": 2, "wgrad": 2}


def test_layers_under_a_scan_have_no_product_twice():
    N, D, F, layers = 256, 1024, 4096, 4
    params = {"up": shape(layers, D, F), "down": shape(layers, F, D), "bias": shape(layers, D)}
    forward, dgrad, wgrad, _ = parts(scanned().run, params, shape(1, N, D))
    body = 2 * N * D * F * 2
    # XLA counts a loop's body once; wgrad has no loop, and does all layers.
    assert forward == pytest.approx(body, rel=0.02)
    assert dgrad == pytest.approx(body, rel=0.02)
    assert wgrad == pytest.approx(layers * body, rel=0.02)


def leaves(arrays) -> list[tuple[tuple[int, ...], str]]:
    return sorted((leaf.shape, str(leaf.dtype)) for leaf in arrays)


def test_a_gelu_keeps_its_input_and_nothing_else():
    spec = jgraph.split_backward(mlp).spec(mlp_params(), hidden())
    assert leaves(spec.residuals.dgrad) == []
    assert leaves(spec.residuals.wgrad) == [((2, 16, 32), "float32"), ((2, 16, 64), "float32")]
    assert leaves(spec.stash.arrays) == [((2, 16, 32), "float32"), ((2, 16, 64), "float32")]


def test_a_gpt_block_keeps_exactly_what_theory_lists():
    stage = gpt_block(compute_dtype="bfloat16")
    spec = jgraph.split_backward(stage.run).spec(stage.params, hidden().astype(jnp.bfloat16))
    B, T, D, F, heads, K = 2, 16, 32, 64, 4, 8
    low, high = "bfloat16", "float32"
    assert leaves(spec.residuals.dgrad) == sorted(
        [
            ((B, T, 3 * D), low),  # queries, keys, values before the rotation
            ((B, heads, T, 1, T), high),  # XLA's attention: scores, and the softmax's largest and sum
            ((1, B, heads, T), high),
            ((1, B, heads, T), high),
        ]
    )
    assert leaves(spec.residuals.wgrad) == sorted(
        [
            ((B, T, D), low),  # x, from which the first norm's output is made again
            ((B, T), high),  # that norm's mean square
            ((B, heads, K, 1, T), low),  # attention's output
            ((B, T, D), low),  # what attention adds to x
            ((B, T), high),  # the second norm's mean square
            ((B, T, F), low),  # the pre-activation, from which the GELU is made again
        ]
    )
    assert leaves(spec.stash.arrays) == sorted([((B, T, 3 * D), low), ((B, T, D), low), ((B, T, F), low), ((B, T, D), low)])
    assert spec.nbytes() == {
        "forward_dgrad": 2 * B * T * 3 * D + 4 * B * heads * T * T + 2 * 4 * B * heads * T,
        "forward_wgrad": 2 * B * T * (3 * D + F) + 2 * 4 * B * T,
        "stash": 2 * B * T * (5 * D + F),
    }


@pytest.mark.parametrize("recompute", ["elementwise", pytest.param("nothing", marks=pytest.mark.once)])
@pytest.mark.parametrize("name", ["mlp", "gpt block", "scan", "weight in pieces", "checkpoint", "nnx.scan"])
def test_nothing_is_kept_that_is_the_same_for_every_microbatch(name, recompute):
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


def test_the_spec_is_what_comes_out():
    stage = gpt_block()
    split = jgraph.split_backward(stage.run)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (stage.params, stage.x))
    spec = split.spec(*shapes)
    y, residuals = split.forward(stage.params, stage.x)
    stash = split.dgrad(stage.params, residuals, y)[2]
    for said, seen in zip(
        jax.tree.leaves((spec.y, spec.residuals, spec.stash)), jax.tree.leaves((y, residuals, stash)), strict=True
    ):
        assert (said.shape, said.dtype) == (seen.shape, seen.dtype)
    assert spec.delayed == tuple(f"{p}/kernel/value" for p in ("attention/out", "attention/qkv", "mlp/down", "mlp/up"))


def kept_bytes(policy) -> int:
    stage = gpt_block()
    run = stage.run if policy is None else jax.checkpoint(stage.run, policy=policy)
    nbytes = jgraph.split_backward(run, recompute="nothing").spec(stage.params, stage.x).nbytes()
    return nbytes["forward_dgrad"] + nbytes["forward_wgrad"]


def test_a_stages_own_checkpoint_decides_what_is_kept():
    policies = jax.checkpoint_policies
    everything, products, nothing = map(kept_bytes, (None, policies.dots_saveable, policies.nothing_saveable))
    assert nothing == 2 * 16 * 32 * 4  # the input
    assert nothing < products < everything


def test_after_dgrad_only_wgrads_pool_is_held():
    split = jgraph.split_backward(gpt_block().run)
    stage = gpt_block()
    _, residuals = split.forward(stage.params, stage.x)
    assert residuals.dgrad
    assert residuals.after_dgrad().dgrad == ()
    assert residuals.after_dgrad().wgrad is residuals.wgrad
