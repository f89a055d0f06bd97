"""Argument checks and the choice of an implementation, for the entry points of all kernels."""

import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct

from jgraph.errors import ShapeError, check_choice

_Spec = Array | ShapeDtypeStruct


def require(holds: bool, name: str, array: _Spec | None, must: str) -> None:
    """Checks a condition on an array.

    Args:
        holds: The condition.
        name: Name of the argument. For an array inside of the argument, a dot and the name of the array follow.
        array: Value of the argument, an array or its shape; None for a missing array. The message shows its dtype and shape.
        must: Description of the allowed values. The message appends it to "must be".

    Raises:
        ShapeError: If `holds` is false.
    """
    if not holds:
        found = None if array is None else f"{array.dtype}{list(array.shape)}"
        raise ShapeError(f"`{name}` is {found}: must be {must}", field=name.partition(".")[0])


def require_scalar(name: str, array: Array, dtype: str = "float32") -> None:
    """Checks that an array is a scalar.

    Args:
        name: Name of the argument, for the message.
        array: Value of the argument.
        dtype: Name of the required dtype.

    Raises:
        ShapeError: If `array` has axes or another dtype.
    """
    require(array.shape == () and array.dtype == jnp.dtype(dtype), name, array, f"a {dtype} scalar")


def chosen(
    implementation: str, runs: bool, fits: bool, name: str, array: _Spec, must: str, others: tuple[str, ...] = ("xla",)
) -> str:
    """Resolves the argument `implementation` of a kernel.

    Args:
        implementation: `auto`, `mosaic` or one of `others`.
        runs: True if the target device runs the Mosaic kernel.
        fits: True if the Mosaic kernel supports the arguments.
        name: Name of the argument that the message shows if `fits` is false.
        array: Value of that argument.
        must: Description of the arrays that the Mosaic kernel supports. The message appends it to "must be".
        others: The other implementations. `auto` selects the first one if the Mosaic kernel does not run or fit.

    Returns:
        `mosaic` or one of `others`.

    Raises:
        ConfigError: If `implementation` is not one of the allowed names.
        ShapeError: If `implementation` is `mosaic` and `fits` is false. `mosaic` is not checked against the device.
    """
    check_choice("implementation", implementation, ("auto", "mosaic", *others))
    require(fits or implementation != "mosaic", name, array, f"{must} for `implementation` mosaic; pad it, or pass auto")
    if implementation == "auto":
        return "mosaic" if runs and fits else others[0]
    return implementation
