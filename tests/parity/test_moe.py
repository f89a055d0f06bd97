"""Compares `MoE` with Mixtral, Qwen3 and DeepSeek-V3 of transformers: outputs, every gradient, and the balance loss."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")

import jgraph  # noqa: E402
from jgraph.moe import _dispatch, _experts, _router  # noqa: E402
from tests.parity.folders import transformers  # noqa: E402

pytestmark = pytest.mark.parity

D, F, E, K = 16, 12, 6, 3
BALANCE = 0.5  # as large as the other gradients
SIZES = {
    "hidden_size": D,
    "num_experts_per_tok": K,
    "hidden_act": "silu",
    "num_hidden_layers": 1,
    "experts_implementation": "eager",
}
SETTINGS = {
    "mixtral": {},
    "qwen3": {},
    "qwen3, not normalized": {"weights": "as-they-are"},
    "deepseek": {"router": "sigmoid", "weights_scale": 2.5, "shared_experts": 2, "balance_loss": 0.0},
}


def block(kind):
    """Returns a block of transformers, and the function for the balance loss of its router logits."""
    library = transformers().models
    if kind == "mixtral":
        module = library.mixtral.modeling_mixtral
        config = library.mixtral.MixtralConfig(**SIZES, intermediate_size=F, num_local_experts=E)
        return module.MixtralSparseMoeBlock(config), partial(module.load_balancing_loss_func, num_experts=E, top_k=K)
    if kind.startswith("qwen3"):
        module = library.qwen3_moe.modeling_qwen3_moe
        config = library.qwen3_moe.Qwen3MoeConfig(
            **SIZES, moe_intermediate_size=F, num_experts=E, norm_topk_prob=kind == "qwen3"
        )
        return module.Qwen3MoeSparseMoeBlock(config), partial(module.load_balancing_loss_func, num_experts=E, top_k=K)
    sizes = {"n_routed_experts": E, "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5}
    config = library.deepseek_v3.DeepseekV3Config(**SIZES, **sizes, moe_intermediate_size=F, norm_topk_prob=True)
    return library.deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE(config), None


def draw(kind):
    """Returns parameters with the names of jgraph, x, and the output gradient. No token selects expert 2."""
    rng = np.random.default_rng(0)
    shapes = {"router_DE": (D, E), "up_EDF2": (E, D, 2 * F), "down_EFD": (E, F, D)}
    if kind == "deepseek":
        shapes |= {"shared_up_DF2": (D, 4 * F), "shared_down_FD": (2 * F, D)}
    params = {name: rng.standard_normal(shape).astype(np.float32) / 3 for name, shape in shapes.items()}
    x, seed = rng.standard_normal((2, 2, 17, D)).astype(np.float32)
    x[..., 0], params["router_DE"][0, 2] = 1, -20
    return params, x, seed


def theirs(kind):
    """Returns the output, the balance loss, and the gradients with the names of jgraph."""
    params, x, seed = draw(kind)
    peer, balance = block(kind)
    places = {"router_DE": peer.gate.weight, "up_EDF2": peer.experts.gate_up_proj, "down_EFD": peer.experts.down_proj}
    if kind == "deepseek":
        both = torch.tensor(params["shared_up_DF2"].T).chunk(2)
        shared = peer.shared_experts
        state = zip(("gate_proj", "up_proj", "down_proj"), (*both, torch.tensor(params["shared_down_FD"].T)), strict=True)
        shared.load_state_dict({f"{name}.weight": weight for name, weight in state})
        peer.gate.e_score_correction_bias.copy_(torch.tensor(bias()))
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(torch.tensor(params[name]).mT)
    x = torch.tensor(x, requires_grad=True)
    y = peer(x)
    loss, found = (y * torch.tensor(seed)).sum(), 0.0
    if balance is not None:
        found = balance((peer.gate(x.reshape(-1, D))[0],))
        loss = loss + BALANCE * found
        found = found.item()
    loss.backward()
    grads = {name: place.grad.mT.numpy() for name, place in places.items()} | {"x": x.grad.numpy()}
    if kind == "deepseek":
        grads["shared_up_DF2"] = torch.cat([shared.gate_proj.weight.grad, shared.up_proj.weight.grad]).T.numpy()
        grads["shared_down_FD"] = shared.down_proj.weight.grad.T.numpy()
    return y.detach().numpy(), found, grads


def bias():
    return np.linspace(-0.2, 0.2, E, dtype=np.float32)


def ours(kind):
    """Returns the results of `theirs`, computed by jgraph."""
    params, x, seed = draw(kind)
    config = jgraph.MoEConfig(num_experts=E, experts_per_token=K, **({"balance_loss": BALANCE} | SETTINGS[kind]))
    graph, _, state = nnx.split(jgraph.MoE(D, F, config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    state = nnx.to_pure_dict(state)
    if "bias_E" in state:
        state["bias_E"] = jnp.asarray(bias())

    @jax.jit
    def run(params, x):
        def loss(params, x):
            moe = nnx.merge(graph, params, state)
            y = moe(x)
            return jnp.sum(y * seed), (y, nnx.to_pure_dict(nnx.state(moe, nnx.Not(nnx.Param))))

        (dparams, dx), (y, after) = jax.grad(loss, (0, 1), has_aux=True)(params, x)
        return y, after, dparams | {"x": dx}

    y, after, grads = jax.device_get(run(params, x))
    assert after["tokens_E"].sum() == 2 * 17 * K
    return y, after["balance"] if config.balance_loss else 0.0, grads


def compare(kind, found):
    """Raises AssertionError if the results differ by more than float32 rounding."""
    (y, balance, grads), (y_, balance_, grads_) = found, theirs(kind)
    np.testing.assert_allclose(y, y_, rtol=0, atol=1e-6 * np.abs(y_).max())
    np.testing.assert_allclose(balance, balance_, rtol=1e-6)
    assert grads.keys() == grads_.keys()
    for name, theirs_ in grads_.items():
        np.testing.assert_allclose(grads[name], theirs_, rtol=0, atol=2e-6 * np.abs(theirs_).max(), err_msg=name)


@pytest.mark.parametrize("kind", SETTINGS)
def test_an_moe_layer_equals_transformers(kind):
    compare(kind, ours(kind))


def twice(original, experts_NK, counts_E):
    """Dispatches the row of one token twice, in place of another row."""
    order = original(experts_NK, counts_E)
    return order._replace(source=order.source.at[0].set(order.source[1]))


def next_expert(original, x, weights, up, down, sizes):
    return original(x, weights, jnp.roll(up, 1, 0), jnp.roll(down, 1, 0), sizes)


def without_a_group(original, x, weights, up, down, sizes):
    return original(x, jnp.where(jnp.arange(len(x)) < sizes[0], 0, weights), up, down, sizes)


def not_normalized(original, logits, config, bias=None):
    return original(logits, jgraph.MoEConfig(num_experts=E, experts_per_token=K, weights="as-they-are"), bias)


def without_loss(original, y, loss):
    return y


FAULTS = {
    "a token sent twice": (_dispatch, "order_of", twice),
    "an expert off by one": (_experts, "experts", next_expert),
    "a dropped group": (_experts, "experts", without_a_group),
    "unnormalized weights": (_router, "route", not_normalized),
    "no balance loss": (_router, "attach", without_loss),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_moe_layer_is_detected(fault, monkeypatch):
    place, name, mutant = FAULTS[fault]
    monkeypatch.setattr(place, name, partial(mutant, getattr(place, name)))
    with pytest.raises(AssertionError):
        compare("mixtral", ours("mixtral"))
