"""One step of a pipeline as it ran, in the form of the schedule that was planned, so that both are drawn alike.

    python -m benchmarks.pipeline_trace --work mlp-large            # 4 GPUs; writes benchmarks/results/pipeline_trace.json
    python -m benchmarks.pipeline_trace --draw notes                # from that file: two pictures; needs no GPU

An action is its matrix products, from the first's start to the last's end. Which products are whose stands in the compiled
program: every instruction there says which part of the stage it was made for.
"""

from dataclasses import dataclass

import tyro

from benchmarks.works import WorkName
from jgraph.schedule.action import DGRAD, FORWARD, WGRAD

_MADE_FOR = {"_run_forward": FORWARD, "_run_dgrad": DGRAD, "_run_accumulate": WGRAD}


@dataclass(frozen=True)
class Options:
    """Command line."""

    work: WorkName = "mlp-large"
    """Which work of the pipeline benchmark; MLPs only, whose products are all in the layers."""
    schedule: str = "aligned"
    """One that the aligned runtime plays."""
    xla_option: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE; may be repeated."""
    sizes: str = "full"
    """tiny is for a machine without a GPU."""
    draw: str = ""
    """Draw what was measured into this directory; nothing is run."""
    revision: str = ""
    """Git revision for the JSON, where there is no .git."""
