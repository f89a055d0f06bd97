"""Attention of one token over a cache: its keys and values are written, and its queries answered, by one kernel.

XLA makes three of it, which do little but begin and end. Here a block of threads has a key/value head with its queries.
"""

# H query heads, G key/value heads, N = H + 2G, R = H / G, E = 2G, K head size, C slots, L positions

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jgraph.errors import ShapeError

_WARPS, _SLOTS, _MOST = 16, 256, 2048


def one_query(
    qkv_NK: Array,
    kv_ECK: Array,
    position: Array,
    cos_LK: Array,
    sin_LK: Array,
    *,
    q_scale_K: Array | None = None,
    k_scale_K: Array | None = None,
    epsilon: float = 0.0,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Returns what the queries of a token take from the cache, [H, K], and the cache with the token's keys and values.

    Args:
        qkv_NK: queries, keys, values, not rotated; bfloat16 or float32.
        kv_ECK: keys, then values, of the tokens before; updated in place if it is donated. A position has the slot
            `position % C`, and sees the slots up to its own, or all of them.
        position: scalar, int32.
        cos_LK, sin_LK: tables of a rotation, the sines signed, by position; float32.
        q_scale_K, k_scale_K: of a norm of each query and key before the rotation, with this `epsilon`.
        interpret: runs the kernel's body on the CPU, for tests.

    Raises:
        ShapeError: `fits` says no.
    """
    if not fits(qkv_NK, kv_ECK):
        must = f"[2G, C, K] for [H + 2G, K], with G a divisor of H, K a power of two and C at most {_MOST}, a multiple of 16"
        found = f"{list(kv_ECK.shape)} for `qkv_NK` {list(qkv_NK.shape)}"
        raise ShapeError(f"`kv_ECK` is {found}: must be {must}", field="kv_ECK")
    scales = None if q_scale_K is None or k_scale_K is None else (q_scale_K, k_scale_K)
    return _jgraph_one_query(qkv_NK, kv_ECK, position.reshape(1), cos_LK, sin_LK, scales, epsilon, interpret)


def fits(qkv_NK: Any, kv_ECK: Any) -> bool:
    """Returns whether the kernel takes these shapes."""
    (N, K), (E, C, _) = qkv_NK.shape, kv_ECK.shape
    return N > E and (N - E) % (E // 2) == 0 and K >= 16 and K & (K - 1) == 0 and C % 16 == 0 and C <= _MOST


# One function of the program for all layers: jax gives every call of a kernel a name of its own, and compiles each.
@functools.partial(jax.jit, static_argnums=(6, 7))
def _jgraph_one_query(
    qkv_NK: Array,
    kv_ECK: Array,
    position_1: Array,
    cos_LK: Array,
    sin_LK: Array,
    scales: tuple[Array, Array] | None,
    epsilon: float,
    interpret: bool,
) -> tuple[Array, Array]:
    (N, K), (E, C, _), dtype = qkv_NK.shape, kv_ECK.shape, qkv_NK.dtype
    G, H = E // 2, N - E
    R = H // G

    def kernel(qkv: Any, kv: Any, position: Any, cos: Any, sin: Any, *rest: Any) -> None:
        *norms, out, new = rest
        g, p = pl.program_id(0), position[0]
        own, other = jnp.arange(K), (jnp.arange(K) + K // 2) % K  # of a pair

        def rotated(head: Any, scale: Any) -> Any:
            halves = [qkv[head, own].astype(jnp.float32), qkv[head, other].astype(jnp.float32)]
            if norms:
                root = jax.lax.rsqrt(jnp.sum(jnp.square(halves[0])) / K + epsilon)
                pairs = zip(halves, (own, other), strict=True)
                halves = [(x * (root * scale[at].astype(jnp.float32))).astype(dtype).astype(jnp.float32) for x, at in pairs]
            return (halves[0] * cos[p, own] + halves[1] * sin[p, own]).astype(dtype)

        k_K, v_K, slot = rotated(H + g, norms and norms[1]), qkv[H + G + g, own], p % C
        new[g, slot, own] = k_K
        new[G + g, slot, own] = v_K
        pieces = _pieces(C)
        at_piece = [start + jnp.arange(size) for start, size in pieces]

        # What the kernel has just written, it does not read: other threads may not see it yet.
        def read(head: Any, piece: int, fresh_K: Any) -> Any:
            start, size = pieces[piece]
            return jnp.where((at_piece[piece] == slot)[:, None], fresh_K[None], kv[head, pl.ds(start, size), :])

        queries = [rotated(g * R + r, norms and norms[0]).astype(jnp.float32) for r in range(R)]
        scores: list[list[Any]] = [[] for _ in queries]
        for i, at in enumerate(at_piece):
            keys = read(g, i, k_K).astype(jnp.float32)
            for q_K, own_scores in zip(queries, scores, strict=True):
                own_scores.append(jnp.where(at <= p, K**-0.5 * jnp.sum(keys * q_K[None], axis=1), -jnp.inf))
        first = read(G + g, 0, v_K)  # under way during the softmax
        shares = []
        for own_scores in scores:
            top = functools.reduce(jnp.maximum, [jnp.max(s) for s in own_scores])
            exps = [jnp.exp(s - top) for s in own_scores]
            total = sum(jnp.sum(e) for e in exps)
            shares.append([(e / total).astype(dtype).astype(jnp.float32) for e in exps])
        sums = [jnp.zeros(K, jnp.float32) for _ in range(R)]
        for i in range(len(pieces)):
            values = (read(G + g, i, v_K) if i else first).astype(jnp.float32)
            sums = [sums[r] + jnp.sum(shares[r][i][:, None] * values, axis=0) for r in range(R)]
        for r in range(R):
            out[g * R + r, own] = sums[r].astype(dtype)

    inputs = [qkv_NK, kv_ECK, position_1, cos_LK, sin_LK, *(scales or ())]
    return pl.pallas_call(
        kernel,
        grid=(G,),
        out_shape=(jax.ShapeDtypeStruct((H, K), dtype), jax.ShapeDtypeStruct(kv_ECK.shape, kv_ECK.dtype)),
        input_output_aliases={1: 1},
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
    )(*inputs)


def _pieces(C: int) -> list[tuple[int, int]]:
    """Returns starts and sizes that cover the slots: a kernel's arrays have powers of two as sizes."""
    found, start = [], 0
    while start < C:
        size = min(_SLOTS, 1 << ((C - start).bit_length() - 1))
        found.append((start, size))
        start += size
    return found
