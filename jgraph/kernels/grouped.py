"""Grouped matmuls: groups of rows times a matrix each, as the linear layers of a mixture of experts.

The sizes of the groups are known on the device only. Hopper has a kernel, `_grouped_mosaic`; other GPUs loop over tiles.
"""

# M rows, sorted by group; G groups, K summed over, N columns

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jgraph.errors import ShapeError, check_choice
from jgraph.kernels._grouped_blocks import ALIGNED, SWIZZLED
from jgraph.kernels._grouped_mosaic import Order, product, wgrad
from jgraph.kernels._mosaic import LINE, has_wgmma, target

DOT, WGRAD = "_jgraph_grouped_dot", "_jgraph_grouped_wgrad"
CALLS = DOT, "_jgraph_grouped_dgrad", WGRAD, "_jgraph_grouped_dot_fp8"
"""Names of the jitted functions, which identify a grouped matmul, its gradients, and FP8 ones in a trace."""

ROWS = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
"""Dimension numbers of a grouped matmul as a `ragged_dot_general`, then of its dgrad and its wgrad."""
TURNED = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
SUMMED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())


def grouped_dot(
    x_MK: Array, weights_GKN: Array, sizes_G: Array, *, implementation: str = "auto", interpret: bool = False
) -> Array:
    """Multiplies the rows of each group with the group's matrix; sums in float32.

    Differentiable in rows and weights.

    Args:
        x_MK: bfloat16 or float32; the rows of group 0 come first, then the rows of group 1.
        weights_GKN: One matrix per group, in the dtype of `x_MK`.
        sizes_G: int32, number of rows of each group; may be zero. Rows beyond their sum give zeros.
        implementation: `mosaic` (Hopper; jax 0.11 or newer; bfloat16; M a multiple of 8, K and N of 64), `tiles` (plain jax,
            a loop over tiles of rows), `xla` (`lax.ragged_dot`, which multiplies all rows by every matrix on an NVIDIA GPU), or
            `auto`: on a GPU the first supported one, elsewhere `xla`.
        interpret: Runs the kernel in Pallas' interpreter on the CPU, for tests.

    Returns:
        [M, N] in the dtype of `x_MK`.

    Raises:
        ConfigError: If `implementation` is unknown.
        ShapeError: If shapes or dtypes disagree, or the implementation does not support them.
    """
    _check(implementation, sizes_G, x_MK=(x_MK, 2), weights_GKN=(weights_GKN, 3))
    (M, K), (G, rows, N) = x_MK.shape, weights_GKN.shape
    if (G, rows) != (sizes_G.size, K):
        raise ShapeError(f"`weights_GKN` is {weights_GKN.shape}: must be ({sizes_G.size}, {K}, N)", field="weights_GKN")
    if weights_GKN.dtype != x_MK.dtype:
        raise ShapeError(f"`weights_GKN` is {weights_GKN.dtype}: must be {x_MK.dtype} as `x_MK` is", field="weights_GKN")
    return _dot(x_MK, weights_GKN, sizes_G, _chosen(implementation, (M, K, N), x_MK.dtype), interpret)


def grouped_dgrad(dy_MN: Array, weights_GKN: Array, sizes_G: Array) -> Array:
    """Computes the gradient of the rows of `grouped_dot`: rows of dy times their group's transposed matrix."""
    (M, N), K = dy_MN.shape, weights_GKN.shape[1]
    return _jgraph_grouped_dgrad(dy_MN, weights_GKN, sizes_G, choose((M, K, N), dy_MN.dtype), False)


def grouped_dot_fp8(
    x_MK: Array,
    weights: Array,
    sizes_G: Array,
    scale: Array,
    *,
    order: Literal["GNK", "NGK"],
    implementation: str = "auto",
    interpret: bool = False,
) -> Array:
    """Multiplies FP8 rows of each group with the group's FP8 matrix, and the sums with a scale.

    `cast_transpose` of weights [G * K, N] serves both directions: the forward pass reads its columns as `NGK`, and the dgrad
    its rows as `GNK`. The tensor cores accumulate with about 14 bits. It has no gradient.

    Args:
        x_MK: float8_e4m3fn or float8_e5m2; the rows of group 0 come first, then the rows of group 1.
        weights: One matrix per group, with axes in `order`. Only one operand can be float8_e5m2.
        sizes_G: As for `grouped_dot`.
        scale: float32 scalar. The result is rounded once if it is a power of two.
        order: Axes of `weights`: groups G, columns of the result N, summed axis K.
        implementation: As for `grouped_dot`; `mosaic` needs K to be a multiple of 128, and jax 0.12 or newer for two dtypes.
            `auto` converts unsupported operands to bfloat16, which is exact.
        interpret: As for `grouped_dot`.

    Returns:
        [M, N], bfloat16.

    Raises:
        ConfigError: If `implementation` or `order` is unknown.
        ShapeError: If shapes or dtypes disagree, or the implementation does not support them.
    """
    check_choice("order", order, ("GNK", "NGK"))
    _check(implementation, sizes_G, _FP8, x_MK=(x_MK, 2), weights=(weights, 3))
    (M, K), G, N = x_MK.shape, sizes_G.size, weights.shape[order.index("N")]
    shape = tuple({"G": G, "N": N, "K": K}[axis] for axis in order)
    if weights.shape != shape:
        raise ShapeError(f"`weights` is {weights.shape}: must be {shape}, as `order` is {order}", field="weights")
    if x_MK.dtype == weights.dtype == jnp.float8_e5m2:
        raise ShapeError("`weights` is float8_e5m2: must be float8_e4m3fn, as `x_MK` is not", field="weights")
    if scale.shape or scale.dtype != jnp.float32:
        raise ShapeError(f"`scale` is {scale.dtype}{list(scale.shape)}: must be a float32 scalar", field="scale")
    of_one = x_MK.dtype == weights.dtype or jax.__version_info__ >= (0, 12)
    read_as = "fp8" if implementation == "mosaic" or (of_one and _fits((M, K, N), x_MK.dtype)) else "bfloat16"
    implementation = _chosen(implementation, (M, K, N), x_MK.dtype if read_as == "fp8" else jnp.dtype(jnp.bfloat16))
    return _jgraph_grouped_dot_fp8(x_MK, weights, sizes_G, scale, order, implementation, read_as, interpret)


@functools.partial(jax.jit, static_argnames=("order", "implementation", "read_as", "interpret"))
def _jgraph_grouped_dot_fp8(
    x_MK: Array,
    weights: Array,
    sizes_G: Array,
    scale: Array,
    order: Order,
    implementation: str,
    read_as: Literal["fp8", "bfloat16"],
    interpret: bool,
) -> Array:
    if implementation == "mosaic" and read_as == "fp8":
        return product(x_MK, weights, sizes_G, order, interpret, scale)
    weights_GNK = jnp.moveaxis(weights, order.index("G"), 0).astype(jnp.bfloat16)
    y_MN = _product(x_MK.astype(jnp.bfloat16), weights_GNK, sizes_G, implementation, interpret, transposed=True)
    return y_MN * scale.astype(jnp.bfloat16)


def grouped_wgrad(
    x_MK: Array,
    dy_MN: Array,
    sizes_G: Array,
    *,
    dtype: DTypeLike,
    add_GKN: Array | None = None,
    implementation: str = "auto",
    interpret: bool = False,
) -> Array:
    """Computes the gradient of the weights of `grouped_dot`: each group's transposed rows times its rows of dy.

    Args:
        x_MK: bfloat16 or float32. Rows beyond the sum of the sizes are ignored.
        dy_MN: Same dtype as `x_MK`. Ignored rows must be finite.
        sizes_G: int32, number of rows of each group; an empty group gives zeros.
        dtype: Dtype of the result, bfloat16 or float32; float32 with `add_GKN`.
        add_GKN: float32, added to the result. Nothing is copied if a jitted function donates it.
        implementation: As for `grouped_dot`.
        interpret: As for `grouped_dot`.

    Returns:
        [G, K, N] in `dtype`.

    Raises:
        ConfigError: If `implementation` or `dtype` is unknown.
        ShapeError: If shapes or dtypes disagree, or the implementation does not support them.
    """
    _check(implementation, sizes_G, x_MK=(x_MK, 2), dy_MN=(dy_MN, 2))
    (M, K), N = x_MK.shape, dy_MN.shape[1]
    if dy_MN.shape[0] != M or dy_MN.dtype != x_MK.dtype:
        message = f"`dy_MN` is {dy_MN.dtype}{list(dy_MN.shape)}: must be {x_MK.dtype} of shape ({M}, N), as `x_MK` has it"
        raise ShapeError(message, field="dy_MN")
    dtype = jnp.dtype(dtype)
    check_choice("dtype", dtype.name, ("bfloat16", "float32") if add_GKN is None else ("float32",))
    shape = (sizes_G.size, K, N)
    if add_GKN is not None and (add_GKN.shape != shape or add_GKN.dtype != jnp.float32):
        message = f"`add_GKN` is {add_GKN.dtype}{list(add_GKN.shape)}: must be float32 of shape {shape}"
        raise ShapeError(message, field="add_GKN")
    return _jgraph_grouped_wgrad(
        x_MK, dy_MN, sizes_G, add_GKN, dtype, _chosen(implementation, (M, K, N), x_MK.dtype), interpret
    )


def choose(shape: tuple[int, int, int], dtype: DTypeLike) -> str:
    """Returns the implementation that `auto` selects on the target device for (M, K, N)."""
    if target() is None:
        return "xla"
    return "mosaic" if has_wgmma() and _fits(shape, dtype) else "tiles"


_FLOATS, _FP8 = ("bfloat16", "float32"), ("float8_e4m3fn", "float8_e5m2")


def _allowed(dtype: DTypeLike) -> tuple[int, int, int]:
    """Returns the numbers that M, K and N of the kernel must be multiples of."""
    return ALIGNED, SWIZZLED if jnp.dtype(dtype).itemsize > 1 else LINE, SWIZZLED


def _fits(shape: tuple[int, int, int], dtype: DTypeLike) -> bool:
    even = not any(size % of for size, of in zip(shape, _allowed(dtype), strict=True))
    return even and jnp.dtype(dtype).name in ("bfloat16", *_FP8)


def _chosen(implementation: str, shape: tuple[int, int, int], dtype: jnp.dtype) -> str:
    if implementation == "auto":
        return choose(shape, dtype)
    if implementation == "mosaic" and not _fits(shape, dtype):
        M, K, N = _allowed(dtype)
        message = f"`x_MK` is {dtype} with M, K, N of {shape}: must be bfloat16 or FP8 and multiples of {M}, {K} and {N}"
        raise ShapeError(f"{message} for `implementation` mosaic; pad them, or use auto", field="x_MK")
    return implementation


def _check(implementation: str, sizes_G: Array, dtypes: tuple[str, str] = _FLOATS, **arrays: tuple[Array, int]) -> None:
    check_choice("implementation", implementation, ("auto", "mosaic", "tiles", "xla"))
    for name, (array, rank) in arrays.items():
        if array.ndim != rank or not array.size or array.dtype not in dtypes:
            message = f"`{name}` is {array.dtype}{list(array.shape)}: must be {' or '.join(dtypes)}, not empty, of rank {rank}"
            raise ShapeError(message, field=name)
    if sizes_G.ndim != 1 or not sizes_G.size or sizes_G.dtype != jnp.int32:
        raise ShapeError(f"`sizes_G` is {sizes_G.dtype}{list(sizes_G.shape)}: must be int32 of rank 1", field="sizes_G")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _dot(x_MK: Array, weights_GKN: Array, sizes_G: Array, implementation: str, interpret: bool) -> Array:
    return _jgraph_grouped_dot(x_MK, weights_GKN, sizes_G, implementation, interpret)


def _dot_forward(x_MK: Array, weights_GKN: Array, sizes_G: Array, implementation: str, interpret: bool) -> Any:
    return _jgraph_grouped_dot(x_MK, weights_GKN, sizes_G, implementation, interpret), (x_MK, weights_GKN, sizes_G)


def _dot_backward(implementation: str, interpret: bool, kept: tuple[Array, ...], dy_MN: Array) -> tuple[Any, ...]:
    x_MK, weights_GKN, sizes_G = kept
    dx_MK = _jgraph_grouped_dgrad(dy_MN, weights_GKN, sizes_G, implementation, interpret)
    dw_GKN = _jgraph_grouped_wgrad(x_MK, dy_MN, sizes_G, None, weights_GKN.dtype, implementation, interpret)
    return dx_MK, dw_GKN, None


_dot.defvjp(_dot_forward, _dot_backward)


# Jitted functions, because jax 0.11 names and compiles every call of a kernel separately.
@functools.partial(jax.jit, static_argnames=("implementation", "interpret"))
def _jgraph_grouped_dot(x_MK: Array, weights_GKN: Array, sizes_G: Array, implementation: str, interpret: bool) -> Array:
    return _product(x_MK, weights_GKN, sizes_G, implementation, interpret, transposed=False)


@functools.partial(jax.jit, static_argnames=("implementation", "interpret"))
def _jgraph_grouped_dgrad(dy_MN: Array, weights_GKN: Array, sizes_G: Array, implementation: str, interpret: bool) -> Array:
    return _product(dy_MN, weights_GKN, sizes_G, implementation, interpret, transposed=True)


def _product(x_MK: Array, weights: Array, sizes_G: Array, implementation: str, interpret: bool, *, transposed: bool) -> Array:
    if implementation == "mosaic":
        return product(x_MK, weights, sizes_G, "GNK" if transposed else "GKN", interpret)
    return {"tiles": _product_tiles, "xla": _product_xla}[implementation](x_MK, weights, sizes_G, transposed)


@functools.partial(jax.jit, static_argnames=("dtype", "implementation", "interpret"))
def _jgraph_grouped_wgrad(
    x_MK: Array,
    dy_MN: Array,
    sizes_G: Array,
    add_GKN: Array | None,
    dtype: jnp.dtype,
    implementation: str,
    interpret: bool,
) -> Array:
    if implementation == "mosaic":
        return wgrad(x_MK, dy_MN, sizes_G, add_GKN, dtype, interpret)
    dw_GKN = {"tiles": _wgrad_tiles, "xla": _wgrad_xla}[implementation](x_MK, dy_MN, sizes_G)
    return dw_GKN.astype(dtype) if add_GKN is None else add_GKN + dw_GKN


def _product_xla(x_MK: Array, weights: Array, sizes_G: Array, transposed: bool) -> Array:
    return _ragged_dot(TURNED if transposed else ROWS, x_MK, weights, sizes_G).astype(x_MK.dtype)


def _wgrad_xla(x_MK: Array, dy_MN: Array, sizes_G: Array) -> Array:
    return _ragged_dot(SUMMED, x_MK, dy_MN, sizes_G)


def _ragged_dot(numbers: lax.RaggedDotDimensionNumbers, lhs: Array, rhs: Array, sizes_G: Array) -> Array:
    """Computes `lax.ragged_dot_general` in float32, also under a `jax.vmap` that maps none of the arguments.

    JAX raises NotImplementedError there, and `jgraph.mesh.with_batch_axes` binds axes by such a `vmap`.
    """

    def plain(lhs: Array, rhs: Array, sizes_G: Array) -> Array:
        return lax.ragged_dot_general(lhs, rhs, sizes_G, numbers, preferred_element_type=jnp.float32)

    def batched(axis_size: int, mapped: list[bool], *args: Array) -> tuple[Array, bool]:
        if any(mapped):
            return jax.vmap(plain, tuple(0 if is_mapped else None for is_mapped in mapped))(*args), True
        return dot(*args), False

    dot = jax.custom_batching.custom_vmap(plain)
    dot.def_vmap(batched)
    return dot(lhs, rhs, sizes_G)


class _Tiles(NamedTuple):
    """Tiles of rows, each of one group. Group G holds the rows beyond the sum of the sizes.

    Attributes:
        group: int32[T], the tile's group.
        first: int32[T], the tile's first row, a multiple of `ALIGNED`.
        begin: int32[T], first row of the tile that belongs to the group.
        end: int32[T], row after the last that belongs to the group.
    """

    group: Array
    first: Array
    begin: Array
    end: Array


def _bounds(sizes_G: Array, M: int) -> tuple[Array, Array]:
    """Returns the first row of each group and the row after its last. The last group holds the rows beyond the sum."""
    G = sizes_G.size
    # XLA fuses sums over a mask into one kernel, unlike a cumulative sum.
    ends = jnp.sum(jnp.where(jnp.tri(G, dtype=bool), sizes_G, 0), axis=1, dtype=jnp.int32)
    ends = jnp.minimum(ends, M)
    ends = jnp.concatenate([ends, jnp.full((1,), M, jnp.int32)])
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), ends[:-1]]), ends


def _tiles(sizes_G: Array, M: int, rows: int) -> _Tiles:
    G = sizes_G.size
    begin, end = _bounds(sizes_G, M)
    aligned = begin // ALIGNED * ALIGNED
    counts = jnp.where(end > begin, (end - aligned + rows - 1) // rows, 0)
    ends = jnp.sum(jnp.where(jnp.tri(G + 1, dtype=bool), counts, 0), axis=1, dtype=jnp.int32)
    tile = jnp.arange((M + (ALIGNED - 1) * (G + 1)) // rows + G + 1, dtype=jnp.int32)
    group = jnp.sum(tile[:, None] >= ends, axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, G)
    first = aligned[group] + (tile - (ends - counts)[group]) * rows
    begin, end = jnp.maximum(begin[group], first), jnp.minimum(end[group], first + rows)
    return _Tiles(group, first, begin, end)


_ROWS = 256
"""Rows of a tile of the loop."""


def _product_tiles(x_MK: Array, weights: Array, sizes_G: Array, transposed: bool) -> Array:
    """Loops over tiles. At most twice the minimal work if groups have at least as many rows as a tile."""
    (M, _), G = x_MK.shape, sizes_G.size
    tiles = _tiles(sizes_G, M, _ROWS)
    x = jnp.pad(x_MK, ((0, _ROWS), (0, 0)))
    y = jnp.zeros((M + _ROWS, weights.shape[1 if transposed else 2]), x.dtype)

    def step(tile: Array, y: Array) -> Array:
        group, first, begin, end = (part[tile] for part in tiles)
        weight = weights[jnp.minimum(group, G - 1)]
        new = jnp.dot(
            lax.dynamic_slice_in_dim(x, first, _ROWS), weight.T if transposed else weight, preferred_element_type=jnp.float32
        ).astype(y.dtype)
        row = first + jnp.arange(_ROWS)[:, None]
        new = jnp.where((row >= begin) & (row < end) & (group < G), new, lax.dynamic_slice_in_dim(y, first, _ROWS))
        return lax.dynamic_update_slice_in_dim(y, new, first, 0)

    return lax.fori_loop(0, tiles.group.size, step, y)[:M]


def _wgrad_tiles(x_MK: Array, dy_MN: Array, sizes_G: Array) -> Array:
    M, G = x_MK.shape[0], sizes_G.size
    tiles = _tiles(sizes_G, M, _ROWS)
    x, dy = (jnp.pad(array, ((0, _ROWS), (0, 0))) for array in (x_MK, dy_MN))

    def step(tile: Array, dw: Array) -> Array:
        group, first, begin, end = (part[tile] for part in tiles)
        row = first + jnp.arange(_ROWS)[:, None]
        part = jnp.where((row >= begin) & (row < end) & (group < G), lax.dynamic_slice_in_dim(x, first, _ROWS), 0)
        new = jnp.dot(part.T, lax.dynamic_slice_in_dim(dy, first, _ROWS), preferred_element_type=jnp.float32)
        return dw.at[jnp.minimum(group, G - 1)].add(new)

    return lax.fori_loop(0, tiles.group.size, step, jnp.zeros((G, x.shape[1], dy.shape[1]), jnp.float32))
