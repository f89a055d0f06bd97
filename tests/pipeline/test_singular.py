"""Heads and layers without a derivative at zero. Results of idle ranks and padded layers must not reach the gradients."""

from functools import cache
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jgraph.pipeline import Pipeline, PipelineModel
from jgraph.schedule import generate
from tests.pipeline import model

pytestmark = [pytest.mark.long, pytest.mark.once]

Tree = Any
M = 5


def unit(x: jax.Array, axis: int = -1) -> jax.Array:
    """Normalizes x to unit length. The result is 0 / 0 at zero."""
    return x / jnp.linalg.norm(x, axis=axis, keepdims=True)


def unit_head(outer: Tree, x: jax.Array, inputs: Tree) -> jax.Array:
    return model.head(outer, unit(x), inputs)


def biased_head(outer: Tree, x: jax.Array, inputs: Tree) -> jax.Array:
    """Has a nonzero gradient at x = 0."""
    return model.head(outer, x + outer["scale"], inputs)


def shared_head(outer: Tree, x: jax.Array, inputs: Tree) -> jax.Array:
    """Computes `unit_head` with a part of the rows on each rank."""
    ranks = lax.axis_size("pipe")

    def own(whole: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(whole.reshape(ranks, -1, *whole.shape[1:]), lax.axis_index("pipe"), keepdims=False)

    x = unit(lax.psum(x, "pipe"))
    return lax.psum(model.head(outer, own(x), {"labels": own(inputs["labels"])}), "pipe") / ranks


def weight_normalized(p: Tree, x: jax.Array) -> jax.Array:
    """A layer with normalized weights. It is 0 / 0 for zero parameters, such as padding."""
    return 0.9 * x + jax.nn.gelu((x * p["norm"]) @ unit(p["up"], 0)) @ unit(p["down"], 0)


def unit_layer(p: Tree, x: jax.Array) -> jax.Array:
    return x + model.layer(p, unit(x))


PLAIN = {
    "unit head": (model.layer, unit_head),
    "biased head": (model.layer, biased_head),
    "weight normalization": (weight_normalized, model.head),
    "unit layer": (unit_layer, unit_head),
}


@cache
def expected(layer: Any, head: Any, L: int) -> tuple[Any, Tree]:
    def loss(outer: Tree, layers: list[Tree], inputs: Tree, key: None) -> jax.Array:
        x = model.embed(outer, inputs)
        for p in layers:
            x = layer(p, x)
        return head(outer, x, inputs)

    return model.one_device(*model.params(L), model.batch(M), loss=loss)


LAYOUTS = {
    "aligned": ("aligned", 3, 1, 3, "aligned"),
    "aligned, uneven": ("aligned", 2, 2, 6, "aligned"),
    "general, uneven": ("zb-v", 2, 2, 6, "general"),
}


def pipeline(layout: str, parts: PipelineModel, **choices: Any) -> Pipeline:
    schedule, P, C, L, runtime = LAYOUTS[layout]
    return model.pipeline(
        generate(schedule, pp=P, microbatches=M, chunks=C), L, parts=parts, runtime=cast(Any, runtime), **choices
    )


@pytest.mark.parametrize("layout", ["aligned", "general, uneven"])
@pytest.mark.parametrize("kind", PLAIN)
def test_gradients_of_functions_singular_at_zero_equal_one_device(kind, layout):
    layer, head = PLAIN[kind]
    pipe = pipeline(layout, PipelineModel(model.embed, layer, head))
    model.assert_same(model.run_pipeline(pipe), expected(layer, head, pipe.assignment.num_layers))


@pytest.mark.parametrize("layout", ["aligned, uneven", "general, uneven"])
def test_a_sharded_head_receives_the_output_of_the_last_stage_on_every_rank(layout):
    pipe = pipeline(layout, PipelineModel(model.embed, weight_normalized, shared_head))
    model.assert_same(model.run_pipeline(pipe), expected(weight_normalized, unit_head, pipe.assignment.num_layers))


def test_a_padded_layer_can_be_recomputed():
    pipe = pipeline("general, uneven", PipelineModel(model.embed, weight_normalized, model.head), remat="layer")
    model.assert_same(model.run_pipeline(pipe), expected(weight_normalized, model.head, pipe.assignment.num_layers))


def test_padded_layers_have_zero_gradients():
    pipe = pipeline("aligned, uneven", PipelineModel(model.embed, weight_normalized, unit_head))
    params = model.placed(pipe, *model.params(pipe.assignment.num_layers))
    _, grads = jax.device_get(jax.jit(pipe.loss_and_grads)(params, model.batch(M)))
    ((rank, chunk, place), *_) = np.argwhere(~pipe.assignment.active())
    assert all((leaf[rank] == 0).all() for leaf in jax.tree.leaves(grads.layers[chunk][place]))
