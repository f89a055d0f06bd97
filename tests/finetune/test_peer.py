"""The PyTorch peers of the benchmark `finetune` compute the same step with one process and with one process per rank."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks import cli  # noqa: E402
from tests.finetune import peft_ranks  # noqa: E402
from tests.finetune.test_peft import peft  # noqa: E402
from tests.parity import processes  # noqa: E402

pytestmark = [pytest.mark.finetune, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Returns the losses and the gradients of two ranks by preset and variant."""
    folder = tmp_path_factory.mktemp("ranks")
    processes.run("tests.finetune.peft_ranks", folder, str(folder))
    return {path.stem: dict(np.load(path)) for path in folder.glob("*.npz")}


@pytest.mark.parametrize("variant", peft_ranks.VARIANTS)
@pytest.mark.parametrize("preset", peft_ranks.PRESETS)
def test_losses_and_gradients_of_two_ranks_equal_one_process(sharded, preset, variant):
    peft()
    from benchmarks.peers.peft_lora import build_model, make_step

    config = peft_ranks.config_of(preset)
    tokens_BT = np.random.default_rng(0).integers(0, config.model.vocab_size, (config.input.batch_size, config.input.seq_len))
    model = build_model(config, torch.device("cpu"))
    model.get_base_model().set_attn_implementation("sdpa")  # with the mask of transformers
    step = make_step(model, config, torch.tensor(tokens_BT), model)
    losses = [float(step()) for _ in range(peft_ranks.STEPS)]
    grads = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    found = sharded[f"{preset} {variant}"]
    np.testing.assert_allclose(found.pop("losses"), losses, rtol=1e-5)
    assert losses[1] < losses[0]
    assert found.keys() == grads.keys()
    assert len(grads) == 2 * 7 * config.model.num_layers
    assert all("lora_" in name for name in grads)
    for name, grad in grads.items():
        np.testing.assert_allclose(found[name], grad, rtol=1e-4, atol=1e-5 * np.abs(grad).max(), err_msg=name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_peers_are_timed_in_rounds(ranks, tmp_path):
    flags = ["--sizes", "tiny", "--ranks", str(ranks), "--variants", "peft eager", "peft checkpointing", "--out", str(tmp_path)]
    flags += ["--seconds", "0.01", "--repeats", "1", "--warmup-seconds", "0.01", "--rounds", "1"]
    assert cli.main(["run", "finetune", *flags]) == 0
    (work,) = json.loads((tmp_path / "finetune.json").read_text())["works"].values()
    eager, recomputed = work["rows"]
    assert not any("failed" in row for row in work["rows"])
    assert eager["rounds"] == recomputed["rounds"] == [0]
    assert eager["loss"] == pytest.approx(recomputed["loss"], rel=1e-4)
