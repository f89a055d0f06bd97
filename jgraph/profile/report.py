"""Creates `profile.json` and `profile.html` from a run directory, or from a trace of any program."""

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from jgraph.device import find as find_device
from jgraph.errors import ProfileError
from jgraph.page import render
from jgraph.profile import _actions, attribution
from jgraph.profile.attribution import Step
from jgraph.profile.program import Program
from jgraph.profile.trace import find, read
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
    found = _report(about, chosen, program) | {"captured": graphs, "memory": about["memory"]}
    if "pipeline" in about:
        try:
            schedule, runtime = files.from_json(about["pipeline"]["schedule"]), about["pipeline"]["runtime"]
            kernels = [attribution.action_kernels(chosen[device]) for device in about["pipeline"]["devices"]]
            ranks = [{kind: of.get(name, np.zeros((0, 2))) for kind, name in enumerate(KINDS)} for of in kernels]
            found["pipeline"] = _actions.report(schedule, _actions.measured(schedule, ranks, runtime), runtime)
        except ProfileError as e:
            notes.append(f"The actions of the pipeline cannot be separated: {e}.")
    return found | {"about": found["about"] | {"notes": notes}}


def of_trace(path: Path, *, program: Path, steps: int) -> dict[str, Any]:
    """Computes the contents of profile.json from a trace of any JAX program. Writes nothing.

    The program must have run without command buffers, because kernels in a CUDA graph have no names.

    Args:
        path: A *.xplane.pb file, or a directory. In a directory and below, reads the newest *.xplane.pb file.
        program: A file with the text of the program, the result of `compiled.as_text()`.
        steps: The number of equal steps in the trace.

    Returns:
        A dict of JSON values with the keys of the result of `of_run`. `title` is the name of the trace file and the devices.
        `about.versions`, `about.date`, `about.flags` and `about.notes` are empty. `captured` and `pipeline` are None. `memory`
        has only `pools`, which is empty.

    Raises:
        ProfileError: If there is no trace, a file is missing or damaged, the kernels have no names, the trace has no kernel of
            the program, or no kernel ran `steps` times.
    """
    trace = read(path)
    try:
        known = Program.of(program.read_text())
    except (OSError, ValueError) as e:
        message = f"`program` is {program}: cannot be read ({e}); pass a file with the result of compiled.as_text()"
        raise ProfileError(message, field="program") from e
    chosen = attribution.choose_step(trace, known, steps)
    title, versions = f"{find(path).name}, {len(trace.devices)} x {trace.device}", {}
    about = {
        "title": title,
        "device": trace.device,
        "devices": len(trace.devices),
        "versions": versions,
        "date": "",
        "flags": "",
    }
    return _report(about, chosen, known) | {"captured": None, "memory": {"pools": {}}}


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


def _report(about: Mapping[str, Any], chosen: Mapping[int, Step], program: Program) -> dict[str, Any]:
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
        "groups": attribution.groups(first, program, device),
        "roofline": asdict(device) if device else None,
        "pipeline": None,
        "timeline": attribution.timeline(chosen),
    }
