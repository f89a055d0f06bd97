"""Causal attention of short sequences with its rotary embedding, one kernel forward and one backward.

At 128 tokens a library's attention is mostly what is around it: memsets, conversions, a rotation of q and of k, v laid out by
itself. Here a block of threads has all tokens of a head: it reads the projection as it was written, and the backward starts
from the projection alone.
"""

# B batch, T sequence, H heads, K head size, P = K/2 pairs that are rotated

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from jgraph.errors import ShapeError, check_choice
from jgraph.kernels._target import target

_ROWS = 64
"""Tokens of a group of threads, which are the rows of one product."""


def rotary_attention(
    qkv_BTNK: Array, cos_TP: np.ndarray, sin_TP: np.ndarray, *, implementation: str = "auto", interpret: bool = False
) -> Array:
    """Rotates q and k and attends to the tokens before, as many keys and values as queries.

    >>> tables = np.ones((2, 4), np.float32), np.zeros((2, 4), np.float32)
    >>> rotary_attention(jnp.ones((1, 2, 3, 8)), *tables).shape
    (1, 2, 1, 8)

    Args:
        qkv_BTNK: queries, keys and values side by side, N = 3H.
        cos_TP, sin_TP: float32, of each token the angles of the pairs (i, i + P) that are rotated.
        implementation: `mosaic` (Hopper; jax 0.11 or newer; bfloat16, 64 or 128 tokens, heads of 64 or 128), `xla` (anywhere),
            or `auto`, which takes the first of them that can.
        interpret: runs a kernel's body on the CPU, for tests.

    Returns:
        [B, T, H, K] in the dtype of `qkv_BTNK`.

    Raises:
        ConfigError: there is no such implementation.
        ShapeError: the shapes disagree, or `mosaic` cannot take them.
    """
    check_choice("implementation", implementation, ("auto", *_IMPLEMENTATIONS))
    T, N, K = qkv_BTNK.shape[-3:]
    if qkv_BTNK.ndim != 4 or N % 3 or cos_TP.shape != (T, K // 2) or sin_TP.shape != (T, K // 2) or K % 2:
        message = (
            f"`qkv_BTNK` is {qkv_BTNK.shape}, the tables {cos_TP.shape} and {sin_TP.shape}: must be (B, T, 3H, K), (T, K/2)"
        )
        raise ShapeError(message, field="qkv_BTNK")
    chosen = choose(qkv_BTNK.shape, qkv_BTNK.dtype) if implementation == "auto" else implementation
    if chosen == "mosaic" and not _fits(qkv_BTNK.shape, qkv_BTNK.dtype):
        allowed = "bfloat16, 64 or 128 tokens, heads of 64 or 128"
        raise ShapeError(f"`qkv_BTNK` is {qkv_BTNK.dtype}{list(qkv_BTNK.shape)}: must be {allowed}; take xla", field="qkv_BTNK")
    return _IMPLEMENTATIONS[chosen](qkv_BTNK, jnp.asarray(cos_TP), jnp.asarray(sin_TP), interpret)


def choose(shape: tuple[int, ...], dtype: Any) -> str:
    """Returns the implementation for an array on the device that is compiled for."""
    return "mosaic" if has_kernel() and _fits(shape, dtype) else "xla"


def has_kernel() -> bool:
    """Returns if the device that is compiled for has the kernel's products, which are Hopper's alone."""
    device = target()
    return device is not None and device.capability == (9, 0) and jax.__version_info__ >= (0, 11)


def _fits(shape: tuple[int, ...], dtype: Any) -> bool:
    # With more tokens scores and their gradient do not lie in shared memory.
    return dtype == jnp.bfloat16 and shape[1] in (_ROWS, 2 * _ROWS) and shape[3] in (64, 128) and shape[1] * shape[3] <= 2**13


def _xla(qkv_BTNK: Array, cos_TP: Array, sin_TP: Array, interpret: bool) -> Array:
    """The reference."""
    q_BTHK, k_BTHK, v_BTHK = jnp.split(qkv_BTNK, 3, axis=2)

    def rotated(x_BTHK: Array) -> Array:
        a, b = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
        cos, sin = cos_TP[:, None], sin_TP[:, None]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHK.dtype)

    return jax.nn.dot_product_attention(rotated(q_BTHK), rotated(k_BTHK), v_BTHK, is_causal=True, implementation="xla")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _mosaic(qkv_BTNK: Array, cos_TP: Array, sin_TP: Array, interpret: bool) -> Array:
    return _jgraph_attention(qkv_BTNK, cos_TP, sin_TP, interpret)


def _forward(qkv_BTNK: Array, cos_TP: Array, sin_TP: Array, interpret: bool) -> tuple[Array, tuple[Array, ...]]:
    return _jgraph_attention(qkv_BTNK, cos_TP, sin_TP, interpret), (qkv_BTNK, cos_TP, sin_TP)


def _backward(interpret: bool, residuals: tuple[Array, ...], dy_BTHK: Array) -> tuple[Array, Array, Array]:
    qkv_BTNK, cos_TP, sin_TP = residuals
    tables = jnp.zeros_like(cos_TP), jnp.zeros_like(sin_TP)  # constants, whose gradients nobody asks for
    return _jgraph_attention_backward(qkv_BTNK, cos_TP, sin_TP, dy_BTHK, interpret), *tables


_mosaic.defvjp(_forward, _backward)


# One function of the program for all layers: jax 0.11 gives every call of a kernel a name of its own, and compiles each.
@functools.partial(jax.jit, static_argnums=3)
def _jgraph_attention(qkv_BTNK: Array, cos_TP: Array, sin_TP: Array, interpret: bool) -> Array:
    B, T, N, K = qkv_BTNK.shape

    def kernel(qkv: Any, cos: Any, sin: Any, y: Any, *, q: Any, k: Any, v: Any, p: Any, out: Any, loaded: Any, ready: Any):
        head = _Head(qkv, q, k, v, cos, sin, loaded, ready)
        tiles, wg = head.tiles, head.wg
        exps, total = head.exps()
        for j in range(tiles):
            p[wg, j] = exps[j].astype(p.dtype)
        head.plgpu.commit_smem()
        acc = head.products((_ROWS, K), lambda acc, j: head.plgpu.wgmma(acc, p.at[wg, j], v.at[j]))
        out[wg] = (acc * lax.broadcast_in_dim(1 / total, acc.shape, (0,))).astype(out.dtype)
        head.plgpu.commit_smem()
        head.plgpu.copy_smem_to_gmem(out.at[wg], y.at[head.b, head.rows(wg), head.h])
        head.plgpu.wait_smem_to_gmem(0)

    (y,) = _call(kernel, qkv_BTNK, [(B, T, N // 3, K)], {"p": (T // _ROWS, _ROWS, _ROWS), "out": (_ROWS, K)}, interpret)(
        qkv_BTNK, cos_TP, sin_TP
    )
    return y


@functools.partial(jax.jit, static_argnums=4)
def _jgraph_attention_backward(qkv_BTNK: Array, cos_TP: Array, sin_TP: Array, dy_BTHK: Array, interpret: bool) -> Array:
    T, N, K = qkv_BTNK.shape[1:]
    H, P = N // 3, K // 2

    def kernel(
        qkv: Any, cos: Any, sin: Any, dy: Any, dqkv: Any,
        *, q: Any, k: Any, v: Any, g: Any, p: Any, s: Any, dqk: Any, dv: Any, loaded: Any, ready: Any,
    ):  # fmt: skip
        head = _Head(qkv, q, k, v, cos, sin, loaded, ready, dy, g)
        plgpu, tiles, wg = head.plgpu, head.tiles, head.wg
        exps, total = head.exps()
        share = lax.broadcast_in_dim(1 / total, (_ROWS, _ROWS), (0,))
        ps = [e * share for e in exps]
        dps = [
            head.products((_ROWS, _ROWS), lambda acc, _, j=j: plgpu.wgmma(acc, g.at[wg], v.at[j].transpose((1, 0))), count=1)
            for j in range(tiles)
        ]
        dot = sum(jnp.sum(a * b, axis=1) for a, b in zip(ps, dps, strict=True))
        dot = lax.broadcast_in_dim(dot, (_ROWS, _ROWS), (0,))
        for j in range(tiles):
            p[wg, j] = ps[j].astype(p.dtype)
            s[wg, j] = (ps[j] * (dps[j] - dot) * K**-0.5).astype(s.dtype)
        plgpu.commit_smem()
        head.all_ready()
        # Own queries want all keys, own keys and values all queries.
        dq = [head.products((_ROWS, P), lambda acc, j, a=a: plgpu.wgmma(acc, s.at[wg, j], k.at[a, j])) for a in range(2)]
        dk = [
            head.products((_ROWS, P), lambda acc, j, a=a: plgpu.wgmma(acc, s.at[j, wg].transpose((1, 0)), q.at[a, j]))
            for a in range(2)
        ]
        dv[wg] = head.products((_ROWS, K), lambda acc, j: plgpu.wgmma(acc, p.at[j, wg].transpose((1, 0)), g.at[j])).astype(
            dv.dtype
        )
        for which, (a, b) in enumerate((dq, dk)):
            dqk[wg, which, 0] = (a * head.cos + b * head.sin).astype(dqk.dtype)
            dqk[wg, which, 1] = (b * head.cos - a * head.sin).astype(dqk.dtype)
        plgpu.commit_smem()
        rows = head.rows(wg)
        for which in range(2):
            for half in range(2):
                to = dqkv.at[head.b, rows, which * H + head.h, pl.ds(half * P, P)]
                plgpu.copy_smem_to_gmem(dqk.at[wg, which, half], to)
        plgpu.copy_smem_to_gmem(dv.at[wg], dqkv.at[head.b, rows, 2 * H + head.h])
        plgpu.wait_smem_to_gmem(0)

    tiles = T // _ROWS
    room = {"g": (_ROWS, K), "p": (tiles, _ROWS, _ROWS), "s": (tiles, _ROWS, _ROWS), "dqk": (2, 2, _ROWS, P), "dv": (_ROWS, K)}
    (dqkv,) = _call(kernel, qkv_BTNK, [qkv_BTNK.shape], room, interpret)(qkv_BTNK, cos_TP, sin_TP, dy_BTHK)
    return dqkv


def _call(kernel: Any, qkv: Array, outs: list[tuple[int, ...]], room: dict[str, tuple[int, ...]], interpret: bool) -> Any:
    """Returns the kernel over batch and heads, a group of threads for 64 tokens, with `room` for each in shared memory."""
    from jax.experimental.pallas import mosaic_gpu

    plgpu: Any = mosaic_gpu  # jax 0.10 has less of it, by which a type checker judges
    B, T, N, K = qkv.shape
    tiles, pairs = T // _ROWS, K // 2
    # Half a head is as wide as a tile, and operands of one product have the same tiles.
    transforms = plgpu.TilingTransform((8, pairs)), plgpu.SwizzleTransform(2 * pairs)

    def shared(*shape: int) -> Any:
        return plgpu.SMEM(shape, qkv.dtype, transforms=transforms)

    scratch = {"q": shared(2, tiles, _ROWS, pairs), "k": shared(2, tiles, _ROWS, pairs), "v": shared(tiles, _ROWS, K)}
    copies = (5 + ("g" in room)) * tiles
    return plgpu.kernel(
        kernel,
        out_type=tuple(jax.ShapeDtypeStruct(shape, qkv.dtype) for shape in outs),
        scratch_types=scratch
        | {name: shared(tiles, *shape) for name, shape in room.items()}
        | {"loaded": plgpu.Barrier(num_arrivals=copies), "ready": plgpu.Barrier(num_arrivals=tiles)},
        grid=(B, N // 3),
        grid_names=("b", "h"),
        num_threads=tiles,
        thread_name="wg",
        # Of exp and division: 2 units in the last place of float32.
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )


class _Head:
    """Holds what forward and backward have in common: a head in shared memory, rotated; `wg` has its own 64 tokens of it."""

    def __init__(
        self, qkv: Any, q: Any, k: Any, v: Any, cos: Any, sin: Any, loaded: Any, ready: Any, dy: Any = None, g: Any = None
    ):
        from jax.experimental.pallas import mosaic_gpu

        self.plgpu: Any = mosaic_gpu
        self.q, self.k, self.ready = q, k, ready
        self.b, self.h, self.wg = (lax.axis_index(name) for name in ("b", "h", "wg"))
        self.tiles, P = q.shape[1], q.shape[3]
        H = qkv.shape[2] // 3

        @pl.when(self.wg == 0)
        def _():
            for j in range(self.tiles):
                for which, x in enumerate((q, k)):
                    for half in range(2):
                        part = qkv.at[self.b, self.rows(j), which * H + self.h, pl.ds(half * P, P)]
                        self.plgpu.copy_gmem_to_smem(part, x.at[half, j], loaded)
                self.plgpu.copy_gmem_to_smem(qkv.at[self.b, self.rows(j), 2 * H + self.h], v.at[j], loaded)
                if g is not None:
                    self.plgpu.copy_gmem_to_smem(dy.at[self.b, self.rows(j), self.h], g.at[j], loaded)

        own = self.rows(self.wg)
        self.cos, self.sin = (
            self.plgpu.load(table.at[own], layout=self.plgpu.Layout.WGMMA, optimized=False) for table in (cos, sin)
        )
        self.plgpu.barrier_wait(loaded)
        for x in (q, k):
            a, b = (self.plgpu.load(x.at[half, self.wg], layout=self.plgpu.Layout.WGMMA) for half in range(2))
            a, b = a.astype(jnp.float32), b.astype(jnp.float32)
            x[0, self.wg] = (a * self.cos - b * self.sin).astype(x.dtype)
            x[1, self.wg] = (b * self.cos + a * self.sin).astype(x.dtype)
        self.plgpu.commit_smem()
        self.all_ready()

    def rows(self, tile: Any) -> Any:
        return pl.ds(tile * _ROWS, _ROWS)

    def all_ready(self) -> None:
        """Waits until all groups of threads are here."""
        self.plgpu.barrier_arrive(self.ready)
        self.plgpu.barrier_wait(self.ready)

    def products(self, shape: tuple[int, int], add: Any, count: int | None = None) -> Any:
        """Returns the sum over tiles of the products that `add(acc, tile)` adds."""

        def run(acc: Any) -> Any:
            for j in range(self.tiles if count is None else count):
                add(acc, j)
            return acc[...]

        return pl.run_scoped(run, self.plgpu.ACC(shape, jnp.float32))

    def exps(self) -> tuple[list[Any], Any]:
        """Returns exponentials of the own tokens' scores less their largest, by tiles of keys, and their sums."""
        tile = (_ROWS, _ROWS)
        scale = math.log2(math.e) * (2 * self.q.shape[3]) ** -0.5
        iota = functools.partial(self.plgpu.broadcasted_iota, jnp.int32, tile, layout=self.plgpu.Layout.WGMMA)
        ahead = iota(1) - iota(0)
        scores = []
        for j in range(self.tiles):

            def both(acc: Any, half: int, j: int = j) -> None:
                self.plgpu.wgmma(acc, self.q.at[half, self.wg], self.k.at[half, j].transpose((1, 0)))

            score = self.products(tile, both, count=2)
            scores.append(jnp.where(ahead <= (self.wg - j) * _ROWS, score, -jnp.inf))
        largest = functools.reduce(jnp.maximum, (jnp.max(score, axis=1) for score in scores))
        largest = lax.broadcast_in_dim(largest, tile, (0,))
        exps = [jnp.exp2((score - largest) * scale) for score in scores]
        return exps, functools.reduce(jnp.add, (jnp.sum(e, axis=1) for e in exps))


_IMPLEMENTATIONS = {"mosaic": _mosaic, "xla": _xla}
