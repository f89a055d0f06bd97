"""Counts the FLOPs of the matmuls in a jaxpr."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from jgraph.autodiff.replay import JITS, SCAN, Atom, aval_of
from jgraph.kernels.grouped import CALLS


def product_flops(fn: Callable[..., Any], *args: Any) -> float:
    """Counts the FLOPs of matmuls, ragged matmuls and convolutions in `fn`, two per multiply-add. Traces `fn` only."""
    # Counts every iteration of a scan, the largest branch of a conditional, and one iteration of a `while` loop. Each row of a
    # ragged matmul counts for one group. Elementwise operations, and kernels other than grouped matmuls, count as zero.
    return _flops_of_jaxpr(jax.make_jaxpr(fn)(*args).jaxpr)


def _flops_of_jaxpr(jaxpr: core.Jaxpr) -> float:
    return sum(map(_flops_of_equation, jaxpr.eqns), 0.0)


def _flops_of_equation(eqn: core.JaxprEqn) -> float:
    name = eqn.primitive.name
    operands, results = [_shape(v) for v in eqn.invars], [_shape(v) for v in eqn.outvars]
    if name in JITS and eqn.params["name"] in CALLS:
        # The jaxpr of the kernel does not show the number of rows.
        return 2.0 * math.prod(operands[0]) * results[0][-1]
    if name in ("dot_general", "ragged_dot_general"):
        ragged = eqn.params.get("ragged_dot_dimension_numbers")
        (contracted, _), _ = ragged.dot_dimension_numbers if ragged else eqn.params["dimension_numbers"]
        # If the ragged axis is contracted, each row contributes to the output of one group only.
        groups = operands[2][-1] if ragged and {*ragged.lhs_ragged_dimensions} & {*contracted} else 1
        return 2.0 * math.prod(results[0]) * math.prod(operands[0][axis] for axis in contracted) / groups
    if name == "conv_general_dilated":
        # Each output element uses every kernel element of its output channel.
        channels = operands[1][eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(results[0]) * (math.prod(operands[1]) // channels)
    if name == "cond":
        return max(_flops_of_jaxpr(branch.jaxpr) for branch in eqn.params["branches"])
    times = eqn.params["length"] if name == SCAN else 1
    return times * sum(map(_flops_of_jaxpr, core.jaxprs_in_params(eqn.params)), 0.0)


def _shape(atom: Atom) -> tuple[int, ...]:
    return getattr(aval_of(atom), "shape", ())
