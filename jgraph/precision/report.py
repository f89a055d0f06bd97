"""Describes the matmuls of a step that are in FP8, as they were traced and compiled."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import jax

from jgraph.precision.config import FP8Config
from jgraph.precision.transform import Product
from jgraph.xla.explain import FP8Products


def describe(
    products: Sequence[Product],
    config: FP8Config,
    compiled: FP8Products | None,
    *,
    loops: Literal["none", "microbatches"] = "none",
) -> str:
    """Returns a line for the log.

    Args:
        products: All matmuls with a parameter, as `Plan.products` lists them.
        config: The recipe.
        compiled: The matmuls of the compiled step, from `count`. None if the device emulates FP8.
        loops: Whether the compiled step has loops over `microbatches` and stages. The traced and compiled counts then differ.
    """
    inside = [product for product in products if not product.kept]
    reasons = Counter(product.kept for product in products if product.kept)
    others = "".join(f"; {count} not: {reason}" for reason, count in reasons.items())
    line = f"fp8 ({config.recipe} scaling): {len(inside)} of {len(products)} products with parameters{others}"
    if compiled is None:
        return f"{line}; emulated in bfloat16"
    if loops == "microbatches":
        return f"{line}; compiled: {compiled.products} for all microbatches, and {compiled.transposes} transposes by XLA"
    wanted = sum(3 if product.wgrad == "fp8" else 2 for product in inside)
    return f"{line}, {wanted} with their gradients; compiled: {compiled.products}, and {compiled.transposes} transposes by XLA"


def count(executables: Sequence[jax.stages.Compiled]) -> FP8Products | None:
    """Counts the FP8 matmuls of the executables that a step runs. Returns None if the device emulates FP8."""
    if jax.default_backend() != "gpu":
        return None
    each = {id(one): FP8Products.of(one) for one in executables}
    found = [each[id(one)] for one in executables]
    return FP8Products(sum(one.products for one in found), sum(one.transposes for one in found))
