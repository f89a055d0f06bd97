"""A matrix product y = x * w whose three products (forward, dgrad, wgrad) have operands in FP8.

Hopper multiplies FP8 operands that are both contracted over their last axis, so every operand is there twice: as rows, and
transposed as columns. An operand is then quantized once for all that read it: x in the forward, for wgrad too; dy in the
backward, for dgrad and wgrad; w once a step (`transform.py`).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jgraph.autodiff.linear import GROUPED, DelayedProduct
from jgraph.kernels import amax, cast_transpose
from jgraph.kernels.quantize import Want
from jgraph.precision.config import FP8Config
from jgraph.precision.scaling import scale_for, seen
from jgraph.scopes import scope

# M rows of x, K contracted, N columns of w

# Else XLA may give a product to Triton, or put those of two microbatches side by side: both multiply in bfloat16 then.
XLA_OPTIONS = ("xla_gpu_enable_triton_gemm=false", "xla_gpu_dot_merger_threshold_mb=0")

_KEPT = "fp8"  # what the split backward keeps of a forward, by name

_MULTIPLE = 16  # of every size of cuBLASLt's FP8 products


def formats(config: FP8Config) -> tuple[Any, Any, Any]:
    """Returns the FP8 dtypes of x, w and dy."""
    return jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.float8_e5m2 if config.format == "hybrid" else jnp.float8_e4m3fn


class Weight(NamedTuple):
    """A quantized weight.

    Attributes:
        rows: [K, N] in FP8, which dgrad reads.
        columns: [N, K], which the forward reads.
        scale: float32 scalar that it was multiplied by.
        amax: float32 scalar.
    """

    rows: Array
    columns: Array
    scale: Array
    amax: Array


class Tap(NamedTuple):
    """What a product takes besides x and w.

    Attributes:
        weight: the quantized w.
        scales: float32 [3], of x, w and dy; None takes them from the arrays themselves.
        amax: float32 [3], not read; its cotangent is the amax of x, w and dy. None where nobody asks.
        late: not read; its cotangent is what `weight_gradient` reads, and w has no gradient. None computes that one at once.
    """

    weight: Weight
    scales: Array | None
    amax: Array | None
    late: Any = None


@dataclass(frozen=True)
class Shape:
    """A `dot_general` of data and weight as one of matrices, [M, K] and [K, N].

    Attributes:
        x_axes, w_axes: the order of their axes in which what is contracted is last (x) or first (w).
        x, w: their shapes in that order.
        contracted: number of contracted axes.
        data: which operand x is.
    """

    x_axes: tuple[int, ...]
    w_axes: tuple[int, ...]
    x: tuple[int, ...]
    w: tuple[int, ...]
    contracted: int
    data: int

    @classmethod
    def of(cls, site: DelayedProduct) -> "Shape":
        (contract, _), x, w = site.eqn.params["dimension_numbers"], site.x_aval.shape, site.w_aval.shape
        x_contract, w_contract = contract[site.data], contract[site.weight]
        x_axes = (*(i for i in range(len(x)) if i not in x_contract), *x_contract)
        w_axes = (*w_contract, *(i for i in range(len(w)) if i not in w_contract))
        return cls(x_axes, w_axes, tuple(x[i] for i in x_axes), tuple(w[i] for i in w_axes), len(x_contract), site.data)

    @property
    def free(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Lengths of the axes that are not contracted, of x and of w."""
        return self.x[: len(self.x) - self.contracted], self.w[self.contracted :]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, K and N."""
        return math.prod(self.free[0]), math.prod(self.w[: self.contracted]), math.prod(self.free[1])

    def x_matrix(self, x: Array) -> Array:
        """Returns x as [M, K]."""
        return jnp.transpose(x, self.x_axes).reshape(self.sizes[0], self.sizes[1])

    def w_matrix(self, w: Array) -> Array:
        """Returns w as [K, N]."""
        return jnp.transpose(w, self.w_axes).reshape(self.sizes[1], self.sizes[2])

    def dy_matrix(self, dy: Array) -> Array:
        """Returns dy as [M, N]."""
        m, _, n = self.sizes
        return dy.reshape(m, n) if self.data == 0 else dy.reshape(n, m).T

    def y(self, y_MN: Array) -> Array:
        """Returns the product in its own shape."""
        rows, columns = self.free
        return y_MN.reshape(*rows, *columns) if self.data == 0 else y_MN.T.reshape(*columns, *rows)

    def dx(self, dx_MK: Array) -> Array:
        """Returns the gradient of x in its own shape."""
        return jnp.transpose(dx_MK.reshape(self.x), _inverse(self.x_axes))

    def dw(self, dw_KN: Array) -> Array:
        """Returns the gradient of w in its own shape."""
        return jnp.transpose(dw_KN.reshape(self.w), _inverse(self.w_axes))


class GroupedShape(NamedTuple):
    """The sizes of a `grouped_dot`, M, K and N; its matrices are quantized as one of [G * K, N]."""

    sizes: tuple[int, int, int]

    def w_matrix(self, w_GKN: Array) -> Array:
        """Returns the matrices of all groups below each other."""
        return w_GKN.reshape(-1, w_GKN.shape[-1])


def shape_of(site: DelayedProduct) -> Shape | GroupedShape:
    """Returns a product as one of matrices."""
    return GroupedShape((site.x_aval.shape[0], *site.w_aval.shape[1:])) if site.name == GROUPED else Shape.of(site)


def wgrad_of(site: DelayedProduct, config: FP8Config) -> Literal["fp8", "bf16"]:
    """Returns in what the gradient of a product's weight is multiplied."""
    return "bf16" if site.name == GROUPED else config.wgrad


def why_not(site: DelayedProduct, config: FP8Config) -> str:
    """Returns why a product cannot be in FP8; empty where it can."""
    if site.name not in ("dot_general", GROUPED):
        return f"a {site.name}"
    if site.name == GROUPED and len({*formats(config)}) > 1 and jax.__version_info__ < (0, 12):
        # On every device: histories of a run have the same entries wherever it goes on.
        return f"a {GROUPED}, which needs `fp8.format` e4m3 before jax 0.12"
    if site.name != GROUPED and any(site.eqn.params["dimension_numbers"][1]):
        return "it has batch dimensions"
    if not site.moved or len(site.params) != 1:
        return "its weight is computed, not a parameter"
    for aval in (site.x_aval, site.w_aval):
        if aval.dtype not in (jnp.bfloat16, jnp.float32):
            return f"an operand is {aval.dtype}"
    sizes = shape_of(site).sizes
    if any(size % _MULTIPLE for size in sizes):
        return f"its sizes {' x '.join(map(str, sizes))} are not all multiples of {_MULTIPLE}"
    return ""


def product(config: FP8Config, site: DelayedProduct, x: Array, w: Array, tap: Tap, *, again: bool = False) -> Array:
    """Computes the product in FP8; w gets a gradient, in its dtype, and is not read. x is kept, or `again` quantized from x."""
    shape, (x_dtype, _, dy_dtype), w_dtype = Shape.of(site), formats(config), w.dtype
    out = site.eqn.outvars[0].aval.dtype  # pyright: ignore[reportAttributeAccessIssue]

    @jax.custom_vjp
    def run(x: Array, w: Array, tap: Tap) -> Array:
        return forward(x, w, tap)[0]

    def forward(x: Array, w: Array, tap: Tap) -> tuple[Array, Any]:
        want = "both" if keeps else "rows"
        rows, columns, scale, largest = quantized(shape.x_matrix(x), tap.scales, 0, x_dtype, want)
        y = _matmul(rows, scale, tap.weight.columns, tap.weight.scale, out, "fast")
        # The name keeps it from being made again from x, of which there may be more bytes, by the split backward.
        kept = checkpoint_name(columns, _KEPT) if keeps else x
        return shape.y(y), (kept, scale, largest, tap._replace(late=None))

    def backward(residuals: Any, dy: Array) -> tuple[Array, Array, Any]:
        kept, x_scale, largest, tap = residuals
        dy_MN, weight = shape.dy_matrix(dy), tap.weight
        rows, columns, scale, dy_largest = quantized(dy_MN, tap.scales, 2, dy_dtype, "both" if in_fp8 else "rows")
        dx = _matmul(rows, scale, weight.rows, weight.scale, site.x_aval.dtype, "full")
        if in_fp8 and not keeps:
            with scope("quantize"):
                own = scale_for(largest, x_dtype) if tap.scales is None else tap.scales[0]
                kept = cast_transpose(shape.x_matrix(kept), own, x_dtype, want="columns").columns
        read = ((kept, x_scale), (columns, scale)) if in_fp8 else (kept, dy)
        observed = None if tap.amax is None else jnp.stack([largest, weight.amax, dy_largest])
        dw = weight_gradient(config, shape, read, w_dtype) if not late else None
        return shape.dx(dx), dw, Tap(None, None, observed, waiting(read) if late else None)  # pyright: ignore[reportArgumentType, reportReturnType]

    late, in_fp8 = tap.late is not None, config.wgrad == "fp8"
    keeps = in_fp8 and not again
    run.defvjp(forward, backward)
    return run(x, w, tap)


def waiting(read: Any) -> Any:
    """Returns what wgrad is to read as the cotangent of a tap's `late`."""
    # Behind a barrier each is an array of its own, also where one program holds both parts: XLA on a CPU fails without.
    return jax.tree.map(lax.optimization_barrier, read)


def weight_gradient(config: FP8Config, shape: Shape, read: Any, dtype: Any, *, apart: bool = True) -> Array:
    """Computes dw from the columns of x and of dy in FP8, each with its scale; or from x and dy, with a bfloat16 wgrad.

    Not `apart`, XLA adds it onto a sum inside the product.
    """
    if config.wgrad == "fp8":
        (x_KM, x_scale), (dy_NM, dy_scale) = read
        return shape.dw(_matmul(x_KM, x_scale, dy_NM, dy_scale, dtype, "full", apart=apart))
    x_MK, dy_MN = shape.x_matrix(read[0]), shape.dy_matrix(read[1])
    return shape.dw(lax.dot_general(x_MK, dy_MN, (((0,), (0,)), ((), ())), preferred_element_type=dtype))


def quantized(x_MK: Array, scales: Array | None, which: int, dtype: Any, want: Want) -> tuple[Any, Any, Array, Array]:
    """Returns an array in FP8, its transpose where it is wanted, the scale to read them by, and the array's amax.

    Args:
        x_MK: the array.
        scales: of a `Tap`.
        which: of its three scales.
        dtype: of the result.
        want: as of `cast_transpose`.
    """
    with scope("quantize"):
        if scales is None:
            known = checkpoint_name(amax(x_MK), _KEPT)
            scale = scale_for(known, dtype)
        else:
            known, scale = None, scales[which]
        found = cast_transpose(x_MK, scale, dtype, want=want)
        # Named, it is kept itself: not a number inside the call that finds it, which then would be another function.
        largest = checkpoint_name(found.amax, _KEPT) if known is None else known
        return found.rows, found.columns, seen(scale, largest), largest


def _matmul(
    a_MK: Array, a_scale: Array, b_NK: Array, b_scale: Array, dtype: Any, sums: Literal["fast", "full"], *, apart: bool = True
) -> Array:
    """Multiplies FP8 matrices over their last axes.

    XLA recognises an FP8 product by its operands, each converted and multiplied by a scalar; the scalars are then the
    product's own. Full sums add up what the tensor cores give in float32, fast ones leave it to them, in about 14 bits.
    """
    a, b = (q.astype(jnp.bfloat16) * (1 / scale).astype(jnp.bfloat16) for q, scale in ((a_MK, a_scale), (b_NK, b_scale)))
    precision = lax.Precision.DEFAULT if sums == "fast" else lax.Precision.HIGHEST
    y = lax.dot_general(a, b, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=dtype)
    # Else XLA makes a GELU behind it the product's epilogue, for which there is no FP8 kernel, and the compilation fails.
    return lax.optimization_barrier(y) if apart else y


def _inverse(axes: tuple[int, ...]) -> list[int]:
    return sorted(range(len(axes)), key=lambda i: axes[i])
