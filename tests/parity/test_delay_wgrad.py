"""Compares `split_backward` with a PyTorch layer that delays its weight gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jgraph  # noqa: E402
from tests.parity.torch_delay_wgrad import DelayedLinear  # noqa: E402

pytestmark = pytest.mark.parity

MICROBATCHES = 3
RNG = np.random.default_rng(0)
WEIGHT, BIAS = RNG.normal(size=(24, 32)).astype(np.float32), RNG.normal(size=24).astype(np.float32)
XS = RNG.normal(size=(MICROBATCHES, 2, 8, 32)).astype(np.float32)
DYS = RNG.normal(size=(MICROBATCHES, 2, 8, 24)).astype(np.float32)
PARAMS = {"weight": jnp.asarray(WEIGHT), "bias": jnp.asarray(BIAS)}
SPLIT = jgraph.split_backward(lambda p, x: x @ p["weight"].T + p["bias"])


def close(ours, theirs) -> bool:
    theirs = theirs.detach().numpy()
    return bool(np.abs(np.asarray(ours) - theirs).max() <= 1e-6 * max(1.0, np.abs(theirs).max()))


def torch_dgrads():
    """Runs all backward passes. Returns the layer and the dx of every microbatch."""
    layer = DelayedLinear(torch.tensor(WEIGHT), torch.tensor(BIAS))
    gradients = []
    for x, dy in zip(XS, DYS, strict=True):
        x = torch.tensor(x, requires_grad=True)
        layer(x).backward(torch.tensor(dy))
        gradients.append(x.grad)
    return layer, gradients


def our_dgrads():
    rows = []
    for x, dy in zip(XS, DYS, strict=True):
        _, residuals = SPLIT.forward(PARAMS, x)
        rows.append((residuals, *SPLIT.dgrad(PARAMS, residuals, dy)))
    return rows


def test_dgrad_returns_dx_and_the_bias_gradient_but_no_weight_gradient():
    layer, gradients = torch_dgrads()
    rows = our_dgrads()
    assert layer.weight.grad is None
    for (_, dx, early, _), theirs in zip(rows, gradients, strict=True):
        assert early["weight"] is None
        assert close(dx, theirs)
    assert close(sum(early["bias"] for _, _, early, _ in rows), layer.bias.grad)


def test_wgrads_accumulate_in_the_order_of_the_dgrads():
    layer, _ = torch_dgrads()
    main_grad = {"weight": jnp.zeros_like(PARAMS["weight"]), "bias": None}
    for residuals, _, _, stash in our_dgrads():
        layer.backward_dw()
        main_grad = SPLIT.accumulate(main_grad, PARAMS, residuals, stash)
        assert close(main_grad["weight"], layer.main_grad)


def test_the_comparison_detects_a_reversed_queue_and_a_missing_wgrad():
    layer, _ = torch_dgrads()
    residuals, _, _, stash = our_dgrads()[0]
    layer.backward_dw(newest=True)
    assert not close(SPLIT.wgrad(PARAMS, residuals, stash)["weight"], layer.main_grad)
    layer.backward_dw()
    total = sum(SPLIT.wgrad(PARAMS, r, s)["weight"] for r, _, _, s in our_dgrads())
    assert not close(total, layer.main_grad)


def test_the_sum_of_delayed_wgrads_equals_plain_autograd():
    plain = torch.nn.Linear(32, 24)
    plain.weight.data, plain.bias.data = torch.tensor(WEIGHT), torch.tensor(BIAS)
    for x, dy in zip(XS, DYS, strict=True):
        plain(torch.tensor(x)).backward(torch.tensor(dy))
    total = sum(SPLIT.wgrad(PARAMS, r, s)["weight"] for r, _, _, s in our_dgrads())
    assert close(total, plain.weight.grad)
    assert isinstance(total, jax.Array)
