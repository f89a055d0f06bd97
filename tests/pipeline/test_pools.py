"""Pools are not initialized on GPUs, so unwritten slots may have any value."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jgraph.layout import named
from jgraph.pipeline import Pipeline, PipelineModel, _runtime
from jgraph.pipeline._memory import bytes_per_rank
from jgraph.schedule import generate
from jgraph.xla import aot
from tests.pipeline import model

pytestmark = pytest.mark.long


def garbage(shape, dtype):
    worst = jnp.nan if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max
    return jnp.full(shape, worst, dtype)


@pytest.mark.once
@pytest.mark.parametrize(
    ("name", "P", "C", "M", "runtime"),
    [
        ("aligned", 3, 1, 5, "aligned"),
        ("aligned", 3, 2, 2, "aligned"),
        ("zb-v", 2, 2, 4, "general"),
        ("1f1b", 3, 1, 2, "general"),
    ],
)
def test_uninitialized_slots_do_not_affect_the_results(monkeypatch, name, P, C, M, runtime):
    monkeypatch.setattr(_runtime.lax, "empty", garbage)
    pipe = model.pipeline(generate(name, pp=P, microbatches=M, chunks=C), P * C, runtime=runtime)
    model.assert_same(model.run_pipeline(pipe, dropout=3), model.expected(P * C, M, dropout=3))


@pytest.mark.once
@pytest.mark.target
@pytest.mark.parametrize("name", ["aligned", "zb-h1"])
def test_a_pipeline_allocates_its_pools_without_initializing_them_and_uses_at_most_the_predicted_memory(h200, name):
    def layer(params, x):
        return x + jax.nn.gelu(x @ params["up"]) @ params["down"]

    N, D, F = 4096, 1024, 4096
    parts = PipelineModel(lambda _, x: x, layer, lambda _, y, x: jnp.mean(jnp.square(y.astype(jnp.float32))))
    one = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in (("up", (D, F)), ("down", (F, D)))}
    pipe, inputs = pipeline_for_h200(parts, name, ({}, [one] * 4)), jax.ShapeDtypeStruct((4, N, D), jnp.bfloat16)
    compiled = compile_pipeline(pipe, inputs)
    # One is the result of a tick without an action. Each of the five pools has at least one array.
    assert (compiled.as_text() or "").count('custom_call_target="AllocateBuffer"') > 5
    memory: Any = compiled.memory_analysis()
    predicted = sum(bytes_per_rank(pipe, inputs).values())
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes <= 1.1 * predicted


def pipeline_for_h200(parts: PipelineModel, name: str, params) -> Pipeline:
    """Returns a pipeline for two GPUs that need not be present."""
    mesh = Mesh(np.array(aot.devices(2)).reshape(1, 2), ("data", "pipe"))
    return Pipeline.build(parts, generate(name, pp=2, microbatches=4), mesh, named(params))


def compile_pipeline(pipe: Pipeline, inputs) -> jax.stages.Compiled:
    params = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), pipe.shapes, pipe.shardings
    )
    return jax.jit(pipe.loss_and_grads).lower(params, inputs).compile()
