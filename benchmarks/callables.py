"""`make_graphed_callables` against `jax.jit` and PyTorch: what a replay costs the host, a pipeline's step, what replays leave.

    python -m benchmarks.callables --parts blocks pipeline replays

The peers run first, each in a process of its own, while jax has not touched a GPU yet. Both sides warm up, repeat and wait in
the same way (`peers/protocol.py`). Results are written after every row. What fails is a row that says why, on either side.
"""

import functools
import gc
import itertools
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

import jgraph
from benchmarks.harness import count_gpus, environment, line, ratio, resident_bytes, spread, write_results
from benchmarks.peers.protocol import Clock, ask, last_error
from benchmarks.works import MLPSize, half_square, mlp_layer, mlp_layers, schedule_of
from jgraph.config import ModelConfig
from models.gpt import Block, rotary

# M microbatches, N tokens, D model, F hidden, B batch, T sequence

Part = Literal["blocks", "pipeline", "replays"]
Row = dict[str, Any]

TORCH = "torch graphed callables"
REPLAYS = (100, 1_100)


@dataclass(frozen=True)
class BlockSize:
    """GPT blocks that are called one by one."""

    num_blocks: int
    d_model: int
    num_heads: int
    d_ff: int
    batch: int
    length: int


@dataclass(frozen=True)
class Sizes:
    blocks: BlockSize
    pipelines: dict[str, MLPSize]


SIZES = {
    "full": Sizes(
        BlockSize(num_blocks=12, d_model=256, num_heads=4, d_ff=1024, batch=2, length=128),
        {
            "launch-bound, d 1024, 512 tokens": MLPSize(1024, 4096, 512, layers=16, microbatches=16),
            "large, d 4096, 4096 tokens": MLPSize(4096, 16384, 4096, layers=16, microbatches=16),
        },
    ),
    "tiny": Sizes(
        BlockSize(num_blocks=3, d_model=64, num_heads=4, d_ff=256, batch=2, length=32),
        {"tiny": MLPSize(32, 64, 16, layers=8, microbatches=8)},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    parts: tuple[Part, ...] = ("blocks", "pipeline", "replays")
    """blocks and replays use one GPU, pipeline `--ranks`."""
    sizes: Literal["full", "tiny"] = "full"
    """tiny is for a machine without a GPU."""
    ranks: int = 4
    """GPUs of the pipeline."""
    schedules: tuple[str, ...] = ("aligned", "zb-h1", "1f1b", "zb-v", "aligned:2")
    """Schedules of `jgraph.schedule`, with chunks per rank after a colon; the first are timed first."""
    joins: tuple[Literal["segments", "nothing"], ...] = ("segments", "nothing")
    """What is joined into one executable."""
    peers: tuple[str, ...] = ("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")
    """Schedules of torch.distributed.pipelining; none where the flag stands alone."""
    seconds: float = 0.2
    """Shortest time of a repeat."""
    repeats: int = 5
    """Repeats, of which the median is taken."""
    warmup_seconds: float = 1.0
    """Time that each variant runs before it is timed."""
    peer_timeout: float = 120.0
    """Seconds after which a peer is ended."""
    budget: float = 330.0
    """Seconds after which no further variant is begun; those left say so in the table."""
    revision: str = ""
    """Git revision for the JSON, where there is no .git."""
    name: str = "callables"
    """Results go to benchmarks/results/NAME.json and .md."""


class Report:
    """Rows by part, written as they come."""

    def __init__(self, options: Options):
        self.options = options
        self.start = time.monotonic()
        self.rows: dict[str, list[Row]] = {part: [] for part in options.parts}
        about = {"environment": environment(revision=options.revision), "options": asdict(options)}
        self.results: dict[str, Any] = about | {"sizes": asdict(SIZES[options.sizes]), "device": None, "parts": self.rows}

    def add(self, part: str, **row: Any) -> None:
        self.rows[part].append(row)
        shown = {key: value for key, value in row.items() if key != "repeats_ms"}
        print(f"[{time.monotonic() - self.start:.0f} s] {part}: {shown}", flush=True)
        write_results(self.options.name, self.results, table(self.results))

    def attempt(self, part: str, named: Row, measure: Callable[[], Row]) -> None:
        """Adds what `measure` finds; or why it failed, as one variant must not take the others with it."""
        if time.monotonic() - self.start > self.options.budget:
            self.add(part, **named, failed=f"not begun: {self.options.budget:g} s were over")
            return
        try:
            self.add(part, **named, **measure())
        except Exception:
            text = traceback.format_exc()
            print(text, flush=True)
            self.add(part, **named, failed=f"failed: {last_error(text)}")


# Peers


def ask_peers(options: Options, clock: Clock, report: Report) -> None:
    sizes, gpus = SIZES[options.sizes], count_gpus()
    if "blocks" in options.parts:
        if gpus:
            request = {"size": asdict(sizes.blocks), "clock": asdict(clock)}
            rows, failure = ask("benchmarks.peers.blocks", request, timeout=options.peer_timeout)
        else:
            rows, failure = [], "skipped: no GPU here"
        for row in rows:
            report.add("blocks", **row)
        if failure:
            report.add("blocks", variant="torch", failed=failure)
    for schedule in options.peers if "pipeline" in options.parts else ():
        request = {"schedule": schedule, "compile": False, "clock": asdict(clock)}
        request["sizes"] = {name: asdict(size) for name, size in sizes.pipelines.items()}
        if gpus >= options.ranks:
            rows, failure = ask("benchmarks.peers.pipelining", request, ranks=options.ranks, timeout=options.peer_timeout)
        else:
            rows, failure = [], f"skipped: {gpus} of {options.ranks} GPUs are here"
        answered = {row.pop("size"): row for row in rows}
        for name in sizes.pipelines:
            row = answered.get(name, {"schedule": schedule, "failed": failure or "failed: no answer"})
            report.add("pipeline", size=name, system="torch", **row)


# Blocks


@dataclass(frozen=True)
class Blocks:
    """Blocks of GPT in bfloat16: the stage, parameters of each, and what goes in at both ends."""

    stage: Callable[[Any, jax.Array], jax.Array]
    params: tuple[Any, ...]
    x: jax.Array
    dy: jax.Array

    @classmethod
    def of(cls, size: BlockSize) -> "Blocks":
        config = ModelConfig(
            vocab_size=256,
            num_layers=size.num_blocks,
            d_model=size.d_model,
            num_heads=size.num_heads,
            num_kv_heads=size.num_heads,
            d_ff=size.d_ff,
        )
        rngs = nnx.Rngs(0)
        splits = [nnx.split(Block(config, rngs=rngs)) for _ in range(size.num_blocks)]
        graph = splits[0][0]
        # As dicts, which jax flattens in C++; an nnx.State takes Python 9 us.
        params = tuple(jax.tree.map(lambda p: p.astype(jnp.bfloat16), nnx.to_pure_dict(params)) for _, params in splits)
        table_T1K = rotary(size.length, config.head_size, config.rope_theta)

        def stage(params: Any, x_BTD: jax.Array) -> jax.Array:
            block: Any = nnx.merge(graph, params)
            return block(x_BTD, table_T1K)

        shape = (size.batch, size.length, size.d_model)
        x, dy = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in (1, 2))
        return cls(stage, params, x, dy)

    @property
    def order(self) -> list[int]:
        n = len(self.params)
        return [*range(1, n + 1), *range(-n, 0)]

    def graphed(self, **options: Any) -> Any:
        n = len(self.params)
        return jgraph.make_graphed_callables((self.stage,) * n, self.params, ((self.x,),) * n, **options)

    def one_by_one(self, **options: Any) -> Callable[[], Any]:
        """An iteration of single calls; gives back all gradients and dx."""
        graphed = self.graphed(**options)
        calls = [graphed[i] for i in range(len(graphed))]

        def iteration():
            y, gradients = self.x, []
            for call, params in zip(calls, self.params, strict=True):
                y = call(params, y)
            dx = self.dy
            for call in reversed(calls):
                of_params, dx = call.backward(dx)
                gradients.append(of_params)
            return gradients, dx

        return iteration

    def run(self, join: str, **options: Any) -> Callable[[], Any]:
        """An iteration by `run`; gives back losses and gradients."""
        graphed = self.graphed(order=self.order, **options)

        def iteration():
            result = graphed.run(None, (self.x,), _product, params=self.params, loss_args=((self.dy,),), join=join)
            return result.losses, result.grads

        return iteration

    def jitted(self) -> Callable[[], Any]:
        """What needs no library: residuals leave the forward inside the vjp's closure, which is a pytree."""
        forward = jax.jit(lambda params, x: jax.vjp(self.stage, params, x))
        backward = jax.jit(lambda vjp, dy: vjp(dy))

        def iteration():
            y, vjps, gradients = self.x, [], []
            for params in self.params:
                y, vjp = forward(params, y)
                vjps.append(vjp)
            dx = self.dy
            while vjps:
                of_params, dx = backward(vjps.pop(), dx)
                gradients.append(of_params)
            return gradients, dx

        return iteration


def _product(y: jax.Array, dy: jax.Array) -> jax.Array:
    """A loss of which dy is the gradient."""
    return jnp.vdot(y.astype(jnp.float32), dy.astype(jnp.float32))


def measure_blocks(size: BlockSize, clock: Clock, report: Report) -> None:
    blocks = Blocks.of(size)
    variants = {
        "jgraph one by one": blocks.one_by_one,
        "jgraph one by one, reuse_buffers": lambda: blocks.one_by_one(order=blocks.order, reuse_buffers=True),
        "jgraph run, join segments": lambda: blocks.run("segments"),
        "jgraph run, join nothing": lambda: blocks.run("nothing"),
        "jax.jit a block": blocks.jitted,
    }
    for name, build in variants.items():
        report.attempt("blocks", {"variant": name}, lambda build=build: time_blocks(build, clock, 2 * size.num_blocks))


def time_blocks(build: Callable[[], Callable[[], Any]], clock: Clock, replays: int) -> Row:
    start = time.perf_counter()
    iteration = build()
    jax.block_until_ready(iteration())
    first = time.perf_counter() - start
    latest: list[Any] = [None]

    def run():
        latest[0] = None  # as torch's, which are None before the next iteration
        latest[0] = iteration()

    def wait():
        jax.block_until_ready(latest)

    timing = clock.back_to_back(run, wait)
    host_us = clock.handover_seconds(run, wait) / replays * 1e6
    row = {"host_us": host_us, "ms": timing.ms, "repeats_ms": timing.repeats_ms, "replays": replays}
    return row | {"build_and_first_s": first}


# Pipeline


def mlp_stage(params: tuple[Any, ...], x_ND: jax.Array) -> jax.Array:
    for layer in params:
        x_ND = mlp_layer(layer, x_ND)
    return x_ND


def measure_pipeline(name: str, size: MLPSize, text: str, options: Options, clock: Clock, report: Report) -> None:
    build = functools.cache(lambda: Pipeline.build(size, text, options.ranks))
    for join in options.joins:
        named = {"size": name, "system": "jgraph", "schedule": text, "join": join}
        report.attempt("pipeline", named, lambda join=join: build().time(join, clock))
    build.cache_clear()
    gc.collect()  # parameters and accumulators of this schedule, before the next ones


@dataclass(frozen=True)
class Pipeline:
    """Graphed callables of one schedule, with parameters and inputs in place; both joins share it."""

    graphed: Any
    params: tuple[Any, ...]
    inputs: tuple[jax.Array, ...]
    build_seconds: float

    @classmethod
    def build(cls, size: MLPSize, name: str, ranks: int) -> "Pipeline":
        devices = jax.devices()[:ranks]
        if len(devices) < ranks:
            raise RuntimeError(f"{len(devices)} of {ranks} devices are here; say --ranks")
        schedule = schedule_of(name, ranks, size.microbatches)
        stages = schedule.num_stages
        if size.layers % stages:
            raise RuntimeError(f"{size.layers} layers cannot be shared out evenly to {stages} stages")
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
        seconds = time.perf_counter() - start
        return cls(graphed, graphed.place(params), inputs, seconds)

    def time(self, join: str, clock: Clock) -> Row:
        latest: list[Any] = [None]

        def run():
            latest[0] = None
            latest[0] = self.graphed.run(None, self.inputs, half_square, params=self.params, join=join)

        def wait():
            jax.block_until_ready((latest[0].losses, latest[0].grads))

        start = time.perf_counter()
        run()
        wait()
        first = time.perf_counter() - start
        timing = clock.one_by_one(run, wait)
        return {
            "ms": timing.ms,
            "repeats_ms": timing.repeats_ms,
            "host_ms": clock.handover_seconds(run, wait) * 1e3,
            "build_s": self.build_seconds,
            "first_step_s": first,
            "loss": sum(map(float, latest[0].losses)),
        }


# Replays


def measure_replays(size: BlockSize, report: Report) -> None:
    blocks = Blocks.of(replace(size, num_blocks=2))
    variants = {
        "one by one": lambda: blocks.one_by_one(order=blocks.order, reuse_buffers=True),
        "run": lambda: blocks.run("segments", reuse_buffers=True),
    }
    for name, build in variants.items():
        report.attempt("replays", {"variant": name}, lambda build=build: count_bytes(build()))


def count_bytes(iteration: Callable[[], Any]) -> Row:
    """Bytes in use on the device and of the process after each of `REPLAYS`."""
    after = []
    for replay in range(1, REPLAYS[-1] + 1):
        latest = iteration()
        if replay in REPLAYS:
            jax.block_until_ready(latest)
            del latest
            gc.collect()
            stats = jax.devices()[0].memory_stats()
            after.append((stats["bytes_in_use"] if stats else None, resident_bytes()))
    (device, host), (device_later, host_later) = after
    grown = None if device is None or device_later is None else device_later - device
    return {
        "replays": REPLAYS,
        "device_bytes": [device, device_later],
        "device_growth": grown,
        "host_bytes": [host, host_later],
        "host_growth": host_later - host,
    }


# Table


def table(results: dict[str, Any]) -> str:
    env, rows = results["environment"], results["parts"]
    lines = ["# Graphed callables", ""]
    lines += [f"{env['date']}, revision {env['revision']}, jax {env.get('jax')}, torch {env.get('torch')}, "]
    lines[-1] += f"{results['device'] or 'device not asked yet'}, sizes {results['options']['sizes']}."
    makers = {"blocks": blocks_table, "pipeline": pipeline_table, "replays": replays_table}
    for part, make in makers.items():
        if rows.get(part):
            lines += ["", *make(rows[part], results)]
    return "\n".join(lines) + "\n"


def blocks_table(rows: list[Row], results: dict[str, Any]) -> list[str]:
    torch = next((row for row in rows if row["variant"] == TORCH and "ms" in row), None)
    size = results["sizes"]["blocks"]
    shape = f"d {size['d_model']}, {size['batch']}x{size['length']} tokens, bfloat16"
    lines = [f"## {size['num_blocks']} GPT blocks, {shape}: forward and backward", ""]
    lines += ["| variant | host us a replay | ms an iteration | fastest, slowest | host / torch | ms / torch |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row["variant"]]
        if "failed" in row:
            cells += [row["failed"], "", "", "", ""]
        else:
            cells += [f"{row['host_us']:.1f}", f"{row['ms']:.3f}", spread(row)]
            cells += [ratio(row, torch, "host_us"), ratio(row, torch, "ms")]
        lines += [line(cells)]
    about = "Host time is until an iteration is handed over to an idle device, over its replays. The ratios are to"
    return [*lines, "", f"{about} {TORCH}."]


def pipeline_table(rows: list[Row], results: dict[str, Any]) -> list[str]:
    ranks, lines = results["options"]["ranks"], []
    for name, size in results["sizes"]["pipelines"].items():
        here = [row for row in rows if row["size"] == name]
        peer = min((row for row in here if row["system"] == "torch" and "ms" in row), key=lambda row: row["ms"], default=None)
        flops = MLPSize(**size).flops
        shape = f"{size['layers']} layers, {size['microbatches']} microbatches, {ranks} ranks"
        lines += [f"## Pipeline, {name}, {shape}", ""]
        lines += ["| schedule | join | ms a step | fastest, slowest | ms / fastest torch | host ms | TFLOP/s a GPU | loss |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        for row in here:
            cells = [f"{row['system']} {row['schedule']}", row.get("join", "")]
            if "failed" in row:
                cells += [row["failed"], "", "", "", "", ""]
            else:
                cells += [f"{row['ms']:.2f}", spread(row), ratio(row, peer, "ms"), f"{row['host_ms']:.2f}"]
                cells += [f"{flops / ranks / row['ms'] / 1e9:.0f}", f"{row['loss']:.6g}" if "loss" in row else ""]
            lines += [line(cells)]
        lines += [""]
    note = "Every step is waited for. Gradients are summed up in float32 in jgraph, in bfloat16 in torch."
    return [*lines, note]


def replays_table(rows: list[Row], results: dict[str, Any]) -> list[str]:
    lines = ["## Replays of two callables with reuse_buffers", ""]
    lines += [f"| variant | bytes on the device after {REPLAYS[0]:,}, {REPLAYS[1]:,} | growth | host RSS | growth |"]
    lines += ["|---|---|---|---|---|"]
    for row in rows:
        cells = [row["variant"]]
        if "failed" in row:
            cells += [row["failed"], "", "", ""]
        else:
            for place in ("device", "host"):
                cells += [", ".join("not told" if n is None else f"{n:,}" for n in row[f"{place}_bytes"])]
                cells += ["" if row[f"{place}_growth"] is None else f"{row[f'{place}_growth']:+,}"]
        lines += [line(cells)]
    return lines


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    sizes = SIZES[options.sizes]
    clock = Clock(seconds=options.seconds, repeats=options.repeats, warmup_seconds=options.warmup_seconds)
    report = Report(options)
    ask_peers(options, clock, report)
    report.results["device"] = f"{len(jax.devices())} x {jax.devices()[0].device_kind}"
    if "blocks" in options.parts:
        measure_blocks(sizes.blocks, clock, report)
    if "replays" in options.parts:
        measure_replays(sizes.blocks, report)
    if "pipeline" in options.parts:
        for text, (name, size) in itertools.product(options.schedules, sizes.pipelines.items()):
            measure_pipeline(name, size, text, options, clock, report)
    print(table(report.results))


if __name__ == "__main__":
    main()
