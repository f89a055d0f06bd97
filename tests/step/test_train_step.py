"""Tests that a step with any strategy equals a plain loop of JAX and optax."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgraph.errors import ConfigError, DonationError, ShapeError
from jgraph.pipeline import Pipelined
from jgraph.schedule import generate
from jgraph.step import elementwise, train_step
from jgraph.strategies import FullySharded, Loss, Replicated
from tests.pipeline import test_pipelined_step as pipelined

ROWS, STEPS = 16, 3
STRATEGIES = ["one device", "data 4", "fsdp 4", "fsdp 4, resharding", "data 2 x fsdp 2"]
# 10 and 3 are not divisible by four devices.
SHAPES = {"up": (6, 10), "bias": (10,), "down": (10, 3)}


def new_params():
    rng = np.random.default_rng(0)
    return {name: 0.3 * rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def shapes():
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def batch():
    rng = np.random.default_rng(1)
    # Rows have different weights, so that a mean of means is a different number.
    weight = (np.arange(ROWS) % 5 != 0).astype(np.float32) * np.linspace(1, 3, ROWS, dtype=np.float32)
    return {"x": rng.standard_normal((ROWS, 6), np.float32), "y": rng.standard_normal((ROWS, 3), np.float32), "w": weight}


def errors(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
    return jnp.sum((hidden @ params["down"] - batch["y"]) ** 2, -1)


def mean(params, batch, key):
    return jnp.mean(errors(params, batch))


def weighted(params, batch, key):
    found = errors(params, batch)
    return Loss(jnp.sum(found * batch["w"]), jnp.sum(batch["w"]), {"large": jnp.sum((found > 1) * batch["w"])})


def strategy(name):
    meshes = {"data 4": ((4,), ("data",)), "data 2 x fsdp 2": ((2, 2), ("data", "fsdp"))}
    if name == "one device":
        return Replicated(None, shapes())
    mesh = jax.make_mesh(*meshes.get(name, ((4,), ("fsdp",))))
    if name == "data 4":
        return Replicated(mesh, shapes())
    return FullySharded(mesh, shapes(), gather_per="pass" if name.endswith("resharding") else "step")


def trained(step, batch, *, steps=STEPS, carried=None):
    """Returns the state after `steps` steps and the metrics of the last step."""
    run, state = step.compile(batch), step.init(new_params(), carried)
    for _ in range(steps):
        state, metrics = run(state, step.place(batch))
        jax.block_until_ready(state)  # CPU devices share a thread pool
    return state, metrics


def plain(transform, loss, batch, *, steps=STEPS):
    """Returns the parameters and the loss of the same training in a loop without jgraph."""
    params, transform = new_params(), optax.with_extra_args_support(transform)
    state = transform.init(params)
    for _ in range(steps):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = transform.update(grads, state, params, value=value, grad=grads)
        params = optax.apply_updates(params, updates)
    return params, value


def assert_close(actual, expected):
    for name, leaf in expected.items():
        np.testing.assert_allclose(actual[name], leaf, rtol=1e-5, atol=1e-6, err_msg=name)


def by_name(params):
    """Selects only `down`."""
    return {name: name == "down" for name in params}


TRANSFORMS = {
    "adamw, elementwise": elementwise(lambda matrices: optax.adamw(1e-2, mask=matrices)),
    "muon": optax.contrib.muon(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "masked by path": optax.masked(optax.sgd(1e-2), by_name),
    "polyak's rate": optax.polyak_sgd(0.1),
    "l-bfgs": optax.lbfgs(1e-2, linesearch=None),
}
# Every step counts as a plateau: the learning rate is halved for the second and the third step.
PLATEAU = optax.chain(optax.adam(1e-1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=1.0))
ACCUMULATED = optax.MultiSteps(optax.adam(1e-2), 2)


@pytest.mark.parametrize(
    ("name", "transform"),
    [
        *(pytest.param(name, "muon", marks=pytest.mark.long) for name in STRATEGIES),
        pytest.param("data 4", "adafactor", marks=[pytest.mark.long, pytest.mark.once]),
        pytest.param("fsdp 4, resharding", "adafactor", marks=[pytest.mark.long, pytest.mark.once]),
        pytest.param("one device", "masked by path", marks=pytest.mark.once),
        pytest.param("data 2 x fsdp 2", "masked by path", marks=pytest.mark.once),
        ("data 2 x fsdp 2", "polyak's rate"),
        pytest.param("one device", "l-bfgs", marks=[pytest.mark.long, pytest.mark.once]),
    ],
)
def test_any_transform_gets_the_parameter_tree_of_the_model(name, transform, batch):
    own = TRANSFORMS[transform]
    step = train_step(mean, own, strategy(name), num_microbatches=2)
    state, metrics = trained(step, batch)
    params, loss = plain(own, lambda p, b: mean(p, b, None), batch)
    assert_close(step.canonical.of(state).params, params)
    assert metrics.loss == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "transform"),
    [
        *(pytest.param("one device", transform, marks=pytest.mark.once) for transform in ("muon", "adafactor", "l-bfgs")),
        ("fsdp 4", "adamw, elementwise"),
    ],
)
def test_parameters_in_bfloat16_have_moments_in_float32(name, transform, batch):
    own = TRANSFORMS[transform]
    step = train_step(mean, own, strategy(name), params_dtype=jnp.bfloat16)
    state, _ = trained(step, batch)
    floats = {leaf.dtype for leaf in jax.tree.leaves(state.opt_state) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert floats == {jnp.dtype(jnp.float32)}
    expected, _ = trained(train_step(mean, own, strategy(name)), batch)
    for leaf, like in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        assert leaf.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(leaf, np.float32), like, atol=1e-2)


@pytest.mark.parametrize("declare", [lambda transform: transform, elementwise], ids=["plain", "elementwise"])
def test_a_transform_gets_the_loss_and_gradient_as_extra_arguments(declare, batch):
    step = train_step(mean, declare(PLATEAU), strategy("fsdp 4"), num_microbatches=2)
    state, _ = trained(step, batch)
    params, _ = plain(PLATEAU, lambda p, b: mean(p, b, None), batch)
    assert_close(step.canonical.of(state).params, params)
    unscaled, _ = plain(optax.adam(1e-1), lambda p, b: mean(p, b, None), batch)
    assert not np.allclose(params["up"], unscaled["up"], rtol=1e-2)


def test_gradients_are_accumulated_over_steps_by_optax(batch):
    step = train_step(mean, elementwise(ACCUMULATED), strategy("fsdp 4"))
    state, _ = trained(step, batch)
    params, _ = plain(ACCUMULATED.gradient_transformation(), lambda p, b: mean(p, b, None), batch)
    assert_close(step.canonical.of(state).params, params)


@pytest.mark.parametrize("num_microbatches", [pytest.param(1, marks=pytest.mark.once), 4])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_weighted_loss_is_the_mean_over_the_whole_batch(name, num_microbatches, batch):
    adamw = elementwise(lambda matrices: optax.adamw(1e-2, mask=matrices))
    step = train_step(weighted, adamw, strategy(name), num_microbatches=num_microbatches)
    state, metrics = trained(step, batch)

    def whole(params, batch):
        found = weighted(params, batch, None)
        return found.total / found.weight

    params, loss = plain(optax.adamw(1e-2, mask={"up": True, "down": True, "bias": False}), whole, batch)
    assert_close(step.canonical.of(state).params, params)
    assert metrics.loss == pytest.approx(float(loss), rel=1e-5)


@pytest.mark.parametrize("name", STRATEGIES)
def test_aux_metrics_are_weighted_means_over_microbatches_and_devices(name, batch):
    _, metrics = trained(train_step(weighted, optax.sgd(0.0), strategy(name), num_microbatches=2), batch, steps=1)
    large = np.asarray(errors(new_params(), batch)) > 1
    assert metrics.aux["large"] == pytest.approx(float(np.sum(large * batch["w"]) / np.sum(batch["w"])))


# --- Frozen parameters ---


def test_frozen_elements_of_stacked_arrays_stay_bit_equal_under_weight_decay():
    # Each rank stores its layers in one array, so layer 0 (frozen) has a trained layer beside it.
    strategy = Pipelined(jax.make_mesh((2,), ("pipe",)), pipelined.shapes(), generate("1f1b", pp=2, microbatches=2))
    adamw = elementwise(optax.adamw(1e-2, weight_decay=0.5))
    step = train_step(pipelined.MODEL, adamw, strategy, num_microbatches=2, freeze=("layers/0/*",))
    state, before = step.init(pipelined.new_params()), pipelined.new_params()["layers"]
    grads = jax.tree.map(jnp.ones_like, state.params)
    state, _ = jax.jit(step.update.apply)(state, Loss(jnp.float32(1), jnp.float32(1), carried=state.carry), grads)
    after = step.canonical.of(state).params["layers"]
    unchanged = [np.array_equal(new["kernel"], old["kernel"]) for new, old in zip(after, before, strict=True)]
    assert unchanged == [True, *[False] * (len(before) - 1)]


# --- Carried state ---

CARRIED = {"max": jnp.float32(0), "sum": jnp.float32(0), "mean": jnp.float32(0), "last": jnp.float32(0)}
REDUCTIONS = {kind: kind for kind in CARRIED}


def carrying(params, batch, key, carried):
    """Adds the sum of the first column of x to each carried value."""
    row = jnp.sum(batch["x"][:, 0])
    return Loss(jnp.sum(errors(params, batch)), len(batch["x"]), {}, {kind: carried[kind] + row for kind in carried})


@pytest.mark.parametrize(
    ("name", "num_microbatches"),
    [("one device", 1), ("one device", 4), ("data 4", 2), ("fsdp 4", 2), ("data 2 x fsdp 2", 1), ("data 2 x fsdp 2", 2)],
)
def test_carried_state_is_reduced_over_microbatches_and_devices_as_declared(name, num_microbatches, batch):
    step = train_step(
        carrying, optax.sgd(0.0), strategy(name), num_microbatches=num_microbatches, carried=CARRIED, reductions=REDUCTIONS
    )
    start = {kind: jnp.float32(-10) for kind in CARRIED}  # a maximum that starts at zero would be wrong
    state, _ = trained(step, batch, steps=1, carried=start)
    parts = np.asarray(batch["x"][:, 0]).reshape(num_microbatches, step.num_devices, -1).sum(-1) - 10
    expected = {"max": parts.max(), "sum": parts.sum(), "mean": parts.mean(), "last": parts[-1, -1]}
    for kind, value in expected.items():
        assert state.carried[kind] == pytest.approx(float(value), rel=1e-5), kind


def test_a_skipped_update_does_not_change_the_carried_state(batch):
    step = train_step(carrying, optax.sgd(1.0), strategy("one device"), carried=CARRIED)
    state, _ = trained(step, batch | {"y": np.full((ROWS, 3), np.nan, np.float32)}, steps=1, carried=CARRIED)
    assert (int(state.skipped), int(state.step)) == (1, 1)
    assert jax.tree.map(float, state.carried) == {"max": 0, "sum": 0, "mean": 0, "last": 0}
    np.testing.assert_array_equal(step.canonical.of(state).params["up"], new_params()["up"])


# --- Random keys ---


def noisy(params, batch, key):
    return mean(params, batch, key) + 0 * jnp.sum(params["bias"]) + jax.random.normal(key)


def test_every_step_microbatch_and_device_has_a_different_random_key(batch):
    def spread(params, batch, key):
        drawn = jax.random.normal(key)
        return Loss(0 * jnp.sum(params["bias"]), 1.0, {"drawn": drawn, "squares": drawn**2})

    step = train_step(spread, optax.sgd(0.0), strategy("data 4"), num_microbatches=2, key=3)
    run, state = step.compile(batch), step.init(new_params())
    drawn = []
    for _ in range(2):
        state, metrics = run(state, step.place(batch))
        jax.block_until_ready(state)
        drawn.append((float(metrics.aux["drawn"]), float(metrics.aux["squares"])))
    # If all eight numbers were equal, the squared mean would equal the mean of the squares.
    assert all(abs(average**2 - squares) > 1e-3 for average, squares in drawn)
    assert drawn[0] != drawn[1]


def test_the_same_seed_gives_the_same_losses(batch):
    losses = [
        float(trained(train_step(noisy, optax.sgd(0.1), strategy("one device"), key=seed), batch)[1].loss) for seed in (5, 5, 6)
    ]
    assert losses[0] == losses[1] != losses[2]


# --- Checks and errors ---


def test_a_transform_that_changes_a_dtype_is_refused_at_compile_time(batch):
    def update(updates, state, params=None):
        return updates, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state)

    transform = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
    with pytest.raises(DonationError) as error:
        train_step(mean, transform, strategy("one device")).compile(batch)
    assert error.value.leaves


@pytest.mark.parametrize(("name", "other"), [("one device", "fsdp 4"), ("data 2 x fsdp 2", "one device"), ("fsdp 4", "data 4")])
@pytest.mark.parametrize("transform", ["adamw, elementwise", pytest.param("muon", marks=pytest.mark.once)])
def test_a_canonical_state_moves_to_another_strategy_unchanged(name, other, transform, batch):
    own = TRANSFORMS[transform]
    first, second = (train_step(mean, own, strategy(each)) for each in (name, other))
    state, _ = trained(first, batch, steps=1)
    canonical = jax.tree.map(np.asarray, first.canonical.of(state))
    moved = second.canonical.back(jax.device_put(canonical, jax.tree.map(lambda s: s.sharding, second.canonical.shapes())))
    restored = second.canonical.of(moved)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(canonical), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"reductions": "median", "carried": {"a": jnp.zeros(())}}, "reductions"),
        ({"freeze": ("nothing*",)}, "freeze"),
        ({"freeze": ("*",)}, "freeze"),
    ],
)
def test_an_invalid_argument_is_refused_by_its_name(arguments, field):
    with pytest.raises(ConfigError) as error:
        train_step(mean, optax.sgd(0.1), strategy("one device"), **arguments)
    assert error.value.field == field


def test_a_mesh_with_unknown_axes_is_refused():
    with pytest.raises(ConfigError) as error:
        FullySharded(jax.make_mesh((4,), ("model",)), shapes())
    assert error.value.field == "mesh"


def test_a_loss_that_is_not_a_scalar_is_refused(batch):
    with pytest.raises(ShapeError):
        train_step(lambda params, batch, key: errors(params, batch), optax.sgd(0.1), strategy("one device")).compile(batch)


def test_a_batch_that_devices_and_microbatches_do_not_divide_is_refused(batch):
    step = train_step(mean, optax.sgd(0.1), strategy("data 4"), num_microbatches=3)
    with pytest.raises(ShapeError):
        step.compile(batch)


def test_the_repr_of_a_strategy_and_a_step_is_one_line():
    shapes = {"w": jax.ShapeDtypeStruct((1000, 3), jnp.float32)}
    mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2])
    sharded = FullySharded(mesh, shapes, gather_per="pass")
    assert repr(Replicated(None, shapes)) == "Replicated(one device, 3,000 parameters)"
    assert repr(sharded) == "FullySharded(fsdp=2, 3,000 parameters, gathered per pass)"
    step = train_step(lambda params, batch, key: 0.0, optax.sgd(0.1), sharded)
    assert repr(step) == "TrainStep(3,000 parameters on 2 devices, DataParallel)"


@pytest.mark.long
def test_a_state_of_a_step_that_freezes_other_parameters_does_not_fit():
    # The trained and the frozen parameters have equal sizes, so only the names of the packed arrays differ.
    params = {"a": {"w": jnp.ones((4, 4))}, "b": {"w": jnp.zeros((4, 4))}}

    def loss(params, x, key):
        return jnp.mean(x @ params["a"]["w"] @ params["b"]["w"])

    first, second = (train_step(loss, optax.sgd(0.1), Replicated(None, params), freeze=(frozen,)) for frozen in ("a/*", "b/*"))
    x = jnp.ones((2, 4))
    state = dataclasses.replace(first.init(params), params=second.init(params).params)
    with pytest.raises(ShapeError, match="`state` has no `params/small frozen matrices"):
        first.compile(x)(state, first.place(x))
