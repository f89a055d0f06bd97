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
    """Computes the contents of profile.json from the recording that a run with `--profile` has made. Writes nothing.

    If the forward and backward passes of a pipeline's microbatches cannot be told apart in the trace, `pipeline` is None and
    an entry of `about.notes` has the reason.

    Args:
        directory: Directory of the recording, `profile` in the run directory. It has run.json, program.txt.gz, and traces in
            `uncaptured` and optionally `captured`.

    Returns:
        A dict of JSON values. Times are in ms.
        - `format`: the version of the format.
        - `title`: a line of text.
        - `about`: a dict of `device`, its name; `devices`, their number; `versions`, of libraries by name; `date`, UTC in ISO
          format; `flags`, a str of the settings that differ from the preset; and `notes`, a list of sentences.
        - `captured`: the times of the steps with command buffers (CUDA graphs), from `attribution.captured`. None if there is
          no such trace.
        - `uncaptured`: the times of the steps without command buffers. A dict of `steps_ms`, all steps on the first device;
          `step_ms`, the step that `attribution.choose_step` selects; and `ranks`, a list with the result of
          `attribution.by_category` for this step on each device.
        - `groups`: the groups of equal kernels of the first device, from `attribution.groups`.
        - `lines`, `scopes`: the time of the first device by source line and by named scope, from `attribution.totals`.
        - `collectives`, `graphs`: the collectives and CUDA graphs of the first device, from the functions in `attribution`.
        - `roofline`: a dict of the GPU's rates and other properties. None if the GPU is unknown.
        - `pipeline`: a dict of the actions of a pipeline, in the measured and in a simulated step. None without a pipeline.
        - `memory`: bytes per device. A dict of `pools`, bytes by use; and the peaks `predicted_peak`, `compiled_peak` and
          `measured_peak`, each None if unknown.
        - `timeline`: all events of the selected step, from `attribution.timeline`.

    Raises:
        ProfileError: If a file is missing or damaged, the traces are of another program, or a device of the pipeline is not in
            the trace.
    """
    try:
        about = json.loads((directory / "run.json").read_text())
        with gzip.open(directory / "program.txt.gz", "rt") as file:
            program = Program.of(file.read())
        if absent := [name for name in _ABOUT if about.get(name) is None]:
            raise ProfileError(f"run.json has no {absent[0]}")
    except (OSError, ValueError, AttributeError, EOFError, RecursionError, zlib.error) as e:
        raise ProfileError(f"{directory} has no complete recording ({e}): record one, e.g. with `profile` 10:13") from e
    with_graphs = directory / "captured"
    graphs = attribution.captured(read(with_graphs), about["steps"]) if with_graphs.exists() else None
    chosen = attribution.choose_step(read(directory / "uncaptured"), program, about["steps"])
    if missing := [device for device in about.get("pipeline", {}).get("devices", ()) if device not in chosen]:
        raise ProfileError(f"{directory}: run.json has a rank on device {missing[0]}, but the trace does not have that device")
    notes = ["The step has no command buffers, so there is one trace, with the times of the run plus the profiler's overhead."]
    if graphs:
        reason = "because kernels in a CUDA graph have no names"
        notes = [f"Kernels, categories and rooflines are those of a step without command buffers, {reason}."]
    found = _report(about, chosen) | {"captured": graphs, "memory": about["memory"]}
    if "pipeline" in about:
        try:
            schedule, runtime = files.from_json(about["pipeline"]["schedule"]), about["pipeline"]["runtime"]
            kernels = [attribution.action_kernels(chosen[device]) for device in about["pipeline"]["devices"]]
            ranks = [{kind: of.get(name, np.zeros((0, 2))) for kind, name in enumerate(KINDS)} for of in kernels]
            found["pipeline"] = _actions.report(schedule, _actions.measured(schedule, ranks, runtime), runtime)
        except ProfileError as e:
            notes.append(f"The actions of the pipeline cannot be separated: {e}.")
    return found | {"about": found["about"] | {"notes": notes}}


def of_trace(path: Path, *, program: Path | None = None, steps: int | None = None) -> dict[str, Any]:
    """Computes the contents of profile.json from a trace of any JAX program. Writes nothing.

    Args:
        path: A *.xplane.pb file, or a directory. In a directory and below, reads the newest *.xplane.pb file.
        program: A file with the text of a program that ran, the result of `compiled.as_text()`. By default, the profiler has
            stored the programs in the trace.
        steps: The number of equal steps in the trace. By default, `attribution.choose_step` finds the steps.

    Returns:
        A dict of JSON values with the keys of the result of `of_run`. `title` is the name of the program with the longest time
        and the devices. `about.notes` has the rule that found the steps, the missing programs, and the time in CUDA graphs.
        `about.date` and `about.flags` are empty. `captured` and `pipeline` are None. `memory` has only `pools`,
        which is empty.

    Raises:
        ProfileError: If there is no trace, a file is missing or damaged, the trace has no kernel of `program`, or no kernel ran
            `steps` times.
    """
    trace = read(path)
    try:
        given = Program.of(program.read_text()) if program else None
    except (OSError, ValueError) as e:
        message = f"`program` is {program}: cannot be read ({e}); pass a file with the result of compiled.as_text()"
        raise ProfileError(message, field="program") from e
    chosen = attribution.choose_step(trace, given, steps)
    first, devices = next(iter(chosen.values())), len(trace.devices)
    ms = {row["name"]: row["ms"] for row in attribution.totals(first, list(map(name_of, first.events.module)))}
    title = f"{next(filter(None, ms), 'no program')}, {devices} x {trace.device}"
    about = {"title": title, "device": trace.device, "devices": devices, "versions": trace.versions, "date": "", "flags": ""}
    found = _report(about, chosen) | {"captured": None, "memory": {"pools": {}}}
    return found | {"about": found["about"] | {"notes": _notes(first, trace.device, found["graphs"])}}


def _notes(step: Step, device: str, graphs: Sequence[Graph]) -> list[str]:
    """Returns sentences on a trace: the rule that found the steps, missing programs, and CUDA graphs."""
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
    """Writes profile.json and profile.html. Replaces existing files. The page needs no server and no other file.

    Args:
        profile: The contents of profile.json, from `of_run` or `of_trace`.
        directory: The directory; created if missing.

    Returns:
        The paths of profile.json and of profile.html.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If `profile` has NaN or infinity, which JSON lacks.
    """
    directory.mkdir(parents=True, exist_ok=True)
    data, html = directory / "profile.json", directory / "profile.html"
    data.write_text(json.dumps(profile, allow_nan=False) + "\n")
    html.write_text(render("jgraph.profile", profile), encoding="utf-8")
    return data, html


def _report(about: Mapping[str, Any], chosen: Mapping[int, Step]) -> dict[str, Any]:
    first = next(iter(chosen.values()))
    device = find_device(about["device"])
    shown = ("device", "devices", "versions", "date", "flags")
    return {
        "format": _FORMAT,
        "title": about["title"],
        "about": {name: about[name] for name in shown} | {"notes": []},
        "uncaptured": {
            "steps_ms": list(first.all_ms),
            "step_ms": first.ms,
            "ranks": [attribution.by_category(rank, step) for rank, step in chosen.items()],
        },
        "groups": attribution.groups(first, device),
        "lines": attribution.totals(first, first.sources),
        "scopes": attribution.totals(first, first.scopes),
        "collectives": attribution.collectives(first),
        "graphs": attribution.graphs(first),
        "roofline": asdict(device) if device else None,
        "pipeline": None,
        "timeline": attribution.timeline(chosen),
    }
