"""The split backward against `jax.vjp`, one GPT block.

    python -m benchmarks run split_backward

`one program` is a jit around everything, as in a pipeline's round; `two` and `three` are what a host calls one by one, so that
residuals pass through memory. All variants add the weight gradients into a float32 main_grad that is donated.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jgraph
from benchmarks.peers.protocol import Clock
from benchmarks.programs.models import gpt_blocks
from benchmarks.rows import Row, ratio, spread
from benchmarks.runner import Benchmark, Options, Work
from benchmarks.tables import Section, number

SIZES: dict[str, dict[str, Row]] = {
    "full": {
        "d 4096, 4096 tokens": {"d_model": 4096, "num_heads": 32, "d_ff": 16384, "batch": 2, "length": 2048},
        "launch-bound, d 256, 256 tokens": {"d_model": 256, "num_heads": 4, "d_ff": 1024, "batch": 2, "length": 128},
    },
    "tiny": {"tiny": {"d_model": 64, "num_heads": 4, "d_ff": 256, "batch": 2, "length": 32}},
}


def works(options: Options) -> Iterator[Work]:
    for name, size in SIZES[options.sizes].items():
        yield Work(name, {"ranks": 1, "size": size}, rows=partial(rows, size, options.clock))


def rows(size: Row, clock: Clock) -> Iterator[Row]:
    stage, (params,), x, dy = gpt_blocks(size | {"num_blocks": 1})
    for variant, run in variants(stage, params, x, dy).items():
        total = [jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)]

        def step(run: Any = run, total: Any = total) -> None:
            total[0] = run(total[0])

        timing = clock.back_to_back(step, partial(jax.block_until_ready, total))
        row = {"system": "jgraph" if "split" in variant else "jax", "variant": variant, "device": jax.devices()[0].device_kind}
        yield row | {"ms": timing.ms, "repeats_ms": timing.repeats_ms, "sm_clock_mhz": timing.sm_clock_mhz}


def add(total: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda t, g: t if g is None else t + g.astype(t.dtype), total, gradients, is_leaf=lambda g: g is None)


def variants(stage: Any, params: Any, x: jax.Array, dy: jax.Array) -> dict[str, Callable[[Any], Any]]:
    """Each takes main_grad, which is donated, and gives back main_grad."""
    split = jgraph.split_backward(stage)

    def joint(total, params, x, dy):
        y, vjp = jax.vjp(stage, params, x)
        gradients, dx = vjp(dy)
        return add(total, gradients), y, dx

    def parts(total, params, x, dy):
        y, residuals = split.forward(params, x)
        dx, early, stash = split.dgrad(params, residuals, dy)
        return split.accumulate(add(total, early), params, residuals, stash), y, dx

    def twice(total, params, x, dy):
        y, vjp_x = jax.vjp(lambda x: stage(params, x), x)
        (dx,) = vjp_x(dy)
        # A barrier, or XLA sees that both backward passes are one.
        params, x, dy = jax.lax.optimization_barrier((params, x, dy))
        _, vjp_params = jax.vjp(lambda params: stage(params, x), params)
        return add(total, vjp_params(dy)[0]), y, dx

    def vjp_backward(total, vjp, dy):
        gradients, dx = vjp(dy)
        return add(total, gradients), dx

    def split_dgrad(total, params, residuals, dy):
        dx, early, stash = split.dgrad(params, residuals, dy)
        return add(total, early), dx, stash

    one, two, both, backward, dgrad, accumulate = (
        jax.jit(program, donate_argnums=0) for program in (joint, parts, twice, vjp_backward, split_dgrad, split.accumulate)
    )
    forward, forward_vjp = jax.jit(split.forward), jax.jit(lambda params, x: jax.vjp(stage, params, x))

    def three(total):
        _, residuals = forward(params, x)
        total, _, stash = dgrad(total, params, residuals, dy)
        return accumulate(total, params, residuals.after_dgrad(), stash)

    return {
        "jax.vjp, one program": lambda total: one(total, params, x, dy)[0],
        "split, one program": lambda total: two(total, params, x, dy)[0],
        "two jax.vjp, one program": lambda total: both(total, params, x, dy)[0],
        "jax.vjp, two programs": lambda total: backward(total, forward_vjp(params, x)[1], dy)[0],
        "split, three programs": three,
    }


def section(name: str, result: Row) -> Section:
    by = {row["variant"]: row for row in result["rows"]}

    def to_vjp(row: Row) -> str:
        if "alone" in row["variant"] or "without" in row["variant"]:
            return ""
        to = by.get(f"jax.vjp, {'one program' if 'one' in row['variant'] else 'two programs'}")
        return "1.000" if row is to else ratio(row, to)

    columns = {"variant": lambda row: row["variant"], "ms": number("ms", ".3f"), "fastest, slowest": spread}
    return Section(name, columns | {"ms / jax.vjp, same number of programs": to_vjp})


BENCHMARK = Benchmark("Split backward, one GPT block", __doc__, Options, works, section)
