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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Clock

Row = dict[str, Any]


@dataclass(frozen=True)
class Entrant:
    """What is to be timed: the names of its row, and how its process is started; see `Runner` for those."""

    named: Row
    module: str
    request: Row
    ranks: int = 0
    missing: str = ""
    """Why it cannot run here."""


class Runner:
    """A process that answers in JSON lines. It never raises: what goes wrong is `failed`, one line, and the rest is the row.

    Args:
        module: of a script that reads `protocol.request()`.
        request: anything JSON; the script's only argument.
        ranks: processes under torchrun; 0 runs the script alone.
        timeout: seconds without an answer that is waited for.
        share: of a GPU's memory, which jax takes at once; 0 leaves it to jax.
    """

    def __init__(self, module: str, request: Row, *, ranks: int = 0, timeout: float, share: float = 0.0):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
        environment = dict(os.environ)
        if share:
            environment.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
            environment["XLA_CLIENT_MEM_FRACTION"] = f"{share:.2f}"
        self.timeout = timeout
        self.row: Row = {}
        self.failed = ""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *launcher, "-m", module, json.dumps(request)],
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

    def build(self) -> float:
        """Returns when it is ready for its first turn: after so many seconds."""
        start = time.monotonic()
        self._ask({}, until="ready")
        self.row.pop("ready", None)
        return time.monotonic() - start

    def turn(self, clock: Clock) -> Row | None:
        """What it measures now; None where it has failed, now or before."""
        self._ask(asdict(clock), until="turn")
        return self.row.pop("turn", None)

    def finish(self) -> None:
        """There are no more turns, or never were any; gathers what else it has to say."""
        self._ask(None, until="")
        try:
            if not self.failed and self._process.wait(30):
                self._fail("")
        except subprocess.TimeoutExpired:
            self._fail("does not end")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def _ask(self, line: Row | None, *, until: str) -> None:
        """Hands over a line, or that there are none, and gathers answers until one has that key, or all."""
        if self.failed:
            return
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
                    return
        except queue.Empty:
            self._fail(f"not done after {self.timeout:g} s")
        else:
            if until:
                self._fail("")

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
        print(text[-4000:], file=sys.stderr)
        self.failed = f"failed: {why or last_error(text)}"

    def close(self) -> None:
        """Ends the process if it has not ended."""
        if self._process.poll() is None:
            self._fail("ended before its time")
        self._listener.join(5)
        for file in (self._process.stdin, self._process.stdout, self._errors):
            assert file is not None
            with contextlib.suppress(OSError):  # what was handed over is still to be written, and nobody reads it
                file.close()


def ask(module: str, request: Row, *, timeout: float) -> Row:
    """The answers of a process that takes no turns, as one row; with `failed`, and why, if it stopped early."""
    runner = Runner(module, request, timeout=timeout)
    try:
        runner.finish()  # it begins where stdin ends, too
        return runner.row | ({"failed": runner.failed} if runner.failed else {})
    finally:
        runner.close()


def race(
    entrants: Sequence[Entrant],
    clock: Clock,
    save: Callable[[list[Row]], None],
    *,
    rounds: int,
    together: int = 0,
    building: int = 1,
    timeout: float,
    number: int = 0,
) -> int:
    """Times all entrants in turns; says on stderr how far it is.

    Args:
        entrants: the first one is ours, and takes part in every round.
        clock: of a turn.
        save: gets all rows after every build and every round. A row has what its process told, `ms` and whatever else it
            measured as medians of its turns, `repeats_ms` and so on with every turn, and each turn's round in `rounds`.
        rounds: of each group.
        together: most processes that are on the GPUs at once; 0 for all. More entrants than that come in groups.
        building: most processes that build at once; 0 for all.
        timeout: of each process, as `Runner`'s.
        number: of the first round.

    Returns:
        The number of the round that would have come next.
    """
    here = [entrant for entrant in entrants if not entrant.missing]
    rows: dict[int, Row] = {id(e): dict(e.named) | ({"failed": e.missing} if e.missing else {}) for e in entrants}
    size = max(min(together or len(here), len(here)) - 1, 1)
    groups = [here[1:][i : i + size] for i in range(0, len(here) - 1, size)] or [[]]
    share = 0.9 / (size + 1)

    def update(entrant: Entrant, runner: Runner, turn: Row | None = None) -> None:
        row = rows[id(entrant)]
        row |= runner.row | ({"failed": runner.failed} if runner.failed else {})
        if turn is None:
            return
        row.setdefault("rounds", []).append(number)
        for key, value in turn.items():
            repeats = row.setdefault(f"repeats_{key}", [])
            repeats.append(value)
            known = [value for value in repeats if value is not None]
            row[key] = statistics.median(known) if known else None

    built = False
    runners: dict[int, Runner] = {}

    def start(group: Sequence[Entrant]) -> None:
        def build(entrant: Entrant) -> Entrant:
            runner = runners[id(entrant)]
            seconds = runner.build()
            tell(f"{' '.join(map(str, entrant.named.values()))}: {runner.failed or 'ready'} after {seconds:.0f} s")
            return entrant

        with ThreadPoolExecutor(building or len(group) or 1) as pool:
            for entrant in pool.map(build, group):
                update(entrant, runners[id(entrant)])
                save(list(rows.values()))

    def end(group: Sequence[Entrant]) -> None:
        for entrant in group:
            runner = runners[id(entrant)]
            runner.finish()
            update(entrant, runner)
            runner.close()
        save(list(rows.values()))

    try:
        for entrant in here:
            runners[id(entrant)] = Runner(
                entrant.module, entrant.request, ranks=entrant.ranks, timeout=timeout, share=0.0 if entrant.ranks else share
            )
        for group in groups:
            start([*([] if built else here[:1]), *group])
            built = True
            for nth in range(rounds):
                began = time.monotonic()
                for entrant in [*here[:1], *group][:: -1 if number % 2 else 1]:
                    update(entrant, runner := runners[id(entrant)], runner.turn(clock))
                number += 1
                tell(f"round {nth + 1} of {rounds} took {time.monotonic() - began:.0f} s")
                save(list(rows.values()))
            end(group)
        end(here[:1])
        return number
    finally:
        for runner in runners.values():
            runner.close()


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def last_error(stderr: str) -> str:
    """The last line that names an exception, torchrun's own aside; the last line at all if there is none."""
    lines = [re.sub(r"^\[\w+\]:\s*", "", line).strip() for line in stderr.splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line) and "ChildFailed" not in line]
    return (errors or lines or ["no output"])[-1][:200]
