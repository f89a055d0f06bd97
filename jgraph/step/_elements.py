"""Finds out how each result of a jaxpr is computed from the elements of its arguments. Runs nothing.

A value has a form: the expression that computes an element, without the shape of the array. Two parameters are updated by the
same rule if their updates have equal forms.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from jgraph.autodiff import replay

# fmt: off
_ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "clamp",
    "convert_element_type", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor",
    "ge", "gt", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "nextafter", "not", "one_minus_square", "or", "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
})
# fmt: on
_SAME = ("broadcast_in_dim", "copy", "copy_p", "optimization_barrier", "reshape", "squeeze", "stop_gradient")
_CONDITIONS = {"and": "and", "or": "or", "reduce_and": "and", "reduce_or": "or"}


class Value(NamedTuple):
    """How an array is computed.

    `uniform`: all elements are equal, and the same for every layout. `own`: each element from the elements at the same place
    of the arrays of one parameter. `condition`: from conditions on all elements of some parameters. `constant`: any other
    array that does not depend on parameters.
    """

    form: str
    kind: Literal["uniform", "own", "condition", "constant"] = "uniform"
    leaves: frozenset[int] = frozenset()  # the parameters that it depends on


Found: TypeAlias = Value | None
"""None for an array that mixes elements."""


def digest(*parts: Any) -> str:
    """Returns a short form made of others. Nested forms would grow exponentially."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


class Elements(NamedTuple):
    """Follows the elements of the parameters through jaxprs."""

    num_leaves: int

    def outputs(self, jaxpr: core.Jaxpr, consts: Sequence[ArrayLike], inputs: Sequence[Found]) -> list[Found]:
        known: dict[core.Var, Found] = dict(zip(jaxpr.invars, inputs, strict=True))
        known |= {var: _constant(value) for var, value in zip(jaxpr.constvars, consts, strict=True)}

        def read(atom: core.Var | core.Literal) -> Found:
            return _constant(atom.val) if isinstance(atom, core.Literal) else known[atom]

        for eqn in jaxpr.eqns:
            known.update(zip(eqn.outvars, self._of_equation(eqn, [read(atom) for atom in eqn.invars]), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _of_equation(self, eqn: core.JaxprEqn, inputs: list[Found]) -> Sequence[Found]:
        name = eqn.primitive.name
        if name in (*replay.JITS, *replay.CHECKPOINTS, *replay.CUSTOM):
            return self.outputs(replay.body(eqn), replay.body_consts(eqn), inputs)
        if name == "cond":
            index, *operands = inputs
            branches = [self.outputs(branch.jaxpr, branch.consts, operands) for branch in eqn.params["branches"]]
            return [_elementwise([index, *each], name) for each in zip(*branches, strict=True)]
        given = [value for value in inputs if value is not None]
        if len(given) < len(inputs):
            return [None] * len(eqn.outvars)
        sizes = [replay.aval_of(atom).size for atom in eqn.invars]
        results = [replay.aval_of(var).size for var in eqn.outvars]
        if name in _SAME and len(given) == 1:
            return given if given[0].kind == "uniform" or results == sizes else [None]
        if (found := self._condition(name, given, results[0])) is not None:
            return [found]
        # Parameters of other types describe shapes.
        choices = sorted((key, repr(v)) for key, v in eqn.params.items() if isinstance(v, bool | int | float | str | np.dtype))
        if name in _ELEMENTWISE and all(value.kind in ("uniform", "own") for value in given):
            return [_elementwise(given, name, choices)]
        if any(value.leaves for value in given) or not all(map(_is_plain, eqn.params.values())):
            return [None] * len(results)
        form = digest(name, repr(eqn.params), [replay.aval_of(atom).shape for atom in eqn.invars], given)
        return [Value(f"{form} {i}", "uniform" if size == 1 else "constant") for i, size in enumerate(results)]

    def _condition(self, name: str, given: Sequence[Value], size: int) -> Found:
        """A condition on all elements of all parameters, such as that they are finite, is the same for every layout."""
        if not given or (name != "concatenate" and name not in _CONDITIONS):
            return None
        forms = {value.form for value in given}
        if name.startswith("reduce") and given[0].kind == "own":
            forms = {f"{_CONDITIONS[name]} {given[0].form}"}
        elif any(value.kind != "condition" for value in given):
            return None
        if len(forms) > 1 or not min(forms).startswith(_CONDITIONS.get(name, "")):
            return None
        leaves = frozenset[int]().union(*(value.leaves for value in given))
        is_whole = size == 1 and len(leaves) == self.num_leaves
        return Value(min(forms)) if is_whole else Value(min(forms), "condition", leaves)


def _elementwise(inputs: Sequence[Found], *operation: Any) -> Found:
    given = [value for value in inputs if value is not None and value.kind in ("uniform", "own")]
    leaves = frozenset[int]().union(*(value.leaves for value in given))
    if len(given) < len(inputs) or len(leaves) > 1:
        return None
    return Value(digest(operation, [value.form for value in given]), "own" if leaves else "uniform", leaves)


def _is_plain(param: Any) -> bool:
    """False for parameters with programs, because their constants are not part of their text."""
    if isinstance(param, tuple | list):
        return all(map(_is_plain, param))
    return not isinstance(param, core.Jaxpr | core.ClosedJaxpr) and not callable(param)


def _constant(value: ArrayLike) -> Value:
    array = np.asarray(value)
    if array.size == 1 or len({*array.ravel().tolist()}) == 1:
        return Value(f"{array.dtype} {array.ravel()[0].item()}")
    return Value(digest(array.dtype, array.shape, array.tobytes()), "constant")
