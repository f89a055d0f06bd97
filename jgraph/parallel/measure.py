"""The fastest choice of command buffers for a step, by timing it on a state and a batch.

XLA's default, none or all: which is the fastest depends on the model, the devices and the version of XLA, collectives most of
all. Cards and clocks drift, so the choices take turns.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, get_args

import jax

from jgraph.errors import JgraphError
from jgraph.parallel.compiled import CompiledStep
from jgraph.parallel.state import TrainState
from jgraph.parallel.step import TrainStep
from jgraph.processes import all_gather_scalar
from jgraph.xla.options import Graph

Tree = Any

_TURNS = 5
_SECONDS = 0.1  # of a turn, or one step
_MARGIN = 0.01
_UNIT = 1e-7  # of seconds in an int32: up to 214


@dataclass(frozen=True)
class Measured:
    """Holds what `measure_graph` found.

    Attributes:
        graph: the choice that is taken.
        step: compiled with it.
        seconds: of a step, medians by choice.
        refused: why other choices cannot be taken, in a line each.
    """

    graph: Graph
    step: CompiledStep
    seconds: Mapping[Graph, float]
    refused: Mapping[Graph, str]

    def __str__(self) -> str:
        times = ", ".join(f"{1e3 * seconds:.3f} ms with {graph}" for graph, seconds in self.seconds.items())
        out = "".join(f"; {graph} is out: {why}" for graph, why in self.refused.items())
        return f"a step takes {times}, so {self.graph} is taken{out}"


def fastest(seconds: Mapping[Graph, float]) -> Graph:
    """Returns the choice with the least time; `auto`, XLA's own, unless another one takes more than 1% less."""
    best = min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < (1 - _MARGIN) * seconds.get("auto", float("inf")) else "auto"


def measure_graph(
    step: TrainStep,
    batch: Tree,
    init: Callable[[], TrainState],
    *,
    xla_options: Sequence[str] = (),
    over: Callable[[Callable[[], str], CompiledStep], AbstractContextManager[None]] | None = None,
) -> Measured:
    """Compiles a step with every choice of command buffers, times each in turns, and takes the fastest.

    As `TrainStep.compile`, which has nothing to time: it is given shapes. All processes call this together and choose alike, by
    the slowest one's times. A choice that does not compile or run, in any process, is out.

    >>> import optax
    >>> def loss(params, batch, key):
    ...     return jnp.mean((batch @ params["w"]) ** 2)
    >>> params, batch = {"w": jnp.zeros((8, 1))}, jnp.ones((4, 8))
    >>> step = jgraph.train_step(loss, optax.sgd(0.1), jgraph.Replicated(None, params))
    >>> measured = jgraph.measure_graph(step, batch, lambda: step.init(params))
    >>> run, state = measured.step, step.init(params)

    Args:
        step: the step.
        batch: arrays of a whole batch, from `TrainStep.place`.
        init: makes a state to run steps on, which is freed before this returns. Called before there is a state of your own,
            this needs no more memory than a run.
        xla_options: as `compile` takes them.
        over: makes a context around each wait for the devices, of a function that says what runs and the compiled program.

    Raises:
        JgraphError: as `compile`, where no choice compiles.
        jax.errors.JaxRuntimeError: no choice runs.
    """
    compiled: dict[Graph, CompiledStep] = {}
    errors: dict[Graph, Exception] = {}
    choices: tuple[Graph, ...] = get_args(Graph)
    for graph in choices:
        with _or_out(graph, errors):
            compiled[graph] = step.compile(batch, graph=graph, xla_options=xla_options)

    def turn(graph: Graph, state: TrainState, count: int) -> tuple[TrainState, float]:
        """Runs steps. Returns the state after them, and the seconds of one."""
        program, metrics = compiled[graph], None
        with over(lambda: f"a step with `graph` {graph}, to time it", program) if over else nullcontext():
            began = time.perf_counter()
            for _ in range(count):
                state, metrics = program(state, batch)
            jax.block_until_ready((state, metrics))
            return state, (time.perf_counter() - began) / count

    state, longest = None, 0.0
    for graph in choices:
        if graph in errors:
            continue
        with _or_out(graph, errors):
            state, _ = turn(graph, init() if state is None else state, 1)  # loads and records
            state, seconds = turn(graph, state, 1)
            longest = max(longest, seconds)
        if graph in errors:
            state = None  # a step that fails takes it along
    times: dict[Graph, list[float]] = {graph: [] for graph in compiled if graph not in errors}
    if not times:
        raise errors["auto"]
    count = max(1, round(_SECONDS / _alike(longest)))
    state = init() if state is None else state
    for _ in range(_TURNS):
        for graph, of in times.items():
            state, _ = turn(graph, state, 1)  # not timed: the one before was another program
            state, seconds = turn(graph, state, count)
            of.append(seconds)
    medians: dict[Graph, float] = {graph: _alike(statistics.median(of)) for graph, of in times.items()}
    graph = fastest(medians)
    refused: dict[Graph, str] = {graph: (str(e).splitlines() or [type(e).__name__])[0] for graph, e in errors.items()}
    return Measured(graph, compiled[graph], medians, refused)


@contextmanager
def _or_out(graph: Graph, errors: dict[Graph, Exception]) -> Iterator[None]:
    """Notes the error of a choice that fails inside, and on all processes that it failed on any."""
    try:
        yield
    except (JgraphError, jax.errors.JaxRuntimeError) as e:
        errors[graph] = e.with_traceback(None)  # which would keep the state
    if any(all_gather_scalar(graph in errors)):
        errors.setdefault(graph, RuntimeError("it fails in another process, which says why"))


def _alike(seconds: float) -> float:
    """Returns the longest of all processes' times."""
    return _UNIT * max(all_gather_scalar(max(1, min(round(seconds / _UNIT), 2**31 - 1))))
