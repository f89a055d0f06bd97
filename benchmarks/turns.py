"""Timing of candidates in rounds: each candidate is a process that is compiled and warm, and idles between its turns.

`jgraph/timing.py` has the rounds and the loop of a turn. Two candidates are compared by the ratio of their times in each shared
round. The processes import in parallel and build one at a time, because a build autotunes kernels. Benchmarks with tiny kernels
build in parallel.
"""

import contextlib
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import count_gpus
from benchmarks.peers.protocol import Timer
from benchmarks.rows import Row, row_name
from jgraph.timing import in_round


@dataclass(frozen=True, kw_only=True)
class TimingOptions:
    """Timing flags of every benchmark."""

    rounds: int = 5
    """Number of rounds. Each variant is timed once per round."""
    seconds: float = 0.3
    """Minimum duration of a repeat."""
    repeats: int = 3
    """Repeats per round. The median counts."""
    warmup_seconds: float = 0.7
    """Warm-up before the first repeat of a round."""
    together: int = 0
    """Maximum number of processes that share GPU memory, including jgraph: 0 for all, 1 to run them one after another."""
    timeout: float = 240.0
    """Seconds without output after which a process is stopped."""

    @property
    def timer(self) -> Timer:
        """The durations, in the form that is sent to the processes."""
        return Timer(seconds=self.seconds, repeats=self.repeats, warmup_seconds=self.warmup_seconds)


@dataclass(frozen=True)
class Candidate:
    """A script to time.

    Attributes:
        labels: First keys of its row: system, variant and so on.
        module: Module to run. It reads `protocol.read_request()`.
        request: JSON-serializable argument of the script.
        ranks: Number of processes under torchrun. 0 runs the script without torchrun.
        gpus: Number of GPUs that the script requires.
        environment: Variables that are set for the script.
    """

    labels: Row
    module: str
    request: Row
    ranks: int = 0
    gpus: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> str:
        """The reason why the script cannot run on this machine. Empty if it can."""
        return f"skipped: needs {self.gpus} GPUs, found {count_gpus()}" if count_gpus() < self.gpus else ""


class Process:
    """A running candidate that answers in JSON lines. Never raises: an error becomes the `failed` key of the row.

    Args:
        candidate: The script to start.
        timeout: Seconds to wait for an answer.
        share: Fraction of GPU memory that jax preallocates. 0 keeps the default of jax.
    """

    def __init__(self, candidate: Candidate, *, timeout: float, share: float = 0.0):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(candidate.ranks)]
        launcher = torchrun if candidate.ranks else []
        environment = os.environ | candidate.environment
        if share and not launcher:
            environment.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
            environment["XLA_CLIENT_MEM_FRACTION"] = f"{share:.2f}"
        self.candidate, self.timeout, self.row = candidate, timeout, dict(candidate.labels)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *launcher, "-m", candidate.module, json.dumps(candidate.request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=Path(__file__).parents[1],
            env=environment,
        )
        self._answers: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def build(self) -> None:
        """Lets the process build and warm up. Blocks until it is ready for its first turn."""
        start = time.monotonic()
        self._ask({}, until="ready")
        log(f"{row_name(self.candidate.labels)}: {self.row.get('failed', 'ready')} after {time.monotonic() - start:.0f} s")

    def turn(self, timer: Timer, number: int) -> None:
        """Times the process once and adds the measurements to its row. Does nothing after a failure."""
        if turn := self._ask(asdict(timer), until="turn"):
            self.row.setdefault("rounds", []).append(number)
            for key, value in turn.items():
                repeats = self.row.setdefault(f"repeats_{key}", [])
                repeats.append(value)
                known = [value for value in repeats if value is not None]
                self.row[key] = statistics.median(known) if known else None

    def soak(self, request: Row) -> None:
        """Runs a soak with the arguments in `request`."""
        self._ask(request, until="turn")

    def finish(self) -> None:
        """Ends the turns, and reads the remaining answers until the process exits."""
        self._ask(None, until="")
        try:
            if "failed" not in self.row and self._process.wait(30):
                self._fail("")
        except subprocess.TimeoutExpired:
            self._fail("process does not exit")
        self.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def _ask(self, line: Row | None, *, until: str) -> Any:
        """Sends a line, or closes stdin if it is None. Merges answers into the row until one has the key `until`.

        Returns the value of `until`, or None after a failure or the end of the output.
        """
        if "failed" in self.row:
            return None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the process may have exited; its last answers are read below
            if line is None:
                self._process.stdin.close()
            else:
                print(json.dumps(line), file=self._process.stdin, flush=True)
        try:
            while (answer := self._answers.get(timeout=self.timeout)) is not None:
                self.row |= answer
                if until in answer:
                    return self.row.pop(until)
        except queue.Empty:
            return self._fail(f"no answer within {self.timeout:g} s")
        return self._fail("") if until else None

    def _fail(self, reason: str) -> None:
        """Stops the process and sets `failed`. An empty reason is replaced by the last error on stderr."""
        self._process.terminate()  # not kill: torchrun stops its workers on SIGTERM only
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.seek(0)
        text = self._errors.read()
        log(text[-4000:])
        self.row["failed"] = f"failed: {reason or last_error(text)}"

    def close(self) -> None:
        """Stops the process if it is still running, and closes its pipes."""
        if self._process.poll() is None:
            self._fail("stopped before it finished")
        self._listener.join(5)
        for file in (self._process.stdin, self._process.stdout, self._errors):
            assert file is not None
            with contextlib.suppress(OSError):  # unsent input cannot be flushed after the process has exited
                file.close()


def run_once(candidate: Candidate, *, timeout: float, soak: Row | None = None) -> Row:
    """Runs a candidate without rounds: a soak with these arguments, or a script that has no turns."""
    with contextlib.closing(Process(candidate, timeout=timeout, share=0.9 if soak else 0.0)) as process:
        if soak:
            process.build()
            process.soak(soak)
        process.finish()  # without a soak, the closed stdin also lets the process start
        return process.row


def race(
    candidates: Sequence[Candidate],
    save: Callable[[list[Row]], None],
    options: TimingOptions,
    *,
    building: int = 1,
    numbers: Iterator[int],
) -> list[Row]:
    """Times candidates in rounds. The first one is jgraph, and takes part in every round. Logs the progress on stderr.

    If there are more candidates than `together`, they run in groups with `rounds` rounds each. `building` is the largest number
    of processes that build in parallel, 0 for all. `save` is called with all rows after every build and every round. A row has
    the answers of its process, the median of each measurement under KEY, one value per round under `repeats_KEY`, and the round
    numbers, which `numbers` yields, under `rounds`.
    """
    runnable = [candidate for candidate in candidates if not candidate.missing]
    shared = 0 if options.together == 1 else 1  # number of candidates, first ones, that take part in all groups
    size = max(min(options.together or len(runnable), len(runnable)) - shared, 1)
    with contextlib.ExitStack() as stack:
        processes: list[Process] = []
        for candidate in runnable:
            process = Process(candidate, timeout=options.timeout, share=0.9 / (size + shared))
            processes.append(stack.enter_context(contextlib.closing(process)))

        def rows() -> list[Row]:
            started = iter(processes)
            return [one.labels | {"failed": one.missing} if one.missing else next(started).row for one in candidates]

        ours, rest = processes[:shared], processes[shared:]
        groups = [rest[i : i + size] for i in range(0, len(rest), size)] or [[]]
        for nth, group in enumerate(groups):
            with ThreadPoolExecutor(building or len(runnable) or 1) as pool:
                for _ in pool.map(Process.build, group if nth else [*ours, *group]):
                    save(rows())
            for done in range(options.rounds):
                start, number = time.monotonic(), next(numbers)
                for process in in_round([*ours, *group], number):
                    process.turn(options.timer, number)
                save(rows())
                log(f"round {done + 1} of {options.rounds} took {time.monotonic() - start:.0f} s")
            for process in [*group, *(ours if group is groups[-1] else [])]:
                process.finish()
        save(rows())
        return rows()


def log(message: str) -> None:
    """Prints a message on stderr."""
    print(message, file=sys.stderr, flush=True)


def last_error(stderr: str) -> str:
    """Returns the last exception line, except the summary of torchrun. Falls back to the last line. At most 200 characters."""
    lines = [re.sub(r"^\[\w+\]:\s*", "", line).strip() for line in stderr.splitlines()]
    lines = [line for line in lines if line]
    errors = [
        line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|Timeout)\b", line) and "ChildFailed" not in line
    ]
    return (errors or lines or ["no output"])[-1][:200]
