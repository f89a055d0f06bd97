"""Argument checks and the choice of an implementation, for the entry points of all kernels."""

import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct

from jgraph.errors import ShapeError, check_choice

_Spec = Array | ShapeDtypeStruct


def require(holds: bool, name: str, array: _Spec | None, must: str) -> None:
    """Raises ShapeError unless a condition on an array holds.

    Args:
        holds: The condition.
        name: Name of the argument, with a dot for a part of it.
        array: Its value.
        must: Description of the supported values, for the message.
    """
    if not holds:
        found = None if array is None else f"{array.dtype}{list(array.shape)}"
        raise ShapeError(f"`{name}` is {found}: must be {must}", field=name.partition(".")[0])


def require_scalar(name: str, array: Array, dtype: str = "float32") -> None:
    """Raises ShapeError unless an array is a scalar of a dtype."""
    require(array.shape == () and array.dtype == jnp.dtype(dtype), name, array, f"a scalar of {dtype}")


def chosen(
    implementation: str, runs: bool, fits: bool, name: str, array: _Spec, must: str, others: tuple[str, ...] = ("xla",)
) -> str:
    """Returns the implementation to run. `auto` selects the Mosaic kernel if it runs and fits, else the first of `others`.

    Args:
        implementation: Argument of the entry point.
        runs: True if the target device runs the Mosaic kernel.
        fits: True if the Mosaic kernel supports the arguments.
        name: Name of the argument that must fit.
        array: Its value.
        must: Description of the values that the kernel supports, for the message.
        others: All other implementations.

    Raises:
        ConfigError: If the implementation is unknown.
        ShapeError: If it is `mosaic` and the arguments do not fit.
    """
    check_choice("implementation", implementation, ("auto", "mosaic", *others))
    require(fits or implementation != "mosaic", name, array, f"{must} for `implementation` mosaic; pad it, or use auto")
    if implementation == "auto":
        return "mosaic" if runs and fits else others[0]
    return implementation
