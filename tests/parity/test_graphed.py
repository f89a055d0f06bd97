"""Compares graphed callables with a model of Transformer Engine, with and without its former faults."""

import json
from collections import deque
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jgraph  # noqa: E402
from jgraph.errors import OwnershipError  # noqa: E402
from tests.parity.torch_graphed import Graphed, Weak, exact_step  # noqa: E402

pytestmark = pytest.mark.parity

# B batch, D model. The loss is scaled so that the sum of the gradients of eight microbatches is about one.
# The rate is small: at 0.5, rounding changed an output by 1.04e-6 in three steps on one CPU, and the tolerance is 1e-6.
B, D, SCALE, RATE = 2, 8, 1 / 16, 1 / 8
GOLDENS = json.loads((Path(__file__).parents[1] / "schedule/goldens/orders.json").read_text())
ORDERS = {
    **{row["name"]: row["args"]["order"] for row in GOLDENS["hazardous"]},
    "two_dgrads_then_two_wgrads": [1, 1, -1, -1, -1.5, -1.5],
    **{case["name"]: case["expect"]["overlap_order"] for case in GOLDENS["cases"] if case["params"]["delay_wgrad"]},
    "without_delay": [1, 2, 1, -2, 2, -1, -2, -1],
    "one_chunk_delayed": [1, 2, 1, -2, 2, -1, -2, -1.5, -1, -1.5],
}
# In these orders, a forward or dgrad overwrites an input of a later wgrad if the dgrad releases the buffer.
HAZARDS = ("min_input_hazard", "min_grad_output_hazard", "two_dgrads_then_two_wgrads", "pp4_r1_vp2_overlap_wgrad_uneven")


def stage(params, x_BD, mask_BD=None):
    return jnp.tanh((x_BD if mask_BD is None else x_BD * mask_BD) @ params["w"] + params["b"])


def loss(y_BD, target_BD):
    return 0.5 * SCALE * jnp.sum((y_BD - target_BD) ** 2)


@jax.jit
def update(params, grads, rate):
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


class Ours:
    """jgraph with the methods of the upstream model."""

    tensor = staticmethod(jnp.array)

    def __init__(self, params, delayed, *, order=None, masked=False, reuse=False, param_grads="owned"):
        self.params = jax.tree.map(jnp.array, tuple(params))
        sample = (jax.ShapeDtypeStruct((B, D), "float32"),) * (1 + masked)
        self.graphed = jgraph.make_graphed_callables(
            (stage,) * len(params),
            self.params,
            (sample,) * len(params),
            order=order,
            delay_wgrad=delayed,
            reuse_buffers=reuse,
            param_grads=param_grads,
        )

    def forward(self, c, x, *mask):
        return self.graphed[c](self.params[c], x, *mask)

    def backward(self, c, dy):
        return self.graphed[c].backward(dy)

    def dgrad(self, c, dy):
        return self.graphed[c].dgrad(dy)

    def wgrad(self, c):
        return self.graphed[c].wgrad()

    @property
    def main_grad(self):
        return [self.graphed[c].main_grad for c in range(len(self.graphed))]

    def zero_grads(self):
        self.graphed.zero_grads()

    def sgd(self, grads, rate):
        self.params = update(self.params, tuple(grads), rate)


def data(order, seed=0):
    """Returns the parameters of the callables, and the inputs, targets and masks of the microbatches."""
    rng, shape = np.random.default_rng(seed), (order.count(1), B, D)
    params = [{"w": rng.normal(size=(D, D)) / np.sqrt(D), "b": rng.normal(size=D)} for _ in range(max(order))]
    arrays = rng.normal(size=shape), rng.normal(size=shape), rng.random(shape) < 0.7
    return jax.tree.map(np.float32, (params, *arrays))


def delays(order):
    return [-c - 1.5 in order for c in range(max(order))]


def array(x):
    """Returns the current value of a handle. Returns a tensor unchanged."""
    return getattr(x, "value", x)


def numbers(tree):
    def copied(x):
        x = array(x)
        return np.array(x.numpy() if isinstance(x, torch.Tensor) else x)

    return jax.tree.map(copied, tree, is_leaf=lambda x: hasattr(x, "value"))


def address(x):
    x = array(x)
    return x.data_ptr() if isinstance(x, torch.Tensor) else x.unsafe_buffer_pointer()


def live(handle):
    if isinstance(handle, Weak):
        return not handle.stale
    try:
        return array(handle) is not None
    except OwnershipError:
        return False


def close(ours, theirs):
    ours, theirs = jax.tree.leaves(numbers(ours)), jax.tree.leaves(numbers(theirs))
    return all(np.abs(a - b).max() <= 1e-6 * max(1.0, np.abs(b).max()) for a, b in zip(ours, theirs, strict=True))


def fails(check, *args):
    """Checks that `check` raises AssertionError, and returns True."""
    with pytest.raises(AssertionError):
        check(*args)
    return True


def step(system, order, xs, targets, masks=()):
    """Runs one step with single calls. Returns gradients by callable, and copies of y and dx by microbatch."""
    given, ys, dxs = [[] for _ in range(max(order))], [], []
    inputs, dys = [deque(map(system.tensor, xs)), *([deque() for _ in given])], [deque() for _ in given]
    system.zero_grads()
    for entry in order:
        c = int(abs(entry)) - 1
        if entry > 0:
            y = system.forward(c, inputs[c].popleft(), *([masks.popleft()] if masks else []))
            inputs[c + 1].append(y)
            if c + 1 == len(given):
                dys[c].append(SCALE * (array(y) - system.tensor(targets[len(ys)])))
                ys.append(numbers(y))
        elif entry % 1:
            given[c].append(system.wgrad(c))
        else:
            if -c - 1.5 in order:
                dx = system.dgrad(c, dys[c].popleft())
            else:
                gradients, dx = system.backward(c, dys[c].popleft())
                given[c].append(gradients)
            if c:
                dys[c - 1].append(dx)
            else:
                dxs.append(numbers(dx))
    return given, ys, dxs


def owned(system, given):
    """Returns the sums of the owned gradients from their current values."""
    return [
        {name: sum(numbers(call[name]) for call in calls) for name in ("w", "b") if main[name] is None}
        for main, calls in zip(system.main_grad, given, strict=True)
    ]


def totals(system, given):
    """Returns copies of the gradients of a step: the sums of owned gradients, and main_grad."""
    added = [{name: numbers(total) for name, total in main.items() if total is not None} for main in system.main_grad]
    return [sums | more for sums, more in zip(owned(system, given), added, strict=True)]


# Data for calls without an order: one callable and two microbatches.
PARAMS, XS, TARGETS, MASKS = data([1, 1])
EXACT = [exact_step(PARAMS, XS[[m]], TARGETS[[m]], scale=SCALE)[0] for m in range(2)]


def call(system, m, delayed=False):
    """Runs forward and backward of microbatch m. Returns its gradients."""
    y = system.forward(0, system.tensor(XS[m]))
    dy = SCALE * (array(y) - system.tensor(TARGETS[m]))
    if not delayed:
        return system.backward(0, dy)[0]
    system.dgrad(0, dy)
    return system.wgrad(0)


def check_owned(system):
    first, second = call(system, 0), call(system, 1)
    assert close(second, EXACT[1])
    assert close(first, EXACT[0])
    assert not {address(g) for g in first.values()} & {address(g) for g in second.values()}


def check_sum_by_the_caller(system):
    first, second = call(system, 0), call(system, 1)
    exact = exact_step(PARAMS, XS, TARGETS, scale=SCALE)[0]
    assert close({name: first[name] + second[name] for name in first}, exact)


def check_alias(system):
    seen = set()
    for n in range(3):
        gradients = call(system, 0, delayed=True)
        seen.add(address(gradients["w"]))
        assert close(gradients["w"], (n + 1) * EXACT[0]["w"])
        assert close(gradients["b"], EXACT[0]["b"])
    system.zero_grads()
    seen.add(address(call(system, 1, delayed=True)["w"]))
    assert seen == {address(system.main_grad[0]["w"])}
    assert close(system.main_grad[0]["w"], EXACT[1]["w"])


def check_same_address(system):
    first = call(system, 0)
    before = {name: address(g) for name, g in first.items()}
    system.zero_grads()
    second = call(system, 1)
    assert close(second, EXACT[1])
    assert {name: address(g) for name, g in second.items()} == before


def test_returned_parameter_grads_are_owned_by_the_caller():
    check_owned(Ours(PARAMS, [False]))
    check_owned(Graphed(PARAMS, [False]))
    assert fails(check_owned, Graphed(PARAMS, [False], param_grads="static"))


def test_owned_parameter_grads_can_be_summed_over_replays():
    check_sum_by_the_caller(Ours(PARAMS, [False]))
    check_sum_by_the_caller(Graphed(PARAMS, [False]))
    assert fails(check_sum_by_the_caller, Graphed(PARAMS, [False], param_grads="static"))


def test_delayed_parameter_grads_alias_main_grad():
    check_alias(Ours(PARAMS, [True]))
    check_alias(Graphed(PARAMS, [True]))
    assert fails(check_alias, Graphed(PARAMS, [True], param_grads="cloned"))


def test_owned_grads_survive_next_to_delayed_grads():
    def check(system):
        first = call(system, 0, delayed=True)["b"]
        call(system, 1, delayed=True)
        assert close(first, EXACT[0]["b"])

    check(Ours(PARAMS, [True]))
    check(Graphed(PARAMS, [True]))
    assert fails(check, Graphed(PARAMS, [True], param_grads="static"))


def test_aliased_parameter_grads_keep_their_address():
    check_same_address(Ours(PARAMS, [False], param_grads="aliased"))
    check_same_address(Graphed(PARAMS, [False], param_grads="static"))
    assert fails(check_same_address, Ours(PARAMS, [False]))
    assert fails(check_same_address, Graphed(PARAMS, [False]))


def test_a_stale_aliased_grad_raises_while_upstream_returns_wrong_values():
    ours, theirs = Ours(PARAMS, [False], param_grads="aliased"), Graphed(PARAMS, [False], param_grads="static")
    first, theirs_first = call(ours, 0), call(theirs, 0)
    assert close(first, theirs_first)
    call(ours, 1)
    call(theirs, 1)
    assert close(theirs_first, EXACT[1])
    for gradient in first.values():
        with pytest.raises(OwnershipError, match="main_grad of callable 0"):
            _ = gradient.value


@pytest.mark.parametrize("delayed", [True, False])
def test_the_clone_policy_is_fixed_at_build_time(delayed):
    def check(make):
        flags = [delayed]
        system = make(flags)
        flags[0] = not delayed
        (check_alias if delayed else check_owned)(system)

    check(lambda flags: Ours(PARAMS, flags))
    check(lambda flags: Graphed(PARAMS, flags))
    assert fails(check, lambda flags: Graphed(PARAMS, flags, policy="replayed"))


def test_the_clone_policy_is_fixed_for_later_orders():
    order, flags = [1, -1, -1.5], [True]
    ours = Ours(PARAMS, flags, order=order)
    flags[0] = False
    done = ours.graphed.run([1, -1, 1, -1.5, -1, -1.5], list(XS), loss, loss_args=[(t,) for t in TARGETS])
    assert close(done.grads, exact_step(PARAMS, XS, TARGETS, scale=SCALE))


def run_masked(order):
    """Runs `order` with reused buffers. Returns its masks and its gradients."""
    masks = list(map(jnp.array, MASKS))
    graphed = Ours(PARAMS, delays(order), order=order, masked=True, reuse=True).graphed
    loss_args = [(jnp.array(target),) for target in TARGETS]
    done = graphed.run(None, list(map(jnp.array, XS)), loss, extra=[(mask,) for mask in masks], loss_args=loss_args)
    return masks, done.grads


@pytest.mark.parametrize("order", [[1, 1, -1, -1], [1, 1, -1, -1, -1.5, -1.5]], ids=["whole", "delayed"])
def test_an_extra_tensor_of_the_caller_is_never_reused(order):
    def check(system):
        masks = [system.tensor(mask) for mask in MASKS]
        step(system, order, XS, TARGETS, deque(masks))
        assert all(np.array_equal(numbers(mask), expected) for mask, expected in zip(masks, MASKS, strict=True))

    delayed = delays(order)
    check(Ours(PARAMS, delayed, order=order, masked=True))
    masks, _ = run_masked(order)
    assert all(np.array_equal(mask, expected) for mask, expected in zip(masks, MASKS, strict=True))
    check(Graphed(PARAMS, delayed, microbatches=2, reuse=True))
    assert fails(check, Graphed(PARAMS, delayed, microbatches=2, reuse=True, weak="any"))


@pytest.mark.parametrize("order", [[1, 1, -1, -1], [1, 1, -1, -1, -1.5, -1.5]], ids=["whole", "delayed"])
def test_an_extra_tensor_dropped_by_the_caller_lives_until_its_last_read(order):
    def check(system):
        given, _, _ = step(system, order, XS, TARGETS, deque(map(system.tensor, MASKS)))
        assert close(totals(system, given), exact_step(PARAMS, XS, TARGETS, MASKS, scale=SCALE))

    delayed = delays(order)
    check(Ours(PARAMS, delayed, order=order, masked=True))
    assert close(run_masked(order)[1], exact_step(PARAMS, XS, TARGETS, MASKS, scale=SCALE))
    check(Graphed(PARAMS, delayed, microbatches=2, reuse=True))
    assert fails(check, Graphed(PARAMS, delayed, microbatches=2, reuse=True, weak="any"))


def test_a_reused_buffer_lives_until_its_wgrad():
    order = ORDERS["min_grad_output_hazard"]
    params, xs, targets, _ = data(order)

    def check(system):
        y = system.forward(0, system.tensor(xs[0]))
        z = system.forward(1, y)
        system.dgrad(0, system.dgrad(1, SCALE * (array(z) - system.tensor(targets[0]))))
        assert live(y)
        system.wgrad(1)
        system.wgrad(0)
        assert not live(y)

    check(Graphed(params, delays(order), reuse=True))
    assert fails(check, Graphed(params, delays(order), reuse=True, release="dgrad"))
    # jgraph reuses buffers only in `run`. An early release would change the gradients.
    graphed = Ours(params, delays(order), order=order, reuse=True).graphed
    done = graphed.run(None, list(map(jnp.array, xs)), loss, loss_args=[(jnp.array(t),) for t in targets])
    assert close(done.grads, exact_step(params, xs, targets, scale=SCALE))


@cache
def upstream(name):
    """Runs three steps of the upstream model without reuse. Returns (gradients, ys, dxs) per step, and the final parameters."""
    order = ORDERS[name]
    params, xs, targets, _ = data(order)
    model, steps = Graphed(params, delays(order), microbatches=len(xs)), []
    for _ in range(3):
        given, ys, dxs = step(model, order, xs, targets)
        steps.append((totals(model, given), ys, dxs))
        model.sgd(steps[-1][0], RATE)
    return steps, numbers(model.params)


def ours(name, reuse, param_grads):
    order = ORDERS[name]
    return Ours(data(order)[0], delays(order), order=order, reuse=reuse, param_grads=param_grads)


def check_three_steps(system, name):
    """Checks that every step equals upstream, and that retained gradients are unchanged after the last step."""
    order = ORDERS[name]
    _, xs, targets, _ = data(order)
    steps, params = upstream(name)
    kept = []
    for expected in steps:
        given, ys, dxs = step(system, order, xs, targets)
        gradients = totals(system, given)
        assert close((gradients, ys, dxs), expected)
        kept.append((given, owned(system, given)))
        system.sgd(gradients, RATE)
    assert close(list(system.params), params)
    for given, before in kept:
        assert close(owned(system, given), before)


EVERY = pytest.mark.parametrize("name", ORDERS)
POLICIES = ("owned", "aliased")
POLICY = pytest.mark.parametrize("param_grads", POLICIES)
# Every pair of choices: each order with two of the four combinations of the other choices.
RUNS = [
    pytest.param(name, reuse, POLICIES[(number + reuse) % 2], id=f"{name}-{'reused' if reuse else 'static'}")
    for number, name in enumerate(ORDERS)
    for reuse in (False, True)
]


@EVERY
def test_the_upstream_model_has_exact_gradients_with_and_without_reuse(name):
    params, xs, targets, _ = data(ORDERS[name])
    (gradients, _, _), *_ = upstream(name)[0]
    assert close(gradients, exact_step(params, xs, targets, scale=SCALE))
    check_three_steps(Graphed(params, delays(ORDERS[name]), microbatches=len(xs), reuse=True), name)


@EVERY
@POLICY
def test_three_steps_of_single_calls_equal_upstream(name, param_grads):
    check_three_steps(ours(name, False, param_grads), name)


@pytest.mark.parametrize(("name", "reuse", "param_grads"), RUNS)
def test_three_steps_of_run_equal_upstream(name, reuse, param_grads):
    system = ours(name, reuse, param_grads)
    graphed, weights = system.graphed, system.params
    _, xs, targets, _ = data(ORDERS[name])
    steps, final = upstream(name)
    for gradients, ys, _ in steps:
        done = graphed.run(
            None, [*map(jnp.array, xs)], loss, params=weights, loss_args=[(jnp.array(t),) for t in targets], outputs="keep"
        )
        assert close(list(done.grads), gradients)
        assert close(list(done.outputs), ys)
        weights = update(weights, done.grads, RATE)
    assert close(list(weights), final)


@pytest.mark.parametrize("name", HAZARDS)
def test_the_comparison_detects_buffers_released_by_a_dgrad(name):
    params, xs, _, _ = data(ORDERS[name])
    assert fails(
        check_three_steps, Graphed(params, delays(ORDERS[name]), microbatches=len(xs), reuse=True, release="dgrad"), name
    )


@EVERY
def test_the_comparison_detects_static_returned_grads(name):
    params, xs, _, _ = data(ORDERS[name])
    assert fails(check_three_steps, Graphed(params, delays(ORDERS[name]), microbatches=len(xs), param_grads="static"), name)
