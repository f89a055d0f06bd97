"""Which forward a backward belongs to: evaluations, microbatches that are dropped or named, threads, transformations."""

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


def truth(params, x):
    """Gradients of the parameters, and dx."""
    return jax.vjp(chain.stage, params, x)[1](DY)


def elsewhere(use, *args):
    """What a call gives in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(use, *args).result()


# Evaluations


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"delay_wgrad": True}, {"param_grads": "aliased"}],
    ids=["owned", "delayed", "aliased"],
)
def test_an_evaluation_between_forward_and_backward_keeps_nothing(kwargs):
    call, params = build(**kwargs)
    call(params, X)
    y = call.evaluate(params, OTHER)
    assert isinstance(y, jax.Array)
    chain.assert_close(y, chain.stage(params, OTHER))
    chain.assert_close(call.backward(DY), truth(params, X))
    assert call.pending == ()


def test_an_evaluation_compiles_nothing():
    compiled = []
    listen = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    call, params = build()
    call(params, X)
    jax.monitoring.register_event_duration_secs_listener(listen)
    call.evaluate(params, X)
    assert not compiled


# Which one


def test_a_forward_too_many_is_noticed_at_the_next_backward():
    call, params = build()
    call(params, OTHER)  # should have been an evaluation
    call(params, X)
    with pytest.raises(CallableError, match=r"2 microbatches wait .*\(0, 1\).*`microbatch`.*drop"):
        call.backward(DY)
    call.drop(0)
    chain.assert_close(call.backward(DY), truth(params, X))


@pytest.mark.parametrize("kwargs", [{"order": ORDER}, {"order": DELAYED, "delay_wgrad": True}], ids=["whole", "delayed"])
def test_more_microbatches_than_the_order_ever_has_are_noticed(kwargs):
    call, params = build(**kwargs)
    part = call.dgrad if "delay_wgrad" in kwargs else call.backward
    for x in (OTHER, X, X):
        call(params, x)
    with pytest.raises(CallableError, match=r"3 microbatches wait .* at most 2"):
        part(DY)
    call.drop(0)
    part(DY)
    assert len(call.pending) == (2 if "delay_wgrad" in kwargs else 1)


def test_a_backward_may_say_which_forward_it_belongs_to():
    call, params = build(order=DELAYED, delay_wgrad=True)
    call(params, X)
    first = call.pending[-1]
    call(params, OTHER)
    second = call.pending[-1]
    chain.assert_close(call.dgrad(DY, microbatch=second), truth(params, OTHER)[1])
    chain.assert_close(call.dgrad(DY, microbatch=first), truth(params, X)[1])
    assert set(call.pending) == {first, second}
    grads = call.wgrad(microbatch=first)
    chain.assert_close(grads, truth(params, X)[0])
    call.wgrad(microbatch=second)
    call(params, X)
    third = call.pending[-1]
    call(params, OTHER)
    chain.assert_close(call.backward(DY, microbatch=call.pending[-1])[1], truth(params, OTHER)[1])
    chain.assert_close(call.backward(DY, microbatch=third)[1], truth(params, X)[1])


def test_a_microbatch_that_does_not_wait_is_refused():
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
def test_a_step_does_not_start_while_microbatches_of_the_last_one_wait(restart, after):
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


def test_another_thread_is_refused_while_microbatches_of_this_one_wait():
    call, params = build(delay_wgrad=True)
    call(params, X)
    for use in (lambda: call(params, OTHER), lambda: call.dgrad(DY), lambda: call.backward(DY), call.zero_grads):
        with pytest.raises(CallableError, match=r"callable 0 .*thread"):
            elsewhere(use)
    call.dgrad(DY)
    with pytest.raises(CallableError, match=r"callable 0 .*thread"):
        elsewhere(call.wgrad)
    call.wgrad()
    elsewhere(call, params, OTHER)  # a thread may go on where another has finished
    with pytest.raises(CallableError, match=r"callable 0 .*thread"):
        call.dgrad(DY)
    call.drop()
    chain.assert_close(elsewhere(call.evaluate, params, X), chain.stage(params, X))


def test_two_threads_on_one_callable_get_an_error_or_the_right_gradient():
    call, params = build()
    inputs = [X * (m + 1) for m in range(2)]
    expected = [np.asarray(truth(params, x)[1]) for x in inputs]

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
        for found, wanted in zip(pool.map(gradients, range(2)), expected, strict=True):
            for dx in found:
                chain.assert_close(dx, wanted)


def test_a_call_while_another_thread_is_in_one_is_refused():
    params = chain.make_params(0)
    call = jgraph.make_graphed_callables(chain.stage, params, (X,))[0]
    with call.waiting, pytest.raises(CallableError, match=r"callable 0 .*thread"):
        elsewhere(lambda: call(params, X))


def test_two_threads_do_not_run_at_once():
    found = []
    graphed, params = chain.build(2, order=[1, 2, -2, -1])

    def loss(y):  # traced by a run in progress
        for use in (lambda: graphed.run(None, [X], jnp.sum), lambda: graphed[1](params[1], X)):
            with pytest.raises(CallableError, match="thread") as error:
                elsewhere(use)
            found.append(error)
        return jnp.sum(y)

    graphed.run(None, [X], loss)
    assert found
    elsewhere(lambda: graphed.run(None, [X], jnp.sum))


def test_each_callable_may_be_called_by_its_own_thread():
    graphed, params = chain.build(2, order=[1, 2, -2, -1])
    y = graphed[0](params[0], X)
    chain.assert_close(elsewhere(graphed[1], params[1], y), chain.stage(params[1], y))


# What the caller changes meanwhile


def aligned(array):
    """A numpy array that a device array on the CPU could share."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + array.nbytes].view(np.float32).reshape(array.shape)
    out[:] = array
    return out


@pytest.mark.parametrize("part", ["backward", "dgrad"])
def test_numpy_parameters_may_be_written_to_after_the_forward(part):
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
    chain.assert_close((grads, dx), truth(params, X))


def test_a_numpy_dy_may_be_written_to_before_the_wgrad():
    def product(params, x):
        return x @ params["w"]  # the stash is dy itself

    params = {"w": jnp.ones((chain.D, chain.D))}
    graphed = jgraph.make_graphed_callables(product, params, (X,), delay_wgrad=True)
    dy = aligned(np.asarray(DY))
    graphed[0](params, X)
    graphed[0].dgrad(dy)
    dy[:] = 0
    chain.assert_close(graphed[0].wgrad()["w"], X.T @ DY)


def test_numpy_arrays_that_are_placed_or_played_are_copied():
    # On the CPU jax.device_put may share their memory, and what runs may read it later.
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
        seen.extend(registers[r] for (kind, *where), r in plan.flow.named.items() if kind in ("x", "loss") and where[0] == 0)
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
def test_a_sum_that_the_caller_donated_is_an_error_until_all_start_anew(delay):
    call, params = build(param_grads="aliased", delay_wgrad=delay)
    call(params, X)
    grads, _ = call.backward(DY)
    donate(grads["w"].value)
    call(params, X)
    for use in (lambda: call.backward(DY), lambda: call.main_grad):
        with pytest.raises(OwnershipError, match=r"main_grad of callable 0, 'w', was donated or deleted.*zero_grads") as error:
            use()
        assert error.value.owner == "main_grad of callable 0"
    chain.assert_close(grads["v"].value, truth(params, X)[0]["v"])  # nothing was done to the others
    call.drop()
    call.zero_grads()
    call(params, X)
    chain.assert_close(call.backward(DY), truth(params, X))


@pytest.mark.parametrize("join", ["segments", "nothing"])
def test_a_run_makes_donated_sums_anew(join):
    graphed, _ = chain.build(1, order=[1, -1], param_grads="aliased")
    loss_args = [(DY,)]
    first = graphed.run(None, [X], chain.loss_fn, loss_args=loss_args, join=join)
    before = jax.tree.map(np.array, first.grads)
    donate(first.grads[0]["w"].value)
    chain.assert_same_bits(graphed.run(None, [X], chain.loss_fn, loss_args=loss_args, join=join).grads, before)


# Transformations


def shapes(fn):
    return lambda *args: jax.eval_shape(fn, *args)


TRANSFORMATIONS = {
    "jit": jax.jit,
    "grad": lambda fn: jax.grad(lambda *args: jnp.sum(fn(*args))),
    "vmap": lambda fn: lambda *args: jax.vmap(fn)(*(jax.tree.map(lambda leaf: leaf[None], a) for a in args)),
    "eval_shape": shapes,
}


@pytest.mark.parametrize("transform", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_a_graphed_callable_in_a_transformation_says_so(transform):
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


def test_a_backward_that_was_refused_in_a_transformation_still_waits():
    call, params = build(param_grads="aliased")
    call(params, X)
    with pytest.raises(CallableError):
        jax.jit(lambda dy: call.backward(dy)[1])(DY)
    chain.assert_close(call.backward(DY), truth(params, X))
    with pytest.raises(CallableError, match=r"jax\.jit, jax\.grad"):
        jax.jit(lambda x: (call.zero_grads(), x))(X)
    chain.assert_close(call.main_grad, truth(params, X)[0])
