"""The order of tokens on the devices of the axis `context`, and the gathered sequence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.context import gathered, token_order
from jgraph.errors import ConfigError
from jgraph.mesh import constrain, on_ranks, partitioned, per_shard, token_axes

TOKENS = PartitionSpec(None, "context")


def on_context(fn, *, devices=2, others=()):
    """Runs a function on a mesh with the axis `context`, while XLA partitions over the axis."""
    sizes = {"data": 1, "context": devices, **dict(others)}
    mesh = Mesh(np.array(jax.devices()[: int(np.prod([*sizes.values()]))]).reshape(tuple(sizes.values())), tuple(sizes))
    return jax.jit(on_ranks(fn, mesh, (PartitionSpec(),), PartitionSpec()), in_shardings=NamedSharding(mesh, PartitionSpec()))


def order_of(length, devices):
    found = []
    on_context(lambda x: found.append(token_order(length)) or x, devices=devices)(jnp.zeros(()))
    return found[0]


@pytest.mark.parametrize(
    ("devices", "order"),
    [(2, [0, 1, 6, 7, 2, 3, 4, 5]), (4, [0, 7, 1, 6, 2, 5, 3, 4])],
)
def test_each_device_has_one_chunk_from_the_start_and_one_from_the_end(devices, order):
    assert order_of(8, devices).tolist() == order


@pytest.mark.parametrize("devices", [2, 4])
def test_each_device_reads_the_same_number_of_keys(devices):
    # In causal attention, the query at position i reads i + 1 keys.
    keys = (order_of(32, devices) + 1).reshape(devices, -1).sum(axis=1)
    assert len(set(keys.tolist())) == 1


def test_a_sequence_keeps_its_order_without_the_axis_context():
    assert token_order(7) is None
    assert order_of(7, 1) is None


@pytest.mark.parametrize("length", [6, 9, 10])
def test_a_length_that_twice_the_devices_do_not_divide_is_refused(length):
    with pytest.raises(ConfigError) as error:
        order_of(length, 2)
    message = f"`context` is 2: must divide the {length} tokens of a sequence into two equal chunks for each device"
    assert (str(error.value), error.value.field) == (message, "context")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("devices", [2, 4])
def test_gathered_tokens_have_the_order_of_the_sequence_and_gradients_return_to_their_device(devices, dtype):
    x_BTD = jnp.asarray(np.random.default_rng(0).standard_normal((2, 16, 3)), dtype)
    weights_BTD = np.random.default_rng(1).standard_normal((2, 16, 3)).astype(np.float32)

    def loss(x_BTD):
        read = per_shard(gathered, (TOKENS,), PartitionSpec())(x_BTD[:, token_order(16)])
        return jnp.sum(read.astype("float32") * weights_BTD), read

    grads, read = on_context(jax.grad(loss, has_aux=True), devices=devices)(x_BTD)
    np.testing.assert_array_equal(read, x_BTD)
    np.testing.assert_allclose(grads.astype("float32"), weights_BTD, rtol=2**-8 if dtype == "bfloat16" else 1e-6)


def test_tokens_are_not_gathered_without_the_axis():
    x_BT = jnp.arange(8)[None]
    assert gathered(x_BT) is x_BT


# --- Meshes with partitioned axes ---


def test_only_axes_that_xla_partitions_over_are_counted():
    found = {}

    def count(x):
        found.update({axis: partitioned(axis) for axis in ("context", "tensor")})
        return x

    on_context(count, others={"tensor": 2}.items())(jnp.zeros(()))
    assert found == {"context": 2, "tensor": 2}
    found.clear()
    on_context(count)(jnp.zeros(()))
    assert found == {"context": 2, "tensor": 1}
    count(jnp.zeros(()))
    assert found == {"context": 1, "tensor": 1}


def test_a_function_per_shard_has_its_part_of_each_axis():
    shapes = []

    def part(x):
        shapes.append(x.shape)
        return x

    spec = PartitionSpec(None, "context", "tensor")
    run = functools.partial(per_shard, part, (spec,), spec)
    x = jnp.arange(2 * 8 * 6).reshape(2, 8, 6)
    y = on_context(lambda x: run()(x), others={"tensor": 2}.items())(x)
    assert shapes == [(2, 4, 3)]
    np.testing.assert_array_equal(y, x)
    # Axes that the mesh lacks are left out.
    shapes.clear()
    on_context(lambda x: run()(x))(x)
    assert shapes == [(2, 4, 6)]
    assert run() is part


def test_an_axis_that_the_devices_do_not_divide_is_not_constrained():
    def specs(x):
        return jax.sharding.get_abstract_mesh() and constrain(x, PartitionSpec(None, ("context", "tensor")))

    def constraints(length):
        run = on_context(specs, others={"tensor": 2}.items())
        return run.lower(jnp.zeros((2, length))).as_text()

    assert '{"context", "tensor"}' in constraints(8)
    assert '{"context"}' in constraints(6)
    assert "sharding_constraint" not in constraints(7)


@pytest.mark.parametrize(("length", "axes"), [(16, ("context", "tensor")), (12, "context")])
def test_the_axis_tensor_shares_the_tokens_of_a_sequence_only_if_all_devices_have_the_same_number(length, axes):
    found = []

    def trace(x):
        found.append(token_axes(x.shape))
        return x

    jax.eval_shape(on_context(trace, others={"tensor": 4}.items()), jax.ShapeDtypeStruct((1, length, 8), "float32"))
    assert found == [PartitionSpec(None, axes)]
