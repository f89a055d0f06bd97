"""A folder with the shapes of Qwen3 0.6B on a GPU is trained, interrupted, resumed, sampled, exported and loaded; or adapted.

XLA_PYTHON_CLIENT_PREALLOCATE=false pytest -n 2 -m gpu -rP tests/gpu/test_folders_on_gpu.py
"""

import contextlib
import importlib
import io
import json
import shlex
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import jax
import numpy as np
import pytest
from flax import nnx

import jgraph
from jgraph import evaluate, export, sample
from jgraph.interop.write import write
from jgraph.train.__main__ import main
from jgraph.train.presets import preset
from jgraph.tree import leaf_names
from jgraph.xla import count_launches
from jgraph_models.gpt import GPT
from jgraph_models.hugging_face import HUGGING_FACE
from tests import chats, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.long]

CONFIG = preset("qwen3-0.6b").model
_FLAGS = """
    --preset qwen3-0.6b --steps 60 --batch-size 8 --seq-len 1024 --log-every 10 --eval-batches 2 --data python-source
    --sample-tokens 0 --checkpoint-keep 1 --optimizer.warmup-steps 10 --optimizer.learning-rate 3e-4
"""
FLAGS, STOPPED = shlex.split(_FLAGS), 20
PROMPT, NEW = "def __init__(self, ", 64
LORA_FLAGS = shlex.split("""
    --lora.rank 16 --data.format chat --steps 60 --batch-size 8 --seq-len 2048 --log-every 10 --eval-batches 2 --sample-tokens 0
    --checkpoint-keep 1 --optimizer.warmup-steps 10 --optimizer.learning-rate 1e-3
""")


@contextlib.contextmanager
def timed(label):
    """Prints the duration of a block. Captures and yields the output of the block."""
    start, output = time.monotonic(), io.StringIO()
    with contextlib.redirect_stdout(output):
        yield output
    print(f"{time.monotonic() - start:6.1f} s: {label}", flush=True)


def make(path):
    """Writes a folder of random bfloat16 weights."""
    model = jgraph.functional(lambda: GPT(CONFIG, rngs=nnx.Rngs(0)))
    params = jax.device_get(jax.jit(lambda: model.init()[0])())
    arrays = dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))
    config = HUGGING_FACE.config(CONFIG, {"max_position_embeddings": 4096})
    write(path, config, HUGGING_FACE.parts(CONFIG), arrays.__getitem__, dtype="bfloat16")


def interrupt(run, flags):
    """Starts a run in another process and interrupts it after it logs step `STOPPED`."""
    process = subprocess.Popen([sys.executable, "-m", "jgraph.train", *flags], stdout=subprocess.DEVNULL, text=True)
    try:
        tiny.wait_for(lambda: tiny.num_lines(run / "metrics.jsonl") > STOPPED // 10, process=process)
        process.send_signal(signal.SIGINT)
        process.wait(120)
    finally:
        process.kill()


def logits(loaded, params, tokens_BT):
    return np.asarray(jax.jit(lambda params: loaded.model.evaluate("logits", params, {}, tokens_BT))(params))


def generate_and_count(loaded, monkeypatch):
    """Returns greedy text and the CUDA graph launches. XLA launches none under a profiler without the option."""
    module, option = importlib.import_module("jgraph.inference.generate"), "xla_enable_command_buffers_during_profiling"
    choices = {"static_argnames": ("decoder", "where"), "donate_argnums": 0, "keep_unused": True}
    token = jax.jit(module._next_token.__wrapped__, **choices, compiler_options={option: True})
    monkeypatch.setattr(module, "_next_token", token)
    loaded.generate(PROMPT, temperature=0, max_tokens=NEW)
    with count_launches() as count:
        text = loaded.generate(PROMPT, temperature=0, max_tokens=NEW)
    return text, count


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_folder_is_trained_resumed_sampled_and_exported_with_the_same_logits(precision, tmp_path, monkeypatch):
    theirs, run, ours = (tmp_path / name for name in ("theirs", "run", "ours"))
    with timed("write the folder"):
        make(theirs)
    flags = [*FLAGS, "--init-from", str(theirs), "--run-dir", str(run), "--precision", precision]
    with timed("train and interrupt"):
        interrupt(run, flags)
    num_before = len(tiny.entries(run))
    with timed("resume to the end"):
        assert main(flags) == 0
    entries = tiny.entries(run)
    for entry in entries:
        print(
            *(f"{name} {entry[name]:,.4g}" for name in ("step", "loss", "tokens_per_second", "mfu") if entry[name] is not None)
        )
    assert STOPPED <= entries[num_before - 1]["step"] < entries[num_before]["step"], "the run resumes and repeats no step"
    assert entries[-1]["loss"] < entries[0]["loss"] - 3

    with timed("sample") as printed:
        assert sample.main([str(run), "--prompt", PROMPT, "--temperature", "0", "--max-tokens", str(NEW)]) == 0
    with timed("export"):
        assert export.main([str(run), "--to", str(ours), "--dtype", "float32"]) == 0
    with timed("load run and export"):
        loaded, folder = jgraph.load(run), jgraph.load(ours)
    text, count = generate_and_count(loaded, monkeypatch)
    print(f"{text!r}: {count}")
    assert printed.getvalue() == PROMPT + text + "\n"
    assert count.launches >= NEW - 1, "one CUDA graph per token"

    tokens_BT = np.asarray(loaded.tokenizer.encode(PROMPT * 4))[None, :64]
    run_logits = logits(loaded, loaded.params, tokens_BT)
    np.testing.assert_array_equal(logits(loaded, folder.params, tokens_BT), run_logits)
    with jax.default_matmul_precision("highest"):
        exact = logits(folder, folder.params, tokens_BT)
    print(f"largest logit {np.abs(run_logits).max():.3g}, largest difference to float32 {np.abs(exact - run_logits).max():.3g}")
    if find_spec("transformers"):
        torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
        with timed("load with transformers"), torch.no_grad():
            model = transformers.AutoModelForCausalLM.from_pretrained(ours, dtype=torch.float32)
            their_logits = model(torch.tensor(tokens_BT)).logits.numpy()
        print(f"largest difference to transformers in float32: {np.abs(exact - their_logits).max():.3g}")
        np.testing.assert_allclose(exact, their_logits, rtol=1e-3, atol=1e-3)


def write_records(path):
    """Writes conversations of several turns, enough for more than one pass over the rows of the test."""
    lines = []
    for number in range(6000):
        turns = []
        for turn in range(number % 7 + 1):
            turns += [chats.message("user", f"{number} + {turn}?"), chats.message("assistant", f"It is {number + turn}. " * 3)]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_adapters_are_trained_on_chat_records_and_exported_with_the_same_logits(precision, tmp_path):
    base, run, records, merged, adapter = (tmp_path / name for name in ("base", "run", "chat.jsonl", "merged", "adapter"))
    with timed("write the folder and the records"):
        make(base)
        chats.save_tokenizer(base, chats.CHATML)
        write_records(records)
    flags = ["--init-from", str(base), "--data", str(records), "--run-dir", str(run), "--precision", precision]
    with timed("train"):
        assert main([*LORA_FLAGS, *flags]) == 0
    entries = tiny.entries(run)
    for entry in entries:
        print(*(f"{name} {entry[name]:,.4g}" for name in ("step", "loss", "tokens_per_second", "mfu") if entry.get(name)))
    assert entries[-1]["loss"] < entries[0]["loss"] - 0.5
    with timed("evaluate") as printed:
        assert evaluate.main([str(run)]) == 0
    print(printed.getvalue())
    with timed("chat") as printed:
        chat = ["--chat", "--prompt", "3 + 1?", "--temperature", "0", "--max-tokens", "16"]
        assert sample.main([str(run), *chat]) == 0
    print(repr(printed.getvalue()))
    with timed("export the merged weights and the adapter"):
        assert export.main([str(run), "--to", str(merged), "--dtype", "float32"]) == 0
        assert export.main([str(run), "--to", str(adapter), "--weights", "adapter"]) == 0

    with timed("load with jgraph"):
        loaded, folder = jgraph.load(run), jgraph.load(merged)
        adapted = jgraph.load(base, adapter=adapter)
    tokens_BT = np.asarray(loaded.tokenizer.encode("user 3 + 1? assistant It is 4. " * 4))[None, :64]
    run_logits = logits(loaded, loaded.params, tokens_BT)
    with jax.default_matmul_precision("highest"):
        exact = logits(folder, folder.params, tokens_BT)
    for name, found in (("run", run_logits), ("folder with adapter", logits(adapted, adapted.params, tokens_BT))):
        error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        print(f"relative error of the {name} in bfloat16: {error:.3g}")
        assert error < 2e-2
    torch, transformers, peft = (pytest.importorskip(name) for name in ("torch", "transformers", "peft"))
    with timed("load with transformers and peft"), torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)(torch.tensor(tokens_BT))
        plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        tuned = peft.PeftModel.from_pretrained(plain, adapter)(torch.tensor(tokens_BT))
    for name, output in (("transformers", theirs), ("peft", tuned)):
        their_logits = output.logits.numpy()
        print(f"largest difference to {name} in float32: {np.abs(exact - their_logits).max():.3g}")
        np.testing.assert_allclose(exact, their_logits, rtol=1e-3, atol=1e-3)
