"""Describes the FP8 matmuls of a step, as traced and as compiled."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeAlias

import jax

from jgraph.precision.config import FP8Config
from jgraph.precision.transform import Product
from jgraph.xla.explain import FP8Products

_Loops: TypeAlias = Literal["none", "microbatches"]


def describe(products: Sequence[Product], config: FP8Config, compiled: FP8Products | None, *, loops: _Loops = "none") -> str:
    """Describes the FP8 matmuls of a step in one line for the log.

    Args:
        products: All matmuls with a parameter, from `FP8Trace.products`.
        config: The recipe.
        compiled: The matmuls of the compiled step, from `count`. None if the device emulates FP8.
        loops: Whether the compiled step has loops over `microbatches` and stages. The traced and compiled counts then differ.

    Returns:
        The line.
    """
    quantized = [product for product in products if not product.kept]
    reasons = Counter(product.kept for product in products if product.kept)
    others = "".join(f"; {count} not: {reason}" for reason, count in reasons.items())
    line = f"fp8 ({config.recipe} scaling): {len(quantized)} of {len(products)} matmuls with parameters{others}"
    if compiled is None:
        return f"{line}; emulated in bfloat16"
    if loops == "microbatches":
        return f"{line}; compiled: {compiled.products} for all microbatches, and {compiled.transposes} transposes by XLA"
    expected = sum(3 if product.wgrad == "fp8" else 2 for product in quantized)
    return (
        f"{line}, {expected} with their gradients; compiled: {compiled.products}, and {compiled.transposes} transposes by XLA"
    )


def count(executables: Sequence[jax.stages.Compiled]) -> FP8Products | None:
    """Counts the FP8 matmuls of the executables that a step runs. Returns None if the device emulates FP8."""
    if jax.default_backend() != "gpu":
        return None
    counts = {id(executable): FP8Products.of(executable) for executable in executables}
    found = [counts[id(executable)] for executable in executables]
    return FP8Products(sum(one.products for one in found), sum(one.transposes for one in found))
