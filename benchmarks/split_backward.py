"""The split backward against `jax.vjp`, one GPT block: time, bytes, and what the wgrad program does with main_grad.

    python -m benchmarks.split_backward

`one program` is a jit around everything, as in a pipeline's round; `two` and `three` are what a host calls one by one, so that
residuals pass through memory. All variants add the weight gradients into a float32 main_grad that is donated.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

import jgraph
from benchmarks.harness import environment, time_steps, write_results
from jgraph_models.gpt import Block, GPTConfig, rotary

SIZES = {
    "d 4096, 4096 tokens": ({"num_layers": 24, "d_model": 4096, "num_heads": 32, "num_kv_heads": 32, "d_ff": 16384}, 2, 2048),
    "launch-bound, d 256, 256 tokens": (
        {"num_layers": 12, "d_model": 256, "num_heads": 4, "num_kv_heads": 4, "d_ff": 1024},
        2,
        128,
    ),
    "tiny": ({"num_layers": 2, "d_model": 64, "num_heads": 4, "num_kv_heads": 4, "d_ff": 256}, 2, 32),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    sizes: tuple[str, ...] = tuple(SIZES)[:2]
    """Blocks to time."""
    steps: int = 20
    """Fewest steps in a repeat."""
    seconds: float = 0.4
    """Shortest time of a repeat."""
    repeats: int = 5
    """Repeats, of which the median is taken."""
    warmup_seconds: float = 1.5
    """Time that each variant runs before it is timed."""
    revision: str = ""
    """Git revision for the JSON, where there is no .git."""
    name: str = "split_backward"
    """Results go to benchmarks/results/NAME.json and .md."""


def build(size: str) -> tuple[Any, Any, jax.Array, jax.Array]:
    """The stage, its float32 parameters, and bfloat16 x and dy."""
    fields, batch, length = SIZES[size]
    config = GPTConfig(vocab_size=256, **fields)  # pyright: ignore[reportArgumentType]
    graph, params = nnx.split(Block(config, rngs=nnx.Rngs(0)))
    table = rotary(length, config.head_size, config.rope_theta)

    def stage(params, x):
        return nnx.merge(graph, params)(x, table)

    x, dy = (jax.random.normal(jax.random.key(i), (batch, length, config.d_model), jnp.bfloat16) for i in (1, 2))
    return stage, params, x, dy


def add(total: Any, gradients: Any) -> Any:
    return jax.tree.map(lambda t, g: t if g is None else t + g.astype(t.dtype), total, gradients, is_leaf=lambda g: g is None)


def variants(stage: Any, params: Any, x: jax.Array, dy: jax.Array) -> dict[str, Callable[[Any], Any]]:
    """Each takes main_grad and gives back main_grad and dx; main_grad is donated."""
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

    programs = {
        "jax.vjp, one program": jax.jit(joint, donate_argnums=0),
        "split, one program": jax.jit(parts, donate_argnums=0),
        "two jax.vjp, one program": jax.jit(twice, donate_argnums=0),
    }
    runs: dict[str, Callable[[Any], Any]] = {
        name: (lambda total, program=program: program(total, params, x, dy)[0]) for name, program in programs.items()
    }

    forward_vjp = jax.jit(lambda params, x: jax.vjp(stage, params, x))
    backward = jax.jit(lambda total, vjp, dy: (lambda g: (add(total, g[0]), g[1]))(vjp(dy)), donate_argnums=0)
    runs["jax.vjp, two programs"] = lambda total: backward(total, forward_vjp(params, x)[1], dy)[0]

    forward, dgrad = jax.jit(split.forward), jax.jit(lambda total, *a: _with_early(split, total, *a), donate_argnums=0)
    accumulate = jax.jit(split.accumulate, donate_argnums=0)

    def three(total):
        _, residuals = forward(params, x)
        _, total, stash = dgrad(total, params, residuals, dy)
        return accumulate(total, params, residuals.after_dgrad(), stash)

    runs["split, three programs"] = three
    _, residuals = forward(params, x)
    _, _, stash = jax.jit(split.dgrad)(params, residuals, dy)
    runs["  forward alone"] = lambda total: (total, forward(params, x))[0]
    runs["  dgrad alone"] = lambda total: dgrad(total, params, residuals, dy)[1]
    runs["  wgrad alone"] = lambda total: accumulate(total, params, residuals, stash)
    plain = jax.jit(stage)
    runs["  forward without residuals"] = lambda total: (total, plain(params, x))[0]
    return runs


def _with_early(split: Any, total: Any, params: Any, residuals: Any, dy: Any) -> Any:
    dx, early, stash = split.dgrad(params, residuals, dy)
    return dx, add(total, early), stash


def check(stage: Any, params: Any, x: jax.Array, dy: jax.Array) -> dict[str, float]:
    """Largest distance of a gradient to the float32 reference, over its norm: ours, and `jax.vjp`'s in bfloat16."""
    split = jgraph.split_backward(stage)

    def ours(params, x, dy):
        _, residuals = split.forward(params, x)
        _, early, stash = split.dgrad(params, residuals, dy)
        return split.merge(early, split.wgrad(params, residuals, stash))

    gradients = jax.jit(ours)(params, x, dy)
    reference = jax.jit(lambda params, x, dy: jax.vjp(stage, params, x)[1](dy)[0])(params, x, dy)
    distances = [
        float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()))
        for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(reference), strict=True)
    ]
    return {"ours_to_jax_vjp": max(distances)}


def weight_sized(split: Any, params: Any, x: jax.Array, dy: jax.Array) -> list[str]:
    """What in the compiled wgrad program makes an array of a weight's size, one line each."""
    spec = split.spec(params, x)
    main_grad = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
    compiled = jax.jit(split.accumulate, donate_argnums=0).lower(main_grad, params, spec.residuals, spec.stash).compile()
    shapes = {",".join(map(str, leaf.shape)) for leaf in jax.tree.leaves(params) if leaf.ndim == 2}
    text = compiled.as_text()
    assert text is not None
    entry = text.split("ENTRY")[-1]
    lines = []
    for line in entry.splitlines():
        made = re.match(r"\s*(?:ROOT )?%?(\S+) = \(?f32\[([\d,]+)\]", line)
        if made and made[2] in shapes and " parameter(" not in line:
            kind = re.search(r'custom_call_target="([^"]+)"', line)
            beta = re.search(r'"beta":([\d.]+)', line)
            lines.append(f"{made[1]} f32[{made[2]}] {kind[1] if kind else ''} {'beta ' + beta[1] if beta else ''}".strip())
    return lines


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    results: dict[str, Any] = {}
    table = ["| block | variant | ms | ms / jax.vjp, same number of programs |", "|---|---|---|---|"]
    for size in options.sizes:
        stage, params, x, dy = build(size)
        split = jgraph.split_backward(stage)
        timings = {}
        for name, run in variants(stage, params, x, dy).items():
            state = [jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)]

            def step(run=run, state=state):
                state[0] = run(state[0])

            timing = time_steps(
                step,
                lambda state=state: jax.block_until_ready(state),
                steps=options.steps,
                seconds=options.seconds,
                repeats=options.repeats,
                warmup_seconds=options.warmup_seconds,
            )
            timings[name] = timing
        one, two = timings["jax.vjp, one program"].ms, timings["jax.vjp, two programs"].ms
        for name, timing in timings.items():
            ratio = timing.ms / (one if "one" in name else two)
            table.append(f"| {size} | {name} | {timing.ms:.3f} | {'' if name.startswith(' ') else f'{ratio:.3f}'} |")
        nbytes = split.spec(params, x).nbytes()
        results[size] = {
            "ms": {name: timing.ms for name, timing in timings.items()},
            "repeats_ms": {name: timing.repeats_ms for name, timing in timings.items()},
            "sm_clock_mhz": {name: timing.sm_clock_mhz for name, timing in timings.items()},
            "pool_bytes": nbytes,
            "pool_leaves": [str(leaf) for leaf in jax.tree.leaves(split.spec(params, x).residuals)],
            "stash_leaves": [str(leaf) for leaf in jax.tree.leaves(split.spec(params, x).stash)],
            "distance": check(stage, params, x, dy),
            "weight_sized_in_wgrad": weight_sized(split, params, x, dy),
        }
        print(json.dumps({size: {key: results[size][key] for key in list(results[size])[3:]}}, indent=1), flush=True)
    text = "\n".join(table) + "\n"
    print(text)
    about = {"environment": environment(revision=options.revision), "options": asdict(options)}
    write_results(options.name, about | {"device": jax.devices()[0].device_kind, "results": results}, text)


if __name__ == "__main__":
    main()
