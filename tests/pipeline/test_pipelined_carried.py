"""The carried state of a pipeline equals one device with the same microbatches."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgraph.errors import ConfigError, ShapeError
from jgraph.pipeline import Pipelined, PipelineModel
from jgraph.schedule import generate
from jgraph.step import train_step
from jgraph.strategies import Loss, Replicated
from tests.pipeline.test_pipelined_step import LAYERS, MICROBATCHES, MODEL as PLAIN, WIDTH, embed, head, new_params, shapes

# One array for all layers, which `split_carried` splits. `counts` starts below zero, so a maximum with zeros is detected.
CARRIED = {
    "largest": jnp.full(LAYERS, -9.0),
    "counts": jnp.full((LAYERS, 2), -5, jnp.int32),
    "sum": jnp.zeros((LAYERS, WIDTH)),
    "mean": jnp.ones((LAYERS, WIDTH)),
    "history": jnp.arange(3.0 * LAYERS, dtype=jnp.bfloat16).reshape(LAYERS, 3),
}
REDUCTIONS = {"largest": "max", "counts": "max", "sum": "sum", "mean": "mean", "history": "last"}


def layer(params, x, carried):
    """Reads its state, so forward and backward of every microbatch must use the state at the start of the step."""
    y = x + jnp.tanh((x / jnp.mean(carried["mean"])) @ params["kernel"])  # no derivative at the zeros of padding
    largest = -jnp.max(jnp.abs(x))  # negative, so that a maximum with an initial zero is detected
    after = {
        "largest": largest,
        "counts": carried["counts"] + jnp.round(jnp.stack([10 * largest, jnp.sum(x)])).astype(jnp.int32),
        "sum": 0.1 * carried["sum"] + x[0],
        "mean": 0.9 * carried["mean"] + 0.1 * jnp.mean(x, 0),
        "history": jnp.roll(carried["history"], 1).at[0].set(largest.astype(jnp.bfloat16)),
    }
    return y, after


def keyed(params, x, key, carried):
    return layer(params, x * jax.random.bernoulli(key, 0.7, x.shape), carried)


def split_carried(carried):
    return [jax.tree.map(lambda leaf, i=i: leaf[i], carried) for i in range(LAYERS)]


def join_carried(layers):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


MODEL = replace(PLAIN, layer=layer, split_carried=split_carried, join_carried=join_carried)


def whole(params, batch, key, carried, *, with_key: bool = False):
    x, after = embed(params, batch), []
    for i, (own, state) in enumerate(zip(params["layers"], split_carried(carried), strict=True)):
        x, state = keyed(own, x, jax.random.fold_in(key, i), state) if with_key else layer(own, x, state)
        after.append(state)
    return Loss(head(params, x, batch), carried=join_carried(after))


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {"x": rng.standard_normal((16, 2), np.float32), "y": rng.standard_normal((16, 4), np.float32)}


def step_of(
    schedule: str, *axes: tuple[str, int], model: PipelineModel = MODEL, chunks: int = 1, rate: float = 0.1, **choices: Any
):
    mesh = jax.make_mesh(tuple(size for _, size in axes), tuple(name for name, _ in axes))
    order = generate(schedule, pp=mesh.shape["pipe"], microbatches=MICROBATCHES, chunks=chunks)
    strategy = Pipelined(mesh, shapes(), order, **choices)
    given = {"carried": CARRIED, "reductions": REDUCTIONS, "num_microbatches": MICROBATCHES}
    return train_step(model, optax.sgd(rate), strategy, **given)


def one_device(num_microbatches: int, loss: Any = whole):
    given = {"carried": CARRIED, "reductions": REDUCTIONS, "num_microbatches": num_microbatches}
    return train_step(loss, optax.sgd(0.1), Replicated(None, shapes()), **given)


def trained(step, rows, steps: int = 2):
    # `compile` checks that the state, including carried state, is updated in place.
    run, state = step.compile(rows), step.init(new_params, CARRIED)
    for _ in range(steps):
        state, _ = run(state, step.place(rows))
        jax.block_until_ready(state)
    return jax.device_get(step.canonical.of(state))


def assert_same(state, expected):
    for (path, a), b in zip(jax.tree.leaves_with_path((state.carried, state.params)), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=jax.tree_util.keystr(path))


PIPE, DATA, FSDP = ("pipe", 2), ("data", 2), ("fsdp", 2)
LONG = pytest.mark.long


@pytest.mark.long
# Five layers make all stages uneven. Two cases use all eight devices.
@pytest.mark.parametrize(
    ("schedule", "axes", "choices"),
    [
        pytest.param("aligned", [("pipe", 4)], {}, marks=[LONG, pytest.mark.once]),
        pytest.param("zb-v", [PIPE], {"chunks": 2}, marks=[LONG, pytest.mark.once]),
        pytest.param("1f1b", [DATA, ("pipe", 4)], {"remat": "layer"}, marks=pytest.mark.once),
        pytest.param("zb-v", [DATA, PIPE], {"chunks": 2, "engine": "dispatch"}, marks=[LONG, pytest.mark.once]),
        pytest.param("aligned", [PIPE], {"chunks": 2, "remat": "layer"}, marks=[LONG, pytest.mark.once]),
        pytest.param("interleaved-1f1b", [PIPE, FSDP], {"chunks": 2}, marks=[LONG, pytest.mark.once]),
        pytest.param("zb-h1", [DATA, PIPE, FSDP], {}, marks=LONG),
        pytest.param("gpipe", [("pipe", 1)], {}, marks=[LONG, pytest.mark.once]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_carried_state_of_a_pipeline_equals_one_device(schedule, axes, choices):
    ranks = int(np.prod([size for name, size in axes if name != "pipe"]))
    rows = batch()
    assert_same(trained(step_of(schedule, *axes, **choices), rows), carried_and_params(one_device(MICROBATCHES * ranks), rows))


def carried_and_params(step, rows):
    state = trained(step, rows)
    return state.carried, state.params


@pytest.mark.long
@pytest.mark.parametrize("choices", [{}, pytest.param({"remat": "layer"}, marks=pytest.mark.once)], ids=str)
def test_a_layer_can_take_a_key_and_carried_state(choices):
    rows = batch()
    step = step_of("zb-h1", PIPE, model=replace(MODEL, layer=keyed, takes_key=True), **choices)
    loss = one_device(MICROBATCHES, lambda *args: whole(*args, with_key=True))
    assert_same(trained(step, rows), carried_and_params(loss, rows))


@pytest.mark.long
@pytest.mark.once
def test_both_engines_draw_the_same_random_numbers_on_every_data_rank():
    model, rows = replace(MODEL, layer=keyed, takes_key=True), batch()
    program, host = (
        trained(step_of("1f1b", DATA, PIPE, model=model, engine=engine), rows) for engine in ("program", "dispatch")
    )
    assert_same(host, (program.carried, program.params))


@pytest.mark.long
def test_a_skipped_step_does_not_change_the_carried_state():
    rows = batch()
    rows["y"][:] = np.nan
    state = trained(step_of("zb-h1", PIPE), rows, steps=1)
    assert (int(state.skipped), int(state.step)) == (1, 1)
    for a, b in zip(jax.tree.leaves(state.carried), jax.tree.leaves(CARRIED), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.long
@pytest.mark.once
def test_carried_state_moves_between_layouts_bit_for_bit():
    first, second = step_of("aligned", PIPE), one_device(MICROBATCHES)
    state = trained(first, batch(), steps=1)
    for step in (second, first):
        where = jax.tree.map(lambda s: s.sharding, step.canonical.shapes())
        moved = step.canonical.back(jax.device_put(state, where))
        again = jax.device_get(step.canonical.of(moved))
        for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(a, b)


TWO = {"a": jnp.zeros((LAYERS, 2)), "b": jnp.zeros((LAYERS, 2))}


def concatenated(carried):
    """Concatenates both arrays of each layer."""
    return list(jnp.concatenate([carried["a"], carried["b"]], 1))


def one_array_per_layer(carried):
    """Returns `a` for the first layers and `b` for the others."""
    return [*carried["a"], *carried["b"]]


def without_head(carried):
    return split_carried({name: carried[name] for name in CARRIED})


REFUSED = {
    "state of the head": (CARRIED | {"head": jnp.zeros(3)}, "max", {"split_carried": without_head}, "carried"),
    "too few layers": (CARRIED, "max", {"split_carried": lambda carried: split_carried(carried)[1:]}, "carried"),
    "no list of layers": (CARRIED, "max", {"split_carried": lambda carried: carried}, "carried"),
    "a reduction for some layers": (
        {"a": jnp.zeros((2, 3)), "b": jnp.zeros((LAYERS - 2, 3))},
        {"a": "max", "b": "sum"},
        {
            "split_carried": one_array_per_layer,
            "join_carried": lambda layers: {"a": jnp.stack(layers[:2]), "b": jnp.stack(layers[2:])},
        },
        "carried",
    ),
    "two reductions in one array": (
        TWO,
        {"a": "max", "b": "sum"},
        {
            "split_carried": concatenated,
            "join_carried": lambda layers: dict(zip("ab", jnp.split(jnp.stack(layers), 2, 1), strict=True)),
        },
        "reductions",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_carried_state_with_an_invalid_split_over_layers_is_refused(name):
    carried, reductions, functions, field = REFUSED[name]
    strategy = Pipelined(jax.make_mesh((2,), ("pipe",)), shapes(), generate("1f1b", pp=2, microbatches=MICROBATCHES))
    given = {"carried": carried, "reductions": reductions, "num_microbatches": MICROBATCHES}
    with pytest.raises(ConfigError) as error:
        train_step(replace(MODEL, **functions), optax.sgd(0.1), strategy, **given)
    assert error.value.field == field


@pytest.mark.parametrize("change", [lambda x, carried: x, lambda x, carried: (x, carried | {"sum": carried["sum"][:1]})])
def test_a_layer_with_a_missing_or_reshaped_state_is_refused(change):
    model = replace(MODEL, layer=lambda params, x, carried: change(x, carried))
    with pytest.raises(ShapeError):
        step_of("1f1b", PIPE, model=model).lower(batch())
