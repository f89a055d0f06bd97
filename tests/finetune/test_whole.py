"""The steps of the guide on LoRA: chat records, training, evaluation, an answer, and folders for transformers and PEFT."""

import json
import types

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
    chats.save_tokenizer(path, chats.CHATML, adds_bos=True)


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
    assert data.main(["show", str(records), "--tokenizer", str(folder)]) == 0
    assert f"total: {RECORDS} conversations" in capsys.readouterr().out
    options = ("--lora.rank", "4", "--data", str(records), "--fsdp", "4")
    sizes = ("--seq-len", "64", "--batch-size", "4", "--steps", "30", "--log-every", "1", "--sample-tokens", "0")
    rate = ("--optimizer.learning-rate", "1e-2", "--run-dir", str(run))
    assert train.main(["--init-from", str(folder), *options, *sizes, *rate, *flags]) == 0
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.2
    assert evaluate.main([str(run)]) == 0
    capsys.readouterr()
    assert sample.main([str(run), "--chat", "--prompt", "3 + 1?", "--temperature", "0", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.strip()
    assert export.main([str(run), "--to", str(tmp_path / "merged")]) == 0
    assert export.main([str(run), "--to", str(tmp_path / "adapter"), "--weights", "adapter"]) == 0
    expected = logits(jgraph.load(run))
    merged = logits_of(folders.load(tmp_path / "merged"))
    adapted = logits_of(peft().PeftModel.from_pretrained(folders.load(folder), tmp_path / "adapter"))
    assert np.abs(expected - logits(jgraph.load(folder))).max() > 0.01
    np.testing.assert_allclose(merged, expected, atol=1e-4)
    np.testing.assert_allclose(adapted, expected, atol=1e-4)
    assert TOKENS.max() < 512
    if not flags:
        check_same(run, tmp_path / "merged")


def check_same(run, exported):
    """Asserts that run, exported folder, transformers and lm-eval have the same ids, greedy text and log probabilities."""
    from lm_eval.models.huggingface import HFLM

    own, again, model = jgraph.load(run), jgraph.load(exported), folders.load(exported)
    theirs = folders.transformers().AutoTokenizer.from_pretrained(exported)
    text, messages = "What is 3 + 1?", [chats.message("user", "3 + 1?")]
    ids = theirs(text).input_ids
    assert ids[0] == theirs.bos_token_id
    assert own.tokenizer.encode(text) == again.tokenizer.encode(text) == ids
    prompts = {text: ids, "": theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)}
    for prompt, tokens in prompts.items():
        found = model.generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0, len(tokens) :]
        expected = theirs.decode(found).partition("<|im_end|>")[0].partition("</s>")[0]  # config.json has the id of the former
        choices = {"temperature": 0, "max_tokens": 8}
        for one in (own, again):
            assert (one.generate(prompt, **choices) if prompt else one.chat(messages, **choices)) == expected
    wrapped = [HFLM(model, tokenizer=theirs, batch_size=2), *(jgraph.lm_eval_model(one, batch_size=2) for one in (own, again))]
    requests = [types.SimpleNamespace(args=pair, task_name="") for pair in (("3 + 1?", " 4."), ("", "Hi"))]
    rolling = [types.SimpleNamespace(args=(text,), task_name="")]
    scores = [[one[0] for one in lm.loglikelihood(requests)] + lm.loglikelihood_rolling(rolling) for lm in wrapped]
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-4)
    np.testing.assert_allclose(scores[2], scores[0], atol=1e-4)
