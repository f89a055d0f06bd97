"""Compares the two models of the peer `fully_shard`: blocks of Transformer Engine, which are fakes on a CPU, and of PyTorch."""

import json

import pytest

pytest.importorskip("torch")

from benchmarks import fsdp
from tests.parity import processes

pytestmark = [pytest.mark.parity, pytest.mark.once]

WORKS = "gpt-1b3", "llama3-8b"  # with a tied and an untied head
FLOAT32 = "te bf16", "te delayed:graph", "te current:reshard"
FUSED_ADAM = "te bf16 bf16-params", "te delayed fp8-params", "te current fp8-params:reshard"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, dict[str, list[float]]]:
    """Returns the losses of three steps by work and variant. Starts the processes once, because the start is slow."""
    folder = tmp_path_factory.mktemp("te_fsdp")
    configs, out = folder / "configs.json", folder / "losses.json"
    tiny = {work: fsdp.config_of(work, processes.RANKS, fsdp.Options(sizes="tiny")).to_dict() for work in WORKS}
    configs.write_text(json.dumps(tiny))
    processes.run("tests.parity.torch_te_fsdp", folder, str(configs), str(out), "eager", *FLOAT32, *FUSED_ADAM)
    return json.loads(out.read_text())


@pytest.fixture(params=WORKS)
def losses(request, trained) -> dict[str, list[float]]:
    """Returns the losses of three steps by variant."""
    return trained[request.param]


@pytest.mark.parametrize("variant", FLOAT32)
def test_transformer_engine_with_float32_parameters_trains_like_pytorch(losses, variant):
    assert losses[variant] == pytest.approx(losses["eager"], rel=1e-6)


@pytest.mark.parametrize("variant", FUSED_ADAM)
def test_transformer_engine_with_fused_adam_lowers_the_loss_as_pytorch_does(losses, variant):
    first, *_, last = losses[variant]
    assert first - last == pytest.approx(losses["eager"][0] - losses["eager"][-1], rel=0.2)
