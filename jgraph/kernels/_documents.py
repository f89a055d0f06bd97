"""Causal attention within packed documents: FlashAttention for Hopper.

A library's attention needs a mask [T, T] per sequence. This kernel reads the start position of each token's document, and skips
the keys before the first document of a block of queries. It keeps the scores on the chip (Dao, "FlashAttention-2",
arXiv:2307.08691). A block of threads has three warpgroups: one copies tiles into a ring buffer in shared memory, and two
compute 64 rows each.
"""

# B batch, S queries and T keys of a sequence, H query heads, G key/value heads, R = H / G, K head size, Q query rows and C key
# rows of one matmul, J tiles of keys

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jgraph.kernels._check import chosen, require
from jgraph.kernels._mosaic import Ref, Slice, add_product, has_wgmma, kernel, plgpu, products, shared, transposed

_TILE, _HALF = 128, 64
"""Rows per block of threads, and per compute warpgroup."""
_LEAST = -1e30
"""Initial value of a row's largest score. Finite, because all keys of the first block may be masked, and -inf - -inf is NaN."""
_HEADS = (64, 128)
SAVED_ATTENTION = "jgraph.attention"
"""The name for policies of `jax.checkpoint` of the results that the gradient reads."""

_Kept: TypeAlias = tuple[Array, Array, Array, Array, tuple[Array, ...], Array, Array]
"""Residuals: queries, keys, values, starts, positions, the attention, and log2 of the sums of exponentials."""
_Source: TypeAlias = Callable[[Array], Sequence[Ref]]
"""Maps a step to the slices of device memory that it copies into the ring."""
_Carry = TypeVar("_Carry")
_Step: TypeAlias = Callable[[Array, Sequence[Ref], _Carry, bool], _Carry]
"""Maps a step, its buffers in the ring, the carried arrays, and True if scores must be masked, to the new carried arrays."""


def document_attention(
    q_BSHK: Array,
    k_BTGK: Array,
    v_BTGK: Array,
    starts_BS: Array,
    positions_S: Array | None = None,
    *,
    implementation: str = "auto",
) -> Array:
    """Computes causal attention within each document, like `jax.nn.dot_product_attention` with the equivalent mask.

    Queries and keys are rotated. Query head h reads key head h // (H / G). Differentiable in queries, keys and values. Arrays
    are bfloat16 or float32, and the positions are int32:

    - `starts_BS`: for each query, the index in its sequence of the first token of its document. At most the index of the query,
      and nondecreasing along S; neither is checked.
    - `positions_S`: the index in the sequence of each query; None for all T tokens. Strictly ascending, which is not checked. A
      device of a context-parallel group passes its own queries and the keys of the whole sequence, and gets the sums over its
      queries as the gradients of keys and values.

    `implementation` is `mosaic` (the kernel; fastest if each group of 128 queries has consecutive positions), `xla` (holds the
    scores [B, H, S, T] in memory) or `auto` (`mosaic` on Hopper with jax 0.11 or newer if it supports the arrays, else `xla`).

    Examples:
        >>> q, starts = jnp.ones((1, 4, 2, 8)), jnp.array([[0, 0, 2, 2]])
        >>> document_attention(q, q, q, starts).shape
        (1, 4, 2, 8)
        >>> document_attention(q[:, 2:], q, q, starts[:, 2:], jnp.array([2, 3])).shape
        (1, 2, 2, 8)
    """
    (B, S, H, K), (T, G) = q_BSHK.shape, k_BTGK.shape[1:3]
    is_whole = positions_S is None
    matches = k_BTGK.shape == v_BTGK.shape == (B, T, G, K) and H % G == 0 and starts_BS.shape == (B, S)
    others = f"`k_BTGK` {list(k_BTGK.shape)}, `v_BTGK` {list(v_BTGK.shape)} and `starts_BS` {list(starts_BS.shape)}"
    sizes = "which must be [B, T, G, K], [B, T, G, K] and [B, S], with S equal to T, or at most T with `positions_S`"
    require(matches and (S == T if is_whole else S <= T), "q_BSHK", q_BSHK, f"[B, S, H, K] for {others}, {sizes}")
    if not is_whole:
        listed = positions_S.shape == (S,) and positions_S.dtype == jnp.int32
        require(listed, "positions_S", positions_S, f"int32[{S}], the position of each query of `q_BSHK`")
    fits = _fits(q_BSHK.shape[3], q_BSHK.dtype) and (is_whole or S % _TILE == T % _TILE == 0)
    must = f"bfloat16 [B, S, H, K] with K at most {_HEADS[-1]}"
    if not is_whole:
        must += f", S and T (here {T}) multiples of {_TILE},"
    name = chosen(implementation, has_wgmma(), fits, "q_BSHK", q_BSHK, must)
    return (_mosaic if name == "mosaic" else _xla)(q_BSHK, k_BTGK, v_BTGK, starts_BS, positions_S)


def document_kernel(head_size: int, dtype: DTypeLike) -> str:
    """Returns the implementation that `document_attention` selects for `auto` and whole sequences."""
    return "mosaic" if has_wgmma() and _fits(head_size, dtype) else "xla"


def _fits(head_size: int, dtype: DTypeLike) -> bool:
    return jnp.dtype(dtype) == jnp.bfloat16 and head_size <= _HEADS[-1]


def _xla(q_BSHK: Array, k_BTGK: Array, v_BTGK: Array, starts_BS: Array, positions_S: Array | None) -> Array:
    keys_T = jnp.arange(k_BTGK.shape[1])
    seen_BST = keys_T >= starts_BS[:, :, None]
    if positions_S is not None:
        seen_BST &= keys_T <= positions_S[:, None]
    mask = seen_BST[:, None]
    is_causal = positions_S is None
    return jax.nn.dot_product_attention(q_BSHK, k_BTGK, v_BTGK, mask=mask, is_causal=is_causal, implementation="xla")


def _mosaic(q_BSHK: Array, k_BTGK: Array, v_BTGK: Array, starts_BS: Array, positions_S: Array | None) -> Array:
    """Pads S and T to whole tiles, and K to 64 or 128. Each padding token is a separate document."""
    S, K = q_BSHK.shape[1], q_BSHK.shape[3]
    rows, columns = -S % _TILE, min(size for size in _HEADS if size >= K) - K
    padding = jnp.arange(S, S + rows, dtype=starts_BS.dtype)
    starts_BS = jnp.concatenate([starts_BS, jnp.broadcast_to(padding, (len(starts_BS), rows))], axis=1)
    qkv = (jnp.pad(x, ((0, 0), (0, rows), (0, 0), (0, columns))) for x in (q_BSHK, k_BTGK, v_BTGK))
    # A tuple of one array, or empty for the indices 0 to T - 1, in all functions below.
    positions = () if positions_S is None else (positions_S,)
    attended: Any = _attend(*qkv, starts_BS, positions, K**-0.5)
    return attended[:, :S, :, :K]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q_BSHK: Array, k_BTGK: Array, v_BTGK: Array, starts_BS: Array, positions: tuple[Array, ...], scale: float) -> Array:
    return _jgraph_documents(q_BSHK, k_BTGK, v_BTGK, starts_BS, positions, scale)[0]


def _forward(
    q_BSHK: Array, k_BTGK: Array, v_BTGK: Array, starts_BS: Array, positions: tuple[Array, ...], scale: float
) -> tuple[Array, _Kept]:
    found = _jgraph_documents(q_BSHK, k_BTGK, v_BTGK, starts_BS, positions, scale)
    y_BSHK, lse_BHS = checkpoint_name(found, SAVED_ATTENTION)
    return y_BSHK, (q_BSHK, k_BTGK, v_BTGK, starts_BS, positions, y_BSHK, lse_BHS)


def _backward(scale: float, residuals: _Kept, dy_BSHK: Array) -> tuple[Array | None, ...]:
    q_BSHK, k_BTGK, v_BTGK, starts_BS, positions, y_BSHK, lse_BHS = residuals
    given = q_BSHK, k_BTGK, v_BTGK, starts_BS, positions
    delta_BHS = jnp.einsum("bshk,bshk->bhs", y_BSHK, dy_BSHK, preferred_element_type=jnp.float32)
    return *_jgraph_documents_backward(*given, dy_BSHK, lse_BHS, delta_BHS, scale), None, None


_attend.defvjp(_forward, _backward)


class _Loop(Protocol):
    """Runs a step between four bounds. The middle range needs no mask."""

    def __call__(self, step: _Step[_Carry], carry: _Carry, bounds: Sequence[Array]) -> _Carry: ...


class _Work(NamedTuple):
    """The work of a block of threads."""

    resident: Sequence[Ref]  # slices of device memory, each copied once into the buffer of the same position
    steps: Array  # int32, number of steps
    source: _Source  # the other slices
    compute: Callable[[_Loop], None]  # runs a compute warpgroup


class _Place(NamedTuple):
    """The place of a warpgroup in the grid. Numbers are int32."""

    row: Array  # index of the sequence in the batch
    head: Array  # query head, or key head in the kernel that computes the gradients of keys and values
    tile: Array  # index of the tile of tokens
    half: Slice  # the warpgroup's tokens in the tile
    tokens: Slice  # the warpgroup's tokens in the sequence
    first: Array  # index of the warpgroup's first token


def _launch(
    work: Callable[["_Place", Sequence[Ref], Sequence[Ref]], _Work],
    args: Sequence[Array],
    outs: Sequence[jax.ShapeDtypeStruct],  # the first is [B, N, ...] for a grid over tiles of N tokens
    heads: int,  # of the grid
    buffers: Sequence[pl.MemoryRef],  # types of the shared memory. The first `loaded` buffers are filled once
    ring: Sequence[pl.MemoryRef],  # types of the shared memory that each step fills, with a leading axis of stages
    loaded: int,  # number of slices in `_Work.resident`
) -> Sequence[Array]:
    """Runs `work(place, refs, buffers)` for each sequence of the batch, head and tile of tokens."""
    gpu = plgpu()
    stages = ring[0].shape[0]
    B, N = outs[0].shape[:2]

    def attend(*refs: Ref, buffers: Sequence[Ref], ring: Sequence[Ref], loaded: Ref, full: Ref, empty: Ref) -> None:
        row, head, tile, wg = (lax.axis_index(name) for name in ("row", "head", "tile", "wg"))
        first = (2 * tile + wg) * _HALF
        mine = work(_Place(row, head, tile, pl.ds(wg * _HALF, _HALF), pl.ds(first, _HALF), first), refs, buffers)

        @pl.when(wg == 2)
        def load() -> None:
            gpu.set_max_registers(40, action="decrease")
            for source, buffer in zip(mine.resident, buffers, strict=False):
                gpu.copy_gmem_to_smem(source, buffer, loaded)

            # The last `stages` steps only wait, because a warpgroup must observe every phase of its barriers.
            def step(number: Array, _: None) -> None:
                slot = lax.rem(number, jnp.int32(stages))
                pl.when(number >= stages)(lambda: gpu.barrier_wait(empty.at[slot]))

                @pl.when(number < mine.steps)
                def _() -> None:
                    for source, buffer in zip(mine.source(number), ring, strict=True):
                        gpu.copy_gmem_to_smem(source, buffer.at[slot], full.at[slot])

            lax.fori_loop(jnp.int32(0), mine.steps + stages, step, None)

        @pl.when(wg < 2)
        def compute() -> None:
            gpu.set_max_registers(232, action="increase")
            gpu.barrier_wait(loaded)

            def loop(step: _Step, carry: _Carry, bounds: Sequence[Array]) -> _Carry:
                def run(number: Array, carry: _Carry, masked: bool) -> _Carry:
                    slot = lax.rem(number, jnp.int32(stages))
                    gpu.barrier_wait(full.at[slot])
                    carry = step(number, [buffer.at[slot] for buffer in ring], carry, masked)
                    gpu.barrier_arrive(empty.at[slot])
                    return carry

                for low, high, masked in zip(bounds, bounds[1:], (True, False, True), strict=False):
                    carry = lax.fori_loop(low, high, functools.partial(run, masked=masked), carry)
                return carry

            mine.compute(loop)
            gpu.wait_smem_to_gmem(0)

    return kernel(
        attend,
        outs,
        scratch_types={
            "buffers": list(buffers),
            "ring": list(ring),
            "loaded": gpu.Barrier(num_arrivals=loaded),
            "full": gpu.Barrier(num_arrivals=len(ring), num_barriers=stages),
            "empty": gpu.Barrier(num_arrivals=2, num_barriers=stages),
        },
        grid=(heads, N // _TILE, B),
        grid_names=("head", "tile", "row"),
        num_threads=3,
        thread_name="wg",
    )(*args)


def _full(shape: tuple[int, ...], value: float) -> Array:
    """Returns a constant array in the layout of an accumulator, or a constant vector with one element per row of it."""
    layout = plgpu().Layout.WGMMA
    return plgpu().layout_cast(jnp.full(shape, value, jnp.float32), layout if len(shape) == 2 else layout.reduce(1))


def _load(ref: Ref, axis: int) -> Array:
    """Loads a vector with one element per row (axis 0) or per column (axis 1) of an accumulator."""
    return plgpu().load(ref, layout=plgpu().Layout.WGMMA.reduce(1 - axis), optimized=False)


def _spread(vector: Array, like: Array, axis: int = 0) -> Array:
    return lax.broadcast_in_dim(vector, like.shape, (axis,))


# `positions` has the position of each query, or of the first of consecutive queries; `first_c` that of the first key.
def _mask(scores: Array, positions: Array, first_c: Array, starts: Array, axis: int) -> Array:
    """Sets the scores of keys after the query, or before its document, to -inf. Queries lie along `axis`."""
    iota = functools.partial(plgpu().broadcasted_iota, jnp.int32, scores.shape, layout=plgpu().Layout.WGMMA)
    q = _spread(positions, scores, axis) if positions.ndim else iota(axis) + positions
    c = iota(1 - axis) + first_c
    return jnp.where((c <= q) & (c >= _spread(starts, scores, axis)), scores, -jnp.inf)


def _keys(
    k: Ref, v: Ref, starts: Ref, positions: Sequence[Ref], at: _Place, group: Array, C: int
) -> tuple[_Source, Array, tuple[Array, ...]]:
    """Returns the keys that a tile of queries reads: `_Work.source`, its first block of C keys, and bounds relative to it."""
    begin, end = at.tile * _TILE, (at.tile + 1) * _TILE
    first = lax.div(starts[at.row, begin], jnp.int32(C))
    plain = lax.div(starts[at.row, end - 1] + (C - 1), jnp.int32(C))
    for ref in positions:  # the position of the first query, and the last one rounded up to a block
        begin, end = ref[begin], ref[end - 1] + C
    diagonal, last = lax.div(begin, jnp.int32(C)) - first, lax.div(end, jnp.int32(C)) - first

    def source(number: Array) -> Sequence[Ref]:
        keys = pl.ds((first + number) * C, C)
        return k.at[at.row, keys, group], v.at[at.row, keys, group]

    return source, first, (jnp.int32(0), jnp.minimum(plain - first, diagonal), diagonal, last)


# A jitted function, because jax 0.11 names and compiles every call of a kernel separately.
@functools.partial(jax.jit, static_argnums=5)
def _jgraph_documents(
    q_BSHK: Array, k_BTGK: Array, v_BTGK: Array, starts_BS: Array, positions: tuple[Array, ...], scale: float
) -> tuple[Array, Array]:
    """Returns the attention [B, S, H, K], and log2 of each query's sum of exponentials [B, H, S]."""
    (B, S, H, K), G = q_BSHK.shape, k_BTGK.shape[2]
    gpu = plgpu()
    C = _TILE
    factor = scale * math.log2(math.e)

    def work(at: _Place, refs: Sequence[Ref], scratch: Sequence[Ref]) -> _Work:
        q, k, v, starts, *positions, y, lse = refs
        group = lax.div(at.head, jnp.int32(H // G))
        source, first, bounds = _keys(k, v, starts, positions, at, group, C)

        def compute(loop: _Loop) -> None:
            mine, sums = scratch[0].at[at.half], scratch[1].at[at.half]
            starts_Q = _load(starts.at[at.row, at.tokens], 0)
            queries = _load(positions[0].at[at.tokens], 0) if positions else at.first

            def step(
                number: Array, buffers: Sequence[Ref], carry: tuple[Array, Array, Array], masked: bool
            ) -> tuple[Array, Array, Array]:
                largest_Q, total_Q, y_QK = carry
                (scores_QC,) = products([(mine, transposed(buffers[0]))])
                if masked:
                    scores_QC = _mask(scores_QC, queries, (first + number) * C, starts_Q, 0)
                new_Q = jnp.maximum(largest_Q, jnp.max(scores_QC, axis=1) * factor)
                exps_QC = jnp.exp2(scores_QC * factor - _spread(new_Q, scores_QC))
                shrink_Q = jnp.exp2(largest_Q - new_Q)
                y_QK = add_product(y_QK * _spread(shrink_Q, y_QK), exps_QC.astype(v.dtype), buffers[1])
                return new_Q, total_Q * shrink_Q + jnp.sum(exps_QC, axis=1), y_QK

            nothing = _full((_HALF,), _LEAST), _full((_HALF,), 0.0), _full((_HALF, K), 0.0)
            largest_Q, total_Q, y_QK = loop(step, nothing, bounds)
            mine[...] = (y_QK / _spread(total_Q, y_QK)).astype(y.dtype)
            sums[...] = largest_Q + jnp.log(total_Q) * math.log2(math.e)
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(mine, y.at[at.row, at.tokens, at.head])
            gpu.copy_smem_to_gmem(sums, lse.at[at.row, at.head, at.tokens])

        return _Work([q.at[at.row, pl.ds(at.tile * _TILE, _TILE), at.head]], bounds[-1], source, compute)

    outs = jax.ShapeDtypeStruct(q_BSHK.shape, q_BSHK.dtype), jax.ShapeDtypeStruct((B, H, S), jnp.float32)
    buffers = shared((_TILE, K), q_BSHK.dtype), gpu.SMEM((_TILE,), jnp.float32)
    ring = [shared((2, C, K), q_BSHK.dtype)] * 2
    args = q_BSHK, k_BTGK, v_BTGK, starts_BS, *positions
    y_BSHK, lse_BHS = _launch(work, args, outs, H, buffers, ring, 1)
    return y_BSHK, lse_BHS


@functools.partial(jax.jit, static_argnums=8)
def _jgraph_documents_backward(
    q_BSHK: Array, k_BTGK: Array, v_BTGK: Array, starts_BS: Array, positions: tuple[Array, ...], dy_BSHK: Array, lse_BHS: Array,
    delta_BHS: Array, scale: float,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Returns the gradients of queries, keys and values. Two kernels, one over queries and one over keys, avoid atomics."""
    (H, K), (T, G) = q_BSHK.shape[2:], k_BTGK.shape[1:3]
    R = H // G
    N = _HALF
    dtype = q_BSHK.dtype
    gpu = plgpu()
    factor = scale * math.log2(math.e)
    # For the first and last key of each tile: the end of its document, which is the number of queries in documents that start
    # at or before the key, and the number of queries before the key.
    places_J2 = jnp.arange(0, T, _TILE)[:, None] + jnp.array([0, _TILE - 1])
    ends_BJ2 = jnp.sum(starts_BS[:, None, None] <= places_J2[:, :, None], axis=-1, dtype=jnp.int32)
    begins_J2 = [jnp.sum(array_S < places_J2[:, :, None], axis=-1, dtype=jnp.int32) for array_S in positions]

    def store(result: Array, buffer: Ref, out: Ref) -> None:
        buffer[...] = result.astype(dtype)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(buffer, out)

    def of_queries(at: _Place, refs: Sequence[Ref], scratch: Sequence[Ref]) -> _Work:
        q, k, v, starts, dy, lse, delta, *positions, dq = refs
        group = lax.div(at.head, jnp.int32(R))
        tile = pl.ds(at.tile * _TILE, _TILE)
        source, first, bounds = _keys(k, v, starts, positions, at, group, N)

        def compute(loop: _Loop) -> None:
            q_QK, dy_QK = (buffer.at[at.half] for buffer in scratch)
            starts_Q = _load(starts.at[at.row, at.tokens], 0)
            queries = _load(positions[0].at[at.tokens], 0) if positions else at.first
            lse_Q, delta_Q = (_load(ref.at[at.row, at.head, at.tokens], 0) for ref in (lse, delta))

            def step(number: Array, buffers: Sequence[Ref], dq_QK: Array, masked: bool) -> Array:
                k_CK, v_CK = buffers
                scores_QC, dshares_QC = products([(q_QK, transposed(k_CK))], [(dy_QK, transposed(v_CK))])
                if masked:
                    scores_QC = _mask(scores_QC, queries, (first + number) * N, starts_Q, 0)
                shares_QC = jnp.exp2(scores_QC * factor - _spread(lse_Q, scores_QC))
                dscores_QC = shares_QC * (dshares_QC - _spread(delta_Q, scores_QC))
                return add_product(dq_QK, dscores_QC.astype(dtype), k_CK)

            store(loop(step, _full((N, K), 0.0), bounds) * scale, q_QK, dq.at[at.row, at.tokens, at.head])

        return _Work([x.at[at.row, tile, at.head] for x in (q, dy)], bounds[-1], source, compute)

    def of_keys(at: _Place, refs: Sequence[Ref], scratch: Sequence[Ref]) -> _Work:
        q, k, v, starts, dy, lse, delta, ends, *places, dk, dv = refs
        tile = pl.ds(at.tile * _TILE, _TILE)
        first = at.tile * (_TILE // N)
        plain = ends[at.row, at.tile, 0]
        last = ends[at.row, at.tile, 1] + (N - 1)
        diagonal = jnp.int32(_TILE // N)
        if places:
            _, begins = places
            first = lax.div(begins[at.tile, 0], jnp.int32(N))
            diagonal = lax.div(begins[at.tile, 1] + N - 1, jnp.int32(N)) - first
        count = lax.div(last, jnp.int32(N)) - first  # 0 if no query reads the tile
        plain = jnp.clip(lax.div(plain, jnp.int32(N)) - first, diagonal, count)

        def source(number: Array) -> Sequence[Ref]:
            head = at.head * R + lax.div(number, count)
            queries = pl.ds((first + lax.rem(number, count)) * N, N)
            by_row = (ref.at[at.row, head, queries] for ref in (lse, delta))
            by_query = starts.at[at.row, queries], *(ref.at[queries] for ref in places[:1])
            return q.at[at.row, queries, head], dy.at[at.row, queries, head], *by_row, *by_query

        def compute(loop: _Loop) -> None:
            k_CK, v_CK = (buffer.at[at.half] for buffer in scratch)

            def head(r: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                def step(
                    number: Array, buffers: Sequence[Ref], carry: tuple[Array, Array], masked: bool
                ) -> tuple[Array, Array]:
                    dk_CK, dv_CK = carry
                    q_QK, dy_QK, *by_query = buffers
                    scores_CQ, dshares_CQ = products([(k_CK, transposed(q_QK))], [(v_CK, transposed(dy_QK))])
                    lse_Q, delta_Q, starts_Q, *places_Q = (_load(ref, 1) for ref in by_query)
                    if masked:
                        queries = places_Q[0] if places_Q else (first + number - r * count) * N
                        scores_CQ = _mask(scores_CQ, queries, at.first, starts_Q, 1)
                    shares_CQ = jnp.exp2(scores_CQ * factor - _spread(lse_Q, scores_CQ, 1))
                    dv_CK = add_product(dv_CK, shares_CQ.astype(dtype), dy_QK)
                    dscores_CQ = shares_CQ * (dshares_CQ - _spread(delta_Q, scores_CQ, 1))
                    return add_product(dk_CK, dscores_CQ.astype(dtype), q_QK), dv_CK

                return loop(step, carry, [r * count + bound for bound in (0, diagonal, plain, count)])

            dk_CK, dv_CK = lax.fori_loop(jnp.int32(0), jnp.int32(R), head, (_full((N, K), 0.0),) * 2)
            store(dk_CK * scale, k_CK, dk.at[at.row, at.tokens, at.head])
            store(dv_CK, v_CK, dv.at[at.row, at.tokens, at.head])

        return _Work([x.at[at.row, tile, at.head] for x in (k, v)], R * count, source, compute)

    buffers = [shared((_TILE, K), dtype)] * 2
    ring = [shared((4, N, K), dtype)] * 2
    by_query = [gpu.SMEM((4, N), number) for number in (jnp.float32, jnp.float32, jnp.int32, *(x.dtype for x in positions))]
    args = q_BSHK, k_BTGK, v_BTGK, starts_BS, dy_BSHK, lse_BHS, delta_BHS
    of_q, of_k = (jax.ShapeDtypeStruct(x.shape, dtype) for x in (q_BSHK, k_BTGK))
    (dq,) = _launch(of_queries, (*args, *positions), [of_q], H, buffers, ring, 2)
    dk, dv = _launch(of_keys, (*args, ends_BJ2, *positions, *begins_J2), [of_k, of_k], G, buffers, ring + by_query, 2)
    return dq, dk, dv
