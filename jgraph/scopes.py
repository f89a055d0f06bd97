"""Names of program parts. `jgraph.profile` uses them to assign kernels to categories."""

import contextlib
from collections.abc import Iterator
from typing import Literal

import jax

# fmt: off
Scope = Literal[
    "forward", "dgrad", "wgrad", "attention", "router", "dispatch", "exchange", "experts", "combine", "loss", "quantize",
    "optimizer", "copies",
]
# fmt: on

PREFIX = "jgraph."


@contextlib.contextmanager
def scope(of: Scope) -> Iterator[None]:
    """Names a part of a model, as `jax.named_scope` does. A profile shows its time as a category of its own.

    Args:
        of: The category.

    Examples:
        >>> with jgraph.scope("attention"):
        ...     y = jax.nn.dot_product_attention(*[jnp.ones((1, 8, 2, 16))] * 3)
    """
    with jax.named_scope(PREFIX + of):
        yield
