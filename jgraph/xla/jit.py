"""`jax.jit` with command-buffer options, a check that XLA reuses donated buffers, and a report of the compiled program.

JAX uses a function as a key of its caches, and hashes it if no executable fits the signature and the placement of the
arguments of a call. `_Gate` compiles the program and checks its donations at this moment, before anything runs. Later calls do
not hash the function, so they take the same path as calls of `jax.jit`.
"""

import functools
import sys
import threading
import types
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar, get_args, overload
from weakref import WeakKeyDictionary

import jax
from jax.core import eval_context
from jax.extend.core import get_opaque_trace_state

from jgraph.errors import DonationError, check_choice
from jgraph.xla.donation import UNUSABLE, Donation, donations, without_warning
from jgraph.xla.explain import Explanation, argument_names, report
from jgraph.xla.options import Graph, OptionValue, compiler_options, option_errors

P = ParamSpec("P")
R = TypeVar("R")
OnDropped = Literal["error", "warn", "ignore"]
_LOWERING = threading.RLock()  # `warnings.catch_warnings` changes the filters of all threads


class Jitted(Generic[P, R]):
    """A function that is compiled at its first call. Made by `jgraph.jit`.

    Has the methods `trace`, `lower`, `eval_shape` and `clear_cache` of a function from `jax.jit`. `lower(...).compile()` does
    not check donations.
    """

    def __init__(self, fn: Callable[P, R], options: dict[str, OptionValue], donation: OnDropped, jit_options: dict[str, Any]):
        functools.update_wrapper(self, fn)
        self._donation: OnDropped = donation
        self._options = options
        self._jit_options = jit_options
        # JAX dispatches some functions in Python, for example those with callbacks. They arrive at the check in every call.
        self._checked: WeakKeyDictionary[Any, set[Hashable]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._jitted: Any = jax.jit(_Gate(fn), compiler_options=options or None, **jit_options)
        self._nested: Any = jax.jit(fn, **jit_options)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function. Compiles the program and checks its donations if it is new.

        A signature (structure, shapes and dtypes of the arguments) has a program for each placement (sharding and layout).

        Raises:
            DonationError: If the program does not reuse the buffer of a donated leaf. Nothing has run, and no array is donated.
            CompilerOptionError: If XLA refuses the value of an option.
        """
        try:
            return self._jitted(*args, **kwargs)
        except _NestedError:
            pass
        return self._nested(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Jitted[P, R]":
        return Jitted(self._jitted.__wrapped__.fn, self._options, self._donation, self._jit_options)

    def __get__(self, instance: Any, owner: type | None = None) -> "Jitted[P, R] | types.MethodType":
        return self if instance is None else types.MethodType(self, instance)

    def trace(self, /, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
        """Traces the function for some arguments, as `jax.jit(fn).trace` does. Does not compile it.

        Args:
            *args: Positional arguments of the function. Leaves may be `jax.ShapeDtypeStruct`, except static arguments.
            **kwargs: Keyword arguments of the function.

        Returns:
            The trace.
        """
        return self._jitted.trace(*args, **kwargs)

    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """Lowers the function for some arguments, as `jax.jit(fn).lower` does. Does not compile it.

        Args:
            *args: Positional arguments of the function. Leaves may be `jax.ShapeDtypeStruct`, except static arguments.
            **kwargs: Keyword arguments of the function.

        Returns:
            The program, with the XLA options of this function. Its method `compile` compiles it.
        """
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Computes the shapes and dtypes of the result, as `jax.jit(fn).eval_shape` does.

        Args:
            *args: Positional arguments of the function. Leaves may be `jax.ShapeDtypeStruct`, except static arguments.
            **kwargs: Keyword arguments of the function.

        Returns:
            A pytree of `jax.ShapeDtypeStruct` with the structure of the result.
        """
        return self._nested.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets all traces and executables, as `jax.jit(fn).clear_cache` does."""
        self._jitted.clear_cache()
        self._nested.clear_cache()
        with self._lock:
            self._checked.clear()

    def report(self, /, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """Compiles the function for some arguments, and reports command buffers, donations and memory. Does not run it.

        A GPU program is compiled again, because XLA reports command buffers only with an option for dumps.

        Args:
            *args: Positional arguments of the function. Leaves may be `jax.ShapeDtypeStruct`, except static arguments.
            **kwargs: Keyword arguments of the function.

        Returns:
            The report; `print` shows it as text.
        """
        return report(self.trace(*args, **kwargs), self._options, name=_name(self))

    def _check(self, caller: types.FrameType, /, *args: P.args, **kwargs: P.kwargs) -> None:
        """Compiles the program for new arguments. Raises DonationError if it does not reuse the buffer of a donated leaf."""
        traced = self.trace(*args, **kwargs)
        placements = tuple(map(_placement, jax.tree.leaves((args, kwargs))))
        if placements in self._checked.get(traced.jaxpr, ()):
            return
        with option_errors():
            with _LOWERING, without_warning(UNUSABLE):
                lowered = traced.lower()
            compiled = lowered.compile()
        if self._donation == "ignore":
            dropped = []
        else:
            dropped = [leaf for leaf in donations(lowered, compiled, argument_names(traced, lowered)) if not leaf.output]
        if dropped and self._donation == "error":
            raise DonationError(_message(self, dropped), leaves=tuple(leaf.leaf for leaf in dropped))
        with self._lock:
            checked = self._checked.setdefault(traced.jaxpr, set())
            is_new = placements not in checked
            checked.add(placements)
        if dropped and is_new:
            warnings.warn_explicit(_message(self, dropped), UserWarning, caller.f_code.co_filename, caller.f_lineno)


@overload
def jit(
    fn: Callable[P, R],
    *,
    graph: Graph = ...,
    xla_options: Sequence[str] = ...,
    donation: OnDropped = ...,
    **jit_options: Any,
) -> Jitted[P, R]: ...


@overload
def jit(
    *, graph: Graph = ..., xla_options: Sequence[str] = ..., donation: OnDropped = ..., **jit_options: Any
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


def jit(
    fn: Callable[P, R] | None = None,
    *,
    graph: Graph = "auto",
    xla_options: Sequence[str] = (),
    donation: OnDropped = "error",
    **jit_options: Any,
) -> Jitted[P, R] | Callable[[Callable[P, R]], Jitted[P, R]]:
    """Compiles a function as `jax.jit` does, and checks that XLA reuses the buffers of donated arguments.

    Works as a decorator, on functions and methods. Under `jax.jit`, `jax.grad` and other transformations, it behaves as
    `jax.jit(fn)` without XLA options. With the same XLA options, results are bitwise equal to those of `jax.jit`.

    Args:
        fn: A function of pytrees of arrays. Leave it out to decorate a function.
        graph: The command buffers (CUDA graphs) that XLA records: `auto`, `off` or `full`, as in `jgraph.compiler_options`. Has
            no effect on a CPU.
        xla_options: More XLA options, as texts `name=value`.
        donation: `error` raises a DonationError if the program does not reuse the buffer of a donated leaf, before the program
            runs. `warn` warns instead, once per signature and placement. `ignore` does not check.
        **jit_options: Other arguments of `jax.jit`, such as `donate_argnums`, `static_argnums` and `out_shardings`.
            `compiler_options` are added to the options of `graph` and `xla_options`, and override them.

    Returns:
        A `Jitted` function with the signature of `fn`, or a decorator if `fn` is left out. `jitted.report(*args)` compiles the
        program and reports command buffers, donations and memory.

    Raises:
        ConfigError: If `graph` or `donation` is not one of its values.
        CompilerOptionError: If an XLA option is not `name=value`, or the installed XLA does not have it.

    Examples:
        >>> @jgraph.jit(donate_argnums=0)
        ... def step(state, x):
        ...     return state + x
        >>> print(step(jnp.zeros(2), jnp.ones(2)))
        [1. 1.]
    """
    check_choice("donation", donation, get_args(OnDropped))
    options = compiler_options(graph, xla_options) | (jit_options.pop("compiler_options", None) or {})

    def make(fn: Callable[P, R]) -> Jitted[P, R]:
        return Jitted(fn, options, donation, jit_options)

    return make if fn is None else make(fn)


class _NestedError(Exception):
    """Stops a call inside another transformation. JAX refuses XLA options there, and donates nothing."""


class _Gate(Generic[P, R]):
    """The function that JAX traces and hashes for `Jitted`."""

    def __init__(self, fn: Callable[P, R]):
        functools.update_wrapper(self, fn)
        self.fn = fn

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return repr(self.fn)  # for errors of JAX

    def __hash__(self) -> int:
        # The arguments are in the frame of the call. Storing them for this method would slow down every call.
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code not in _hashing():
            frame = frame.f_back
        is_call = frame is not None and frame.f_code is Jitted.__call__.__code__
        if frame is not None and is_call and frame.f_locals["self"]._jitted.__wrapped__ is self:
            if not _is_outside_transformations():
                raise _NestedError
            call = frame.f_locals
            call["self"]._check(frame.f_back or frame, *call["args"], **call["kwargs"])
        return object.__hash__(self)


@functools.cache
def _hashing() -> tuple[types.CodeType, ...]:
    """The code of the methods in which JAX hashes the function of a `Jitted`."""
    return tuple(method.__code__ for method in (Jitted.__call__, Jitted.trace, Jitted.clear_cache))


def _placement(leaf: Any) -> Hashable:
    """Sharding and layout that JAX compiles for. It places other leaves itself."""
    if not isinstance(leaf, jax.Array) or not leaf.committed:
        return None
    # Keys of random numbers have no layout.
    return getattr(leaf, "format", leaf.sharding)


def _is_outside_transformations() -> bool:
    """Returns False while JAX traces or transforms the calling code. Costs less than looking for tracers in the arguments."""
    return get_opaque_trace_state(convention="nnx") == _state_outside_transformations()


@functools.cache
def _state_outside_transformations() -> Any:
    with eval_context():
        return get_opaque_trace_state(convention="nnx")


def _message(function: Jitted[P, R], dropped: Sequence[Donation]) -> str:
    leaves = "; ".join(map(str, dropped))
    count = "1 donated leaf" if len(dropped) == 1 else f"{len(dropped)} donated leaves"
    return f"XLA does not reuse {count} of {_name(function)}: {leaves}; do not donate such an array, or return one like it"


def _name(function: Jitted[P, R]) -> str:
    return getattr(function, "__name__", "the function")
