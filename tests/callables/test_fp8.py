"""FP8 graphed callables: every order equals single calls, and the FP8 state is the maximum over microbatches."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph
from jgraph import FP8Config
from tests.callables.chain import assert_close, assert_same_bits, loss_fn, stage

# B rows, D model, H hidden
B, D, H, M = 16, 32, 48, 3
RECIPES = {"current": FP8Config(), "delayed": FP8Config(recipe="delayed", history=3)}
WHOLE = [1, 2, 1, 2, 1, 2] + [-2] * M + [-1] * M
SPLIT = [1, 2, 1, 2, -2, 1, 2, -2, -1, -2, -2.5, -1, -2.5, -1, -2.5, -1.5, -1.5, -1.5]


def make(recipe):
    """Returns two FP8 functions, their (params, state, weights), and the inputs and targets of every microbatch."""

    def normal(seed, *shape):
        return 0.3 * jax.random.normal(jax.random.key(seed), shape)

    fns = tuple(jgraph.fp8(stage, RECIPES[recipe]) for _ in range(2))
    xs, targets = ([(1 + m) * normal(seed + m, B, D) for m in range(M)] for seed in (10, 20))
    given = []
    for i, fn in enumerate(fns):
        params = {"w": normal(3 * i, D, H), "b": normal(3 * i + 1, H), "v": normal(3 * i + 2, H, D)}
        state = jax.tree.map(jnp.ones_like, fn.init(params, xs[0]))
        given.append((params, state, jax.jit(fn.quantize)(params, state, xs[0])))
    return fns, tuple(given), xs, targets


def build(fns, given, xs, **options):
    return jgraph.make_graphed_callables(fns, given, ((xs[0],),) * len(fns), **options)


def merged(total, gradient):
    """Sums parameter gradients over microbatches and takes the maximum of the FP8 states."""
    if total is None:
        return gradient
    (params, state, _), (more, after, none) = total, gradient
    return jax.tree.map(jnp.add, params, more), jax.tree.map(jnp.maximum, state, after), none


def single_calls(graphed, given, xs, targets):
    losses, sums = [], [None, None]
    for x, target in zip(xs, targets, strict=True):
        middle = graphed[0](given[0], x)
        loss, dy = jax.value_and_grad(loss_fn)(graphed[1](given[1], middle), target)
        for i in (1, 0):
            gradient, dy = graphed[i].backward(dy)
            sums[i] = merged(sums[i], gradient)
        losses.append(loss)
    return losses, sums


@cache
def reference(recipe):
    """Returns the results of `make` with the losses and gradients of single calls."""
    fns, given, xs, targets = made = make(recipe)
    return made, single_calls(build(fns, given, xs), given, xs, targets)


@pytest.mark.parametrize("recipe", [pytest.param("current", marks=[pytest.mark.long, pytest.mark.once]), "delayed"])
def test_fp8_callables_return_the_gradients_of_the_fp8_function(recipe):
    (fns, given, xs, targets), (losses, grads) = reference(recipe)

    @partial(jax.jit, static_argnums=0)
    def plain(fns, given, x, target):
        def loss(states, y=x):
            for fn, (params, state), (_, _, weights) in zip(fns, states, given, strict=True):
                y = fn.apply(params, state, y, weights=weights)
            return loss_fn(y, target)

        return jax.value_and_grad(loss)([one[:2] for one in given])

    expected = [plain(fns, given, x, target) for x, target in zip(xs, targets, strict=True)]
    assert_close(losses, [loss for loss, _ in expected])
    for i, (params, state, weights) in enumerate(grads):
        assert jax.tree.leaves(weights) == []
        each = [of_m[i] for _, of_m in expected]
        assert_close(params, jax.tree.map(lambda *g: sum(g), *[params for params, _ in each]))
        assert_same_bits(state, jax.tree.map(lambda *s: jnp.max(jnp.stack(s), 0), *[state for _, state in each]))


@pytest.mark.once
@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "param_grads", "order", "delay"),
    [
        ("current", "owned", SPLIT, True),
        ("current", "aliased", WHOLE, False),
        ("delayed", "owned", WHOLE, False),
        ("delayed", "aliased", SPLIT, True),
    ],
)
def test_fp8_orders_equal_single_calls_bit_for_bit(recipe, param_grads, order, delay):
    (fns, given, xs, targets), expected = reference(recipe)
    graphed = build(fns, given, xs, order=order, delay_wgrad=delay, param_grads=param_grads)
    result = graphed.run(None, xs, loss_fn, loss_args=[(target,) for target in targets], join="nothing")
    assert_same_bits(result.losses, expected[0])
    states = [np.asarray(leaf) for one in result.grads for leaf in jax.tree.leaves(one[1])]
    for found, state in zip(states, (leaf for one in expected[1] for leaf in jax.tree.leaves(one[1])), strict=True):
        np.testing.assert_array_equal(found, state)
    assert_close([one[0] for one in result.grads], [one[0] for one in expected[1]])
    assert len(states) == (4 if recipe == "delayed" else 0)


@pytest.mark.once
def test_main_grad_of_fp8_state_is_the_maximum_since_the_last_zero_grads():
    (fns, given, xs, targets), (_, expected) = reference("delayed")
    graphed = build(fns, given, xs, param_grads="aliased")
    for _ in range(2):
        graphed.zero_grads()
        for x, target in zip(xs, targets, strict=True):
            y = graphed[1](given[1], graphed[0](given[0], x))
            graphed[0].backward(graphed[1].backward(jax.grad(loss_fn)(y, target))[1])
        assert_same_bits([g.main_grad[1] for g in graphed], [state for _, state, _ in expected])


@pytest.mark.long
def test_arrays_saved_only_for_the_wgrad_use_one_byte_per_element():
    fns, given, xs, _ = make("delayed")
    shaped = build(fns, given, xs, delay_wgrad=True)[0].shaped
    kept = [*shaped.residuals.avals[shaped.num_dgrad :], *shaped.stash.avals]
    read_by_both = B * H * 4  # float32 input of the activation function, which dgrad also reads
    assert sum(aval.size * aval.dtype.itemsize for aval in kept if aval.ndim > 1) == B * D + read_by_both + B * (D + H)
