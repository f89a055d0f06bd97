"""A process of the benchmark `restarts`: `python -m jgraph.train`, which also writes when it starts and how it ends.

The first argument is a folder. The file START-RANK.json in it has `pid` and `start`, and after the end `end`, `code`, and the
programs that were `compiled`. Times are those of `time.monotonic`, one clock for all processes of a machine. A process that is
killed writes no end.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from jgraph.xla.startup import watch


def main() -> None:
    """Runs the training command with the other arguments."""
    folder = Path(sys.argv.pop(1))
    path = folder / f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}-{os.environ.get('RANK', 0)}.json"
    row: dict[str, Any] = {"pid": os.getpid(), "start": time.monotonic()}
    leave = os._exit

    def ends(code: int) -> NoReturn:
        write(path, row | {"end": time.monotonic(), "code": code, "compiled": str(compiles)})
        leave(code)

    write(path, row)
    os._exit = ends  # the end of every command of jgraph, `jgraph.exits`
    with watch() as compiles:
        runpy.run_module("jgraph.train", run_name="__main__", alter_sys=True)


def write(path: Path, row: dict[str, Any]) -> None:
    """Replaces a file at once, because another process reads it."""
    new = path.with_suffix(".tmp")
    new.write_text(json.dumps(row))
    new.replace(path)


if __name__ == "__main__":
    main()
