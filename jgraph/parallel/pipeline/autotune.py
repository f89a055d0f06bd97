"""The schedule that a name means: generated, read from a file, or the fastest that fits by what a layer's parts really take."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jgraph.errors import ConfigError
from jgraph.mesh import batch_axes
from jgraph.parallel.pipeline.ends import End
from jgraph.parallel.pipeline.program import Pipeline
from jgraph.precision.product import XLA_OPTIONS
from jgraph.precision.transform import FP8Function
from jgraph.schedule import NAMES, POOLS, Choice, Costs, Engine, Schedule, best, generate, read
from jgraph.xla import compiler_options
from jgraph.xla.options import known

Tree = Any

_REPEATS = 5
_SECONDS = 0.05  # of a repeat
_CALLS = 16  # in a timed program: the host would take longer to hand over a small part than a device takes for it
_HANDOVER = 1.7e-4  # seconds of the host for an action and what it sends (notes/develop/measurements.md)


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
    schedule = read(Path(name))
    if (schedule.num_ranks, schedule.num_microbatches) != (pp, microbatches):
        raise ConfigError(
            f"`schedule` {name} is for {schedule.num_ranks} ranks and {schedule.num_microbatches} microbatches: must be for "
            f"`pp` {pp} and `num_microbatches` {microbatches}",
            field="schedule",
        )
    return schedule


def choose(
    pipeline: Pipeline,
    params: Tree,
    inputs: Tree,
    *,
    memory_limit: float | None,
    share: Callable[[float], float],
    engines: Sequence[str] = ("program",),
) -> Choice:
    """The fastest schedule that fits, by measured times of a layer and of the head on the first local device.

    Args:
        pipeline: with any schedule for the ranks and microbatches wanted.
        params, inputs: as `loss_and_grads` takes them, as shapes.
        memory_limit: bytes of a rank's pools; None for no limit.
        share: makes a measured number that of all processes.
        engines: that could play it, as `Pipelined` names them.

    Raises:
        OrderError: nothing fits; the message says by how much.
    """
    ranks, layers = pipeline.schedule.num_ranks, pipeline.layout.num_layers
    layers_per_rank = -(-layers // ranks)
    seconds = {part: share(value) * layers_per_rank for part, value in measure(pipeline, params, inputs).items()}
    # In one program it takes the same with every schedule.
    head = share(measure_head(pipeline, params, inputs)) if "dispatch" in engines else 0.0
    slots = pipeline.slot_bytes(params, inputs, layers=layers_per_rank)

    def in_program(schedule: Schedule, makespan: float) -> float:
        # All ranks work on a head together, or each on one of its own, while no stage computes.
        return makespan + schedule.num_microbatches * head / (ranks if pipeline.model.sharded else 1)

    def by_host(schedule: Schedule, makespan: float) -> float:
        return max(makespan, _HANDOVER * sum(len(order) for order in schedule))

    players = {
        # Transfers are at the end of every tick, so a tick takes as long as its longest action.
        "program": Engine("program", "lockstep", of_step=in_program),
        "dispatch": Engine("dispatch", "dataflow", head=head, of_step=by_host),
    }
    return best(
        pp=ranks,
        microbatches=pipeline.schedule.num_microbatches,
        costs=Costs(**seconds),
        sizes={pool: size for pool, size in slots.items() if pool in POOLS},
        memory_limit=memory_limit,
        chunks=[chunks for chunks in (1, 2) if ranks * chunks <= layers],
        engines=[players[engine] for engine in engines],
    )


def measure(pipeline: Pipeline, params: Tree, inputs: Tree) -> Mapping[str, float]:
    """Seconds of a layer's forward, dgrad and wgrad for one microbatch, medians on the first local device."""
    function, split = pipeline.stage(None, 1), pipeline.split(None)
    stage, (x, *context) = _filled(pipeline.layer_shapes(params, inputs))
    params = stage[0] if pipeline.fp8 else stage
    if isinstance(function, FP8Function):
        stage = (*stage[:2], jax.jit(function.quantize)(*stage[:2], x, *context))
    platform = jax.default_backend()
    options = compiler_options("auto", known(XLA_OPTIONS, platform), platform=platform) if pipeline.fp8 else None
    jit = partial(jax.jit, compiler_options=options)

    @jit
    def forward(stage: Tree, x: Array) -> Any:
        first = x, _zeros(split.forward, stage, x, *context)[1]
        return _repeated(lambda made, stage, *context: split.forward(stage, made[0], *context)[:2], first, stage, *context)

    @jit
    def dgrad(stage: Tree, residuals: Any, dy: Array) -> Any:
        first = dy, *_zeros(split.dgrad, stage, residuals, dy)[1:]
        return _repeated(lambda made, stage, residuals: split.dgrad(stage, residuals, made[0]), first, stage, residuals)

    @partial(jit, donate_argnums=0)
    def wgrad(sums: Tree, stage: Tree, residuals: Any, stash: Any) -> Tree:
        return _repeated(split.accumulate, sums, stage, residuals, stash)

    y, residuals = forward(stage, x)
    *_, stash = dgrad(stage, residuals, y)
    sums = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    total = [(sums, None, None) if pipeline.fp8 else sums]

    def add() -> Any:
        total[0] = wgrad(total[0], stage, residuals.after_dgrad(), stash)
        return total[0]

    parts = {"forward": lambda: forward(stage, x), "dgrad": lambda: dgrad(stage, residuals, y), "wgrad": add}
    return {part: seconds_of(run) / _CALLS for part, run in parts.items()}


def _repeated(part: Callable[..., Any], made: Any, *given: Any) -> Any:
    """Calls `part(made, *given)` again and again with its own result; nothing of it is taken out of the loop."""

    def again(_: Any, made: Any) -> Any:
        made, held = jax.lax.optimization_barrier((made, given))
        return part(made, *held)

    return jax.lax.fori_loop(0, _CALLS, again, made)


def _zeros(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(fn, *args))


def _filled(shapes: Any) -> Any:
    """Returns arrays to compute with. Zeros would draw less power, and so be faster, than numbers of a model."""
    rng = np.random.default_rng(0)  # on the host: random numbers of every shape are a program each on a device

    def fill(s: Any) -> Array:
        is_float = jnp.issubdtype(s.dtype, jnp.floating)
        numbers = 0.02 * rng.standard_normal(s.shape, np.float32) if is_float else np.zeros(s.shape)
        return jax.device_put(numbers.astype(s.dtype))

    return jax.tree.map(fill, shapes)


def measure_head(pipeline: Pipeline, params: Tree, inputs: Tree) -> float:
    """Seconds of the loss of one microbatch and its gradients on one rank, median on the first local device."""
    model, (x, *_) = pipeline.model, pipeline.inputs(params, inputs)
    shares = math.prod(pipeline.mesh.shape[axis] for axis in batch_axes(pipeline.mesh))
    microbatch = jax.tree.map(lambda s: jnp.zeros((s.shape[1] // shares, *s.shape[2:]), s.dtype), inputs)
    head = End.of(model.head, params["outer"], pipeline.cast, model.sharded, x, microbatch)

    def loss(arrays: list[Array], x: Array) -> Array:
        return head(arrays, x, microbatch).astype(jnp.float32)

    given = _filled((head.shapes, x))
    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    return seconds_of(lambda: run(*given))


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
