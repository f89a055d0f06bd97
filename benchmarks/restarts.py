"""Processes with one GPU each: restarts by torchrun after a kill, step time beside one process, and layouts over slow links.

python -m benchmarks run restarts --processes 2
python -m benchmarks run restarts --sizes tiny --kills 2    # on a CPU; needs torch

The part `kills` trains with one process per GPU, with one process that has all GPUs, and with processes that are killed one by
one at random steps. The row of a kill has the seconds from SIGKILL until the other processes have ended (`exit_s`), all have
started again (`start_s`), the state is restored (`resume_s`), and the next step is done (`first_step_s`). It also has the
phases of that start on process 0, as in `benchmarks/startup.py`. `differs` compares the losses with those of the first run; the
second run, which is the same, shows what kernels that add in a different order change.

The part `network` trains with sharded and with partly sharded state, over the links of the machine and over sockets. The output
of all runs is in a file beside the results. `--timeout` is the limit of a run.
"""

import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.rows import Row, row_name
from benchmarks.runner import Benchmark, Options, Work, loss_difference
from benchmarks.startup import KEYS
from benchmarks.tables import Section, number
from benchmarks.turns import log
from jgraph.train.metrics import read_metrics

TINY = (
    *("--model.num-layers", "2", "--model.d-model", "32", "--model.d-ff", "64", "--model.num-heads", "2"),
    *("--model.num-kv-heads", "2", "--model.vocab-size", "256", "--model.compute-dtype", "float32", "--seq-len", "32"),
)
# Without them, NCCL connects the GPUs of a machine by NVLink, PCIe or shared memory.
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
LOG_EVERY = 10


@dataclass(frozen=True, kw_only=True)
class RestartOptions(Options):
    """Flags of the benchmark."""

    parts: tuple[Literal["kills", "network"], ...] = ("kills", "network")
    """Parts to run."""
    preset: str = "gpt-124m"
    """Preset to train."""
    processes: int = 2
    """Processes with one GPU each."""
    kills: int = 6
    """Number of kills."""
    every: int = 20
    """Steps between checkpoints. A process is killed at most twice as many steps after a start."""
    seed: int = 0
    """Chooses ranks and steps."""
    timeout: float = 300.0
    """Seconds of a run."""


def works(options: RestartOptions) -> Iterator[Work]:
    """Yields one work per part."""
    for part in options.parts:
        yield Work(f"{options.preset} {part}", {"ranks": options.processes}, rows=rows_of(part, options))


def rows_of(part: str, options: RestartOptions) -> Iterator[Row]:
    """Yields the rows of a part."""
    # A run with kills has more steps than it finishes before the last kill.
    steps = {"kills": 2 * options.every * (options.kills + 1), "network": 6 * LOG_EVERY}
    with tempfile.TemporaryDirectory() as folder:
        for row in {"kills": kills, "network": network}[part](Runs(Path(folder), options, steps[part])):
            log(f"{part}: {json.dumps(row)}")
            yield row


@dataclass
class Runs:
    """Runs of one preset with the same number of steps. Their run directories and a shared compile cache are in `folder`."""

    folder: Path
    options: RestartOptions
    steps: int

    @contextlib.contextmanager
    def started(self, name: str, *flags: str, processes: int, **variables: str) -> Iterator[Iterator[str]]:
        """Starts a run. Yields its lines, of all processes. Ends it after the time limit."""
        options = self.options
        run = self.folder / name
        (run / "ranks").mkdir(parents=True)
        torchrun = ["torch.distributed.run", "--nproc-per-node", str(processes), "--max-restarts", str(2 * options.kills), "-m"]
        command = [*(torchrun if processes > 1 else []), "benchmarks.programs.rank", str(run / "ranks")]
        command += ["--preset", options.preset, *(TINY if options.sizes == "tiny" else []), "--run-dir", str(run / "run")]
        command += f"--steps {self.steps} --eval-every {self.steps} --eval-batches 1 --sample-tokens 0".split()
        environ = os.environ | variables | {"JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache")}
        environ |= {"JAX_NUM_CPU_DEVICES": str(options.processes // processes), "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", *command, *flags], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        timer = threading.Timer(options.timeout, process.terminate)  # torchrun ends its processes
        timer.start()
        assert process.stdout is not None
        try:
            options.file.parent.mkdir(parents=True, exist_ok=True)
            with options.file.with_suffix(".log").open("a") as output:
                output.write(f"--- {name}\n")
                yield (line for line in process.stdout if output.write(line))
        finally:
            timer.cancel()
            process.terminate()
            process.wait()

    def losses(self, name: str) -> dict[int, float]:
        """Returns the losses of a run by step."""
        return {entry["step"]: entry["loss"] for entry in read_metrics(self.folder / name / "run" / "metrics.jsonl")}

    def difference(self, name: str, other: str) -> Row:
        """Compares the losses of two runs, at the steps that the second one has logged."""
        ours, theirs = self.losses(name), self.losses(other)
        if self.steps not in ours or self.steps not in theirs:
            return {"failed": "a run did not end; the log has its output"}
        found = loss_difference([ours[step] for step in theirs], [*theirs.values()])
        first = found["first_differs"]
        return found | {"first_differs": None if first is None else [*theirs][first]}

    def timed(self, name: str, *flags: str, processes: int, **variables: str) -> Row:
        """Trains without kills. Returns the time of a step."""
        flags = ("--log-every", str(LOG_EVERY), "--checkpoint-every", str(self.steps), *flags)
        with self.started(name, *flags, processes=processes, **variables) as lines:
            links = sorted({found[1] for line in lines if (found := re.search(r"\] via (\S+)", line))})
        row: Row = {"system": "jgraph", "variant": name}
        if self.steps not in self.losses(name):
            return row | {"failed": "did not end; the log has its output"}
        run = self.folder / name / "run"
        # The first two entries have the first step and the ones in which the GPUs warm up.
        times = [entry["step_time_ms"] for entry in read_metrics(run / "metrics.jsonl")[2:]]
        kind = json.loads((run / "config.json").read_text())["versions"]["device"]
        row |= {"device": f"{self.options.processes} x {kind}", "ms": statistics.median(times), "repeats_ms": times}
        return row | ({"links": ", ".join(links)} if links else {})


def kills(runs: Runs) -> Iterator[Row]:
    """Yields the rows of runs with one process per GPU, twice, with one process, and with kills."""
    options = runs.options
    layout = ("--fsdp", str(options.processes))
    several, one, killed = f"{options.processes} processes", "1 process", f"{options.kills} kills"
    yield runs.timed(several, *layout, processes=options.processes)
    for name, processes in ((f"{several} again", options.processes), (one, 1)):
        yield runs.timed(name, *layout, processes=processes) | runs.difference(name, several)
    flags = (*layout, "--log-every", "1", "--checkpoint-every", str(options.every))
    with runs.started(killed, *flags, processes=options.processes) as lines:
        found = list(watched(lines, runs.folder / killed / "ranks", options))
    yield from found
    yield {"system": "jgraph", "variant": killed, **runs.difference(killed, several)}


def watched(lines: Iterator[str], folder: Path, options: RestartOptions) -> Iterator[Row]:
    """Kills processes of a run while it prints. Yields a row for each kill at the end of the output."""
    chance = random.Random(options.seed)
    rows: list[Row] = []
    kills: list[tuple[int, float]] = []  # number of the start, and time
    last = None  # step after which a process is killed; None until the first step after a start
    started = False
    for line in lines:
        seconds = time.monotonic() - kills[-1][1] if kills else 0.0
        row = rows[-1] if rows else {}
        if found := re.match(r"jgraph\.train: error: (process .*)", line):
            row["lines"] = [*row.get("lines", []), found[1]]
        elif found := re.match(r"resumed from step (\d+)", line):
            row |= {"resume_s": seconds, "resumed": int(found[1])}
        elif line.startswith("first step finished"):
            row |= {"first_step_s": seconds, **phases(line)}
            started = True
        elif started and (found := re.match(r"step (\d+)/", line)):
            last = last or int(found[1]) + chance.randrange(2 * options.every)
            if int(found[1]) >= last and len(rows) < options.kills:
                time.sleep(chance.uniform(0, 0.1))  # at any moment of a step or of a checkpoint
                rank = chance.randrange(options.processes)
                start = max(int(path.stem.partition("-")[0]) for path in folder.glob("*.json"))
                os.kill(event(folder, start, rank)["pid"], signal.SIGKILL)
                kills.append((start, time.monotonic()))
                rows.append({"system": "jgraph", "variant": f"rank {rank} killed at step {found[1]}"})
                last, started = None, False
    for row, (start, moment) in zip(rows, kills, strict=True):
        now, after = ([event(folder, number, rank) for rank in range(options.processes)] for number in (start, start + 1))
        row["codes"] = [one["code"] for one in now if "code" in one]
        row["exit_s"] = max([one["end"] for one in now if "end" in one], default=moment) - moment
        row["start_s"] = max([one["start"] for one in after if one], default=moment) - moment
        row["compiled"] = "; ".join(f"process {rank}: {one['compiled']}" for rank, one in enumerate(after) if "compiled" in one)
        yield row


def event(folder: Path, attempt: int, rank: int) -> Row:
    """Returns what a process has written about itself; nothing if it has not started."""
    path = folder / f"{attempt}-{rank}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def phases(line: str) -> Row:
    """Returns the phases of a start, from the line that process 0 prints."""
    times = {KEYS[name]: re.search(rf"{name} ([\d.]+)", line.partition(": ")[2]) for name in KEYS}
    return {key: float(found[1]) for key, found in times.items() if found}


def network(runs: Runs) -> Iterator[Row]:
    """Yields the rows of two layouts, with and without the links of the machine."""
    half = runs.options.processes // 2
    layouts = [f"--fsdp {2 * half}", f"--dp 2 --fsdp {half}"]
    for links, variables in (("", {}), ("sockets", SOCKETS)):
        for layout in layouts:
            name = f"{layout} {links}".strip()
            yield runs.timed(name, *layout.split(), processes=2 * half, NCCL_DEBUG="INFO", **variables)


def section(name: str, result: Row) -> Section:
    """Returns the table layout of a part."""
    columns = {
        "run": row_name,
        "step, ms": number("ms"),
        "processes ended, s": number("exit_s", ".1f"),
        "started, s": number("start_s", ".1f"),
        "state restored, s": number("resume_s", ".1f"),
        "next step, s": number("first_step_s", ".1f"),
        "from step": lambda row: str(row.get("resumed", "")),
        "largest difference of losses": lambda row: f"{row['differs']:.2g}" if "differs" in row else "",
        "links": lambda row: row.get("links", ""),
    }
    return Section(name, columns, needs="system")


BENCHMARK = Benchmark("Processes with one GPU each", __doc__, RestartOptions, works, section)
