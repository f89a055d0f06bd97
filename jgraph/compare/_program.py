"""A program of a comparison: copies of its arguments, and calls that feed donated arguments back."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any, TypeAlias, TypeVar

import jax

from jgraph.errors import ConfigError, of_type, require
from jgraph.step.compiled import CompiledStep
from jgraph.timing import Timer, without_overlap
from jgraph.tree import key_data, was_donated
from jgraph.types import JaxDevice, Tree
from jgraph.xla import CaptureReport
from jgraph.xla.explain import Memory, explain

T = TypeVar("T", bound=Tree)

_Path: TypeAlias = tuple[Any, ...]
"""Keys that lead to a part of a result: `()` for the result itself, `(0,)` for its first element."""


@dataclass(frozen=True)
class Program:
    """A function of a comparison with arguments of its own, for `jgraph.compare`.

    Attributes:
        fn: A function, a jitted function, a program from `jax.jit(fn).lower(*args).compile()`, or the compiled step that
            `TrainStep.compile` returns.
        args: A tuple of its positional arguments. They are copied, so that they stay valid if `fn` donates them.
        donate_argnums: Indices of the arguments to donate. Only for a function that is not jitted.
        name: The name in the report. "" for the name of `fn`.
        result: Selects the part to compare from the result of `fn`: `lambda out: out[1].loss`. None compares everything.

    Raises:
        ConfigError: If `fn` is not callable, `args` is not a tuple, `result` is not callable, or `donate_argnums` is given for
            a compiled program.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    donate_argnums: int | Sequence[int] = ()
    name: str = ""
    result: Callable[[Any], Tree] | None = None

    def __post_init__(self):
        require(callable(self.fn), "fn", of_type(self.fn), "a function")
        require(isinstance(self.args, tuple | list), "args", of_type(self.args), "a tuple, such as (state, batch)")
        is_compiled = isinstance(self.fn, CompiledStep | jax.stages.Compiled)
        must = "left out: `fn` is compiled, and donates the arguments that it was compiled to donate"
        require(not is_compiled or self.donate_argnums in ((), []), "donate_argnums", self.donate_argnums, must)
        is_function = self.result is None or callable(self.result)
        require(is_function, "result", of_type(self.result), "a function of the result of `fn`")

    @property
    def label(self) -> str:
        """The name in the report."""
        return self.name or getattr(self.fn, "__name__", type(self.fn).__name__)


class Running:
    """A compiled program that takes turns. Holds arrays during a turn only, so that the other program has the memory."""

    def __init__(self, program: Program):
        self._program, self._fn = program, program.fn
        self.capture: CaptureReport | None = None
        if isinstance(program.fn, CompiledStep):
            self.capture, self.memory = program.fn.capture, program.fn.memory
        elif isinstance(program.fn, jax.stages.Compiled):
            self.memory = Memory.read(program.fn)
        else:
            report = explain(program.fn, *program.args, donate_argnums=program.donate_argnums)
            self.capture, self.memory = report.capture, report.memory
            if not hasattr(program.fn, "lower"):
                self._fn = jax.jit(program.fn, donate_argnums=program.donate_argnums)
        self._args: list[Any] = []
        self._result: Any = None
        self._returned: dict[int, _Path] = {}
        self.devices: list[JaxDevice] = []

    def start(self) -> Tree:
        """Calls the program twice, which compiles it. Returns the selected results of the first call, as NumPy arrays."""
        self._restart()
        self._run()
        arrays = (leaf for leaf in jax.tree.leaves(self._result) if isinstance(leaf, jax.Array))
        self.devices = next((list(leaf.devices()) for leaf in arrays), jax.devices()[:1])
        select = self._program.result
        compared = jax.device_get(jax.tree.map(key_data, select(self._result) if select else self._result))
        self._returned = dict(self._find_returned())
        self._feed_back()
        # Arrays that are fed back can have another sharding or weak type than the arguments, and compile again.
        self._run()
        self._wait()
        self._free()
        return compared

    def turn(self, timer: Timer) -> tuple[float, float]:
        """Returns the time of a call and the host time of a dispatch, in ms."""
        self._restart()
        repeats_ms, _ = timer.repeats_ms(without_overlap(self._run, self._wait, self.devices[0].platform), self._wait)
        host_ms = timer.dispatch_seconds(self._run, self._wait) * 1e3
        self._free()
        return statistics.median(repeats_ms), host_ms

    def _restart(self) -> None:
        self._args = [_copied(arg) for arg in self._program.args]
        jax.block_until_ready(self._args)

    def _free(self) -> None:
        self._args, self._result = [], None

    def _run(self) -> None:
        self._result = None  # frees the last result first
        self._result = self._fn(*self._args)
        self._feed_back()

    def _wait(self) -> None:
        jax.block_until_ready((self._result, self._args))

    def _feed_back(self) -> None:
        for i, path in self._returned.items():
            self._args[i] = reduce(getitem, path, self._result)

    def _find_returned(self) -> Iterator[tuple[int, _Path]]:
        """Yields each argument that the first call donated, and the first part of the result with the same leaves."""
        parts = dict(_parts(self._result))
        for i, arg in enumerate(self._args):
            if was_donated(arg):
                path = next((path for path, part in parts.items() if _signature(part) == _signature(arg)), None)
                if path is None:
                    problem = f"donates argument {i} and returns nothing like it"
                    must = "return its new value in a tuple, list or dictionary, or do not donate it"
                    raise ConfigError(f"`fn` {self._program.label} {problem}: {must}", field="fn")
                del parts[path]
                yield i, path


def _copied(arg: T) -> T:
    """Copies the JAX arrays of an argument, with their shardings."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if leaf.is_deleted():
            raise ConfigError("`args` has an array that was donated to an earlier call: pass its new value", field="args")
        return leaf.copy()

    return jax.tree.map(copied, arg)


def _parts(result: Tree) -> Iterator[tuple[_Path, Tree]]:
    """Yields the result, the elements of a tuple, a list or a dictionary, and then their elements."""
    found: list[tuple[_Path, Tree]] = [((), result)]
    for path, part in found:  # grows
        yield path, part
        items = enumerate(part) if isinstance(part, tuple | list) else part.items() if isinstance(part, Mapping) else ()
        found += (((*path, key), each) for key, each in items)


def _signature(tree: Tree) -> tuple[Any, list[Any]]:
    """Returns the structure of a tree, and the shapes and dtypes of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(getattr(leaf, "shape", None), getattr(leaf, "dtype", type(leaf))) for leaf in leaves]
