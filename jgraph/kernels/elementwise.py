"""Elementwise functions as hashable lists of operations, for kernels that apply them to their operands."""

import math
import operator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import Array, lax

Operand: TypeAlias = "int | float"
"""Index of an earlier value (int), or a constant (float)."""

_LOG2_E = math.log2(math.e)


def _logistic(x: Array, times: int = 1) -> Array:
    """Returns 1 / (1 + exp(-times * x)). rsqrt is cheaper than a division, and maps infinity to 0."""
    root = lax.rsqrt(1 + jnp.exp2(x * (-times * _LOG2_E)))
    return root * root


def _erf(x: Array) -> Array:
    """Returns the error function within 1.5e-7: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26."""
    size = jnp.abs(x)
    root = lax.rsqrt(1 + 0.3275911 * size)
    t = root * root
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    positive = 1 - series * jnp.exp2(x * x * -_LOG2_E)
    return jnp.where(x < 0, -positive, positive)


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
"""Operations by the name of the jax primitive, in float32. tanh and erf are accurate to 2e-7."""


@dataclass(frozen=True)
class Elementwise:
    """An elementwise function of arrays, computed in float32. Hashable, so that equal functions share a compiled kernel.

    Attributes:
        inputs: Number of input arrays.
        steps: Operations as pairs (name, operands). The name is one of the names that `can` lists. An operand is an int, the
            number of an earlier value, or a float, a constant. Values are numbered from 0: first the inputs, then the result of
            each step. The last value is the result. Without steps, the result is the first input.
    """

    inputs: int = 1
    steps: tuple[tuple[str, tuple[Operand, ...]], ...] = ()

    def __call__(self, *inputs: Array) -> Array:
        """Applies the function.

        Args:
            *inputs: As many arrays as the attribute `inputs`, of any dtype, with shapes that broadcast with each other. Each is
                converted to float32.

        Returns:
            The result, float32 in the broadcast shape.

        Raises:
            KeyError: If the name of a step is unknown.
        """
        values = [x.astype(jnp.float32) for x in inputs]
        for name, operands in self.steps:
            values.append(_OPS[name](*(values[i] if isinstance(i, int) else i for i in operands)))
        return values[-1] if self.steps else values[0]


def can(name: str) -> bool:
    """Checks the name of an operation for `Elementwise.steps`.

    Args:
        name: Name of a JAX primitive, such as `mul`.

    Returns:
        True for abs, add, add_any, div, erf, erfc, exp, exp2, logistic, max, min, mul, neg, one_minus_square (1 - x * x, not a
        JAX primitive), rsqrt, sqrt, square, sub and tanh; else False.
    """
    return name in _OPS


IDENTITY = Elementwise()


class Computed(NamedTuple):
    """A function with its arguments, in place of the array [M, N] of its results. `cast_transpose` computes the array.

    Attributes:
        fn: The function, an `Elementwise`. The Pallas kernel and the XLA implementation of `cast_transpose` round its
            operations differently.
        inputs: A tuple with the arguments of the function, bfloat16 or float32. At least one is [M, N]. Others may be columns
            [M, 1] or rows [1, N], which are broadcast.
    """

    fn: Elementwise
    inputs: tuple[Array, ...]
