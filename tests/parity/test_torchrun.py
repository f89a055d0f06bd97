"""Torchrun starts a run again after a rank was killed, and the run ends with the losses of one without interruption."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests import tiny

pytestmark = pytest.mark.parity
pytest.importorskip("torch")

# Rank 0 has the coordinator of JAX. It is killed after step 15, in the first start only.
PROGRAM = """if True:
    import os, signal, sys
    from jgraph.train import _callbacks
    from jgraph.train.__main__ import main

    def finished(self, steps):
        self.done = max([self.done, *(number for number, _ in steps)])
        if self.done >= 15 and (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("0", "0"):
            os.kill(os.getpid(), signal.SIGKILL)

    _callbacks.Progress.finished = finished
    sys.exit(main())
"""


def test_a_run_continues_by_itself_after_a_rank_was_killed(tmp_path):
    flags = (*tiny.FLAGS, "--fsdp", "2", "--steps", "20", "--checkpoint-every", "5", "--model.compute-dtype", "float32")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", str(program)]
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    run = subprocess.run(
        [*command, *flags, "--run-dir", str(tmp_path / "run")], env=environ, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert "resumed from step" in run.stdout
    gone = "jgraph.train: error: process 1: process 0 is gone: it was killed, or its machine is lost; "
    assert [line for line in run.stderr.splitlines() if line.startswith(gone)]
    assert "Traceback" not in run.stderr
    assert tiny.train(tmp_path / "whole", *flags) == 0
    ours, whole = (np.array([loss for _, loss, _ in tiny.losses(tmp_path / name)]) for name in ("run", "whole"))
    np.testing.assert_allclose(ours, whole, rtol=2e-6)
