"""Runs of one or two seconds, for tests of the code around training."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from jgraph.train.__main__ import main

ROOT = Path(__file__).parents[1]
_FLAGS = """
    --model.num-layers 1 --model.d-model 32 --model.d-ff 64 --model.num-heads 2 --model.num-kv-heads 2
    --batch-size 4 --seq-len 32 --log-every 1 --eval-batches 2 --sample-tokens 0
    --optimizer.learning-rate 0.01
"""
FLAGS = shlex.split(_FLAGS)


def train(run_dir: Path, *flags: str) -> int:
    """Trains in this process. Returns the exit code."""
    return main([*FLAGS, "--run-dir", str(run_dir), *flags])


def start(run_dir: Path, *flags: str, num_devices: int | None = None, **variables: str) -> subprocess.Popen[str]:
    """Starts training in another process with `num_devices` CPU devices, by default as many as in the tests."""
    command = [sys.executable, "-m", "jgraph.train", *FLAGS, "--run-dir", str(run_dir), *flags]
    environ = os.environ | variables | ({} if num_devices is None else {"JAX_NUM_CPU_DEVICES": str(num_devices)})
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], *, seconds: float) -> tuple[int, str, str]:
    """Returns exit code, stdout and stderr. Ends the process and raises TimeoutExpired after `seconds`."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def entries(run_dir: Path) -> list[dict]:
    """Returns the entries of metrics.jsonl. Raises if a line is not JSON."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[tuple[int, float, float | None]]:
    """Returns (step, loss, held-out loss) of every entry. Interruptions of a run must not change them."""
    return [(entry["step"], entry["loss"], entry.get("eval_loss")) for entry in entries(run_dir)]


def wait_for(condition: Callable[[], bool], *, process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Returns when the condition holds or the process has ended."""
    deadline = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline, "the run takes too long"
        time.sleep(0.002)


def num_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0
