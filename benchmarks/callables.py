"""`make_graphed_callables` against `jax.jit` and PyTorch: what a replay costs the host, a pipeline's step, what replays leave.

    python -m benchmarks.callables --parts blocks pipeline replays

Every row has a process of its own, and those of a work are timed in turns (`benchmarks/turns.py`). Both sides warm up, repeat
and wait in the same way (`peers/protocol.py`). Results are written after every round. What fails is a row that says why.

A process of jgraph's is this script with its request: python -m benchmarks.callables '{"part": "blocks", "variant": ...}'
"""

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

import jgraph
from benchmarks.harness import Common, Table, count_gpus, fastest, line, named, ratio, resident_bytes, spread
from benchmarks.peers.protocol import Clock, answer, request, take_turns, told
from benchmarks.turns import Entrant, ask, race
from benchmarks.works import MLPSize, half_square, mlp_layer, mlp_layers, schedule_of
from jgraph.training.config import ModelConfig
from models.gpt import Block, rotary

# M microbatches, N tokens, D model, F hidden, B batch, T sequence

Part = Literal["blocks", "pipeline", "replays"]
Row = dict[str, Any]

TORCH = "graphed callables"
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
class Options(Common):
    """What to run."""

    parts: tuple[Part, ...] = ("blocks", "pipeline", "replays")
    """blocks and replays use one GPU, pipeline `--ranks`."""
    sizes: Literal["full", "tiny"] = "full"
    """tiny is for a machine without a GPU."""
    ranks: int = 4
    """GPUs of the pipeline."""
    pipelines: tuple[str, ...] = ("launch-bound", "large")
    """Pipelines whose name begins so."""
    schedules: tuple[str, ...] = ("aligned", "zb-h1", "1f1b", "zb-v", "aligned:2")
    """Schedules of `jgraph.schedule`, with chunks per rank after a colon; the first one is in every round."""
    joins: tuple[Literal["segments", "nothing"], ...] = ("segments", "nothing")
    """What is joined into one executable."""
    peers: tuple[str, ...] = ("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")
    """Schedules of torch.distributed.pipelining; none where the flag stands alone."""
    name: str = "callables"


def main() -> None:
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        asked = request()
        {"blocks": time_blocks, "pipeline": time_pipeline, "replays": count_bytes}[asked["part"]](asked)
        return
    options = tyro.cli(Options, description=__doc__)
    sizes, results = SIZES[options.sizes], Table(options, draw)
    for part in () if options.table else options.parts:
        if part == "pipeline":
            for name, size in sizes.pipelines.items():
                if name.startswith(options.pipelines) or options.sizes == "tiny":
                    results.begin(name, ranks=options.ranks, size=asdict(size))
                    compete(name, pipelines(size, options), options, results)
        else:
            results.begin(part, ranks=1, size=asdict(sizes.blocks))
            if part == "blocks":
                compete(part, blocks(sizes.blocks), options, results)
            else:
                results.put(part, [replays(variant, sizes.blocks, options) for variant in REPLAYED])
    print(results)


def compete(work: str, entrants: list[Entrant], options: Options, results: Table) -> None:
    clock = Clock(seconds=options.seconds, repeats=options.repeats, warmup_seconds=options.warmup_seconds)
    limits = {"rounds": options.rounds, "together": options.together, "timeout": options.timeout}
    # The blocks wait for the host: which kernels are chosen while others build does not show.
    race(entrants, clock, lambda rows: results.put(work, rows), **limits, building=0 if work == "blocks" else 1)


def blocks(size: BlockSize) -> list[Entrant]:
    asked = {"part": "blocks", "size": asdict(size)}
    systems = {name: "jax" if name == JITTED else "jgraph" for name in BLOCKS}
    ours = [
        Entrant({"system": system, "variant": name}, "benchmarks.callables", asked | {"variant": name})
        for name, system in systems.items()
    ]
    missing = "" if count_gpus() else "skipped: no GPU here"
    peers = [
        Entrant({"system": "torch", "variant": name}, "benchmarks.peers.blocks", asked | {"variant": name}, missing=missing)
        for name in (TORCH, f"{TORCH}, no rotary", "eager")
    ]
    return [*ours, *peers]


def pipelines(size: MLPSize, options: Options) -> list[Entrant]:
    asked = {"part": "pipeline", "size": asdict(size), "ranks": options.ranks}
    ours = [{"schedule": text, "join": join} for text in options.schedules for join in options.joins]
    few = options.sizes == "full" and count_gpus() < options.ranks
    peers = [
        Entrant(
            {"system": "torch", "schedule": schedule},
            "benchmarks.peers.pipelining",
            {"schedule": schedule, "compile": False, "size": asdict(size)},
            ranks=options.ranks,
            missing=f"skipped: {count_gpus()} of {options.ranks} GPUs are here" if few else "",
        )
        for schedule in options.peers
    ]
    return [*(Entrant({"system": "jgraph", **one}, "benchmarks.callables", asked | one) for one in ours), *peers]


def replays(variant: str, size: BlockSize, options: Options) -> Row:
    asked = {"part": "replays", "variant": variant, "size": asdict(size)}
    return {"system": "jgraph", "variant": variant} | ask("benchmarks.callables", asked, timeout=options.timeout)


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


JITTED = "jit a block"
BLOCKS: dict[str, Callable[[Blocks], Callable[[], Any]]] = {
    "one by one": lambda blocks: blocks.one_by_one(),
    "one by one, reuse_buffers": lambda blocks: blocks.one_by_one(order=blocks.order, reuse_buffers=True),
    "run, join segments": lambda blocks: blocks.run("segments"),
    "run, join nothing": lambda blocks: blocks.run("nothing"),
    JITTED: lambda blocks: blocks.jitted(),
}


def time_blocks(asked: Row) -> None:
    size = BlockSize(**asked["size"])
    start = time.perf_counter()
    iteration, handed = BLOCKS[asked["variant"]](Blocks.of(size)), 2 * size.num_blocks
    jax.block_until_ready(iteration())
    device = f"1 x {jax.devices()[0].device_kind}"
    answer(build_and_first_s=time.perf_counter() - start, replays=handed, device=device)
    latest: list[Any] = [None]

    def run():
        latest[0] = None  # as torch's, which are None before the next iteration
        latest[0] = iteration()

    def wait():
        jax.block_until_ready(latest)

    def measure(clock: Clock) -> Row:
        return told(clock.back_to_back(run, wait)) | {"host_us": clock.handover_seconds(run, wait) / handed * 1e6}

    take_turns(measure)


# Pipeline


def mlp_stage(params: tuple[Any, ...], x_ND: jax.Array) -> jax.Array:
    for layer in params:
        x_ND = mlp_layer(layer, x_ND)
    return x_ND


@dataclass(frozen=True)
class Pipeline:
    """Graphed callables of one schedule, with parameters and inputs in place."""

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


def time_pipeline(asked: Row) -> None:
    pipeline = Pipeline.build(MLPSize(**asked["size"]), asked["schedule"], asked["ranks"])
    answer(device=f"{asked['ranks']} x {jax.devices()[0].device_kind}", build_s=pipeline.build_seconds)
    latest: list[Any] = [None]

    def run():
        latest[0] = None
        latest[0] = pipeline.graphed.run(None, pipeline.inputs, half_square, params=pipeline.params, join=asked["join"])

    def wait():
        jax.block_until_ready((latest[0].losses, latest[0].grads))

    start = time.perf_counter()
    run()
    wait()
    answer(first_step_s=time.perf_counter() - start, loss=sum(map(float, latest[0].losses)))

    def measure(clock: Clock) -> Row:
        return told(clock.one_by_one(run, wait)) | {"host_ms": clock.handover_seconds(run, wait) * 1e3}

    take_turns(measure)


# Replays

REPLAYED: dict[str, Callable[[Blocks], Callable[[], Any]]] = {
    "one by one": lambda blocks: blocks.one_by_one(order=blocks.order, reuse_buffers=True),
    "run": lambda blocks: blocks.run("segments", reuse_buffers=True),
}


def count_bytes(asked: Row) -> None:
    """Bytes in use on the device and of the process after each of `REPLAYS`."""
    iteration = REPLAYED[asked["variant"]](Blocks.of(replace(BlockSize(**asked["size"]), num_blocks=2)))
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
    answer(
        device=f"1 x {jax.devices()[0].device_kind}",
        replays=REPLAYS,
        device_bytes=[device, device_later],
        device_growth=None if device is None or device_later is None else device_later - device,
        host_bytes=[host, host_later],
        host_growth=host_later - host,
    )


# Table


def draw(works: dict[str, Any]) -> str:
    parts = []
    for work, result in works.items():
        make = {"blocks": blocks_table, "replays": replays_table}.get(work, pipeline_table)
        env = result["environment"]
        about = f"{env['date']}, revision {env['revision']}, jax {env.get('jax')}, torch {env.get('torch')}, "
        title, *lines = make(work, result)
        parts += ["", title, "", f"{about}{result['device'] or 'device not asked yet'}, sizes {result['options']['sizes']}."]
        parts += ["", *lines]
    return "\n".join(["# Graphed callables", *parts]) + "\n"


def blocks_table(work: str, result: Row) -> list[str]:
    rows, size = result["rows"], result["size"]
    torch = next((row for row in rows if row["variant"] == TORCH and "ms" in row), None)
    shape = f"d {size['d_model']}, {size['batch']}x{size['length']} tokens, bfloat16"
    lines = [f"## {size['num_blocks']} GPT blocks, {shape}: forward and backward"]
    lines += ["| variant | host us a replay | ms an iteration | fastest, slowest | host / torch | ms / torch |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        cells = [named(row)]
        if "ms" in row:
            cells += [f"{row['host_us']:.1f}", f"{row['ms']:.3f}", spread(row)]
            cells += [ratio(row, torch, "host_us"), ratio(row, torch)]
        cells += [row["failed"]] if "failed" in row else []
        lines += [line(cells + [""] * (6 - len(cells)))]
    about = "Host time is until an iteration is handed over to an idle device, over its replays. The ratios are to torch"
    return [*lines, "", f"{about} {TORCH}."]


def pipeline_table(work: str, result: Row) -> list[str]:
    rows, size, ranks = result["rows"], result["size"], result["ranks"]
    peer, flops = fastest(rows, "torch"), MLPSize(**size).flops
    shape = f"{size['layers']} layers, {size['microbatches']} microbatches, {ranks} ranks"
    lines = [f"## Pipeline, {work}, {shape}"]
    lines += ["| schedule | join | ms a step | fastest, slowest | ms / fastest torch | host ms | TFLOP/s a GPU | loss |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [f"{row['system']} {row['schedule']}", row.get("join", "")]
        if "ms" in row:
            cells += [f"{row['ms']:.2f}", spread(row), ratio(row, peer), f"{row['host_ms']:.2f}" if "host_ms" in row else ""]
            cells += [f"{flops / ranks / row['ms'] / 1e9:.0f}", f"{row['loss']:.6g}" if "loss" in row else ""]
        cells += [row["failed"]] if "failed" in row else []
        lines += [line(cells + [""] * (8 - len(cells)))]
    note = "Every step is waited for. Gradients are summed up in float32 in jgraph, in bfloat16 in torch."
    return [*lines, "", note]


def replays_table(work: str, result: Row) -> list[str]:
    lines = ["## Replays of two callables with reuse_buffers"]
    lines += [f"| variant | bytes on the device after {REPLAYS[0]:,}, {REPLAYS[1]:,} | growth | host RSS | growth |"]
    lines += ["|---|---|---|---|---|"]
    for row in result["rows"]:
        cells = [row["variant"]]
        if "failed" in row:
            cells += [row["failed"], "", "", ""]
        else:
            for place in ("device", "host"):
                cells += [", ".join("not told" if n is None else f"{n:,}" for n in row[f"{place}_bytes"])]
                cells += ["" if row[f"{place}_growth"] is None else f"{row[f'{place}_growth']:+,}"]
        lines += [line(cells)]
    return lines


if __name__ == "__main__":
    main()
