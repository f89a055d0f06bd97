"""Causal attention among the tokens of a document, where rows hold several documents one after the other.

A library's attention would take a mask of [T, T] a row, or at most as many documents as were compiled for. Here each token says
where its document begins. A block of queries reads the keys from there on; what lies before is not computed. Scores stay on the
chip (Dao, "FlashAttention-2", arXiv:2307.08691).
"""

# B batch, T sequence, H query heads, G key/value heads, R = H / G, K head size, Q and C rows of a block of queries and of keys

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jgraph.errors import ShapeError, check_choice
from jgraph.kernels.target import target

_LARGEST_HEAD = 128
_LEAST = 16
"""A product of Triton has no smaller sides."""
_MASKED = -1e30
"""A score that does not count. Not -inf: a query may begin with a block of keys none of which it sees."""


def document_attention(
    q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, starts_BT: Array, *, implementation: str = "auto", interpret: bool = False
) -> Array:
    """Attends to the tokens of the own document, up to the own one; as `jax.nn.dot_product_attention` with such a mask.

    >>> q, starts = jnp.ones((1, 4, 2, 8)), jnp.array([[0, 0, 2, 2]])
    >>> document_attention(q, q, q, starts).shape
    (1, 4, 2, 8)

    Args:
        q_BTHK, k_BTGK, v_BTGK: queries, keys and values, rotated; G divides H.
        starts_BT: int32, where in its row each token's document begins.
        implementation: `triton` (NVIDIA GPUs; heads of at most 128), `xla` (anywhere, with all scores in memory), or `auto`,
            which takes the first of them that can.
        interpret: runs a kernel's body on the CPU, for tests.

    Returns:
        [B, T, H, K] in the dtype of `q_BTHK`.

    Raises:
        ConfigError: there is no such implementation.
        ShapeError: the shapes disagree, or heads are too wide for `triton`.
    """
    check_choice("implementation", implementation, ("auto", *_IMPLEMENTATIONS))
    B, T, H, K = q_BTHK.shape
    G = k_BTGK.shape[2]
    if k_BTGK.shape != (B, T, G, K) or v_BTGK.shape != k_BTGK.shape or H % G or starts_BT.shape != (B, T):
        found = f"{q_BTHK.shape}, `k_BTGK` {k_BTGK.shape}, `v_BTGK` {v_BTGK.shape}, `starts_BT` {starts_BT.shape}"
        raise ShapeError(f"`q_BTHK` is {found}: must be (B, T, H, K), (B, T, G, K) twice, (B, T)", field="q_BTHK")
    chosen = choose(K) if implementation == "auto" else implementation
    if chosen == "triton" and K > _LARGEST_HEAD:
        raise ShapeError(f"`q_BTHK` has heads of {K}: must be at most {_LARGEST_HEAD}, or take xla", field="q_BTHK")
    return _IMPLEMENTATIONS[chosen](q_BTHK, k_BTGK, v_BTGK, starts_BT, interpret)


def choose(head_size: int) -> str:
    """Returns the implementation on the device that is compiled for."""
    is_gpu = jax.default_backend() == "gpu" or target() is not None
    return "triton" if is_gpu and head_size <= _LARGEST_HEAD else "xla"


def _xla(q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, starts_BT: Array, interpret: bool) -> Array:
    """The reference."""
    seen_BTT = jnp.arange(q_BTHK.shape[1]) >= starts_BT[:, :, None]
    how: Any = {"is_causal": True, "implementation": "xla"}
    return jax.nn.dot_product_attention(q_BTHK, k_BTGK, v_BTGK, mask=seen_BTT[:, None], **how)


def _triton(q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, starts_BT: Array, interpret: bool) -> Array:
    """Pads to whole blocks, and heads to a power of two: zeros change no score, and rows beyond the end are documents apart."""
    T, K = q_BTHK.shape[1], q_BTHK.shape[3]
    rows = -T % min(_ROWS, max(_LEAST, pl.next_power_of_2(T)))
    columns = max(_LEAST, pl.next_power_of_2(K)) - K
    own = jnp.arange(T, T + rows, dtype=starts_BT.dtype)
    starts_BT = jnp.concatenate([starts_BT, jnp.broadcast_to(own, (len(starts_BT), rows))], axis=1)
    qkv = (jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, columns))) for x in (q_BTHK, k_BTGK, v_BTGK))
    attended: Any = _attend(*qkv, starts_BT, K**-0.5, interpret)
    return attended[:, :T, :, :K]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, starts_BT: Array, scale: float, interpret: bool) -> Array:
    return _jgraph_documents(q_BTHK, k_BTGK, v_BTGK, starts_BT, scale, interpret)[0]


def _forward(q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, starts_BT: Array, scale: float, interpret: bool) -> tuple[Any, Any]:
    y_BTHK, lse_BHT = _jgraph_documents(q_BTHK, k_BTGK, v_BTGK, starts_BT, scale, interpret)
    return y_BTHK, (q_BTHK, k_BTGK, v_BTGK, starts_BT, y_BTHK, lse_BHT)


def _backward(scale: float, interpret: bool, residuals: tuple[Array, ...], dy_BTHK: Array) -> tuple[Array | None, ...]:
    q_BTHK, k_BTGK, v_BTGK, starts_BT, y_BTHK, lse_BHT = residuals
    delta_BHT = jnp.einsum("bthk,bthk->bht", y_BTHK, dy_BTHK, preferred_element_type=jnp.float32)
    given = q_BTHK, k_BTGK, v_BTGK, starts_BT, dy_BTHK, lse_BHT, delta_BHT
    return *_jgraph_documents_backward(*given, scale, interpret), None


_attend.defvjp(_forward, _backward)

_ROWS = 128
"""Queries of a block forward. Backward blocks, and those of float32, are smaller, since a block holds more there."""


def _sizes(q_BTHK: Array, most: int) -> tuple[int, int]:
    """Returns rows of a block of queries and of one of keys."""
    T, most = q_BTHK.shape[1], most if q_BTHK.dtype.itemsize == 2 else 32
    rows = min(most, T & -T)
    return rows, min(64, rows)


def _specs(q_BTHK: Array, G: int) -> dict[str, Any]:
    """Returns by name what a block of a row and a head reads, of the heads [B, H] of the grid's last two axes."""
    _, T, H, K = q_BTHK.shape
    return {
        "q": pl.BlockSpec((None, T, None, K), lambda i, b, h: (b, 0, h, 0)),
        "kv": pl.BlockSpec((None, T, None, K), lambda i, b, h: (b, 0, h // (H // G), 0)),
        "starts": pl.BlockSpec((None, T), lambda i, b, h: (b, 0)),
        "rows": pl.BlockSpec((None, None, T), lambda i, b, h: (b, h, 0)),
    }


def _scores(q: Any, k: Any, starts: Any, first_q: Any, first_c: Any, scale: float) -> Any:
    """Returns scores for powers of two [Q, C]."""
    places = [first + lax.iota(jnp.int32, len(x)) for first, x in ((first_q, q), (first_c, k))]
    seen = (places[1][None] <= places[0][:, None]) & (places[1][None] >= starts[:, None])
    return jnp.where(seen, _product(q, k, trans_b=True) * (scale * math.log2(math.e)), _MASKED)


def _product(a: Any, b: Any, **how: Any) -> Any:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return triton.dot(a, b, precision=precision, **how)


# One function of the program for all layers: jax gives every call of a kernel a name of its own, and compiles each.
@functools.partial(jax.jit, static_argnums=(4, 5))
def _jgraph_documents(
    q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, starts_BT: Array, scale: float, interpret: bool
) -> tuple[Array, Array]:
    """Returns what is attended to, and the logarithms to base 2 of the sums of the scores' powers."""
    (B, T, H, K), G = q_BTHK.shape, k_BTGK.shape[2]
    Q, C = _sizes(q_BTHK, _ROWS)

    def kernel(q: Any, k: Any, v: Any, starts: Any, y: Any, lse: Any) -> None:
        first = pl.program_id(0) * Q
        own = pl.ds(first, Q)
        q_QK, starts_Q = q[own, :], starts[own]

        def add(j: Any, before: Any) -> Any:
            largest_Q, total_Q, y_QK = before
            block = pl.ds(j * C, C)
            scores_QC = _scores(q_QK, k[block, :], starts_Q, first, j * C, scale)
            new_Q = jnp.maximum(largest_Q, jnp.max(scores_QC, axis=1))
            exps_QC, shrink_Q = jnp.exp2(scores_QC - new_Q[:, None]), jnp.exp2(largest_Q - new_Q)
            y_QK = y_QK * shrink_Q[:, None] + _product(exps_QC.astype(v.dtype), v[block, :])
            return new_Q, total_Q * shrink_Q + jnp.sum(exps_QC, axis=1), y_QK

        nothing = jnp.full(Q, _MASKED), jnp.zeros(Q), jnp.zeros((Q, K))
        largest_Q, total_Q, y_QK = lax.fori_loop(starts[first] // C, (first + Q) // C, add, nothing)
        y[own, :] = (y_QK / total_Q[:, None]).astype(y.dtype)
        lse[own] = largest_Q + jnp.log2(total_Q)

    specs = _specs(q_BTHK, G)
    return pl.pallas_call(
        kernel,
        grid=(T // Q, B, H),
        in_specs=[specs[name] for name in ("q", "kv", "kv", "starts")],
        out_specs=[specs["q"], specs["rows"]],
        out_shape=[jax.ShapeDtypeStruct(q_BTHK.shape, q_BTHK.dtype), jax.ShapeDtypeStruct((B, H, T), jnp.float32)],
        compiler_params=triton.CompilerParams(num_warps=8 if K > 64 else 4, num_stages=2),
        interpret=interpret,
    )(q_BTHK, k_BTGK, v_BTGK, starts_BT)


@functools.partial(jax.jit, static_argnums=(7, 8))
def _jgraph_documents_backward(
    q_BTHK: Array, k_BTGK: Array, v_BTGK: Array, starts_BT: Array, dy_BTHK: Array, lse_BHT: Array, delta_BHT: Array,
    scale: float, interpret: bool,
) -> tuple[Array, Array, Array]:  # fmt: skip
    (B, T, H, K), G = q_BTHK.shape, k_BTGK.shape[2]
    R, (Q, C) = H // G, _sizes(q_BTHK, 64)
    specs, params = _specs(q_BTHK, G), triton.CompilerParams(num_warps=8 if K > 64 else 4, num_stages=2)
    # Of each block of keys, how many tokens are in documents that begin up to its end: no later token sees it.
    last_J = jnp.arange(C - 1, T, C)
    ends_BJ = jnp.sum(starts_BT[:, None] <= last_J[:, None], axis=-1, dtype=jnp.int32)

    def gradients(q_QK: Any, k_CK: Any, v_CK: Any, of_rows: Any, first_q: Any, first_c: Any) -> Any:
        """Returns the shares of keys, and the gradients of scores."""
        dy_QK, starts_Q, lse_Q, delta_Q = of_rows
        shares_QC = jnp.exp2(_scores(q_QK, k_CK, starts_Q, first_q, first_c, scale) - lse_Q[:, None])
        return shares_QC, shares_QC * (_product(dy_QK, v_CK, trans_b=True) - delta_Q[:, None]) * scale

    def of_queries(q: Any, k: Any, v: Any, starts: Any, dy: Any, lse: Any, delta: Any, dq: Any) -> None:
        first = pl.program_id(0) * Q
        own = pl.ds(first, Q)
        of_rows = dy[own, :], starts[own], lse[own], delta[own]
        q_QK = q[own, :]

        def add(j: Any, dq_QK: Any) -> Any:
            k_CK = k[pl.ds(j * C, C), :]
            _, dscores_QC = gradients(q_QK, k_CK, v[pl.ds(j * C, C), :], of_rows, first, j * C)
            return dq_QK + _product(dscores_QC.astype(k.dtype), k_CK)

        dq_QK = lax.fori_loop(starts[first] // C, (first + Q) // C, add, jnp.zeros((Q, K)))
        dq[own, :] = dq_QK.astype(dq.dtype)

    def of_keys(q: Any, k: Any, v: Any, starts: Any, dy: Any, lse: Any, delta: Any, ends: Any, dk: Any, dv: Any) -> None:
        j = pl.program_id(0)
        own = pl.ds(j * C, C)
        k_CK, v_CK = k[own, :], v[own, :]

        def add(i: Any, before: Any, r: int) -> Any:
            dk_CK, dv_CK = before
            rows = pl.ds(i * Q, Q)
            q_QK, dy_QK = q[rows, r, :], dy[rows, r, :]
            of_rows = dy_QK, starts[rows], lse[r, rows], delta[r, rows]
            shares_QC, dscores_QC = gradients(q_QK, k_CK, v_CK, of_rows, i * Q, j * C)
            dk_CK += _product(dscores_QC.astype(q.dtype), q_QK, trans_a=True)
            return dk_CK, dv_CK + _product(shares_QC.astype(dy.dtype), dy_QK, trans_a=True)

        last, sums = (ends[j] + Q - 1) // Q, (jnp.zeros((C, K)), jnp.zeros((C, K)))
        for r in range(R):
            sums = lax.fori_loop(j * C // Q, last, lambda i, before, r=r: add(i, before, r), sums)
        dk[own, :], dv[own, :] = (total.astype(dk.dtype) for total in sums)

    in_specs = [specs[name] for name in ("q", "kv", "kv", "starts", "q", "rows", "rows")]
    given = q_BTHK, k_BTGK, v_BTGK, starts_BT, dy_BTHK, lse_BHT, delta_BHT
    dq = pl.pallas_call(
        of_queries,
        grid=(T // Q, B, H),
        in_specs=in_specs,
        out_specs=specs["q"],
        out_shape=jax.ShapeDtypeStruct(q_BTHK.shape, q_BTHK.dtype),
        compiler_params=params,
        interpret=interpret,
    )(*given)
    group = pl.BlockSpec((None, T, R, K), lambda j, b, g: (b, 0, g, 0))
    rows = pl.BlockSpec((None, R, T), lambda j, b, g: (b, g, 0))
    own = pl.BlockSpec((None, T, None, K), lambda j, b, g: (b, 0, g, 0))
    dk, dv = pl.pallas_call(
        of_keys,
        grid=(T // C, B, G),
        in_specs=[group, own, own, specs["starts"], group, rows, rows, pl.BlockSpec((None, T // C), lambda j, b, g: (b, 0))],
        out_specs=[own, own],
        out_shape=[jax.ShapeDtypeStruct(k_BTGK.shape, k_BTGK.dtype)] * 2,
        compiler_params=params,
        interpret=interpret,
    )(*given, ends_BJ)
    return dq, dk, dv


_IMPLEMENTATIONS = {"triton": _triton, "xla": _xla}
