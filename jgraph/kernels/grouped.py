"""Grouped matmuls, for the linear layers of a mixture of experts. Each group of rows is multiplied by its own matrix.

The group sizes are arrays on the device. Hopper runs a kernel, `_grouped_mosaic`; other GPUs loop over tiles of rows.
"""

# M rows, sorted by group; G groups, K contracted, N columns

import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jgraph.errors import check_choice
from jgraph.kernels._check import chosen, require, require_scalar
from jgraph.kernels._grouped_mosaic import ALIGNED, SWIZZLED, Order, product, wgrad
from jgraph.kernels._mosaic import LINE, has_wgmma, target

DOT, WGRAD = "_jgraph_grouped_dot", "_jgraph_grouped_wgrad"
CALLS = DOT, "_jgraph_grouped_dgrad", WGRAD, "_jgraph_grouped_dot_fp8"
"""Names of the jitted functions. They identify grouped matmuls, their gradients and FP8 matmuls in a trace."""

ROWS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
"""Dimension numbers of `lax.ragged_dot_general` for a grouped matmul (ROWS), its dgrad (TURNED) and its wgrad (SUMMED)."""
TURNED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
SUMMED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def grouped_dot(x_MK: Array, weights_GKN: Array, sizes_G: Array, *, implementation: str = "auto") -> Array:
    """Multiplies the rows of each group by the matrix of the group. Accumulates in float32.

    The axes are M rows, G groups, K contracted and N columns of the result. Differentiable in `x_MK` and `weights_GKN`.

    Args:
        x_MK: bfloat16 or float32, sorted by group: the rows of group 0 come first, then the rows of group 1.
        weights_GKN: One matrix per group, in the dtype of `x_MK`.
        sizes_G: int32, number of rows of each group; may be zero. The sum must be at most M, which is not checked. Rows beyond
            the sum belong to no group, and their results are zeros.
        implementation: `mosaic`, `tiles`, `xla` or `auto`. `mosaic` is the Pallas kernel (Hopper; jax 0.11 or newer; bfloat16;
            M a multiple of 8, K and N of 64). `tiles` is plain JAX, a loop over tiles of rows. `xla` is
            `lax.ragged_dot_general`, which multiplies all rows by every matrix on an NVIDIA GPU. `auto` selects `mosaic` if the
            device and the arrays permit it, else `tiles` on a GPU in the table `jgraph.device.DEVICES`, else `xla`.

    Returns:
        [M, N] in the dtype of `x_MK`.

    Raises:
        ConfigError: If `implementation` is not one of these names.
        ShapeError: If shapes or dtypes disagree, if an array is empty, or if `implementation` is `mosaic` and the kernel does
            not support the shapes or the dtype.
    """
    _check(sizes_G, x_MK=(x_MK, 2), weights_GKN=(weights_GKN, 3))
    (M, K), (G, rows, N) = x_MK.shape, weights_GKN.shape
    fits = (G, rows) == (sizes_G.size, K) and weights_GKN.dtype == x_MK.dtype
    matching = f"for `x_MK` {list(x_MK.shape)} and `sizes_G` {list(sizes_G.shape)}"
    require(fits, "weights_GKN", weights_GKN, f"{x_MK.dtype}[{sizes_G.size}, {K}, N] {matching}")
    return _dot(x_MK, weights_GKN, sizes_G, _chosen(implementation, (M, K, N), x_MK))


# Checks no argument.
def grouped_dgrad(dy_MN: Array, weights_GKN: Array, sizes_G: Array) -> Array:
    """Computes the gradient of `x_MK` of `grouped_dot`: each row of dy times the transposed matrix of its group."""
    (M, N), K = dy_MN.shape, weights_GKN.shape[1]
    return _jgraph_grouped_dgrad(dy_MN, weights_GKN, sizes_G, _chosen("auto", (M, K, N), dy_MN))


def grouped_dot_fp8(
    x_MK: Array,
    weights: Array,  # one matrix per group, with its axes in `order`
    sizes_G: Array,  # as for `grouped_dot`
    scale: Array,  # float32 scalar. If it is a power of two, the result is rounded only once
    *,
    order: Literal["GNK", "NGK"],
    implementation: str = "auto",
) -> Array:
    """Multiplies the FP8 rows of each group by its FP8 matrix, and the result by `scale`. Not differentiable."""
    # One quantized weight serves forward and the gradient of the rows. Let the weights be G matrices [A, B], quantized by
    # `cast_transpose` as one matrix [G * A, B]. Forward contracts over A, and takes the field `columns`, reshaped to [B, G, A],
    # with `order` NGK. The gradient contracts over B, and takes the field `rows`, reshaped to [G, A, B], with `order` GNK.
    check_choice("order", order, ("GNK", "NGK"))
    _check(sizes_G, _FP8, x_MK=(x_MK, 2), weights=(weights, 3))
    (M, K), G, N = x_MK.shape, sizes_G.size, weights.shape[order.index("N")]
    shape = tuple({"G": G, "N": N, "K": K}[axis] for axis in order)
    require(weights.shape == shape, "weights", weights, f"{list(shape)} for `order` {order}")
    both_e5m2 = x_MK.dtype == weights.dtype == jnp.float8_e5m2
    require(not both_e5m2, "weights", weights, "float8_e4m3fn for `x_MK` float8_e5m2")
    require_scalar("scale", scale)
    # The kernel for FP8 accumulates with about 14 bits. If it does not run or fit, the operands are converted to bfloat16,
    # which is exact.
    dtypes_fit = x_MK.dtype == weights.dtype or jax.__version_info__ >= (0, 12)
    fp8 = implementation == "mosaic" or (dtypes_fit and _fits((M, K, N), x_MK.dtype))
    read_as = x_MK.dtype if fp8 else jnp.dtype(jnp.bfloat16)
    name = _chosen(implementation, (M, K, N), jax.ShapeDtypeStruct(x_MK.shape, read_as))
    return _jgraph_grouped_dot_fp8(x_MK, weights, sizes_G, scale, order, name, read_as)


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _jgraph_grouped_dot_fp8(
    x_MK: Array, weights: Array, sizes_G: Array, scale: Array, order: Order, implementation: str, read_as: jnp.dtype
) -> Array:
    if implementation == "mosaic" and read_as == x_MK.dtype:
        return product(x_MK, weights, sizes_G, order, scale)
    weights_GNK = jnp.moveaxis(weights, order.index("G"), 0).astype(jnp.bfloat16)
    return _product(x_MK.astype(jnp.bfloat16), weights_GNK, sizes_G, "GNK", implementation) * scale.astype(jnp.bfloat16)


def grouped_wgrad(
    x_MK: Array,
    dy_MN: Array,  # rows that are in no group are ignored, but must be finite
    sizes_G: Array,  # the gradient of an empty group is zero
    *,
    dtype: DTypeLike,  # of the result
    add_GKN: Array | None = None,  # the kernel updates it in place if the caller's jit donates it; otherwise XLA copies it
    implementation: str = "auto",
) -> Array:
    """Computes the gradient of the weights of `grouped_dot`, plus `add_GKN`. Not differentiable."""
    _check(sizes_G, x_MK=(x_MK, 2), dy_MN=(dy_MN, 2))
    (M, K), N = x_MK.shape, dy_MN.shape[1]
    require(dy_MN.shape[0] == M and dy_MN.dtype == x_MK.dtype, "dy_MN", dy_MN, f"{x_MK.dtype}[{M}, N] like `x_MK`")
    dtype = jnp.dtype(dtype)
    shape = (sizes_G.size, K, N)
    check_choice("dtype", dtype.name, ("bfloat16", "float32") if add_GKN is None else ("float32",))
    fits = add_GKN is None or (add_GKN.shape == shape and add_GKN.dtype == jnp.float32)
    require(fits, "add_GKN", add_GKN, f"float32{list(shape)}")
    return _jgraph_grouped_wgrad(x_MK, dy_MN, sizes_G, add_GKN, dtype, _chosen(implementation, (M, K, N), x_MK))


_FLOATS, _FP8 = ("bfloat16", "float32"), ("float8_e4m3fn", "float8_e5m2")


def _allowed(dtype: DTypeLike) -> tuple[int, int, int]:
    """Returns the divisors that the kernel requires of M, K and N."""
    return ALIGNED, SWIZZLED if jnp.dtype(dtype).itemsize > 1 else LINE, SWIZZLED


def _fits(shape: tuple[int, int, int], dtype: DTypeLike) -> bool:
    divisible = not any(size % divisor for size, divisor in zip(shape, _allowed(dtype), strict=True))
    return divisible and jnp.dtype(dtype).name in ("bfloat16", *_FP8)


def _chosen(implementation: str, shape: tuple[int, int, int], x_MK: Array | jax.ShapeDtypeStruct) -> str:
    M, K, N = _allowed(x_MK.dtype)
    others = ("xla", "tiles") if target() is None else ("tiles", "xla")
    must = f"bfloat16 or FP8, with M, K, N of {shape} multiples of {M}, {K} and {N},"
    return chosen(implementation, has_wgmma(), _fits(shape, x_MK.dtype), "x_MK", x_MK, must, others)


def _check(sizes_G: Array, dtypes: tuple[str, str] = _FLOATS, **arrays: tuple[Array, int]) -> None:
    for name, (array, rank) in arrays.items():
        fits = array.ndim == rank and array.size > 0 and array.dtype in dtypes
        require(fits, name, array, f"a nonempty array of rank {rank} and dtype {' or '.join(dtypes)}")
    fits = sizes_G.ndim == 1 and sizes_G.size > 0 and sizes_G.dtype == jnp.int32
    require(fits, "sizes_G", sizes_G, "a nonempty array of rank 1 and dtype int32")


# Jitted functions, because jax 0.11 names and compiles every call of a kernel separately.
@functools.partial(jax.jit, static_argnums=3)
def _jgraph_grouped_dot(x_MK: Array, weights_GKN: Array, sizes_G: Array, implementation: str) -> Array:
    return _product(x_MK, weights_GKN, sizes_G, "GKN", implementation)


@functools.partial(jax.jit, static_argnums=3)
def _jgraph_grouped_dgrad(dy_MN: Array, weights_GKN: Array, sizes_G: Array, implementation: str) -> Array:
    return _product(dy_MN, weights_GKN, sizes_G, "GNK", implementation)


def _product(x_MK: Array, weights: Array, sizes_G: Array, order: Order, implementation: str) -> Array:
    if implementation == "xla":
        return _ragged_dot(ROWS if order == "GKN" else TURNED, x_MK, weights, sizes_G).astype(x_MK.dtype)
    return (product if implementation == "mosaic" else _product_tiles)(x_MK, weights, sizes_G, order)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _jgraph_grouped_wgrad(
    x_MK: Array, dy_MN: Array, sizes_G: Array, add_GKN: Array | None, dtype: jnp.dtype, implementation: str
) -> Array:
    if implementation == "mosaic":
        return wgrad(x_MK, dy_MN, sizes_G, add_GKN, dtype)
    args = x_MK, dy_MN, sizes_G
    dw_GKN = _wgrad_tiles(*args) if implementation == "tiles" else _ragged_dot(SUMMED, *args)
    return dw_GKN.astype(dtype) if add_GKN is None else add_GKN + dw_GKN


def _dot_backward(implementation: str, residuals: tuple[Array, ...], dy_MN: Array) -> tuple[Array, Array, None]:
    x_MK, weights_GKN, sizes_G = residuals
    dx_MK = _jgraph_grouped_dgrad(dy_MN, weights_GKN, sizes_G, implementation)
    return dx_MK, _jgraph_grouped_wgrad(x_MK, dy_MN, sizes_G, None, weights_GKN.dtype, implementation), None


_dot = jax.custom_vjp(_jgraph_grouped_dot, nondiff_argnums=(3,))
_dot.defvjp(lambda *args: (_dot(*args), args[:3]), _dot_backward)


def _ragged_dot(numbers: lax.RaggedDotDimensionNumbers, lhs: Array, rhs: Array, sizes_G: Array) -> Array:
    """Computes `lax.ragged_dot_general` with a float32 result, also under a `jax.vmap` that maps none of the arguments."""

    # JAX's batching rule raises NotImplementedError for such a `vmap`. `jgraph.mesh.with_batch_axes` uses one to bind axes.
    def plain(lhs: Array, rhs: Array, sizes_G: Array) -> Array:
        return lax.ragged_dot_general(lhs, rhs, sizes_G, numbers, preferred_element_type=jnp.float32)

    def batched(axis_size: int, mapped: list[bool], *args: Array) -> tuple[Array, bool]:
        if any(mapped):
            return jax.vmap(plain, tuple(0 if is_mapped else None for is_mapped in mapped))(*args), True
        return dot(*args), False

    dot = jax.custom_batching.custom_vmap(plain)
    dot.def_vmap(batched)
    return dot(lhs, rhs, sizes_G)


_ROWS = 256
"""Rows per tile of the implementation `tiles`."""


def _cumulative(counts: Array) -> Array:
    # XLA fuses a masked sum into one kernel, but not a cumulative sum.
    return jnp.sum(jnp.where(jnp.tri(counts.size, dtype=bool), counts, 0), axis=1, dtype=jnp.int32)


# `body` maps the carry, a group, the first row of a tile (a multiple of `ALIGNED`) and a mask [rows, 1], True for the rows of
# the group, to the carry. Rows beyond the sum of the sizes are in no group.
def _over_tiles(sizes_G: Array, M: int, body: Callable[[Array, Array, Array, Array], Array], init: Array) -> Array:
    """Loops over tiles of rows. Each tile has the rows of one group."""
    # At most twice the minimal work if every group has at least as many rows as a tile.
    G = sizes_G.size
    end = jnp.concatenate([jnp.minimum(_cumulative(sizes_G), M), jnp.full((1,), M, jnp.int32)])
    begin = jnp.concatenate([jnp.zeros((1,), jnp.int32), end[:-1]])
    aligned = begin // ALIGNED * ALIGNED
    counts = jnp.where(end > begin, (end - aligned + _ROWS - 1) // _ROWS, 0)
    ends = _cumulative(counts)
    tile = jnp.arange((M + (ALIGNED - 1) * (G + 1)) // _ROWS + G + 1, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(tile[:, None] >= ends, axis=1, dtype=jnp.int32), G)
    first = aligned[group] + (tile - (ends - counts)[group]) * _ROWS
    tiles = group, first, jnp.maximum(begin[group], first), jnp.minimum(end[group], first + _ROWS)

    def step(tile: Array, carry: Array) -> Array:
        group, first, begin, end = (part[tile] for part in tiles)
        row = first + jnp.arange(_ROWS)[:, None]
        return body(carry, jnp.minimum(group, G - 1), first, (row >= begin) & (row < end) & (group < G))

    return lax.fori_loop(0, group.size, step, init)


def _padded(x_MK: Array) -> Array:
    return jnp.pad(x_MK, ((0, _ROWS), (0, 0)))


def _product_tiles(x_MK: Array, weights: Array, sizes_G: Array, order: Order) -> Array:
    M = x_MK.shape[0]
    x = _padded(x_MK)

    def step(y: Array, group: Array, first: Array, is_row: Array) -> Array:
        weight = weights[group] if order == "GKN" else weights[group].T
        rows = lax.dynamic_slice_in_dim(x, first, _ROWS)
        new = jnp.dot(rows, weight, preferred_element_type=jnp.float32).astype(y.dtype)
        new = jnp.where(is_row, new, lax.dynamic_slice_in_dim(y, first, _ROWS))
        return lax.dynamic_update_slice_in_dim(y, new, first, 0)

    return _over_tiles(sizes_G, M, step, jnp.zeros((M + _ROWS, weights.shape[order.index("N")]), x.dtype))[:M]


def _wgrad_tiles(x_MK: Array, dy_MN: Array, sizes_G: Array) -> Array:
    x, dy = _padded(x_MK), _padded(dy_MN)

    def step(dw: Array, group: Array, first: Array, is_row: Array) -> Array:
        part = jnp.where(is_row, lax.dynamic_slice_in_dim(x, first, _ROWS), 0)
        new = jnp.dot(part.T, lax.dynamic_slice_in_dim(dy, first, _ROWS), preferred_element_type=jnp.float32)
        return dw.at[group].add(new)

    dw_GKN = jnp.zeros((sizes_G.size, x.shape[1], dy.shape[1]), jnp.float32)
    return _over_tiles(sizes_G, x_MK.shape[0], step, dw_GKN)
