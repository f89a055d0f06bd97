"""`jgraph.jit`: the results of `jax.jit`, a check of donated buffers before the first run, and plain behavior when nested."""

import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

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
    with pytest.warns(UserWarning, match="does not reuse 1 donated leaf of shrink"):
        state, _ = step(*arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jgraph.jit(shrink, donate_argnums=0, donation="ignore")({"w": jnp.ones(4), "n": state["n"]}, jnp.ones(4))
        step({"w": jnp.ones(4), "n": jnp.zeros((), jnp.int32)}, jnp.ones(4))


def test_each_signature_is_traced_and_compiled_once(arguments):
    traces, compiled = [], []

    @jgraph.jit
    def f(x):
        traces.append(x.shape)
        return 2 * x

    jax.monitoring.register_event_duration_secs_listener(
        listener := lambda name, seconds, **_: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    try:
        for size in (3, 3, 5, 3, 5, 3):
            f(np.ones(size, np.float32))
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert traces == [(3,), (5,)]
    assert len(compiled) == 2


def test_a_cleared_function_is_traced_again_by_calls_and_by_eval_shape():
    traces = []

    @jgraph.jit
    def f(x):
        traces.append(x)
        return 2 * x

    def trace():
        """Returns the number of new traces of a call, and of `eval_shape`."""
        before, x = len(traces), jnp.ones(3)
        f(x)
        called = len(traces)
        f.eval_shape(x)
        return called - before, len(traces) - called

    assert [trace(), trace()] == [(1, 1), (0, 0)]
    f.clear_cache()
    assert trace() == (1, 1)


def python_calls(fn, *args):
    """Returns the files of the Python functions that a call runs."""
    files = []
    sys.setprofile(lambda frame, event, _: files.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        fn(*args)
    finally:
        sys.setprofile(None)
    return files


def test_a_later_call_runs_no_python_of_jax_except_the_check_for_transformations():
    f = jgraph.jit(lambda x: 2 * x)
    for size in (3, 5, 3, 5):
        f(jnp.ones(size))
    for size in (3, 5):
        assert len(python_calls(f, jnp.ones(size))) < 12
        assert not [file for file in python_calls(f, jnp.ones(size)) if file.endswith(("pjit.py", "api.py"))]


def test_jax_dispatches_in_python_after_a_failed_call():
    """If this fails, `_forget_failed_call` and its private name are not needed any more."""

    def fail_first(x):
        if not calls:
            calls.append(x)
            raise ValueError("first call")
        return 2 * x

    calls = []
    f = jax.jit(fail_first)
    with pytest.raises(ValueError, match="first call"):
        f(jnp.ones(3))
    for _ in range(2):
        f(jnp.ones(3))
    assert [file for file in python_calls(f, jnp.ones(3)) if file.endswith("pjit.py")]
    f._clear_cache()
    f(jnp.ones(3))
    assert not python_calls(f, jnp.ones(3))


@pytest.mark.parametrize("options", [[], ["xla_cpu_enable_fast_math=false"]], ids=["plain", "options"])
@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap], ids=lambda transform: transform.__name__)
def test_a_nested_call_behaves_as_jax_jit(transform, called_before, options):
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


def test_a_method_is_compiled_with_its_instance():
    class Scale:
        def __init__(self, factor):
            self.factor = factor

        @jgraph.jit(static_argnums=0, donate_argnums=1)
        def __call__(self, x):
            return self.factor * x

    np.testing.assert_array_equal(Scale(3.0)(jnp.ones(2)), [3, 3])
    np.testing.assert_array_equal(Scale(4.0)(jnp.ones(2)), [4, 4])


def test_a_call_with_jit_disabled_runs_the_function(arguments):
    with jax.disable_jit():
        state, _ = jgraph.jit(update, donate_argnums=0)(*arguments)
    np.testing.assert_array_equal(state["w"], [1, 2, 3, 4])


def test_explain_reports_a_jitted_function_for_an_absent_gpu(arguments):
    report = jgraph.explain(jgraph.jit(shrink, donate_argnums=0), *arguments, target="h200")
    assert [donation.leaf for donation in report.dropped] == ["state['w']"]


def test_threads_trace_independently():
    @jgraph.jit
    def f(x):
        barrier.wait(timeout=30)
        return 2 * x

    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda size: f(np.ones(size, np.float32)).sum(), (3, 5)))
    assert found == [6, 10]


def test_a_failed_trace_leaves_the_function_usable(arguments):
    @jgraph.jit(donate_argnums=0)
    def step(state, x):
        if x.ndim == 0:
            raise ValueError("a vector is needed")
        return state + x

    with pytest.raises(ValueError, match="a vector is needed"):
        step(jnp.ones(2), jnp.ones(()))
    np.testing.assert_array_equal(step(jnp.ones(2), jnp.ones(2)), [2, 2])


def test_shardings_and_static_arguments_pass_to_jax_jit():
    mesh = jax.make_mesh((2,), ("data",))
    sharded = jax.NamedSharding(mesh, jax.P("data"))

    @jgraph.jit(out_shardings=sharded, donate_argnames=("state",))
    def step(state, *, x):
        return state + x

    state = jax.device_put(jnp.zeros(4), sharded)
    for _ in range(2):
        state = step(state, x=jnp.ones(4))
    assert state.sharding == sharded
    np.testing.assert_array_equal(state, [2, 2, 2, 2])


def test_compiler_options_of_jax_jit_override_the_others():
    options = {"xla_cpu_enable_fast_math": True}
    assert jgraph.jit(update, xla_options=["xla_cpu_enable_fast_math=false"], compiler_options=options)._options == options
    assert jgraph.jit(update, compiler_options=None)._options == {}


@pytest.mark.parametrize("argument", ["graph", "donation"])
def test_an_unknown_choice_is_refused(argument):
    with pytest.raises(jgraph.ConfigError, match=f"`{argument}` is 'maybe'"):
        jgraph.jit(update, **{argument: "maybe"})
