"""Names that the library gives to parts of its programs, so that a profile says what a kernel was for (`jgraph.profile`)."""

import contextlib
from collections.abc import Iterator
from typing import Literal

import jax

Scope = Literal["forward", "dgrad", "wgrad", "attention", "loss", "quantize", "optimizer", "copies"]

PREFIX = "jgraph."


@contextlib.contextmanager
def scope(of: Scope) -> Iterator[None]:
    """Names all that is traced in its block or function; a model of one's own may use it: `with jgraph.scope("attention"):`."""
    with jax.named_scope(PREFIX + of):
        yield
