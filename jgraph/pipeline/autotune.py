"""The schedule that a name means: generated, read from a file, or the fastest that fits by what a layer's parts really take."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import SingleDeviceSharding

from jgraph.errors import ConfigError
from jgraph.mesh import num_data_ranks
from jgraph.pipeline.ends import End
from jgraph.pipeline.program import Pipeline
from jgraph.precision.config import XLA_OPTIONS
from jgraph.schedule import NAMES, POOLS, Choice, Costs, Engine, Schedule, best, generate, read
from jgraph.xla import compile_and_report, compiler_options
from jgraph.xla.options import known

Tree = Any

_REPEATS = 5
_SECONDS = 0.05  # of a repeat
_CALLS = 16  # in a timed program: the host would take longer to hand over a small part than a device takes for it
# Seconds of the host for an executable with what it sends, and for a kernel in it, captured or not: what 34 executables a step
# took on an H200's host, 18.0 ms of MLPs with 28 kernels a layer, 57.2 of a GPT with 67 (notes/develop/measurements.md).
_EXECUTABLE, _KERNEL = 8.5e-5, 4.2e-6


def find_schedule(name: str, *, pp: int, chunks: int, microbatches: int) -> Schedule:
    """The schedule of this name, or in this file.

    Raises:
        OrderError: there is none, it cannot be for these sizes, or the file says none that can run.
        ConfigError: the file's schedule is for other sizes.
    """
    if not name.endswith((".csv", ".json")):
        if name not in NAMES:
            raise ConfigError(
                f"`schedule` is {name}: must be auto, one of {', '.join(NAMES)}, or a .csv or .json file", field="schedule"
            )
        return generate(name, pp=pp, microbatches=microbatches, chunks=chunks)
    schedule = read(name, field="schedule")
    if (schedule.num_ranks, schedule.num_microbatches) != (pp, microbatches):
        raise ConfigError(
            f"`schedule` {name} is for {schedule.num_ranks} ranks and {schedule.num_microbatches} microbatches: must be for "
            f"`pp` {pp} and `num_microbatches` {microbatches}",
            field="schedule",
        )
    return schedule


@dataclass(frozen=True)
class Parts:
    """Holds what a layer and the loss take for one microbatch, by themselves on one device.

    Attributes:
        forward, dgrad, wgrad: seconds of a layer.
        head: of the loss with its gradients; 0 where it was not timed.
        kernels: that the host starts, or records, for the three parts of a layer; 0 where that is not known.
    """

    forward: float
    dgrad: float
    wgrad: float
    head: float = 0.0
    kernels: int = 0


def choose(
    pipeline: Pipeline,
    params: Tree,
    inputs: Tree,
    *,
    parts: Parts,
    memory_limit: float | None,
    layers: int | None = None,
    engines: Sequence[str] = ("program",),
) -> Choice:
    """The fastest schedule that fits, by what parts of it take.

    Args:
        pipeline: with any schedule for the ranks and microbatches wanted.
        params, inputs: as `loss_and_grads` takes them, as shapes.
        parts: from `measure`.
        memory_limit: bytes of a rank's pools; None for no limit.
        layers: of the model; None for as many as it has.
        engines: that could play it, as `Pipelined` names them.

    Raises:
        OrderError: nothing fits; the message says by how much.
    """
    ranks, layers = pipeline.schedule.num_ranks, layers or pipeline.layout.num_layers
    layers_per_rank = -(-layers // ranks)
    slots = pipeline.slot_bytes(params, inputs, layers=layers_per_rank)

    def in_program(schedule: Schedule, makespan: float) -> float:
        # All ranks work on a head together, or each on one of its own, while no stage computes.
        return makespan + schedule.num_microbatches * parts.head / (ranks if pipeline.model.sharded else 1)

    def by_host(schedule: Schedule, makespan: float) -> float:
        return max(makespan, host_seconds(schedule, layers * parts.kernels))

    players = {
        # Transfers are at the end of every tick, so a tick takes as long as its longest action.
        "program": Engine("program", "lockstep", of_step=in_program),
        "dispatch": Engine("dispatch", "dataflow", head=parts.head, of_step=by_host),
    }
    return best(
        pp=ranks,
        microbatches=pipeline.schedule.num_microbatches,
        costs=Costs(**{part: getattr(parts, part) * layers_per_rank for part in ("forward", "dgrad", "wgrad")}),
        sizes={pool: size for pool, size in slots.items() if pool in POOLS},
        memory_limit=memory_limit,
        chunks=[chunks for chunks in (1, 2) if ranks * chunks <= layers],
        engines=[players[engine] for engine in engines],
    )


def host_seconds(schedule: Schedule, kernels: int) -> float:
    """Returns what handing over a step takes the host, for all ranks; `kernels` are those of a microbatch."""
    crossings = sum(a != b for a, b in pairwise(schedule.rank_of_stage.tolist()))
    # What a rank does between two transfers is one executable.
    executables = 2 * schedule.num_microbatches * crossings + schedule.num_ranks
    return _EXECUTABLE * executables + _KERNEL * schedule.num_microbatches * kernels


def measure(
    pipeline: Pipeline,
    params: Tree,
    inputs: Tree,
    *,
    engines: Sequence[str] = ("program",),
    share: Callable[[float], float] = lambda seconds: seconds,
) -> Parts:
    """Times a layer and, where the engines take different times for it, the loss: medians on the first local device.

    `share` makes a measured number that of all processes.
    """
    # In one program the loss takes the same with every schedule.
    wanted = {part: made for part, made in _parts(pipeline, params, inputs).items() if part != "head" or "dispatch" in engines}
    platform = jax.default_backend()
    chosen = known(XLA_OPTIONS, platform) if pipeline.precision.weights else ()
    options = compiler_options("auto", chosen, platform=platform)

    lowered = [jitted.lower(*shapes) for jitted, shapes in wanted.values()]
    with ThreadPoolExecutor(len(wanted)) as threads:
        # At once: compiling takes longer than timing.
        programs = list(threads.map(lambda one: compile_and_report(one, options if chosen else {}), lowered))
    compiled = dict(zip(wanted, programs, strict=True))
    seconds: dict[str, float] = {}
    for part, (_, shapes) in wanted.items():
        run, given = compiled[part][0], list(filled(shapes))

        def call(run: Any = run, given: list[Any] = given, keeps: bool = part != "wgrad") -> Any:
            out = run(*given)
            given[0] = given[0] if keeps else out
            return out

        seconds[part] = share(seconds_of(call) / (1 if part == "head" else _CALLS))
    reports = [report for part, (_, report) in compiled.items() if part != "head" and report is not None]
    return Parts(**seconds, kernels=sum(report.total for report in reports))


def _parts(pipeline: Pipeline, params: Tree, inputs: Tree) -> dict[str, tuple[jax.stages.Wrapped, tuple[Any, ...]]]:
    """Returns what is timed, with the shapes of its arguments: a layer's parts, in a loop, and the loss with its gradients."""
    stage, (x, *context) = pipeline.layer_shapes(params, inputs)
    function, split = pipeline.stage(None, 1), pipeline.split(None)
    given, observed, _ = stage
    stage = given, observed, pipeline.precision.weight_shapes(function, (given, x, *context), observed)

    def forward(stage: Tree, x: Array, *context: Tree) -> Any:
        first = x, _zeros(split.forward, stage, x, *context)[1]
        return _repeated(lambda made, stage, *context: split.forward(stage, made[0], *context)[:2], first, stage, *context)

    def dgrad(stage: Tree, residuals: Any, dy: Array) -> Any:
        first = dy, *_zeros(split.dgrad, stage, residuals, dy)[1:]
        return _repeated(lambda made, stage, residuals: split.dgrad(stage, residuals, made[0]), first, stage, residuals)

    def wgrad(sums: Tree, stage: Tree, residuals: Any, stash: Any) -> Tree:
        return _repeated(split.accumulate, sums, stage, residuals, stash)

    y, residuals = jax.eval_shape(lambda *given: split.forward(*given)[:2], stage, x, *context)
    stash = jax.eval_shape(split.dgrad, stage, residuals, y)[-1]
    sums = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), given), None, None
    parts = {
        "forward": (jax.jit(forward), (stage, x, *context)),
        "dgrad": (jax.jit(dgrad), (stage, residuals, y)),
        "wgrad": (jax.jit(wgrad, donate_argnums=0), (sums, stage, residuals.after_dgrad(), stash)),
        "head": _head(pipeline, params, inputs),
    }
    # Without the shardings of where they were traced: they are timed on one device.
    alone = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), {part: args for part, (_, args) in parts.items()})
    return {part: (jitted, alone[part]) for part, (jitted, _) in parts.items()}


def _head(pipeline: Pipeline, params: Tree, inputs: Tree) -> tuple[jax.stages.Wrapped, tuple[Any, ...]]:
    """Returns the loss of one microbatch on one rank with its gradients, and the shapes of its arguments."""
    model, (x, *_) = pipeline.model, pipeline.inputs(params, inputs)
    shares = num_data_ranks(pipeline.mesh)
    microbatch = jax.tree.map(lambda s: jax.ShapeDtypeStruct((s.shape[1] // shares, *s.shape[2:]), s.dtype), inputs)
    head = End.of(model.head, params["outer"], pipeline.cast, model.sharded, x, microbatch)

    def loss(arrays: list[Array], x: Array, microbatch: Tree) -> Array:
        return head(arrays, x, microbatch).astype(jnp.float32)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), (head.shapes, x, microbatch)


def _repeated(part: Callable[..., Any], made: Any, *given: Any) -> Any:
    """Calls `part(made, *given)` again and again with its own result; nothing of it is taken out of the loop."""

    def again(_: Any, made: Any) -> Any:
        made, held = jax.lax.optimization_barrier((made, given))
        return part(made, *held)

    return jax.lax.fori_loop(0, _CALLS, again, made)


def _zeros(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(fn, *args))


def filled(shapes: Tree, *, zero: Callable[[Any], bool] = lambda path: False) -> Tree:
    """Returns arrays to compute with, where the shapes say that they are, else on the first local device.

    Zeros would draw less power, and so be faster, than numbers of a model: only integers are zeros, and leaves whose path is
    `zero`. All are made on the devices, by one program that is quickly compiled.
    """
    here = SingleDeviceSharding(jax.local_devices()[0])

    def fill(path: Any, s: Any) -> Array:
        if zero(path) or not jnp.issubdtype(s.dtype, jnp.floating):
            return jnp.zeros(s.shape, s.dtype)
        mixed = lax.iota(jnp.uint32, math.prod(s.shape)) * jnp.uint32(2654435761)  # the golden ratio's: all bits change
        return (0.07 * ((mixed >> 8).astype(jnp.float32) / 2**24 - 0.5)).astype(s.dtype).reshape(s.shape)

    where = jax.tree.map(lambda s: s.sharding or here, shapes)
    return jax.jit(lambda: jax.tree_util.tree_map_with_path(fill, shapes), out_shardings=where)()


def seconds_of(run: Callable[[], Any]) -> float:
    """Returns the median time of a call that gives arrays, over repeats of many calls; the first two calls do not count."""
    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    count = max(1, int(_SECONDS / (time.perf_counter() - start)))
    times = []
    for _ in range(_REPEATS):
        start, out = time.perf_counter(), None
        for _ in range(count):
            out = run()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times)
