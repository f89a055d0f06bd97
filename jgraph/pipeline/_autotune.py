"""Chooses a schedule by name, from a file, or from measured times and predicted memory."""

import math
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import SingleDeviceSharding

from jgraph.autodiff import Residuals, Stash
from jgraph.errors import ConfigError
from jgraph.mesh import num_data_ranks
from jgraph.pipeline._ends import End
from jgraph.pipeline._memory import slot_bytes
from jgraph.pipeline._program import Pipeline
from jgraph.pipeline._stage import StageParams
from jgraph.pipeline._strategy import Engine
from jgraph.precision.config import XLA_OPTIONS
from jgraph.schedule import NAMES, POOLS, Choice, Costs, Schedule, best, generate, read
from jgraph.types import Batch, Params, Tree
from jgraph.xla import compiler_options
from jgraph.xla.options import known

_T = TypeVar("_T")

_REPEATS = 5
_SECONDS = 0.05  # Minimum duration of a repeat
_CALLS = 16  # Calls per timed program. A device computes a small part faster than the host launches it.


def find_schedule(name: str, *, pp: int, chunks: int, microbatches: int) -> Schedule:
    """Generates a schedule by name, or reads it from a .csv file in PyTorch's format or a .json file of `write`."""
    if not name.endswith((".csv", ".json")):
        if name not in NAMES:
            raise ConfigError(
                f"`schedule` is {name}: must be auto, one of {', '.join(NAMES)}, or a .csv or .json file", field="schedule"
            )
        return generate(name, pp=pp, microbatches=microbatches, chunks=chunks)
    schedule = read(name, field="schedule")
    if (schedule.num_ranks, schedule.num_microbatches) != (pp, microbatches):
        raise ConfigError(
            f"`schedule` {name} has {schedule.num_ranks} ranks and {schedule.num_microbatches} microbatches: must have "
            f"`pp` {pp} and `num_microbatches` {microbatches}",
            field="schedule",
        )
    return schedule


@dataclass(frozen=True)
class Parts:
    """Seconds of the parts of a layer and of the loss with its gradients, for one microbatch on one device."""

    forward: float
    dgrad: float
    wgrad: float
    head: float = 0.0  # 0 if not timed


def choose(
    pipeline: Pipeline,
    inputs: Batch,  # shapes, leaves [M, B, ...]
    *,
    parts: Parts,
    memory_limit: float | None,
    engine: Engine = "program",
) -> Choice:
    """Simulates every schedule with 1 and 2 chunks per rank, and selects the fastest that needs at most `memory_limit` bytes.

    Pools must fit in the limit. Of `pipeline`, only the model and the numbers of ranks and microbatches have an effect.
    """
    ranks = pipeline.schedule.num_ranks
    layers = pipeline.assignment.num_layers
    layers_per_rank = -(-layers // ranks)
    slots = slot_bytes(pipeline, inputs, layers=layers_per_rank)
    return best(
        pp=ranks,
        microbatches=pipeline.schedule.num_microbatches,
        costs=Costs(**{part: getattr(parts, part) * layers_per_rank for part in ("forward", "dgrad", "wgrad")}),
        sizes={pool: size for pool, size in slots.items() if pool in POOLS},
        memory_limit=memory_limit,
        chunks=[chunks for chunks in (1, 2) if ranks * chunks <= layers],
        # Every tick of a program ends with transfers, so it takes as long as its longest action.
        execution="lockstep" if engine == "program" else "dataflow",
        head=parts.head,
    )


def measure(
    pipeline: Pipeline,
    inputs: Batch,
    *,
    engine: Engine = "program",
    share: Callable[[float], float] = lambda seconds: seconds,
) -> Parts:
    """Times the forward, dgrad and wgrad of one layer on the first local device; with the engine `dispatch` also the loss.

    The loss takes the same time with every schedule of the engine `program`. `share` is called once per part, in the order
    forward, dgrad, wgrad, head. With it, processes can agree on times, such as the maximum, to choose the same schedule.
    """
    timed = {part: made for part, made in _parts(pipeline, inputs).items() if part != "head" or engine == "dispatch"}
    platform = jax.default_backend()
    in_fp8 = bool(pipeline.precision.weights)
    options = compiler_options("auto", known(XLA_OPTIONS, platform), platform=platform) if in_fp8 else {}
    lowered = [jitted.lower(*shapes) for jitted, shapes in timed.values()]
    with ThreadPoolExecutor(len(timed)) as threads:
        # In parallel, because compiling takes longer than timing.
        programs = list(threads.map(lambda program: program.compile(compiler_options=options), lowered))
    seconds = {}
    for (part, (_, shapes)), run in zip(timed.items(), programs, strict=True):
        call = partial(run, *_filled(shapes))
        seconds[part] = share(_seconds_of(call) / (1 if part == "head" else _CALLS))
    return Parts(**seconds)


def _parts(pipeline: Pipeline, inputs: Batch) -> dict[str, tuple[jax.stages.Wrapped, tuple[Tree, ...]]]:
    """Returns the functions to time, with the shapes of their arguments: loops over each part of a layer, and the loss."""
    (given, observed, _), (x, *rest) = pipeline.layer_shapes(inputs)
    function = pipeline.stage(None, 1)
    split = pipeline.split(None)
    stage = given, observed, pipeline.precision.weight_shapes(function, (given, x, *rest), observed)

    def forward(stage: StageParams, x: Array, *rest: Tree) -> tuple[Array, Residuals]:
        first = x, _zeros(split.forward, stage, x, *rest)[1]
        return _repeated(lambda made, stage, *rest: split.forward(stage, made[0], *rest)[:2], first, stage, *rest)

    def dgrad(stage: StageParams, residuals: Residuals, dy: Array) -> tuple[Array, Params, Stash]:
        first = dy, *_zeros(split.dgrad, stage, residuals, dy)[1:]
        return _repeated(lambda made, stage, residuals: split.dgrad(stage, residuals, made[0]), first, stage, residuals)

    def wgrad(sums: Params, stage: StageParams, residuals: Residuals, stash: Stash) -> Params:
        return _repeated(split.accumulate, sums, stage, residuals, stash)

    y, residuals = jax.eval_shape(lambda *given: split.forward(*given)[:2], stage, x, *rest)
    stash = jax.eval_shape(split.dgrad, stage, residuals, y)[-1]
    sums = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), given), None, None
    parts = {
        "forward": (jax.jit(forward), (stage, x, *rest)),
        "dgrad": (jax.jit(dgrad), (stage, residuals, y)),
        "wgrad": (jax.jit(wgrad), (sums, stage, residuals.after_dgrad(), stash)),
        "head": _head(pipeline, inputs),
    }
    # Without shardings, because the functions are timed on one device.
    alone = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), {part: args for part, (_, args) in parts.items()})
    return {part: (jitted, alone[part]) for part, (jitted, _) in parts.items()}


def _head(pipeline: Pipeline, inputs: Batch) -> tuple[jax.stages.Wrapped, tuple[Tree, ...]]:
    """Returns the function that computes the loss of a microbatch and its gradients, and the shapes of its arguments."""
    model = pipeline.model
    x, *_ = pipeline.inputs(inputs)
    shares = num_data_ranks(pipeline.mesh)
    microbatch = jax.tree.map(lambda s: jax.ShapeDtypeStruct((s.shape[1] // shares, *s.shape[2:]), s.dtype), inputs)
    head = End.trace(model.head, pipeline.shapes.outer, pipeline.cast, model.sharded, x, microbatch)

    def loss(arrays: list[Array], x: Array, microbatch: Batch) -> Array:
        return head(arrays, x, microbatch).astype(jnp.float32)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), (head.shapes, x, microbatch)


def _repeated(part: Callable[..., _T], carry: _T, *given: Tree) -> _T:
    """Applies `part(carry, *given)` to its own result `_CALLS` times. The barrier prevents hoisting out of the loop."""

    def step(_: Array, carry: _T) -> _T:
        carry, held = jax.lax.optimization_barrier((carry, given))
        return part(carry, *held)

    return jax.lax.fori_loop(0, _CALLS, step, carry)


def _zeros(fn: Callable[..., _T], *args: Tree) -> _T:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(fn, *args))


def _filled(shapes: tuple[Tree, ...]) -> tuple[Tree, ...]:
    """Makes arrays of given shapes for timing. Arrays without a sharding are put on the first local device.

    Floats are pseudorandom, because a device computes faster with zeros, which draw less power. Integers are zeros.
    """
    default = SingleDeviceSharding(jax.local_devices()[0])

    def fill(s: jax.ShapeDtypeStruct) -> Array:
        if not jnp.issubdtype(s.dtype, jnp.floating):
            return jnp.zeros(s.shape, s.dtype)
        mixed = lax.iota(jnp.uint32, math.prod(s.shape)) * jnp.uint32(2654435761)  # 2**32 over the golden ratio
        return (0.07 * ((mixed >> 8).astype(jnp.float32) / 2**24 - 0.5)).astype(s.dtype).reshape(s.shape)

    shardings = jax.tree.map(lambda s: s.sharding or default, shapes)
    return jax.jit(lambda: jax.tree.map(fill, shapes), out_shardings=shardings)()


def _seconds_of(run: Callable[[], Tree]) -> float:
    """Returns the seconds of a call that returns arrays: the median over repeats of many calls, after two warmup calls."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    count = max(1, int(_SECONDS / (time.perf_counter() - start)))
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        out = None
        for _ in range(count):
            out = run()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times)
