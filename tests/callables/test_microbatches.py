"""Pending microbatches of graphed callables: evaluation, selection, dropping, threads, and JAX transformations."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph
from jgraph.callables import _group
from jgraph.errors import CallableError, OwnershipError
from tests.callables import chain

X = jnp.linspace(-1.0, 1.0, chain.B * chain.D).reshape(chain.B, chain.D)
OTHER = jnp.flip(X) * 2
DY = jnp.cos(X)
ORDER = [1, 1, -1, -1]
DELAYED = [1, 1, -1, -1, -1.5, -1.5]


def build(**kwargs):
    graphed, params = chain.build(1, **kwargs)
    return graphed[0], params[0]


def reference(params, x):
    """Returns the parameter gradients and dx."""
    return jax.vjp(chain.stage, params, x)[1](DY)


def in_another_thread(use, *args):
    """Returns the result of a call in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(use, *args).result()


# Evaluation


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"delay_wgrad": True}, {"param_grads": "aliased"}],
    ids=["owned", "delayed", "aliased"],
)
def test_evaluate_between_forward_and_backward_saves_no_residuals(kwargs):
    call, params = build(**kwargs)
    call(params, X)
    y = call.evaluate(params, OTHER)
    assert isinstance(y, jax.Array)
    chain.assert_close(y, chain.stage(params, OTHER))
    chain.assert_close(call.backward(DY), reference(params, X))
    assert call.pending == ()


def test_evaluate_does_not_compile():
    compiled = []
    listen = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    call, params = build()
    call(params, X)
    jax.monitoring.register_event_duration_secs_listener(listen)
    call.evaluate(params, X)
    assert not compiled


# Selecting a microbatch


def test_the_next_backward_reports_an_extra_forward():
    call, params = build()
    call(params, OTHER)  # should have been an evaluation
    call(params, X)
    with pytest.raises(CallableError, match=r"2 microbatches wait .*\(0, 1\).*`microbatch`.*drop"):
        call.backward(DY)
    call.drop(0)
    chain.assert_close(call.backward(DY), reference(params, X))


@pytest.mark.parametrize("kwargs", [{"order": ORDER}, {"order": DELAYED, "delay_wgrad": True}], ids=["whole", "delayed"])
def test_more_pending_microbatches_than_the_order_allows_are_refused(kwargs):
    call, params = build(**kwargs)
    part = call.dgrad if "delay_wgrad" in kwargs else call.backward
    for x in (OTHER, X, X):
        call(params, x)
    with pytest.raises(CallableError, match=r"3 microbatches wait .* at most 2"):
        part(DY)
    call.drop(0)
    part(DY)
    assert len(call.pending) == (2 if "delay_wgrad" in kwargs else 1)


def test_backward_and_dgrad_accept_a_microbatch_number():
    call, params = build(order=DELAYED, delay_wgrad=True)
    call(params, X)
    first = call.pending[-1]
    call(params, OTHER)
    second = call.pending[-1]
    chain.assert_close(call.dgrad(DY, microbatch=second), reference(params, OTHER)[1])
    chain.assert_close(call.dgrad(DY, microbatch=first), reference(params, X)[1])
    assert set(call.pending) == {first, second}
    grads = call.wgrad(microbatch=first)
    chain.assert_close(grads, reference(params, X)[0])
    call.wgrad(microbatch=second)
    call(params, X)
    third = call.pending[-1]
    call(params, OTHER)
    chain.assert_close(call.backward(DY, microbatch=call.pending[-1])[1], reference(params, OTHER)[1])
    chain.assert_close(call.backward(DY, microbatch=third)[1], reference(params, X)[1])


def test_a_microbatch_that_is_not_pending_is_refused():
    call, params = build(delay_wgrad=True)
    call(params, X)
    for part in (lambda: call.dgrad(DY, microbatch=3), lambda: call.drop(3), lambda: call.dgrad(DY, microbatch="first")):
        with pytest.raises(CallableError, match=r"microbatch (3|'first') .*: 0"):
            part()
    call.dgrad(DY)
    with pytest.raises(CallableError, match="microbatch 1 "):
        call.wgrad(microbatch=1)
    call.wgrad(microbatch=0)


@pytest.mark.parametrize("restart", ["run", "zero_grads", "zero_grads of all"])
@pytest.mark.parametrize("after", ["forward", "dgrad"])
def test_a_new_step_is_refused_while_microbatches_are_pending(restart, after):
    graphed, params = chain.build(1, order=[1, -1, -1.5], delay_wgrad=True, reuse_buffers=True)
    call = graphed[0]
    starts = {
        "run": lambda: graphed.run(None, [X], chain.loss_fn, loss_args=[(DY,)]),
        "zero_grads": call.zero_grads,
        "zero_grads of all": graphed.zero_grads,
    }
    call(params[0], X)
    if after == "dgrad":
        call.dgrad(DY)
    with pytest.raises(CallableError, match=r"callable 0 has 1 microbatches that wait .*drop"):
        starts[restart]()
    graphed.drop()
    starts[restart]()


# Threads


def test_another_thread_is_refused_while_microbatches_are_pending():
    call, params = build(delay_wgrad=True)
    call(params, X)
    for use in (lambda: call(params, OTHER), lambda: call.dgrad(DY), lambda: call.backward(DY), call.zero_grads):
        with pytest.raises(CallableError, match=r"callable 0 .*thread"):
            in_another_thread(use)
    call.dgrad(DY)
    with pytest.raises(CallableError, match=r"callable 0 .*thread"):
        in_another_thread(call.wgrad)
    call.wgrad()
    in_another_thread(call, params, OTHER)  # allowed, because no microbatch of the first thread is pending
    with pytest.raises(CallableError, match=r"callable 0 .*thread"):
        call.dgrad(DY)
    call.drop()
    chain.assert_close(in_another_thread(call.evaluate, params, X), chain.stage(params, X))


def test_concurrent_calls_raise_an_error_or_return_correct_gradients():
    call, params = build()
    inputs = [X * (m + 1) for m in range(2)]
    expected = [np.asarray(reference(params, x)[1]) for x in inputs]

    def gradients(m):
        found = []
        for _ in range(100):
            try:
                call(params, inputs[m])
                found.append(np.asarray(call.backward(DY)[1]))
            except CallableError:
                pass
        return found

    with ThreadPoolExecutor(2) as pool:
        for found, expected_dx in zip(pool.map(gradients, range(2)), expected, strict=True):
            for dx in found:
                chain.assert_close(dx, expected_dx)


def test_a_call_during_a_call_of_another_thread_is_refused():
    params = chain.make_params(0)
    call = jgraph.make_graphed_callables(chain.stage, params, (X,))[0]
    with call.waiting, pytest.raises(CallableError, match=r"callable 0 .*thread"):
        in_another_thread(lambda: call(params, X))


def test_run_and_calls_are_refused_during_a_run_of_another_thread():
    found = []
    graphed, params = chain.build(2, order=[1, 2, -2, -1])

    def loss(y):  # traced during the run
        for use in (lambda: graphed.run(None, [X], jnp.sum), lambda: graphed[1](params[1], X)):
            with pytest.raises(CallableError, match="thread") as error:
                in_another_thread(use)
            found.append(error)
        return jnp.sum(y)

    graphed.run(None, [X], loss)
    assert found
    in_another_thread(lambda: graphed.run(None, [X], jnp.sum))


def test_different_threads_may_call_different_callables():
    graphed, params = chain.build(2, order=[1, 2, -2, -1])
    y = graphed[0](params[0], X)
    chain.assert_close(in_another_thread(graphed[1], params[1], y), chain.stage(params[1], y))


# Arrays that the caller changes or donates


def aligned(array):
    """Returns a copy of `array` in NumPy memory that is aligned enough for a JAX CPU array to share it."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + array.nbytes].view(np.float32).reshape(array.shape)
    out[:] = array
    return out


@pytest.mark.parametrize("part", ["backward", "dgrad"])
def test_numpy_parameters_may_be_overwritten_after_the_forward(part):
    call, params = build(delay_wgrad=part == "dgrad")
    given = jax.tree.map(lambda leaf: aligned(np.asarray(leaf)), params)
    call(given, aligned(np.asarray(X)))
    for leaf in given.values():
        leaf[:] = 0
    if part == "backward":
        grads, dx = call.backward(DY)
    else:
        dx = call.dgrad(DY)
        grads = call.wgrad()
    chain.assert_close((grads, dx), reference(params, X))


def test_a_numpy_dy_may_be_overwritten_before_the_wgrad():
    def matmul(params, x):
        return x @ params["w"]  # the stash is dy itself

    params = {"w": jnp.ones((chain.D, chain.D))}
    graphed = jgraph.make_graphed_callables(matmul, params, (X,), delay_wgrad=True)
    dy = aligned(np.asarray(DY))
    graphed[0](params, X)
    graphed[0].dgrad(dy)
    dy[:] = 0
    chain.assert_close(graphed[0].wgrad()["w"], X.T @ DY)


def test_place_and_run_copy_numpy_arrays():
    # On CPUs jax.device_put may share the memory of a NumPy array, and a program may read it later.
    graphed, params = chain.build(1, order=[1, -1])
    weights = jax.tree.map(lambda leaf: aligned(np.asarray(leaf)), params)
    placed = graphed.place(weights)
    for leaf in jax.tree.leaves(weights):
        leaf[:] = 0
    chain.assert_same_bits(placed, params)
    x, seen = aligned(np.asarray(X)), []

    def keep(y, target):
        return chain.loss_fn(y, target)

    original = _group.play

    def play(plan, registers):
        seen.extend(registers[r] for n, r in plan.flow.named.items() if n.kind in ("x", "loss_args") and n.microbatch == 0)
        original(plan, registers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_group, "play", play)
        graphed.run(None, [x], keep, loss_args=[(x,)], params=placed)
    x[:] = 0
    chain.assert_same_bits(seen, [X, X])


def donate(array):
    jax.block_until_ready(jax.jit(lambda a: a + 1, donate_argnums=0)(array))
    assert array.is_deleted()


@pytest.mark.parametrize("delay", [False, True], ids=["whole", "delayed"])
def test_a_donated_main_grad_is_an_error_until_zero_grads(delay):
    call, params = build(param_grads="aliased", delay_wgrad=delay)
    call(params, X)
    grads, _ = call.backward(DY)
    donate(grads["w"].value)
    call(params, X)
    for use in (lambda: call.backward(DY), lambda: call.main_grad):
        with pytest.raises(OwnershipError, match=r"main_grad of callable 0, 'w', was donated or deleted.*zero_grads") as error:
            use()
        assert error.value.owner == "main_grad of callable 0"
    chain.assert_close(grads["v"].value, reference(params, X)[0]["v"])  # other gradients are unchanged
    call.drop()
    call.zero_grads()
    call(params, X)
    chain.assert_close(call.backward(DY), reference(params, X))


@pytest.mark.parametrize("join", ["segments", "nothing"])
def test_run_reallocates_a_donated_main_grad(join):
    graphed, _ = chain.build(1, order=[1, -1], param_grads="aliased")
    loss_args = [(DY,)]
    first = graphed.run(None, [X], chain.loss_fn, loss_args=loss_args, join=join)
    before = jax.tree.map(np.array, first.grads)
    donate(first.grads[0]["w"].value)
    chain.assert_same_bits(graphed.run(None, [X], chain.loss_fn, loss_args=loss_args, join=join).grads, before)


# Transformations


def abstract(fn):
    return lambda *args: jax.eval_shape(fn, *args)


TRANSFORMATIONS = {
    "jit": jax.jit,
    "grad": lambda fn: jax.grad(lambda *args: jnp.sum(fn(*args))),
    "vmap": lambda fn: lambda *args: jax.vmap(fn)(*(jax.tree.map(lambda leaf: leaf[None], a) for a in args)),
    "eval_shape": abstract,
}


@pytest.mark.parametrize("transform", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_a_graphed_callable_inside_a_jax_transformation_raises_an_error(transform):
    graphed, params = chain.build(1, order=[1, -1], param_grads="aliased")
    call = graphed[0]
    call(params[0], X)
    uses = {
        "forward": (lambda p, x: call(p, x), (params[0], X)),
        "evaluate": (lambda p, x: call.evaluate(p, x), (params[0], X)),
        "x alone": (lambda x: call(params[0], x), (X,)),
        "other shapes": (lambda p, x: call(p, x[:1]), (params[0], X)),
        "backward": (lambda dy: call.backward(dy)[1], (DY,)),
        "run": (lambda x: graphed.run(None, [x], jnp.sum).losses[0], (X,)),
        "params of run": (lambda p: graphed.run(None, [X], jnp.sum, params=[p]).losses[0], (params[0],)),
        "build": (lambda p: jgraph.make_graphed_callables(chain.stage, p, (X,))[0](p, X), (params[0],)),
    }
    for name, (use, args) in uses.items():
        if "run" in name:
            graphed.drop()
        with pytest.raises(CallableError, match=r"jax\.jit, jax\.grad") as error:
            transform(use)(*args)
        assert "\n" not in str(error.value), name


def test_a_backward_refused_in_a_transformation_leaves_the_microbatch_pending():
    call, params = build(param_grads="aliased")
    call(params, X)
    with pytest.raises(CallableError):
        jax.jit(lambda dy: call.backward(dy)[1])(DY)
    chain.assert_close(call.backward(DY), reference(params, X))
    with pytest.raises(CallableError, match=r"jax\.jit, jax\.grad"):
        jax.jit(lambda x: (call.zero_grads(), x))(X)
    chain.assert_close(call.main_grad, reference(params, X)[0])
