"""Gradients over the microbatches of a batch, summed in a dtype of choice."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jgraph.parallel.objective import Sums, before_any, merge
from jgraph.scopes import scope

Tree = Any

# At most so many microbatches are unrolled. Beyond, they are a loop, which XLA does not capture unless asked (graph="full").
_UNROLLED_MICROBATCHES = 8


def accumulate(
    sums_and_grads: Callable[[Tree, Tree, Array], tuple[Sums, Tree]],
    num_microbatches: int,
    *,
    dtype: Any,
    reductions: Tree,
) -> Callable[[Tree, Tree, Array], tuple[Sums, Tree]]:
    """Returns `f(params, batch, key)`, the sums of `sums_and_grads` over microbatches.

    Args:
        sums_and_grads: (params, batch, key) of a microbatch -> its loss and gradients, shaped as params.
        num_microbatches: slices of the batch, along the first axis of its leaves; their keys are folded from the key.
        dtype: of the sums of gradients; one microbatch's are returned as they are.
        reductions: how carried state is reduced, a tree of names.
    """

    def over(params: Tree, batch: Tree, key: Array) -> tuple[Sums, Tree]:
        def one(m: Any, batch: Tree) -> tuple[Sums, Tree]:
            return sums_and_grads(params, batch, jax.random.fold_in(key, m))

        if num_microbatches == 1:
            return one(0, batch)

        def add(carry: tuple[Sums, Tree], this: tuple[Array, Tree]) -> tuple[tuple[Sums, Tree], None]:
            sums, grads = one(*this)
            with scope("wgrad"):
                return (
                    merge(reductions, carry[0], sums),
                    jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry[1], grads),
                ), None

        batch_M = by_microbatch(batch, num_microbatches)
        first = jax.tree.map(lambda leaf: leaf[0], batch_M)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, 0, first)[0])
        main_grad = jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params)
        unroll = num_microbatches if num_microbatches <= _UNROLLED_MICROBATCHES else 1
        start = replace(zeros, carried=before_any(reductions, zeros.carried))
        return jax.lax.scan(add, (start, main_grad), (jnp.arange(num_microbatches), batch_M), unroll=unroll)[0]

    return over


def by_microbatch(batch: Tree, num_microbatches: int) -> Tree:
    """Returns the batch with leaves [M, B/M, ...] instead of [B, ...]."""
    return jax.tree.map(lambda leaf: jnp.reshape(leaf, (num_microbatches, -1, *leaf.shape[1:])), batch)
