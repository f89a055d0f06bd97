"""Watches one jitted function of an unmodified program: explains it before its first call, and records its results."""

import contextlib
import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.core import Tracer

import jgraph

TARGET = "h200"
# Values of `graph` and `xla_options`, by name in the results.
OPTIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "auto": ("auto", ()),
    "full": ("full", ()),
    "unrolled": ("full", ("xla_gpu_command_buffer_unroll_loops=true",)),
}


@dataclass
class Seen:
    """The reports of a step by name in `OPTIONS`, and one list of numbers per call: the sums of its results."""

    reports: dict[str, Any] = field(default_factory=dict)
    sums: list[list[float]] = field(default_factory=list)


class Watched:
    """A jitted function that explains itself before its first call, and records the sums of all arrays after each call."""

    def __init__(self, jitted: Any, seen: Seen, explain: bool):
        self._jitted, self._seen, self._explain = jitted, seen, explain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function. Does not watch calls inside a trace."""
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            return self._jitted(*args, **kwargs)
        if self._explain and not self._seen.reports:
            self._seen.reports = {name: _explained(self._jitted, args, kwargs, *given) for name, given in OPTIONS.items()}
        result = self._jitted(*args, **kwargs)
        # Flax's nnx.jit updates its arguments.
        arrays = [leaf for leaf in jax.tree.leaves((result, args)) if isinstance(leaf, jax.Array) and not leaf.is_deleted()]
        numbers = [array for array in arrays if jax.numpy.issubdtype(array.dtype, jax.numpy.number)]
        self._seen.sums.append([float(np.asarray(array, np.float64).sum()) for array in numbers])
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)


def _explained(
    jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any], graph: Any, xla_options: tuple[str, ...]
) -> dict[str, Any]:
    if kwargs:
        return {"failed": f"keyword arguments {', '.join(kwargs)}"}
    try:
        options = jgraph.compiler_options(graph, xla_options, platform="gpu", num_devices=1)
        report = jgraph.explain(jitted, *args, target=TARGET, compiler_options=options)
    except Exception as e:
        return {"failed": f"{type(e).__name__}: {str(e).partition(chr(10))[0][:200]}"}
    print(report)
    assert report.capture is not None
    assert report.memory is not None
    return {
        "buffers": report.capture.command_buffers,
        "captured": report.capture.captured,
        "total": report.capture.total,
        "outside": [{"kind": o.kind, "count": o.count, "reason": o.reason} for o in report.capture.outside],
        "donated": len(report.donations),
        "dropped": [str(donation) for donation in report.dropped],
        "memory": report.memory.total,
    }


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", getattr(getattr(fn, "func", None), "__name__", ""))


@contextlib.contextmanager
def watched(wrapper: str, steps: tuple[str, ...], *, uses_jgraph: bool, explains: bool) -> Iterator[Seen]:
    """Watches functions that the decorator `wrapper`, such as `equinox.filter_jit`, jits inside a `with` block.

    `uses_jgraph` replaces `jax.jit` by `jgraph.jit` for the functions named in `steps`, and `explains` explains them for
    `TARGET`.
    """
    seen, plain_jit, is_making = Seen(), jax.jit, False

    def jit(fn: Any, **kwargs: Any) -> Any:
        nonlocal is_making
        is_making = True  # jgraph.jit calls jax.jit
        try:
            return (jgraph.jit if uses_jgraph else plain_jit)(fn, **kwargs)
        finally:
            is_making = False

    def replaced(old: Any, new: Any) -> Any:
        """Returns a replacement of the decorator `old`: `new` for functions named in `steps`."""

        def decorator(*args: Any, **kwargs: Any) -> Any:
            if not args:
                return functools.partial(decorator, **kwargs)
            return (new if _name(args[0]) in steps and not is_making else old)(*args, **kwargs)

        return decorator

    module, _, attribute = wrapper.rpartition(".")
    owner = importlib.import_module(module)
    outer = jit if wrapper == "jax.jit" else getattr(owner, attribute)
    made = lambda fn, *args, **kwargs: Watched(outer(fn, *args, **kwargs), seen, explains)  # noqa: E731
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(jax, "jit", replaced(plain_jit, jit)))
        stack.enter_context(mock.patch.object(owner, attribute, replaced(getattr(owner, attribute), made)))
        yield seen
