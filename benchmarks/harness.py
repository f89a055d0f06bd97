"""How everything here is timed: warm until the clocks have settled, then repeats of many steps, and the median of those.

A card at its power limit runs its first second faster than all others, so the warm-up is a time, not a number of steps.
"""

import faulthandler
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from jgraph_models.gpt_config import GPTConfig

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """Milliseconds a step: the median of the repeats and the repeats themselves; and what the card did meanwhile."""

    ms: float
    repeats_ms: list[float]
    steps: int
    power_watts: float | None
    sm_clock_mhz: float | None


def time_steps(
    run: Callable[[], object],
    wait: Callable[[], object],
    *,
    steps: int,
    seconds: float,
    repeats: int,
    warmup_seconds: float,
) -> Timing:
    """Times a step that is handed to the device asynchronously.

    Args:
        run: hands over one step.
        wait: returns when everything handed over is done.
        steps: fewest in a repeat; the clock is read before and after, never between.
        seconds: a repeat has as many steps more as it takes to last this long: its start and end must not count.
        repeats: at least 5, of which the median is taken.
        warmup_seconds: run before the first repeat.
    """
    start, done = time.perf_counter(), 0
    while time.perf_counter() < start + warmup_seconds:
        for _ in range(steps):
            run()
        wait()
        done += steps
    steps = max(steps, math.ceil(seconds * done / (time.perf_counter() - start)))
    repeats_ms = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(steps):
            run()
        wait()
        repeats_ms.append((time.perf_counter() - start) / steps * 1e3)
    with ThreadPoolExecutor(1) as pool:  # the card is read while it works, but not while it is timed
        reading = pool.submit(read_card)
        while not reading.done():
            for _ in range(steps):
                run()
            wait()
    watts, mhz = reading.result() or (None, None)
    return Timing(statistics.median(repeats_ms), repeats_ms, steps, watts, mhz)


def read_card() -> tuple[float, float] | None:
    """Watts drawn and SM clock in MHz of the first GPU, as nvidia-smi reads them; None without one."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", f"--id={first}", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits"]
    try:
        watts, mhz = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout.split(",")
        return float(watts), float(mhz)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def count_gpus() -> int:
    """By nvidia-smi and CUDA_VISIBLE_DEVICES; without jax or torch, which would take hold of them."""
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return 0
    gpus = done.stdout.splitlines()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpus)))))
    return min(len(gpus), len(list(filter(None, visible.split(",")))))


def resident_bytes() -> int:
    """Memory of this process, as Linux counts it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def soak(
    run: Callable[[], object], wait: Callable[[], object], devices: list[Any], *, steps: int, hang_seconds: float
) -> Iterator[dict[str, Any]]:
    """Steps, each waited for: the bytes in use before them, and ten times on the way what they are and how long steps took.

    A step that hangs ends the process, and where it was is written to stderr. Of jax, only what `devices` can tell is used.
    """

    def memory() -> dict[str, Any]:
        stats = [device.memory_stats() for device in devices]
        return {"device_bytes": sum(s["bytes_in_use"] for s in stats) if all(stats) else None, "host_bytes": resident_bytes()}

    times = []
    yield {"done": 0, **{f"first_{place}": size for place, size in memory().items()}}
    for step in range(1, steps + 1):
        faulthandler.dump_traceback_later(hang_seconds, exit=True)
        start = time.perf_counter()
        run()
        wait()
        times.append((time.perf_counter() - start) * 1e3)
        faulthandler.cancel_dump_traceback_later()
        if step * 10 // steps > (step - 1) * 10 // steps:
            yield {"done": step, "median_ms": statistics.median(times), "slowest_ms": max(times), **memory()}


def save_soak(options: "Common", named: dict[str, Any], row: dict[str, Any]) -> int:
    """Adds what `soak` has found to soaks.json, a row for each name, and prints it. The exit status: 1 where it has failed."""
    file = options.folder / "soaks.json"
    before = json.loads(file.read_text())["soaks"] if file.exists() else []
    others = [one for one in before if any(one.get(key) != value for key, value in named.items())]
    soaks = [*others, named | {"environment": environment(revision=options.revision)} | row]
    write_results("soaks", {"soaks": soaks}, draw_soaks(soaks), options.folder)
    print(draw_soaks(soaks[-1:]))
    return int("failed" in row)


def draw_soaks(soaks: list[dict[str, Any]]) -> str:
    columns = ["what", "device", "steps", "median ms", "slowest", "bytes on the devices, growth", "of the process", "", "date"]
    lines = ["# Soaks", "", line(columns), "|---" * len(columns) + "|"]
    for row in soaks:
        named = [str(row[key]) for key in ("work", "schedule", "variant") if row.get(key)]
        cells = [", ".join([*named, f"graph {row['graph']}"]), row.get("device", ""), f"{row.get('done', 0)} of {row['steps']}"]
        cells += [f"{row[key]:.2f}" if key in row else "" for key in ("median_ms", "slowest_ms")]
        for place in ("device", "host"):
            first, last = row.get(f"first_{place}_bytes"), row.get(f"{place}_bytes")
            cells += ["not told" if first is None or last is None else f"{last:,}, {last - first:+,}"]
        facts = [f"{key.replace('_', ' ')} {row[key]}" for key in ("same_loss", "loss", "skipped") if key in row]
        cells += [row.get("failed") or ", ".join(["no hang", *facts]), row["environment"]["date"][:10]]
        lines += [line(cells)]
    return "\n".join(lines) + "\n"


def environment(*, revision: str = "") -> dict[str, Any]:
    """Versions, date and git revision, for the JSON; `revision` where the tree travelled without its .git."""
    packages = ("jax", "jaxlib", "flax", "optax", "torch")
    installed = {name: version for name in packages if (version := _version(name))}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": revision or _git_revision(),
        "python": platform.python_version(),
        **installed,
    }


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every comparison with a peer can be told."""

    rounds: int = 5
    """How often every variant has its turn."""
    seconds: float = 0.3
    """Shortest time of a repeat."""
    repeats: int = 3
    """Repeats of a turn, of which the median is taken."""
    warmup_seconds: float = 0.7
    """Time that a variant runs in its turn before it is timed."""
    together: int = 0
    """Processes that share the GPUs' memory at a time, ours always among them; 0 for all."""
    timeout: float = 240.0
    """Seconds after which a process is ended that says nothing."""
    table: bool = False
    """Print the results that there are; nothing is run."""
    revision: str = ""
    """Git revision for the JSON, where there is no .git."""
    out: str = ""
    """Folder for the results; benchmarks/results if it is left out."""
    name: str
    """Results go to NAME.json and .md there."""

    @property
    def folder(self) -> Path:
        return Path(self.out) if self.out else RESULTS


def write_results(name: str, results: dict[str, Any], table: str, folder: Path | None = None) -> None:
    """Writes NAME.json and .md, to benchmarks/results if no folder is given."""
    folder = folder or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n")
    (folder / f"{name}.md").write_text(table)


class Table:
    """Rows by work, written after each round; what an earlier run has left there stays until its work is run again.

    Args:
        options: say where.
        draw: makes the Markdown of all works.
    """

    def __init__(self, options: Common, draw: Callable[[dict[str, Any]], str]):
        self.options, self.draw = options, draw
        file = options.folder / f"{options.name}.json"
        self.works: dict[str, Any] = json.loads(file.read_text())["works"] if file.exists() else {}

    def begin(self, work: str, **about: Any) -> None:
        told = {"environment": environment(revision=self.options.revision), "options": asdict(self.options)}
        self.works[work] = {**told, **about, "device": None, "rows": []}

    def put(self, work: str, rows: list[dict[str, Any]]) -> None:
        """All rows of a work, as far as they are known."""
        result = self.works[work]
        result["rows"] = rows
        result["device"] = next((row["device"] for row in rows if row["system"] == "jgraph" and "device" in row), None)
        write_results(self.options.name, {"works": self.works}, str(self), self.options.folder)
        print(f"{work}: " + ", ".join(shown(row) for row in rows), flush=True)

    def __str__(self) -> str:
        return self.draw(self.works)


def named(row: dict[str, Any]) -> str:
    """System, schedule, variant and join."""
    join = f"join {row['join']}" if "join" in row else ""
    return " ".join(filter(None, (row["system"], row.get("schedule"), row.get("variant"), join)))


def shown(row: dict[str, Any]) -> str:
    last = f"{row['repeats_ms'][-1]:.3f}" if "ms" in row else "..."
    return f"{named(row)} {'failed' if 'failed' in row else last}"


def fastest(rows: list[dict[str, Any]], system: str) -> dict[str, Any] | None:
    return min((row for row in rows if row["system"] == system and "ms" in row), key=lambda row: row["ms"], default=None)


PARAMETERS = ("kept", "gathered again", "whole")


def parameters(row: dict[str, Any]) -> str:
    """Whether gathered parameters are kept for the backward, or every GPU has them whole: like is compared with like."""
    words = set(row["variant"].split())
    if "layout=dp" in words:
        return "whole"
    return "gathered again" if words & {"reshard=yes", "compile:reshard", "eager:reshard"} else "kept"


def line(cells: list[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def spread(row: dict[str, Any]) -> str:
    return f"{min(row['repeats_ms']):.3f}, {max(row['repeats_ms']):.3f}"


def ratios(row: dict[str, Any], to: dict[str, Any] | None, key: str = "ms") -> list[float]:
    """How much longer a row took than another in each round that both were in; where there was none, by their medians."""
    if not to or key not in row or key not in to:
        return []
    if not (row.get("rounds") and to.get("rounds")):
        return [row[key] / to[key]]
    own, others = (dict(zip(one["rounds"], one[f"repeats_{key}"], strict=True)) for one in (row, to))
    return [own[number] / others[number] for number in own if number in others] or [row[key] / to[key]]


def ratio(row: dict[str, Any], to: dict[str, Any] | None, key: str = "ms", *, digits: int = 3) -> str:
    """The median of the rounds' ratios, and from the least to the most of them."""
    found = [] if row is to else ratios(row, to, key)
    if len(found) < 2:
        return f"{found[0]:.{digits}f}" if found else ""
    return f"{statistics.median(found):.{digits}f} ({min(found):.{digits}f} to {max(found):.{digits}f})"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_revision() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def gpt_of(fields: dict[str, Any]) -> GPTConfig:
    """The model of a stored configuration; earlier ones had its module among its settings."""
    return GPTConfig(**{name: value for name, value in fields.items() if name != "module"})


def step_flops(config: dict[str, Any]) -> float:
    """Of a training step of a stored configuration."""
    return gpt_of(config["model"]).flops(config["batch_size"], config["seq_len"])
