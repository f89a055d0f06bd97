"""Tests that wgrads can run later and in any order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.extend import core

import jgraph
from jgraph.kernels.grouped import WGRAD, grouped_dot
from jgraph.xla.donation import alias_map
from tests.autodiff.stages import Stage, gpt_block, gradients_by_vjp, hidden, mlp, mlp_params, normal

MICROBATCHES = 5
SPLIT = jgraph.split_backward(mlp)
PARAMS = mlp_params()
XS = [normal(20 + m, 2, 16, 32) for m in range(MICROBATCHES)]


def zeros():
    return jax.tree.map(jnp.zeros_like, PARAMS)


@st.composite
def interleavings(draw):
    """Draws a valid sequence of (kind, microbatch): each dgrad after its forward, each wgrad after its dgrad."""
    todo = [("F", m) for m in range(MICROBATCHES)]
    sequence = []
    while todo:
        kind, m = todo.pop(draw(st.integers(0, len(todo) - 1)))
        sequence.append((kind, m))
        if kind != "W":
            todo.append(("I" if kind == "F" else "W", m))
    return sequence


def play(sequence):
    total, held = zeros(), {}
    for kind, m in sequence:
        if kind == "F":
            held[m] = SPLIT.forward(PARAMS, XS[m])
        elif kind == "I":
            y, residuals = held[m]
            _, early, stash = SPLIT.dgrad(PARAMS, residuals, y)
            total = total | {"bias": total["bias"] + early["bias"]}
            held[m] = residuals.after_dgrad(), stash
        else:
            total = SPLIT.accumulate(total, PARAMS, *held.pop(m))
    return total


@given(interleavings())
@settings(max_examples=30)
def test_wgrads_in_any_order_give_the_undelayed_sum(sequence):
    undelayed = play([(kind, m) for m in range(MICROBATCHES) for kind in "FIW"])
    for ours, theirs in zip(jax.tree.leaves(play(sequence)), jax.tree.leaves(undelayed), strict=True):
        # Two orders of a sum of n float32 terms differ by at most 2(n - 1) roundings of the sum of their magnitudes.
        bound = 2 * (MICROBATCHES - 1) * np.finfo(np.float32).eps * float(jnp.abs(theirs).max()) * MICROBATCHES
        assert float(jnp.abs(ours - theirs).max()) <= bound


def test_the_same_order_gives_bitwise_equal_gradients():
    sequence = [("F", m) for m in range(5)] + [("I", m) for m in range(5)] + [("W", m) for m in (3, 0, 4, 1, 2)]
    for first, second in zip(jax.tree.leaves(play(sequence)), jax.tree.leaves(play(sequence)), strict=True):
        np.testing.assert_array_equal(first, second)


def test_the_undelayed_sum_equals_the_sum_of_jax_vjp():
    total = play([(kind, m) for m in range(MICROBATCHES) for kind in "FIW"])
    parts = [gradients_by_vjp(Stage(mlp, PARAMS, x), mlp(PARAMS, x))[0] for x in XS]
    for ours, theirs in zip(jax.tree.leaves(total), jax.tree.leaves(jax.tree.map(lambda *g: sum(g), *parts)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * float(jnp.abs(theirs).max()))


def relative(ours, reference) -> list[float]:
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(reference), strict=True)
    return [float(jnp.linalg.norm((a.astype(jnp.float32) - b).ravel()) / jnp.linalg.norm(b.ravel())) for a, b in pairs]


@pytest.mark.long
def test_in_bfloat16_main_grad_is_as_accurate_as_jax_vjp():
    exact = gpt_block()
    low = gpt_block(compute_dtype="bfloat16")
    dy = hidden(3).astype(jnp.bfloat16)
    reference, _ = gradients_by_vjp(exact, dy.astype(jnp.float32))
    x = exact.x.astype(jnp.bfloat16)
    theirs, _ = gradients_by_vjp(Stage(low.run, low.params, x), dy)
    split = jgraph.split_backward(low.run)
    _, residuals = split.forward(low.params, x)
    _, early, stash = split.dgrad(low.params, residuals, dy)
    main_grad = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), low.params)
    ours = split.merge(early, split.accumulate(main_grad, low.params, residuals, stash))
    late = split.wgrad(low.params, residuals, stash)
    delayed = [leaf is not None for leaf in jax.tree.leaves(late, is_leaf=lambda leaf: leaf is None)]
    for mine, other, is_delayed in zip(relative(ours, reference), relative(theirs, reference), delayed, strict=True):
        assert not is_delayed or mine <= 1.15 * other


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_main_grad_stays_float32_and_in_place(dtype):
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    split = jgraph.split_backward(mlp)
    spec = split.spec(params, hidden().astype(dtype))
    main_grad = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
    lowered = jax.jit(split.accumulate, donate_argnums=0, keep_unused=True).lower(main_grad, params, spec.residuals, spec.stash)
    compiled = lowered.compile()
    assert [leaf.dtype for leaf in jax.tree.leaves(compiled.out_info)] == [jnp.float32] * 3
    # The bias is not delayed and is returned unchanged.
    assert {out: arg for out, arg in alias_map(compiled).items() if out < 3} == {0: 0, 1: 1, 2: 2}


def test_the_gradient_of_a_scaled_weight_includes_scale_and_cast():
    def run(p, x):
        return x @ (p["w"].astype(jnp.bfloat16) * jnp.bfloat16(0.75))

    params, x = {"w": normal(2, 32, 8)}, hidden().astype(jnp.bfloat16)
    split = jgraph.split_backward(run)
    y, residuals = split.forward(params, x)
    _, _, stash = split.dgrad(params, residuals, y)
    reference = gradients_by_vjp(Stage(run, params, x), y)[0]["w"]
    total = split.accumulate({"w": jnp.ones((32, 8))}, params, residuals, stash)["w"] - 1
    for ours in (split.wgrad(params, residuals, stash)["w"], total):
        assert ours.dtype == jnp.float32
        assert float(jnp.abs(ours - reference).max()) <= 2**-7 * float(jnp.abs(reference).max())


def test_gradients_of_bfloat16_parameters_are_not_rounded_before_main_grad():
    params, x = {"w": normal(2, 32, 8).astype(jnp.bfloat16)}, hidden().astype(jnp.bfloat16)
    split = jgraph.split_backward(lambda p, x: x @ p["w"])
    y, residuals = split.forward(params, x)
    _, _, stash = split.dgrad(params, residuals, y)
    total = split.accumulate({"w": jnp.zeros((32, 8))}, params, residuals, stash)["w"]
    exact = jnp.einsum("btd,btf->df", x, y, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(total, exact, rtol=0, atol=1e-6 * float(jnp.abs(exact).max()))
    assert split.wgrad(params, residuals, stash)["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    "product",
    [
        grouped_dot,
        lambda x, w, sizes: grouped_dot(x, w.reshape(128, 8).reshape(4, 32, 8), sizes),
        jax.lax.ragged_dot,
    ],
    ids=["grouped", "grouped, reshaped", "ragged"],
)
def test_gradients_of_experts_are_added_to_main_grad_in_float32(product, dtype):
    def run(p, x):
        return product(x, p["w"].astype(x.dtype), sizes)

    params, x, sizes = {"w": normal(2, 4, 32, 8).astype(dtype)}, normal(3, 20, 32).astype(jnp.bfloat16), jnp.array([9, 0, 4, 5])
    split = jgraph.split_backward(run)
    y, residuals = split.forward(params, x)
    stash = split.dgrad(params, residuals, y)[2]
    with jax.disable_jit():  # XLA removes a rounding that is followed by its inverse
        total = split.accumulate({"w": jnp.zeros((4, 32, 8))}, params, residuals, stash)["w"]
    of_group = jnp.repeat(jnp.eye(4, dtype=x.dtype), sizes, axis=0, total_repeat_length=18)
    exact = jnp.einsum("bg,bd,bf->gdf", of_group, x[:18], y[:18], preferred_element_type=jnp.float32)
    np.testing.assert_allclose(total, exact, rtol=0, atol=1e-6 * float(jnp.abs(exact).max()))
    assert split.wgrad(params, residuals, stash)["w"].dtype == dtype


def grouped_wgrads(run, params) -> list[int]:
    """Returns the number of operands of each wgrad kernel in `accumulate`."""
    split, x = jgraph.split_backward(run), normal(3, 20, 32)
    spec = split.spec(params, x)

    def found(jaxpr):
        own = [len(eqn.invars) for eqn in jaxpr.eqns if eqn.params.get("name") == WGRAD]
        return own + [count for inner in core.subjaxprs(jaxpr) for count in found(inner)]

    return found(jax.make_jaxpr(split.accumulate)(params, params, spec.residuals, spec.stash).jaxpr)


def test_a_kernel_adds_to_main_grad_if_its_weight_is_a_parameter_of_one_matmul():
    sizes, params = jnp.array([9, 0, 4, 5]), {"w": normal(2, 4, 32, 32)}
    assert grouped_wgrads(lambda p, x: grouped_dot(x, p["w"], sizes), params) == [4]
    assert grouped_wgrads(lambda p, x: grouped_dot(x, p["w"].swapaxes(1, 2), sizes), params) == [3]
    assert grouped_wgrads(lambda p, x: grouped_dot(grouped_dot(x, p["w"], sizes), p["w"], sizes), params) == [3, 3]
    layers = {"w": normal(2, 2, 4, 32, 32)}
    assert grouped_wgrads(lambda p, x: jax.lax.scan(lambda x, w: (grouped_dot(x, w, sizes), None), x, p["w"])[0], layers) == [3]
