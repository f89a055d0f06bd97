"""Report the time of each kernel in a recorded trace.

    python -m jgraph.train --profile 10:13 --run-dir runs/first   # records a profile and writes the report
    python -m jgraph.profile runs/first                           # writes the report again
    python -m jgraph.profile traces/                              # any JAX program: a directory of jax.profiler.trace

Writes profile.json, and profile.html, which needs no server and no other file.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro

from jgraph.cli import Count, Directory, File, as_flags, command, fields_of, phase
from jgraph.errors import ConfigError, os_errors, require
from jgraph.exits import end_with


def show(
    path: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_OR_TRACE")],
    /,
    *,
    out: Directory = None,
    program: File = None,
    steps: Count = None,
) -> None:
    """Writes the report, profile.json and profile.html, and prints a summary.

    Args:
        path: A run directory with a profile, a *.xplane.pb file, or a directory that contains one. The newest one is read.
        out: Directory to write to, created if missing; by default that of the profile. Existing reports are replaced.
        program: For a trace that does not have its program: file with the text, as compiled.as_text() returns it.
        steps: For a trace: number of equal steps in it, at least 1. By default, they are found.

    Raises:
        ProfileError: If the profile is missing, damaged or of another program.
        ConfigError: If `steps` is below 1; if `program` or `steps` is given for a run; or if the report cannot be written.
    """
    require(steps is None or steps >= 1, "steps", steps, "at least 1")
    # Imported here, because importing jax is slow.
    from jgraph.profile import report

    recorded = next((place for place in (path, path / "profile") if (place / "run.json").exists()), None)
    if recorded and (program or steps):
        raise ConfigError(f"{path} is a run: leave out `program` and `steps`, which it records", field="program")
    out = out or recorded or (path if path.is_dir() else path.parent)
    with phase("making the report"):
        profile = report.of_run(recorded) if recorded else report.of_trace(path, program=program, steps=steps)
        with os_errors("out", out):
            files = report.write(profile, out)
    for line in _summary(profile), f"written to {', '.join(map(str, files))}", *profile["about"]["notes"]:
        print(as_flags(line, fields_of(show)))


def _summary(profile: Mapping[str, Any]) -> str:
    """Returns a line with the time of a step and the fraction of the busy time that is attributed to categories."""
    captured, named = profile["captured"], profile["uncaptured"]
    attributed = statistics.mean(rank["attributed"] for rank in named["ranks"])
    times = [f"{captured['step_ms']:.2f} ms a step in command buffers"] if captured else []
    which = "without" if captured else "a step"
    times.append(f"{named['step_ms']:.2f} ms {which}, {attributed:.1%} of the busy time attributed")
    return f"{profile['title']}: {', '.join(times)}"


main = command("python -m jgraph.profile", __doc__, show)

if __name__ == "__main__":
    end_with(main)
