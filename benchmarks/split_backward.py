"""Split backward of a GPT block against `jax.vjp`.

    python -m benchmarks run split_backward

`one program` compiles forward and backward together, as in a pipeline tick. With `two programs` and `three programs`, the host
dispatches forward and backward separately, and residuals pass through memory. All variants add the weight gradients to a
donated float32 main_grad.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jgraph
from benchmarks.peers.protocol import answer, read_request, take_turns
from benchmarks.programs.models import gpt_blocks
from benchmarks.rows import Row, ratio, spread
from benchmarks.runner import Benchmark, Options, Work
from benchmarks.tables import Section, number
from benchmarks.turns import Candidate

SIZES: dict[str, dict[str, Row]] = {
    "full": {
        "d 4096, 4096 tokens": {"d_model": 4096, "num_heads": 32, "d_ff": 16384, "batch": 2, "length": 2048},
        "launch-bound, d 256, 256 tokens": {"d_model": 256, "num_heads": 4, "d_ff": 1024, "batch": 2, "length": 128},
    },
    "tiny": {"tiny": {"d_model": 64, "num_heads": 4, "d_ff": 256, "batch": 2, "length": 32}},
}
VARIANTS = (
    "jax.vjp, one program",
    "split, one program",
    "two jax.vjp, one program",
    "jax.vjp, two programs",
    "split, three programs",
)


def works(options: Options) -> Iterator[Work]:
    """Yields one work per size."""
    for name, size in SIZES[options.sizes].items():
        yield Work(name, {"ranks": 1, "size": size}, [[candidate(variant, size) for variant in VARIANTS]])


def candidate(variant: str, size: Row) -> Candidate:
    """Returns the candidate of a variant."""
    row = {"system": "jgraph" if "split" in variant else "jax", "variant": variant}
    return Candidate(row, "benchmarks.split_backward", {"variant": variant, "size": size})


def time_variant(request: Row) -> None:
    """Times a variant. Entry point of the candidate process."""
    stage, (params,), x, dy = gpt_blocks(request["size"] | {"num_blocks": 1})
    accumulate = program(request["variant"], stage, params, x, dy)
    total = [jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)]

    def step() -> None:
        total[0] = accumulate(total[0])

    step()
    answer(device=jax.devices()[0].device_kind)
    take_turns(lambda timer: timer.back_to_back(step, partial(jax.block_until_ready, total)))


def add(total: Any, gradients: Any) -> Any:
    """Adds gradients to their sums. A gradient of None leaves its sum unchanged."""
    return jax.tree.map(lambda t, g: t if g is None else t + g.astype(t.dtype), total, gradients, is_leaf=lambda g: g is None)


def program(variant: str, stage: Any, params: Any, x: jax.Array, dy: jax.Array) -> Callable[[Any], Any]:
    """Returns the step of a variant: a function of the donated main_grad that returns the new main_grad."""
    split = jgraph.split_backward(stage)
    jit = partial(jax.jit, donate_argnums=0)

    def joint(total, params, x, dy):
        y, vjp = jax.vjp(stage, params, x)
        gradients, dx = vjp(dy)
        return add(total, gradients), y, dx

    def parts(total, params, x, dy):
        y, residuals = split.forward(params, x)
        total, dx, stash = dgrad(total, params, residuals, dy)
        return split.accumulate(total, params, residuals, stash), y, dx

    def twice(total, params, x, dy):
        y, vjp_x = jax.vjp(lambda x: stage(params, x), x)
        (dx,) = vjp_x(dy)
        # Without the barrier, XLA merges both backward passes.
        params, x, dy = jax.lax.optimization_barrier((params, x, dy))
        _, vjp_params = jax.vjp(lambda params: stage(params, x), params)
        return add(total, vjp_params(dy)[0]), y, dx

    def backward(total, vjp, dy):
        gradients, dx = vjp(dy)
        return add(total, gradients), dx

    def dgrad(total, params, residuals, dy):
        dx, early, stash = split.dgrad(params, residuals, dy)
        return add(total, early), dx, stash

    if variant.endswith("one program"):
        one_program = jit({"jax.vjp": joint, "split": parts, "two jax.vjp": twice}[variant.partition(",")[0]])
        return lambda total: one_program(total, params, x, dy)[0]
    forward_vjp, backward = jax.jit(lambda params, x: jax.vjp(stage, params, x)), jit(backward)
    if variant == "jax.vjp, two programs":
        return lambda total: backward(total, forward_vjp(params, x)[1], dy)[0]
    forward, dgrad_, accumulate = jax.jit(split.forward), jit(dgrad), jit(split.accumulate)

    def three(total):
        _, residuals = forward(params, x)
        total, _, stash = dgrad_(total, params, residuals, dy)
        return accumulate(total, params, residuals.after_dgrad(), stash)

    return three


def section(name: str, result: Row) -> Section:
    """Returns the table layout of a work."""
    by = {row["variant"]: row for row in result["rows"]}

    def to_vjp(row: Row) -> str:
        if "alone" in row["variant"] or "without" in row["variant"]:
            return ""
        to = by.get(f"jax.vjp, {'one program' if 'one' in row['variant'] else 'two programs'}")
        return "1.000" if row is to else ratio(row, to)

    columns = {"variant": lambda row: row["variant"], "time, ms": number("ms", ".3f"), "fastest, slowest, ms": spread}
    return Section(name, columns | {"time / jax.vjp": to_vjp})


BENCHMARK = Benchmark("Split backward, one GPT block", __doc__, Options, works, section)

if __name__ == "__main__":
    time_variant(read_request())
