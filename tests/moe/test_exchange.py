"""Tests experts sharded over devices: the exchange of rows and the parameter shardings."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec as P

import jgraph
from jgraph.errors import ConfigError
from jgraph.layout import Shard
from jgraph.moe import _experts, _router
from jgraph.step import train_step
from jgraph.strategies import FullySharded

pytestmark = pytest.mark.long

# N tokens per device, D model, F hidden, E experts
DEVICES, N, D, F, E = 4, 12, 4, 6, 8
ARGS = ["x", "logits", "up", "down"]


MESH = Mesh(np.array(jax.devices()[:DEVICES]), ("fsdp",))


def arrays(kind="random", tokens=N):
    rng = np.random.default_rng(0)
    shapes = {"x": (DEVICES * tokens, D), "logits": (DEVICES * tokens, E), "up": (E, D, 2 * F), "down": (E, F, D)}
    found = {name: rng.standard_normal(shape).astype("f") for name, shape in shapes.items()}
    found["logits"] += {
        "random": np.zeros(E),
        "skewed": np.linspace(3, 0, E),
        "empty experts": np.array([0, -99, 0, 0, -99, -99, 0, 0]),
        "all to one device": np.array([99, 99, 0, 0, 0, 0, 0, 0]),
    }[kind].astype("f")
    return found


def over_devices(group, config):
    """Returns a function from `ARGS` to the result of every token and the overflow of each device."""
    spec = Shard(0, groups=group)

    def device(x, logits, up, down):
        y, overflow = _experts.sharded_mixture(x, _router.route(logits, config), spec.gather(up), spec.gather(down), config)
        return y, jax.tree.map(lambda leaf: leaf[None], overflow)

    # Jitted, because otherwise every operation would be compiled separately.
    return jax.jit(jax.shard_map(device, mesh=MESH, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False))


def plain(x, logits, up, down, config, kept=1.0):
    """Computes every expert for every token. Rows with `kept` 0 do not contribute."""
    found = _router.route(logits, config)
    gate, values = jnp.split(jnp.einsum("nd,edf->nef", x, up), 2, -1)
    y_NED = jnp.einsum("nef,efd->ned", jax.nn.silu(gate) * values, down)
    return jnp.einsum("nk,nkd->nd", found.weights * kept, jnp.take_along_axis(y_NED, found.experts[..., None], 1))


def sent(logits, config, group, capacity):
    """Returns which copies are sent, and the number of rows of each pair of devices, counted one by one."""
    experts = np.asarray(_router.route(logits, config).experts).reshape(DEVICES, -1)
    kept, rows = np.zeros(experts.shape, bool), np.zeros((DEVICES, group), int)
    for device, own in enumerate(experts):
        for copy in np.argsort(own, stable=True):
            to = own[copy] * group // E
            kept[device, copy] = rows[device, to] < capacity
            rows[device, to] += 1
    return kept.reshape(len(logits), -1), rows


def assert_same_with_gradients(ours, expected, given):
    seed = np.random.default_rng(1).standard_normal(given["x"].shape).astype("f")

    def gradients(of):
        return jax.jit(jax.value_and_grad(lambda args: jnp.sum(of(*args) * seed)))([given[name] for name in ARGS])

    (value, grads), (expected_value, expected_grads) = gradients(ours), gradients(expected)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for name, actual, grad in zip(ARGS, grads, expected_grads, strict=True):
        np.testing.assert_allclose(actual, grad, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("skewed", 2),
        ("all to one device", 2),
        ("empty experts", 4),
    ],
)
def test_sharded_experts_have_the_results_and_gradients_of_one_device(kind, group):
    config = jgraph.MoEConfig(num_experts=E, capacity=float(group))
    given, run = arrays(kind), over_devices(group, config)
    assert_same_with_gradients(lambda *args: run(*args)[0], lambda *args: plain(*args, config), given)
    assert not any(np.any(count) for count in run(*given.values())[1])


@pytest.mark.parametrize("group", [2, 4])
def test_rows_beyond_the_capacity_are_counted_and_dropped(group):
    config = jgraph.MoEConfig(num_experts=E, capacity=1.0)
    given, run = arrays("skewed"), over_devices(group, config)
    capacity = {2: 16, 4: 8}[group]  # an even share of 24 rows, rounded up to a multiple of 8
    kept, rows = sent(given["logits"], config, group, capacity)
    assert 0 < np.sum(~kept) < kept.size / 2
    _, overflow = run(*given.values())
    np.testing.assert_array_equal(overflow.dropped, np.sum(np.maximum(rows - capacity, 0), 1))
    np.testing.assert_array_equal(overflow.needed, np.where(rows.max(1) > capacity, rows.max(1), 0))
    assert_same_with_gradients(lambda *args: run(*args)[0], lambda *args: plain(*args, config, kept), given)


@pytest.mark.parametrize("more", [0, 1])
def test_rows_up_to_the_capacity_are_sent_and_one_additional_row_is_dropped(more):
    config = jgraph.MoEConfig(num_experts=E, experts_per_token=1, capacity=1.0)
    given = arrays(tokens=16)
    first_half = np.tile(np.arange(16) < 8 + more, DEVICES)  # these tokens go to the first of two devices
    given["logits"] += 99 * (first_half[:, None] == (np.arange(E) < E // 2))
    _, overflow = over_devices(2, config)(*given.values())
    np.testing.assert_array_equal(overflow.dropped, [more] * DEVICES)
    np.testing.assert_array_equal(overflow.needed, [9 * more] * DEVICES)


class Sorted(nnx.Module):
    """Routes row i of the identity matrix to expert i."""

    def __init__(self, rngs):
        config = jgraph.MoEConfig(num_experts=E, experts_per_token=1, capacity=1.0, overflow="drop")
        self.moe = jgraph.MoE(E, F, config, rngs=rngs)
        self.moe.router_DE.set_value(99 * jnp.eye(E))

    def loss(self, x):
        return jnp.mean(self.moe(x))


def test_dropped_rows_are_summed_over_destination_devices():
    model = jgraph.functional(lambda: Sorted(nnx.Rngs(0)))

    def loss(params, batch, key, carried):
        value, after = model.loss(params, batch, key, carried)
        return jgraph.Loss(value, carried=after)

    strategy = FullySharded(MESH, model.shapes, experts=DEVICES)
    step = train_step(loss, optax.sgd(0.1), strategy, carried=model.carried, reductions=model.reductions)
    # Each device has 16 rows for each of the first two devices and can send 8 of each.
    batch = np.tile(np.repeat(np.eye(E, dtype="f")[[0, 2]], 16, axis=0), (DEVICES, 1))
    state, _ = step.compile(batch)(step.init(*model.init()), step.place(batch))
    assert state.carried["moe"]["dropped"] == DEVICES * (8 + 8)


def test_the_gradient_of_the_exchange_has_no_scatter_and_six_all_to_alls():
    config = jgraph.MoEConfig(num_experts=E)
    run, given = over_devices(4, config), arrays()

    def loss(*args):
        return jnp.sum(run(*args)[0] ** 2)

    lowered = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*given.values())
    # The remaining scatter inverts a permutation. The gradient of the logits is left out, because the test's router scatters.
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 2, 3)))(*given.values()))
    assert "scatter-add" not in text
    assert text.count("scatter[") == 1
    # Forward and backward: rows out, their weights and counts, rows back.
    assert len(re.findall(r"= .* all-to-all\(", lowered.compile().as_text())) == 6


# --- Strategies ---

SHAPES = {
    "moe": {"up_EDF2": jax.ShapeDtypeStruct((E, D, 2 * F), "f"), "down_EFD": jax.ShapeDtypeStruct((E, F, D), "f")},
    "stacked": {"up_EDF2": jax.ShapeDtypeStruct((3, E, D, 2 * F), "f")},
    "head": {"kernel": jax.ShapeDtypeStruct((D, 12), "f")},
}
EXPERTS = ["moe/down_EFD", "moe/up_EDF2", "stacked/up_EDF2"]


def sharded(shapes=SHAPES, **choices):
    step = train_step(lambda params, batch, key: 0.0, optax.sgd(1.0), FullySharded(MESH, shapes, **choices))
    return {name: sharding.spec for name, sharding in step.shardings.params.items()}


@pytest.mark.parametrize("experts", [2, 4])
def test_experts_are_sharded_by_expert_and_never_packed(experts):
    specs = sharded(experts=experts)
    assert [specs[name] for name in EXPERTS] == [P("fsdp"), P("fsdp"), P(None, "fsdp")]
    assert specs["small matrices (float32)"] == P("fsdp")


def test_only_experts_are_sharded_with_shards_experts():
    specs = sharded(experts=4, shards="experts")
    assert {name for name, spec in specs.items() if spec != P()} == set(EXPERTS)


REFUSED = {
    "devices that do not divide the axis": ("experts", {"experts": 3}),
    "a model without experts": ("experts", {"experts": 2, "shapes": {"head": SHAPES["head"]}}),
    "experts that cannot be divided": (
        "experts",
        {"experts": 2, "shapes": {"up_EDF2": jax.ShapeDtypeStruct((6, D, 2 * F), "f")}},
    ),
    "a rule for another axis of experts": ("shard_rules", {"experts": 2, "shard_rules": ("moe/up*=1",)}),
    "an unknown value of shards": ("shards", {"shards": "nothing"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_shardings_of_experts_are_refused_in_one_line(case):
    field, choices = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        sharded(**choices)
    assert error.value.field == field
    assert "\n" not in str(error.value)
