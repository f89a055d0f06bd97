"""Starts PyTorch scripts with one process per rank."""

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

RANKS = 2
_TIMEOUT_S = 120


def run(module: str, folder: Path, *arguments: str) -> None:
    """Runs a script on every rank and ends all processes. On failure, raises an error with the logs of all ranks.

    Args:
        module: Module of the script. Its arguments are the rank, the number of ranks, the path of a file that does not exist
            yet for the rendezvous, and `arguments`.
        folder: Folder for the logs and the rendezvous.
        *arguments: Further arguments of the script.
    """
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    logs = [folder / f"{rank}.log" for rank in range(RANKS)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", __name__, module, str(rank), str(RANKS), str(folder / "rendezvous"), *arguments]
            with log.open("w") as out:
                processes.append(subprocess.Popen(command, env=environ, stdout=out, stderr=out))
        deadline = time.monotonic() + _TIMEOUT_S
        # Stop if one process failed, because the others would wait for it.
        while {process.poll() for process in processes} in ({None}, {None, 0}) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    assert codes == [0] * RANKS, "\n".join([f"exit codes {codes}", *(log.read_text() for log in logs)])


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # os._exit, because torch 2.13 with gloo sometimes aborts a regular exit over a running thread.
    os._exit(0)
