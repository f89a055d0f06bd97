"""What a table and its PyTorch peers share: the clock, and rows as JSON lines from a process of its own. No jax, no torch."""

import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Timing, time_steps

Run = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Clock:
    """How long everything is timed; the same on both sides."""

    seconds: float
    """Shortest time of a repeat."""
    repeats: int
    """Of which the median is taken."""
    warmup_seconds: float

    def back_to_back(self, run: Run, wait: Run) -> Timing:
        """Steps handed over one after the other; the device is waited for once a repeat."""
        return time_steps(run, wait, steps=1, **asdict(self))

    def one_by_one(self, run: Run, wait: Run) -> Timing:
        """Steps of which each is waited for, so that the filling and draining of a pipeline count."""
        return self.back_to_back(lambda: (run(), wait()), lambda: None)

    def handover_seconds(self, run: Run, wait: Run) -> float:
        """Median time in which `run` returns when the device has nothing to do; what is warm already is to be given.

        From an idle device, since both runtimes make the host wait once enough is in flight (jax: 32 executables).
        """
        samples, end = [], time.perf_counter() + self.repeats * self.seconds
        while len(samples) < self.repeats or time.perf_counter() < end:
            start = time.perf_counter()
            run()
            samples.append(time.perf_counter() - start)
            wait()
        return statistics.median(samples)


def ask(module: str, request: dict[str, Any], *, ranks: int = 0, timeout: float) -> tuple[list[dict[str, Any]], str]:
    """Runs a peer and gives back its rows, and why it stopped early ("" if it did not); never raises. Shows stderr then.

    Args:
        module: of a script that reads `request()` and prints rows by `answer`.
        request: anything JSON; the script's only argument.
        ranks: processes under torchrun; 0 runs the script alone.
        timeout: seconds, after which the peer is ended.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, "-m", module, json.dumps(request)]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root)
    try:
        out, err = process.communicate(timeout=timeout)
        failure = f"failed: {last_error(err)}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers when it is asked to; killed, it would leave them behind
        try:
            out, err = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        failure = f"failed: not done after {timeout:g} s"
    if failure:
        print(err[-4000:], file=sys.stderr)
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return rows, failure


def request() -> dict[str, Any]:
    """What the table asks of this process."""
    return json.loads(sys.argv[1])


def answer(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def last_error(stderr: str) -> str:
    """The last line that names an exception, torchrun's own aside; the last line at all if there is none."""
    lines = [re.sub(r"^\[\w+\]:\s*", "", line).strip() for line in stderr.splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line) and "ChildFailed" not in line]
    return (errors or lines or ["no output"])[-1][:200]
