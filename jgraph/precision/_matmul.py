"""The FP8 matmul y = x @ w with a parameter w, and its dgrad and wgrad.

Hopper contracts both operands of an FP8 matmul over their last axis, so every operand is stored as rows and as columns (the
transpose). Each operand is quantized once: x in the forward pass, also for wgrad; dy in the backward pass, for dgrad and wgrad;
w once per step (`transform.py`).

A grouped matmul has one scale for all groups. Its wgrad is in bfloat16: an FP8 wgrad would contract over the rows of a group,
and a group may start at any row.
"""

# M rows of x, K contracted, N columns of w; G groups

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jgraph.autodiff import replay
from jgraph.autodiff.linear import DelayedProduct, Operand, Operands, Wide
from jgraph.autodiff.traced import GROUPED, Site
from jgraph.kernels import amax, cast_transpose
from jgraph.kernels.blocks import BLOCK, Blocks, block_dot, quantize_blocks
from jgraph.kernels.grouped import grouped_dot_fp8, grouped_wgrad
from jgraph.kernels.quantize import Want
from jgraph.precision.config import FP8Config
from jgraph.precision.scaling import Amax, FP8Array, scale_for
from jgraph.scopes import scope

_SAVED = "fp8"  # The split backward saves values with this checkpoint name instead of recomputing them.
MULTIPLE = 16  # cuBLASLt requires M, K and N to be multiples of 16.

# Residual for an FP8 weight gradient: the quantized columns of x, or x itself, which backward quantizes again.
_Saved: TypeAlias = Literal["columns", "x"]
_Accumulation: TypeAlias = Literal["full", "fast"]

# Rows or columns in FP8, and their scale.
_Scaled: TypeAlias = tuple[Array | Blocks, Array]
# The group sizes of a grouped matmul.
_Extra: TypeAlias = Sequence[Array]


class Tap(NamedTuple):
    """The arguments of an FP8 matmul y = x @ w besides the data x and the weight w."""

    weight: FP8Array
    scales: Array | None  # float32 [3], of x, w and dy, the gradient of y; None computes them from the arrays
    amax: Amax | None  # not read; its cotangents are the amax of x, w and dy. None observes nothing
    # Not read, with the shapes of the operands of wgrad. Its cotangents are these operands, and w has no gradient. None
    # computes wgrad in backward.
    delayed: Operands | None = None


_Kept: TypeAlias = tuple[Array | None, Array, Array, _Extra, Tap]
"""Residuals: the operand x of wgrad, None without a weight gradient; scale and amax of x; the other operands; the tap."""


class DotLayout(NamedTuple):
    """A `dot_general` without batch dimensions as a matmul of [M, K] and [K, N]."""

    site: Site
    x_axes: Sequence[int]  # the contracted axes last
    w_axes: Sequence[int]  # the contracted axes first
    sizes: tuple[int, int, int]  # M, K and N
    accumulation: _Accumulation = "full"  # of dgrad and wgrad

    @classmethod
    def from_site(cls, site: Site, accumulation: _Accumulation = "full") -> "DotLayout":
        contract, _ = site.eqn.params["dimension_numbers"]
        x = site.x_aval.shape
        x_last = contract[site.data]
        x_first = [i for i in range(len(x)) if i not in x_last]
        w = site.w_aval.shape
        w_first = contract[site.weight]
        w_last = [i for i in range(len(w)) if i not in w_first]
        sizes = math.prod(x[i] for i in x_first), math.prod(x[i] for i in x_last), math.prod(w[i] for i in w_last)
        return cls(site, (*x_first, *x_last), (*w_first, *w_last), sizes, accumulation)

    def x_matrix(self, x: Array) -> Array:
        return jnp.transpose(x, self.x_axes).reshape(self.sizes[:2])

    def w_matrix(self, w: Array) -> Array:
        return jnp.transpose(w, self.w_axes).reshape(self.sizes[1:])

    def dy_matrix(self, dy: Array) -> Array:
        m, _, n = self.sizes
        return dy.reshape(m, n) if self.site.data == 0 else dy.reshape(n, m).T

    def forward(self, x: FP8Array, w: FP8Array, extra: _Extra, dtype: DTypeLike) -> Array:
        """Computes y = x @ w in FP8, in the shape of the original matmul's result."""
        # Fast accumulation keeps about 14 bits.
        y_MN = dot((x.rows, x.scale), (w.columns, w.scale), dtype, "fast")
        return (y_MN if self.site.data == 0 else y_MN.T).reshape(self.site.y_aval.shape)

    def dgrad(self, dy: FP8Array, w: FP8Array, extra: _Extra, dtype: DTypeLike) -> Array:
        """Computes dx = dy @ w.T in FP8, in the shape of x in the original matmul."""
        dx_MK = dot((dy.rows, dy.scale), (w.rows, w.scale), dtype, self.accumulation)
        return _restored(dx_MK, self.site.x_aval.shape, self.x_axes)

    def wgrad(self, x: Operand, dy: Operand, extra: _Extra, dtype: DTypeLike, barrier: bool = True) -> Array:
        """Computes dw = x.T @ dy in the shape of w, from arrays, or from FP8 columns and their scales.

        Without `barrier`, XLA can fuse the addition to an accumulator.
        """
        if isinstance(x, tuple):
            dw_KN = dot(x, dy, dtype, self.accumulation, barrier)  # pyright: ignore[reportArgumentType]
        else:
            contract = (((0,), (0,)), ((), ()))
            dw_KN = lax.dot_general(self.x_matrix(x), self.dy_matrix(dy), contract, preferred_element_type=dtype)  # pyright: ignore[reportArgumentType]
        return _restored(dw_KN, self.site.w_aval.shape, self.w_axes)


class GroupedLayout(NamedTuple):
    """A `grouped_dot` as a matmul: each group of rows of x times the matrix of the group."""

    sizes: tuple[int, int, int]  # M of all groups together, K and N

    def x_matrix(self, x_MK: Array) -> Array:
        return x_MK

    def w_matrix(self, w_GKN: Array) -> Array:
        return w_GKN.reshape(-1, w_GKN.shape[-1])

    def dy_matrix(self, dy_MN: Array) -> Array:
        return dy_MN

    def forward(self, x: FP8Array, w: FP8Array, extra: _Extra, dtype: DTypeLike) -> Array:
        _, k, n = self.sizes
        w_NGK = w.columns.reshape(n, -1, k)
        # The kernel's result is bfloat16.
        return grouped_dot_fp8(x.rows, w_NGK, extra[0], 1 / x.scale / w.scale, order="NGK").astype(dtype)

    def dgrad(self, dy: FP8Array, w: FP8Array, extra: _Extra, dtype: DTypeLike) -> Array:
        w_GKN = w.rows.reshape(-1, *self.sizes[1:])
        return grouped_dot_fp8(dy.rows, w_GKN, extra[0], 1 / dy.scale / w.scale, order="GNK").astype(dtype)

    def wgrad(self, x: Operand, dy: Operand, extra: _Extra, dtype: DTypeLike) -> Array:
        """Computes dw [G, K, N] without FP8: the transposed rows of x of each group times its rows of dy."""
        assert isinstance(x, Array), "operands of a grouped matmul are not quantized"
        assert isinstance(dy, Array)
        return grouped_wgrad(x, dy, *extra, dtype=dtype)


def layout_of(site: Site, accumulation: _Accumulation = "full") -> DotLayout | GroupedLayout:
    """Returns the layout of a `dot_general` without batch dimensions or of a `grouped_dot` as [M, K] times [K, N]."""
    if site.name == GROUPED:
        return GroupedLayout((site.x_aval.shape[0], *site.w_aval.shape[1:]))
    return DotLayout.from_site(site, accumulation)


def formats(config: FP8Config) -> tuple[DTypeLike, DTypeLike, DTypeLike]:
    """Returns the FP8 dtypes of x (data), w (weight) and dy (gradient of the result)."""
    is_hybrid = config.format == "hybrid" and config.recipe != "mxfp8"
    return jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.float8_e5m2 if is_hybrid else jnp.float8_e4m3fn


def wgrad_precision(site: Site, config: FP8Config) -> Literal["fp8", "bf16"]:
    """Returns the precision of the operands of a weight gradient. Those of a grouped matmul are not quantized."""
    return "bf16" if site.name == GROUPED else config.wgrad


def unsupported(site: Site, config: FP8Config) -> str:
    """Returns the reason why a matmul cannot be in FP8, a phrase for the log; an empty string if it can."""
    if site.name not in ("dot_general", GROUPED):
        return f"a {site.name}"
    multiple = BLOCK if config.recipe == "mxfp8" else MULTIPLE
    if site.name == GROUPED and config.recipe == "mxfp8":
        return f"a {GROUPED}, which has no mxfp8 kernel"
    if site.name == GROUPED and len({*formats(config)}) > 1 and jax.__version_info__ < (0, 12):
        # Refused also on devices without the kernel: a run that resumes on another device needs the same history entries.
        return f"a {GROUPED}, which needs `fp8.format` e4m3 before jax 0.12"
    if site.name != GROUPED and any(site.eqn.params["dimension_numbers"][1]):
        return "it has batch dimensions"
    if not site.moved or len(site.params) != 1:
        return "its weight is computed, not a parameter"  # casts, reshapes and slices do not count
    for aval in (site.x_aval, site.w_aval):
        if aval.dtype not in (jnp.bfloat16, jnp.float32):
            return f"an operand is {aval.dtype}"
    sizes = layout_of(site).sizes
    if any(size % multiple for size in sizes):
        return f"its sizes {' x '.join(map(str, sizes))} are not all multiples of {multiple}"
    return ""


def fp8_matmul(config: FP8Config, site: Site, x: Array, w: Array, extra: _Extra, tap: Tap, saved: _Saved = "columns") -> Array:
    """Computes a matmul or grouped matmul in FP8. Its custom backward rule reads quantized operands.

    The cotangents of `tap.amax` and `tap.delayed` are the amax of the arrays and the operands of the weight gradient.
    """
    # Of w, only the dtype is read, which is the dtype of its gradient. `extra` has the group sizes of a grouped matmul.
    layout = layout_of(site, config.accumulation)
    x_dtype, _, dy_dtype = formats(config)
    w_dtype = w.dtype
    is_delayed = tap.delayed is not None
    quantizes_wgrad = wgrad_precision(site, config) == "fp8"
    saves_columns = quantizes_wgrad and saved == "columns"

    def to_fp8(x_MK: Array, scales: Array | None, which: int, dtype: DTypeLike, want: Want) -> FP8Array:
        return block_scaled(x_MK, want) if config.recipe == "mxfp8" else quantize(x_MK, scales, which, dtype, want)

    @jax.custom_vjp
    def run(x: Array, w: Array, extra: _Extra, tap: Tap) -> Array:
        return multiply(x, extra, tap, "rows")[0]

    def multiply(x: Array, extra: _Extra, tap: Tap, want: Want) -> tuple[Array, FP8Array]:
        x_fp8 = to_fp8(layout.x_matrix(x), tap.scales, 0, x_dtype, want)
        return layout.forward(x_fp8, tap.weight, extra, site.y_aval.dtype), x_fp8

    def forward(*args: Any) -> tuple[Array, _Kept]:
        # With symbolic zeros, each argument knows whether it is differentiated. A frozen weight is not: no operand of its wgrad
        # is quantized or saved.
        x, _, extra, tap = jax.tree.map(lambda leaf: leaf.value, args)
        has_wgrad = is_delayed or args[1].perturbed
        y, x_fp8 = multiply(x, extra, tap, "both" if has_wgrad and saves_columns else "rows")
        # Named, because otherwise the split backward saves x, which may have more bytes, and recomputes the columns.
        residual = checkpoint_name(x_fp8.columns, _SAVED) if saves_columns and has_wgrad else x
        return y, (residual if has_wgrad else None, x_fp8.scale, x_fp8.amax, extra, tap._replace(delayed=None))

    def backward(residuals: _Kept, dy: Any) -> tuple[Array, Array | None, None, Tap]:
        x, x_scale, x_amax, extra, tap = residuals
        dy = dy if isinstance(dy, Array) else jnp.zeros(dy.shape, dy.dtype)  # a symbolic zero
        has_wgrad = x is not None
        dy_fp8 = to_fp8(layout.dy_matrix(dy), tap.scales, 2, dy_dtype, "both" if quantizes_wgrad and has_wgrad else "rows")
        dx = layout.dgrad(dy_fp8, tap.weight, extra, site.x_aval.dtype)
        observed = None if tap.amax is None else (x_amax, tap.weight.amax, dy_fp8.amax)
        if not has_wgrad:
            return dx, None, None, Tap(None, None, observed)  # pyright: ignore[reportArgumentType]
        if quantizes_wgrad and not saves_columns and config.recipe == "mxfp8":
            x = block_scaled(layout.x_matrix(x), "columns").columns
        elif quantizes_wgrad and not saves_columns:
            with scope("quantize"):
                scale = scale_for(x_amax, x_dtype) if tap.scales is None else tap.scales[0]
                x = cast_transpose(layout.x_matrix(x), scale, x_dtype, want="columns").columns
        operands: Any = ((x, x_scale), (dy_fp8.columns, dy_fp8.scale)) if quantizes_wgrad else (x, dy)
        dw = None if is_delayed else layout.wgrad(operands[0], operands[1], extra, w_dtype)
        # The barrier makes every operand a separate array. Without it, XLA on a CPU fails for a program with dgrad and wgrad.
        delayed = jax.tree.map(lax.optimization_barrier, operands) if is_delayed else None
        return dx, dw, None, Tap(None, None, observed, delayed)  # pyright: ignore[reportArgumentType]

    run.defvjp(forward, backward, symbolic_zeros=True)
    return run(x, w, extra, tap)


def calibrated(y: Array, x: Array, tap: Tap) -> Array:
    """Returns `y` of a matmul that is not in FP8. The cotangents of `tap.amax` are the amax of x, of the weight and of dy."""

    @jax.custom_vjp
    def run(y: Array, x_amax: Array, tap: Tap) -> Array:
        return y

    def forward(y: Array, x_amax: Array, tap: Tap) -> tuple[Array, tuple[Array, Array]]:
        return y, (x_amax, tap.weight.amax)

    def backward(largest: tuple[Array, Array], dy: Array) -> tuple[Array, None, Tap]:
        return dy, None, Tap(None, None, (*largest, amax(dy)))  # pyright: ignore[reportArgumentType]

    run.defvjp(forward, backward)
    return run(y, amax(x), tap)


@dataclass(frozen=True, eq=False)
class CalibratedProduct(DelayedProduct):
    """A matmul with a delayed weight gradient that is not in FP8, and returns the amax of its arrays."""

    def multiply(self, x: Array, w: Array, extra: _Extra, tap: Operands, given: Tap) -> Array:
        return calibrated(super().multiply(x, w, extra, tap, ()), x, given)


def quantize(x_MK: Array, scales: Array | None, which: int, dtype: DTypeLike, want: Want) -> FP8Array:
    """Quantizes a matrix by `scales[which]`, or by its own amax if `scales` is None. Elements that are not finite are NaN."""
    with scope("quantize"):
        if scales is None:
            known = checkpoint_name(amax(x_MK), _SAVED)
            scale = scale_for(known, dtype)
        else:
            known = None
            scale = scales[which]
        quantized = cast_transpose(x_MK, scale, dtype, want=want)
        # Named, so that a split saves this output. Otherwise it saves a value inside the jitted kernel and changes the kernel.
        largest = checkpoint_name(quantized.amax, _SAVED) if known is None else known
        return FP8Array(quantized.rows, quantized.columns, scale, largest)  # pyright: ignore[reportArgumentType]


def block_scaled(x_MK: Array, want: Want) -> FP8Array:
    """Quantizes a matrix to MXFP8, its rows and its columns separately."""
    with scope("quantize"):
        rows = quantize_blocks(x_MK) if want in ("both", "rows") else None
        columns = quantize_blocks(x_MK.T) if want in ("both", "columns") else None
        return FP8Array(rows, columns, jnp.float32(1), jnp.float32(0))  # pyright: ignore[reportArgumentType]


def dot(a: _Scaled, b: _Scaled, dtype: DTypeLike, accumulation: _Accumulation, barrier: bool = True) -> Array:
    """Contracts FP8 matrices [M, K] and [N, K] over K."""
    if isinstance(a[0], Blocks) and isinstance(b[0], Blocks):
        return block_dot(a[0], b[0], dtype)
    # XLA recognizes an FP8 matmul by the conversion of each operand and its multiplication by a scalar. The scalars become
    # arguments of the cuBLASLt call.
    a_MK, b_NK = (q.astype(jnp.bfloat16) * (1 / scale).astype(jnp.bfloat16) for q, scale in (a, b))  # pyright: ignore[reportAttributeAccessIssue]
    # Full accumulation adds the partial sums of the tensor cores in float32, fast accumulation keeps about 14 bits.
    precision = lax.Precision.DEFAULT if accumulation == "fast" else lax.Precision.HIGHEST
    y = lax.dot_general(a_MK, b_NK, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=dtype)
    # Without the barrier, XLA makes a following GELU the epilogue of the matmul. No FP8 kernel has this epilogue, so the
    # compilation fails.
    return lax.optimization_barrier(y) if barrier else y


def _restored(matrix: Array, shape: Sequence[int], axes: Sequence[int]) -> Array:
    """Reshapes and transposes a matrix back to an array of `shape`. `axes` is the axis order of the matrix."""
    return jnp.transpose(matrix.reshape([shape[i] for i in axes]), np.argsort(axes).tolist())


@dataclass(frozen=True, eq=False)
class DelayedFP8Product(DelayedProduct):
    """An FP8 matmul with a delayed weight gradient.

    wgrad reads the FP8 columns of x and dy, which are the cotangents of a tap. dgrad quantizes dy.
    """

    config: FP8Config
    # If dgrad has the inputs of x as residuals anyway, such as the input of a norm or of GELU, it quantizes x again. Otherwise,
    # the forward pass saves the columns of x.
    saved: _Saved = "x"

    def computed_as(self) -> Wide:
        # An FP8 matmul contracts the last axes.
        m, k, n = DotLayout.from_site(self.site).sizes
        return (m, k), (n, k), (((1,), (1,)), ((), ()))

    def tap(self) -> Operands:
        """Returns zeros like the FP8 columns and scales of x and dy, or like x and dy if wgrad is in bfloat16."""
        if wgrad_precision(self.site, self.config) == "bf16":
            return super().tap()
        m, k, n = DotLayout.from_site(self.site).sizes
        x_dtype, _, dy_dtype = formats(self.config)

        def zeros(aval: replay.Aval, rows: int, dtype: DTypeLike) -> _Scaled:
            def array(*shape: int, dtype: DTypeLike) -> Array:
                return replay.zeros(aval, *self.site.lead, shape=shape, dtype=dtype)

            columns = array(rows, m, dtype=dtype)
            scale = array(dtype=jnp.float32)
            if self.config.recipe == "mxfp8":
                return Blocks(columns, array(rows, m // BLOCK, dtype=jnp.float8_e8m0fnu)), scale
            return columns, scale

        return zeros(self.site.x_aval, k, x_dtype), zeros(self.site.y_aval, n, dy_dtype)

    def multiply(self, x: Array, w: Array, extra: _Extra, tap: Operands, given: Tap) -> Array:
        return fp8_matmul(self.config, self.site, x, w, extra, given._replace(delayed=tap), saved=self.saved)

    def keeping_x(self) -> "DelayedFP8Product":
        return replace(self, saved="columns")

    def weight_gradient(self, tap: Operands, extra: _Extra, dtype: DTypeLike) -> Array:
        if wgrad_precision(self.site, self.config) == "bf16":
            return super().weight_gradient(tap, extra, dtype)

        layout = DotLayout.from_site(self.site, self.config.accumulation)

        def wgrad(tap: Operands) -> Array:
            return layout.wgrad(tap[0], tap[1], extra, dtype, barrier=False)

        # Loops over the iterations of the enclosing scans, because XLA does not recognize a batched FP8 matmul.
        for _ in self.site.lead:
            wgrad = partial(lax.map, wgrad)  # pyright: ignore[reportAssignmentType]
        return wgrad(tap)
