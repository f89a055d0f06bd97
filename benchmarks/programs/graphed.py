"""Times graphed callables: a chain of GPT blocks, or the step of a pipeline."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jgraph
from benchmarks.harness import soak
from benchmarks.peers.protocol import Timer, answer, read_request, take_turns
from benchmarks.programs.models import gpt_blocks, half_square, mlp_layer, mlp_layers
from benchmarks.programs.step import first_devices, make_stepper
from benchmarks.rows import Row
from benchmarks.works import MLPSize, parse_schedule

# N tokens, D model, B batch, T sequence


@dataclass(frozen=True)
class Blocks:
    """A chain of GPT blocks in bfloat16: one `stage` with the parameters of each block, an input and its gradient `dy`."""

    stage: Callable[[Any, jax.Array], jax.Array]
    params: tuple[Any, ...]
    x: jax.Array
    dy: jax.Array

    @classmethod
    def of(cls, size: Row) -> "Blocks":
        """Creates the blocks of a size."""
        stage, params, x, dy = gpt_blocks(size)
        return cls(stage, tuple(jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)), x, dy)

    @property
    def order(self) -> list[int]:
        """Order of the calls in signed numbers: all forwards, then all backwards."""
        n = len(self.params)
        return [*range(1, n + 1), *range(-n, 0)]

    def graphed(self, **options: Any) -> Any:
        """Returns the graphed callables of the blocks."""
        n = len(self.params)
        return jgraph.make_graphed_callables((self.stage,) * n, self.params, ((self.x,),) * n, **options)

    def one_by_one(self, **options: Any) -> Callable[[], Any]:
        """Returns an iteration that calls each graphed callable."""
        graphed = self.graphed(**options)
        calls = [graphed[i] for i in range(len(graphed))]
        return self.chained([lambda params, x, call=call: (call(params, x), call.backward) for call in calls])

    def jitted(self) -> Callable[[], Any]:
        """Returns an iteration with plain `jax.jit`. The vjp function is a pytree that holds the residuals."""
        run, backward = jax.jit(lambda params, x: jax.vjp(self.stage, params, x)), jax.jit(lambda vjp, dy: vjp(dy))

        def forward(params: Any, x: jax.Array) -> Any:
            y, vjp = run(params, x)
            return y, partial(backward, vjp)

        return self.chained([forward] * len(self.params))

    def chained(self, forwards: Sequence[Callable[[Any, jax.Array], Any]]) -> Callable[[], Any]:
        """Returns an iteration over functions that return y and a backward function. It returns all gradients and dx."""

        def iteration():
            y, backwards, gradients, dx = self.x, [], [], self.dy
            for forward, params in zip(forwards, self.params, strict=True):
                y, backward = forward(params, y)
                backwards.append(backward)
            while backwards:
                grads, dx = backwards.pop()(dx)
                gradients.append(grads)
            return gradients, dx

        return iteration

    def run(self, join: str, **options: Any) -> Callable[[], Any]:
        """Returns an iteration that calls `run` of the graphed callables, and returns losses and gradients."""
        graphed = self.graphed(order=self.order, **options)

        def iteration():
            result = graphed.run(None, (self.x,), _product, params=self.params, loss_args=((self.dy,),), join=join)
            return result.losses, result.grads

        return iteration


def _product(y: jax.Array, dy: jax.Array) -> jax.Array:
    """A loss with gradient `dy`."""
    return jnp.vdot(y.astype(jnp.float32), dy.astype(jnp.float32))


BLOCKS: dict[str, Callable[[Blocks], Callable[[], Any]]] = {
    "one by one": lambda blocks: blocks.one_by_one(),
    "run, join segments": lambda blocks: blocks.run("segments"),
    "run, join nothing": lambda blocks: blocks.run("nothing"),
    "jit a block": lambda blocks: blocks.jitted(),
}


def time_blocks(request: Row) -> None:
    """Times a variant of the blocks."""
    start = time.perf_counter()
    iteration, replays = BLOCKS[request["variant"]](Blocks.of(request["size"])), 2 * request["size"]["num_blocks"]
    jax.block_until_ready(iteration())
    device = f"1 x {jax.devices()[0].device_kind}"
    answer(build_and_first_s=time.perf_counter() - start, replays=replays, device=device)
    run, wait, _ = make_stepper(
        iteration
    )  # drops the gradients of the previous iteration first, like zero_grad(set_to_none=True)

    def measure(timer: Timer) -> Row:
        return timer.back_to_back(run, wait) | {"host_us": timer.dispatch_seconds(run, wait) / replays * 1e6}

    take_turns(measure, partial(soak, run, wait, jax.devices()[:1], dict))


def mlp_stage(params: tuple[Any, ...], x_ND: jax.Array) -> jax.Array:
    """Applies the MLP layers of a stage."""
    for layer in params:
        x_ND = mlp_layer(layer, x_ND)
    return x_ND


def time_pipeline(request: Row) -> None:
    """Times the step of a pipeline."""
    size, ranks = MLPSize(**request["size"]), request["ranks"]
    devices = first_devices(ranks)
    schedule = parse_schedule(request["schedule"], ranks, size.microbatches)
    stages = schedule.num_stages
    if size.layers % stages:
        raise RuntimeError(f"{size.layers} layers do not divide evenly into {stages} stages")
    layers = mlp_layers(size)
    params = tuple(tuple(layers[i : i + size.layers // stages]) for i in range(0, size.layers, size.layers // stages))
    keys = jax.random.split(jax.random.key(1), size.microbatches)
    inputs = tuple(jax.random.normal(key, (size.tokens, size.d_model), jnp.bfloat16) for key in keys)
    start = time.perf_counter()
    graphed = jgraph.make_graphed_callables(
        (mlp_stage,) * stages,
        params,
        ((inputs[0],),) * stages,
        order=schedule,
        delay_wgrad=any(action.kind == "wgrad" for order in schedule for action in order),
        param_grads="aliased",
        reuse_buffers=True,
        devices=devices,
    )
    answer(device=f"{ranks} x {devices[0].device_kind}", build_s=time.perf_counter() - start)
    placed = graphed.place(params)

    def step():
        result = graphed.run(None, inputs, half_square, params=placed, join=request["join"])
        return result.losses, result.grads

    run, wait, latest = make_stepper(step)
    start = time.perf_counter()
    run()
    wait()
    answer(first_step_s=time.perf_counter() - start, loss=sum(map(float, latest[0][0])))

    def measure(timer: Timer) -> Row:
        return timer.one_by_one(run, wait) | {"host_ms": timer.dispatch_seconds(run, wait) * 1e3}

    take_turns(measure)


if __name__ == "__main__":
    request = read_request()
    {"blocks": time_blocks, "pipeline": time_pipeline}[request["task"]](request)
