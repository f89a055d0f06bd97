"""Accumulates the gradients of microbatches in a chosen dtype."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jgraph.scopes import scope
from jgraph.strategies.objective import Loss, before_any, merge
from jgraph.types import Arrays, Batch, Key, Reductions

MicrobatchFunction: TypeAlias = Callable[[Arrays, Batch, Key], tuple[Loss, Arrays]]
"""`(params, batch, key) -> (sums, gradients)`, with the arrays of a step."""


def accumulate(
    sums_and_grads: MicrobatchFunction, num_microbatches: int, *, dtype: DTypeLike, reductions: Reductions, at_once: int = 1
) -> MicrobatchFunction:
    """Returns a function that calls `sums_and_grads` on each microbatch and sums the results. Traces nothing itself.

    The function is `f(params, batch_M, key) -> (sums, gradients)`. The leaves of `batch_M` have the shape [M, B/M, ...], where
    M is the number of microbatches and B the number of rows. Microbatch m is index m of the first axis, and its key is
    `jax.random.fold_in(key, m)`. Two or more microbatches run in one `lax.scan`: XLA compiles its body once, and reuses the
    temporary arrays of a microbatch for the next. Unrolled microbatches do not: XLA keeps the arrays of all of them until it
    sums their gradients at the end. XLA captures the body into a command buffer, which is launched once per microbatch.

    Args:
        sums_and_grads: `sums_and_grads(params, batch, key) -> (sums, gradients)` of a microbatch. The leaves of its batch are
            [B/M, ...]. The sums are a `Loss`. The gradients have the structure and shapes of `params`, and None in place of
            frozen arrays.
        num_microbatches: M.
        dtype: Dtype in which gradients are summed and returned if M is at least 2. If M is 1, this argument is not used, and
            the gradients are returned in the dtypes from `sums_and_grads`.
        reductions: How carried state is merged over microbatches. A tree with the structure of `Loss.carried`. Each leaf is
            the name of a reduction. `max` and `halt` take the elementwise maximum, `sum` and `mean` the sum, and `last` the
            state of the last microbatch.
        at_once: Number of microbatches in the body of the loop. If it is 2, the collectives of a microbatch can run
            beside the matmuls of the other.

    Returns:
        The function `f`. Its sums are a `Loss` with the sums over the microbatches and the merged carried state. Carried state
        with the reduction `mean` is summed and not divided by M. Its gradients are sums over the microbatches, too.
    """

    def accumulated(params: Arrays, batch_M: Batch, key: Key) -> tuple[Loss, Arrays]:
        def microbatch(m: Array | int, batch: Batch) -> tuple[Loss, Arrays]:
            return sums_and_grads(params, batch, jax.random.fold_in(key, m))

        if num_microbatches == 1:
            return microbatch(0, jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), batch_M))

        def add(carry: tuple[Loss, Arrays], this: tuple[Array, Batch]) -> tuple[tuple[Loss, Arrays], None]:
            sums, grads = microbatch(*this)
            with scope("wgrad"):
                return (
                    merge(reductions, carry[0], sums),
                    jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry[1], grads),
                ), None

        first = jax.tree.map(lambda leaf: leaf[0], batch_M)
        sums, grads = jax.eval_shape(microbatch, 0, first)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums)
        main_grad = jax.tree.map(lambda g: jnp.zeros(g.shape, dtype), grads)
        start = replace(zeros, carried=before_any(reductions, zeros.carried))
        return jax.lax.scan(add, (start, main_grad), (jnp.arange(num_microbatches), batch_M), unroll=at_once)[0]

    return accumulated
