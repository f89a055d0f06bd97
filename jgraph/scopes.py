"""Names of program parts. They assign kernels and arrays to categories."""

import contextlib
import re
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
LABEL = re.compile(re.escape(PREFIX) + r"(\w+)")


@contextlib.contextmanager
def scope(of: Scope) -> Iterator[None]:
    """Labels the operations of a part of a model with a category. `python -m jgraph.profile` reports the time of each category.

    Use it as `with scope(...)` or as a decorator while JAX traces. It adds `jgraph.CATEGORY` to the names of the operations, as
    `jax.named_scope` does, and changes no values.

    Args:
        of: The category. `forward`, `dgrad` and `wgrad`: parts of a training step. `attention`, `loss` and `optimizer`.
            `router`, `dispatch`, `exchange`, `experts` and `combine`: the parts of a mixture-of-experts layer, which choose
            experts, sort rows by expert, send rows to other devices, compute, and sum the results. `quantize`: scaling and
            casting for FP8. `copies`: moves of data. The value is not checked.

    Yields:
        None, once.

    Examples:
        >>> with jgraph.scope("attention"):
        ...     y = jax.nn.dot_product_attention(*[jnp.ones((1, 8, 2, 16))] * 3)
    """
    with jax.named_scope(PREFIX + of):
        yield


def innermost(op_name: str) -> str:
    """Returns the innermost scope in JAX's name of an operation, of this library or of a derivative. Empty if there is none."""
    scopes = op_name.split(";")[-1]
    if "rematted_computation" in scopes:
        return "recompute"
    if "dot_product_attention" in scopes:
        return "attention"
    if found := LABEL.findall(scopes):
        return found[-1]
    if "transpose(" in scopes:
        return "dgrad"
    return "forward" if "jvp(" in scopes else ""
