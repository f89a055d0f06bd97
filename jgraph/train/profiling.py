"""Traces of a few training steps: as they are captured, and once more without capture, where every kernel has a name.

The steps are the run's own, on its own state: nothing is computed that the run would not have computed.
"""

import dataclasses
import gzip
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jgraph.errors import os_errors
from jgraph.schedule import files
from jgraph.step.compiled import CompiledStep
from jgraph.step.state import StepMetrics, TrainState
from jgraph.train.config import TrainConfig
from jgraph.train.metrics import peak_memory_bytes
from jgraph.train.presets import PRESETS
from jgraph.train.rundir import flatten, versions
from jgraph.train.setup import TrainSetup
from jgraph.train.watchdog import Watchdog
from jgraph.xla.launches import profiler_options

# XLA leaves command buffers aside while a profiler watches, unless it is told not to.
_PROFILED = "xla_enable_command_buffers_during_profiling=true"


def profiled(config: TrainConfig, platform: str) -> TrainConfig:
    """Returns the configuration whose step keeps its command buffers under a profiler."""
    if platform != "gpu" or config.graph == "off":
        return config
    return dataclasses.replace(config, xla_options=(*config.xla_options, _PROFILED))


@dataclass(frozen=True)
class Recorder:
    """Records traces of `count` steps of a run each, once `first` are done, into a directory; what is there is removed.

    `captured` is the compiled step with command buffers, None where it has none; `uncaptured` the one without.
    """

    setup: TrainSetup
    captured: CompiledStep | None
    uncaptured: CompiledStep
    first: int
    count: int
    directory: Path

    @classmethod
    def of(cls, setup: TrainSetup, step: CompiledStep, first: int, directory: Path) -> "Recorder":
        """Compiles what is traced of a run besides its step, once `first` steps are done."""
        plain = dataclasses.replace(setup, config=dataclasses.replace(setup.config, graph="off"))
        is_captured = jax.default_backend() == "gpu" and setup.config.graph != "off"
        begins, stops = setup.config.profile_steps
        others = plain.compile_step() if is_captured else step
        return cls(setup, step if is_captured else None, others, first, stops - begins, directory)

    def record(self, state: TrainState, batches: Iterator[Any], watchdog: Watchdog) -> tuple[TrainState, list[StepMetrics]]:
        """Runs 2 x `count` + 1 steps, or `count` where only one kind of trace is taken. `state` is donated, as in any step."""
        shutil.rmtree(self.directory, ignore_errors=True)
        with os_errors("run_dir", self.directory):
            self.directory.mkdir(parents=True)
        metrics: list[StepMetrics] = []
        trace = partial(jax.profiler.trace, profiler_options=profiler_options())

        def run(step: CompiledStep, state: TrainState, count: int) -> TrainState:
            begun = len(metrics)
            for number in range(self.first + begun + 1, self.first + begun + count + 1):
                annotation = jax.profiler.StepTraceAnnotation("train", step_num=number)
                with annotation, watchdog.over(lambda number=number: f"step {number}, a profile's", step):
                    state, one = step(state, next(batches))
                metrics.append(one)
            watchdog.wait(
                lambda: f"steps {self.first + begun + 1} to {self.first + len(metrics)}, a profile's", metrics[begun:], step
            )
            return jax.block_until_ready(state)

        if self.captured is not None:
            with trace(str(self.directory / "captured")):
                state = run(self.captured, state, self.count)
            state = run(self.uncaptured, state, 1)  # its first run loads and records
        with trace(str(self.directory / "uncaptured")):
            state = run(self.uncaptured, state, self.count)
        about = _about(self.setup, self.uncaptured) | {"steps": self.count}
        with os_errors("run_dir", self.directory):
            with gzip.open(self.directory / "program.txt.gz", "wt") as file:
                file.write(self.uncaptured.as_text())
            (self.directory / "run.json").write_text(json.dumps(about, indent=2) + "\n")
        return state, metrics


def _about(setup: TrainSetup, compiled: CompiledStep) -> dict[str, Any]:
    """Returns the facts of the run for its report."""
    config, devices = setup.config, jax.local_devices()[: setup.num_devices]
    kind = devices[0].device_kind
    tokens = f"{config.batch_size} x {config.seq_len} tokens a step"
    about: dict[str, Any] = {
        "title": f"{config.preset}, {tokens}, {setup.num_devices} x {kind}",
        "device": kind,
        "devices": setup.num_devices,
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "flags": _flags(config),
        "memory": setup.memory(compiled) | {"measured_peak": peak_memory_bytes(devices[0]) or None},
    }
    if (pipeline := setup.pipeline) is not None:
        ranks = pipeline.mesh.devices[0].reshape(pipeline.schedule.num_ranks, -1)[:, 0]
        about["pipeline"] = {
            "runtime": pipeline.runtime,
            "schedule": files.to_json(pipeline.schedule),
            "devices": [device.local_hardware_id or 0 if device.platform == "gpu" else device.id for device in ranks],
        }
    return about


def _flags(config: TrainConfig) -> str:
    """Returns the fields that differ from the preset's, with their values."""
    base, own = (flatten(dataclasses.asdict(of)) for of in (PRESETS.get(config.preset, config), config))
    differ = {name: value for name, value in own.items() if value != base.get(name) and name != "run_dir"}
    words = (f"{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}" for name, value in differ.items())
    return " ".join([f"preset {config.preset}", *words])
