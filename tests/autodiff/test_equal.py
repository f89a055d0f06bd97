"""dgrad and wgrad compute the gradients of `jax.vjp`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import jgraph
from tests.autodiff.stages import STAGES, Stage, gradient_like, gradients_by_vjp, hidden, mlp, mlp_params, normal

pytestmark = pytest.mark.long

RTOL = 1e-6


def split_gradients(split, params, x, extra, dy):
    _, residuals = split.forward(params, x, *extra)
    dx, early, stash = split.dgrad(params, residuals, dy)
    late = split.wgrad(params, residuals.after_dgrad(), stash)
    return split.merge(early, late), dx


def assert_close(ours, theirs, rtol=RTOL):
    """Compares leaves within `rtol` of their largest entry. The matmuls sum up to 64 terms."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        name = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if a.dtype != jax.dtypes.float0:
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            assert np.abs(a - b).max(initial=0) <= rtol * np.abs(b).max(initial=0), name


@pytest.mark.parametrize(
    ("name", "recompute"),
    [(name, "elementwise") for name in STAGES] + [(name, "nothing") for name in ("mlp", "gpt block", "experts", "scan")],
)
def test_split_gradients_equal_those_of_jax_vjp(name, recompute):
    stage = STAGES[name]()
    split = jgraph.split_backward(stage.run, recompute=recompute)
    y = split.forward(stage.params, stage.x, *stage.extra)[0]
    assert_close(y, jax.jit(stage.run)(stage.params, stage.x, *stage.extra))
    dy = gradient_like(y)
    ours = split_gradients(split, stage.params, stage.x, stage.extra, dy)
    assert_close(ours, gradients_by_vjp(stage, dy), rtol=5 * RTOL if name in SUMS_IN_ANOTHER_ORDER else RTOL)
    delayed = split.spec(stage.params, stage.x, *stage.extra).delayed
    assert len(delayed) == stage.delayed, delayed


# jax adds two uses, groups or filter taps in another order, and the terms partly cancel.
SUMS_IN_ANOTHER_ORDER = (
    "weight used twice",
    "experts",
    "nnx.Conv",
    "gpt block",
    "gpt block, swiglu",
    "nnx.scan",
    "normalized weight",
)


def test_float32_weight_gradients_of_an_mlp_equal_the_explicit_matmul():
    params, x, dy = mlp_params(), hidden(), normal(9, *hidden().shape)
    split = jgraph.split_backward(mlp)
    gradients, dx = split_gradients(split, params, x, (), dy)

    @jax.jit
    def by_hand(params, x, dy):
        h = x @ params["up"]
        a, pull = jax.vjp(jax.nn.gelu, h)
        (dh,) = pull(dy @ params["down"].T)
        return jnp.einsum("btf,btd->fd", a, dy), jnp.einsum("btd,btf->df", x, dh)

    down, up = by_hand(params, x, dy)
    np.testing.assert_allclose(gradients["down"], down, rtol=0, atol=float(jnp.abs(down).max()) * 3e-7)
    np.testing.assert_allclose(gradients["up"], up, rtol=0, atol=float(jnp.abs(up).max()) * 3e-7)
    assert dx.shape == x.shape


def test_a_scan_over_microbatches_accumulates():
    params, xs = mlp_params(), normal(1, 4, 2, 16, 32)
    split = jgraph.split_backward(mlp)

    def step(total, x):
        y, residuals = split.forward(params, x)
        _, early, stash = split.dgrad(params, residuals, y)
        total = split.accumulate(total, params, residuals, stash)
        return total | {"bias": total["bias"] + early["bias"]}, y

    total, ys = jax.jit(lambda xs: jax.lax.scan(step, jax.tree.map(jnp.zeros_like, params), xs))(xs)
    reference = jax.tree.map(
        lambda *g: sum(g), *(gradients_by_vjp(Stage(mlp, params, x), y)[0] for x, y in zip(xs, ys, strict=True))
    )
    assert_close(total, reference)


def test_vmap_over_microbatches():
    params, xs = mlp_params(), normal(1, 3, 2, 16, 32)
    split = jgraph.split_backward(mlp)
    ours = jax.vmap(lambda x: split_gradients(split, params, x, (), x))(xs)
    for i, x in enumerate(xs):
        assert_close(jax.tree.map(lambda a, i=i: a[i], ours), gradients_by_vjp(Stage(mlp, params, x), x))


def test_shard_map_with_check_vma():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params, x = mlp_params(), hidden()
    split = jgraph.split_backward(mlp)
    spec = jax.sharding.PartitionSpec

    def local(params, x):
        params = jax.tree.map(lambda p: jax.lax.pcast(p, ("data",), to="varying"), params)
        gradients, dx = split_gradients(split, params, x, (), x)
        return jax.tree.map(lambda g: g[None], gradients), dx

    run = jax.shard_map(local, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=(spec("data"), spec("data")))
    gradients, dx = jax.jit(run)(params, x)
    assert_close((jax.tree.map(lambda g: g[0], gradients), dx), gradients_by_vjp(Stage(mlp, params, x), x))


def test_a_stage_may_close_over_arrays_and_over_tracers():
    params, x, shift = mlp_params(), hidden(), normal(8, 32)

    def outer(scale):
        stage = Stage(lambda p, x: mlp(p, x * scale) + shift, params, x)
        split = jgraph.split_backward(stage.run)
        first = split_gradients(split, params, x, (), x)
        second = split_gradients(split, params, x, (), x)
        return first, second, gradients_by_vjp(stage, x)

    first, second, reference = jax.jit(outer)(jnp.float32(0.7))
    assert_close(first, reference)
    assert_close(second, reference)


def test_one_split_serves_many_shapes():
    params = mlp_params()
    split = jgraph.split_backward(mlp)
    for rows in (1, 3):
        x = normal(1, rows, 5, 32)
        assert_close(split_gradients(split, params, x, (), x), gradients_by_vjp(Stage(mlp, params, x), x))


def test_the_stage_is_traced_once_for_a_shape():
    traces = []

    def counted(p, x):
        traces.append(1)
        return mlp(p, x)

    split = jgraph.split_backward(counted)
    for seed in range(3):
        split_gradients(split, mlp_params(), hidden(seed), (), hidden())
    assert len(traces) == 1


LETTERS = "abcdef"
SIZES = dict(zip(LETTERS, (2, 3, 4, 5, 2, 3), strict=True))


@st.composite
def chains(draw):
    """Draws a chain of einsums with weights that are reshaped, transposed, sliced or scaled first."""
    x_axes = draw(st.permutations(LETTERS))[: draw(st.integers(2, 4))]
    steps, axes = [], list(x_axes)
    for _ in range(draw(st.integers(1, 4))):
        contracted = draw(
            st.lists(st.sampled_from(axes), unique=True, min_size=0 if len(axes) > 1 else 1, max_size=len(axes) - 1 or 1)
        )
        batch = draw(st.lists(st.sampled_from([a for a in axes if a not in contracted] or ["-"]), unique=True, max_size=1))
        batch = [b for b in batch if b != "-"]
        room = [a for a in LETTERS if a not in axes]
        free = (
            draw(
                st.lists(
                    st.sampled_from(room),
                    unique=True,
                    min_size=0 if len(axes) > len(contracted) else 1,
                    max_size=min(2, len(room)),
                )
            )
            if room
            else []
        )
        weight = draw(st.permutations([*contracted, *batch, *free]))
        if not weight:
            continue
        out = draw(st.permutations([a for a in axes if a not in contracted] + free))
        moved = draw(st.sampled_from(["plain", "reshaped", "turned", "cut", "scaled"]))
        steps.append((axes, list(weight), list(out), draw(st.booleans()), moved, draw(st.booleans())))
        axes = list(out)
    return list(x_axes), steps


def chain_stage(x_axes, steps):
    params, run_steps = {}, []
    for i, (axes, weight, out, left, moved, nonlinear) in enumerate(steps):
        shape = tuple(SIZES[a] for a in weight)
        stored = {
            "plain": shape,
            "reshaped": (int(np.prod(shape)),),
            "turned": shape[::-1],
            "cut": (2, *shape),
            "scaled": shape,
        }[moved]
        params[f"w{i}"] = normal(10 + i, *stored)
        operands = ("".join(weight), "".join(axes))
        equation = ",".join(operands if left else operands[::-1]) + "->" + "".join(out)
        run_steps.append((f"w{i}", shape, moved, equation, left, nonlinear))

    def run(p, x):
        for name, shape, moved, equation, left, nonlinear in run_steps:
            w = p[name]
            if moved in ("reshaped", "turned"):
                w = w.reshape(shape) if moved == "reshaped" else w.T
            if moved in ("cut", "scaled"):
                w = w[1] if moved == "cut" else jnp.exp(w * 0.1)
            x = jnp.einsum(equation, w, x) if left else jnp.einsum(equation, x, w)
            x = jnp.tanh(x) if nonlinear else x
        return x

    return Stage(run, params, normal(1, *(SIZES[a] for a in x_axes)))


@pytest.mark.once
@given(chains())
@settings(max_examples=12)
def test_random_chains_of_einsums_split(chain):
    stage = chain_stage(*chain)
    split = jgraph.split_backward(stage.run)
    dy = gradient_like(jax.eval_shape(stage.run, stage.params, stage.x))
    ours = split_gradients(split, stage.params, stage.x, (), dy)
    # Terms of a contraction partly cancel, to about a tenth.
    assert_close(ours, gradients_by_vjp(stage, dy), rtol=2e-5)
