"""One question of the pipeline's table, answered in a process of its own: a schedule's time, its actions' times, or a soak.

    python -m benchmarks.pipeline_program '{"task": "time", "schedule": "aligned", "ranks": 4, "size": {...}, ...}'

Every answer is a JSON line and holds more of the row, so that what was measured before a crash is kept.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import harness
from benchmarks.peers.protocol import Clock, answer, request, take_turns, told
from benchmarks.works import Work, schedule_of, size_from
from jgraph.backward import split_backward
from jgraph.parallel.pipeline import Pipeline
from jgraph.training.metrics import peak_memory_bytes
from jgraph.xla import compile_and_report, compiler_options, count_launches

# Calls in a timed program. Alone, a small action takes less time than the host needs to hand it over.
CALLS = 4


@dataclass(frozen=True)
class Program:
    """What is asked about, with its parameters in place.

    Attributes:
        clock, options: how to time and to compile.
        pipe, params, inputs: of `loss_and_grads`.
        work: the model; without its layers, which are in `params`.
        stage: parameters of one stage on the first device, as it reads them.
    """

    clock: Clock
    options: dict[str, Any]
    pipe: Pipeline
    params: Any
    inputs: Any
    work: Work
    stage: list[Any]

    @classmethod
    def of(cls, asked: dict[str, Any]) -> "Program":
        ranks, size = asked["ranks"], size_from(asked["size"])
        devices = jax.devices()[:ranks]
        if len(devices) < ranks:
            raise RuntimeError(f"{len(devices)} of {ranks} devices are here; say --ranks")
        options = compiler_options(asked["graph"], asked["xla_options"], platform=jax.default_backend(), num_devices=ranks)
        work = Work.of(size, ranks)
        pipe = Pipeline.of(
            work.parts,
            schedule_of(asked["schedule"], ranks, size.microbatches),
            Mesh(np.array(devices).reshape(1, ranks), ("data", "pipe")),
            num_layers=len(work.layers),
            compute_dtype=work.compute_dtype,
            remat=asked["remat"],
        )
        stacked = pipe.stack(work.ends, work.layers)
        params = jax.device_put(stacked, pipe.shardings(stacked))
        inputs = jax.device_put(work.inputs, NamedSharding(pipe.mesh, PartitionSpec()))
        stage = work.cast(work.layers[: pipe.layout.layers_per_stage]) if asked["task"] == "actions" else []
        work.layers.clear()  # they would count as the first device's memory
        return cls(Clock(**asked["clock"]), options, pipe, params, inputs, work, stage)

    def compile(self, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        return jax.jit(function, donate_argnums=donate).lower(*args).compile(compiler_options=self.options)

    def back_to_back(self, run: Callable[[], Any], wait: Callable[[], Any]) -> float:
        """Milliseconds of a step."""
        # On a CPU the threads of one step can wait for those of another, in another collective, for ever.
        on_cpu = jax.default_backend() == "cpu"
        return (self.clock.one_by_one if on_cpu else self.clock.back_to_back)(run, wait).ms

    def milliseconds(self, run: Callable[[], Any]) -> float:
        """Of a program of `CALLS` calls, a call."""
        latest: list[Any] = [None]

        def step():
            latest[0] = None
            latest[0] = run()

        return self.back_to_back(step, lambda: jax.block_until_ready(latest)) / CALLS


# A schedule


def time_schedule(asked: dict[str, Any]) -> None:
    program = Program.of(asked)
    pipe, clock, device = program.pipe, program.clock, jax.devices()[0]
    answer(device=f"{asked['ranks']} x {device.device_kind}", runtime=pipe.runtime)
    options = dict(program.options)
    if device.platform == "gpu":  # or command buffers are left aside while launches are counted
        options["xla_enable_command_buffers_during_profiling"] = True
    start = time.perf_counter()
    lowered = jax.jit(pipe.loss_and_grads).lower(program.params, program.inputs)
    traced = time.perf_counter()
    compiled, report = compile_and_report(lowered, options)
    answer(trace_s=traced - start, compile_s=time.perf_counter() - traced, capture=str(report) if report else None)
    memory = compiled.memory_analysis()
    if memory is not None:
        names = "argument", "temp", "output", "alias"
        answer(**{f"{name}_bytes": getattr(memory, f"{name}_size_in_bytes") for name in names})
    run, wait, latest = steps(program, compiled)
    run()
    wait()
    # The last device: the first one held the whole model, before it was spread.
    answer(loss=float(latest[0][0]), peak_bytes=peak_memory_bytes(pipe.mesh.devices.flat[-1]))
    take_turns(lambda clock: told(clock.one_by_one(run, wait)))
    answer(stream_ms=program.back_to_back(run, wait), host_ms=clock.handover_seconds(run, wait) * 1e3)
    with count_launches() as count:
        run()
        wait()
    answer(launches=count.launches, updates=count.updates)


def steps(program: Program, compiled: Any) -> tuple[Callable[[], None], Callable[[], None], list[Any]]:
    """How to hand over a step and to wait for it; and where its result is."""
    latest: list[Any] = [None]

    def run():
        latest[0] = None  # gradients of the step before, whose memory this one takes
        latest[0] = compiled(program.params, program.inputs)

    def wait():
        jax.block_until_ready(latest)

    return run, wait, latest


# Actions alone


def time_actions(asked: dict[str, Any]) -> None:
    program = Program.of(asked)
    for times in (time_stage, time_ends, time_transfers):
        answer(**times(program))


def time_stage(program: Program) -> dict[str, float]:
    """Forward, dgrad and wgrad of a stage on one GPU. What each call takes depends on the call before, as in a pipeline."""
    layer = jax.checkpoint(program.work.parts.layer) if program.pipe.remat == "layer" else program.work.parts.layer

    def stage(params: Any, x: jax.Array) -> jax.Array:
        for own in params:
            x = layer(own, x)
        return x

    split = split_backward(stage)

    def forward(params: Any, x: jax.Array) -> Any:
        made = []
        for _ in range(CALLS):
            x, residuals = split.forward(params, x)
            made.append(residuals)
        return x, made

    def dgrad(params: Any, residuals: Any, dy: jax.Array) -> Any:
        made, early = [], []
        for held in residuals:
            dy, gradients, stash = split.dgrad(params, held, dy)
            made.append(stash)
            early.append(gradients)
        return dy, made, early

    def wgrad(grads: Any, params: Any, residuals: Any, stashes: Any) -> Any:
        for held, stash in zip(residuals, stashes, strict=True):
            grads = split.accumulate(grads, params, held, stash)
        return grads

    params = program.stage
    x, dy = (jax.random.normal(jax.random.key(i), program.work.x.shape, program.work.x.dtype) for i in (1, 2))
    call = program.compile(forward, params, x)
    _, residuals = call(params, x)
    forward_ms = program.milliseconds(lambda: call(params, x))

    call = program.compile(dgrad, params, residuals, dy)
    _, stashes, _ = call(params, residuals, dy)
    dgrad_ms = program.milliseconds(lambda: call(params, residuals, dy))

    kept = [held.after_dgrad() for held in residuals]
    grads = [jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)]
    call = program.compile(wgrad, grads[0], params, kept, stashes, donate=(0,))

    def add() -> Any:
        grads[0] = call(grads[0], params, kept, stashes)
        return grads[0]

    return {"forward_ms": forward_ms, "dgrad_ms": dgrad_ms, "wgrad_ms": program.milliseconds(add)}


def time_ends(program: Program) -> dict[str, float]:
    """Head, embedding and its backward, by all ranks together, as they are in a step; and the sum of their gradients."""
    parts, pipe, ends = program.work.parts, program.pipe, program.params["ends"]
    specs = pipe.specs(program.params)["ends"]
    inputs = jax.tree.map(lambda leaf: leaf[:CALLS], program.inputs)
    shape, dtype = (CALLS, *program.work.x.shape), program.work.x.dtype
    ys = jax.device_put(jax.random.normal(jax.random.key(3), shape, dtype), NamedSharding(pipe.mesh, PartitionSpec()))

    def add(total: Any, gradients: Any) -> Any:
        return jax.tree.map(lambda a, g: a + g.astype(a.dtype), total, gradients)

    def head(ends: Any, inputs: Any, ys: jax.Array) -> Any:
        read, here = program.work.cast(ends), lax.axis_index("pipe") == pipe.schedule.num_ranks - 1

        def one(total: Any, pair: Any) -> Any:
            own, y = pair
            y = jnp.where(here, y, jnp.zeros((), y.dtype))
            loss, pull_back = jax.vjp(lambda ends, y: parts.head(ends, y, own), read, y)
            gradients, dy = pull_back(here.astype(loss.dtype))
            return add(total, gradients), (loss, dy)

        return lax.scan(one, zeros(ends), (inputs, ys))

    def embed(ends: Any, inputs: Any, ys: jax.Array) -> Any:
        return lax.map(lambda own: parts.embed(ends, own), inputs)

    def embed_backward(ends: Any, inputs: Any, ys: jax.Array) -> Any:
        def one(total: Any, pair: Any) -> Any:
            own, dx = pair
            return add(total, jax.vjp(lambda ends: parts.embed(ends, own), ends)[1](dx)[0]), None

        return lax.scan(one, zeros(ends), (inputs, ys))[0]

    def psum(ends: Any, inputs: Any, ys: jax.Array) -> Any:
        whole = [g for g, spec in zip(jax.tree.leaves(ends), jax.tree.leaves(specs), strict=True) if spec == PartitionSpec()]
        for _ in range(CALLS):  # XLA would make one sum of several, were they not of different numbers
            whole = lax.psum([g * (1.0 + lax.axis_index("pipe")) for g in whole], "pipe")
        return whole

    def zeros(ends: Any) -> Any:
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), ends)

    functions = (head, embed, embed_backward, psum) if jax.tree.leaves(ends) else (head,)
    in_specs = specs, PartitionSpec(), PartitionSpec()
    return {f"{f.__name__}_ms": on_all_ranks(program, f, in_specs, (ends, inputs, ys)) for f in functions}


def time_transfers(program: Program) -> dict[str, float]:
    """An activation passed on to the next rank, or a gradient to the one before."""
    ranks = program.pipe.schedule.num_ranks
    x = jnp.zeros(program.work.x.shape, program.work.x.dtype)

    def permute(x: jax.Array) -> jax.Array:
        for i in range(CALLS):
            x = lax.ppermute(x, "pipe", [(r, (r + (-1) ** i) % ranks) for r in range(ranks)])
        return x

    x = jax.device_put(x, NamedSharding(program.pipe.mesh, PartitionSpec()))
    return {"permute_ms": on_all_ranks(program, permute, (PartitionSpec(),), (x,))}


def on_all_ranks(program: Program, function: Callable[..., Any], specs: tuple[Any, ...], args: tuple[Any, ...]) -> float:
    """Milliseconds of a call; what the ranks give back may differ, and none of it is looked at."""

    def local(*args: Any) -> Any:
        return jax.tree.map(lambda a: a[None], function(*args))

    mesh = program.pipe.mesh
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("pipe"), check_vma=False)
    return program.milliseconds(partial(program.compile(mapped, *args), *args))


# Soak


def soak(asked: dict[str, Any]) -> None:
    """Steps, each waited for; ten answers on the way. A step that hangs ends the process, and where is written down."""
    program = Program.of(asked)
    run, wait, latest = steps(program, program.compile(program.pipe.loss_and_grads, program.params, program.inputs))
    for _ in range(3):
        run()
        wait()
    first, devices = float(latest[0][0]), list(program.pipe.mesh.devices.flat)
    answer(device=f"{len(devices)} x {devices[0].device_kind}")
    for row in harness.soak(run, wait, devices, steps=asked["steps"], hang_seconds=asked["hang_seconds"]):
        answer(**row, same_loss=float(latest[0][0]) == first)


def main() -> None:
    asked = request()
    {"time": time_schedule, "actions": time_actions, "soak": soak}[asked["task"]](asked)


if __name__ == "__main__":
    main()
