"""Creates `profile.json` and `profile.html` from a run directory, or from a trace of any program."""

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from jgraph.device import find as find_device
from jgraph.errors import ProfileError
from jgraph.page import render
from jgraph.profile import _actions, attribution
from jgraph.profile._steps import name_of
from jgraph.profile.attribution import Graph, Step
from jgraph.profile.program import Program
from jgraph.profile.trace import read
from jgraph.schedule import files
from jgraph.schedule.action import KINDS

_FORMAT = 4
_ABOUT = ("title", "device", "devices", "versions", "date", "flags", "memory", "steps")


def of_run(directory: Path) -> dict[str, Any]:
    """Computes profile.json from the recording of a profiled run. Writes nothing. Raises ProfileError if it is damaged.

    The directory has run.json, program.txt.gz, and traces in `uncaptured` and optionally `captured`.
    """
    try:
        about = json.loads((directory / "run.json").read_text())
        with gzip.open(directory / "program.txt.gz", "rt") as file:
            program = Program.parse(file.read())
        if absent := [name for name in _ABOUT if about.get(name) is None]:
            raise ProfileError(f"run.json has no {absent[0]}")
    except (OSError, ValueError, AttributeError, EOFError, RecursionError, zlib.error) as e:
        raise ProfileError(f"{directory} has no complete recording ({e}): record one, e.g. with `profile` 10:13") from e
    with_graphs = directory / "captured"
    graphs = attribution.captured(read(with_graphs), about["steps"]) if with_graphs.exists() else None
    chosen = attribution.choose_step(read(directory / "uncaptured"), program, about["steps"])
    pipeline = about.get("pipeline")
    if missing := [device for device in (pipeline or {}).get("devices", ()) if device not in chosen]:
        raise ProfileError(f"{directory}: run.json has a rank on device {missing[0]}, but the trace does not have that device")
    notes = ["The step has no command buffers, so there is one trace, with the times of the run plus the profiler's overhead."]
    if graphs:
        reason = "because kernels in a CUDA graph have no names"
        notes = [f"Kernels, categories and rooflines are those of a step without command buffers, {reason}."]
    # `memory` is in bytes per device: `pools` by use; `predicted_peak`, `compiled_peak`, `measured_peak`, None if unknown.
    # `usage` has the temporaries over the program by scope, and `buffers` the largest ones at the peak, if they are known.
    found = _report(about, chosen) | {"captured": graphs, "memory": about["memory"]}
    if pipeline:
        try:
            schedule = files.from_json(pipeline["schedule"])
            runtime = pipeline["runtime"]
            kernels = [attribution.action_kernels(chosen[device]) for device in pipeline["devices"]]
            ranks = [{kind: of.get(name, np.zeros((0, 2))) for kind, name in enumerate(KINDS)} for of in kernels]
            found["pipeline"] = _actions.report(schedule, _actions.measured(schedule, ranks, runtime), runtime)
        except ProfileError as e:
            notes.append(f"The actions of the pipeline cannot be separated: {e}.")
    return found | {"about": found["about"] | {"notes": notes}}


def of_trace(path: Path, *, program: Path | None = None, steps: int | None = None) -> dict[str, Any]:
    """Computes profile.json from a trace of any JAX program, a file or the newest in a directory. Writes nothing.

    `program` is a file with the text of `compiled.as_text()`; by default, the trace has the programs.
    """
    trace = read(path)
    try:
        given = Program.parse(program.read_text()) if program else None
    except (OSError, ValueError) as e:
        message = f"`program` is {program}: cannot be read ({e}); pass a file with the result of compiled.as_text()"
        raise ProfileError(message, field="program") from e
    chosen = attribution.choose_step(trace, given, steps)
    first = next(iter(chosen.values()))
    devices = len(trace.devices)
    ms = {row["name"]: row["ms"] for row in attribution.totals(first, list(map(name_of, first.events.module)))}
    title = f"{next(filter(None, ms), 'no program')}, {devices} x {trace.device}"
    about = {"title": title, "device": trace.device, "devices": devices, "versions": trace.versions, "date": "", "flags": ""}
    found = _report(about, chosen) | {"captured": None, "memory": {"pools": {}}}
    return found | {"about": found["about"] | {"notes": _notes(first, trace.device, found["graphs"])}}


def _notes(step: Step, device: str, graphs: Sequence[Graph]) -> list[str]:
    notes = [step.found_by] if step.found_by else []
    missing = dict.fromkeys(name_of(module) for module in step.events.module if module not in {"", *step.programs})
    if missing:
        notes.append(
            f"The trace does not have the text of {', '.join(missing)}, so its kernels have no source lines and rooflines. "
            "Pass `program`: a file with the result of compiled.as_text()."
        )
    if graphs:
        ms, named_ms = sum(graph["ms"] for graph in graphs), sum(graph["named_ms"] for graph in graphs)
        notes.append(
            f"{ms:.3f} ms of kernels ran in CUDA graphs, where the profiler does not record instructions. {named_ms:.3f} ms of "
            "them are in kernels with the name of an instruction. For the others, record a trace without CUDA graphs: compile "
            'with compiler_options={"xla_gpu_enable_command_buffer": ""}.'
        )
    elif device != "CPU":
        notes.append(
            "No kernel ran in a CUDA graph. XLA can skip CUDA graphs while a profiler runs. A step with many short kernels "
            "then takes longer than without the profiler."
        )
    return notes


def write(profile: dict[str, Any], directory: Path) -> tuple[Path, Path]:
    """Writes profile.json and profile.html, which needs no server. Replaces existing files. ValueError for NaN or infinity."""
    directory.mkdir(parents=True, exist_ok=True)
    data, html = directory / "profile.json", directory / "profile.html"
    data.write_text(json.dumps(profile, allow_nan=False) + "\n")
    html.write_text(render("jgraph.profile", profile), encoding="utf-8")
    return data, html


def _report(about: Mapping[str, Any], chosen: Mapping[int, Step]) -> dict[str, Any]:
    # All but `uncaptured` and `timeline` is of the first device.
    first = next(iter(chosen.values()))
    device = find_device(about["device"])
    shown = ("device", "devices", "versions", "date", "flags")
    return {
        "format": _FORMAT,
        "title": about["title"],
        # `date` is UTC in ISO format, `flags` a text with the settings that differ from the preset.
        "about": {name: about[name] for name in shown} | {"notes": []},
        "uncaptured": {
            "steps_ms": list(first.all_ms),  # all steps; the others are of the step from `choose_step`
            "step_ms": first.ms,
            "ranks": [attribution.by_category(rank, step) for rank, step in chosen.items()],
        },
        "groups": attribution.groups(first, device),
        "lines": attribution.totals(first, first.sources),
        "scopes": attribution.totals(first, first.scopes),
        "collectives": attribution.collectives(first),
        "graphs": attribution.graphs(first),
        # The GPU's rates and other properties; None if it is unknown.
        "roofline": asdict(device) if device else None,
        "pipeline": None,
        "timeline": attribution.timeline(chosen),
    }
