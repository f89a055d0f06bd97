"""LoRA computes the logits, gradients and updates of PEFT, and folders of adapters are exchanged with it in both directions."""

import warnings

import jax
import numpy as np
import optax
import pytest

torch = pytest.importorskip("torch")

import jgraph  # noqa: E402
from jgraph import export  # noqa: E402
from jgraph.interop.adapter import adapter_parts  # noqa: E402
from jgraph.train import __main__ as train  # noqa: E402
from jgraph.tree import leaf_names  # noqa: E402
from jgraph_models.hugging_face import HUGGING_FACE  # noqa: E402
from tests.parity import folders  # noqa: E402

# Deprecations inside of transformers. Other warnings, such as PEFT's about missing matrices, are errors.
pytestmark = [pytest.mark.finetune, pytest.mark.filterwarnings("ignore::FutureWarning")]

TOKENS = np.random.default_rng(0).integers(0, 61, (2, 25)).astype(np.int32)
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = {"all": LINEAR, "q and v": ("q_proj", "v_proj")}
# With AdamW's default eps, rounding decides the sign of an update if the gradient is nearly zero.
ADAMW = {"eps": 1e-3, "weight_decay": 0.1}


def peft():
    """Imports the library on first use, because the import is slow and emits warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft

        return peft


def make(kind, path, targets, **settings):
    """Writes a folder `base`, and a folder `adapter` with random matrices. Returns PEFT's model.

    The change of a weight is smaller than the weight, so that activations stay of order one.
    """
    folders.save(kind, path / "base")
    config = peft().LoraConfig(r=3, lora_alpha=6, target_modules=list(targets), task_type="CAUSAL_LM", **settings)
    model = peft().get_peft_model(folders.load(path / "base"), config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(0.5 * torch.randn(p.shape) / p.shape[-1] ** 0.5)
    model.save_pretrained(path / "adapter")
    return model


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS, dtype=torch.int64)).logits.numpy()


def logits(loaded):
    return np.asarray(loaded.model.evaluate("logits", loaded.params, loaded.carried, TOKENS))


def assert_same_adapters(loaded, ours, theirs):
    """Compares arrays of adapters in the tree of the model with PEFT's by name. All others of `ours` are zero."""
    parts = adapter_parts(HUGGING_FACE.parts(loaded.config.model), loaded.model.adapters, loaded.model.rank)
    found = dict(zip(leaf_names(ours), map(np.array, jax.tree.leaves(ours)), strict=True))
    for name, own in parts.items():
        for part in own:
            tensor = theirs.pop(part.tensor.replace(".weight", ".default.weight"), None)
            expected = np.zeros(part.shape) if tensor is None else tensor.detach().numpy()
            atol = 1e-5 * np.abs(expected).max()
            of_part = found[name][part.box].T if part.order == "transposed" else found[name][part.box]
            np.testing.assert_allclose(of_part, expected, rtol=1e-5, atol=atol, err_msg=part.tensor)
    assert not theirs, "no other adapters remain"


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_logits_gradients_and_an_update_of_adamw_equal_peft(kind, targets, tmp_path):
    theirs = make(kind, tmp_path, TARGETS[targets])
    loaded = jgraph.load(tmp_path / "base", adapter=tmp_path / "adapter")
    np.testing.assert_allclose(logits(loaded), logits_of(theirs), rtol=1e-5, atol=1e-5)
    assert np.abs(logits(jgraph.load(tmp_path / "base")) - logits(loaded)).max() > 0.1

    tokens = torch.tensor(TOKENS, dtype=torch.int64)
    torch.nn.functional.cross_entropy(theirs(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    trained = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * len(TARGETS[targets])
    model, key = loaded.model, jax.random.key(0)
    grads = jax.jit(jax.grad(lambda params: model.loss(params, TOKENS, key, loaded.carried)[0]))(loaded.params)
    assert_same_adapters(loaded, grads, {name: p.grad for name, p in trained.items()})

    torch.optim.AdamW(trained.values(), lr=1e-2, **ADAMW).step()
    step = jgraph.train_step(
        lambda params, tokens, key: model.loss(params, tokens, key, loaded.carried)[0],
        optax.adamw(1e-2, **ADAMW),
        jgraph.Replicated(None, model.shapes),
        freeze=model.frozen,
    )
    state = step.init(loaded.params)
    state, _ = step.compile(TOKENS)(state, step.place(TOKENS))
    assert_same_adapters(loaded, step.canonical.of(state).params, trained)


def test_rank_stabilized_adapters_have_the_scale_of_peft(tmp_path):
    theirs = make("llama", tmp_path, LINEAR, use_rslora=True)
    loaded = jgraph.load(tmp_path / "base", adapter=tmp_path / "adapter")
    np.testing.assert_allclose(logits(loaded), logits_of(theirs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("choices", [{"use_dora": True}, {"rank_pattern": {"q_proj": 2}}, {"bias": "all"}])
def test_other_adapters_of_peft_are_refused(choices, tmp_path):
    make("llama", tmp_path, LINEAR, **choices)
    with pytest.raises(jgraph.ConfigError, match=f"adapter_config.json: `{next(iter(choices))}` is"):
        jgraph.load(tmp_path / "base", adapter=tmp_path / "adapter")


@pytest.mark.parametrize(
    ("kind", "flags"),
    [("llama", ()), ("qwen3", ("--model.scan-layers",)), ("llama", ("--lora.targets", "blocks/1/mlp/*"))],
    ids=["all layers", "scanned layers", "some layers"],
)
def test_a_run_is_loaded_by_transformers_merged_and_by_peft_as_an_adapter(kind, flags, tmp_path):
    base, run = folders.save(kind, tmp_path / "base"), tmp_path / "run"
    (tmp_path / "text").write_bytes(np.random.default_rng(0).integers(32, 60, 4000).astype(np.uint8).tobytes())
    flags += ("--init-from", str(base), "--data", str(tmp_path / "text"), "--run-dir", str(run), "--steps", "3")
    flags += ("--batch-size", "4", "--seq-len", "24", "--sample-tokens", "0", "--optimizer.learning-rate", "0.05")
    flags += ("--lora.rank", "3", "--lora.alpha", "5", "--lora.base-dtype", "float32")
    assert train.main([*flags]) == 0
    for weights in ("merged", "adapter"):
        assert export.main([str(run), "--to", str(tmp_path / weights), "--weights", weights, "--dtype", "float32"]) == 0
    expected = logits(jgraph.load(run))
    assert np.abs(logits_of(folders.load(base)) - expected).max() > 0.1
    np.testing.assert_allclose(logits_of(folders.load(tmp_path / "merged")), expected, rtol=1e-4, atol=1e-4)
    # PEFT warns about layers without matrices in the file, and pytest raises warnings.
    adapted = peft().PeftModel.from_pretrained(folders.load(base), tmp_path / "adapter")
    np.testing.assert_allclose(logits_of(adapted), expected, rtol=1e-4, atol=1e-4)
