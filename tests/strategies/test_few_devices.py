"""Tests runs with one CPU device per rank. No thread is free, so two concurrent programs would deadlock."""

import pytest

from tests import tiny

pytestmark = pytest.mark.long

# Few log lines, so that only the training loop waits for steps.
FLAGS = (
    *("--data", "synthetic", "--model.vocab-size", "257"),
    *("--batch-size", "16", "--num-microbatches", "2", "--steps", "12", "--log-every", "100"),
    *("--eval-every", "5", "--eval-batches", "4", "--checkpoint-every", "4"),
)


@pytest.mark.parametrize(
    ("num_devices", "flags"),
    [
        pytest.param(2, "--fsdp 2 --profile 6:8", marks=pytest.mark.once),
        # Fails on jax 0.12: its partitioner warns on stderr when the run generates text at the end.
        pytest.param(4, "--pp 2 --fsdp 2 --schedule zb-v --model.num-layers 4", marks=pytest.mark.once),
        pytest.param(8, "--fsdp 2 --cp 2 --tp 2 --model.vocab-size 256 --sample-tokens 4", marks=pytest.mark.once),
        pytest.param(4, "--pp 2 --tp 2 --schedule zb-h1 --model.num-layers 2 --model.vocab-size 256", marks=pytest.mark.once),
    ],
)
def test_a_run_trains_evaluates_and_saves_with_one_device_per_rank(tmp_path, num_devices, flags):
    process = tiny.start(tmp_path / "run", *FLAGS, *flags.split(), num_devices=num_devices)
    # XLA gives up after 40 s in a collective.
    code, _, err = tiny.finish(process, seconds=120)
    assert (code, err) == (0, "")
    assert [entry["step"] for entry in tiny.entries(tmp_path / "run") if "eval_loss" in entry] == [5, 10, 12]
    assert {"8", "12"} <= {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
