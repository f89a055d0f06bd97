"""Arguments that `make_graphed_callables` and `run` refuse, including the invalid orders of Transformer Engine's tests."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jgraph
from jgraph.errors import CallableError, JgraphError, OrderError
from jgraph.schedule import generate
from tests.callables import chain

pytestmark = pytest.mark.once

GOLDENS = json.loads((Path(__file__).parents[1] / "schedule/goldens/orders.json").read_text())
INVALID = {row["name"]: row for row in GOLDENS["invalid"]}

# Rows that Transformer Engine refuses and jgraph supports. tests/schedule/test_order.py gives the reasons.
SUPPORTED = {"two_dgrads_then_two_wgrads", "no_layers_per_chunk", "int_layers_per_chunk_with_wgrad"}
# jgraph needs one sample per callable, because all microbatches of a callable have the same shapes. Transformer Engine needs
# one per microbatch. Both must refuse a wrong number of samples, so this row passes two.
SAMPLES = {"sample_args_mismatch": 2}


def build_row(row):
    args = row["args"]
    layers = args.get("nlpc", args["layers_per_chunk"])
    count = sum(args["layers_per_chunk"])
    delayed = args.get("dw", [])
    fns, params = chain.make_chain(count)
    return jgraph.make_graphed_callables(
        fns,
        params,
        chain.sample(SAMPLES.get(row["name"], count)),
        order=args["order"],
        num_layers_per_chunk=layers,
        delay_wgrad=[c in delayed for c in range(len(args["layers_per_chunk"]))],
        reuse_buffers=args.get("reuse", False),
        training=args.get("training", True),
    )


@pytest.mark.parametrize("name", sorted(set(INVALID) - SUPPORTED))
def test_an_invalid_golden_row_raises_a_jgraph_error(name):
    with pytest.raises(JgraphError) as error:
        build_row(INVALID[name])
    assert isinstance(error.value, OrderError | CallableError)


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_a_golden_row_that_jgraph_supports_builds(name):
    assert len(build_row(INVALID[name])) == 1


@pytest.mark.parametrize(
    ("order", "delay", "text"),
    [
        ([1, -1], True, r"entry 1 is -1, but chunk 1 has no wgrad although delay_wgrad is True.*add one -1.5"),
        ([1, -1, -1.5], False, r"entry 2 is -1.5, a wgrad of chunk 1, although delay_wgrad is False.*delay_wgrad=True"),
        (
            generate("zb-h1", pp=2, microbatches=2),
            False,
            r"is -1.5, a wgrad of chunk 1, although delay_wgrad is False",
        ),
        (
            generate("1f1b", pp=2, microbatches=2),
            True,
            r"although delay_wgrad is True; add one -1.5 for each -1, or pass delay_wgrad=False",
        ),
    ],
)
def test_delay_wgrad_must_match_the_wgrad_entries_of_the_order(order, delay, text):
    with pytest.raises(OrderError, match=text):
        chain.build(2 if not isinstance(order, list) else 1, order=order, delay_wgrad=delay)


def arguments(**kwargs):
    fns, params = chain.make_chain(2)
    return {"callables": fns, "params": params, "sample_args": chain.sample(2), **kwargs}


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        (
            arguments(params=chain.make_chain(3)[1]),
            r"`params` has length 3: must be a tuple of length 2, one value per callable",
        ),
        (arguments(params=chain.make_params(0)), r"`params` is of type dict: must be a tuple of length 2"),
        (
            arguments(sample_args=chain.sample(1)),
            r"`sample_args` has length 1: must be a tuple of length 2, one value per callable",
        ),
        (
            arguments(sample_args=(jnp.ones(3), jnp.ones(3))),
            r"`sample_args` of callable 0 is .*: must be a tuple \(x, \*extra\)",
        ),
        (arguments(sample_kwargs=({},)), r"`sample_kwargs` has length 1: must be a tuple of length 2"),
        (arguments(sample_kwargs=(3, {})), r"`sample_kwargs` of callable 0 is 3: must be a dict"),
        (arguments(devices=5), r"`devices` is 5: must be a list of JAX devices"),
        (arguments(devices=["cpu:0"]), r"`devices` is .*: must be a list of JAX devices"),
        (arguments(order=[[1, -1], [1, -1]], delay_wgrad=1), r"`delay_wgrad` is 1"),
        (arguments(param_grads="cloned"), r"`param_grads` is 'cloned': must be one of owned, aliased"),
        (arguments(callables=(), params=(), sample_args=()), "`callables` is empty"),
        (arguments(callables=(chain.stage, 3)), "callable 1 is int: must be a function or a Flax module"),
        (arguments(reuse_buffers=True), "`reuse_buffers` is True without an order"),
        (arguments(order=[1, -1]), r"the order needs 1 callables .*, but there are 2"),
        (arguments(order=[1, 2, -2, -1], num_layers_per_chunk=[2, 1]), r"the order needs 3 callables .*, but there are 2"),
        (
            arguments(order=[1, 2, -2, -1], devices=jax.devices()[:2]),
            r"`devices` has 2 devices for 1 ranks: must have one per rank",
        ),
        (arguments(training=False, order=[1, 2, -2, -1]), "`training` is False, which builds no backward: must be True"),
        (arguments(training=False, delay_wgrad=True), "`training` is False"),
        (arguments(compiler_options={"xla_gpu_no_such_option": 1}), "xla_gpu_no_such_option"),
    ],
)
def test_inconsistent_arguments_are_refused(kwargs, text):
    with pytest.raises(JgraphError, match=text):
        jgraph.make_graphed_callables(kwargs.pop("callables"), kwargs.pop("params"), kwargs.pop("sample_args"), **kwargs)


def test_a_callable_must_accept_the_output_of_the_callable_before_it():
    wide = (jnp.ones((chain.B, chain.D)),), (jnp.ones((chain.B, 5)),)
    fns = (lambda p, x: x * p, lambda p, x: x * p)
    with pytest.raises(
        CallableError, match=r"callable 1 does not take the output of callable 0: y is float32\[3, 4\], built for"
    ):
        jgraph.make_graphed_callables(fns, (jnp.ones(()),) * 2, wide, order=[1, 2, -2, -1])
    tokens = (jnp.ones((chain.B,), jnp.int32),)
    with pytest.raises(CallableError, match="callable 1 takes integers for x: only the first"):
        jgraph.make_graphed_callables(
            (fns[0], lambda p, x: p[x]), (jnp.ones(()), jnp.ones(9)), (wide[0], tokens), order=[1, 2, -2, -1]
        )


def test_params_on_several_devices_require_the_devices_argument():
    fns, params = chain.make_chain(2)
    spread = tuple(jax.device_put(p, d) for p, d in zip(params, jax.devices(), strict=False))
    with pytest.raises(CallableError, match="`params` are on 2 devices: pass one device per rank"):
        jgraph.make_graphed_callables(fns, spread, chain.sample(2))


def test_an_x_with_integer_and_floating_leaves_is_refused_with_the_path():
    with pytest.raises(CallableError, match=r"x has floating leaves, but ids is int32: pass leaves without"):
        jgraph.make_graphed_callables(
            lambda params, x: x["h"] * params, jnp.ones(()), ({"h": jnp.ones(3), "ids": jnp.arange(3, dtype=jnp.int32)},)
        )


def test_an_integer_output_is_refused():
    with pytest.raises(CallableError, match=r"callable 0: y is int32; every output must be floating"):
        jgraph.make_graphed_callables(lambda params, x: (x * params).astype(jnp.int32), jnp.ones(()), (jnp.ones(3),))


X = jnp.ones((chain.B, chain.D))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"inputs": [X, X]}, "`inputs` has length 2: must be a tuple of length 1, one value per microbatch"),
        ({"inputs": [X[:1]]}, r"inputs\[0\] is float32\[1, 4\], built for float32\[3, 4\]"),
        ({"loss_args": [(X,), (X,)]}, "`loss_args` has length 2: must be a tuple of length 1"),
        ({"extra": [(X,)]}, "`extra` must be None, because no callable takes arguments after x"),
        ({"inputs": X[None]}, "`inputs` is of type ArrayImpl: must be a tuple of length 1"),
        ({"loss_args": [X]}, r"`loss_args\[0\]` is ArrayImpl: must be a tuple of arguments"),
        ({"loss_fn": None}, "`loss_fn` is NoneType: must be a function"),
        ({"loss_fn": lambda y, t: (jnp.sum(y), y)}, "loss_fn returns a tuple: must be one floating scalar"),
        ({"step": 2**40}, "`step` is 1099511627776: must be an integer"),
        ({"outputs": "some"}, "`outputs` is 'some': must be one of drop, keep"),
        ({"join": "all"}, "`join` is 'all': must be one of segments, nothing"),
        ({"params": (chain.make_params(0),)}, "`params` has length 1: must be a tuple of length 2"),
        ({"loss_fn": lambda y, t: y}, r"loss_fn returns float32\[3, 4\]: must be a floating scalar"),
        ({"order": [1, -1]}, r"the order needs 1 callables .*, but there are 2"),
        ({"order": [1, 2, -1, -2]}, "a later entry; move it after"),
    ],
)
def test_run_refuses_invalid_arguments(change, text):
    graphed, _ = chain.build(2, order=[1, 2, -2, -1])
    given = {"order": None, "inputs": [X], "loss_fn": chain.loss_fn, "loss_args": [(X,)], **change}
    with pytest.raises(JgraphError, match=text):
        graphed.run(given.pop("order"), given.pop("inputs"), given.pop("loss_fn"), **given)


def test_run_requires_an_order():
    graphed, _ = chain.build(1)
    with pytest.raises(OrderError, match="built without an order"):
        graphed.run(None, [X], chain.loss_fn, loss_args=[(X,)])


@pytest.mark.long
def test_run_requires_params_on_the_device_of_their_rank():
    schedule = generate("1f1b", pp=2, microbatches=2)
    graphed, _ = chain.build(2, order=schedule, devices=jax.devices()[:2])
    xs, loss_args = chain.batches(2)
    with pytest.raises(CallableError, match=r"params\[1\]/b is on .*; pass graphed.place\(params\) to run"):
        graphed.run(None, xs, chain.loss_fn, loss_args=loss_args)


def test_run_refuses_an_order_with_another_placement_than_the_build():
    schedule = generate("1f1b", pp=2, microbatches=1)
    graphed, params = chain.build(2, order=schedule, devices=jax.devices()[:2])
    xs, loss_args = chain.batches(1)
    placed = graphed.place(params)
    with pytest.raises(OrderError, match="the order needs callables on different devices than they were built for"):
        graphed.run([1, 2, -2, -1], xs, chain.loss_fn, params=placed, loss_args=loss_args)
    graphed.run(schedule, xs, chain.loss_fn, params=placed, loss_args=loss_args)


def test_run_requires_a_random_key_if_a_callable_takes_one():
    def noisy(params, x, *, key):
        return x * params * jax.random.bernoulli(key, 0.5, x.shape)

    graphed = jgraph.make_graphed_callables(noisy, jnp.ones(()), (X,), sample_kwargs={"key": jax.random.key(0)}, order=[1, -1])
    with pytest.raises(CallableError, match=r"callable 0 takes the keyword argument key: pass `key` to run"):
        graphed.run(None, [X], chain.loss_fn, loss_args=[(X,)])
    with pytest.raises(CallableError, match=r"`key` is 3: must be a random key of the sample's dtype"):
        graphed.run(None, [X], chain.loss_fn, loss_args=[(X,)], key=3)


def test_run_uses_the_params_of_the_build_until_it_receives_params():
    graphed, params = chain.build(1, order=[1, -1])
    xs, loss_args = chain.batches(1)
    first = graphed.run(None, xs, chain.loss_fn, loss_args=loss_args)
    second = graphed.run(None, xs, chain.loss_fn, loss_args=loss_args, params=params)
    chain.assert_same_bits(first.losses, second.losses)
    with pytest.raises(CallableError, match="an earlier run got params"):
        graphed.run(None, xs, chain.loss_fn, loss_args=loss_args)


NOTHING_TO_DELAY = {
    "scales": (lambda p, x: x * p["scale"], {"scale": jnp.ones((chain.D,))}),
    "integers": (lambda p, x: x * p["n"], {"n": jnp.ones((chain.D,), jnp.int32)}),
    "no parameters": (lambda p, x: jnp.tanh(x), {}),
}


@pytest.mark.parametrize(("fn", "params"), NOTHING_TO_DELAY.values(), ids=NOTHING_TO_DELAY)
def test_the_build_refuses_a_wgrad_entry_of_a_callable_without_delayed_matmuls(fn, params):
    fns, every = (chain.stage, fn), (chain.make_params(0), params)
    order = [1, 2, -2, -1, -2.5, -1.5]
    with pytest.raises(OrderError, match=r"entry 4 is -2.5, .* callable 1 has nothing to delay.*\[True, False\]") as error:
        jgraph.make_graphed_callables(fns, every, chain.sample(2), order=order, delay_wgrad=True)
    assert (error.value.position, error.value.rank) == (4, None)
    # The advice of the error message works.
    jgraph.make_graphed_callables(fns, every, chain.sample(2), order=[1, 2, -2, -1, -1.5], delay_wgrad=[True, False])


def test_a_refused_wgrad_entry_is_reported_with_its_rank_and_position():
    fns, every = zip(*((chain.stage, chain.make_params(0)), NOTHING_TO_DELAY["scales"]), strict=True)
    schedule = generate("zb-h1", pp=2, microbatches=2)
    with pytest.raises(OrderError, match="nothing to delay") as error:
        jgraph.make_graphed_callables(fns, every, chain.sample(2), order=schedule, delay_wgrad=True, devices=jax.devices()[:2])
    assert error.value.rank == 1
    assert schedule[1][error.value.position].kind == "wgrad"


@pytest.mark.parametrize(("fn", "params"), NOTHING_TO_DELAY.values(), ids=NOTHING_TO_DELAY)
@pytest.mark.parametrize("param_grads", ["owned", "aliased"])
def test_a_callable_without_delayed_matmuls_has_no_wgrad_executable(fn, params, param_grads):
    graphed = jgraph.make_graphed_callables(
        (chain.stage, fn), (chain.make_params(0), params), chain.sample(2), delay_wgrad=True, param_grads=param_grads
    )
    assert set(graphed[0].parts) == {"forward", "dgrad", "wgrad"}
    assert set(graphed[1].parts) == {"forward", "dgrad"}
    graphed[1](params, X)
    dx = graphed[1].dgrad(2 * X)
    grads = graphed[1].wgrad()
    expected, expected_dx = jax.vjp(fn, params, X)[1](2 * X)
    chain.assert_close(dx, expected_dx)
    for name, gradient in grads.items():
        if gradient is not None:
            chain.assert_close(gradient, expected[name])
    assert graphed[1].pending == ()


@pytest.mark.parametrize("join", ["segments", "nothing"])
def test_run_refuses_a_wgrad_entry_of_a_callable_without_delayed_matmuls(join):
    fn, params = NOTHING_TO_DELAY["scales"]
    graphed = jgraph.make_graphed_callables(fn, params, chain.sample(1)[0], delay_wgrad=True)
    with pytest.raises(OrderError, match=r"entry 2 is -1.5.* nothing to delay") as error:
        graphed.run([1, -1, -1.5], [X], chain.loss_fn, loss_args=[(X,)], join=join)
    assert error.value.position == 2
