"""Pools: what nobody has written may be anything, and on a GPU nothing is written there in advance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jgraph.parallel.pipeline import Pipeline, pools
from jgraph.schedule import generate
from jgraph.xla import aot
from tests.pipeline import model

pytestmark = pytest.mark.long


def garbage(shape, dtype):
    worst = jnp.nan if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max
    return jnp.full(shape, worst, dtype)


@pytest.mark.parametrize(
    ("name", "P", "C", "M", "runtime"),
    [
        ("aligned", 4, 1, 6, "aligned"),
        ("aligned", 4, 2, 3, "aligned"),
        ("zb-v", 2, 2, 4, "general"),
        ("1f1b", 4, 1, 3, "general"),
    ],
)
def test_what_is_read_before_it_is_written_reaches_no_result(monkeypatch, name, P, C, M, runtime):
    monkeypatch.setattr(pools.lax, "empty", garbage)
    pipe = model.pipeline(generate(name, pp=P, microbatches=M, chunks=C), P * C, runtime=runtime)
    model.assert_same(model.piped(pipe, dropout=3), model.expected(P * C, M, dropout=3))


@pytest.mark.target
def test_a_pipeline_reserves_its_pools_without_clearing_them(h200):
    P, M = 2, 4
    mesh = Mesh(np.array(aot.devices(P)).reshape(1, P), ("data", "pipe"))
    pipe = Pipeline.of(model.PARTS, generate("aligned", pp=P, microbatches=M), mesh, num_layers=P)
    params = jax.eval_shape(pipe.stack, *model.params(P))
    params = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), params, pipe.shardings(params)
    )
    text = jax.jit(pipe.loss_and_grads).lower(params, model.batch(M)).compile().as_text()
    assert 'custom_call_target="AllocateBuffer"' in text
