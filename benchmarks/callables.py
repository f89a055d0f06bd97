"""`make_graphed_callables` against `jax.jit` and PyTorch: what a replay costs the host, and a pipeline's step.

python -m benchmarks run callables --parts blocks pipeline
python -m benchmarks run callables --parts blocks --soak 1000       # what replays leave in memory
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from benchmarks.rows import Row, fastest, named, ratio, spread
from benchmarks.runner import Benchmark, SoakOptions, Work
from benchmarks.tables import Section, number
from benchmarks.turns import Candidate
from benchmarks.works import MLPSize, torch_pipeline

PROGRAM = "benchmarks.programs.graphed"
TORCH = "graphed callables"
JITTED = "jit a block"
BLOCKS = ("one by one", "run, join segments", "run, join nothing", JITTED)
SIZES: dict[str, Row] = {
    "full": {"num_blocks": 12, "d_model": 256, "num_heads": 4, "d_ff": 1024, "batch": 2, "length": 128},
    "tiny": {"num_blocks": 3, "d_model": 64, "num_heads": 4, "d_ff": 256, "batch": 2, "length": 32},
}
PIPELINES = {
    "full": {
        "launch-bound, d 1024, 512 tokens": MLPSize(1024, 4096, 512, layers=16, microbatches=16),
        "large, d 4096, 4096 tokens": MLPSize(4096, 16384, 4096, layers=16, microbatches=16),
    },
    "tiny": {"tiny": MLPSize(32, 64, 16, layers=8, microbatches=8)},
}


@dataclass(frozen=True, kw_only=True)
class CallablesOptions(SoakOptions):
    """Chooses what is run."""

    parts: tuple[Literal["blocks", "pipeline"], ...] = ("blocks", "pipeline")
    """blocks use one GPU and can be soaked, pipeline uses `--ranks`."""
    variant: tuple[str, ...] = (BLOCKS[1],)
    """Blocks that a soak runs."""
    ranks: int = 4
    """GPUs of the pipeline."""
    pipelines: tuple[str, ...] = ("launch-bound", "large")
    """Pipelines whose name begins so."""
    schedules: tuple[str, ...] = ("aligned", "zb-h1", "1f1b", "zb-v", "aligned:2")
    """Schedules of `jgraph.schedule`, with chunks per rank after a colon; the first one is in every round."""
    peers: tuple[str, ...] = ("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")
    """Schedules of torch.distributed.pipelining; none where the flag stands alone."""


def works(options: CallablesOptions) -> Iterator[Work]:
    size = SIZES[options.sizes]
    for part in options.parts:
        request = {"task": part, "size": size}
        if part == "blocks":
            candidates = [candidate("jax" if name == JITTED else "jgraph", name, request) for name in BLOCKS]
            candidates += [
                Candidate({"system": "torch", "variant": name}, "benchmarks.peers.blocks", request | {"variant": name}, gpus=1)
                for name in (TORCH, f"{TORCH}, no rotary", "eager")
            ]
            # They wait for the host: which kernels are chosen while others build does not show.
            yield Work(part, {"ranks": 1, "size": size}, [candidates], building=0)
        elif not options.soak:
            for name, layers in PIPELINES[options.sizes].items():
                if name.startswith(options.pipelines) or options.sizes == "tiny":
                    yield pipeline_work(name, layers, options)


def candidate(system: str, variant: str, request: Row) -> Candidate:
    return Candidate({"system": system, "variant": variant}, PROGRAM, request | {"variant": variant})


def pipeline_work(name: str, size: MLPSize, options: CallablesOptions) -> Work:
    request = {"task": "pipeline", "size": asdict(size), "ranks": options.ranks}
    ours = [{"schedule": text, "join": join} for text in options.schedules for join in ("segments", "nothing")]
    candidates = [Candidate({"system": "jgraph", **one}, PROGRAM, request | one) for one in ours]
    candidates += [torch_pipeline(peer, size, options.ranks, options) for peer in options.peers]
    return Work(name, {"ranks": options.ranks, "size": asdict(size)}, [candidates])


def section(work: str, result: Row) -> Section:
    rows, size, ranks = result["rows"], result["size"], result["ranks"]
    if work == "blocks":
        torch = next((row for row in rows if row["variant"] == TORCH and "ms" in row), None)
        shape = f"d {size['d_model']}, {size['batch']}x{size['length']} tokens, bfloat16"
        return Section(
            f"{size['num_blocks']} GPT blocks, {shape}: forward and backward",
            {
                "variant": named,
                "host us a replay": number("host_us", ".1f"),
                "ms an iteration": number("ms", ".3f"),
                "fastest, slowest": spread,
                "host / torch": lambda row: ratio(row, torch, "host_us"),
                "ms / torch": lambda row: ratio(row, torch),
            },
            notes="Host time is until an iteration is handed over to an idle device, over its replays. The ratios are to torch "
            f"{TORCH}.",
        )
    peer, flops = fastest(rows, "torch"), MLPSize(**size).flops
    return Section(
        f"Pipeline, {work}, {size['layers']} layers, {size['microbatches']} microbatches, {ranks} ranks",
        {
            "schedule": named,
            "ms a step": number("ms"),
            "fastest, slowest": spread,
            "ms / fastest torch": lambda row: ratio(row, peer),
            "host ms": number("host_ms"),
            "TFLOP/s a GPU": lambda row: f"{flops / ranks / row['ms'] / 1e9:.0f}",
            "loss": number("loss", ".6g"),
        },
        notes="Every step is waited for. Gradients are summed up in float32 in jgraph, in bfloat16 in torch.",
    )


BENCHMARK = Benchmark("Graphed callables", __doc__, CallablesOptions, works, section)
