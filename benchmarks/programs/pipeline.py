"""A process that is asked about a schedule as one program: its time, a soak, or its actions' times.

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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.harness import soak
from benchmarks.peers.protocol import Clock, answer, serve, take_turns
from benchmarks.programs.models import Model
from benchmarks.programs.step import compiled_bytes, launched, stepping
from benchmarks.rows import Row
from benchmarks.works import schedule_of, size_from
from jgraph.backward import split_backward
from jgraph.parallel.pipeline import Pipeline
from jgraph.training.metrics import peak_memory_bytes
from jgraph.xla import compile_and_report, compiler_options

# Calls in a timed program. Alone, a small action takes less time than the host needs to hand it over.
CALLS = 4


@dataclass(frozen=True)
class Program:
    """Holds the pipeline that is asked about, with its parameters in place.

    Attributes:
        clock, options: how to time and to compile.
        pipe, params, inputs: of `loss_and_grads`.
        model: without its layers, which are in `params`.
        stage: parameters of one stage on the first device, as it reads them.
    """

    clock: Clock
    options: dict[str, Any]
    pipe: Pipeline
    params: Any
    inputs: Any
    model: Model
    stage: list[Any]

    @classmethod
    def of(cls, asked: Row) -> "Program":
        ranks, size = asked["ranks"], size_from(asked["size"])
        devices = jax.devices()[:ranks]
        if len(devices) < ranks:
            raise RuntimeError(f"{len(devices)} of {ranks} devices are here; say --ranks")
        options = compiler_options(asked["graph"], asked["xla_options"], platform=jax.default_backend(), num_devices=ranks)
        model = Model.of(size, ranks)
        pipe = Pipeline.of(
            model.parts,
            schedule_of(asked["schedule"], ranks, size.microbatches),
            Mesh(np.array(devices).reshape(1, ranks), ("data", "pipe")),
            num_layers=len(model.layers),
            compute_dtype=model.compute_dtype,
            remat=asked["remat"],
        )
        stacked = pipe.stack(model.ends, model.layers)
        params = jax.device_put(stacked, pipe.shardings(stacked))
        inputs = jax.device_put(model.inputs, NamedSharding(pipe.mesh, PartitionSpec()))
        stage = model.layers[: pipe.layout.layers_per_stage] if asked["task"] == "actions" else []
        if model.compute_dtype:
            stage = jax.tree.map(lambda p: p.astype(model.compute_dtype) if p.ndim > 1 else p, stage)
        model.layers.clear()  # they would count as the first device's memory
        return cls(Clock(**asked["clock"]), options, pipe, params, inputs, model, stage)

    def compile(self, function: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Callable[..., Any]:
        return jax.jit(function, donate_argnums=donate).lower(*args).compile(compiler_options=self.options)

    def milliseconds(self, call: Callable[[], Any]) -> float:
        """Returns what a call takes of a program of `CALLS` calls."""
        run, wait, _ = stepping(call)
        return self.clock.in_flight(run, wait, jax.default_backend())["ms"] / CALLS


def time_schedule(asked: Row) -> None:
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
    seconds = {"trace_s": traced - start, "compile_s": time.perf_counter() - traced}
    answer(**seconds, capture=str(report) if report else None, **compiled_bytes(compiled))
    run, wait, latest = stepping(lambda: compiled(program.params, program.inputs))
    run()
    wait()
    # The last device: the first one held the whole model, before it was spread.
    first, devices = float(latest[0][0]), list(pipe.mesh.devices.flat)
    answer(loss=first, peak_bytes=peak_memory_bytes(devices[-1]))
    take_turns(
        lambda clock: clock.one_by_one(run, wait),
        partial(soak, run, wait, devices, lambda: {"same_loss": float(latest[0][0]) == first}),
    )
    stream = clock.in_flight(run, wait, device.platform)
    answer(stream_ms=stream["ms"], host_ms=clock.handover_seconds(run, wait) * 1e3)
    answer(**launched(run, wait))


def time_actions(asked: Row) -> None:
    """Forward, dgrad and wgrad of a stage on one GPU. What each call takes depends on the call before, as in a pipeline."""
    program = Program.of(asked)
    layer = jax.checkpoint(program.model.parts.layer) if program.pipe.remat == "layer" else program.model.parts.layer

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
    x, dy = (jax.random.normal(jax.random.key(i), program.model.x.shape, program.model.x.dtype) for i in (1, 2))
    call_forward = program.compile(forward, params, x)
    _, residuals = call_forward(params, x)
    answer(forward_ms=program.milliseconds(lambda: call_forward(params, x)))

    call_dgrad = program.compile(dgrad, params, residuals, dy)
    _, stashes, _ = call_dgrad(params, residuals, dy)
    answer(dgrad_ms=program.milliseconds(lambda: call_dgrad(params, residuals, dy)))

    kept = [held.after_dgrad() for held in residuals]
    grads = [jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)]
    call_wgrad = program.compile(wgrad, grads[0], params, kept, stashes, donate=(0,))

    def add() -> Any:
        grads[0] = call_wgrad(grads[0], params, kept, stashes)
        return grads[0]

    answer(wgrad_ms=program.milliseconds(add))


if __name__ == "__main__":
    serve({"time": time_schedule, "actions": time_actions})
