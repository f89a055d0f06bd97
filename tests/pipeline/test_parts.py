"""Pipeline models: assignment of layers, shared embedding and head, and errors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jgraph
from jgraph.errors import ConfigError, OrderError, ShapeError
from jgraph.layout import Stacked, named
from jgraph.pipeline import Pipeline, Pipelined, PipelineModel, StageAssignment
from jgraph.pipeline._ends import End
from jgraph.pipeline._memory import bytes_per_rank
from jgraph.pipeline._stages import chunk_layout
from jgraph.schedule import Order, Schedule, generate, vee
from jgraph.strategies.sharding import FSDPChoices
from tests.pipeline import model


@pytest.mark.parametrize(
    ("name", "P", "C", "L"), [("aligned", 4, 2, 8), ("aligned", 4, 2, 9), ("zb-v", 4, 2, 15), ("1f1b", 1, 1, 3)]
)
def test_unstack_is_the_inverse_of_stack(name, P, C, L):
    pipe = model.pipeline(generate(name, pp=P, microbatches=2 * P, chunks=C), L)
    outer, layers = model.params(L)
    jax.tree.map(np.testing.assert_array_equal, pipe.layout.unpack(pipe.layout.pack((outer, layers))), (outer, layers))


def test_first_stages_take_the_extra_layers_and_other_stages_are_padded():
    layout = StageAssignment(vee(2), 6)
    assert layout.placement == ((0, 3), (1, 2))
    assert layout.layers_per_stage == 2
    assert layout.layers().tolist() == [[[0, 1], [5, 5]], [[2, 3], [4, 4]]]  # padding repeats the first layer of its stage
    assert layout.active().tolist() == [[[True, True], [True, False]], [[True, True], [True, False]]]
    tree = {}, [np.full(1, i + 1.0, np.float32) for i in range(6)]
    own = named(tree)
    stacked = own.then(Stacked(own, lambda tree: tree, lambda *pair: pair, layout.places(), {}, {"pipe": 2})).pack(tree)
    values = {name: leaf.ravel().tolist() for name, leaf in stacked.items()}
    assert values == {"layers/0/0": [1, 3], "layers/0/1": [2, 4], "layers/1/0": [6, 5], "layers/1/1": [0, 0]}


@pytest.mark.parametrize(
    ("name", "runtime"), [("aligned", "aligned"), ("1f1b", "general"), ("zb-v", "general"), ("gpipe", "general")]
)
def test_auto_selects_the_aligned_runtime_for_aligned_schedules(name, runtime):
    schedule = generate(name, pp=1, microbatches=2) if name == "gpipe" else generate(name, pp=2, microbatches=4)
    assert model.pipeline(schedule, 4).runtime == runtime


def test_a_pipeline_casts_the_parameters_that_other_strategies_cast():
    shapes = {"kernel": (4, 8, 8), "bias": (4, 8), "scale": (8,)}  # of four experts, so that a bias has two axes
    layers = [{name: jnp.ones(shape) for name, shape in shapes.items()} for _ in range(2)]
    parts = PipelineModel(model.embed, lambda p, x: x, model.head)
    choices = FSDPChoices(compute_dtype=jnp.bfloat16)
    schedule = generate("1f1b", pp=2, microbatches=2)
    pipe = Pipeline.build(parts, schedule, model.mesh(2), named((model.params(2)[0], layers)), fsdp=choices)
    (given, _), _, _ = pipe.stage_shapes(jax.eval_shape(lambda: layers[:1]))
    assert {name: leaf.dtype for name, leaf in given[0].items()} == {
        "kernel": jnp.bfloat16,
        "bias": jnp.float32,
        "scale": jnp.float32,
    }
    copies = pipe.shards.layers[0][0]
    assert {name: shard.dtype for name, shard in copies.items()} == {"kernel": jnp.bfloat16, "bias": None, "scale": None}


def test_the_predicted_memory_has_a_cast_copy_of_embedding_head_and_matrices():
    pipe = model.pipeline(generate("1f1b", pp=2, microbatches=2), 4, fsdp=FSDPChoices(compute_dtype=jnp.bfloat16))
    outer, layers = model.params(4)
    of_rank = jax.tree.leaves((outer, [(layer["up"], layer["down"]) for layer in layers[:2]]))
    assert bytes_per_rank(pipe, model.batch(2))["cast"] == 2 * sum(leaf.size for leaf in of_rank)


def test_the_only_scalar_of_a_chunk_gets_an_axis_to_be_sharded_over_ranks():
    tree = [{"gate": jnp.float32(3), "up": jnp.ones((2, 2))}]
    layout = chunk_layout(tree, ())
    found = layout.pack(tree)
    assert [array.shape for array in found.values() if array.size == 1] == [(1,)]
    assert {name: array.shape for name, array in found.items()} == {name: param.shape for name, param in layout.params.items()}
    jax.tree.map(np.testing.assert_array_equal, layout.unpack(found), tree)


def test_the_repr_of_a_pipeline_has_its_mesh_its_parameters_and_its_schedule():
    strategy = Pipelined(model.mesh(2), model.params(2), generate("1f1b", pp=2, microbatches=4))
    assert repr(strategy) == f"Pipelined(data=1, pipe=2, 632 parameters, {strategy.schedule!r})"


# --- Embedding and head sharded over the ranks: each rank has V / P rows of the table. ---


def own_rows(table, ids):
    """Returns the local rows of ids, and a mask of the ids on this rank."""
    rows = len(table)
    local = ids - lax.axis_index("pipe") * rows
    return jnp.clip(local, 0, rows - 1), (local >= 0) & (local < rows)


def test_a_head_sharded_over_ranks_has_the_gradients_of_one_device():
    rng = np.random.default_rng(0)
    y, w, labels = rng.standard_normal((1, 4, 3), np.float32), rng.standard_normal((3, 5), np.float32), np.arange(4)[None]

    def head(outer, y, labels, axis="pipe"):
        return jgraph.cross_entropy(y, outer, labels, axis=axis)

    end = End.trace(head, jax.typeof(w), lambda outer: outer, {"": 1}, y, labels)
    found = jax.jit(jax.value_and_grad(lambda w, y: end([w], y, labels), argnums=(0, 1)))(w, y)
    expected = jax.value_and_grad(partial(head, axis=None), argnums=(0, 1))(w, y, labels)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


def shared_embed(outer, inputs):
    rows, here = own_rows(outer["table"], inputs["tokens"])
    return lax.psum(jnp.where(here[..., None], outer["table"][rows], 0), "pipe")


def shared_head(outer, y, inputs):
    logits = (lax.psum(y, "pipe") * outer["scale"]) @ outer["table"].T
    top = lax.pmax(lax.stop_gradient(logits).max(-1), "pipe")
    total = lax.psum(jnp.exp(logits - top[..., None]).sum(-1), "pipe")
    rows, here = own_rows(outer["table"], inputs["labels"])
    picked = lax.psum(jnp.where(here, jnp.take_along_axis(logits, rows[..., None], -1)[..., 0], 0), "pipe")
    return jnp.mean(jnp.log(total) + top - picked)


SHARED = PipelineModel(shared_embed, model.layer, shared_head, sharded={"table": 0})


@pytest.mark.parametrize(
    ("name", "P", "C", "runtime"),
    [
        pytest.param("aligned", 4, 1, "aligned", marks=pytest.mark.long),
        pytest.param("zb-v", 2, 2, "general", marks=pytest.mark.once),
    ],
)
def test_embedding_and_head_sharded_over_ranks_have_correct_gradients(name, P, C, runtime):
    pipe = model.pipeline(generate(name, pp=P, microbatches=5, chunks=C), 4, parts=SHARED, runtime=runtime)
    stacked = model.placed(pipe, *model.params(4))
    assert pipe.specs.outer == {"table": PartitionSpec("pipe"), "scale": PartitionSpec()}
    assert stacked.outer["table"].addressable_shards[0].data.shape == (model.V // P, model.D)
    model.assert_same(model.run_pipeline(pipe), model.expected(4, 5))


@pytest.mark.long
def test_sharded_embedding_and_head_work_with_data_ranks():
    pipe = model.pipeline(generate("1f1b", pp=2, microbatches=4), 2, dp=2, parts=SHARED)
    model.assert_same(model.run_pipeline(pipe, dropout=5), model.expected(2, 4, 2, 5))


# --- Errors ---


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(OrderError, match=r"7 layers for 8 stages \(4 ranks x 2 chunks\)"):
        model.pipeline(generate("aligned", pp=4, microbatches=4, chunks=2), 7)


def test_ranks_with_different_numbers_of_stages_are_refused():
    orders = (Order.parse([1, 2, -2, -1]), Order.parse([1, -1]))
    with pytest.raises(OrderError, match="the ranks have 2, 1 stages"):
        model.pipeline(Schedule(orders, ((0, 2), (1,))), 3)


def test_a_mesh_with_another_number_of_ranks_is_refused():
    with pytest.raises(ConfigError, match="`pp` is 2: must be the 4 ranks of the schedule") as caught:
        Pipeline.build(model.PARTS, generate("1f1b", pp=4, microbatches=4), model.mesh(2), named(model.params(4)))
    assert caught.value.field == "pp"


def test_the_aligned_runtime_refuses_a_tick_with_different_actions():
    with pytest.raises(OrderError, match="tick 3 has forward and backward"):
        model.pipeline(generate("1f1b", pp=2, microbatches=4), 2, runtime="aligned")


def test_the_aligned_runtime_refuses_whole_backwards():
    with pytest.raises(OrderError, match="gpipe has combined backwards"):
        model.pipeline(generate("gpipe", pp=1, microbatches=2), 1, runtime="aligned")


def test_a_sharded_axis_not_divisible_by_the_ranks_is_refused():
    with pytest.raises(ConfigError, match="shards table along axis 0 of length 12: must be a multiple of `pp` 8"):
        model.pipeline(generate("1f1b", pp=8, microbatches=8), 8, parts=SHARED)


@pytest.mark.parametrize(
    ("change", "made"),
    [(lambda y: y[..., :4], r"float32\(4, 3, 4\)"), (lambda y: y.astype(jnp.bfloat16), r"bfloat16\(4, 3, 8\)")],
)
def test_a_layer_with_another_output_shape_or_dtype_is_refused(change, made):
    parts = PipelineModel(model.embed, lambda p, x: change(model.layer(p, x)), model.head)
    pipe = model.pipeline(generate("1f1b", pp=2, microbatches=2), 2, parts=parts)
    with pytest.raises(ShapeError, match=rf"`layer` returns {made} for x of float32\(4, 3, 8\): must return"):
        model.run_pipeline(pipe)


def test_an_unknown_sharded_parameter_is_refused():
    parts = PipelineModel(model.embed, model.layer, model.head, sharded={"embeding": 0})
    with pytest.raises(ConfigError, match=r"PipelineModel.sharded has 'embeding': must be one of scale, table"):
        model.pipeline(generate("1f1b", pp=2, microbatches=2), 2, parts=parts)


@pytest.mark.long
def test_a_mesh_from_jax_make_mesh_is_accepted():
    schedule = generate("1f1b", pp=2, microbatches=2)
    mesh = jax.make_mesh((1, 2), ("data", "pipe"), devices=jax.devices()[:2])
    pipe = Pipeline.build(model.PARTS, schedule, mesh, named(model.params(2)))
    model.assert_same(model.run_pipeline(pipe), model.expected(2, 2))
