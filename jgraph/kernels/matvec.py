"""A matrix by one vector, with what comes before and after it: a token's linear layers, which only read their weights.

XLA makes a norm two kernels more, and an activation or a sum one more; each takes as long as reading some megabytes. Here a
block of threads takes a few rows of the matrix, and norms the vector once for all of them.
"""

# D summed over, F rows, P parts of the rows that an activation joins

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jgraph.errors import ShapeError

# Of 2048 columns and 4 rows a thread of 128 holds 64 numbers, and four such blocks on a multiprocessor have 64 KiB under way.
_ROWS, _COLUMNS, _WARPS = 4, 2048, 4
_LEAST = 16

Activation = Callable[..., Array]


def matvec(
    x_D: Array,
    weights_FD: Array,
    *,
    scale_D: Array | None = None,
    epsilon: float = 0.0,
    activation: Activation | None = None,
    parts: int = 1,
    add_F: Array | None = None,
    dtype: Any = None,
    interpret: bool = False,
) -> Array:
    """Returns `activation(weights @ rms_norm(x)) + add`, each as far as it is given; sums in float32.

    Args:
        x_D: bfloat16 or float32.
        weights_FD: rows are contiguous.
        scale_D: of the norm, which divides by the root of `epsilon` more than the mean square; rounded to x's dtype.
        activation: elementwise in float32, of `parts` arrays: the rows of the matrix in that many parts, one after the other.
        add_F: is added to the rounded result.
        dtype: of the result; x's if None.
        interpret: runs the kernel's body on the CPU, for tests.

    Raises:
        ShapeError: `fits` says no.
    """
    if not fits(x_D, weights_FD, parts):
        found = f"{list(weights_FD.shape)} for `x_D` {list(x_D.shape)}"
        must = f"[F, D] for [D], with F a multiple of {parts * _ROWS} and D of {_LEAST}"
        raise ShapeError(f"`weights_FD` is {found}: must be {must}", field="weights_FD")
    how = (epsilon, activation, parts, jnp.dtype(dtype or x_D.dtype), interpret)
    return _jgraph_matvec(x_D, weights_FD, scale_D, add_F, *how)


def fits(x_D: Any, weights_FD: Any, parts: int = 1) -> bool:
    """Returns whether the kernel takes these shapes."""
    F, D = weights_FD.shape
    return x_D.shape == (D,) and F % (parts * _ROWS) == 0 and D % _LEAST == 0


# One function of the program for all calls: jax gives every call of a kernel a name of its own, and compiles each.
@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7, 8))
def _jgraph_matvec(
    x_D: Array,
    weights_FD: Array,
    scale_D: Array | None,
    add_F: Array | None,
    epsilon: float,
    activation: Activation | None,
    parts: int,
    dtype: Any,
    interpret: bool,
) -> Array:
    F, D = weights_FD.shape[0] // parts, weights_FD.shape[1]
    inputs: dict[str, Array] = {"x": x_D, "weights": weights_FD.reshape(parts, F, D)}
    whole = pl.BlockSpec((D,), lambda i: (0,))
    specs: dict[str, Any] = {"x": whole, "weights": pl.BlockSpec((parts, _ROWS, D), lambda i: (0, i, 0))}
    if scale_D is not None:
        inputs["scale"], specs["scale"] = scale_D, whole
    if add_F is not None:
        inputs["add"], specs["add"] = add_F, pl.BlockSpec((_ROWS,), lambda i: (i,))

    def kernel(*refs: Any) -> None:
        named, out = dict(zip(inputs, refs[:-1], strict=True)), refs[-1]

        def vector(place: Any) -> Array:
            return named["x"][place].astype(jnp.float32)

        def rows(part: int, place: Any) -> Array:
            return named["weights"][part, :, place]

        # Under way while the norm is computed.
        first, *later = _pieces(D)
        loaded = [rows(part, first) for part in range(parts)]
        root: Any = 1.0
        if "scale" in named:
            root = jax.lax.rsqrt(sum(jnp.sum(jnp.square(vector(place))) for place in _pieces(D)) / D + epsilon)
        sums: list[Any] = [0.0] * parts
        for place in (first, *later):
            x = vector(place)
            if "scale" in named:
                x = (x * (root * named["scale"][place].astype(jnp.float32))).astype(x_D.dtype).astype(jnp.float32)
            for part in range(parts):
                tile = loaded[part] if place is first else rows(part, place)
                sums[part] += jnp.sum(tile.astype(jnp.float32) * x[None], axis=1)
        y = activation(*sums) if activation else sums[0]
        y = y.astype(dtype)
        out[...] = y + named["add"][...] if "add" in named else y

    return pl.pallas_call(
        kernel,
        grid=(F // _ROWS,),
        in_specs=list(specs.values()),
        out_specs=pl.BlockSpec((_ROWS,), lambda i: (i,)),
        out_shape=jax.ShapeDtypeStruct((F,), dtype),
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
    )(*inputs.values())


def _pieces(D: int) -> list[Any]:
    """Returns slices that cover a vector: a kernel's arrays have powers of two as sizes."""
    found, start = [], 0
    while start < D:
        size = min(_COLUMNS, 1 << ((D - start).bit_length() - 1))
        found.append(pl.ds(start, size))
        start += size
    return found
