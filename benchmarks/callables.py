"""Graphed callables against `jax.jit` and PyTorch: host time of a replay, and the step of a pipeline.

python -m benchmarks run callables --parts blocks pipeline
python -m benchmarks run callables --parts blocks --soak 1000       # watches memory growth over 1,000 iterations
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from benchmarks.rows import Row, fastest, ratio, row_name, spread
from benchmarks.runner import Benchmark, SoakOptions, Work
from benchmarks.tables import Section, number, teraflops
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
    """Flags of the benchmark."""

    parts: tuple[Literal["blocks", "pipeline"], ...] = ("blocks", "pipeline")
    """Parts to run. `blocks` uses one GPU and supports `--soak`. `pipeline` uses `--ranks` GPUs."""
    variant: tuple[str, ...] = ("run, join segments",)
    """Variant of `blocks` to soak."""
    ranks: int = 4
    """Number of GPUs of the pipeline."""
    pipelines: tuple[str, ...] = ("launch-bound", "large")
    """Prefixes of the pipelines to run."""
    schedules: tuple[str, ...] = ("aligned", "zb-h1", "1f1b", "zb-v", "aligned:2")
    """Schedules of `jgraph.schedule`, optionally with chunks per rank after a colon. The first one runs in every round."""
    peers: tuple[str, ...] = ("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")
    """Schedules of torch.distributed.pipelining. Pass the flag without values to skip PyTorch."""


def works(options: CallablesOptions) -> Iterator[Work]:
    """Yields the selected works."""
    size = SIZES[options.sizes]
    for part in options.parts:
        request = {"task": part, "size": size}
        if part == "blocks":
            candidates = [candidate("jax" if name == JITTED else "jgraph", name, request) for name in BLOCKS]
            candidates += [
                Candidate({"system": "torch", "variant": name}, "benchmarks.peers.blocks", request | {"variant": name}, gpus=1)
                for name in (TORCH, f"{TORCH}, no rotary", "eager", f"te {TORCH}", f"te {TORCH}, aliased gradients")
            ]
            # Host time limits these variants, so kernels that were autotuned under load do not change the result.
            yield Work(part, {"ranks": 1, "size": size}, [candidates], building=0)
        elif not options.soak:
            for name, layers in PIPELINES[options.sizes].items():
                if name.startswith(options.pipelines) or options.sizes == "tiny":
                    yield pipeline_work(name, layers, options)


def candidate(system: str, variant: str, request: Row) -> Candidate:
    """Returns the candidate of a variant of the blocks."""
    return Candidate({"system": system, "variant": variant}, PROGRAM, request | {"variant": variant})


def pipeline_work(name: str, size: MLPSize, options: CallablesOptions) -> Work:
    """Returns the work of a pipeline."""
    request = {"task": "pipeline", "size": asdict(size), "ranks": options.ranks}
    ours = [{"schedule": text, "join": join} for text in options.schedules for join in ("segments", "nothing")]
    candidates = [Candidate({"system": "jgraph", **one}, PROGRAM, request | one) for one in ours]
    candidates += [torch_pipeline(peer, size, options.ranks, options) for peer in options.peers]
    return Work(name, {"ranks": options.ranks, "size": asdict(size)}, [candidates])


def section(work: str, result: Row) -> Section:
    """Returns the table layout of a work."""
    rows, size, ranks = result["rows"], result["size"], result["ranks"]
    if work == "blocks":
        torch = next((row for row in rows if row["variant"] == TORCH and "ms" in row), None)
        shape = f"d {size['d_model']}, {size['batch']}x{size['length']} tokens, bfloat16"
        return Section(
            f"{size['num_blocks']} GPT blocks, {shape}: forward and backward",
            {
                "variant": row_name,
                "host time per replay, us": number("host_us", ".1f"),
                "time per iteration, ms": number("ms", ".3f"),
                "fastest, slowest, ms": spread,
                "host time / torch": lambda row: ratio(row, torch, "host_us"),
                "time / torch": lambda row: ratio(row, torch),
            },
            notes="Host time is the time to dispatch an iteration to an idle device, divided by its number of replays. Ratios "
            f"are relative to torch {TORCH}.",
        )
    peer, flops = fastest(rows, "torch"), MLPSize(**size).flops
    return Section(
        f"Pipeline, {work}, {size['layers']} layers, {size['microbatches']} microbatches, {ranks} ranks",
        {
            "schedule": row_name,
            "step, ms": number("ms"),
            "fastest, slowest, ms": spread,
            "step / fastest torch": lambda row: ratio(row, peer),
            "host, ms": number("host_ms"),
            "TFLOP/s per GPU": teraflops(flops / ranks),
            "loss": number("loss", ".6g"),
        },
        notes="The host waits after every step. jgraph accumulates gradients in float32, torch in bfloat16.",
    )


BENCHMARK = Benchmark("Graphed callables", __doc__, CallablesOptions, works, section)
