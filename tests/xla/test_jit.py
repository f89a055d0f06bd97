"""`jgraph.jit`: the results of `jax.jit`, a check of donated buffers before the first run, and plain behavior when nested."""

import contextlib
import copy
import gc
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

import jgraph
from jgraph.xla import jit


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


def test_jax_hashes_a_function_exactly_if_a_call_has_no_executable():
    """If this fails, `_Gate` needs another way to learn of such calls."""

    class Function:
        def __call__(self, x):
            return 2 * x

        def __hash__(self):
            hashed.append(self)
            return object.__hash__(self)

    def hashes(x):
        hashed.clear()
        f(x)
        return bool(hashed)

    hashed = []
    f = jax.jit(Function())
    device = jax.devices()[0]
    arrays = [jnp.ones(3), jnp.ones(5), jax.device_put(jnp.ones(3), device), on_two_devices(jnp.ones(4), jax.P("data"))]
    assert [hashes(x) for x in arrays] == [True] * 4
    assert [hashes(x) for x in arrays] == [False] * 4


def on_two_devices(array, spec):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(array, jax.NamedSharding(mesh, spec))


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")  # `lower` warns as `jax.jit` does
@pytest.mark.parametrize("inspect", ["report", "trace", "lower", "eval_shape"])
def test_a_function_that_was_inspected_is_checked(inspect, arguments):
    step = jgraph.jit(shrink, donate_argnums=0)
    getattr(step, inspect)(*arguments)
    with pytest.raises(jgraph.DonationError):
        step(*arguments)
    assert not arguments[0]["w"].is_deleted()


@pytest.fixture
def checks(monkeypatch):
    """A list of all checks of donations."""
    found, donations = [], jit.donations
    monkeypatch.setattr(jit, "donations", lambda *args: found.append(args) or donations(*args))
    return found


def test_a_second_sharding_of_the_same_shapes_is_checked():
    replicated = on_two_devices(jnp.ones(4), jax.P())
    step = jgraph.jit(lambda state: state + 1, donate_argnums=0, out_shardings=replicated.sharding)
    for _ in range(2):
        replicated = step(replicated)
    with pytest.raises(jgraph.DonationError, match="check that sharding and layout"):
        step(on_two_devices(jnp.ones(4), jax.P("data")))
    np.testing.assert_array_equal(step(replicated), np.full(4, 4))


def test_a_second_layout_of_the_same_shapes_is_checked(checks):
    step = jgraph.jit(lambda state: state + 1, donate_argnums=0)
    for order in ((0, 1), (1, 0), (0, 1)):
        layout = Format(Layout(order), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        np.testing.assert_array_equal(step(jax.device_put(jnp.ones((2, 3)), layout)), np.full((2, 3), 2))
    assert len(checks) == 2


def test_a_static_argument_and_a_keyword_argument_are_part_of_the_signature():
    step = jgraph.jit(lambda state, size: state[:size] + 1, donate_argnames="state", static_argnames="size")
    for state in (jnp.ones(4), jnp.ones(4, jnp.int32)):
        np.testing.assert_array_equal(step(state, size=4), [2, 2, 2, 2])
        with pytest.raises(jgraph.DonationError):
            step(state=jnp.ones(4), size=3)


def test_an_argument_may_have_the_name_self():
    shift = jgraph.jit(lambda self, x: self["w"] + x, donate_argnames="x")
    arrays = {"self": {"w": jnp.ones(2)}, "x": jnp.ones(2)}
    assert shift.eval_shape(**arrays).shape == shift.lower(**arrays).out_info.shape == (2,)
    assert "1 reused" in str(shift.report(**arrays))
    np.testing.assert_array_equal(shift(**arrays), [2.0, 2.0])


def test_a_thread_does_not_run_a_program_that_another_thread_checks(monkeypatch):
    def slow(*args):
        is_checked.set()
        has_run.wait(timeout=0.2)
        return donations(*args)

    def call_during_the_check():
        is_checked.wait(timeout=30)
        try:
            step(jnp.ones(4))
        finally:
            has_run.set()

    is_checked, has_run, donations = threading.Event(), threading.Event(), jit.donations
    monkeypatch.setattr(jit, "donations", slow)
    step = jgraph.jit(lambda state: state[:2], donate_argnums=0)
    with ThreadPoolExecutor(2) as pool:
        errors = [call.exception() for call in (pool.submit(step, jnp.ones(4)), pool.submit(call_during_the_check))]
    assert [type(error) for error in errors] == [jgraph.DonationError] * 2


def test_threads_change_the_filters_of_warnings_one_after_the_other(monkeypatch):
    @contextlib.contextmanager
    def entered(text):
        inside.append(text)
        time.sleep(0.1)
        most.append(len(inside))
        with without_warning(text):
            yield
        inside.pop()

    inside, most, without_warning = [], [], jit.without_warning
    monkeypatch.setattr(jit, "without_warning", entered)
    steps = [jgraph.jit(lambda x, n=n: x + n) for n in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda step: step(jnp.ones(4)), steps))
    assert most == [1, 1]


def test_a_donation_error_keeps_the_traces_of_other_signatures():
    traces = []

    @jgraph.jit(donate_argnums=0)
    def step(state):
        traces.append(state.shape)
        return state[:4]

    step(jnp.ones(4))
    with pytest.raises(jgraph.DonationError):
        step(jnp.ones(6))
    assert not [file for file in python_calls(step, jnp.ones(4)) if file.endswith("pjit.py")]
    assert traces == [(4,), (6,)]


def test_a_function_that_jax_dispatches_in_python_is_checked_once_per_signature(checks):
    @jgraph.jit(donate_argnums=0)
    def step(state):
        jax.debug.callback(lambda: None)
        return state + 1

    for state in (jnp.ones(4), np.ones(4, np.float32), jnp.ones(4), on_two_devices(jnp.ones(4), jax.P())):
        for _ in range(2):
            state = step(state)
    assert len(checks) == 2  # on the default device, and on two devices
    step.clear_cache()
    step(state)
    assert len(checks) == 3


def test_a_copy_is_checked_and_compiled_as_the_original(arguments):
    step = jgraph.jit(shrink, donate_argnums=0)
    for copied in (copy.deepcopy({"step": step})["step"], copy.copy(step)):
        with pytest.raises(jgraph.DonationError):
            copied(*arguments)
    double = copy.deepcopy(jgraph.jit(lambda x: 2 * x, xla_options=["xla_cpu_enable_fast_math=false"]))
    np.testing.assert_array_equal(double(jnp.ones(2)), [2, 2])
    assert double._options == {"xla_cpu_enable_fast_math": False}


def test_errors_of_jax_name_the_function(arguments):
    with pytest.raises(TypeError, match="argument to <function update at"):
        jgraph.jit(update)(*arguments[:1], "text")


def test_a_function_that_is_not_used_any_more_is_collected():
    step = jgraph.jit(lambda x: 2 * x, donate_argnums=0)
    step(jnp.ones(3))
    alive = weakref.ref(step)
    del step
    gc.collect()
    assert alive() is None


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
