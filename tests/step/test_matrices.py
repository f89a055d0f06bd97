"""`jgraph.sharded_matrices`: transforms of whole matrices, whose work the devices share."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jgraph

# Three matrices of one shape, so that two and four devices cannot share them equally, and four experts.
SHAPES = {"a": (8, 16), "b": (8, 16), "c": (8, 16), "experts": (4, 8, 8), "wide": (4, 24), "bias": (16,)}


def parameters():
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)}


def shampoo(rate):
    """Returns a transform that multiplies the gradient of a matrix by the inverse root of its summed products."""

    def init(matrix):
        return jnp.eye(matrix.shape[0])

    def update(grad, products, matrix=None):
        products = products + grad @ grad.T
        values, vectors = jnp.linalg.eigh(products)
        return -rate * (vectors * values**-0.5) @ vectors.T @ grad, products

    return optax.GradientTransformation(init, update)


def kinds(params):
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "rest", params)


def with_rest(transform):
    return optax.partition({"matrix": transform, "rest": optax.sgd(0.1)}, kinds)


def loss(params, batch, key):
    rows = batch @ (params["a"] + params["b"] * params["c"]) + params["bias"]
    return jnp.mean(rows**2) + jnp.mean(jnp.sin(params["experts"]) @ params["wide"][:, :8].T) * jnp.mean(params["wide"] ** 2)


BATCH = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)


def trained(strategy, transform, steps=3):
    step = jgraph.train_step(loss, transform, strategy)
    run, state = step.compile(BATCH), step.init(parameters())
    for _ in range(steps):
        state, _ = run(state, step.place(BATCH))
    return step, run, state


def one_at_a_time(transform, steps=3):
    """Trains on one device with a transform for each matrix."""
    params = parameters()
    states: dict = {}
    for _ in range(steps):
        grads = jax.grad(loss)(params, BATCH, None)
        for name, grad in grads.items():
            if grad.ndim < 2:
                params[name] -= 0.1 * grad
                continue
            size = grad.shape[-2:]
            rows = []
            for i, (g, p) in enumerate(zip(grad.reshape(-1, *size), params[name].reshape(-1, *size), strict=True)):
                update, states[name, i] = transform.update(g, states.get((name, i), transform.init(p)), p)
                rows.append(update)
            params[name] += jnp.stack(rows).reshape(grad.shape)
    return params


STRATEGIES = {
    "one": lambda: jgraph.Replicated(None, parameters()),
    "data": lambda: jgraph.Replicated(jax.make_mesh((4,), ("data",)), parameters()),
    "fsdp": lambda: jgraph.FullySharded(jax.make_mesh((4,), ("fsdp",)), parameters()),
    "both": lambda: jgraph.FullySharded(jax.make_mesh((2, 2), ("data", "fsdp")), parameters()),
    "tensor": lambda: jgraph.TensorParallel(
        jgraph.FullySharded(jax.make_mesh((2, 2), ("fsdp", "tensor")), parameters()), {"[abc]": jgraph.Split(axis=-1)}
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_updates_equal_those_of_each_matrix_alone(name):
    step, _, state = trained(STRATEGIES[name](), with_rest(jgraph.sharded_matrices(shampoo(0.1))))
    found, expected = step.canonical.of(state).params, one_at_a_time(shampoo(0.1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def test_a_transform_may_read_parameters_and_the_loss():
    def init(matrix):
        return ()

    def update(grad, state, matrix=None, *, value):
        return -grad * value - 0.1 * matrix, state

    transform = optax.GradientTransformationExtraArgs(init, update)
    _, _, state = trained(STRATEGIES["one"](), with_rest(jgraph.sharded_matrices(transform)), steps=1)
    params = parameters()
    value, grads = jax.value_and_grad(loss)(params, BATCH, None)
    np.testing.assert_allclose(state.params["a"], params["a"] - grads["a"] * value - 0.1 * params["a"], rtol=1e-5)


def collectives(text):
    found = re.findall(r" (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(.*op_name=\"([^\"]*)", text)
    return [kind for kind, name in found if "optimizer" in name]


def test_matrices_move_once_in_each_direction():
    shapes = dict.fromkeys("abcd", (8, 16)) | dict.fromkeys("efgh", (8, 32))
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}

    def loss(params, batch, key):
        return sum(jnp.mean((batch @ leaf) ** 2) for leaf in params.values())

    found = {}
    for name, muon in {"alone": optax.contrib.muon(0.1), "shared": jgraph.sharded_matrices(optax.contrib.muon(0.1))}.items():
        step = jgraph.train_step(loss, muon, jgraph.FullySharded(jax.make_mesh((4,), ("fsdp",)), params))
        found[name] = collectives(step.compile(BATCH).executable.as_text())
    # Two shapes: gradients go there, and updates come back. Muon without weight decay does not read the parameters.
    assert found["shared"].count("all-to-all") == 4
    assert "all-gather" not in found["shared"]
    assert found["alone"].count("all-gather") > 20  # XLA alone gathers each matrix for each product


def test_devices_share_the_state_of_the_matrices():
    step = jgraph.train_step(loss, with_rest(jgraph.sharded_matrices(shampoo(0.1))), STRATEGIES["fsdp"]())
    state = step.state.opt_state.inner_states["matrix"].inner_state
    assert {name: leaf.shape for name, leaf in state.items()} == {"8x16": (3, 8, 8), "experts": (4, 8, 8), "4x24": (1, 4, 4)}
    assert state["experts"].sharding.spec == PartitionSpec("fsdp")
    assert state["8x16"].sharding.spec == PartitionSpec(None, "fsdp")  # four devices cannot share three matrices


def test_the_state_continues_on_other_devices():
    transform = with_rest(jgraph.sharded_matrices(shampoo(0.1)))
    step, _, state = trained(STRATEGIES["fsdp"](), transform, steps=2)
    canonical = jax.tree.map(np.asarray, step.canonical.of(state))
    other = jgraph.train_step(loss, transform, STRATEGIES["data"]())
    again = other.canonical.back(canonical)
    again, _ = other.compile(BATCH)(again, other.place(BATCH))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        other.canonical.of(again).params,
        one_at_a_time(shampoo(0.1)),
    )


def test_another_loop_sets_the_mesh():
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    params = jax.device_put({name: jnp.ones((8, 16)) for name in "abcd"}, NamedSharding(mesh, PartitionSpec("fsdp")))
    transform = jgraph.sharded_matrices(optax.contrib.muon(0.1))
    state = transform.init(params)
    placed = {name: leaf.sharding for name, leaf in params.items()}
    update = jax.jit(lambda grads, state, params: transform.update(grads, state, params)[0], out_shardings=placed)
    with jax.set_mesh(mesh):
        text = update.lower(params, state, params).compile().as_text()
    assert " all-to-all(" in text
    assert " all-gather(" not in text
    without_mesh = update.lower(params, state, params).compile().as_text()
    assert " all-gather(" in without_mesh


def test_wrong_arguments_are_refused():
    with pytest.raises(jgraph.ConfigError, match=r"bias of shape \[16\]: must have at least two axes"):
        jgraph.sharded_matrices(shampoo(0.1)).init(parameters())
    with pytest.raises(jgraph.ConfigError, match="must be an optax transform"):
        jgraph.sharded_matrices(0.1)  # pyright: ignore[reportArgumentType]
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    transform = jgraph.sharded_matrices(optax.contrib.muon(0.1))
    params = {"a": jnp.ones((4, 4))}
    with jax.set_mesh(mesh), pytest.raises(jgraph.ConfigError, match=r"must have axes of type jax.sharding.AxisType.Auto"):
        transform.update(params, transform.init(params), params)
