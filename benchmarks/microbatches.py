"""Step time and memory of one step by its number of microbatches, beside programs that unroll them, in one process.

python -m benchmarks run microbatches --rounds 3
python -m benchmarks run microbatches --presets cpu-tiny --sizes tiny --counts 1 2    # on a CPU
python -m benchmarks run microbatches --name microbatches_sharded --presets gpt-1b3 --batch-size 16 --fsdp 2 --unrolled

The global batch is the same for every count. All programs of a preset are compiled at once, in threads, and take turns.
`M unrolled` has M microbatches in the body of the loop; `M serialized` is the same without concurrent kernels in a CUDA
graph. They are no options of the library.
"""

import functools
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax

from benchmarks.programs.step import tokens_of
from benchmarks.rows import Row, row_name, spread
from benchmarks.runner import Benchmark, Options, Work
from benchmarks.tables import Section, columns, number
from benchmarks.turns import log
from benchmarks.works import preset_config
from jgraph.strategies._accumulate import MicrobatchFunction, accumulate
from jgraph.timing import Timer, in_round, without_overlap
from jgraph.train.config import TrainConfig
from jgraph.train.setup import TrainSetup
from jgraph.xla.explain import Memory

_ACCUMULATE = "jgraph.strategies._data_parallel.accumulate"
# Kernels of one CUDA graph run one after the other.
_SERIALIZED = "xla_gpu_command_buffer_scheduling_mode=SERIALIZE"


@dataclass(frozen=True, kw_only=True)
class MicrobatchOptions(Options):
    """Flags of the benchmark. A turn of a program is one repeat."""

    presets: tuple[str, ...] = ("launch-bound", "gpt-124m")
    """Presets to time."""
    batch_size: int = 64
    """Sequences of a step."""
    counts: tuple[int, ...] = (1, 2, 4, 8, 16, 64)
    """Numbers of microbatches."""
    unrolled: tuple[int, ...] = (2,)
    """Numbers of microbatches that are also timed unrolled, and unrolled and serialized."""
    fsdp: int = 1
    """Devices that hold parts of the state. With several, every number of microbatches also runs with `--gather-per pass`."""


def works(options: MicrobatchOptions) -> Iterator[Work]:
    """Yields one work per preset."""
    for preset in options.presets:
        config = preset_config(preset, options).changed(batch_size=options.batch_size, fsdp=options.fsdp)
        rows = timed(list(programs(config, options)), config, options)
        yield Work(f"{preset}, {options.batch_size} sequences", {"ranks": options.fsdp}, rows=rows)


def programs(config: TrainConfig, options: MicrobatchOptions) -> Iterator[tuple[Row, TrainSetup, Any]]:
    """Yields the row, the setup and the lowered step of each program. Traces in turn: a patch applies to all threads."""
    variants = [(count, "") for count in options.counts]
    variants += [(count, how) for count in options.unrolled for how in ("unrolled", "serialized")]
    variants += [(count, "gathered per pass") for count in options.counts if options.fsdp > 1]
    device = f"{options.fsdp} x {jax.devices()[0].device_kind}"
    for count, how in variants:
        changes: dict[str, Any] = {"num_microbatches": count}
        if how == "serialized":
            changes["xla_options"] = (*config.compile.xla_options, _SERIALIZED)
        elif how == "gathered per pass":
            changes["gather_per"] = "pass"
        with mock.patch(_ACCUMULATE, functools.partial(_unrolled, count) if how in ("unrolled", "serialized") else accumulate):
            setup = TrainSetup.from_config(config.changed(**changes))
            lowered = setup.step.lower(setup.batch())
        yield {"system": "jgraph", "variant": f"{count} {how}".strip(), "device": device}, setup, lowered


def _unrolled(count: int, *args: Any, **settings: Any) -> MicrobatchFunction:
    settings["at_once"] = count
    return accumulate(*args, **settings)


def timed(found: list[tuple[Row, TrainSetup, Any]], config: TrainConfig, options: MicrobatchOptions) -> Iterator[Row]:
    """Compiles the programs and yields their rows with times."""
    platform = jax.default_backend()

    def compiled(program: tuple[Row, TrainSetup, Any]) -> Any:
        row, setup, lowered = program
        run = lowered.compile(setup.options(platform))
        memory = Memory.read(run)
        row |= {"temp_bytes": memory.temporaries, "step_bytes": memory.total} if memory else {}
        return run

    with ThreadPoolExecutor() as threads:
        executables = list(threads.map(compiled, found))
    state = [found[0][1].init()]
    timer = Timer(seconds=options.seconds, repeats=1, warmup_seconds=options.seconds)
    order = list(range(len(found)))
    times: list[list[float]] = [[] for _ in order]
    for turn in range(options.rounds):
        for i in in_round(order, turn):
            batch = jax.device_put(found[i][1].step.place(tokens_of(config)))

            def run(executable: Any = executables[i], batch: Any = batch) -> None:
                state[0], _ = executable(state[0], batch)

            def wait() -> None:
                jax.block_until_ready(state[0])

            times[i] += timer.repeats_ms(without_overlap(run, wait, platform), wait)[0]
            log(f"{found[i][0]['variant']}: {times[i][-1]:.3f} ms")
    for (row, _, _), repeats in zip(found, times, strict=True):
        yield row | {"ms": statistics.median(repeats), "repeats_ms": repeats}


def section(name: str, result: Row) -> Section:
    """Returns the table layout of a work."""
    cells = {"microbatches": row_name, "step, ms": number("ms", ".3f"), "fastest, slowest, ms": spread}
    return Section(name, cells | columns("temporary buffers, GB"))


BENCHMARK = Benchmark("Microbatches of a step", __doc__, MicrobatchOptions, works, section)
