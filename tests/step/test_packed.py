"""`jgraph.packed`: the updates of an optax transform with fewer arrays."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jgraph

LAYER = {"kernel": (4, 3), "bias": (3,)}


def parameters():
    keys = iter(jax.random.split(jax.random.key(0), 20))
    blocks = [{name: jax.random.normal(next(keys), shape) for name, shape in LAYER.items()} for _ in range(2)]
    return {"blocks": blocks, "scale": jnp.ones((2, 2)), "embed": jax.random.normal(next(keys), (1024, 512))}


def is_matrix(params):
    return jax.tree_util.tree_map_with_path(lambda path, leaf: leaf.ndim > 1 and path[-1].key not in ("scale", "bias"), params)


def trained(transform, params, steps=3):
    state = transform.init(params)
    for i in range(steps):
        grads = jax.tree.map(jnp.cos, jax.tree.map(partial(jnp.add, i), params))
        updates, state = transform.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize(
    "make",
    [
        optax.sgd,
        optax.adam,
        lambda rate: optax.chain(optax.add_decayed_weights(0.1), optax.lion(rate)),
        lambda rate: optax.MultiSteps(optax.adam(rate), every_k_schedule=2),
    ],
)
def test_updates_equal_those_of_the_transform(make):
    params = parameters()
    jax.tree.map(np.testing.assert_array_equal, trained(jgraph.packed(make(0.1)), params), trained(make(0.1), params))


def test_a_function_of_the_matrices_masks_weight_decay():
    params = parameters()

    def adamw(mask):
        return optax.adamw(0.1, weight_decay=0.5, mask=mask)

    jax.tree.map(
        np.testing.assert_array_equal, trained(jgraph.packed(adamw), params), trained(adamw(is_matrix(params)), params)
    )


@pytest.mark.long
def test_clipping_uses_the_norm_of_all_parameters():
    params = parameters()
    expected = trained(optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)), params)
    found = trained(jgraph.packed(optax.sgd(0.1), clip_norm=0.5), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), found, expected)


def test_small_parameters_share_arrays_and_large_ones_do_not():
    moments = jgraph.packed(optax.adam(0.1)).init(parameters())[1][0].mu
    assert {name: leaf.shape for name, leaf in moments.items()} == {
        "embed": (1024, 512),
        "small matrices (float32)": (24,),
        "small vectors (float32)": (10,),
    }


def test_a_step_on_an_nnx_state_keeps_its_structure():
    graphdef, params = nnx.split(nnx.Linear(3, 4, rngs=nnx.Rngs(0)))
    optimizer = jgraph.packed(optax.adam(0.1))

    @jgraph.jit(donate_argnums=(0, 1))
    def step(params, state, x):
        value, grads = jax.value_and_grad(lambda params: jnp.mean(nnx.merge(graphdef, params)(x) ** 2))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    structure, state = jax.tree.structure(params), jax.jit(optimizer.init)(params)
    values = []
    for _ in range(3):
        params, state, value = step(params, state, jnp.ones((2, 3)))
        values.append(float(value))
    assert values[0] > values[1] > values[2]
    assert jax.tree.structure(params) == structure


def test_gradients_of_another_dtype_are_packed_like_their_parameters():
    params = {name: jnp.full(shape, 2.0) for name, shape in LAYER.items()}
    grads = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    optimizer = jgraph.packed(optax.sgd(0.5, momentum=0.9))
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert jax.tree.map(lambda leaf: leaf.shape, updates) == LAYER
    assert all((leaf == -1).all() for leaf in jax.tree.leaves(updates))


def test_without_parameters_the_gradients_are_packed():
    grads = parameters()
    optimizer = jgraph.packed(optax.sgd(0.5))
    updates, _ = optimizer.update(grads, optimizer.init(grads))
    jax.tree.map(lambda update, grad: np.testing.assert_array_equal(update, -0.5 * grad), updates, grads)


@pytest.mark.parametrize("transform", [optax.contrib.muon(1e-3), optax.clip_by_global_norm(1.0)], ids=["muon", "clip"])
def test_a_transform_that_is_not_elementwise_is_refused(transform):
    with pytest.raises(jgraph.ConfigError, match="`transform` must update each element independently"):
        jgraph.packed(transform).init(parameters())
