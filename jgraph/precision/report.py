"""What of a step is in FP8: as it was traced, and as it was compiled."""

from collections import Counter
from collections.abc import Sequence

from jgraph.precision.config import FP8Config
from jgraph.precision.transform import Product
from jgraph.xla.explain import FP8Products


def about(products: Sequence[Product], config: FP8Config, compiled: FP8Products | None, *, in_loops: bool = False) -> str:
    """Returns a line on the products of a step.

    Args:
        products: all with a parameter, as `Plan.products` has them.
        config: the recipe.
        compiled: those in the program; None where they are emulated.
        in_loops: whether the program has loops over microbatches and stages, so that the two counts differ.
    """
    inside = [product for product in products if not product.kept]
    reasons = Counter(product.kept for product in products if product.kept)
    others = "".join(f"; {count} not: {reason}" for reason, count in reasons.items())
    line = f"fp8 ({config.recipe} scaling): {len(inside)} of {len(products)} products with parameters{others}"
    if compiled is None:
        return f"{line}; emulated in bfloat16"
    if in_loops:
        return f"{line}; compiled: {compiled.products} for all microbatches, and {compiled.transposes} transposes by XLA"
    wanted = sum(3 if product.wgrad == "fp8" else 2 for product in inside)
    return f"{line}, {wanted} with their gradients; compiled: {compiled.products}, and {compiled.transposes} transposes by XLA"
