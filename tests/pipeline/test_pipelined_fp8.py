"""An FP8 pipeline equals one device with FP8: losses, parameters, and amax histories."""

import re
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core

import jgraph
from jgraph import FP8Config
from jgraph.errors import ConfigError
from jgraph.pipeline import Pipelined, PipelineModel, _autotune
from jgraph.pipeline._memory import bytes_per_rank, slot_bytes
from jgraph.schedule import generate
from jgraph.step import train_step
from jgraph.strategies import Loss, Replicated
from tests.pipeline.test_pools import garbage

# D model, F hidden, B rows of a microbatch, M microbatches; three layers: two stages are uneven.
D, F, B, M, LAYERS = 16, 64, 32, 4, 3
CURRENT, DELAYED = FP8Config(), FP8Config(recipe="delayed", history=3)
PIPE, DATA, FSDP = ("pipe", 2), ("data", 2), ("fsdp", 2)
DISPATCH = {"engine": "dispatch"}
LONG = [pytest.mark.long, pytest.mark.once]


def new_params(layers=LAYERS, stacked=False):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return 0.1 * rng.standard_normal(shape, np.float32)

    # Each layer has larger parameters than the previous layer, so the tests detect a swapped amax.
    own = [{"up": (1 + i / 2) * normal(D, F), "down": (1 + i) * normal(F, D), "bias": normal(F)} for i in range(layers)]
    blocks = jax.tree.map(lambda *leaves: np.stack(leaves), *own) if stacked else own
    return {"embed": normal(8, D), "blocks": blocks, "head": normal(D, 4)}


def embed(outer, batch):
    return batch["x"] @ outer["embed"]


def embed16(outer, batch):
    """Computes `embed` by a matmul with sizes that FP8 supports. It must not be quantized."""
    x, w = batch["x"], outer["embed"]
    return jnp.concatenate([x, jnp.zeros_like(x)], 1) @ jnp.concatenate([w, jnp.zeros_like(w)])


def layer(params, x):
    return 0.5 * x + jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]


def keyed(params, x, key, carried):
    """Applies dropout and counts the steps in the carried state."""
    return layer(params, x * jax.random.bernoulli(key, 0.7, x.shape)), carried + 1


def head(outer, x, batch):
    return jnp.mean((x @ outer["head"] - batch["y"]) ** 2)


def split(params):
    blocks = params["blocks"]
    if isinstance(blocks, dict):
        blocks = [jax.tree.map(lambda leaf, i=i: leaf[i], blocks) for i in range(len(blocks["up"]))]
    return {name: params[name] for name in ("embed", "head")}, blocks


MODEL = PipelineModel(embed, layer, head, split=split, join=lambda outer, layers: outer | {"blocks": layers})
STACKED = replace(
    MODEL, join=lambda outer, layers: outer | {"blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}
)
KEYED = replace(MODEL, layer=keyed, takes_key=True, split_carried=list, join_carried=jnp.stack)


def whole(params, batch, key):
    x = embed(params, batch)
    for own in params["blocks"]:
        x = layer(own, x)
    return head(params, x, batch)


def scanned(params, batch, key):
    x, _ = jax.lax.scan(lambda x, own: (layer(own, x), None), embed(params, batch), params["blocks"])
    return head(params, x, batch)


def whole_keyed(params, batch, key, carried):
    x = embed(params, batch)
    for i, own in enumerate(params["blocks"]):
        x, _ = keyed(own, x, jax.random.fold_in(key, i), carried[i])
    return Loss(head(params, x, batch), carried=carried + 1)


def batch_of(rows):
    rng = np.random.default_rng(1)
    return {"x": rng.standard_normal((rows, 8), np.float32), "y": rng.standard_normal((rows, 4), np.float32)}


def parts_for(kind):
    """Returns the pipeline's model, the loss of one device, and the carried state."""
    return {
        "plain": (MODEL, whole, None),
        "embed16": (replace(MODEL, embed=embed16), None, None),
        "stacked": (STACKED, scanned, None),
        "keyed": (KEYED, whole_keyed, jnp.zeros(LAYERS)),
    }[kind]


def shapes(kind, layers=LAYERS):
    return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, new_params(layers, stacked=kind == "stacked")))


def pipeline_step(
    schedule="zb-h1", axes=(PIPE,), config=DELAYED, kind="plain", chunks=1, rows=M * B, microbatches=M, layers=LAYERS, **choices
):
    mesh = jax.make_mesh(tuple(size for _, size in axes), tuple(name for name, _ in axes))
    order = generate(schedule, pp=mesh.shape["pipe"], microbatches=microbatches, chunks=chunks)
    model, _, carried = parts_for(kind)
    strategy = Pipelined(mesh, shapes(kind, layers), order, **choices)
    return train_step(model, SGD, strategy, num_microbatches=microbatches, carried=carried, fp8=config, batch=batch_of(rows))


def one_device(config=DELAYED, kind="plain", microbatches=M, rows=M * B, layers=LAYERS):
    _, loss, carried = parts_for(kind)
    strategy = Replicated(None, shapes(kind, layers))
    return train_step(loss, SGD, strategy, num_microbatches=microbatches, carried=carried, fp8=config, batch=batch_of(rows))


SGD = jgraph.elementwise(optax.sgd(0.01))


def trained(step, kind="plain", rows=M * B, steps=2, state=None, layers=LAYERS):
    """Trains a model. Returns the losses and gradient norms, and the canonical state."""
    batch = batch_of(rows)
    params = new_params(layers, stacked=kind == "stacked")
    run, numbers = step.compile(batch), []
    state = step.init(params, parts_for(kind)[2]) if state is None else state
    for _ in range(steps):
        state, metrics = run(state, step.place(batch))
        numbers.append((float(metrics.loss), float(metrics.grad_norm)))
    return numbers, jax.device_get(step.canonical.of(state))


@cache
def expected(config, kind, microbatches, rows, layers=LAYERS):
    return trained(one_device(config, kind, microbatches, rows, layers), kind, rows, layers=layers)


def assert_same(found, reference, carried_rtol=0.0):
    np.testing.assert_allclose(found[0], reference[0], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=carried_rtol), found[1].carried, reference[1].carried)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found[1].params, reference[1].params)


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "axes", "config", "choices"),
    [
        ("zb-h1", [PIPE], DELAYED, {}),
        pytest.param("aligned", [DATA, PIPE, FSDP], CURRENT, {}, marks=LONG),
        pytest.param("interleaved-1f1b", [PIPE], replace(DELAYED, wgrad="bf16", amax="most_recent"), {"chunks": 2}, marks=LONG),
        pytest.param("zb-h1", [PIPE], DELAYED, {"kind": "keyed", "remat": "wide"}, marks=LONG),
        pytest.param("zb-v", [PIPE, FSDP], DELAYED, {"chunks": 2, "kind": "stacked", "remat": "layer"}, marks=LONG),
        pytest.param("gpipe", [PIPE], CURRENT, {"kind": "keyed", **DISPATCH}, marks=LONG),
        pytest.param("gpipe", [DATA, PIPE], DELAYED, DISPATCH, marks=LONG),
    ],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "recipe", ""),
)
def test_the_steps_of_an_fp8_pipeline_equal_one_device(schedule, axes, config, choices):
    ranks, kind = int(np.prod([size for name, size in axes if name != "pipe"])), choices.get("kind", "plain")
    rows, layers = ranks * M * B, 5 if "chunks" in choices else LAYERS
    step = pipeline_step(schedule, tuple(axes), config, rows=rows, layers=layers, **choices)
    found = trained(step, kind, rows, layers=layers)
    if config.recipe == "delayed" and ranks > 1:
        assert_same(found, expected(config, kind, 1, rows, layers), carried_rtol=1e-6)
    else:  # with the same number of rows per microbatch and device, because current scaling uses their amax
        assert_same(found, expected(config, kind, ranks * M, rows, layers))


@pytest.mark.long
def test_remat_wide_recomputes_matmuls_that_widen_by_four():
    def kept(remat):
        step = pipeline_step(remat=remat)
        batch_M = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((M, B, *leaf.shape[1:]), leaf.dtype), batch_of(M * B))
        slots = slot_bytes(step.bound.pipeline, batch_M, layers=1)
        return slots["forward_dgrad"] + slots["forward_wgrad"], slots["stash"]

    (before, stash), (after, more) = kept("nothing"), kept("wide")
    assert before - after == 4 * B * F - 3 * B * D  # dgrad reads x, which is not stored in FP8
    assert more - stash == B * F  # dgrad computes the input of wgrad


@pytest.mark.long
@pytest.mark.once
def test_results_of_idle_ranks_do_not_reach_the_amax_histories(monkeypatch):
    monkeypatch.setattr(jax.lax, "empty", garbage)
    assert_same(trained(pipeline_step("aligned")), expected(DELAYED, "plain", M, M * B))


@pytest.mark.long
def test_a_skipped_step_does_not_change_the_amax_histories():
    step, batch = pipeline_step(), batch_of(M * B)
    run = step.compile(batch)
    state, _ = run(step.init(new_params()), step.place(batch))
    before = jax.device_get(state.carried)
    state, metrics = run(state, step.place(batch | {"x": np.where(batch["x"] == batch["x"].max(), np.inf, batch["x"])}))
    assert not np.isfinite(metrics.loss)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.carried), before)


@pytest.mark.long
@pytest.mark.once
def test_an_fp8_run_moves_to_one_device_and_back_bit_for_bit():
    kind = "stacked"
    pipeline, single = pipeline_step("aligned", kind=kind), one_device(kind=kind)
    numbers, after = trained(single, kind, steps=3)
    state = trained(pipeline, kind, steps=1)[1]
    for step, losses in ((single, numbers[1:2]), (pipeline, numbers[2:])):
        where = jax.tree.map(lambda s: s.sharding, step.canonical.shapes())
        moved = step.canonical.back(jax.device_put(state, where))
        again = jax.device_get(step.canonical.of(moved))
        jax.tree.map(np.testing.assert_array_equal, again, state)
        found, state = trained(step, kind, steps=1, state=moved)
        np.testing.assert_allclose(found, losses, rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, state.carried, after.carried)


@pytest.mark.long
@pytest.mark.once
def test_an_fp8_run_resumes_with_the_other_engine():
    numbers, after = expected(DELAYED, "plain", M, M * B)
    host, program = pipeline_step("gpipe", kind="embed16", **DISPATCH), pipeline_step("gpipe")
    found, state = trained(host, steps=1)
    where = jax.tree.map(lambda s: s.sharding, program.canonical.shapes())
    more, state = trained(program, steps=1, state=program.canonical.back(jax.device_put(state, where)))
    assert_same((found + more, state), (numbers, after))


@pytest.fixture(scope="module")
def dispatch_step():
    rows = 96  # so that no activation has the shape of a weight
    return pipeline_step("gpipe", microbatches=2, rows=rows, layers=2, remat="wide", **DISPATCH).compile(batch_of(rows))


@pytest.mark.long
@pytest.mark.once
def test_the_dispatch_engine_does_not_save_recomputed_matmuls(dispatch_step):
    stages = dispatch_step.gradients.dispatched.stages
    assert not [leaf for stage in stages for leaf in stage.shaped.residuals.avals if F in leaf.shape]


@pytest.mark.long
@pytest.mark.once
def test_the_dispatch_engine_stores_quantized_weights_only_in_fp8(dispatch_step):
    weights = [
        leaf for leaf in dispatch_step.gradients.dispatched.buffers["begun"] if leaf is not None and leaf.size == 2 * D * F
    ]
    assert [leaf.dtype for leaf in weights] == [jnp.float8_e4m3fn] * 4  # rows and columns


def quantizations(jaxpr, times=1):
    """Counts the FP8 casts to the shape of a weight in a traced program, including loop iterations."""
    found = 0
    for eqn in jaxpr.eqns:
        out = eqn.outvars[0].aval if eqn.primitive.name == "convert_element_type" else None
        if out is not None and out.dtype == jnp.float8_e4m3fn and out.shape in ((D, F), (F, D)):
            found += times
        turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        found += sum(quantizations(inner, turns * times) for inner in core.jaxprs_in_params(eqn.params))
    return found


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "chunks"), [("aligned", 1), pytest.param("zb-v", 2, marks=pytest.mark.once)])
def test_a_rank_quantizes_each_of_its_weights_once_per_step(schedule, chunks):
    layers = 2 * chunks + 1
    places = chunks * -(-layers // (2 * chunks))
    for microbatches in (4, 8):
        rows = microbatches * 48  # so that no activation has the shape of a weight
        step = pipeline_step(schedule, chunks=chunks, microbatches=microbatches, rows=rows, layers=layers)
        traced = step.jitted().trace(step.state, step.placed_shapes(batch_of(rows)))
        assert quantizations(traced.jaxpr.jaxpr) == 2 * places


@pytest.mark.long
def test_sharded_weights_of_a_pipeline_are_gathered_only_in_fp8():
    text = pipeline_step("aligned", (PIPE, FSDP), rows=2 * M * B, layers=2).compile(batch_of(2 * M * B)).as_text()
    gathered = re.findall(r"= \(?(\w+)\[([\d,]*)\]\S* all-gather", text)
    weights = [dtype for dtype, shape in gathered if shape in (f"{D},{F}", f"{F},{D}")]
    assert weights == ["u8", "u8"]


@pytest.mark.long
@pytest.mark.once
def test_a_keep_pattern_can_exclude_one_matmul_of_every_layer():
    config = replace(DELAYED, keep=("*embed*", "*head*", "blocks/*/up"))
    step = pipeline_step(config=config)
    assert step.bound.observed.used.shape == (LAYERS, 3)
    assert_same(trained(step), expected(config, "plain", M, M * B))


@pytest.mark.parametrize(
    ("config", "field"),
    [(replace(CURRENT, keep=("blocks/1/*",)), "fp8.keep"), (replace(CURRENT, blocks="inner"), "fp8.blocks")],
    ids=["keep", "blocks"],
)
def test_an_fp8_recipe_for_some_layers_is_refused_with_its_field(config, field):
    with pytest.raises(ConfigError) as error:
        pipeline_step(config=config)
    assert error.value.field == field


# --- Memory ---


def linear(config, microbatches=8):
    """Returns a step on two ranks with two linear layers per stage and bfloat16 activations, and its batch by microbatch."""
    matrices = replace(
        MODEL,
        embed=lambda outer, batch: embed(outer, batch).astype(jnp.bfloat16),
        layer=lambda params, x: x @ params["up"].astype(x.dtype) @ params["down"].astype(x.dtype),
    )
    order = generate("gpipe", pp=2, microbatches=microbatches)
    strategy, batch = Pipelined(jax.make_mesh((2,), ("pipe",)), shapes("plain", 2), order), batch_of(microbatches * B)
    step = train_step(matrices, SGD, strategy, num_microbatches=microbatches, fp8=config, batch=batch)
    return step, jax.tree.map(lambda leaf: leaf.reshape(microbatches, B, -1), batch), batch


@pytest.mark.long
@pytest.mark.parametrize("config", [CURRENT, DELAYED], ids=["current", "delayed"])
def test_linear_layers_save_one_byte_per_element_as_predicted(config):
    (plain, batch_M, _), (step, _, _) = linear(None), linear(config)
    wide, narrow = (slot_bytes(one.bound.pipeline, batch_M) for one in (plain, step))
    waiting = {
        name: sum(slots[pool] for pool in ("forward_dgrad", "forward_wgrad", "stash"))
        for name, slots in (("wide", wide), ("narrow", narrow))
    }
    assert waiting["wide"] == 2 * 2 * B * (D + F)
    assert 0 < waiting["narrow"] - 2 * B * (D + F) <= 6 * 4  # float32 scales and amax
    matrices = 2 * D * F
    whole = bytes_per_rank(step.bound.pipeline, batch_M)
    assert whole["cast"] == 2 * matrices  # rows and columns


@pytest.mark.long
@pytest.mark.once
def test_pending_microbatches_use_the_predicted_memory():
    found = []
    for microbatches in (4, 36):
        step, batch_M, batch = linear(DELAYED, microbatches)
        predicted = sum(bytes_per_rank(step.bound.pipeline, batch_M).values())
        found.append((predicted, step.compile(batch).memory.temporaries))
    (few, compiled_few), (many, compiled_many) = found
    assert compiled_many - compiled_few == pytest.approx(many - few, rel=0.02)


def test_a_pipeline_without_histories_uses_the_initial_histories():
    step, batch_M, _ = linear(DELAYED)
    *_, history = jax.eval_shape(step.bound.pipeline.step, step.bound.pipeline.shapes, batch_M)
    assert history.window.shape == (3, 2 * 2, 3)


@pytest.mark.long
@pytest.mark.once
@pytest.mark.parametrize("kind", ["plain", "stacked"])
def test_autotuning_measures_an_fp8_layer(monkeypatch, kind):
    monkeypatch.setattr(_autotune, "_SECONDS", 0.001)
    step = pipeline_step(kind=kind)
    batch_M = jax.tree.map(lambda leaf: leaf.reshape(M, B, -1), batch_of(M * B))
    parts = _autotune.measure(step.bound.pipeline, batch_M)
    assert min(parts.forward, parts.dgrad, parts.wgrad) > 0
