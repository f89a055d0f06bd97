"""Compares FP8 with PyTorch: current scaling with torchao, delayed scaling with the formulas of Transformer Engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")

import jgraph  # noqa: E402
from jgraph import FP8Config  # noqa: E402

pytestmark = pytest.mark.parity

ROWS, D, F = 64, 96, 160
STEPS, RATE = 50, 0.05


def linear(w, x):
    return x @ w


def arrays(seed):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape).astype(np.float32) for shape in ((ROWS, D), (D, F), (ROWS, F)))


def test_current_scaling_equals_the_tensorwise_recipe_of_torchao():
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    x, w, dy = arrays(0)
    config = Float8LinearConfig(emulate=True, round_scales_to_power_of_2=True)
    peer = torch.nn.Linear(D, F, bias=False)
    peer.weight.data = torch.tensor(w.T)
    peer = Float8Linear.from_float(peer, config)
    x_torch = torch.tensor(x, requires_grad=True)
    y_torch = peer(x_torch)
    y_torch.backward(torch.tensor(dy))

    stage = jgraph.fp8(linear)
    y, pull_back = jax.vjp(lambda w, x: stage.apply(w, {}, x), jnp.asarray(w), jnp.asarray(x))
    dw, dx = pull_back(jnp.asarray(dy))
    for found, expected in ((y, y_torch), (dx, x_torch.grad), (dw, peer.weight.grad.T)):
        np.testing.assert_allclose(found, expected.detach().numpy(), rtol=1e-4, atol=1e-3)


def power_of_two(ratio):
    return 2.0 ** torch.floor(torch.log2(ratio))


class Delayed:
    """Delayed scaling of one tensor: its amax history and the scale of the next step."""

    def __init__(self, dtype, history, algorithm, margin):
        self.dtype, self.algorithm, self.margin = dtype, algorithm, margin
        self.window, self.scale = torch.zeros(history), torch.tensor(1.0)

    def __call__(self, x):
        top = torch.finfo(self.dtype).max
        rounded = (x * self.scale).clamp(-top, top).to(self.dtype).float() / self.scale
        self.window[0] = x.abs().max()
        return rounded

    def update(self):
        amax = self.window.max() if self.algorithm == "max" else self.window[0]
        if amax > 0:
            self.scale = power_of_two(torch.finfo(self.dtype).max / amax) / 2**self.margin
        seen, self.window = self.window[0].clone(), self.window.roll(1)
        self.window[0] = 0
        return seen.item()


@pytest.mark.parametrize(("algorithm", "margin"), [("max", 0), ("most_recent", 1)])
def test_delayed_scaling_has_the_amax_history_of_transformer_engine(algorithm, margin):
    rng, (_, w, _) = np.random.default_rng(1), arrays(1)
    sizes = np.exp(np.cumsum(rng.normal(size=STEPS)))  # the magnitude of the inputs changes at every step
    batches = [(size * rng.normal(size=(ROWS, D)).astype(np.float32)).astype(np.float32) for size in sizes]

    stage = jgraph.fp8(linear, FP8Config(recipe="delayed", history=8, amax=algorithm, margin=margin))
    w = jnp.asarray(w)
    state, found, weights = stage.init(w, jnp.asarray(batches[0])), [], []

    @jax.jit
    def step(w, state, x):
        y, pull_back = jax.vjp(lambda w, state: stage.apply(w, state, x), w, state)
        dw, state = pull_back(y / jnp.mean(jnp.square(x)))
        return w - RATE * dw / ROWS, state

    for batch in batches:
        weights.append(np.array(w))
        w, state = step(w, state, jnp.asarray(batch))
        found.append(np.asarray(state.window[0, 0]))

    scalings = [Delayed(dtype, 8, algorithm, margin) for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)]
    expected = []
    for batch, w in zip(batches, weights, strict=True):
        x, (scale_x, scale_w, scale_dy) = torch.tensor(batch), scalings
        scale_dy((scale_x(x) @ scale_w(torch.tensor(w))) / x.square().mean())
        expected.append([scaling.update() for scaling in scalings])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
