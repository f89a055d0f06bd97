"""Imports folders of transformers into runs and exports them. Loads the exported folders with transformers."""

import json

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.numpy import load_file  # noqa: E402

import jgraph  # noqa: E402
from jgraph import export, sample  # noqa: E402
from jgraph.interop.write import write  # noqa: E402
from jgraph.train import __main__ as train  # noqa: E402
from jgraph.tree import leaf_names  # noqa: E402
from jgraph_models.hugging_face import HUGGING_FACE  # noqa: E402
from tests import tiny  # noqa: E402
from tests.interop.test_interop import UNCHANGED  # noqa: E402
from tests.parity import folders  # noqa: E402
from tests.parity.test_hugging_face import TOKENS, read_model  # noqa: E402
from tests.train.test_distributed import finish, start_two  # noqa: E402

pytestmark = pytest.mark.parity

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def assert_same_tensors(ours, theirs):
    """Checks that both folders have the same tensors bit for bit."""
    ours, theirs = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape)
        assert ours[name].tobytes() == tensor.tobytes(), name


def assert_same_config(ours, theirs):
    """Checks that transformers reads the same configuration from both folders."""
    ours, theirs = (folders.transformers().AutoConfig.from_pretrained(path).to_dict() for path in (ours, theirs))
    beside = {"transformers_version", "torch_dtype", "_name_or_path", "head_dim"}
    differing = {n: (ours.get(n), theirs.get(n)) for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n)}
    assert {name: value for name, value in differing.items() if name not in beside} == {}


@pytest.mark.parity
@pytest.mark.parametrize("kind", folders.KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_import_and_export_of_a_folder_preserve_every_bit(kind, dtype, tmp_path):
    theirs = folders.save(kind, tmp_path / "theirs", DTYPES[dtype])
    config, parts, params = read_model(theirs)
    arrays = dict(zip(leaf_names(params), map(np.asarray, jax.tree.leaves(params)), strict=True))
    base = json.loads((theirs / "config.json").read_text())
    write(tmp_path / "ours", HUGGING_FACE.config(config, base), parts, arrays.__getitem__, dtype=dtype)
    assert_same_tensors(tmp_path / "ours", theirs)
    assert_same_config(tmp_path / "ours", theirs)


FLAGS = (
    *("--batch-size", "8", "--seq-len", "32", "--log-every", "1", "--eval-batches", "1", "--sample-tokens", "0"),
    *("--model.loss-chunk", "0", "--checkpoint-every", "3", "--num-microbatches", "2"),
)


@pytest.fixture
def text(tmp_path):
    """Writes a file of random bytes below 61, the vocabulary size of the models."""
    path = tmp_path / "text"
    path.write_bytes(np.random.default_rng(0).integers(32, 60, 20_000).astype(np.uint8).tobytes())
    return path


def test_a_run_of_two_processes_imports_and_exports_a_folder_bit_for_bit(text, tmp_path):
    theirs = folders.save("qwen2", tmp_path / "theirs", torch.bfloat16)
    flags = ("--init-from", str(theirs), "--data", str(text), "--run-dir", str(tmp_path / "run"))
    (code, _, err), quiet = finish(start_two(*FLAGS, *flags, "--fsdp", "2", "--steps", "1", *UNCHANGED))
    assert (code, err, quiet) == (0, "", (0, "", ""))
    assert export.main([str(tmp_path / "run"), "--to", str(tmp_path / "ours")]) == 0
    assert_same_tensors(tmp_path / "ours", theirs)
    assert_same_config(tmp_path / "ours", theirs)


def test_a_trained_resumed_and_exported_folder_has_the_logits_of_the_run(text, tmp_path, capsys):
    theirs, ours, run = folders.save("llama", tmp_path / "theirs"), tmp_path / "ours", tmp_path / "run"
    flags = (*FLAGS, "--init-from", str(theirs), "--data", str(text), "--run-dir", str(run), "--steps", "60")
    flags += "--checkpoint-every", "50", "--optimizer.learning-rate", "3e-3"
    assert train.main([*flags, "--fsdp", "2", "--pp", "2"]) == 0
    (run / "checkpoints" / "60").rename(tmp_path / "aside")  # simulates an interruption after step 50
    assert train.main([*flags]) == 0
    losses = [loss for _, loss, _ in tiny.losses(run)]
    assert len(losses) == 60
    assert losses[49] < losses[0] - 0.3

    assert export.main([str(run), "--to", str(ours), "--dtype", "float32"]) == 0
    model, loaded = folders.load(ours), jgraph.load(run)
    logits = loaded.model.evaluate("logits", loaded.params, {}, TOKENS)
    with torch.no_grad():
        their_logits = model(torch.tensor(TOKENS, dtype=torch.int64)).logits.numpy()
    np.testing.assert_allclose(their_logits, logits, rtol=1e-5, atol=1e-5)

    capsys.readouterr()
    prompt = " !2:+"
    assert sample.main([str(run), "--prompt", prompt, "--temperature", "0", "--max-tokens", "24"]) == 0
    ids = torch.tensor([loaded.tokenizer.encode(prompt)])
    tokens = model.generate(ids, do_sample=False, max_new_tokens=24, eos_token_id=None, pad_token_id=0)[0].tolist()
    assert capsys.readouterr().out == loaded.tokenizer.decode(tokens) + "\n"
