"""Accumulates the gradients of microbatches in a chosen dtype."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jgraph.scopes import scope
from jgraph.strategies._invariant import Once, hoisted
from jgraph.strategies.objective import Loss, before_any, merge
from jgraph.types import Arrays, Batch, Key, Reductions

MicrobatchFunction: TypeAlias = Callable[[Arrays, Batch, Key], tuple[Loss, Arrays]]
"""`(params, batch, key) -> (sums, gradients)`, with the arrays of a step."""


def accumulate(
    sums_and_grads: MicrobatchFunction,
    num_microbatches: int,
    *,
    dtype: DTypeLike,
    reductions: Reductions,
    at_once: int = 1,
    once: Once = "casts",
) -> MicrobatchFunction:
    """Returns `f(params, batch_M, key)`, which sums the results of `sums_and_grads` over the microbatches. Traces nothing.

    The leaves of `batch_M` are [M, B/M, ...] for M microbatches of B rows, and the key of microbatch m is `fold_in(key, m)`.
    """

    def accumulated(params: Arrays, batch_M: Batch, key: Key) -> tuple[Loss, Arrays]:
        def microbatch(m: Array | int, batch: Batch) -> tuple[Loss, Arrays]:
            return sums_and_grads(params, batch, jax.random.fold_in(key, m))

        if num_microbatches == 1:  # no sum: the gradients keep their dtypes
            return microbatch(0, jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), batch_M))

        def add(carry: tuple[Loss, Arrays], this: tuple[Array, Batch]) -> tuple[tuple[Loss, Arrays], None]:
            sums, grads = run(*this)
            with scope("wgrad"):
                return (
                    merge(reductions, carry[0], sums),
                    jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry[1], grads),
                ), None

        # A scan, because XLA compiles its body once and reuses the temporary arrays of a microbatch for the next. If
        # microbatches are unrolled, it keeps the arrays of all until it sums their gradients at the end. XLA captures the body
        # into a command buffer, which is launched once per microbatch.
        inputs = jnp.arange(num_microbatches), batch_M
        (sums, grads), run = hoisted(once, microbatch, *jax.tree.map(lambda leaf: leaf[0], inputs))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums)
        main_grad = jax.tree.map(lambda g: jnp.zeros(g.shape, dtype), grads)
        start = replace(zeros, carried=before_any(reductions, zeros.carried))
        return jax.lax.scan(add, (start, main_grad), inputs, unroll=at_once)[0]

    return accumulated
