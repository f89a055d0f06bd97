"""Tests the MoE layer and its functions."""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph
from jgraph.errors import ConfigError
from jgraph.moe import _dispatch, _router
from jgraph.moe.statistics import dead_experts, statistics
from jgraph.scopes import PREFIX
from jgraph.step import train_step
from jgraph.strategies import Replicated

D, F, E = 4, 6, 5


def layer(**settings):
    return jgraph.MoE(D, F, jgraph.MoEConfig(num_experts=E, **settings), rngs=nnx.Rngs(0))


def split(moe):
    """Returns the graph, parameters and state of a layer."""
    graph, params, state = nnx.split(moe, nnx.Param, ...)
    return graph, nnx.to_pure_dict(params), nnx.to_pure_dict(state)


def rows(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


REFUSED = {
    "experts_per_token": {"num_experts": 4, "experts_per_token": 5},
    "num_experts": {"num_experts": -1},
    "weights_scale": {"weights_scale": 0.0},
    "capacity": {"capacity": 0.0},
    "balance_loss": {"balance_loss": -0.1},
    "router": {"router": "hash"},
}


@pytest.mark.parametrize("field", REFUSED)
def test_invalid_settings_are_refused_in_one_line(field):
    with pytest.raises(ConfigError) as error:
        jgraph.MoEConfig(**REFUSED[field])
    assert error.value.field == f"model.moe.{field}"
    assert "\n" not in str(error.value)


def test_a_layer_without_experts_is_refused():
    with pytest.raises(ConfigError) as error:
        jgraph.MoE(D, F, jgraph.MoEConfig(), rngs=nnx.Rngs(0))
    assert error.value.field == "model.moe.num_experts"


# --- Router ---

LOGITS = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
ROUTERS = {
    "softmax-topk": ({}, [4 / 7, 3 / 7]),
    "softmax-topk, scaled": ({"weights_scale": 7.0}, [4, 3]),
    "softmax-topk, not normalized": ({"weights": "as-they-are"}, [0.4, 0.3]),
    "topk-softmax": ({"router": "topk-softmax", "weights": "as-they-are"}, [4 / 7, 3 / 7]),
    "sigmoid, not normalized": ({"router": "sigmoid", "weights": "as-they-are"}, [0.4 / 1.4, 0.3 / 1.3]),
}


@pytest.mark.parametrize("kind", ROUTERS)
def test_each_router_computes_its_weights(kind):
    settings, weights = ROUTERS[kind]
    found = _router.route(jnp.asarray(LOGITS), jgraph.MoEConfig(num_experts=4, **settings))
    np.testing.assert_array_equal(found.experts, [[0, 1]])
    np.testing.assert_allclose(found.weights, [weights], rtol=1e-6)
    np.testing.assert_array_equal(found.counts, [1, 1, 0, 0])


def test_a_bias_changes_the_selected_experts_but_not_the_weights():
    config = jgraph.MoEConfig(num_experts=4, router="sigmoid", weights="as-they-are")
    found = _router.route(jnp.asarray(LOGITS), config, jnp.asarray([0.0, 0, 0, 1]))
    np.testing.assert_array_equal(found.experts, [[3, 0]])
    np.testing.assert_allclose(found.weights, [[0.1 / 1.1, 0.4 / 1.4]], rtol=1e-6)


def test_a_balanced_router_has_balance_loss_k_and_maximum_entropy():
    probabilities = jnp.full((10, E), 1 / E)
    assert _router.balance_loss(probabilities, jnp.full(E, 4)) == pytest.approx(2)
    assert _router.entropy(probabilities) == pytest.approx(np.log(E))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_and_their_gradients_have_float32_precision(dtype):
    x, w, dy = rows(64, 32).astype(dtype), rows(32, E, seed=1), rows(64, E, seed=2)
    logits, back = jax.vjp(_router.logits, x, w)
    dx, dw = back(dy)
    x64, w64, dy64 = (np.asarray(a, np.float64) for a in (x, w, dy))
    assert (dx.dtype, logits.dtype, dw.dtype) == (dtype, "float32", "float32")
    for found, a, b in ((logits, x64, w64), (dw, x64.T, dy64), (dx, dy64, w64.T)):
        # Float32 sums are off by up to 2**-23 of the terms here, without the third parts of the operands by 2**-19.5. Each
        # operand of a bfloat16 gradient has 16 bits, and the result is rounded.
        terms = 2.0 ** (-21 if found.dtype == "float32" else -14)
        bound = terms * (abs(a) @ abs(b)) + float(jnp.finfo(found.dtype).eps) / 2 * abs(a @ b)
        assert np.all(abs(np.asarray(found, np.float64) - a @ b) <= bound)


# --- Dispatch ---


@partial(jax.jit, static_argnums=1)
def ordered(experts_NK, experts=E):
    return _dispatch.order_of(experts_NK, jnp.bincount(experts_NK.reshape(-1), length=experts))


def test_rows_are_ordered_by_expert_and_then_by_token():
    order = ordered(jnp.asarray([[2, 0], [0, 1], [2, 1]]))
    np.testing.assert_array_equal(order.source, [1, 2, 3, 5, 0, 4])
    np.testing.assert_array_equal(order.inverse[order.source], np.arange(6))


@pytest.mark.parametrize("tokens", [1, 128, 40_000])
def test_the_order_equals_a_stable_sort(tokens):
    # Nearly all of 40,000 tokens choose expert 0: more than bfloat16 can count one by one.
    chances = jnp.asarray([9.0, 0, 0, -3, -9])
    _, experts = jax.lax.top_k(chances + jax.random.gumbel(jax.random.key(0), (tokens, E)), 2)
    order = ordered(experts)
    np.testing.assert_array_equal(order.source, np.argsort(experts.reshape(-1), stable=True))
    np.testing.assert_array_equal(order.inverse[order.source], np.arange(2 * tokens))


def test_rows_are_not_sorted():
    # A sort on a GPU is a library call and would split the command buffer of the step.
    graph, params, state = split(layer())
    lowered = jax.jit(lambda params, x: nnx.merge(graph, params, state)(x)).lower(params, rows(2, 64, D))
    assert "stablehlo.sort" not in lowered.as_text()


def test_dispatch_and_combine_have_the_gradient_of_plain_indexing():
    experts = jnp.argsort(rows(7, E), 1)[:, :3]
    order, x, seed = ordered(experts), rows(7, D), rows(21, D, seed=1)

    def ours(x):
        return jnp.sum(_dispatch.combined(_dispatch.dispatched(x, order, 3) * seed, order, 3) ** 2)

    def plain(x):
        tokens = order.source // 3
        return jnp.sum(jnp.zeros_like(x).at[tokens].add(x[tokens] * seed) ** 2)

    found, expected = (jax.jit(jax.grad(loss))(x) for loss in (ours, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.long
def test_copies_are_added_in_float32():
    order = ordered(jnp.asarray([[0, 1, 2]]))
    # In bfloat16, 256 + 1 is 256.
    parts = jnp.asarray([[256.0], [1.0], [1.0]], jnp.bfloat16)
    assert _dispatch.combined(parts, order, 3).item() == 258
    gradient = jax.vjp(lambda x: _dispatch.dispatched(x, order, 3), parts[:1])[1](parts)[0]
    assert gradient.item() == 258


def test_gradients_of_the_layer_use_no_scatter_add():
    graph, params, state = split(layer())
    grad = jax.grad(lambda p, x: jnp.sum(nnx.merge(graph, p, state)(x)), (0, 1))
    text = str(jax.make_jaxpr(grad)(params, rows(2, 3, D)))
    assert "scatter-add" not in text
    # The remaining scatter inverts the permutation.
    assert text.count("scatter[") == 1


# --- Layer ---


@pytest.mark.long
def test_the_result_of_a_token_does_not_depend_on_other_tokens():
    moe, x = layer(shared_experts=1), rows(2, 8, D)
    moe.eval()
    graph, params, state = split(moe)
    run = jax.jit(lambda x: nnx.merge(graph, params, state)(x))
    np.testing.assert_allclose(run(x)[:, 3:], run(x[:, 3:]), rtol=1e-5, atol=1e-8)


@pytest.mark.long
def test_attached_losses_are_scaled_by_their_coefficient_and_weight():
    def gradient(weight, **settings):
        graph, params, state = split(layer(**settings))

        def loss(params):
            return 0 * jnp.sum(nnx.merge(graph, params, state)(rows(8, D), weight=weight))

        return jax.jit(jax.grad(loss))(params)["router_DE"]

    assert np.abs(gradient(1.0)).max() > 0
    assert not np.any(gradient(1.0, balance_loss=0.0))
    coefficient, weight = gradient(1.0, balance_loss=0.0, z_loss=1.5), gradient(3.0, balance_loss=0.0, z_loss=0.5)
    np.testing.assert_allclose(weight, coefficient, rtol=1e-5)


def test_evaluation_changes_no_state_and_attaches_no_loss():
    moe = layer(router="sigmoid")
    moe.eval()
    graph, params, state = split(moe)

    def loss(params):
        moe = nnx.merge(graph, params, state)
        return 0 * jnp.sum(moe(rows(8, D))), nnx.to_pure_dict(nnx.state(moe, nnx.Not(nnx.Param)))

    gradient, after = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert not np.any(gradient["router_DE"])
    jax.tree.map(np.testing.assert_array_equal, after, state)


def test_every_part_has_a_scope_forward_and_backward():
    graph, params, state = split(layer())
    grad = jax.grad(lambda p, x: jnp.sum(nnx.merge(graph, p, state)(x)), (0, 1))
    text = jax.jit(grad).lower(params, rows(8, D)).as_text(debug_info=True)
    for name in ("router", "dispatch", "experts", "combine"):
        assert f"jvp({PREFIX}{name})" in text
        assert f"transpose(jvp({PREFIX}{name}))" in text


# --- State ---


class Model(nnx.Module):
    def __init__(self, config):
        self.moe = jgraph.MoE(D, F, config, rngs=nnx.Rngs(0))

    def loss(self, x):
        return jnp.mean((self.moe(x) - x) ** 2)


def after_steps(steps, microbatches, config, x):
    """Returns the mutable state after each of `steps` steps, on the host."""
    model = jgraph.functional(lambda: Model(config))
    given = {"carried": model.carried, "reductions": model.reductions, "num_microbatches": microbatches}

    def loss(params, x, key, carried):
        value, after = model.loss(params, x, key, carried)
        return jgraph.Loss(value, carried=after)

    step, found = train_step(loss, optax.sgd(0.0), Replicated(None, model.shapes), **given), []
    run, state = step.compile(x), step.init(*jax.jit(model.init)())
    for _ in range(steps):
        state, _ = run(state, step.place(x))
        found.append(jax.device_get(state.carried))
    return found


@pytest.mark.long
def test_the_bias_is_updated_once_per_step_from_the_load_of_the_previous_step():
    config = jgraph.MoEConfig(num_experts=E, router="sigmoid", bias_rate=0.25)
    states = [state["moe"] for state in after_steps(3, 3, config, rows(12, 2, D))]
    assert [state["tokens_E"].sum() for state in states] == [48, 48, 48]
    np.testing.assert_array_equal(states[0]["bias_E"], np.zeros(E))
    for before, after in pairwise(states):
        moved = 0.25 * np.sign(48 / E - before["tokens_E"])
        np.testing.assert_array_equal(after["bias_E"] - before["bias_E"], moved.astype(np.float32))


@pytest.mark.long
def test_an_expert_without_a_token_in_any_microbatch_is_counted():
    # Each microbatch has one token with one expert, so it uses one of the five experts.
    config = jgraph.MoEConfig(num_experts=E, experts_per_token=1)
    states = [state["moe"] for state in after_steps(3, 4, config, rows(4, 1, D, seed=3))]
    unused = states[0]["tokens_E"] == 0
    assert 1 < np.sum(~unused) < E
    for number, state in enumerate(states, 1):
        np.testing.assert_array_equal(-state["unseen_E"], number * unused)
    assert dead_experts({"moe": states[2]}, 4) == {}
    assert dead_experts({"moe": states[2]}, 3) == {"moe": np.flatnonzero(unused).tolist()}


@pytest.mark.long
def test_dead_experts_of_stacked_layers_are_reported_by_layer():
    state = {"tokens_E": np.ones((2, 3)), "unseen_E": np.array([[0, 0, 0], [0, -100, -99]])}
    carried = {
        "blocks": {
            "moe": state | dict.fromkeys(("entropy", "balance", "z", "dropped"), np.zeros(2)),
            "norm": {"mean": np.ones(3)},
        }
    }
    assert statistics(carried).keys() == {"blocks/moe"}
    assert dead_experts(carried) == {"blocks/moe/1": [1]}
