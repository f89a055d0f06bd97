"""Tests stages with sharded arrays, complex numbers and callbacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jgraph
from jgraph.errors import SplitError
from tests.autodiff.stages import Stage, gradients_by_vjp, hidden, mlp, mlp_params
from tests.autodiff.test_equal import assert_close, split_gradients


def mesh_of(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("data",), axis_types=(kind,))


def on(mesh, *spec):
    return NamedSharding(mesh, PartitionSpec(*spec))


# --- Arrays on a mesh ---


@pytest.mark.parametrize("where", ["batch", "weights", "x only", "params only"])
@pytest.mark.parametrize("jitted", [False, True])
def test_arrays_on_automatic_axes_have_the_gradients_of_one_device(where, jitted):
    mesh, params, x = mesh_of(AxisType.Auto), mlp_params(), hidden()
    shardings = {"up": on(mesh, None, "data"), "down": on(mesh, "data"), "bias": on(mesh)}
    placed = jax.device_put(params, shardings if where == "weights" else on(mesh)) if where != "x only" else params
    placed_x = np.asarray(x) if where == "params only" else jax.device_put(x, on(mesh, "data" if where == "batch" else None))
    split = jgraph.split_backward(mlp)

    def run(params, x):
        return split_gradients(split, params, x, (), x)

    assert_close((jax.jit(run) if jitted else run)(placed, placed_x), gradients_by_vjp(Stage(mlp, params, x), x))


def test_wgrad_recomputes_x_on_the_mesh_of_forward():
    mesh, params, x = mesh_of(AxisType.Auto), mlp_params(), hidden()
    split, expected = jgraph.split_backward(mlp), gradients_by_vjp(Stage(mlp, params, x), x)[0]
    placed = jax.device_put(params, on(mesh))
    _, residuals = split.forward(placed, jax.device_put(x, on(mesh, "data")))
    _, early, stash = split.dgrad(placed, residuals, x)
    total = split.accumulate(jax.tree.map(jnp.zeros_like, placed), placed, residuals.after_dgrad(), stash)
    assert_close(total | {"bias": early["bias"]}, expected)


def test_arrays_on_explicit_axes_are_refused_by_name():
    mesh, split = mesh_of(AxisType.Explicit), jgraph.split_backward(mlp)
    with pytest.raises(SplitError, match=r"x is sharded over the explicit mesh axes .*'data'.*must be automatic") as error:
        split.forward(mlp_params(), jax.device_put(hidden(), on(mesh, "data")))
    assert error.value.path == ""
    params = mlp_params()
    params["down"] = jax.device_put(params["down"], on(mesh, "data"))
    with pytest.raises(SplitError, match=r"params/down is sharded over the explicit mesh axes .*'data'") as error:
        split.forward(params, hidden())
    assert error.value.path == "down"
    assert "\n" not in str(error.value)


def test_a_stage_that_reshards_over_explicit_axes_is_refused():
    mesh = mesh_of(AxisType.Explicit)
    sharded = lambda p, x: jax.sharding.reshard(mlp(p, x), on(mesh, "data"))  # noqa: E731
    with pytest.raises(SplitError, match="y is sharded over the explicit mesh axes"):
        jgraph.split_backward(sharded).forward(jax.device_put(mlp_params(), on(mesh)), jax.device_put(hidden(), on(mesh)))
    split = jgraph.split_backward(lambda p, x: jax.sharding.reshard(sharded(p, x), on(mesh)))
    with pytest.raises(SplitError, match="computes with arrays sharded over explicit mesh axes"):
        split.forward(jax.device_put(mlp_params(), on(mesh)), jax.device_put(hidden(), on(mesh)))


# --- Complex numbers ---

COMPLEX = jnp.ones((32, 32), jnp.complex64)


@pytest.mark.parametrize(
    ("stage", "params", "x", "path"),
    [
        (lambda p, x: (x @ p["w"]).real, {"w": COMPLEX}, hidden(), "w"),
        (lambda p, x: (x["a"] @ p["w"]).real, {"w": COMPLEX.real}, {"a": COMPLEX}, "a"),
        (lambda p, x: {"b": x @ p["w"] * 1j}, {"w": COMPLEX.real}, hidden(), "b"),
    ],
    ids=["params", "x", "y"],
)
def test_a_complex_argument_or_result_is_refused_by_name(stage, params, x, path):
    with pytest.raises(SplitError, match=f"/{path} is complex64; params, x and y must be real") as error:
        jgraph.split_backward(stage).forward(params, x)
    assert error.value.path == path


def test_complex_numbers_inside_a_stage_have_the_gradients_of_jax_vjp():
    def stage(p, x):
        return jnp.fft.ifft(jnp.fft.fft(x @ p["w"]) * (p["v"] + 2j)).real

    params, x = {"w": mlp_params()["up"], "v": jnp.ones(64)}, hidden()
    dy = jnp.ones((2, 16, 64))
    assert_close(
        split_gradients(jgraph.split_backward(stage), params, x, (), dy), gradients_by_vjp(Stage(stage, params, x), dy)
    )


# --- Callbacks ---

WRAPS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda p, x: jax.lax.scan(lambda x, _: (f(p, x), None), x, None, length=1)[0],
    "cond": lambda f: lambda p, x: jax.lax.cond(x[0, 0, 0] < 99, lambda x: f(p, x), lambda x: x, x),
}


@pytest.mark.parametrize(
    ("kind", "wrap"), [*((kind, wrap) for kind in ("debug", "io") for wrap in WRAPS), ("ordered", "plain"), ("ordered", "scan")]
)
def test_callbacks_run_once_in_forward_and_do_not_change_gradients(kind, wrap):
    seen = []

    def note(x):
        if kind == "io":
            io_callback(lambda x: seen.append(float(x)), None, x[0, 0, 0])
        else:
            jax.debug.callback(lambda x: seen.append(float(x)), x[0, 0, 0], ordered=kind == "ordered")

    def noisy(p, x):
        h = x @ p["up"]
        note(h)
        return x + jax.nn.gelu(h) @ p["down"] + p["bias"]

    params, x = mlp_params(), hidden()
    split = jgraph.split_backward(WRAPS[wrap](noisy))
    gradients = split_gradients(split, params, x, (), x)
    split.accumulate(jax.tree.map(jnp.zeros_like, params), params, *held(split, params, x))
    jax.effects_barrier()
    np.testing.assert_allclose(seen, [(x @ params["up"])[0, 0, 0]] * 2, rtol=1e-5)
    assert_close(gradients, gradients_by_vjp(Stage(WRAPS[wrap](mlp), params, x), x))


def held(split, params, x):
    _, residuals = split.forward(params, x)
    return residuals, split.dgrad(params, residuals, x)[2]


def test_debug_print_runs_in_forward_only(capfd):
    def noisy(p, x):
        jax.debug.print("x is {x:.3f}", x=x[0, 0, 0])
        return mlp(p, x)

    split_gradients(jgraph.split_backward(noisy), mlp_params(), hidden(), (), hidden())
    jax.effects_barrier()
    assert capfd.readouterr().out == f"x is {hidden()[0, 0, 0]:.3f}\n"


def reads_io(p, x):
    return mlp(p, x * jax.lax.stop_gradient(io_callback(lambda: np.float32(2), jax.ShapeDtypeStruct((), "float32"))))


@jax.custom_vjp
def loud(x):
    return x * 2


def loud_forward(x):
    jax.debug.callback(lambda x: None, x)
    return x * 2, None


loud.defvjp(loud_forward, lambda _, dy: (dy * 2,))


@pytest.mark.parametrize("stage", [reads_io, lambda p, x: mlp(p, loud(x))], ids=["a result", "a custom_vjp"])
def test_callbacks_with_a_result_or_in_a_custom_vjp_are_refused(stage):
    with pytest.raises(SplitError, match="a callback must return nothing") as error:
        jgraph.split_backward(stage).forward(mlp_params(), hidden())
    assert "\n" not in str(error.value)
