"""Traces of a few training steps: with command buffers, and then without, where every kernel has a name.

The traced steps are steps of the run on its own state, so no work is wasted.
"""

import gzip
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jgraph.errors import ProfileError, os_errors
from jgraph.processes import is_process_zero
from jgraph.profile import report
from jgraph.settings import flatten
from jgraph.step.compiled import CompiledStep
from jgraph.step.state import StepMetrics, TrainState
from jgraph.train._capacity import is_halted
from jgraph.train._console import Reporter
from jgraph.train._functional import batch_shapes
from jgraph.train._loop import Callback
from jgraph.train._watchdog import Watchdog
from jgraph.train.config import TrainConfig
from jgraph.train.metrics import peak_memory_bytes
from jgraph.train.presets import PRESETS
from jgraph.train.rundir import RunDir, versions
from jgraph.train.setup import TrainSetup
from jgraph.tree import shard_nbytes
from jgraph.xla.launches import profiler_options

# Without this option, XLA can skip command buffers under a profiler.
_PROFILED = "xla_enable_command_buffers_during_profiling=true"


def profiled(config: TrainConfig, platform: str) -> TrainConfig:
    """Returns a configuration with command buffers also while a profiler runs, where XLA can skip them."""
    if platform != "gpu" or config.compile.graph == "off":
        return config
    return config.changed(xla_options=(*config.compile.xla_options, _PROFILED))


class Profile(Callback):
    """Traces the steps in `monitor.profile_steps`, once per run, and writes a report of their kernels to `profile/`.

    `captured/` has the trace with command buffers, if the step has any, and `uncaptured/` the one without. Only process 0
    reports. `batches` takes the index of a step, from 0, and returns its batch on the devices.
    """

    def __init__(
        self,
        setup: TrainSetup,
        step: CompiledStep,
        batches: Callable[[int], Any],
        run_dir: RunDir,
        watchdog: Watchdog,
        reporter: Reporter,
    ):
        first, stop = setup.config.monitor.profile_steps
        self._first: int | None = first
        self._count = stop - first
        self._batches = batches
        self._watchdog = watchdog
        self._reporter = reporter
        # Every process runs the steps, but only the trace of process 0 is reported.
        path = run_dir.path / "profile" if is_process_zero() else tempfile.mkdtemp(prefix="jgraph-profile-")
        self._directory = Path(path)
        self._compile(setup, step)

    def _compile(self, setup: TrainSetup, step: CompiledStep) -> None:
        """Compiles the step without command buffers now, because a pause before the trace would let the devices cool."""
        has_graph = jax.default_backend() == "gpu" and setup.config.compile.graph != "off"
        self._setup = setup
        self._captured = step if has_graph else None
        plain = TrainSetup(setup.config.changed(graph="off"), setup.model, setup.step)
        self._uncaptured = plain.compile_step() if has_graph else step

    def recompiled(self, setup: TrainSetup, step: CompiledStep, done: int) -> None:
        """Traces the new step, from step `done` + 1 at the earliest. Gives up if too few steps are left."""
        if self._first is None:
            return
        self._first = max(self._first, done)
        needed = 2 * self._count + 2
        if self._first + needed <= setup.config.steps:
            self._compile(setup, step)
        else:
            self._reporter.warn(f"no profile: it takes {needed} steps, and fewer are left after step {self._first}")
            self._first = None

    def due(self, done: int) -> bool:
        return done == self._first

    def instead(self, done: int, state: TrainState) -> tuple[TrainState, list[StepMetrics]] | None:
        """Runs and traces N steps with command buffers, 1 without to load this program, and N without. Otherwise N steps.

        The steps train the model like all others. If one halts, they are traced again after the loop has compiled a larger
        step.
        """
        if done != self._first:
            return None
        shutil.rmtree(self._directory, ignore_errors=True)
        with os_errors("run_dir", self._directory):
            self._directory.mkdir(parents=True)
        metrics: list[StepMetrics] = []
        trace = partial(jax.profiler.trace, profiler_options=profiler_options())
        if self._captured is not None:
            with trace(str(self._directory / "captured")):
                state = self._run(self._captured, state, done, self._count, metrics)
            state = self._run(self._uncaptured, state, done, 1, metrics)  # the first run loads the program
        with trace(str(self._directory / "uncaptured")):
            state = self._run(self._uncaptured, state, done, self._count, metrics)
        with os_errors("run_dir", self._directory):
            with gzip.open(self._directory / "program.txt.gz", "wt") as file:
                file.write(self._uncaptured.as_text())
            facts = _about(self._setup, self._uncaptured) | {"steps": self._count}
            (self._directory / "run.json").write_text(json.dumps(facts, indent=2) + "\n")
        if not is_halted(metrics[-1]):
            self._first = None
            self._report(f"steps {done + 1} to {done + len(metrics)}")
        return state, metrics

    def _run(self, step: CompiledStep, state: TrainState, done: int, count: int, metrics: list[StepMetrics]) -> TrainState:
        """Runs and waits for `count` steps, and appends their metrics."""
        begin = len(metrics)
        for number in range(done + begin + 1, done + begin + count + 1):
            annotation = jax.profiler.StepTraceAnnotation("train", step_num=number)
            with annotation, self._watchdog.over(lambda number=number: f"step {number} (profiled)", step):
                state, step_metrics = step(state, self._batches(number - 1))
            metrics.append(step_metrics)
        which = f"steps {done + begin + 1} to {done + len(metrics)} (profiled)"
        self._watchdog.wait(lambda: which, metrics[begin:], step)
        return jax.block_until_ready(state)

    def _report(self, which: str) -> None:
        if not is_process_zero():
            return
        try:
            profile = report.of_run(self._directory)
            with os_errors("run_dir", self._directory):
                data, page = report.write(profile, self._directory)
            self._reporter.line(f"profile of {which}: open {page} in a browser; {data} has the data as JSON")
        except ProfileError as e:
            self._reporter.warn(f"no profile: {e}")


def _about(setup: TrainSetup, compiled: CompiledStep) -> dict[str, Any]:
    """Returns the description of the run for the report: devices, versions, flags, memory."""
    config = setup.config
    devices = jax.local_devices()[: setup.step.num_devices]
    kind = devices[0].device_kind
    tokens = f"{config.input.batch_size} x {config.input.seq_len} tokens a step"
    facts = {
        "title": f"{config.preset}, {tokens}, {setup.step.num_devices} x {kind}",
        "device": kind,
        "devices": setup.step.num_devices,
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "flags": _flags(config),
        "memory": _memory(setup, compiled) | {"measured_peak": peak_memory_bytes(devices[0]) or None},
    }
    return facts | setup.step.bound.reports.profile_facts()


def _memory(setup: TrainSetup, compiled: CompiledStep) -> dict[str, Any]:
    """Returns bytes per device: `pools` by use, `predicted_peak` of a pipeline or None, `compiled_peak` or None.

    The pool `temporaries` has the temporary arrays of the compiled step that are not predicted. `usage` has the fields of
    `Usage`, and `buffers` the largest buffers at its peak; both are absent if XLA does not report them.
    """
    state = setup.step.state
    state_bytes = {"parameters": shard_nbytes(state.params), "optimizer": shard_nbytes(state.opt_state)}
    covered = setup.step.bound.reports.predict_memory(batch_shapes(setup.config.input, setup.config.input.batch_size))
    pools = {name.replace("forward_", "residuals to "): size for name, size in covered.sizes.items()}
    predicted = sum((*state_bytes.values(), *pools.values())) if covered.covers == "whole" else None
    if (memory := compiled.memory) is not None:
        pools["temporaries"] = max(0, memory.temporaries - sum(pools.values()))
    pools = {name: size for name, size in (state_bytes | pools).items() if size}
    found = {"pools": pools, "predicted_peak": predicted, "compiled_peak": memory.total if memory else None}
    if memory is None or compiled.capture is None or compiled.capture.usage is None:
        return found
    return found | {"usage": asdict(compiled.capture.usage), "buffers": list(map(asdict, compiled.capture.buffers))}


def _flags(config: TrainConfig) -> str:
    """Returns the settings that differ from the preset, with their values."""
    base, fields = (flatten(c.to_dict()) for c in (PRESETS.get(config.preset, config), config))
    differ = {name: value for name, value in fields.items() if value != base.get(name) and name != "run_dir"}
    words = (f"{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}" for name, value in differ.items())
    return " ".join([f"preset {config.preset}", *words])
