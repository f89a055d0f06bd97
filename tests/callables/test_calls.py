"""Single calls of graphed callables: values, ownership of the results, and errors for wrong calls."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jgraph
from jgraph.callables._packs import packs_of
from jgraph.callables.shaped import shape_callable
from jgraph.errors import CallableError, OwnershipError
from jgraph.xla import alias_map
from tests.autodiff.stages import grouped_mlp, grouped_params, hidden
from tests.callables import chain

X = jnp.linspace(-1.0, 1.0, chain.B * chain.D).reshape(chain.B, chain.D)
OTHER = jnp.flip(X) * 2
DY = jnp.cos(X)


def build(**kwargs):
    graphed, params = chain.build(1, **kwargs)
    return graphed[0], params[0]


def reference(params, x=X, dy=DY):
    y, vjp = jax.vjp(chain.stage, params, x)
    grads, dx = vjp(dy)
    return y, grads, dx


def test_forward_and_backward_equal_jax_vjp():
    call, params = build()
    y = call(params, X)
    grads, dx = call.backward(DY)
    chain.assert_close((y, grads, dx), reference(params))


def squares(params, x):
    """Saves two residuals in float32 and two in bfloat16. Small integers are exact in both."""
    wide, narrow = [x @ w for w in params], [x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16) for w in params]
    return sum(h * h for h in wide) + sum(h * h for h in narrow).astype(x.dtype)


@pytest.mark.long
def test_small_residuals_are_one_array_per_dtype_between_forward_and_backward():
    signs = [jax.random.randint(jax.random.key(i), (chain.D, chain.D), -1, 2).astype(jnp.float32) for i in range(2)]
    x = jnp.round(2 * X)
    call = jgraph.make_graphed_callables(squares, signs, (x,))[0]
    residuals = zip(call.shaped.residuals.avals, call.shaped.residuals_from, strict=True)
    computed = [aval.dtype for aval, source in residuals if source is None]
    assert min(computed.count(jnp.dtype(dtype)) for dtype in ("float32", "bfloat16")) > 1
    assert len(call.parts["forward"].io.outs) == 1 + len(set(computed))
    y = call(signs, x)
    expected, vjp = jax.vjp(squares, signs, x)
    chain.assert_close((y, *call.backward(x)), (expected, *vjp(x)))


@pytest.mark.parametrize(("rows", "is_packed"), [(2**10, True), (2**10 + 1, False)])
def test_residuals_of_more_than_a_megabyte_are_not_packed(rows, is_packed):
    params = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 2
    x = jax.ShapeDtypeStruct((rows, 256), jnp.float32)
    shaped = shape_callable(lambda ws, x: jnp.sin(jnp.sin(x @ ws[0]) @ ws[1]), 0, params, (x,), {}, device=None)
    assert len([source for source in shaped.residuals_from if source is None]) > 1
    assert bool(packs_of(shaped)) == is_packed


def test_dgrad_followed_by_wgrad_equals_the_backward():
    call, params = build(delay_wgrad=True)
    y = call(params, X)
    dx = call.dgrad(DY)
    grads = call.wgrad()
    chain.assert_close((y, grads, dx), reference(params))
    assert isinstance(grads["w"], jgraph.Borrowed)
    assert isinstance(grads["b"], jax.Array)


@pytest.mark.long
def test_wgrads_of_grouped_matmuls_can_be_delayed():
    params, x = grouped_params(), hidden()
    call = jgraph.make_graphed_callables(grouped_mlp, params, (x,), delay_wgrad=True)[0]
    for _ in range(2):  # main_grad accumulates
        y = call(params, x)
        dx = call.dgrad(x)
        grads = call.wgrad()

    @jax.jit
    def plain(params, x):
        y, vjp = jax.vjp(grouped_mlp, params, x)
        return y, *vjp(x)

    expected, one, expected_dx = plain(params, x)
    chain.assert_close((y, dx, grads), (expected, expected_dx, jax.tree.map(lambda g: 2 * g, one)))
    assert all(isinstance(grad, jgraph.Borrowed) for grad in grads.values())


def test_microbatches_are_processed_first_in_first_out():
    call, params = build(delay_wgrad=True, order=[1, 1, 1, -1, -1, -1, -1.5, -1.5, -1.5])
    xs = [X, OTHER, X + 1]
    for x in xs:
        call(params, x)
    for x in xs:
        chain.assert_close(call.dgrad(DY), reference(params, x)[2])
    total = jax.tree.map(jnp.zeros_like, params)
    for x in xs:
        total = jax.tree.map(jnp.add, total, reference(params, x)[1])
        grads = call.wgrad()
        chain.assert_close(grads["w"].value, total["w"])  # main_grad accumulates
        chain.assert_close(grads["b"], reference(params, x)[1]["b"])  # an owned gradient belongs to one microbatch


def test_parameters_may_contain_none():
    params = {**chain.make_params(0), "absent": None}
    for kwargs in ({}, {"param_grads": "aliased"}, {"delay_wgrad": True}):
        call = jgraph.make_graphed_callables(chain.stage, params, (X,), **kwargs)[0]
        call(params, X)
        grads, dx = call.backward(DY)
        chain.assert_close((grads, dx), reference(params)[1:])
        assert grads["absent"] is None


def test_an_integer_x_has_no_gradient():
    table = {"e": jnp.arange(12.0).reshape(4, 3)}
    graphed = jgraph.make_graphed_callables(
        lambda params, tokens: params["e"][tokens], table, (jax.ShapeDtypeStruct((2,), jnp.int32),)
    )
    y = graphed[0](table, jnp.array([1, 3], jnp.int32))
    grads, dx = graphed[0].backward(jnp.ones_like(y))
    assert dx is None
    np.testing.assert_array_equal(grads["e"][1], [1, 1, 1])
    np.testing.assert_array_equal(grads["e"][0], [0, 0, 0])


# Owned gradients


def test_retained_gradients_survive_the_next_replay():
    call, params = build()
    call(params, X)
    kept, _ = call.backward(DY)
    before = jax.tree.map(np.array, kept)
    call(params, OTHER)
    new, _ = call.backward(DY)
    chain.assert_same_bits(kept, before)
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(new), strict=True):
        assert a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer()
    total = jax.tree.map(jnp.add, kept, new)
    chain.assert_close(total, jax.tree.map(jnp.add, reference(params)[1], reference(params, OTHER)[1]))


def test_retained_gradients_survive_the_next_run():
    graphed, _ = chain.build(2, order=[1, 2, -2, -1], reuse_buffers=True)
    xs, loss_args = chain.batches(1)
    kept = graphed.run(None, xs, chain.loss_fn, loss_args=loss_args).grads
    before = jax.tree.map(np.array, kept)
    graphed.run(None, [xs[0] * 2], chain.loss_fn, loss_args=loss_args)
    chain.assert_same_bits(kept, before)


# Aliased gradients


@pytest.mark.parametrize("delay", [False, True])
def test_aliased_gradients_keep_their_address(delay):
    call, params = build(param_grads="aliased", delay_wgrad=delay)
    addresses = set()
    for x in (X, OTHER, X):
        call(params, x)
        grads, _ = call.backward(DY)
        addresses.add(tuple(g.value.unsafe_buffer_pointer() for g in grads.values()))
    call.zero_grads()
    addresses.add(tuple(g.value.unsafe_buffer_pointer() for g in call.main_grad.values()))
    assert len(addresses) == 1


@pytest.mark.parametrize("join", ["segments", "nothing"])
def test_main_grad_keeps_its_address_across_runs_and_starts_at_zero(join):
    graphed, _ = chain.build(2, order=[1, 2, -2, -1, -2.5, -1.5] * 2, delay_wgrad=True, reuse_buffers=True)
    xs, loss_args = chain.batches(2)
    seen = []
    for _ in range(3):
        run = graphed.run(None, xs, chain.loss_fn, loss_args=loss_args, join=join)
        seen.append([(g["w"].value.unsafe_buffer_pointer(), g["w"].copy()) for g in run.grads])
    for later in seen[1:]:
        for (address, value), (first_address, first_value) in zip(later, seen[0], strict=True):
            assert address == first_address
            np.testing.assert_array_equal(value, first_value)


def test_the_compiled_program_aliases_main_grad_to_its_output():
    call, _ = build(delay_wgrad=True)
    assert len(call.parts["wgrad"].adds) == 2
    assert alias_map(call.parts["wgrad"].compiled) == {0: 0, 1: 1}
    assert alias_map(call.parts["forward"].compiled) == {}


def test_the_error_of_a_stale_handle_names_its_owner_the_update_and_copy():
    call, params = build(param_grads="aliased")
    call(params, X)
    old, _ = call.backward(DY)
    kept = old["w"].copy()
    call(params, OTHER)
    call.backward(DY)
    with pytest.raises(
        OwnershipError,
        match=r"main_grad of callable 0, 'w', was updated in place by the backward of microbatch 1 \(update 2\).*stale.*copy",
    ) as error:
        _ = old["w"].value
    assert error.value.owner == "main_grad of callable 0"
    with pytest.raises(OwnershipError, match="stale"):
        jax.jit(lambda g: g)(old)
    with pytest.raises(OwnershipError, match="stale"):
        np.asarray(old["w"])
    assert "updated in place" in repr(old["w"])
    chain.assert_close(kept, reference(params)[1]["w"])


def test_zero_grads_run_and_reset_invalidate_handles():
    graphed, params = chain.build(1, order=[1, -1], param_grads="aliased")
    for end, word in (
        (graphed.zero_grads, "set to zero"),
        (lambda: graphed.run(None, [X], chain.loss_fn, loss_args=[(DY,)]), r"run 1 \(update"),
        (graphed.reset, "freed by reset"),
    ):
        graphed[0](params[0], X)
        old, _ = graphed[0].backward(DY)
        end()
        with pytest.raises(OwnershipError, match=word):
            _ = old["w"].value


def test_a_jitted_function_accepts_a_tree_of_handles():
    call, params = build(param_grads="aliased")
    call(params, X)
    grads, _ = call.backward(DY)
    new = jax.jit(lambda p, g: jax.tree.map(lambda a, b: a - b, p, g))(params, grads)
    chain.assert_close(new, jax.tree.map(jnp.subtract, params, reference(params)[1]))


def test_a_numpy_view_of_a_handle_does_not_prevent_the_update_in_place():
    call, params = build(param_grads="aliased")
    call(params, X)
    grads, _ = call.backward(DY)
    address, view = grads["w"].value.unsafe_buffer_pointer(), np.asarray(grads["w"])
    call(params, X)
    again, _ = call.backward(DY)
    assert again["w"].value.unsafe_buffer_pointer() == address
    chain.assert_close(2 * view, again["w"].value)


def test_a_handle_to_main_grad_is_refused_as_an_argument():
    square = {"w": jnp.eye(chain.D)}
    graphed = jgraph.make_graphed_callables(
        lambda p, x: x @ p["w"], square, (square["w"],), order=[1, -1], param_grads="aliased"
    )
    graphed[0](square, square["w"])
    grads, _ = graphed[0].backward(square["w"])
    for misuse in (
        lambda: graphed[0](square, grads["w"]),
        lambda: graphed[0](grads, square["w"]),
        lambda: graphed.run(None, [grads["w"]], jnp.sum),
    ):
        with pytest.raises(OwnershipError, match=r"main_grad of callable 0.*cannot be an argument.*\.copy\(\)"):
            misuse()
    graphed[0](square, grads["w"].copy())
    with pytest.raises(OwnershipError, match="cannot be an argument"):
        graphed[0].backward(grads["w"])
    graphed[0].backward(square["w"])


# State fixed at build time


def test_changes_to_the_argument_lists_after_the_build_have_no_effect():
    delay, fns, params = [True], [chain.stage], [chain.make_params(0)]
    graphed = jgraph.make_graphed_callables(fns, params, [(X,)], order=[1, -1, -1.5], delay_wgrad=delay)
    parts = graphed[0].parts
    delay[0] = False
    fns[0] = None
    for _ in range(2):
        graphed[0](params[0], X)
        graphed[0].dgrad(DY)
        grads = graphed[0].wgrad()
        assert isinstance(grads["w"], jgraph.Borrowed)
    graphed.run([1, -1, -1.5] * 2, [X, X], chain.loss_fn, loss_args=[(DY,), (DY,)])
    assert graphed[0].parts is parts


def test_a_replay_neither_traces_nor_compiles():
    traces = []

    def counted(params, x):
        traces.append(None)
        return chain.stage(params, x)

    compiled = []
    listen = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    params = chain.make_params(0)
    graphed = jgraph.make_graphed_callables(counted, params, (X,), order=[1, -1])
    graphed.run(None, [X], chain.loss_fn, loss_args=[(DY,)])
    counts = len(traces), len(compiled)
    assert min(counts) > 0
    for _ in range(3):
        graphed[0](params, OTHER)
        graphed[0].backward(DY)
        graphed.run(None, [OTHER], chain.loss_fn, loss_args=[(DY,)])
    assert (len(traces), len(compiled)) == counts


def test_the_build_uses_the_jax_config_of_the_calling_thread():
    # These settings of JAX are thread-local.
    with jax.default_matmul_precision("highest"):
        call, _ = build()
    assert "operand_precision={highest,highest}" in call.parts["forward"].compiled.as_text()


# Donation


@pytest.mark.long
def test_the_callers_arrays_are_never_donated_or_changed():
    """Runs 100 steps with reused buffers, forced garbage collection and new arrays that overwrite freed memory."""

    def masked(params, x, segments):
        return chain.stage(params, x) * (segments > 0)[:, None]

    fns, params = (masked,) * 2, tuple(map(chain.make_params, range(2)))
    segments = jnp.array([1, 0, 2], jnp.int32)
    order = [1, 2, -2, -1, -2.5, -1.5]
    graphed = jgraph.make_graphed_callables(
        fns, params, ((X, segments),) * 2, order=order, delay_wgrad=True, reuse_buffers=True, param_grads="aliased"
    )
    held = {"params": params, "x": X, "segments": segments, "target": DY}
    before = jax.tree.map(np.array, held)
    for step in range(100):
        pressure = [jnp.full((chain.B, chain.D), float(i)) for i in range(20)]
        if step % 2:
            graphed.run(None, [X], chain.loss_fn, loss_args=[(DY,)], extra=[(segments,)])
        else:
            y = graphed[1](params[1], graphed[0](params[0], X, segments), segments)
            dx = graphed[1].dgrad(jnp.ones_like(y))
            graphed[0].dgrad(dx)
            graphed[1].wgrad()
            graphed[0].wgrad()
        if step % 10 == 0:
            gc.collect()
        jax.block_until_ready(pressure)
    chain.assert_same_bits(held, before)


def test_the_residuals_of_a_run_are_donated_to_their_last_consumer():
    graphed, _ = chain.build(2, order=[1, 2, -2, -1] * 2, reuse_buffers=True)
    xs, loss_args = chain.batches(2)
    graphed.run(None, xs, chain.loss_fn, loss_args=loss_args, join="nothing")
    (plan,) = graphed._plans.values()
    donated = [r for instruction in plan.instructions for r in instruction.executable.io.donated]
    assert donated
    flow = plan.flow
    assert not set(donated) & {*flow.named.values(), *flow.results.values()}
    for instruction in plan.instructions:
        count = len(instruction.executable.io.sums) + len(instruction.executable.io.donated)
        assert set(alias_map(instruction.executable.compiled).values()) == set(range(count))


# Wrong calls


def test_an_argument_error_lists_every_mismatch_with_its_path():
    call, params = build()
    wrong = {"w": params["w"].astype(jnp.bfloat16), "v": params["v"], "extra": X}
    with pytest.raises(CallableError) as error:
        call(wrong, X[:2])
    assert error.value.mismatches == (
        "params/b is missing",
        "params/w is bfloat16[4, 8], built for float32[4, 8]",
        "params/extra is unexpected",
        "x is float32[2, 4], built for float32[3, 4]",
    )
    assert all(text in str(error.value) for text in error.value.mismatches)
    y = call(params, X)  # the refused call left no pending microbatch
    call.backward(jnp.ones_like(y))
    with pytest.raises(CallableError, match="backward has no preceding forward"):
        call.backward(DY)


def test_params_on_another_device_are_refused():
    call, params = build()
    there = jax.device_put(params, jax.devices()[1])
    with pytest.raises(CallableError, match=r"params/b is on .*1, built for .*0"):
        call(there, X)


def test_a_sharded_array_is_refused():
    call, params = build()
    mesh = jax.make_mesh((3,), ("p",), devices=jax.devices()[:3])
    spread = jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("p")))
    with pytest.raises(CallableError, match=r"x is on .*0.*1.*2, built for"):
        call(params, spread)


def test_a_refused_dy_leaves_the_microbatch_pending():
    call, params = build()
    call(params, X)
    for wrong, text in (
        (DY[:1], r"dy is float32\[1, 4\]"),
        ({"y": DY}, "dy/y is unexpected"),
        (DY.astype(jnp.bfloat16), "bfloat16"),
    ):
        with pytest.raises(CallableError, match=text):
            call.backward(wrong)
    chain.assert_close(call.backward(DY)[1], reference(params)[2])


def scaled(params, x, *, scale):
    return chain.stage(params, x) * scale


def test_a_missing_or_unknown_keyword_argument_is_refused():
    params, scale = chain.make_params(0), jnp.float32(2)
    graphed = jgraph.make_graphed_callables(scaled, params, (X,), sample_kwargs={"scale": scale})
    chain.assert_close(graphed[0](params, X, scale=scale), 2 * chain.stage(params, X))
    with pytest.raises(CallableError, match="scale is missing"):
        graphed[0](params, X)
    with pytest.raises(CallableError, match="mask is unexpected"):
        graphed[0](params, X, scale=scale, mask=X)
    with pytest.raises(CallableError, match="1 arguments after x, built for 0"):
        graphed[0](params, X, X, scale=scale)


def test_a_numpy_input_may_be_overwritten_after_the_call():
    call, params = build()
    x = np.array(X)
    call(params, x)
    x[:] = 0
    chain.assert_close(call.backward(DY)[0], reference(params)[1])


def test_backward_reports_an_input_deleted_by_the_caller():
    call, params = build()
    x = jnp.array(X)
    call(params, x)
    x.delete()
    with pytest.raises(OwnershipError, match=r"backward needs 1 arrays of this microbatch.*keep x, dy and extra"):
        call.backward(DY)


def test_backward_reports_parameters_donated_by_the_caller():
    call, params = build()
    call(params, X)
    jax.jit(lambda p: jax.tree.map(lambda a: a + 1, p), donate_argnums=0)(params)
    with pytest.raises(CallableError, match="params/w was donated or deleted by the caller"):
        call.backward(DY)


@pytest.mark.parametrize("argument", ["inputs", "loss_args", "params"])
def test_run_names_the_argument_deleted_by_the_caller(argument):
    graphed, params = chain.build(1, order=[1, -1], reuse_buffers=True)
    x, target = jnp.array(X), jnp.array(DY)
    {"inputs": x, "loss_args": target, "params": params[0]["w"]}[argument].delete()
    with pytest.raises(CallableError, match=rf"{argument}\[0\]/?.* was donated or deleted by the caller"):
        graphed.run(None, [x], chain.loss_fn, loss_args=[(target,)], params=params)


def test_dgrad_and_wgrad_out_of_order_are_refused():
    call, params = build(delay_wgrad=True)
    with pytest.raises(CallableError, match="dgrad has no preceding forward"):
        call.dgrad(DY)
    call(params, X)
    with pytest.raises(CallableError, match="wgrad has no preceding dgrad"):
        call.wgrad()
    whole, _ = build()
    with pytest.raises(CallableError, match=r"delay_wgrad=False; call backward"):
        whole.dgrad(DY)


def test_backward_is_refused_while_a_delayed_wgrad_is_pending():
    call, params = build(delay_wgrad=True)
    call(params, X)
    call.dgrad(DY)
    call(params, OTHER)
    with pytest.raises(CallableError, match="1 microbatches wait for their wgrad, which must run first"):
        call.backward(DY)
    chain.assert_close(call.wgrad()["w"].value, reference(params)[1]["w"])
    chain.assert_close(call.backward(DY)[1], reference(params, OTHER)[2])


def test_the_build_refuses_complex_parameters():
    with pytest.raises(CallableError, match="params/w is complex64; pass its real and imaginary parts"):
        jgraph.make_graphed_callables(chain.stage, {**chain.make_params(0), "w": jnp.ones((chain.D, chain.D), complex)}, (X,))


def matmul(params, x):
    return x @ params["w"]


@pytest.mark.parametrize("place", ["x", "dy"])
def test_the_array_of_main_grad_is_refused_as_an_argument(place):
    eye = jnp.eye(chain.D)
    graphed = jgraph.make_graphed_callables(matmul, {"w": eye}, (eye,), order=[1, -1, -1.5], delay_wgrad=True)
    call, params = graphed[0], {"w": eye + 1}
    call(params, eye)
    call.dgrad(eye)
    total = call.wgrad()["w"].value
    if place == "x":
        with pytest.raises(OwnershipError, match="run updates main_grad of callable 0 in place and was given that array"):
            graphed.run(None, [total], jnp.sum, params=[params])
    total = call.main_grad["w"].value
    call(params, total if place == "x" else eye)
    call.dgrad(total if place == "dy" else eye)
    with pytest.raises(OwnershipError, match="wgrad updates main_grad, 'w', in place, and reads the same array"):
        call.wgrad()


def test_run_is_refused_while_microbatches_of_single_calls_are_pending():
    graphed, params = chain.build(1, order=[1, -1])
    graphed[0](params[0], X)
    with pytest.raises(CallableError, match="callable 0 has 1 microbatches that wait"):
        graphed.run(None, [X], chain.loss_fn, loss_args=[(DY,)])


# Modules and modes


class Dense(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(chain.D, chain.D, rngs=rngs)
        self.drop = nnx.Dropout(0.5)

    def __call__(self, x, *, key):
        return self.drop(self.linear(x), rngs=key)


def test_a_callback_gets_a_parameter_that_nothing_else_reads(capfd):
    def stage(params, x):
        jax.debug.print("scale = {}", params["scale"])
        return x @ params["w"]

    params = {"scale": jnp.full((), 7.0), "w": jnp.ones((chain.D, chain.D))}
    jgraph.make_graphed_callables(stage, params, (X,))[0](params, X)
    jax.effects_barrier()
    assert "scale = 7.0" in capfd.readouterr().out


@pytest.mark.long
def test_an_nnx_module_takes_its_dropout_key_as_an_argument():
    module, key = Dense(nnx.Rngs(0)), jax.random.key(3)
    params = nnx.state(module, nnx.Param)
    graphed = jgraph.make_graphed_callables(module, params, (X,), sample_kwargs={"key": key})
    y = graphed[0](params, X, key=key)
    np.testing.assert_array_equal(np.asarray(y) == 0, np.asarray(module(X, key=key)) == 0)
    again, other = graphed[0].evaluate(params, X, key=key), graphed[0].evaluate(params, X, key=jax.random.key(4))
    np.testing.assert_array_equal(y, again)
    assert (np.asarray(y) != np.asarray(other)).any()
    grads, _ = graphed[0].backward(DY)
    expected = jax.grad(lambda p: jnp.vdot(nnx.merge(nnx.graphdef(module), p)(X, key=key), DY))(params)
    chain.assert_close(grads, expected)


def test_a_linen_module_can_be_graphed():
    module = linen.Dense(5)
    params = module.init(jax.random.key(0), X)
    graphed = jgraph.make_graphed_callables(module, params, (X,))
    y = graphed[0](params, X)
    grads, dx = graphed[0].backward(jnp.ones_like(y))
    expected = jax.grad(lambda p, x: jnp.sum(module.apply(p, x)), argnums=(0, 1))(params, X)
    chain.assert_close((y, grads, dx), (module.apply(params, X), *expected))


def test_a_module_in_another_mode_than_the_build_is_refused():
    module, key = Dense(nnx.Rngs(0)), jax.random.key(0)
    params, kwargs = nnx.state(module, nnx.Param), {"sample_kwargs": {"key": key}}
    with pytest.raises(CallableError, match=r"drop has deterministic=False, .*training=False; call \.eval\(\)"):
        jgraph.make_graphed_callables(module, params, (X,), training=False, **kwargs)
    graphed = jgraph.make_graphed_callables(module, params, (X,), **kwargs)
    module.eval()
    with pytest.raises(CallableError, match=r"callable 0: drop has deterministic=True, .*training=True; call \.train\(\)"):
        graphed[0](params, X, key=key)
    inference = jgraph.make_graphed_callables(module, params, (X,), training=False, **kwargs)
    chain.assert_close(inference[0](params, X, key=key), module(X, key=key))
    with pytest.raises(CallableError, match="training=False and has no backward"):
        inference[0].backward(DY)


def test_a_module_with_mutable_state_is_refused():
    module = nnx.BatchNorm(chain.D, rngs=nnx.Rngs(0))
    with pytest.raises(CallableError, match=r"callable 0 has variables besides its parameters \(BatchStat\)"):
        jgraph.make_graphed_callables(module, nnx.state(module, nnx.Param), (X,))


# Reset and failures


def test_reset_frees_all_memory_and_later_calls_are_refused():
    gc.collect()
    before = len(jax.live_arrays())
    graphed, params = chain.build(2, order=[1, 2, -2, -1], reuse_buffers=True, param_grads="aliased")
    y = graphed[0](params[0], X)
    graphed[1](params[1], y)
    graphed[1].backward(DY)
    graphed[0](params[0], X)
    graphed.reset()
    uses = {
        "call": lambda g: g[0](params[0], X),
        "backward": lambda g: g[0].backward(DY),
        "main_grad": lambda g: g[0].main_grad,
        "zero_grads": lambda g: g.zero_grads(),
        "run": lambda g: g.run(None, [X], chain.loss_fn, loss_args=[(DY,)]),
    }
    for use in uses.values():
        with pytest.raises(CallableError, match="was reset"):
            use(graphed)
    del y, graphed
    gc.collect()
    assert len(jax.live_arrays()) - before == len(jax.tree.leaves(params))


def test_a_failed_build_leaves_no_arrays_and_no_config_changes():
    def broken(params, x):
        raise RuntimeError("no")

    fns, params = chain.make_chain(2)
    gc.collect()
    arrays, config = len(jax.live_arrays()), dict(jax.config.values)
    with pytest.raises(RuntimeError, match="no"):
        jgraph.make_graphed_callables((fns[0], broken), params, chain.sample(2))
    gc.collect()
    assert len(jax.live_arrays()) == arrays
    assert dict(jax.config.values) == config


def test_a_failed_run_leaves_main_grad_usable(monkeypatch):
    graphed, _ = chain.build(1, order=[1, -1], param_grads="aliased")
    graphed.run(None, [X], chain.loss_fn, loss_args=[(DY,)])
    with pytest.raises(CallableError, match=r"inputs\[0\] is float32\[2, 4\]"):
        graphed.run(None, [X[:2]], chain.loss_fn, loss_args=[(DY,)])
    again = graphed.run(None, [X], chain.loss_fn, loss_args=[(DY,)])
    assert np.isfinite(np.asarray(again.grads[0]["w"])).all()


# Random state


def noisy(params, x, *, key):
    return chain.stage(params, x) * jax.random.bernoulli(key, 0.5, x.shape)


@pytest.mark.long
def test_run_folds_the_key_by_step_microbatch_and_callable():
    params, key = tuple(map(chain.make_params, range(2))), jax.random.key(7)
    graphed = jgraph.make_graphed_callables(
        (noisy,) * 2, params, chain.sample(2), sample_kwargs=({"key": key},) * 2, order=[1, 1, 2, 2, -2, -1, -2, -1]
    )
    xs, loss_args = chain.batches(2)

    def eager(step):
        total = 0.0
        for m, (x, args) in enumerate(zip(xs, loss_args, strict=True)):
            for i, p in enumerate(params):
                x = noisy(p, x, key=jgraph.fold_key(key, step=step, microbatch=m, layer=i))
            total += chain.loss_fn(x, *args)
        return total

    runs = [graphed.run(None, xs, chain.loss_fn, loss_args=loss_args, key=key, step=step) for step in (0, 1, 0)]
    for run, step in zip(runs, (0, 1, 0), strict=True):
        chain.assert_close(sum(run.losses), eager(step))
    assert float(sum(runs[0].losses)) != float(sum(runs[1].losses))
    chain.assert_same_bits(runs[0].grads, runs[2].grads)


def test_fold_key_equals_three_folds_by_step_microbatch_and_layer():
    key = jax.random.key(7)
    in_a_step = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, 3), 1), 2)
    assert jgraph.fold_key(key, step=3, microbatch=1, layer=2) == in_a_step
