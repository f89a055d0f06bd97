"""A run of a mixture: what its log says of the routers, and what it warns of."""

import json

import numpy as np
import pytest

from jgraph.train import main

# More experts than there are tokens in a hundred steps: some get none.
FLAGS = """
    --preset gpt-moe-tiny --steps 101 --batch-size 1 --seq-len 4 --log-every 101 --eval-every 101 --eval-batches 1
    --checkpoint-every 101 --sample-tokens 0 --data synthetic --model.num-layers 1 --model.d-model 8 --model.num-heads 2
    --model.num-kv-heads 2 --model.moe.num-experts 512 --model.moe.experts-per-token 1 --model.moe.d-ff 4
"""


def test_the_log_tells_of_the_routers_and_experts_without_tokens_are_warned_of_once(tmp_path, capsys):
    assert main([*FLAGS.split(), "--run-dir", str(tmp_path)]) == 0
    told = "".join(capsys.readouterr())
    assert told.count("of blocks/0/mlp got no token for 100 steps") == 1
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for entry in entries:
        assert len(entry["moe_load"]) == 512
        assert sum(entry["moe_load"]) == 512
        assert entry["moe_max_load"] == max(entry["moe_load"]) >= 128
        assert entry["moe_dropped"] == 0
        assert min(entry[name] for name in ("moe_entropy", "moe_balance_loss", "moe_z_loss")) > 0


@pytest.mark.long
@pytest.mark.once
def test_a_pipeline_over_data_ranks_trains_a_mixture_as_one_device_does(tmp_path):
    flags = """
        --preset gpt-moe-tiny --steps 3 --batch-size 8 --seq-len 16 --log-every 1 --eval-every 3 --eval-batches 1
        --data synthetic --sample-tokens 0 --num-microbatches 2 --model.num-layers 3 --model.d-model 16 --model.num-heads 2
        --model.num-kv-heads 2 --model.moe.d-ff 8 --model.moe.balance-loss 1 --optimizer.warmup-steps 1
    """
    losses = {}
    for name, layout in {"one": [], "four": ["--pp", "2", "--dp", "2"]}.items():
        assert main([*flags.split(), *layout, "--run-dir", str(tmp_path / name)]) == 0
        entries = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [[entry[key] for key in ("loss", "moe_balance_loss", "moe_entropy")] for entry in entries]
    np.testing.assert_allclose(losses["four"], losses["one"], rtol=1e-4)
