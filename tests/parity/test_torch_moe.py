"""Compares the MoE layer of the PyTorch peer in float32 with a loop over tokens and experts in float64."""

from dataclasses import replace

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flax import nnx  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import jgraph  # noqa: E402
from benchmarks.peers.torch_moe import GPT, MoE  # noqa: E402
from jgraph import MoEConfig  # noqa: E402
from jgraph_models import gpt  # noqa: E402
from jgraph_models.gpt import GPTConfig  # noqa: E402
from tests.parity import weights  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.once]


def loop(moe: MoE, x_BTD):
    """Computes the output, the balance loss and the token counts by a loop over tokens and experts, in float64."""
    x_ND, k, E = x_BTD.flatten(0, 1), moe.config.experts_per_token, moe.config.num_experts
    router, up, down = (p.double() for p in (moe.router, moe.up, moe.down))
    probabilities_NE = (x_ND @ router).softmax(-1)
    rows, counts = [], [0] * E
    for x_D, probability_E in zip(x_ND, probabilities_NE, strict=True):
        chosen = sorted(range(E), key=lambda e: -float(probability_E[e].detach()))[:k]
        total = sum(probability_E[e] for e in chosen) if moe.config.weights == "normalized" else 1
        y_D = 0
        for e in chosen:
            gate_F, up_F = (x_D @ up[e]).chunk(2)
            y_D = y_D + probability_E[e] / total * ((gate_F * gate_F.sigmoid() * up_F) @ down[e])
            counts[e] += 1
        rows.append(y_D)
    fractions_E = torch.tensor(counts, dtype=torch.float64) / len(x_ND)
    return torch.stack(rows).view_as(x_BTD), E * (fractions_E * probabilities_NE.mean(0)).sum(), counts


def forward_and_backward(moe: MoE, call, x_BTD):
    """Returns the output, the balance loss and every gradient, cast to float64."""
    x_BTD = x_BTD.clone().requires_grad_()
    moe.zero_grad()
    y_BTD, balance, *_ = call(x_BTD)
    (y_BTD.double().square().sum() + 3 * balance.double()).backward()
    gradients = {f"gradient of {name}": p.grad.double() for name, p in moe.named_parameters()}
    return {
        "y": y_BTD.detach().double(),
        "balance": balance.detach().double(),
        "gradient of x": x_BTD.grad.double(),
    } | gradients


@pytest.mark.parametrize("weights", ["normalized", "as-they-are"])
def test_the_experts_of_the_peer_equal_a_loop_with_an_unused_expert(weights):
    config = MoEConfig(num_experts=5, experts_per_token=2, weights=weights)
    moe, generator = MoE(16, 8, config), torch.Generator().manual_seed(0)
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=p.shape[-2] ** -0.5, generator=generator)
    x_BTD = torch.randn(2, 7, 16, generator=generator)
    with torch.no_grad():  # no token selects expert 2: its logits are far below the others
        x_BTD[..., 0] = 1
        moe.router[:, 2] = 0
        moe.router[0, 2] = -20
    exact = forward_and_backward(moe, lambda x_BTD: loop(moe, x_BTD), x_BTD.double())
    assert loop(moe, x_BTD.double())[2][2] == 0
    assert not exact["gradient of up"][2].any()
    for name, one in forward_and_backward(moe, moe, x_BTD).items():
        torch.testing.assert_close(one, exact[name], rtol=1e-5, atol=1e-5 * float(exact[name].abs().max()))


MODEL = GPTConfig(
    num_layers=2, d_model=32, num_heads=2, num_kv_heads=1, head_dim=32, d_ff=16, vocab_size=61, mlp="swiglu",
    qk_norm="head", moe=MoEConfig(num_experts=4, experts_per_token=2, balance_loss=0.5),
)  # fmt: skip


def make_model():
    """Returns a bfloat16 model and a batch of tokens."""
    torch.manual_seed(0)
    return GPT(MODEL), torch.randint(0, 61, (2, 9))


def test_the_gradients_of_jgraph_and_the_peer_are_equal():
    config = replace(MODEL, compute_dtype="float32")
    tokens_BS, arrays = np.random.default_rng(1).integers(0, 61, (2, 17)), weights.draw(config)
    model = jgraph.functional(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    carried = model.init()[1]

    def loss(params):
        return model.loss(params, tokens_BS.astype(np.int32), jax.random.key(0), carried)[0]

    ours = weights.named(jax.jit(jax.grad(loss))(weights.tree(config, arrays)))
    peer = weights.torch_model(config, arrays, torch.float32)
    peer.loss(torch.tensor(tokens_BS)).backward()
    assert ours.keys() == dict(peer.named_parameters()).keys()
    for name, p in peer.named_parameters():
        np.testing.assert_allclose(ours[name], p.grad.numpy(), rtol=1e-4, atol=1e-5 * float(p.grad.abs().max()), err_msg=name)


def test_the_loss_of_the_peer_includes_the_balance_loss_of_every_layer():
    model, tokens_BS = make_model()
    (logits_BTV, balance), labels_BT = model(tokens_BS[:, :-1]), tokens_BS[:, 1:]
    (x_BTD, rotary_TK), by_layer = model.embed(tokens_BS[:, :-1]), 0.0
    for block in model.blocks:
        x_BTD, one = block(x_BTD, rotary_TK)
        by_layer += one.detach()
    assert balance.detach() == by_layer == pytest.approx(2 * 2, rel=0.1)  # the sum over two layers; each is near k
    plain = torch.nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten())
    torch.testing.assert_close(model.loss(tokens_BS), plain + 0.5 * balance)


def test_the_step_of_the_peer_reads_no_value_from_the_device():
    with FakeTensorMode():  # raises if Python reads a value, or a shape depends on one
        model, tokens_BS = make_model()
        model.loss(tokens_BS).backward()


@pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function:DeprecationWarning")  # torch emits it while it compiles
def test_the_compiled_peer_has_the_gradients_of_the_eager_peer():
    model, tokens_BS = make_model()
    with torch.no_grad():
        model.loss(tokens_BS)  # creates the rotary table before compilation
    gradients = []
    for call in (model.loss, torch.compile(model.loss, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        call(tokens_BS).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(*gradients)
