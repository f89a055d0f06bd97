"""Tests the optimizer state in host memory: equal numbers, placement, checkpoints, copies in order, device memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from jgraph.autodiff.host import in_order
from jgraph.checkpoint import Checkpoints
from jgraph.errors import ConfigError
from jgraph.pipeline import Pipelined
from jgraph.schedule import generate
from jgraph.step import train_step
from jgraph.step.matrices import sharded_matrices
from jgraph.step.transform import Masters
from jgraph.strategies import FullySharded, Loss, Replicated
from jgraph.strategies._order import vjp
from jgraph.tree import is_on_host
from jgraph.xla import aot, check_identity
from jgraph.xla.explain import Memory
from tests.pipeline import test_pipelined_step as pipelined
from tests.step.test_train_step import batch as batch, mean, new_params, strategy, trained
from tests.target_fixture import reused_kernels

MATRICES = optax.partition(
    {True: sharded_matrices(optax.contrib.muon(1e-2)), False: optax.adam(1e-2)},
    lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
)
# The clipping reads all moments before the first parameter is updated.
CLIPPED = optax.chain(optax.adamw(1e-2), optax.clip_by_global_norm(1e-3))


def offloaded(transform=None, name="fsdp 4", **choices):
    return train_step(mean, transform or optax.adamw(1e-2), strategy(name), offload="optimizer", **choices)


def assert_bit_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(actual), jax.device_get(expected))


@pytest.mark.parametrize(
    ("name", "transform", "choices"),
    [
        ("data 4", optax.adamw(1e-2), {"clip_norm": 0.1}),
        ("data 2 x fsdp 2", optax.adamw(1e-2), {"layout": "tree", "num_microbatches": 2}),
        ("fsdp 4", CLIPPED, {"freeze": ("bias",)}),
        pytest.param("fsdp 4", optax.contrib.muon(1e-2), {}, marks=[pytest.mark.long, pytest.mark.once]),
        pytest.param("fsdp 4", MATRICES, {}, marks=[pytest.mark.long, pytest.mark.once]),
        pytest.param("data 4", optax.MultiSteps(optax.adam(1e-2), 2), {}, marks=pytest.mark.once),
    ],
)
def test_an_offloaded_step_has_the_same_bits(name, transform, choices, batch):
    expected, metrics = trained(train_step(mean, transform, strategy(name), **choices), batch)
    state, ours = trained(offloaded(transform, name, **choices), batch)
    assert_bit_equal((state, ours), (expected, metrics))


@pytest.mark.long
def test_a_pipeline_keeps_its_optimizer_state_on_the_host():
    def run(offload):
        strategy = Pipelined(jax.make_mesh((2,), ("pipe",)), pipelined.shapes(), generate("1f1b", pp=2, microbatches=2))
        step = train_step(pipelined.MODEL, optax.adam(1e-2), strategy, num_microbatches=2, offload=offload)
        state = step.init(pipelined.new_params())
        grads = jax.tree.map(jnp.ones_like, state.params)
        sums = Loss(jnp.float32(1), jnp.float32(1), carried=state.carry)
        return jax.jit(step.update.apply, out_shardings=(step.shardings, None))(state, sums, grads)[0]

    state = run("optimizer")
    assert any(map(is_on_host, jax.tree.leaves(state.opt_state)))
    assert_bit_equal(state, run("nothing"))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_arrays_of_the_optimizer_lie_in_pinned_host_memory_before_and_after_a_step(dtype, batch):
    step = offloaded(params_dtype=dtype)
    for state in (step.init(new_params()), trained(step, batch)[0]):
        leaves = jax.tree.leaves(state.opt_state)
        assert [is_on_host(leaf) for leaf in leaves] == [leaf.ndim > 0 for leaf in leaves]
        assert not any(map(is_on_host, jax.tree.leaves(state.params)))


@pytest.mark.parametrize("layout", ["auto", "tree"])
def test_bfloat16_parameters_are_exactly_their_float32_masters_cast(layout, batch):
    step = offloaded(optax.sgd(1e-5), params_dtype=jnp.bfloat16, layout=layout)
    state, _ = trained(step, batch)
    canonical = jax.device_get(step.canonical.of(state))
    assert isinstance(canonical.opt_state, Masters)
    masters = canonical.opt_state.params
    assert_bit_equal({name: leaf.astype(jnp.bfloat16) for name, leaf in masters.items()}, canonical.params)
    # Updates below half a unit of the last place of bfloat16 are not lost.
    before = {name: leaf.astype(jnp.bfloat16).astype(np.float32) for name, leaf in new_params().items()}
    assert all(np.any(masters[name] != before[name]) for name in before)


def test_masters_train_like_float32_parameters(batch):
    expected, _ = trained(train_step(mean, optax.sgd(0.1), strategy("fsdp 4")), batch)
    step = offloaded(optax.sgd(0.1), params_dtype=jnp.bfloat16, grads_dtype=jnp.bfloat16)
    masters = jax.device_get(step.canonical.of(trained(step, batch)[0]).opt_state.params)
    like = train_step(mean, optax.sgd(0.1), strategy("fsdp 4")).canonical.of(expected).params
    for name, leaf in masters.items():
        np.testing.assert_allclose(leaf, like[name], atol=2e-2, err_msg=name)


@pytest.mark.parametrize(
    ("before", "after", "dtype"),
    [
        (("fsdp 4", "optimizer"), ("one device", "nothing"), jnp.float32),
        (("one device", "nothing"), ("data 2 x fsdp 2", "optimizer"), jnp.float32),
        (("fsdp 4", "optimizer"), ("data 4", "optimizer"), jnp.bfloat16),
    ],
    ids=str,
)
def test_a_checkpoint_is_restored_with_or_without_offload_on_other_devices(before, after, dtype, batch, tmp_path):
    old, new = (
        train_step(mean, optax.adamw(1e-2), strategy(name), offload=offload, params_dtype=dtype)
        for name, offload in (before, after)
    )
    saved = old.canonical.of(trained(old, batch)[0])
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(3, saved)
    _, restored = checkpoints.restore_latest(new.canonical.shapes())
    checkpoints.close()
    state = new.canonical.back(restored)
    leaves = jax.tree.leaves(state.opt_state)
    assert any(map(is_on_host, leaves)) == (after[1] == "optimizer")
    assert_bit_equal(new.canonical.of(state), saved)
    new.compile(batch)(state, new.place(batch))


def test_a_step_without_a_mesh_is_refused():
    with pytest.raises(ConfigError, match="`offload` is optimizer: must be nothing without a mesh; on one device, pass"):
        offloaded(name="one device")
    with pytest.raises(ConfigError, match="`offload` is 'moments': must be one of nothing, optimizer"):
        train_step(mean, optax.sgd(1.0), strategy("data 4"), offload="moments")


def test_arrays_are_copied_to_the_device_after_the_result_before_the_previous_one():
    host = jax.sharding.NamedSharding(jax.make_mesh((1,), ("data",)), jax.P(), memory_kind="pinned_host")
    arrays = [jax.ShapeDtypeStruct((size,), jnp.float32, sharding=host) for size in range(1, 5)]

    def function(arrays, other):
        # A jitted function of all arrays, as in optax, and a second result of the same arrays.
        doubled = jax.jit(lambda xs: [2 * x for x in xs])(arrays)
        return doubled, [x + other for x in arrays], other

    other = jax.ShapeDtypeStruct((), jnp.float32)
    start = jnp.zeros((7,))
    jaxpr = jax.jit(lambda *args: in_order(function, *args, start=[start])).trace(arrays, other).jaxpr
    barriers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    assert [[v.aval.shape for v in eqn.invars] for eqn in barriers] == [[(1,), (7,)], [(2,), (7,)], [(3,), (1,)], [(4,), (2,)]]
    results = jax.jit(lambda *args: in_order(function, *args))([jax.device_put(jnp.ones(3), host)], jnp.float32(1))
    np.testing.assert_array_equal(jnp.stack([*results[0], *results[1]]), np.full((2, 3), 2))


def test_a_residual_is_copied_to_the_host_after_the_copy_before_the_previous_one():
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    layer = jax.checkpoint(lambda x, w: jnp.sin(x @ w), policy=policy)

    def loss(weights):
        return jnp.sum(functools.reduce(layer, weights, jnp.ones((2, 4)))), None

    jaxpr = jax.make_jaxpr(lambda weights: vjp(loss, weights)[0])([jnp.ones((4, 4))] * 4).jaxpr
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    copies = [eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "device_put"]
    copies = copies[len(copies) // 2 :]  # without the first trace, whose results nothing reads
    waits = [[copies.index(v) for v in makers[makers[copy].invars[0]].invars if v in copies] for copy in copies]
    assert waits == [[], [], [0], [1]]


LAYERS, WIDTH = 12, 1024


def deep(params, x, key):
    for name in params:
        x = jnp.tanh(x @ params[name])
    return jnp.mean(x**2)


def memory_on_target(offload, axis):
    tree = {f"layer{i:02}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(LAYERS)}
    mesh = Mesh(np.array(aot.devices(1 if axis == "data" else 2)), (axis,))
    made = Replicated(mesh, tree) if axis == "data" else FullySharded(mesh, tree)
    step = train_step(deep, optax.adamw(1e-3), made, clip_norm=1.0, offload=offload)
    x = step.placed_shapes(jax.ShapeDtypeStruct((8, WIDTH), jnp.float32))
    options = step.options("gpu") | reused_kernels()
    compiled, _ = aot.compile_for(step.jitted(), step.state, x, compiler_options=options)
    check_identity(compiled, step.state)
    return Memory.read(compiled), compiled.as_text().count(" copy-start(")


@pytest.mark.target
@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_device_memory_falls_by_the_moments_without_those_of_two_parameters(h200, axis):
    kept, _ = memory_on_target("nothing", axis)
    held, copies = memory_on_target("optimizer", axis)
    moment = 4 * WIDTH * WIDTH // (1 if axis == "data" else 2)
    assert held.host == kept.arguments - held.arguments == 2 * LAYERS * moment
    # Two moments of two parameters, before and after the update.
    assert held.temporaries - kept.temporaries <= 2 * 2 * 2 * moment
    assert copies == 2 * 2 * LAYERS
