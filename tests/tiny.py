"""A run of a second or two, for tests that are about everything around the training."""

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
    """Exit code of a run in this process."""
    return main([*FLAGS, "--run-dir", str(run_dir), *flags])


def start(run_dir: Path, *flags: str, num_devices: int | None = None, **variables: str) -> subprocess.Popen[str]:
    """A run in a process of its own, with as many CPU devices; None: as the tests have them."""
    command = [sys.executable, "-m", "jgraph.train", *FLAGS, "--run-dir", str(run_dir), *flags]
    environ = os.environ | variables | ({} if num_devices is None else {"JAX_NUM_CPU_DEVICES": str(num_devices)})
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], *, seconds: float) -> tuple[int, str, str]:
    """Exit code, stdout and stderr. Raises TimeoutExpired, and ends the process, where it takes longer."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def entries(run_dir: Path) -> list[dict]:
    """metrics.jsonl, strictly read."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[tuple[int, float, float | None]]:
    """What must not depend on interruptions: step, loss and held-out loss of every entry."""
    return [(entry["step"], entry["loss"], entry.get("eval_loss")) for entry in entries(run_dir)]


def wait_for(condition: Callable[[], bool], *, process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Returns when the condition holds or the process has ended."""
    deadline = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline, "the run takes too long"
        time.sleep(0.002)


def num_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0
