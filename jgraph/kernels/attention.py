"""Causal attention of short sequences, fused with the rotary embedding: one kernel forward and one backward.

At 128 tokens, a library's attention spends most of its time in memsets, conversions, rotations and copies. Here, one block of
threads holds all tokens of a head. It reads the fused QKV projection directly, and the backward pass recomputes from it.
"""

# B batch, T sequence, H heads, K head size, P = K/2 rotated pairs

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jgraph.kernels._check import chosen, require
from jgraph.kernels._mosaic import SLAB, Ref, Slice, has_wgmma, kernel, plgpu, products, shared
from jgraph.kernels.rotary import rotated_heads


# N = 3H are H heads of queries, then H of keys, then H of values, in bfloat16 or float32. The tables have the cosines and sines
# of the angle of each token and pair of dimensions (i, i + P), in float32. `mosaic` has no gradient for them.
def rotary_attention(qkv_BTNK: Array, cos_TP: np.ndarray, sin_TP: np.ndarray, *, implementation: str = "auto") -> Array:
    """Rotates queries and keys, and computes causal attention [B, T, H, K] with as many key heads as query heads."""
    T, N, K = qkv_BTNK.shape[-3:]
    matches = qkv_BTNK.ndim == 4 and N % 3 == 0 and K % 2 == 0 and cos_TP.shape == sin_TP.shape == (T, K // 2)
    tables = f"`cos_TP` {list(cos_TP.shape)} and `sin_TP` {list(sin_TP.shape)}, which must be [T, K/2]"
    require(matches, "qkv_BTNK", qkv_BTNK, f"[B, T, 3H, K] for {tables}")
    fits = _fits(qkv_BTNK.shape, qkv_BTNK.dtype)
    must = "bfloat16 [B, T, 3H, K], T and K of 64 or 128 but not both 128,"
    name = chosen(implementation, has_wgmma(), fits, "qkv_BTNK", qkv_BTNK, must)
    return (_mosaic if name == "mosaic" else _xla)(qkv_BTNK, jnp.asarray(cos_TP), jnp.asarray(sin_TP))


def choose(shape: tuple[int, ...], dtype: DTypeLike) -> str:
    """Returns the implementation that `rotary_attention` selects for `auto` and an argument `qkv_BTNK` of this shape."""
    return "mosaic" if has_wgmma() and _fits(shape, dtype) else "xla"


def _fits(shape: tuple[int, ...], dtype: DTypeLike) -> bool:
    # Larger scores and their gradient exceed the shared memory.
    return dtype == jnp.bfloat16 and shape[1] in (SLAB, 2 * SLAB) and shape[3] in (64, 128) and shape[1] * shape[3] <= 2**13


def _xla(qkv_BTNK: Array, cos_TP: Array, sin_TP: Array) -> Array:
    H = qkv_BTNK.shape[2] // 3
    q_BTHK, k_BTHK, v_BTHK = rotated_heads(qkv_BTNK, cos_TP, sin_TP, num_heads=H, num_kv_heads=H)
    return jax.nn.dot_product_attention(q_BTHK, k_BTHK, v_BTHK, is_causal=True, implementation="xla")


# A jitted function, because jax 0.11 names and compiles every call of a kernel separately.
@jax.jit
def _jgraph_attention(qkv_BTNK: Array, cos_TP: Array, sin_TP: Array) -> Array:
    B, T, N, K = qkv_BTNK.shape

    def attention(qkv: Ref, cos: Ref, sin: Ref, y: Ref, **scratch: Ref) -> None:
        head = _Head(qkv, cos, sin, scratch)
        tiles = head.tiles
        wg = head.wg
        v, p, out = (scratch[name] for name in ("v", "p", "out"))
        exps, total = head.exps()
        for j in range(tiles):
            p[wg, j] = exps[j].astype(p.dtype)
        plgpu().commit_smem()
        (acc,) = products([(p.at[wg, j], v.at[j]) for j in range(tiles)])
        out[wg] = (acc * lax.broadcast_in_dim(1 / total, acc.shape, (0,))).astype(out.dtype)
        plgpu().commit_smem()
        plgpu().copy_smem_to_gmem(out.at[wg], y.at[head.b, head.rows(wg), head.h])
        plgpu().wait_smem_to_gmem(0)

    run = _kernel(attention, qkv_BTNK, (B, T, N // 3, K), {"p": (T // SLAB, SLAB, SLAB), "out": (SLAB, K)})
    (y_BTHK,) = run(qkv_BTNK, cos_TP, sin_TP)
    return y_BTHK


@jax.jit
def _jgraph_attention_backward(qkv_BTNK: Array, cos_TP: Array, sin_TP: Array, dy_BTHK: Array) -> Array:
    T, N, K = qkv_BTNK.shape[1:]
    H, P = N // 3, K // 2

    def attention_backward(qkv: Ref, cos: Ref, sin: Ref, dy: Ref, dqkv: Ref, **scratch: Ref) -> None:
        head = _Head(qkv, cos, sin, scratch, dy)
        q, k, v, g, p, s, dqk, dv = (scratch[name] for name in ("q", "k", "v", "g", "p", "s", "dqk", "dv"))
        gpu = plgpu()
        tiles = head.tiles
        wg = head.wg
        exps, total = head.exps()
        share = lax.broadcast_in_dim(1 / total, (SLAB, SLAB), (0,))
        ps = [e * share for e in exps]
        dps = [products([(g.at[wg], v.at[j].T)])[0] for j in range(tiles)]
        dot = sum(jnp.sum(a * b, axis=1) for a, b in zip(ps, dps, strict=True))
        dot = lax.broadcast_in_dim(dot, (SLAB, SLAB), (0,))
        for j in range(tiles):
            p[wg, j] = ps[j].astype(p.dtype)
            s[wg, j] = (ps[j] * (dps[j] - dot) * K**-0.5).astype(s.dtype)
        gpu.commit_smem()
        head.all_ready()
        # dq of a warpgroup's queries reads all keys. dk and dv of its keys and values read all queries.
        dq = [products([(s.at[wg, j], k.at[a, j]) for j in range(tiles)])[0] for a in range(2)]
        dk = [products([(s.at[j, wg].T, q.at[a, j]) for j in range(tiles)])[0] for a in range(2)]
        dv[wg] = products([(p.at[j, wg].T, g.at[j]) for j in range(tiles)])[0].astype(dv.dtype)
        for which, (a, b) in enumerate((dq, dk)):
            dqk[wg, which, 0] = (a * head.cos + b * head.sin).astype(dqk.dtype)
            dqk[wg, which, 1] = (b * head.cos - a * head.sin).astype(dqk.dtype)
        gpu.commit_smem()
        rows = head.rows(wg)
        for which in range(2):
            for half in range(2):
                to = dqkv.at[head.b, rows, which * H + head.h, pl.ds(half * P, P)]
                gpu.copy_smem_to_gmem(dqk.at[wg, which, half], to)
        gpu.copy_smem_to_gmem(dv.at[wg], dqkv.at[head.b, rows, 2 * H + head.h])
        gpu.wait_smem_to_gmem(0)

    tiles = T // SLAB
    buffers = {"g": (SLAB, K), "p": (tiles, SLAB, SLAB), "s": (tiles, SLAB, SLAB), "dqk": (2, 2, SLAB, P), "dv": (SLAB, K)}
    (dqkv_BTNK,) = _kernel(attention_backward, qkv_BTNK, qkv_BTNK.shape, buffers)(qkv_BTNK, cos_TP, sin_TP, dy_BTHK)
    return dqkv_BTNK


def _kernel(
    body: Callable[..., None],
    qkv: Array,
    out: tuple[int, ...],  # shape of the result
    buffers: dict[str, tuple[int, ...]],  # shapes of the shared memory of each warpgroup, besides q, k and v
) -> Callable[..., Sequence[Array]]:
    """Returns a kernel with one block per sequence and head, and one warpgroup per 64 tokens."""
    B, T, N, K = qkv.shape
    tiles, pairs = T // SLAB, K // 2
    # Operands of one matmul need equal tiles, and half a head is one tile wide.
    in_tiles = functools.partial(shared, dtype=qkv.dtype, columns=pairs)
    scratch = {"q": in_tiles((2, tiles, SLAB, pairs)), "k": in_tiles((2, tiles, SLAB, pairs)), "v": in_tiles((tiles, SLAB, K))}
    copies = (6 if "g" in buffers else 5) * tiles
    return kernel(
        body,
        [jax.ShapeDtypeStruct(out, qkv.dtype)],
        scratch_types=scratch
        | {name: in_tiles((tiles, *shape)) for name, shape in buffers.items()}
        | {"loaded": plgpu().Barrier(num_arrivals=copies), "ready": plgpu().Barrier(num_arrivals=tiles)},
        grid=(B, N // 3),
        grid_names=("b", "h"),
        num_threads=tiles,
        thread_name="wg",
    )


class _Head:
    """Loads one head into shared memory and rotates it, for the forward and backward kernels. Warpgroup `wg` owns 64 tokens."""

    def __init__(self, qkv: Ref, cos: Ref, sin: Ref, scratch: dict[str, Ref], dy: Ref | None = None):
        gpu = plgpu()
        q, k, v, loaded, self.ready = (scratch[name] for name in ("q", "k", "v", "loaded", "ready"))
        self.q, self.k = q, k
        self.b, self.h, self.wg = (lax.axis_index(name) for name in ("b", "h", "wg"))
        self.tiles = q.shape[1]
        P = q.shape[3]
        H = qkv.shape[2] // 3

        @pl.when(self.wg == 0)
        def _():
            for j in range(self.tiles):
                for which, x in enumerate((q, k)):
                    for half in range(2):
                        part = qkv.at[self.b, self.rows(j), which * H + self.h, pl.ds(half * P, P)]
                        gpu.copy_gmem_to_smem(part, x.at[half, j], loaded)
                gpu.copy_gmem_to_smem(qkv.at[self.b, self.rows(j), 2 * H + self.h], v.at[j], loaded)
                if dy is not None:
                    gpu.copy_gmem_to_smem(dy.at[self.b, self.rows(j), self.h], scratch["g"].at[j], loaded)

        rows = self.rows(self.wg)
        layout = gpu.Layout.WGMMA
        self.cos, self.sin = (gpu.load(table.at[rows], layout=layout, optimized=False) for table in (cos, sin))
        gpu.barrier_wait(loaded)
        for x in (q, k):
            a, b = [gpu.load(x.at[half, self.wg], layout=layout) for half in range(2)]
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            x[0, self.wg] = (a * self.cos - b * self.sin).astype(x.dtype)
            x[1, self.wg] = (b * self.cos + a * self.sin).astype(x.dtype)
        gpu.commit_smem()
        self.all_ready()

    def rows(self, tile: Array | int) -> Slice:
        return pl.ds(tile * SLAB, SLAB)

    def all_ready(self) -> None:
        plgpu().barrier_arrive(self.ready)
        plgpu().barrier_wait(self.ready)

    def exps(self) -> tuple[list[Array], Array]:
        """Computes exp(score - largest score of the query) for each tile of keys, and its sum over all keys of each query."""
        tile = (SLAB, SLAB)
        scale = math.log2(math.e) * (2 * self.q.shape[3]) ** -0.5
        iota = functools.partial(plgpu().broadcasted_iota, jnp.int32, tile, layout=plgpu().Layout.WGMMA)
        ahead = iota(1) - iota(0)
        scores = []
        for j in range(self.tiles):
            (score,) = products([(self.q.at[half, self.wg], self.k.at[half, j].T) for half in range(2)])
            scores.append(jnp.where(ahead <= (self.wg - j) * SLAB, score, -jnp.inf))
        largest = functools.reduce(jnp.maximum, (jnp.max(score, axis=1) for score in scores))
        largest = lax.broadcast_in_dim(largest, tile, (0,))
        exps = [jnp.exp2((score - largest) * scale) for score in scores]
        return exps, functools.reduce(jnp.add, (jnp.sum(e, axis=1) for e in exps))


_mosaic = jax.custom_vjp(_jgraph_attention)
# The tables are constants.
_mosaic.defvjp(lambda *args: (_mosaic(*args), args), lambda args, dy: (_jgraph_attention_backward(*args, dy), None, None))
