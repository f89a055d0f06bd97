"""`graph` measure of a run: measured before the run has a state, kept with it, and taken again where it goes on unchanged."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import jax

from jgraph.data import Batches
from jgraph.parallel import CompiledStep, TrainState, measure_graph
from jgraph.processes import all_gather_scalar, is_process_zero
from jgraph.training.config import TrainConfig
from jgraph.training.console import Reporter
from jgraph.training.rundir import RunDir, versions
from jgraph.training.setup import TrainSetup
from jgraph.training.watchdog import Watchdog
from jgraph.xla.options import Graph

# Fields that the compiled step does not depend on.
_BESIDE = (
    "run_dir resume compile_cache on_nonfinite log_every eval_every eval_batches checkpoint_every checkpoint_keep hang_seconds "
    "profile sample_tokens distributed data data_field data_shuffle data_documents seed log"
)


def settle(
    config: TrainConfig,
    setup: TrainSetup,
    init: Callable[[], TrainState],
    batches: Batches,
    run_dir: RunDir,
    reporter: Reporter,
    watchdog: Watchdog,
) -> tuple[Graph, CompiledStep | None, dict[str, Any]]:
    """Returns the choice for a run with `graph` measure, alike on all processes, and tells of it.

    Args:
        config: of the run, as it was asked for.
        init: makes a state to measure with, before there is the run's own: the devices need not hold two.

    Returns:
        The choice; the step compiled with it, and what to write to `run_dir.measured`: None and nothing where it was not
        measured now.
    """
    if not has_command_buffers():
        platform = jax.default_backend()
        reporter.line(f"`graph` measure: every choice is the same program on a {platform}, without command buffers; takes auto")
        return "auto", None, {}
    choices, here = get_args(Graph), place(config, setup.num_devices)
    before = kept(run_dir.measured, here).get("graph") if config.resume and is_process_zero() else ""
    # The first process's word: it has written the file.
    if (number := all_gather_scalar(choices.index(before) if before in choices else -1)[0]) >= 0:
        reporter.line(f"`graph` measure: takes {choices[number]}, as measured before ({run_dir.measured})")
        return choices[number], None, {}
    batch, options = setup.step.place(batches[0]), setup.xla_options(jax.default_backend())
    measured = measure_graph(setup.step, batch, init, xla_options=options, over=watchdog.over)
    reporter.line(f"`graph` measure: {measured}")
    told = {graph: 1e3 * seconds for graph, seconds in measured.seconds.items()}
    fields = {"graph": measured.graph, "milliseconds": told, "refused": measured.refused, "measured_for": here}
    return measured.graph, measured.step, fields


def has_command_buffers() -> bool:
    """Tells whether choices differ on these devices."""
    return jax.default_backend() == "gpu"


def place(config: TrainConfig, num_devices: int) -> dict[str, Any]:
    """Returns what a measurement holds for."""
    device = jax.devices()[0]
    found = {
        "config": {name: value for name, value in dataclasses.asdict(config).items() if name not in _BESIDE.split()},
        "versions": versions() | {"runtime": device.client.platform_version},
        "devices": f"{num_devices} x {device.device_kind}",
        "processes": jax.process_count(),
    }
    return json.loads(json.dumps(found))  # as it is read


def kept(file: Path, place: dict[str, Any]) -> dict[str, Any]:
    """Returns what was measured for this place; empty where there is nothing."""
    try:
        fields = json.loads(file.read_text())
        return fields if fields["measured_for"] == place else {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
