"""Variants in turn: each has a process that is built and warm and idles until it is its turn again, round after round.

Cards drift, by heat, clock and neighbours, and what ran first has the advantage. So no variant is timed in one go: every round
times all of them one after the other, every second round backwards, and two are compared by the ratio of their times in each
round that both were in. The processes import at once and build one after the other, since building times kernels; where kernels
are so small that nothing depends on them, all build at once.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import count_gpus
from benchmarks.peers.protocol import Clock
from benchmarks.rows import Row, named


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Says how turns are taken; flags of every benchmark."""

    rounds: int = 5
    """How often every variant has its turn."""
    seconds: float = 0.3
    """Shortest time of a repeat."""
    repeats: int = 3
    """Repeats of a turn, of which the median is taken."""
    warmup_seconds: float = 0.7
    """Time that a variant runs in its turn before it is timed."""
    together: int = 0
    """Processes that share the GPUs' memory at a time, ours always among them; 0 for all, 1 for one after the other."""
    timeout: float = 240.0
    """Seconds after which a process is ended that says nothing."""

    @property
    def clock(self) -> Clock:
        return Clock(seconds=self.seconds, repeats=self.repeats, warmup_seconds=self.warmup_seconds)


@dataclass(frozen=True)
class Entrant:
    """Names a script that is to be timed.

    Attributes:
        named: the keys that its row begins with.
        module: a script that reads `protocol.request()`.
        request: anything JSON; the script's only argument.
        ranks: processes under torchrun; 0 runs the script alone.
        gpus: how many it cannot do without.
    """

    named: Row
    module: str
    request: Row
    ranks: int = 0
    gpus: int = 0

    @property
    def missing(self) -> str:
        """Says why it cannot run here; empty where it can."""
        return f"skipped: {count_gpus()} of {self.gpus} GPUs are here" if count_gpus() < self.gpus else ""


class Process:
    """Runs an entrant, which answers in JSON lines. Never raises: what goes wrong is `failed` of its row, one line.

    Args:
        timeout: seconds to wait for an answer.
        share: part of a GPU's memory that jax takes at once; 0 leaves it to jax.
    """

    def __init__(self, entrant: Entrant, *, timeout: float, share: float = 0.0):
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(entrant.ranks)] if entrant.ranks else []
        environment = dict(os.environ)
        if share and not ranks:
            environment.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
            environment["XLA_CLIENT_MEM_FRACTION"] = f"{share:.2f}"
        self.entrant, self.timeout, self.row = entrant, timeout, dict(entrant.named)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *ranks, "-m", entrant.module, json.dumps(entrant.request)],
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
        """Returns when it is ready for its first turn."""
        start = time.monotonic()
        self._ask({}, until="ready")
        tell(f"{named(self.entrant.named)}: {self.row.get('failed', 'ready')} after {time.monotonic() - start:.0f} s")

    def turn(self, clock: Clock, number: int) -> None:
        """Adds to the row what is measured now, in the round of this number; nothing where it has failed, now or before."""
        if turn := self._ask(asdict(clock), until="turn"):
            self.row.setdefault("rounds", []).append(number)
            for key, value in turn.items():
                repeats = self.row.setdefault(f"repeats_{key}", [])
                repeats.append(value)
                known = [value for value in repeats if value is not None]
                self.row[key] = statistics.median(known) if known else None

    def soak(self, steps: Row) -> None:
        """Has it run many steps, whose number is given, and watch them."""
        self._ask(steps, until="turn")

    def finish(self) -> None:
        """Tells it that there are no more turns, and gathers what else it has to say."""
        self._ask(None, until="")
        try:
            if "failed" not in self.row and self._process.wait(30):
                self._fail("")
        except subprocess.TimeoutExpired:
            self._fail("does not end")
        self.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def _ask(self, line: Row | None, *, until: str) -> Any:
        """Hands over a line, or that there are none, and gathers answers until one has that key, whose value it returns."""
        if "failed" in self.row:
            return None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; its last answers are still to be read
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
            return self._fail(f"not done after {self.timeout:g} s")
        return self._fail("") if until else None

    def _fail(self, why: str) -> None:
        """Ends the process; without a reason, the last error that it wrote is it."""
        self._process.terminate()  # torchrun ends its workers when it is asked to; killed, it would leave them behind
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.seek(0)
        text = self._errors.read()
        tell(text[-4000:])
        self.row["failed"] = f"failed: {why or last_error(text)}"

    def close(self) -> None:
        """Ends the process if it has not ended."""
        if self._process.poll() is None:
            self._fail("ended before its time")
        self._listener.join(5)
        for file in (self._process.stdin, self._process.stdout, self._errors):
            assert file is not None
            with contextlib.suppress(OSError):  # what was handed over is still to be written, and nobody reads it
                file.close()


def ask(entrant: Entrant, *, timeout: float, soak: Row | None = None) -> Row:
    """Returns the row of a process that takes no turns, or a soak alone; with `failed`, and why, if it stopped early."""
    with contextlib.closing(Process(entrant, timeout=timeout, share=0.9 if soak else 0.0)) as process:
        if soak:
            process.build()
            process.soak(soak)
        process.finish()  # where stdin ends, it begins too
        return process.row


def race(
    entrants: Sequence[Entrant],
    save: Callable[[list[Row]], None],
    turns: Turns,
    *,
    building: int = 1,
    numbers: Iterator[int],
) -> list[Row]:
    """Times all entrants in turns; says on stderr how far it is.

    Args:
        entrants: the first one is ours, and takes part in every round.
        save: gets all rows after every build and every round. A row has what its process told, `ms` and whatever else it
            measured as medians of its turns, `repeats_ms` and so on with every turn, and each turn's round in `rounds`.
        turns: how turns are taken. More entrants than may be `together` come in groups, each with as many rounds.
        building: most processes that build at once; 0 for all.
        numbers: what the rounds are called.

    Returns:
        All rows.
    """
    here = [entrant for entrant in entrants if not entrant.missing]
    kept = 0 if turns.together == 1 else 1  # of the first, in all groups
    size = max(min(turns.together or len(here), len(here)) - kept, 1)
    with contextlib.ExitStack() as stack:
        processes: list[Process] = []
        for entrant in here:
            process = Process(entrant, timeout=turns.timeout, share=0.9 / (size + kept))
            processes.append(stack.enter_context(contextlib.closing(process)))

        def rows() -> list[Row]:
            told = iter(processes)
            return [one.named | {"failed": one.missing} if one.missing else next(told).row for one in entrants]

        ours, groups = processes[:kept], [processes[i : i + size] for i in range(kept, len(processes), size)] or [[]]
        for nth, group in enumerate(groups):
            with ThreadPoolExecutor(building or len(here) or 1) as pool:
                for _ in pool.map(Process.build, group if nth else [*ours, *group]):
                    save(rows())
            for done in range(turns.rounds):
                start, number = time.monotonic(), next(numbers)
                for process in [*ours, *group][:: -1 if number % 2 else 1]:
                    process.turn(turns.clock, number)
                save(rows())
                tell(f"round {done + 1} of {turns.rounds} took {time.monotonic() - start:.0f} s")
            for process in [*group, *(ours if group is groups[-1] else [])]:
                process.finish()
        save(rows())
        return rows()


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def last_error(stderr: str) -> str:
    """Returns the last line that names an exception, torchrun's own aside; the last line at all if there is none."""
    lines = [re.sub(r"^\[\w+\]:\s*", "", line).strip() for line in stderr.splitlines()]
    lines = [line for line in lines if line]
    errors = [
        line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt|Timeout)\b", line) and "ChildFailed" not in line
    ]
    return (errors or lines or ["no output"])[-1][:200]
