"""A process that times a schedule as one program, and its actions alone.

Every answer is a JSON line and holds more of the row, so that what was measured before a crash is kept.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.harness import soak
from benchmarks.peers.protocol import Clock, answer, request, take_turns
from benchmarks.programs.models import model_of
from benchmarks.programs.step import compiled_bytes, devices_of, launched, stepping
from benchmarks.rows import Row
from benchmarks.works import schedule_of, size_from
from jgraph.parallel.pipeline import Pipeline
from jgraph.parallel.pipeline.dispatched import dispatched
from jgraph.schedule import Costs, Schedule, simulate
from jgraph.training.metrics import peak_memory_bytes
from jgraph.xla import compile_and_report, compiler_options

# Calls in a timed program. Alone, a small action takes less time than the host needs to hand it over.
CALLS = 4


def time_schedule(asked: Row) -> None:
    ranks, size, clock = asked["ranks"], size_from(asked["size"]), Clock(**asked["clock"])
    devices, platform = devices_of(ranks), jax.default_backend()
    model, schedule = model_of(size, ranks), schedule_of(asked["schedule"], ranks, size.microbatches)
    mesh = Mesh(np.array(devices).reshape(1, ranks), ("data", "pipe"))
    choices = {"compute_dtype": model.compute_dtype, "remat": asked["remat"]}
    pipe = Pipeline.of(model.parts, schedule, mesh, num_layers=len(model.layers), **choices)
    stacked = pipe.stack(model.ends, model.layers)
    params = jax.device_put(stacked, pipe.shardings(stacked))
    inputs = jax.device_put(model.inputs, NamedSharding(mesh, PartitionSpec()))
    del stacked
    model.layers.clear()  # they would count as the first device's memory
    answer(device=f"{ranks} x {devices[0].device_kind}", runtime=pipe.runtime)

    options = compiler_options(asked["graph"], asked["xla_options"], platform=platform, num_devices=ranks)
    if platform == "gpu":  # or command buffers are left aside while launches are counted
        options["xla_enable_command_buffers_during_profiling"] = True
    call = as_executables if asked["engine"] == "dispatch" else as_program
    run, wait, latest = stepping(call(pipe, params, inputs, options))
    run()
    wait()
    # The last device: the first one held the whole model, before it was spread.
    first, turns = float(latest[0][0]), []
    answer(loss=first, peak_bytes=peak_memory_bytes(devices[-1]))

    def measure(clock: Clock) -> Row:
        turns.append(clock.one_by_one(run, wait))
        return turns[-1]

    take_turns(measure, partial(soak, run, wait, devices, lambda: {"same_loss": float(latest[0][0]) == first}))
    stream = clock.in_flight(run, wait, platform)
    answer(stream_ms=stream["ms"], host_ms=clock.handover_seconds(run, wait) * 1e3)
    answer(**launched(run, wait))
    if asked["actions"] and turns:
        latest.clear()
        alone = time_actions(pipe, params, inputs, clock, options)
        ms = statistics.median(turn["ms"] for turn in turns)
        answer(alone=alone, categories=made_of(ms, alone, schedule, pipe.runtime))


def as_program(pipe: Pipeline, params: Any, inputs: Any, options: Any) -> Callable[[], tuple[jax.Array, Any]]:
    """Returns the schedule as one program, with loss and gradients as its results."""
    start = time.perf_counter()
    lowered = jax.jit(pipe.loss_and_grads).lower(params, inputs)
    traced = time.perf_counter()
    compiled, report = compile_and_report(lowered, options)
    seconds = {"trace_s": traced - start, "compile_s": time.perf_counter() - traced}
    answer(**seconds, capture=str(report) if report else None, **compiled_bytes(compiled))
    return lambda: compiled(params, inputs)


def as_executables(pipe: Pipeline, params: Any, inputs: Any, options: Any) -> Callable[[], tuple[jax.Array, Any]]:
    """Returns the schedule as executables that the host hands over; the gradients are the sums in their buffers."""
    start = time.perf_counter()
    batch = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), inputs)
    step = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(pipe.mesh, PartitionSpec()))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), (params, batch))
    gradients = dispatched(pipe, shapes[0], {}, lambda params: params, shapes[1], jax.random.key(0), options)
    answer(compile_s=time.perf_counter() - start, capture=str(gradients))

    def call() -> tuple[jax.Array, Any]:
        results = gradients(params, {}, step, batch)
        return results["loss"].addressable_shards[0].data[0], results

    return call


def time_actions(pipe: Pipeline, params: Any, inputs: Any, clock: Clock, options: Any) -> Row:
    """Times forward, dgrad and wgrad of a stage on one GPU. Each call depends on the one before, as in a pipeline."""
    split, keys = pipe.split(None), iter(jax.random.split(jax.random.key(1), 1000))
    ([layer], extra), x = pipe.layer_shapes(params, inputs)

    def like(aval: Any, scale: float = 1.0) -> jax.Array:
        return scale * jax.random.normal(next(keys), aval.shape, aval.dtype)

    def forward(stage: Any, x: jax.Array) -> Any:
        made = []
        for _ in range(CALLS):
            x, residuals, _ = split.forward(stage, x)
            made.append(residuals)
        return made, x

    def dgrad(stage: Any, residuals: Any, dy: jax.Array) -> Any:
        made, early = [], []
        for held in residuals:
            dy, gradients, stash = split.dgrad(stage, held, dy)
            made.append(stash)
            early.append(gradients)
        return made, dy, early

    def wgrad(grads: Any, stage: Any, residuals: Any, stashes: Any) -> Any:
        for held, stash in zip(residuals, stashes, strict=True):
            grads = split.accumulate(grads, stage, held, stash)
        return grads

    def compiled(function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        return jax.jit(function, donate_argnums=donate).lower(*args).compile(compiler_options=options)

    def milliseconds(call: Callable[[], Any]) -> float:
        run, wait, _ = stepping(call)
        return clock.in_flight(run, wait, jax.default_backend())["ms"] / CALLS

    # Zeros would draw less power, and so be faster, than numbers of a model.
    stage = ([jax.tree.map(partial(like, scale=0.02), layer) for _ in range(pipe.layout.layers_per_stage)], extra)
    x, dy = like(x), like(x)
    call_forward = compiled(forward, stage, x)
    residuals, _ = call_forward(stage, x)
    call_dgrad = compiled(dgrad, stage, residuals, dy)
    stashes, *_ = call_dgrad(stage, residuals, dy)
    alone = {"forward_ms": milliseconds(lambda: call_forward(stage, x))}
    alone["dgrad_ms"] = milliseconds(lambda: call_dgrad(stage, residuals, dy))
    kept = [held.after_dgrad() for held in residuals]
    grads = [jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), stage)]
    call_wgrad = compiled(wgrad, grads[0], stage, kept, stashes, donate=(0,))

    def add() -> Any:
        grads[0] = call_wgrad(grads[0], stage, kept, stashes)
        return grads[0]

    return alone | {"wgrad_ms": milliseconds(add)}


def made_of(ms: float, alone: Row, schedule: Schedule, runtime: str) -> Row:
    """Returns a step's time by category: its actions as often as it has them, the bubble they leave, and what is not told."""
    costs = Costs(alone["forward_ms"], alone["dgrad_ms"], alone["wgrad_ms"])
    played = simulate(schedule, costs, execution="lockstep" if runtime == "aligned" else "dataflow")
    found = {"actions": float(played.busy.mean()), "bubble": played.makespan - float(played.busy.mean())}
    if runtime == "general":
        ticks = simulate(schedule, costs, execution="neighbours").makespan
        found["waiting for neighbours"] = max(ticks - played.makespan, 0.0)
    return found | {"not told": ms - sum(found.values())}


if __name__ == "__main__":
    time_schedule(request())
