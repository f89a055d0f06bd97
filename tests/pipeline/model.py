"""A small pipeline model, the same model on one device, and functions that compare them."""

# D model, F hidden, V vocabulary, B batch, T sequence, L layers, M microbatches, P ranks

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.layout import named
from jgraph.pipeline import Pipeline, PipelineModel
from jgraph.pipeline.dispatched import dispatched
from jgraph.schedule import Schedule
from jgraph.strategies.objective import Carry

Tree = Any
D, F, V, B, T = 8, 16, 12, 4, 3


def layer(p: Tree, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Applies norm, MLP, and dropout if `key` is given. It is not the identity for zero parameters, so tests detect padding."""
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6).astype(x.dtype) * p["norm"].astype(x.dtype)
    u = jax.nn.gelu(h @ p["up"])
    if key is not None:
        u = jnp.where(jax.random.bernoulli(key, 0.8, u.shape), u / 0.8, 0).astype(x.dtype)
    return 0.9 * x + u @ p["down"]


def embed(outer: Tree, inputs: Tree) -> jax.Array:
    return outer["table"][inputs["tokens"]]


def head(outer: Tree, x: jax.Array, inputs: Tree) -> jax.Array:
    """Returns the mean cross-entropy. The logits use the embedding table."""
    logits = (x * outer["scale"].astype(x.dtype)) @ outer["table"].T.astype(x.dtype)
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_p, inputs["labels"][..., None], -1))


PARTS = PipelineModel(embed, layer, head)


@cache
def params(L: int) -> tuple[Tree, list[Tree]]:
    """Returns the parameters of embedding and head, and the parameters of each layer."""
    rng = np.random.default_rng(L)

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> jax.Array:
        return jnp.asarray(mean + scale * rng.standard_normal(shape), jnp.float32)

    outer = {"table": normal(V, D, scale=0.3), "scale": normal(D, scale=0.1, mean=1)}
    layers = [
        {"norm": normal(D, scale=0.1, mean=1), "up": normal(D, F, scale=D**-0.5), "down": normal(F, D, scale=F**-0.5)}
        for _ in range(L)
    ]
    return outer, layers


@cache
def batch(M: int, seed: int = 0) -> Tree:
    rng = np.random.default_rng([M, seed])
    tokens, labels = jnp.asarray(rng.integers(V, size=(2, M, B, T)), jnp.int32)
    return {"tokens": tokens, "labels": labels}


def plain_loss(outer: Tree, layers: Sequence[Tree], inputs: Tree, key: jax.Array | None) -> jax.Array:
    """Returns the loss of a microbatch."""
    x = embed(outer, inputs)
    for j, p in enumerate(layers):
        x = layer(p, x) if key is None else layer(p, x, jax.random.fold_in(key, j))
    return head(outer, x, inputs)


@cache
def _gradient(loss: Any) -> Any:
    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def one_device(
    outer: Tree,
    layers: Sequence[Tree],
    inputs: Tree,
    *,
    dp: int = 1,
    key: jax.Array | None = None,
    loss: Any = plain_loss,
) -> tuple[Any, Tree]:
    """Returns the loss and gradients of one device. Sums microbatches and data ranks one by one in float64."""
    M = len(inputs["tokens"])
    total = None
    for d in range(dp):
        for m in range(M):
            own = jax.tree.map(lambda leaf, d=d, m=m: leaf[m].reshape(dp, -1, T)[d], inputs)
            own_key = jax.random.fold_in(key, d) if key is not None and dp > 1 else key
            folded = None if own_key is None else jax.random.fold_in(own_key, m)
            one = jax.tree.map(partial(np.asarray, dtype=np.float64), _gradient(loss)(outer, layers, own, folded))
            total = one if total is None else jax.tree.map(np.add, total, one)
    return jax.tree.map(lambda a: a / (M * dp), total)


@cache
def expected(L: int, M: int, dp: int = 1, dropout: int | None = None) -> tuple[Any, Tree]:
    """Returns `one_device` for parameters and a batch of these sizes. `dropout` is the seed of the key."""
    return one_device(*params(L), batch(M), dp=dp, key=None if dropout is None else jax.random.key(dropout))


def mesh(P: int, dp: int = 1) -> Mesh:
    return Mesh(np.array(jax.devices()[: P * dp]).reshape(dp, P), ("data", "pipe"))


def pipeline(schedule: Schedule, L: int, *, dp: int = 1, parts: PipelineModel = PARTS, **choices: Any) -> Pipeline:
    return Pipeline.build(parts, schedule, mesh(schedule.num_ranks, dp), named(params(L)), **choices)


def placed(pipe: Pipeline, outer: Tree, layers: Sequence[Tree]) -> Tree:
    return jax.device_put(pipe.tree(pipe.layout.pack((outer, list(layers)))), pipe.shardings)


def run_pipeline(pipe: Pipeline, *, dropout: int | None = None, given: Tree | None = None) -> tuple[Any, Tree]:
    """Returns the loss and gradients of a pipeline. `given` replaces `params`."""
    keys = () if dropout is None else (jax.random.key(dropout),)
    run = jax.jit(pipe.loss_and_grads)
    inputs = batch(pipe.schedule.num_microbatches)
    loss, grads = run(placed(pipe, *(given or params(pipe.assignment.num_layers))), inputs, *keys)
    # Copied to the host first, because each slice of an array on several devices would be compiled.
    loss, grads = jax.device_get((loss, grads))
    return loss, pipe.layout.unpack(pipe.arrays(grads))


def run_dispatched(pipe: Pipeline) -> tuple[Any, Tree]:
    """Runs two steps of the dispatch engine with different batches. Returns the loss and gradients of the second step."""
    M, key = pipe.schedule.num_microbatches, jax.random.key(0)
    stacked = pipe.arrays(placed(pipe, *params(pipe.assignment.num_layers)))
    batches = jax.device_put([batch(M, seed) for seed in (1, 0)], NamedSharding(pipe.mesh, PartitionSpec(None, "data")))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), (stacked, batches))
    gradients = dispatched(pipe, shapes[0], Carry({}, {}), pipe.tree, shapes[1][0], key, {})
    step = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(pipe.mesh, PartitionSpec()))
    for one in batches:
        results = gradients(stacked, Carry({}, {}), step, one)
    loss, grads, *_ = jax.device_get(jax.jit(gradients.collect)(results))
    return loss, pipe.layout.unpack(pipe.arrays(grads))


def assert_same(got: tuple[Any, Tree], want: tuple[Any, Tree], *, within: float = 1e-6) -> None:
    """Compares the loss and every gradient, up to `within` times the largest gradient."""
    (loss, grads), (want_loss, want_grads) = got, want
    np.testing.assert_allclose(loss, want_loss, rtol=within)
    largest = max(np.abs(g).max() for g in jax.tree.leaves(want_grads))
    named, want_leaves = jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(want_grads)
    for (path, g), w in zip(named, want_leaves, strict=True):
        where = jax.tree_util.keystr(path)
        assert g.dtype == np.float32, where
        np.testing.assert_allclose(g, w, rtol=0, atol=within * largest, err_msg=where)
