"""Argument checks and the choice of an implementation, for the entry points of all kernels."""

import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct

from jgraph.errors import ShapeError, check_choice

_Spec = Array | ShapeDtypeStruct


# For an array inside of an argument, `name` is the argument, a dot and the name of the array.
def require(holds: bool, name: str, array: _Spec | None, must: str) -> None:
    """Raises ShapeError unless `holds`. The message shows dtype and shape of `array`; `must` follows "must be"."""
    if not holds:
        found = None if array is None else f"{array.dtype}{list(array.shape)}"
        raise ShapeError(f"`{name}` is {found}: must be {must}", field=name.partition(".")[0])


def require_scalar(name: str, array: Array) -> None:
    require(array.shape == () and array.dtype == jnp.float32, name, array, "a float32 scalar")


def chosen(
    implementation: str,
    runs: bool,  # if the target device runs the Mosaic kernel
    fits: bool,  # if the Mosaic kernel supports the arguments, else the error is `require(fits, name, array, must)`
    name: str,
    array: _Spec,
    must: str,
    others: tuple[str, ...] = ("xla",),
) -> str:
    """Resolves the argument `implementation` of a kernel: `mosaic` or one of `others`. Raises ConfigError or ShapeError."""
    # `mosaic` is not checked against the device. Pallas interprets it on a CPU.
    check_choice("implementation", implementation, ("auto", "mosaic", *others))
    require(fits or implementation != "mosaic", name, array, f"{must} for `implementation` mosaic; pad it, or pass auto")
    if implementation == "auto":
        return "mosaic" if runs and fits else others[0]
    return implementation
