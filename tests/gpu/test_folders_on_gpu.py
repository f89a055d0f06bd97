"""A folder of Qwen3 0.6B's shape on a GPU: into a run, interrupted, gone on with, asked for text, out again, and loaded.

XLA_PYTHON_CLIENT_PREALLOCATE=false pytest -n 2 -m gpu -rP tests/gpu/test_folders_on_gpu.py
"""

import contextlib
import importlib
import io
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
from jgraph import export, sample
from jgraph.interop.write import write
from jgraph.train.__main__ import main
from jgraph.train.presets import preset
from jgraph.tree import leaf_names
from jgraph.xla import count_launches
from jgraph_models.gpt import GPT
from jgraph_models.hugging_face import HUGGING_FACE
from tests import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.long]

CONFIG = preset("qwen3-0.6b").model
_FLAGS = """
    --preset qwen3-0.6b --steps 60 --batch-size 8 --seq-len 1024 --log-every 10 --eval-batches 2 --data python-source
    --sample-tokens 0 --checkpoint-keep 1 --optimizer.warmup-steps 10 --optimizer.learning-rate 3e-4
"""
FLAGS, STOPPED = shlex.split(_FLAGS), 20
PROMPT, NEW = "def __init__(self, ", 64


@contextlib.contextmanager
def told(what):
    """Prints how long it took, and keeps to itself what is printed meanwhile."""
    start, inside = time.monotonic(), io.StringIO()
    with contextlib.redirect_stdout(inside):
        yield inside
    print(f"{time.monotonic() - start:6.1f} s: {what}", flush=True)


def make(path):
    """A folder of random weights in bfloat16."""
    model = jgraph.functional(lambda: GPT(CONFIG, rngs=nnx.Rngs(0)))
    params = jax.device_get(jax.jit(lambda: model.init()[0])())
    arrays = dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))
    config = HUGGING_FACE.config(CONFIG, {"max_position_embeddings": 4096})
    write(path, config, HUGGING_FACE.parts(CONFIG), arrays.__getitem__, dtype="bfloat16")


def interrupt(run, flags):
    """Begins a run in a process of its own, and tells it to stop when it has logged step `STOPPED`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jgraph.train", *flags], cwd=tiny.ROOT, stdout=subprocess.DEVNULL, text=True
    )
    try:
        tiny.wait_for(lambda: tiny.num_lines(run / "metrics.jsonl") > STOPPED // 10, process=process)
        process.send_signal(signal.SIGINT)
        process.wait(120)
    finally:
        process.kill()


def logits(loaded, params, tokens_BT):
    return np.asarray(jax.jit(lambda params: loaded.model.evaluate("logits", params, {}, tokens_BT))(params))


def launched(loaded, monkeypatch):
    """Greedy text, and the CUDA graphs launched meanwhile: XLA has none under a profiler if it is not told to."""
    module, option = importlib.import_module("jgraph.inference.generate"), "xla_enable_command_buffers_during_profiling"
    choices = {"static_argnames": ("decoder", "where"), "donate_argnums": 0, "keep_unused": True}
    token = jax.jit(module._next_token.__wrapped__, **choices, compiler_options={option: True})
    monkeypatch.setattr(module, "_next_token", token)
    loaded.generate(PROMPT, temperature=0, max_tokens=NEW)
    with count_launches() as count:
        text = loaded.generate(PROMPT, temperature=0, max_tokens=NEW)
    return text, count


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_folder_is_trained_gone_on_with_sampled_and_exported_with_the_same_logits(precision, tmp_path, monkeypatch):
    theirs, run, ours = (tmp_path / name for name in ("theirs", "run", "ours"))
    with told("a folder written"):
        make(theirs)
    flags = [*FLAGS, "--init-from", str(theirs), "--run-dir", str(run), "--precision", precision]
    with told("begun with it, and interrupted"):
        interrupt(run, flags)
    begun = len(tiny.entries(run))
    with told("gone on with to the end"):
        assert main(flags) == 0
    entries = tiny.entries(run)
    for entry in entries:
        print(
            *(f"{name} {entry[name]:,.4g}" for name in ("step", "loss", "tokens_per_second", "mfu") if entry[name] is not None)
        )
    assert STOPPED <= entries[begun - 1]["step"] < entries[begun]["step"], "none twice: it has gone on"
    assert entries[-1]["loss"] < entries[0]["loss"] - 3

    with told("sampled") as printed:
        assert sample.main([str(run), "--prompt", PROMPT, "--temperature", "0", "--max-tokens", str(NEW)]) == 0
    with told("exported"):
        assert export.main([str(run), "--to", str(ours), "--dtype", "float32"]) == 0
    with told("both loaded"):
        loaded, folder = jgraph.load(run), jgraph.load(ours)
    text, count = launched(loaded, monkeypatch)
    print(f"{text!r}: {count}")
    assert printed.getvalue() == PROMPT + text + "\n"
    assert count.launches >= NEW - 1, "a CUDA graph a token"

    tokens_BT = np.asarray(loaded.tokenizer.encode(PROMPT * 4))[None, :64]
    of_run = logits(loaded, loaded.params, tokens_BT)
    np.testing.assert_array_equal(logits(loaded, folder.params, tokens_BT), of_run)
    with jax.default_matmul_precision("highest"):
        exact = logits(folder, folder.params, tokens_BT)
    print(f"logits up to {np.abs(of_run).max():.3g}, in float32 {np.abs(exact - of_run).max():.3g} from those of the run")
    if find_spec("transformers"):
        torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
        with told("loaded by transformers"), torch.no_grad():
            model = transformers.AutoModelForCausalLM.from_pretrained(ours, dtype=torch.float32)
            of_theirs = model(torch.tensor(tokens_BT)).logits.numpy()
        print(f"of transformers, in float32: {np.abs(exact - of_theirs).max():.3g} from ours")
        np.testing.assert_allclose(exact, of_theirs, rtol=1e-3, atol=1e-3)
