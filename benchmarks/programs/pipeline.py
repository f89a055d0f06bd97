"""Times a pipeline schedule on the SPMD or the MPMD engine, and its actions, embedding, head and transfers in isolation.

Each measurement is reported as soon as it is done, so that a crash loses only the following ones.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.peers.protocol import Timer, answer, read_request, take_turns
from benchmarks.programs.models import Model, model_of
from benchmarks.programs.step import compiled_bytes, count_graph_launches, first_devices, make_stepper
from benchmarks.rows import Row
from benchmarks.works import GPTSize, parse_schedule, size_from_dict
from jgraph import FP8Config
from jgraph.dispatch import in_turn
from jgraph.layout import named
from jgraph.pipeline import Pipeline, Pipelined
from jgraph.pipeline.dispatched import dispatched
from jgraph.precision.config import XLA_OPTIONS
from jgraph.precision.transform import FP8Function
from jgraph.schedule import Costs, Schedule, simulate
from jgraph.schedule.action import KINDS
from jgraph.schedule.tables import tabulate
from jgraph.strategies.objective import Carry, Objective
from jgraph.train.metrics import peak_memory_bytes
from jgraph.xla import compile_and_report, compiler_options
from jgraph.xla.options import known

# Transfers, and layers, per timed program. A shorter program takes less time than its dispatch.
CALLS, CALLED_LAYERS = 4, 16


def time_schedule(request: Row) -> None:
    """Entry point of the candidate process."""
    ranks, size, timer = request["ranks"], size_from_dict(request["size"]), Timer(**request["clock"])
    if isinstance(size, GPTSize):
        model = replace(size.model, norm=request["norm"] or size.model.norm)
        size = replace(size, model=model.in_fp8() if request["fp8"] else model)
    devices, platform = first_devices(ranks), jax.default_backend()
    model, schedule = model_of(size, ranks), parse_schedule(request["schedule"], ranks, size.microbatches)
    mesh = Mesh(np.array(devices).reshape(1, ranks), ("data", "pipe"))
    pipe = pipeline_of(model, schedule, mesh, remat=request["remat"], recipe=request["fp8"])
    stacked = pipe.tree(pipe.layout.pack(model.parts.join(model.ends, model.layers)))
    params = jax.device_put(stacked, pipe.shardings)
    inputs, history = jax.device_put(
        (model.inputs, pipe.precision.state(len(model.layers))), NamedSharding(mesh, PartitionSpec())
    )
    del stacked
    model.layers.clear()  # frees the unsharded parameters on the first device
    held_before = peak_memory_bytes(devices[0])
    runtime = "dispatched" if request["engine"] == "dispatch" else pipe.runtime
    answer(device=f"{ranks} x {devices[0].device_kind}", runtime=runtime)

    chosen = known(XLA_OPTIONS, platform) if pipe.precision.weights else ()
    options = compiler_options(request["graph"], (*chosen, *request["xla_options"]), platform=platform, num_devices=ranks)
    if platform == "gpu":  # keeps command buffers while the profiler counts launches
        options["xla_enable_command_buffers_during_profiling"] = True
    call = mpmd_step if runtime == "dispatched" else spmd_step
    run, wait, latest = make_stepper(call(pipe, params, inputs, history, options))
    run()
    wait()
    # The dispatch engine returns the sum of unweighted losses over the microbatches.
    count = size.microbatches if pipe.precision.weights and runtime == "dispatched" else 1
    loss = float(latest[0][0].addressable_data(0).ravel()[0]) / count
    # The first device held the unsharded model before. Its peak counts only if the step exceeded that.
    peaks = [peak if n or peak > held_before else 0 for n, peak in enumerate(map(peak_memory_bytes, devices))]
    answer(loss=loss, peak_bytes=max(peaks), peaks_bytes=peaks)
    turns = []

    def measure(timer: Timer) -> Row:
        turns.append(timer.one_by_one(run, wait))
        return turns[-1]

    take_turns(measure)
    stream = timer.on_platform(run, wait, platform)
    answer(stream_ms=stream["ms"], host_ms=timer.dispatch_seconds(run, wait) * 1e3)
    answer(**count_graph_launches(run, wait))
    if request["actions"] and turns:
        latest.clear()
        alone = time_actions(pipe, inputs, timer, options)
        alone |= time_ends(pipe, params, inputs, timer, options, together=runtime != "dispatched")
        alone["permute_ms"] = time_permute(pipe, params, inputs, timer, options)
        answer(
            alone=alone, categories=step_breakdown(statistics.median(turn["ms"] for turn in turns), alone, schedule, runtime)
        )


def pipeline_of(model: Model, schedule: Schedule, mesh: Mesh, *, remat: Any, recipe: Any) -> Pipeline:
    """Builds the pipeline of a training step, on a mesh with the axes data and pipe."""
    shapes = jax.eval_shape(model.parts.join, model.ends, model.layers)
    strategy = Pipelined(mesh, shapes, schedule, compute_dtype=model.compute_dtype, remat=remat)
    objective = Objective(
        loss=model.parts,
        layout=named(shapes),
        num_microbatches=schedule.num_microbatches,
        fp8=FP8Config(recipe=recipe) if recipe else None,
        batch=jax.eval_shape(merge_microbatches, model.inputs),
    )
    return strategy.pipeline(objective)[0]


def merge_microbatches(inputs: Any) -> Any:
    """Returns the batch without the microbatch axis."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), inputs)


def spmd_step(pipe: Pipeline, params: Any, inputs: Any, history: Any, options: Any) -> Callable[[], tuple[jax.Array, Any]]:
    """Compiles the schedule as one SPMD program. Donates the FP8 amax histories, and carries them from step to step."""
    start, held = time.perf_counter(), [history]

    def step(params: Any, inputs: Any, history: Any) -> Any:
        loss, grads, _, after = pipe.step(params, inputs, None, (), history)
        return loss, grads, after

    lowered = jax.jit(step, donate_argnums=2).lower(params, inputs, history)
    traced = time.perf_counter()
    compiled, report = compile_and_report(lowered, options)
    seconds = {"trace_s": traced - start, "compile_s": time.perf_counter() - traced}
    answer(**seconds, capture=str(report) if report else None, **compiled_bytes(compiled))

    def call() -> tuple[jax.Array, Any]:
        loss, grads, held[0] = compiled(params, inputs, held[0])
        return loss, grads

    return call


def mpmd_step(pipe: Pipeline, params: Any, inputs: Any, history: Any, options: Any) -> Callable[[], tuple[jax.Array, Any]]:
    """Compiles the schedule as MPMD executables that the host dispatches. Carries the FP8 amax histories."""
    start = time.perf_counter()
    step = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(pipe.mesh, PartitionSpec()))
    held: list[Any] = [Carry({}, history)]

    def shapes(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)

    key = jax.random.key(0)
    arrays = pipe.arrays(params)
    gradients = dispatched(pipe, shapes(arrays), shapes(held[0]), pipe.tree, shapes(inputs), key, options)
    histories = gradients.results.histories

    def finish(histories: Any) -> Any:
        return pipe.precision.finish(histories, (), pipe.assignment)

    specs = jax.tree.map(lambda shape: shape.sharding.spec, histories)
    mapped = jax.shard_map(finish, mesh=pipe.mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)
    after = jax.jit(mapped).lower(histories).compile(compiler_options=options) if jax.tree.leaves(history) else None
    answer(compile_s=time.perf_counter() - start, capture=str(gradients))

    def call() -> tuple[jax.Array, Any]:
        results = gradients(arrays, held[0], step, inputs)
        if after:
            held[0] = Carry({}, in_turn(after(results.histories)))
        return results.loss, results

    return call


def time_actions(pipe: Pipeline, inputs: Any, timer: Timer, options: Any) -> Row:
    """Times forward, dgrad and wgrad of a stage on one GPU. Each call depends on the previous one, as in a pipeline."""
    layers = pipe.assignment.layers_per_stage
    function, split, calls = pipe.stage(None, layers), pipe.split(None, layers), max(1, CALLED_LAYERS // layers)
    shapes, (x, *_) = pipe.layer_shapes(inputs)
    ([layer], extra), _, _ = shapes

    def forward(stage: Any, x: jax.Array) -> Any:
        made = []
        for _ in range(calls):
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
        return isolated_ms(call, timer) / calls

    own = ([random_like(layer, 0.02, key) for key in range(layers)], extra)
    x, dy = random_like(x), random_like(x, key=1)
    state = pipe.precision.state(layers)
    stage = own, state, function.quantize(own, state, x) if isinstance(function, FP8Function) else None
    call_forward = compiled(forward, stage, x)
    residuals, _ = call_forward(stage, x)
    call_dgrad = compiled(dgrad, stage, residuals, dy)
    stashes, *_ = call_dgrad(stage, residuals, dy)
    alone = {"forward_ms": milliseconds(lambda: call_forward(stage, x))}
    alone["dgrad_ms"] = milliseconds(lambda: call_dgrad(stage, residuals, dy))
    wgrad_residuals = [held.after_dgrad() for held in residuals]
    sums = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), own)
    grads = [(sums, None, None)]
    call_wgrad = compiled(wgrad, grads[0], stage, wgrad_residuals, stashes, donate=(0,))

    def add() -> Any:
        grads[0] = call_wgrad(grads[0], stage, wgrad_residuals, stashes)
        return grads[0]

    return alone | {"wgrad_ms": milliseconds(add)}


def time_ends(pipe: Pipeline, params: Any, inputs: Any, timer: Timer, options: Any, *, together: bool) -> Row:
    """Times head and embedding of a microbatch with their gradients: on all ranks `together`, or on one GPU."""
    model, (x, *_) = pipe.model, pipe.inputs(inputs)
    mesh = pipe.mesh if together else Mesh(pipe.mesh.devices[:, :1], pipe.mesh.axis_names)
    specs = pipe.specs.outer
    outer, inputs, x = jax.device_put(
        (params.outer, jax.tree.map(lambda leaf: leaf[:CALLS], inputs), random_like(x)),
        (jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs), *[NamedSharding(mesh, PartitionSpec())] * 2),
    )

    def head(outer: Any, inputs: Any, x: jax.Array) -> Any:
        read, here = pipe.cast(outer), jax.lax.axis_index("pipe") == mesh.shape["pipe"] - 1

        def one(total: Any, microbatch: Any) -> Any:
            y = jnp.where(here, x, jnp.zeros((), x.dtype))
            loss, pull_back = jax.vjp(lambda outer, y: model.head(outer, y, microbatch), read, y)
            grads, dy = pull_back(here.astype(loss.dtype))
            return added(total, grads), (loss, dy)

        return jax.lax.scan(one, zeros(outer), inputs)

    def embed(outer: Any, inputs: Any, dx: jax.Array) -> Any:
        def one(total: Any, microbatch: Any) -> Any:
            x, pull_back = jax.vjp(lambda outer: model.embed(outer, microbatch), outer)
            return added(total, pull_back(dx)[0]), x

        return jax.lax.scan(one, zeros(outer), inputs)

    def added(total: Any, gradients: Any) -> Any:
        return jax.tree.map(lambda a, g: a + g.astype(a.dtype), total, gradients)

    def zeros(outer: Any) -> Any:
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), outer)

    count, in_specs = len(jax.tree.leaves(inputs)[0]), (specs, PartitionSpec(), PartitionSpec())
    functions = {"head_ms": head} | ({"embed_ms": embed} if jax.tree.leaves(outer) else {})
    calls = {name: on_ranks(function, mesh, in_specs, options, outer, inputs, x) for name, function in functions.items()}
    return {name: isolated_ms(call, timer) / count for name, call in calls.items()}


def time_permute(pipe: Pipeline, params: Any, inputs: Any, timer: Timer, options: Any) -> float:
    """Times a transfer of an activation or gradient from every rank to its neighbor, in milliseconds."""
    ranks = pipe.mesh.shape["pipe"]
    x = jax.device_put(random_like(pipe.inputs(inputs)[0]), NamedSharding(pipe.mesh, PartitionSpec()))

    def permute(x: jax.Array) -> jax.Array:
        for i in range(CALLS):
            x = jax.lax.ppermute(x, "pipe", [(r, (r + (-1) ** i) % ranks) for r in range(ranks)])
        return x

    return isolated_ms(on_ranks(permute, pipe.mesh, (PartitionSpec(),), options, x), timer) / CALLS


def on_ranks(function: Callable[..., Any], mesh: Mesh, in_specs: Any, options: Any, *args: Any) -> Callable[[], Any]:
    """Compiles a function for all ranks. Its results may differ between ranks."""

    def local(*args: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], function(*args))

    mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec("pipe"), check_vma=False)
    compiled = jax.jit(mapped).lower(*args).compile(compiler_options=options)
    return lambda: compiled(*args)


def isolated_ms(call: Callable[[], Any], timer: Timer) -> float:
    """Returns the milliseconds of a call."""
    run, wait, _ = make_stepper(call)
    return timer.on_platform(run, wait, jax.default_backend())["ms"]


def random_like(shapes: Any, scale: float = 1.0, key: int = 0) -> Any:
    """Creates random arrays. Zeros would draw less power and run faster than realistic values."""
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(key), len(leaves))
    made = [scale * jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)]
    return structure.unflatten(made)


def step_breakdown(ms: float, alone: Row, schedule: Schedule, runtime: str) -> Row:
    """Splits the milliseconds of a step into actions, bubble, ends (embedding and head), permutes, waiting and the rest."""
    costs = Costs(alone["forward_ms"], alone["dgrad_ms"], alone["wgrad_ms"])
    played = simulate(schedule, costs, execution="lockstep" if runtime == "aligned" else "dataflow")
    found = {"actions": float(played.busy.mean()), "bubble": played.makespan - float(played.busy.mean())}
    if runtime == "dispatched":  # only the first and last stage have ends; transfers overlap with actions
        forward, dgrad, *_ = costs.table(schedule.num_stages)
        forward[-1] += alone["head_ms"]
        dgrad[0] += alone.get("embed_ms", 0.0)
        costs = replace(costs, forward=forward.tolist(), dgrad=dgrad.tolist())
        with_ends, with_both = (simulate(schedule, costs, latency=ms).makespan for ms in (0.0, alone["permute_ms"]))
        found |= {"ends": with_ends - played.makespan, "permutes": with_both - with_ends}
    else:
        found["ends"] = schedule.num_microbatches * (alone["head_ms"] + alone.get("embed_ms", 0.0))
        found["permutes"] = count_permutes(schedule, runtime) * alone["permute_ms"]
    if runtime == "general":
        ticks = simulate(schedule, costs, execution="neighbours").makespan
        found["waiting for neighbours"] = max(ticks - played.makespan, 0.0)
    return found | {"not told": ms - sum(found.values())}


def count_permutes(schedule: Schedule, runtime: str) -> int:
    """Counts the collective permutes of a step.

    The general runtime permutes in both directions on every tick, the aligned one only after a forward or dgrad.
    """
    tables = tabulate(schedule, writing="makers" if runtime == "aligned" else "all")
    used = {pair for pair in tables.arrivals if pair[0] != "same"}
    if runtime == "general":
        return len(tables.table.kind) * len({source for source, _ in used})
    makes = {"activation": KINDS.index("forward"), "gradient": KINDS.index("dgrad")}
    return sum(int((tables.table.kind == makes[pool]).any(axis=1).sum()) for _, pool in used)


if __name__ == "__main__":
    time_schedule(read_request())
