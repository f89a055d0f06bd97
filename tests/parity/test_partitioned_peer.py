"""Compares the PyTorch peer of the tensor and context parallelism benchmark in two processes with the model in one."""

import itertools
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks.peers import partitioned  # noqa: E402
from benchmarks.peers.fsdp import build_model  # noqa: E402
from jgraph.train.config import TrainConfig  # noqa: E402
from jgraph.train.presets import preset  # noqa: E402
from jgraph_models.gpt import GPTConfig  # noqa: E402
from tests.parity import processes  # noqa: E402
from tests.parity.torch_peer import STEPS  # noqa: E402

pytestmark = pytest.mark.parity

_SIZES = {"num_layers": 2, "d_model": 32, "num_heads": 4, "d_ff": 48, "vocab_size": 72, "compute_dtype": "float32"}
MODELS = {
    "gelu, tied": GPTConfig(**_SIZES, num_kv_heads=4),
    "swiglu, untied, GQA": GPTConfig(**_SIZES, num_kv_heads=2, mlp="swiglu", head="untied"),
}
TENSOR = {"compile": False, "pipelined": False}
CONTEXT = {"compile": False, "rotate": "allgather"}
RUNS = {
    "tensor, batch": {"tp": 2, "flags": TENSOR | {"split": "batch"}},
    "tensor, sequence": {"tp": 2, "flags": TENSOR | {"split": "sequence"}},
    "context, sharded": {"cp": 2, "flags": CONTEXT | {"params": "sharded"}},
    "context, replicated": {"cp": 2, "flags": CONTEXT | {"params": "replicated"}},
}


def config_of(model: GPTConfig, **parallel: int) -> TrainConfig:
    """Returns a config that clips gradients, and changes the weights more than rounding does."""
    optimizer = replace(preset("gpt-1b3").optimizer, learning_rate=1e-2, clip_norm=0.1)
    return preset("gpt-1b3").changed(model=model, optimizer=optimizer, batch_size=4, seq_len=16, xla_options=(), **parallel)


def reference_losses(model: GPTConfig) -> list[float]:
    """Trains in this process."""
    config, device = config_of(model), torch.device("cpu")
    inputs_BT, labels_BT = partitioned.batch(config, device)
    gpt = build_model(model, device, compile=False, float8=False, shard=lambda block: None)
    step = partitioned.make_step(gpt, config, lambda: partitioned.cross_entropy(gpt(inputs_BT), labels_BT))
    return [step().item() for _ in range(STEPS)]


def test_losses_of_the_partitioned_peer_equal_those_of_one_process():
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for number, (model, run) in enumerate((model, run) for model in MODELS for run in RUNS):
            paths[model, run] = Path(folder) / f"{number}.json"
            settings = dict(RUNS[run])
            flags = settings.pop("flags")
            config = config_of(MODELS[model], **settings).to_dict()
            paths[model, run].write_text(json.dumps({"config": config} | flags))
        processes.run("tests.parity.torch_peer", Path(folder), *map(str, paths.values()))
        found = {run: json.loads(path.read_text()) for run, path in paths.items()}
    expected = {model: reference_losses(config) for model, config in MODELS.items()}
    for (model, run), losses in found.items():
        assert losses == pytest.approx(expected[model], rel=1e-5), (model, run)
    for losses in expected.values():  # each update changes the loss, so that a wrong gradient changes it too
        assert min(abs(a / b - 1) for a, b in itertools.pairwise(losses)) > 1e-3
