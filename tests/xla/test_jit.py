"""`jgraph.jit`: the results of `jax.jit`, a check of donated buffers before the first run, and plain behavior when nested."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph


def update(state, x):
    return {"w": state["w"] + x, "n": state["n"] + 1}, jnp.sum(x)


def shrink(state, x):
    return {"w": state["w"][:2] + x[:2], "n": state["n"] + 1}, jnp.sum(x)


@pytest.fixture
def arguments():
    return {"w": jnp.arange(4.0), "n": jnp.zeros((), jnp.int32)}, jnp.ones(4)


def test_results_equal_those_of_jax_jit(arguments):
    expected = jax.jit(update)(*arguments)
    found = jgraph.jit(update, donate_argnums=0)(*arguments)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_dropped_donation_raises_with_the_path_of_the_leaf_and_donates_nothing(arguments):
    step = jgraph.jit(shrink, donate_argnums=0)
    for _ in range(2):  # the second call checks again
        with pytest.raises(jgraph.DonationError, match=r"state\['w'\] float32\[4\]: dropped, no output is float32") as error:
            step(*arguments)
        assert error.value.leaves == ("state['w']",)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(arguments))


def test_a_dropped_donation_warns_once_per_signature(arguments):
    step = jgraph.jit(shrink, donate_argnums=0, donation="warn")
    with pytest.warns(UserWarning, match="does not reuse 1 donated leaves of shrink"):
        state, _ = step(*arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jgraph.jit(shrink, donate_argnums=0, donation="ignore")({"w": jnp.ones(4), "n": state["n"]}, jnp.ones(4))
        step({"w": jnp.ones(4), "n": jnp.zeros((), jnp.int32)}, jnp.ones(4))


def test_each_signature_is_traced_twice_and_compiled_once(arguments):
    traces, compiled = [], []

    @jgraph.jit
    def f(x):
        traces.append(x.shape)
        return 2 * x

    jax.monitoring.register_event_duration_secs_listener(
        listener := lambda name, seconds, **_: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    try:
        for size in (3, 3, 5, 3, 5):
            f(np.ones(size, np.float32))
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert traces == [(3,), (5,)]
    assert len(compiled) == 2


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap], ids=lambda transform: transform.__name__)
def test_a_nested_call_behaves_as_jax_jit(transform, called_before):
    options = ["xla_cpu_enable_fast_math=false"]
    f = jgraph.jit(lambda x: jnp.sin(x) * 2.0, xla_options=options)
    if called_before:
        f(jnp.ones(()))
    x = jnp.ones(3) if transform is jax.vmap else jnp.ones(())
    np.testing.assert_array_equal(transform(f)(x), transform(jax.jit(lambda x: jnp.sin(x) * 2.0))(x))


def test_a_decorated_function_has_static_arguments_and_a_report(arguments):
    @jgraph.jit(donate_argnames="state", static_argnames="scale")
    def step(state, x, scale):
        """Adds."""
        return {"w": state["w"] + scale * x, "n": state["n"]}

    report = step.report(*arguments, scale=2.0)
    assert "donated: 2 leaves" in str(report)
    assert not report.dropped
    np.testing.assert_array_equal(step(*arguments, scale=2.0)["w"], [2, 3, 4, 5])
    assert step.__doc__ == "Adds."
    assert step.lower({"w": jnp.ones(4), "n": jnp.zeros((), jnp.int32)}, jnp.ones(4), scale=1.0).compile() is not None


@pytest.mark.parametrize("argument", ["graph", "donation"])
def test_an_unknown_choice_is_refused(argument):
    with pytest.raises(jgraph.ConfigError, match=f"`{argument}` is 'maybe'"):
        jgraph.jit(update, **{argument: "maybe"})
