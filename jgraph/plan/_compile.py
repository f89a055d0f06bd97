"""Compiles the steps of layouts for a GPU that is not present, each in a process. This module is also the program of these.

A failed check in XLA or a lack of memory ends a process. With processes, the other layouts are compiled all the same.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from subprocess import PIPE, STDOUT, Popen

from jgraph.errors import JgraphError
from jgraph.exits import leave
from jgraph.train.config import TrainConfig

_ANSWER = "compiled: "


@dataclass(frozen=True)
class Compiled:
    """A compiled step.

    Attributes:
        peak: Bytes of each GPU that XLA assigns; None if the step was not compiled.
        about: The largest temporary buffer, or the reason why the step was not compiled.
        notes: Sentences about the limits of the peak.
    """

    peak: int | None
    about: str = ""
    notes: Sequence[str] = ()


def compile_steps(configs: Sequence[TrainConfig], gpu: str) -> list[Compiled]:
    """Compiles steps for a GPU that is not present, as many at a time as there are cores."""
    with ThreadPoolExecutor(max(1, min(len(configs), os.cpu_count() or 1))) as threads:
        return list(threads.map(lambda config: _compiled(config, gpu), configs))


def _compiled(config: TrainConfig, gpu: str) -> Compiled:
    # Modules of the user are found as in this process. With other platforms, each process would reserve memory of present GPUs.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-P", "-m", __name__, gpu]
    with Popen(command, stdin=PIPE, stdout=PIPE, stderr=STDOUT, env=environment, text=True, errors="replace") as process:
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        process.stdin.write(json.dumps(config.to_dict()) + "\n")
        process.stdin.flush()  # and open until the process has ended, which ends when it is closed
        lines = process.stdout.read().splitlines() or ["no output"]
    for line in lines:
        if line.startswith(_ANSWER):
            return Compiled(**json.loads(line.removeprefix(_ANSWER)))
    code = process.returncode
    by = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return Compiled(None, " ".join(f"its process {by}: {lines[-1]}".split()))


def _main(gpu: str) -> None:
    """Compiles the configuration in the first line of stdin. Ends at once with Ctrl-C, or when the other process ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    line = sys.stdin.readline()
    threading.Thread(target=lambda: sys.stdin.read() or os._exit(1), daemon=True).start()
    # Imported here, because they import tyro.
    from jgraph.cli import reason
    from jgraph.train.targets import explain_step

    try:
        fields = json.loads(line)
        report = explain_step(TrainConfig.from_dict(fields, module=fields["module"]), gpu)
        largest = f"the largest temporaries are {report.buffers[0]}" if report.buffers else ""
        answer = {"peak": report.memory and report.memory.total, "about": largest, "notes": report.notes}
    except JgraphError as e:
        answer = {"peak": None, "about": " ".join(str(e).split())}
    except Exception as e:  # the code of a model and jax may raise any exception
        answer = {"peak": None, "about": reason(e)}
    print(f"\n{_ANSWER}{json.dumps(answer)}")


if __name__ == "__main__":
    _main(*sys.argv[1:])
    leave(0)
