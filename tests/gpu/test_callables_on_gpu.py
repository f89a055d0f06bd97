"""Graphed callables on a GPU: equality with torch.cuda.make_graphed_callables, and command buffers at run time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph
from jgraph.schedule import generate
from jgraph.xla.launches import count_launches

pytestmark = pytest.mark.gpu

D, H, B, LAYERS = 128, 256, 64, 3


def stage(params, x):
    return x + jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]


def make_params(seed):
    rng = np.random.default_rng(seed)
    shapes = {"w": (D, H), "b": (H,), "v": (H, D)}
    return {name: (0.1 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def params():
    return tuple(jax.device_put(make_params(i), jax.devices()[0]) for i in range(LAYERS))


def batch(seed):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((B, D)).astype(np.float32), rng.standard_normal((B, D)).astype(np.float32)


def build(params, **kwargs):
    x = jax.ShapeDtypeStruct((B, D), jnp.float32)
    return jgraph.make_graphed_callables((stage,) * LAYERS, params, ((x,),) * LAYERS, **kwargs)


def replay(graphed, params, x, dy):
    """Calls every callable once. Returns y, the parameter gradients and dx."""
    y = jnp.asarray(x)
    for call, p in zip(graphed, params, strict=True):
        y = call(p, y)
    dx, grads = jnp.asarray(dy), []
    for call in reversed(list(graphed)):
        gradient, dx = call.backward(dx)
        grads.append(gradient)
    return y, grads[::-1], dx


class TorchStages:
    """The same stages as graphed callables of PyTorch."""

    def __init__(self):
        torch = pytest.importorskip("torch")

        class Stage(torch.nn.Module):
            def __init__(self, seed):
                super().__init__()
                for name, value in make_params(seed).items():
                    self.register_parameter(name, torch.nn.Parameter(torch.tensor(value, device="cuda")))

            def forward(self, x):
                return x + torch.tanh(x @ self.w + self.b) @ self.v

        self.torch = torch
        self.stages = [Stage(i) for i in range(LAYERS)]
        samples = tuple((torch.zeros(B, D, device="cuda", requires_grad=True),) for _ in self.stages)
        self.graphed = torch.cuda.make_graphed_callables(tuple(self.stages), samples)

    def replay(self, x, dy):
        inputs = self.torch.tensor(x, device="cuda", requires_grad=True)
        y = inputs
        for call in self.graphed:
            y = call(y)
        for s in self.stages:
            for p in s.parameters():
                p.grad = None
        y.backward(self.torch.tensor(dy, device="cuda"))
        grads = [{name: p.grad.cpu().numpy() for name, p in s.named_parameters()} for s in self.stages]
        return y.detach().cpu().numpy(), grads, inputs.grad.cpu().numpy()


def assert_close(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


@pytest.mark.filterwarnings("default")  # PyTorch warns once per process
@pytest.mark.parametrize("kwargs", [{}, {"param_grads": "aliased"}, {"delay_wgrad": True}], ids=["owned", "aliased", "delayed"])
def test_replays_equal_the_graphed_callables_of_torch(params, kwargs):
    theirs = TorchStages()
    graphed = build(params, **kwargs)
    for seed in range(3):
        x, dy = batch(seed)
        y, grads, dx = replay(graphed, params, x, dy)
        assert_close((y, jax.tree.map(jnp.copy, grads), dx), theirs.replay(x, dy))
        graphed.zero_grads()


def test_retained_gradients_survive_later_replays(params):
    graphed = build(params)
    kept = replay(graphed, params, *batch(0))[1]
    before = jax.tree.map(np.array, kept)
    for seed in range(1, 4):
        replay(graphed, params, *batch(seed))
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


def test_main_grad_keeps_its_device_address(params):
    graphed = build(params, param_grads="aliased")
    addresses = {
        tuple(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(replay(graphed, params, *batch(seed))[1]))
        for seed in range(4)
    }
    assert len(addresses) == 1


def test_an_order_in_one_executable_is_one_launch_and_steady_steps_update_no_graph(params):
    order = [1, 2, 3, -3, -2, -1, -3.5, -2.5, -1.5]
    graphed = build(params, order=order, delay_wgrad=True, reuse_buffers=True, param_grads="aliased")
    x, dy = map(jnp.asarray, batch(0))

    def step():
        return graphed.run(None, [x], product, loss_args=[(dy,)])

    for _ in range(3):
        step()
    with count_launches() as count:
        for _ in range(5):
            step()
    assert (count.launches, count.updates, count.records) == (5, 0, 0)


def product(y, dy):
    return jnp.vdot(y, dy)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "aligned", "zb-v"])
def test_a_schedule_on_several_gpus_has_the_results_of_one(name):
    ranks = min(4, len(jax.devices()))
    if ranks < 2:
        pytest.skip("needs two GPUs")
    schedule = generate(name, pp=ranks, microbatches=2 * ranks, chunks=2 if name == "zb-v" else 1)
    count = schedule.num_stages
    params = tuple(map(make_params, range(count)))
    x = jax.ShapeDtypeStruct((B, D), jnp.float32)
    xs, dys = zip(*map(batch, range(schedule.num_microbatches)), strict=True)

    def graphed(**kwargs):
        return jgraph.make_graphed_callables((stage,) * count, params, ((x,),) * count, **kwargs)

    spread = graphed(
        order=schedule,
        delay_wgrad=any(schedule[0].delay_wgrad),
        devices=jax.devices()[:ranks],
        reuse_buffers=True,
    )
    alone = graphed(order=[*range(1, count + 1), *range(-count, 0)] * schedule.num_microbatches)
    results = [
        g.run(None, xs, product, params=g.place(params), loss_args=[(dy,) for dy in dys]) for g in (spread, spread, alone)
    ]
    for one in results[1:2]:
        assert_close(one.grads, jax.tree.map(np.array, results[2].grads))
        assert_close(one.losses, jax.tree.map(np.array, results[2].losses))
