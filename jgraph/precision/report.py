"""What of a program is in FP8: as it was traced, and as it was compiled."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jgraph.precision.config import FP8Config
from jgraph.precision.transform import Product
from jgraph.xla.hlo import HloModule


@dataclass(frozen=True)
class InProgram:
    """FP8 in a program compiled for a GPU.

    Attributes:
        products: matrix products with FP8 operands.
        transposes: of FP8 arrays, by XLA, each of them a pass over memory that a kernel could have saved.
    """

    products: int
    transposes: int

    @classmethod
    def of(cls, text: str) -> "InProgram":
        """Reads `compiled.as_text()`."""
        instructions = HloModule(text).instructions.values()
        transposes = [i for i in instructions if i.opcode == "transpose" and i.shapes[0].dtype.startswith("f8")]
        return cls(sum("matmul$f8" in i.target for i in instructions), len(transposes))


def about(products: Sequence[Product], config: FP8Config, text: str = "") -> str:
    """Returns a line on the products of a step.

    Args:
        products: all with a parameter, as `Plan.products` has them.
        config: the recipe.
        text: of the program compiled for a GPU; empty where products are emulated.
    """
    inside = [product for product in products if not product.kept]
    reasons = Counter(product.kept for product in products if product.kept)
    kept = "".join(f"; {count} not: {reason}" for reason, count in reasons.items())
    each = 3 if config.wgrad == "fp8" else 2
    wanted = each * len(inside)
    line = f"fp8 ({config.recipe} scaling): {len(inside)} of {len(products)} products with parameters{kept}"
    if not text:
        return f"{line}; emulated in bfloat16"
    found = InProgram.of(text)
    return f"{line}; compiled: {found.products} products of {wanted} for a microbatch, {found.transposes} transposes by XLA"
