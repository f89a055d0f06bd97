"""Accumulates the gradients of microbatches in a chosen dtype."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jgraph.scopes import scope
from jgraph.strategies.objective import Loss, Tree, before_any, merge

# (params, batch, key) -> sums, and gradients like the parameters
MicrobatchFunction: TypeAlias = Callable[[Tree, Tree, Array], tuple[Loss, Tree]]

# Largest number of microbatches that is unrolled. XLA captures a loop into a command buffer only with graph="full".
_UNROLLED_MICROBATCHES = 8


def accumulate(
    sums_and_grads: MicrobatchFunction, num_microbatches: int, *, dtype: DTypeLike, reductions: Tree
) -> MicrobatchFunction:
    """Returns `f(params, batch_M, key)`, which sums `sums_and_grads` over microbatches. Traces nothing itself.

    The leaves of `batch_M` have the shape [M, B/M, ...], where M is the number of microbatches and B the number of rows. The
    key of microbatch m is folded from `key` and m. Up to eight microbatches are unrolled; more run in a `lax.scan`.

    Args:
        sums_and_grads: Maps (params, batch, key) of a microbatch to its sums, a `Loss`, and its gradients, with the structure
            and shapes of `params`.
        num_microbatches: M.
        dtype: Dtype of the summed gradients. The gradients of a single microbatch are not cast.
        reductions: Reductions of the carried state (`max`, `sum`, `mean`, `last` or `halt`), a tree of names like
            `Loss.carried`.

    Returns:
        The function. Its results are the summed `Loss` and the summed gradients. Carried state with the reduction `mean` is
        summed, not yet divided by M.
    """

    def accumulated(params: Tree, batch_M: Tree, key: Array) -> tuple[Loss, Tree]:
        def microbatch(m: Any, batch: Tree) -> tuple[Loss, Tree]:
            return sums_and_grads(params, batch, jax.random.fold_in(key, m))

        if num_microbatches == 1:
            return microbatch(0, jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), batch_M))

        def add(carry: tuple[Loss, Tree], this: tuple[Array, Tree]) -> tuple[tuple[Loss, Tree], None]:
            sums, grads = microbatch(*this)
            with scope("wgrad"):
                return (
                    merge(reductions, carry[0], sums),
                    jax.tree.map(lambda a, g: a + g.astype(a.dtype), carry[1], grads),
                ), None

        first = jax.tree.map(lambda leaf: leaf[0], batch_M)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(microbatch, 0, first)[0])
        main_grad = jax.tree.map(lambda p: jnp.zeros(p.shape, dtype), params)
        unroll = num_microbatches if num_microbatches <= _UNROLLED_MICROBATCHES else 1
        start = replace(zeros, carried=before_any(reductions, zeros.carried))
        return jax.lax.scan(add, (start, main_grad), (jnp.arange(num_microbatches), batch_M), unroll=unroll)[0]

    return accumulated
