"""`profile.json` and `profile.html` of a run directory's traces, or of a trace of any program."""

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
from jgraph.profile import actions, attribution
from jgraph.profile.attribution import Step
from jgraph.profile.collectives import collectives
from jgraph.profile.program import Program
from jgraph.profile.trace import find, read
from jgraph.schedule import files
from jgraph.schedule.action import FORWARD, KINDS

FORMAT = 2
_ABOUT = ("title", "device", "devices", "versions", "date", "flags", "memory", "steps")


def of_run(directory: Path) -> dict[str, Any]:
    """Returns the report of what `jgraph.train.profiling` left in a directory, as profile.json has it.

    Raises ProfileError where something is missing or damaged, or the traces do not show what was traced.
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
        raise ProfileError(f"{directory}: run.json says that device {missing[0]} ran a rank, of which the trace has nothing")
    notes = ["The step has no command buffers: there is one trace, and its times are those of the run, but for the profiler's."]
    if graphs:
        without = "Kernels, categories and rooflines are of a step without command buffers"
        notes = [f"{without}: what comes out of a CUDA graph has no name."]
    found = _report(about, chosen, program) | {"captured": graphs, "memory": about["memory"]}
    if "pipeline" in about:
        found["pipeline"], trouble = _pipeline(about["pipeline"], chosen)
        notes += trouble
    return found | {"about": found["about"] | {"notes": notes}}


def of_trace(path: Path, *, program: Path | None = None, steps: int | None = None) -> dict[str, Any]:
    """Returns the report of a bare trace. Raises ProfileError if there is none, it is damaged, or its kernels have no names.

    Args:
        path: a *.xplane.pb, or a directory that has one.
        program: XLA's text of the program that ran, `compiled.as_text()`; without it there is no roofline, and the gradients of
            weights and activations are told apart only where they were split.
        steps: equal steps in the trace; None: guessed.
    """
    trace = read(path)
    try:
        known = Program.of(program.read_text()) if program else None
    except (OSError, ValueError) as e:
        message = f"`program` is {program}: cannot be read ({e}); give what compiled.as_text() returned"
        raise ProfileError(message, field="program") from e
    chosen = attribution.choose_step(trace, known, steps)
    device = trace.device or trace.kind
    about = {"title": f"{find(path).name}, {len(trace.devices)} x {device}", "device": device, "devices": len(trace.devices)}
    about |= {"versions": {}, "date": "", "flags": ""}
    return _report(about, chosen, known) | {"captured": None, "memory": {"pools": {}}}


def write(profile: dict[str, Any], directory: Path) -> tuple[Path, Path]:
    """Writes profile.json and profile.html; returns where."""
    directory.mkdir(parents=True, exist_ok=True)
    data, html = directory / "profile.json", directory / "profile.html"
    data.write_text(json.dumps(profile, allow_nan=False) + "\n")
    html.write_text(page(profile), encoding="utf-8")
    return data, html


def page(profile: dict[str, Any]) -> str:
    """Returns a profile as one HTML file that asks nothing of any server. Raises ValueError for NaN, which JSON lacks."""
    return render("jgraph.profile", profile)


def _report(about: Mapping[str, Any], chosen: Mapping[int, Step], program: Program | None) -> dict[str, Any]:
    first = next(iter(chosen.values()))
    device = find_device(about["device"])
    told = ("device", "devices", "versions", "date", "flags")
    return {
        "format": FORMAT,
        "title": about["title"],
        "about": {name: about[name] for name in told} | {"notes": []},
        "uncaptured": {
            "steps_ms": list(first.all_ms),
            "step_ms": first.ms,
            "ranks": [attribution.by_category(rank, step) for rank, step in chosen.items()],
        },
        "groups": attribution.groups(first, program, device),
        "collectives": collectives(first, program),
        "roofline": asdict(device) if device else None,
        "pipeline": None,
        "timeline": attribution.timeline(chosen),
    }


def _pipeline(about: Mapping[str, Any], chosen: Mapping[int, Step]) -> tuple[dict[str, Any] | None, list[str]]:
    """Returns `pipeline` of profile.json; or why there is none."""
    schedule = files.from_json(about["schedule"])
    ranks = []
    for device in about["devices"]:
        found = attribution.action_kernels(chosen[device])
        ranks.append({kind: found.get(name, np.zeros((0, 2))) for kind, name in enumerate(KINDS)})
    try:
        run = actions.measured(schedule, ranks, about["runtime"])
    except ProfileError as e:
        return None, [f"The actions of the pipeline cannot be told apart: {e}."]
    found = actions.report(schedule, run, about["runtime"])
    # Time 0 of the run is its first action, a forward.
    first = min(range(len(ranks)), key=lambda r: run.starts[r].min())
    zero = ranks[first][FORWARD][0, 0]
    categories = [
        one
        for device, starts, ends in zip(about["devices"], run.starts, run.ends, strict=True)
        for one in attribution.categories_between(chosen[device], starts + zero, ends + zero)
    ]
    for action, own in zip(found["actions"], categories, strict=True):
        action["categories"] = own
    return found, []
