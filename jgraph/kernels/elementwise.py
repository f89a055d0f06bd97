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
    "one_minus_square": lambda x: 1 - x * x,  # not a JAX primitive
    "rsqrt": lax.rsqrt,
    "sqrt": lax.sqrt,
    "square": lambda x: x * x,
    "sub": operator.sub,
    "tanh": lambda x: 2 * _logistic(x, times=2) - 1,
}
"""Operations by the name of the jax primitive, in float32. tanh and erf are accurate to 2e-7."""


@dataclass(frozen=True)
class Elementwise:
    """An elementwise function of arrays, computed in float32. Hashable, so that equal functions share a compiled kernel."""

    inputs: int = 1  # number of arguments, which broadcast with each other
    # Pairs (name of an operation, operands). Values are numbered from 0: first the inputs, then the result of each step. The
    # last value is the result. Without steps, the result is the first input.
    steps: tuple[tuple[str, tuple[Operand, ...]], ...] = ()

    def __call__(self, *inputs: Array) -> Array:
        values = [x.astype(jnp.float32) for x in inputs]
        for name, operands in self.steps:
            values.append(_OPS[name](*(values[i] if isinstance(i, int) else i for i in operands)))
        return values[-1] if self.steps else values[0]


def can(name: str) -> bool:
    """True for the name of an operation of `Elementwise.steps`: a name of `_OPS`."""
    return name in _OPS


IDENTITY = Elementwise()


class Computed(NamedTuple):
    """A function with its arguments, in place of the array [M, N] of its results. `cast_transpose` computes the array."""

    fn: Elementwise  # the implementations of `cast_transpose` round its operations differently
    inputs: tuple[Array, ...]  # bfloat16 or float32. At least one is [M, N]; columns [M, 1] and rows [1, N] are broadcast
