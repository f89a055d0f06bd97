"""The split backward against `jax.vjp`, one GPT block.

    python -m benchmarks run split_backward

`one program` is a jit around everything, as in a pipeline's round; `two` and `three` are what a host calls one by one, so that
residuals pass through memory. All variants add the weight gradients into a float32 main_grad that is donated.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jgraph
from benchmarks.rows import Row, ratio, spread
from benchmarks.runner import Benchmark, Options, Work
from benchmarks.tables import Section, number
from jgraph.training.config import ModelConfig
from models.gpt import Block, rotary

# Width, heads, width of the MLP; tokens.
SIZES = {
    "full": {
        "d 4096, 4096 tokens": ((4096, 32, 16384), (2, 2048)),
        "launch-bound, d 256, 256 tokens": ((256, 4, 1024), (2, 128)),
    },
    "tiny": {"tiny": ((64, 4, 256), (2, 32))},
}


@dataclass(frozen=True, kw_only=True)
class Flags(Options):
    """What to run."""

    name: str = "split_backward"


def works(options: Flags) -> Iterator[Work]:
    for name, (widths, tokens) in SIZES[options.sizes].items():

        def rows(widths: Any = widths, tokens: Any = tokens) -> Iterator[Row]:
            stage, params, x, dy = build(widths, tokens)
            for variant, run in variants(stage, params, x, dy).items():
                total = [jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)]

                def step(run: Any = run, total: Any = total) -> None:
                    total[0] = run(total[0])

                timing = options.clock.back_to_back(step, lambda total=total: jax.block_until_ready(total))
                row = {"system": "jgraph" if "split" in variant or "alone" in variant else "jax", "variant": variant}
                row |= {"ms": timing.ms, "repeats_ms": timing.repeats_ms, "sm_clock_mhz": timing.sm_clock_mhz}
                yield row | {"device": jax.devices()[0].device_kind}

        yield Work(name, {"ranks": 1}, rows=rows)


def build(widths: tuple[int, int, int], tokens: tuple[int, int]) -> tuple[Any, Any, jax.Array, jax.Array]:
    """The stage, its float32 parameters, and bfloat16 x and dy."""
    width, heads, hidden = widths
    config = ModelConfig(vocab_size=256, num_layers=12, d_model=width, num_heads=heads, num_kv_heads=heads, d_ff=hidden)
    graph, params = nnx.split(Block(config, rngs=nnx.Rngs(0)))
    table = rotary(tokens[1], config.head_size, config.rope_theta)

    def stage(params, x):
        return nnx.merge(graph, params)(x, table)

    x, dy = (jax.random.normal(jax.random.key(i), (*tokens, width), jnp.bfloat16) for i in (1, 2))
    return stage, params, x, dy


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
    forward, plain, forward_vjp = jax.jit(split.forward), jax.jit(stage), jax.jit(lambda params, x: jax.vjp(stage, params, x))

    def three(total):
        _, residuals = forward(params, x)
        total, _, stash = dgrad(total, params, residuals, dy)
        return accumulate(total, params, residuals.after_dgrad(), stash)

    _, residuals = forward(params, x)
    _, _, stash = jax.jit(split.dgrad)(params, residuals, dy)
    return {
        "jax.vjp, one program": lambda total: one(total, params, x, dy)[0],
        "split, one program": lambda total: two(total, params, x, dy)[0],
        "two jax.vjp, one program": lambda total: both(total, params, x, dy)[0],
        "jax.vjp, two programs": lambda total: backward(total, forward_vjp(params, x)[1], dy)[0],
        "split, three programs": three,
        "forward alone": lambda total: (total, forward(params, x))[0],
        "dgrad alone": lambda total: dgrad(total, params, residuals, dy)[0],
        "wgrad alone": lambda total: accumulate(total, params, residuals, stash),
        "forward without residuals": lambda total: (total, plain(params, x))[0],
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


BENCHMARK = Benchmark("Split backward, one GPT block", __doc__, Flags, works, section)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
