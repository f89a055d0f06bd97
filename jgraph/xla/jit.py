"""`jax.jit` with command-buffer options, a check that donated buffers are reused, and a report of the compiled program.

JAX traces a function once per signature of its arguments. At that moment, and not in later calls, the program is compiled ahead of
time and its donations are checked. JAX then runs the same executable, so a call costs as much as a call of `jax.jit`.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, Literal, ParamSpec, TypeVar, get_args

import jax
from jax.core import Tracer

from jgraph.errors import DonationError, check_choice
from jgraph.tree import PyTree
from jgraph.xla.donation import Donation, donations
from jgraph.xla.explain import Explanation, argument_names, report
from jgraph.xla.options import OptionValue, compiler_options, option_errors

P = ParamSpec("P")
R = TypeVar("R")
OnDropped = Literal["error", "warn", "ignore"]


def jit(
    fn: Callable[P, R] | None = None,
    *,
    graph: Literal["auto", "off", "full"] = "auto",
    xla_options: Sequence[str] = (),
    donation: OnDropped = "error",
    **jit_options: Any,
) -> Any:
    """Compiles a function as `jax.jit` does, and checks that XLA reuses the buffers of donated arguments.

    Works as a decorator. Under `jax.jit`, `jax.grad` and other transformations it behaves as `jax.jit(fn)` without XLA options.

    Examples:
        >>> @jgraph.jit(donate_argnums=0)
        ... def step(state, x):
        ...     return state + x
        >>> print(step(jnp.zeros(2), jnp.ones(2)))
        [1. 1.]

    Args:
        fn: A function of pytrees of arrays. Leave it out to decorate a function.
        graph: The command buffers (CUDA graphs) to record, as in `jgraph.xla.compiler_options`. No effect on a CPU.
        xla_options: More XLA options, as `name=value`.
        donation: `error` raises DonationError if a donated leaf is not reused, before the program runs; `warn` warns once per
            signature; `ignore` does nothing.
        **jit_options: Other arguments of `jax.jit`, such as `donate_argnums`, `static_argnums` and `out_shardings`.

    Returns:
        A `Jitted` function, or a decorator if `fn` is left out.

    Raises:
        ConfigError: If `graph` or `donation` is not one of the listed values.
        CompilerOptionError: If the installed XLA does not have an option.
    """
    check_choice("donation", donation, get_args(OnDropped))
    options = compiler_options(graph, xla_options, platform=jax.default_backend(), num_devices=jax.device_count())
    make = functools.partial(Jitted, options=options, donation=donation, jit_options=jit_options)
    return make if fn is None else make(fn)


class _UncheckedError(Exception):
    """Stops the trace of a new signature, so that its program is checked before it runs."""


class Jitted(Generic[P, R]):
    """A jitted function. Made by `jgraph.jit`."""

    def __init__(self, fn: Callable[P, R], options: dict[str, OptionValue], donation: OnDropped, jit_options: dict[str, Any]):
        functools.update_wrapper(self, fn)
        self._donation, self._options, self._is_checking = donation, options, False
        self._signature: PyTree = None

        @functools.wraps(fn)
        def traced(*args: P.args, **kwargs: P.kwargs) -> R:
            if not self._is_checking:
                raise _UncheckedError
            return fn(*args, **kwargs)

        self._checked = jax.jit(traced, compiler_options=options or None, **jit_options)
        # JAX refuses XLA options inside another transformation.
        self._nested = jax.jit(fn, **jit_options)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function. Compiles and checks the program if the signature of the arguments is new.

        Raises:
            DonationError: If the program does not reuse a donated leaf. Nothing has run then, and no argument is donated.
            CompilerOptionError: If XLA refuses the value of an option.
        """
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            return self._nested(*args, **kwargs)
        try:
            return self._checked(*args, **kwargs)
        except _UncheckedError:
            self._check(args, kwargs)
            return self._checked(*args, **kwargs)

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
        """Traces the function, as `jax.jit(fn).trace`."""
        self._is_checking = True
        try:
            return self._checked.trace(*args, **kwargs)
        finally:
            self._is_checking = False

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """Lowers the function, as `jax.jit(fn).lower`. `compile` of the result checks nothing."""
        return self.trace(*args, **kwargs).lower()

    def report(self, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """Compiles the function for some arguments and reports command buffers, donations and memory. Does not run it."""
        traced = self.trace(*args, **kwargs)
        return report(traced, self._options, name=getattr(self, "__name__", "function"))

    def _check(self, args: Any, kwargs: Any) -> None:
        """Compiles the program for new arguments. Raises DonationError if it does not reuse a donated leaf."""
        with warnings.catch_warnings(), option_errors():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            traced = self.trace(*args, **kwargs)
            lowered = traced.lower()
            compiled = lowered.compile()
        if self._donation == "ignore":
            return
        dropped = [found for found in donations(lowered, compiled, argument_names(traced, lowered)) if not found.output]
        if dropped and self._donation == "error":
            # The next call must check again.
            self._checked.clear_cache()
            raise DonationError(_message(self, dropped), leaves=tuple(found.leaf for found in dropped))
        if dropped:
            warnings.warn(_message(self, dropped), stacklevel=3)


def _message(function: Any, dropped: Sequence[Donation]) -> str:
    leaves = "; ".join(map(str, dropped))
    name = getattr(function, "__name__", "the function")
    return f"XLA does not reuse {len(dropped)} donated leaves of {name}: {leaves}; do not donate them, or return such an array"
