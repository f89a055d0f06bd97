"""The steps of the guide on LoRA: chat records, training, evaluation, an answer, and folders for transformers and PEFT."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jgraph  # noqa: E402
from jgraph import evaluate, export, sample  # noqa: E402
from jgraph.data import __main__ as data  # noqa: E402
from jgraph.train import __main__ as train  # noqa: E402
from tests import chats  # noqa: E402
from tests.finetune.test_peft import TOKENS, logits, logits_of, peft  # noqa: E402
from tests.parity import folders  # noqa: E402

pytestmark = [pytest.mark.finetune, pytest.mark.filterwarnings("ignore::FutureWarning")]

RECORDS = 40


def folder_with_template(path):
    """Writes a Llama folder of random weights with a tokenizer and a chat template."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = folders.transformers().LlamaConfig(vocab_size=512, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    folders.transformers().AutoModelForCausalLM.from_config(config).save_pretrained(path)
    chats.save_tokenizer(path, chats.CHATML)


def write_records(path):
    lines = []
    for number in range(RECORDS):
        turns = [chats.message("user", f"{number} + 1?"), chats.message("assistant", f"{number + 1}.")]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("flags", [(), ("--precision", "fp8", "--fp8.emulate")])
def test_a_folder_is_fine_tuned_evaluated_asked_and_exported(flags, tmp_path, capsys):
    folder, run, records = tmp_path / "folder", tmp_path / "run", tmp_path / "chat.jsonl"
    folder_with_template(folder)
    write_records(records)
    assert data.main(["show", str(records), "--format", "chat", "--tokenizer", str(folder)]) == 0
    assert f"total: {RECORDS} conversations" in capsys.readouterr().out
    options = (
        "--lora.rank",
        "4",
        "--lora.base-dtype",
        "float32",
        "--data",
        str(records),
        "--data.format",
        "chat",
        "--fsdp",
        "4",
    )
    sizes = ("--seq-len", "64", "--batch-size", "4", "--steps", "30", "--log-every", "1", "--sample-tokens", "0")
    rate = ("--optimizer.learning-rate", "1e-2", "--run-dir", str(run))
    assert train.main(["--init-from", str(folder), *options, *sizes, *rate, *flags]) == 0
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.2
    assert evaluate.main([str(run)]) == 0
    capsys.readouterr()
    assert sample.main([str(run), "--chat", "--prompt", "3 + 1?", "--temperature", "0", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.strip()
    assert export.main([str(run), "--to", str(tmp_path / "merged"), "--dtype", "float32"]) == 0
    assert export.main([str(run), "--to", str(tmp_path / "adapter"), "--weights", "adapter"]) == 0
    expected = logits(jgraph.load(run))
    merged = logits_of(folders.load(tmp_path / "merged"))
    adapted = logits_of(peft().PeftModel.from_pretrained(folders.load(folder), tmp_path / "adapter"))
    assert np.abs(expected - logits(jgraph.load(folder))).max() > 0.01
    np.testing.assert_allclose(merged, expected, atol=1e-4)
    np.testing.assert_allclose(adapted, expected, atol=1e-4)
    # The exported folder has the tokenizer and the template.
    assert jgraph.load(tmp_path / "merged").chat([chats.message("user", "3 + 1?")], temperature=0, max_tokens=8)
    assert TOKENS.max() < 512
