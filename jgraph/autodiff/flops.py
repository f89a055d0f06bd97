"""FLOPs of a function's matrix products, counted in its trace."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

from jgraph.autodiff.replay import JITS, SCAN
from jgraph.kernels.grouped import CALLS


def product_flops(fn: Callable[..., Any], *args: Any) -> float:
    """Counts two FLOPs for every multiply-add of the `dot_general`s, `ragged_dot`s and convolutions of `fn`. Runs nothing.

    A loop counts as often as it is known to run, a branch as its largest. Kernels that are no jax program count nothing.

    >>> product_flops(jnp.dot, jnp.ones((2, 3)), jnp.ones((3, 5)))
    60.0
    """
    return _flops(jax.make_jaxpr(fn)(*args).jaxpr)


def _flops(jaxpr: core.Jaxpr) -> float:
    return sum(map(_of, jaxpr.eqns), 0.0)


def _of(eqn: core.JaxprEqn) -> float:
    if eqn.primitive.name in JITS and eqn.params["name"] in CALLS:
        # Rows times two sides of a matrix, which a kernel's own program does not say.
        return 2.0 * math.prod(_shape(eqn.invars[0])) * _shape(eqn.outvars[0])[-1]
    match eqn.primitive.name:
        case "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            return _product(eqn, math.prod(_shape(eqn.invars[0])[axis] for axis in contracted))
        case "ragged_dot_general":
            numbers = eqn.params["ragged_dot_dimension_numbers"]
            (contracted, _), _ = numbers.dot_dimension_numbers
            # Where rows are summed over, each is in the sum of one group alone.
            apart = _shape(eqn.invars[2])[-1] if {*numbers.lhs_ragged_dimensions} & {*contracted} else 1
            return _product(eqn, math.prod(_shape(eqn.invars[0])[axis] for axis in contracted)) / apart
        case "conv_general_dilated":
            # Every element of the kernel but its outputs is used once for each element of the result.
            kernel = _shape(eqn.invars[1])
            return _product(eqn, math.prod(kernel) // kernel[eqn.params["dimension_numbers"].rhs_spec[0]])
        case "cond":
            return max(_flops(branch.jaxpr) for branch in eqn.params["branches"])
    times = eqn.params["length"] if eqn.primitive.name == SCAN else 1
    return times * sum(map(_flops, _inner(eqn)), 0.0)


def _product(eqn: core.JaxprEqn, summed: int) -> float:
    """Returns the FLOPs of a product that sums so many terms for each element of its result."""
    return 2.0 * math.prod(_shape(eqn.outvars[0])) * summed


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _inner(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """Yields the programs among an equation's parameters."""
    for value in eqn.params.values():
        inner = getattr(value, "jaxpr", value)
        if isinstance(inner, core.Jaxpr):
            yield inner
