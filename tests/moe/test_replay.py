"""Tests that a run that exceeds its expert capacity replays the step with a larger capacity and the same losses."""

import shutil

import numpy as np
import pytest

from tests import tiny

FLAGS = """
    --model.vocab-size 256 --model.compute-dtype float32 --model.mlp swiglu --model.moe.num-experts 4 --model.moe.d-ff 16
    --data synthetic --steps 14 --checkpoint-every 7 --sample-tokens 0 --ep 2
"""
# In the first layout, the needed capacity grows during training.
LAYOUTS = [
    pytest.param("--fsdp 2", 1.2, id="fsdp"),
    pytest.param("--dp 2 --num-microbatches 2", 1.0, id="dp"),
]


def run(run_dir, layout: str, capacity: float, log_every: int) -> int:
    sizes = ("--model.moe.capacity", str(capacity), "--log-every", str(log_every))
    return tiny.train(run_dir, *FLAGS.split(), *layout.split(), *sizes)


def replay_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if "the capacity allows" in line]


def assert_same(run_dir, expected, steps):
    """Compares losses up to rounding: a matmul over a longer buffer adds its rows in another order."""
    found = [[np.nan if number is None else number for number in row] for row in tiny.losses(run_dir)]
    assert [int(row[0]) for row in found] == steps
    np.testing.assert_allclose(found, [expected[step] for step in steps], rtol=2e-6)


@pytest.mark.long
@pytest.mark.once
@pytest.mark.parametrize(("layout", "small"), LAYOUTS)
def test_a_run_that_overflows_grows_its_capacity_and_its_losses_do_not_change(tmp_path, capsys, layout, small):
    large = tmp_path / "large"
    assert run(large, layout, 2.0, 1) == 0
    assert replay_lines(capsys.readouterr().out) == []
    expected = {row[0]: [np.nan if number is None else number for number in row] for row in tiny.losses(large)}
    assert run(tmp_path / "small", layout, small, 14) == 0
    assert any(not line.startswith("step 1:") for line in replay_lines(capsys.readouterr().out))
    assert_same(tmp_path / "small", expected, [1, 14])
    assert all(entry["moe_dropped"] == 0 for entry in tiny.entries(tmp_path / "small"))
    if layout == "--fsdp 2":  # a resumed run starts with the configured capacity, which no layout changes
        shutil.rmtree(tmp_path / "small" / "checkpoints" / "14")
        assert run(tmp_path / "small", layout, small, 1) == 0
        assert_same(tmp_path / "small", expected, [1, *range(8, 15)])
        assert all(entry["moe_dropped"] == 0 for entry in tiny.entries(tmp_path / "small"))
