"""The choice of `--pp-engine auto --schedule auto` for a run, the time that it takes, and the printed predictions.

    python -m benchmarks run engines --work launch-bound gpt-1b3 gpt-1b3-fp8

`python -m benchmarks run pipeline` measures the same engines and schedules one by one, without the update.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks.rows import Row
from benchmarks.runner import Benchmark, Options, Work
from benchmarks.tables import Section, number
from benchmarks.turns import Entrant, ask
from benchmarks.works import in_fp8, training
from jgraph.train.config import TrainConfig

WorkName = Literal["launch-bound", "gpt-1b3", "gpt-1b3-fp8"]
MICROBATCHES = 16
SEQUENCES: dict[WorkName, int] = {"launch-bound": 2, "gpt-1b3": 4, "gpt-1b3-fp8": 4}  # of a microbatch


@dataclass(frozen=True, kw_only=True)
class Flags(Options):
    """Chooses what is run."""

    work: tuple[WorkName, ...] = ("launch-bound", "gpt-1b3", "gpt-1b3-fp8")
    """Presets; with products in FP8, by delayed scaling."""
    ranks: int = 2
    """GPUs of the pipeline."""


def works(options: Flags) -> Iterator[Work]:
    for work in options.work:
        config = config_of(work, options).to_dict()
        entrant = Entrant({"system": "jgraph", "variant": "--pp-engine auto"}, "benchmarks.programs.engine", {"config": config})
        # Asked when the work has begun, so that a work of before is kept until then.
        rows = (ask(one, timeout=options.timeout) for one in [entrant])
        yield Work(work, {"ranks": options.ranks, "config": config}, rows=rows)


def config_of(work: WorkName, options: Flags) -> TrainConfig:
    config = training(work.removesuffix("-fp8"), options)
    if work.endswith("-fp8"):
        config = in_fp8(config, "delayed")
    rows = MICROBATCHES * SEQUENCES[work]
    return config.changed(pp=options.ranks, num_microbatches=MICROBATCHES, batch_size=rows, pp_engine="auto", schedule="auto")


def section(work: str, result: Row) -> Section:
    config = result["config"]
    return Section(
        f"{work}, {result['ranks']} ranks, {config['num_microbatches']} microbatches, {config['batch_size']} sequences",
        {
            "run": lambda row: row["variant"],
            "takes": lambda row: row["chosen"],
            "after s": number("build_s", ".0f"),
            "of them": lambda row: row.get("phases", ""),
        },
        needs="chosen",
        notes="\n".join(f"    {line}" for row in result["rows"] for line in row.get("table", [])),
    )


BENCHMARK = Benchmark("Engines of a pipeline, chosen", __doc__, Flags, works, section)
