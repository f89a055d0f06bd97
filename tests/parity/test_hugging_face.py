"""Compares the logits and gradients of the GPT with transformers for the same folder, on the CPU in float32."""

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flax import nnx  # noqa: E402

import jgraph  # noqa: E402
from jgraph.interop import Folder  # noqa: E402
from jgraph.interop.load import load_parameters  # noqa: E402
from jgraph.interop.write import write  # noqa: E402
from jgraph.moe import MoEConfig  # noqa: E402
from jgraph.tree import leaf_names  # noqa: E402
from jgraph_models import gpt  # noqa: E402
from jgraph_models.gpt_config import GPTConfig  # noqa: E402
from jgraph_models.hugging_face import HUGGING_FACE  # noqa: E402
from tests.parity import folders  # noqa: E402

pytestmark = pytest.mark.parity

TOKENS = np.random.default_rng(0).integers(0, 61, (2, 25)).astype(np.int32)


def ours(config, params):
    """Returns the logits, and the gradients by name."""
    model = jgraph.functional(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    state, key = model.new_state(), jax.random.key(0)

    @jax.jit
    def run(params):
        logits = model.evaluate("logits", params, state, TOKENS[:, :-1])
        return logits, jax.grad(lambda p: model.loss(p, TOKENS, key, state)[0])(params)

    logits, grads = run(params)
    return np.asarray(logits), dict(zip(leaf_names(grads), map(np.asarray, jax.tree.leaves(grads)), strict=True))


def theirs(model):
    """Returns the logits, and the gradients by name."""
    tokens = torch.tensor(TOKENS, dtype=torch.int64)
    routers = {"output_router_logits": True} if hasattr(model.config, "num_experts_per_tok") else {}
    found = model(tokens[:, :-1], **routers)
    loss = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), tokens[:, 1:].flatten())
    for router_logits in found.get("router_logits", ()):
        loss += model.router_aux_loss_coef * folders.balance_loss(model, router_logits)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return found.logits.detach().numpy(), {name: grad.numpy() for name, grad in folders.as_saved(model, grads).items()}


def read_model(path, **changes):
    """Returns the configuration, the map of tensors and the parameters of a folder."""
    folder = Folder(path, field="init_from")
    config = folder.settings(HUGGING_FACE, GPTConfig(compute_dtype="float32", **changes))
    parts = HUGGING_FACE.parts(config)
    shapes = jgraph.functional(lambda: gpt.GPT(config, rngs=nnx.Rngs(0))).shapes
    folder.check(HUGGING_FACE, config)
    return config, parts, load_parameters(folder, parts, shapes)


@pytest.mark.parametrize(
    ("kind", "layers"), [*zip(folders.KINDS, ("unrolled", "unrolled", "scanned", "unrolled", "scanned"), strict=True)]
)
def test_logits_and_every_gradient_equal_transformers(kind, layers, tmp_path):
    config, parts, params = read_model(folders.save(kind, tmp_path), scan_layers=layers == "scanned")
    (logits, grads), (their_logits, their_grads) = ours(config, params), theirs(folders.load(tmp_path))
    np.testing.assert_allclose(logits, their_logits, rtol=1e-5, atol=1e-5)
    for name, own_parts in parts.items():
        for part in own_parts:
            theirs_of_part = their_grads.pop(part.tensor)
            of_part = grads[name][part.box].reshape(part.own_shape)
            of_part = of_part.T if part.order == "transposed" else of_part
            atol = 1e-5 * np.abs(theirs_of_part).max()
            np.testing.assert_allclose(of_part, theirs_of_part, rtol=1e-5, atol=atol, err_msg=part.tensor)
    assert not their_grads, "no other gradients remain"


def test_a_new_moe_model_has_the_same_logits_in_transformers(tmp_path):
    moe = MoEConfig(num_experts=4, experts_per_token=2, d_ff=24, router="topk-softmax", weights="as-they-are")
    sizes = {"num_layers": 1, "d_model": 32, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 61}
    config = GPTConfig(**sizes, mlp="swiglu", moe=moe, compute_dtype="float32")
    model = jgraph.functional(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    params, state = model.init()
    params = jax.tree.map(lambda leaf: 10 * leaf if leaf.ndim > 1 else leaf, params)
    arrays = dict(zip(leaf_names(params), map(np.asarray, jax.tree.leaves(params)), strict=True))
    write(tmp_path / "f", HUGGING_FACE.config(config, {}), HUGGING_FACE.parts(config), arrays.__getitem__, dtype="float32")
    with torch.no_grad():
        theirs = folders.load(tmp_path / "f")(torch.tensor(TOKENS, dtype=torch.int64)).logits.numpy()
    np.testing.assert_allclose(model.evaluate("logits", params, state, TOKENS), theirs, rtol=1e-5, atol=1e-5)
