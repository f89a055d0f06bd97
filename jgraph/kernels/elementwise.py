"""Elementwise functions as data: what a kernel computes of its operands before it does its own work."""

import math
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array, lax

Operand: TypeAlias = "int | float"
"""The number of a value before it, or a constant."""

_LOG2_E = math.log2(math.e)


def _logistic(x: Any, times: int = 1) -> Any:
    """Returns 1 / (1 + exp(-times * x)); a root is cheaper than a quotient, and an infinity below it gives 0."""
    root = lax.rsqrt(1 + jnp.exp2(x * (-times * _LOG2_E)))
    return root * root


def _erf(x: Any) -> Any:
    """Returns the error function within 1.5e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26."""
    size = jnp.abs(x)
    root = lax.rsqrt(1 + 0.3275911 * size)
    t = root * root
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    found = 1 - series * jnp.exp2(x * x * -_LOG2_E)
    return jnp.where(x < 0, -found, found)


_OPS = {
    "abs": jnp.abs,
    "add": operator.add,
    "add_any": operator.add,
    "div": operator.truediv,
    "erf": _erf,
    "erfc": lambda x: 1 - _erf(x),
    "exp": lambda x: jnp.exp2(x * _LOG2_E),
    "exp2": jnp.exp2,
    "logistic": _logistic,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "mul": operator.mul,
    "neg": operator.neg,
    "one_minus_square": lambda x: 1 - x * x,
    "rsqrt": lax.rsqrt,
    "sqrt": lax.sqrt,
    "square": lambda x: x * x,
    "sub": operator.sub,
    "tanh": lambda x: 2 * _logistic(x, times=2) - 1,
}
"""By the names of jax's primitives, in float32; tanh and erf within 2e-7."""


@dataclass(frozen=True)
class Elementwise:
    """A function of arrays of one shape, computed in float32. Equal functions are equal, so a kernel is compiled once for all.

    Attributes:
        inputs: how many arrays it has.
        steps: an operation and its operands, each the number of a value, in the order inputs, steps; or a constant. The last
            step is the result; without steps it is the first input.
    """

    inputs: int = 1
    steps: tuple[tuple[str, tuple[Operand, ...]], ...] = ()

    def __call__(self, *inputs: Any) -> Any:
        values = [x.astype(jnp.float32) for x in inputs]
        for name, operands in self.steps:
            values.append(_OPS[name](*(values[i] if isinstance(i, int) else i for i in operands)))
        return values[-1] if self.steps else values[0]


def can(name: str) -> bool:
    """Returns if a primitive of this name may be a step."""
    return name in _OPS


IDENTITY = Elementwise()


class Computed(NamedTuple):
    """An array that only the kernel computes that reads it.

    Attributes:
        fn: the function; implementations agree up to the rounding of its operations.
        inputs: what it is of: at least one array [M, N]; besides, columns M x 1 and rows 1 x N, which are broadcast.
    """

    fn: Elementwise
    inputs: tuple[Array, ...]
