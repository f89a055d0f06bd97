"""Where the elements of a weight are in its parameter, if only transposes, reshapes and casts compute the weight."""

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import jax.numpy as jnp
from jax.extend import core

from jgraph.autodiff.replay import aval_of

# The factors of each axis, outermost first: pairs of a length and a stride in the flat parameter. An axis of length 1 has none.
Factors: TypeAlias = tuple[tuple[int, int], ...]
View: TypeAlias = tuple[Factors, ...]


def view_of(shape: Sequence[int]) -> View:
    """Returns the view of the parameter itself."""
    return tuple(axis_of([(length, math.prod(shape[i + 1 :]))]) for i, length in enumerate(shape))


def axis_of(factors: Iterable[tuple[int, int]]) -> Factors:
    """Joins the factors of one axis that are adjacent in the parameter, so that equal axes have equal factors."""
    found: list[tuple[int, int]] = []
    for length, stride in factors:
        if found and found[-1][1] == length * stride:
            found[-1] = found[-1][0] * length, stride
        elif length > 1:
            found.append((length, stride))
    return tuple(found)


def moved(view: View | None, eqn: core.JaxprEqn) -> View | None:
    """Returns the view of the result of an equation that changes shape or dtype; None if it has not all elements once."""
    source, result = aval_of(eqn.invars[0]), aval_of(eqn.outvars[0])
    if view is None or len(eqn.outvars) > 1 or result.size != source.size or not jnp.issubdtype(result.dtype, jnp.floating):
        return None
    # The first axes of `view` are those of enclosing scans, which the equation does not see.
    lead, own = view[: len(view) - source.ndim], view[len(view) - source.ndim :]
    if eqn.primitive.name == "transpose":
        return (*lead, *(own[i] for i in eqn.params["permutation"]))
    is_reordered = eqn.primitive.name == "rev" or (eqn.primitive.name == "reshape" and eqn.params.get("dimensions") is not None)
    shaped = None if is_reordered else _reshaped(own, result.shape)
    return None if shaped is None else (*lead, *shaped)


def _reshaped(view: View, shape: Sequence[int]) -> View | None:
    """Divides the factors among new axes; None if an axis is no product of them."""
    factors = [*axis_of(factor for axis in view for factor in axis)]
    axes = []
    for length in shape:
        own = []
        while length > 1:
            inner, stride = factors.pop(0)
            if inner > length and inner % length == 0:
                factors.insert(0, (inner // length, stride))
                inner, stride = length, stride * (inner // length)
            if length % inner:
                return None
            own.append((inner, stride))
            length //= inner
        axes.append(axis_of(own))
    return tuple(axes)


def of_slice(view: View) -> View:
    """Returns the view in a slice of the parameter that has only the given axes."""
    strides = {}
    size = 1
    for length, stride in sorted((factor for axis in view for factor in axis), key=lambda factor: factor[1]):
        strides[stride] = size
        size *= length
    return tuple(axis_of((length, strides[stride]) for length, stride in axis) for axis in view)
