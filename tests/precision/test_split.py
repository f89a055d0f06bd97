"""The split backward of an FP8 stage equals the whole backward and stashes FP8 arrays."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph
from jgraph import FP8Config
from jgraph.errors import SplitError
from jgraph.tree import leaf_names
from jgraph.xla.options import installed_options
from tests.autodiff.stages import grouped_mlp, grouped_params

# B rows, D model, F hidden
B, D, F, LAYERS = 32, 48, 64, 3

# Without the emitters (off in other tests), the order of a row sum in XLA depends on the rest of the program.
EMITTERS = {name: True for name in ["xla_cpu_use_fusion_emitters"] if name in (installed_options() or ())}


def normal(i, *shape, scale=1.0, dtype=jnp.float32):
    return jnp.asarray(scale * np.random.default_rng(i).standard_normal(shape), dtype)


def mlp(params, x):
    hidden = x @ params["up"].astype(x.dtype) + params["bias"].astype(x.dtype)
    return x + jax.nn.gelu(hidden) @ params["down"].astype(x.dtype)


def scanned(params, x):
    return jax.lax.scan(lambda x, layer: (mlp(layer, x), None), x, params)[0]


def with_head(params, x):
    return mlp(params["mlp"], x) @ params["head"].astype(x.dtype)


def weights(i, *lead, width=D):
    return {
        "up": normal(i, *lead, width, F, scale=0.1),
        "down": normal(i + 1, *lead, F, width, scale=0.1),
        "bias": normal(i + 2, *lead, F, scale=0.1),
    }


def with_experts(params, x):
    return grouped_mlp(params["moe"], x + x @ params["in"].astype(x.dtype))


# "wide" stages have the width 2 D, a multiple of 32 as MXFP8 needs.
STAGES = {
    "wide": (mlp, weights(15, width=2 * D)),
    "wide scan": (scanned, weights(18, LAYERS, width=2 * D)),
    "mlp": (mlp, weights(0)),
    "scan": (scanned, weights(3, LAYERS)),
    "head kept": (with_head, {"mlp": weights(6), "head": normal(9, D, 16)}),
    "checkpoint": (jax.checkpoint(mlp), weights(10)),
    "experts": (with_experts, {"in": normal(14, D, D, scale=0.1), "moe": grouped_params(width=D)}),
}
RECIPES = {
    "current": FP8Config(),
    "delayed": FP8Config(recipe="delayed", history=3),
    "bf16 wgrad": FP8Config(wgrad="bf16"),
    "delayed, bf16 wgrad": FP8Config(recipe="delayed", wgrad="bf16"),
    "delayed, e4m3": FP8Config(recipe="delayed", format="e4m3"),
    "calibrate": FP8Config(recipe="delayed", compute="calibrate"),
    "mxfp8": FP8Config(recipe="mxfp8"),
}


def make(stage, recipe, dtype=jnp.float32, *, steps=1):
    """Returns an FP8 function, its parameters, the state after no step or one step, and x."""
    fn, params = STAGES[stage]
    fp8, x = jgraph.fp8(fn, RECIPES[recipe]), normal(20, B, 2 * D if stage.startswith("wide") else D, dtype=dtype)
    state = fp8.init(params, x)
    if state and steps:
        state = jax.jit(jax.grad(lambda state: jnp.sum(fp8.apply(params, state, x).astype(jnp.float32))))(state)
    return fp8, params, state, x


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize(
    ("stage", "recipe"),
    [
        pytest.param("mlp", "delayed, bf16 wgrad", marks=[pytest.mark.long, pytest.mark.once]),
        pytest.param("scan", "delayed", marks=pytest.mark.long),
        pytest.param("head kept", "current", marks=pytest.mark.long),  # with the matmuls of "mlp"
        pytest.param("checkpoint", "delayed", marks=[pytest.mark.long, pytest.mark.once]),
        pytest.param("experts", "delayed, e4m3", marks=pytest.mark.long),
        ("experts", "calibrate"),  # with a plain matmul
        pytest.param("wide", "mxfp8", marks=pytest.mark.long),
        pytest.param("wide scan", "mxfp8", marks=pytest.mark.long),
    ],
)
def test_the_split_of_an_fp8_stage_equals_its_whole_backward(stage, recipe):
    fp8, params, state, x = make(stage, recipe, steps=0)
    program = partial(jax.jit, compiler_options=EMITTERS)

    @program
    def whole(params, state, x, dy):
        y, pull_back = jax.vjp(fp8.apply, params, state, x)
        return y, *pull_back(dy)

    dy = normal(21, *jax.eval_shape(fp8.apply, params, state, x).shape)
    state = whole(params, state, x, dy)[2]
    split, given = jgraph.split_backward(fp8), (params, state, None)
    y, residuals = program(split.forward)(given, x)
    expected_y, expected, expected_state, expected_dx = whole(params, state, x, dy)
    dx, (early, state_after, _), stash = program(split.dgrad)(given, residuals, dy)
    late, *_ = jax.jit(split.wgrad)(given, residuals, stash)
    assert_same((y, dx, state_after), (expected_y, expected_dx, expected_state))
    assert_same(early, jax.tree.map(lambda a, b: None if a is None else b, early, expected, is_leaf=lambda leaf: leaf is None))
    assert len(jax.tree.leaves(late)) == sum("bias" not in name for name in leaf_names(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), split.merge(early, late), expected)


def columns(arrays):
    return sorted((array.shape, array.dtype.name) for array in arrays if array.ndim > 1)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_arrays_read_only_by_wgrad_are_stored_with_one_byte_per_element(recipe):
    fp8, params, state, x = make("mlp", recipe, jnp.bfloat16)
    split = jgraph.split_backward(fp8)
    spec = split.spec((params, state, None), x)
    # Dgrad reads the pre-activation, so wgrad recomputes and quantizes the GELU. Only wgrad reads x.
    assert columns(spec.residuals.wgrad) == [((B, F), "bfloat16"), ((D, B), "float8_e4m3fn")]
    assert columns(spec.stash.arrays) == [((D, B), "float8_e5m2"), ((F, B), "float8_e5m2")]
    assert columns(spec.residuals.dgrad) == []
    waiting = spec.nbytes()["forward_wgrad"] + spec.nbytes()["stash"]
    assert 0 <= waiting - B * (2 * D + 3 * F) <= 6 * 4  # at most two float32 scalars for each of the four
    assert spec.delayed == ("down", "up")


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "dtype"), [("current", jnp.float32), ("delayed", jnp.bfloat16), ("bf16 wgrad", jnp.bfloat16)]
)
def test_wgrad_accumulates_into_main_grad_in_float32(recipe, dtype):
    fp8, params, state, x = make("mlp", recipe, dtype)
    split, given = jgraph.split_backward(fp8), (params, state, None)
    y, residuals = jax.jit(split.forward)(given, x)
    _, _, stash = jax.jit(split.dgrad)(given, residuals, jnp.ones_like(y))
    late, *_ = jax.jit(split.wgrad)(given, residuals, stash)
    before = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 2.0**-9), params)
    after, *others = jax.jit(split.accumulate)((before, None, None), given, residuals, stash)
    assert {leaf.dtype for leaf in jax.tree.leaves((late, after))} == {jnp.dtype("float32")}
    assert others == [None, None]
    assert_same(after["up"], before["up"] + late["up"])
    assert_same(after["bias"], before["bias"])
    if dtype == jnp.bfloat16:
        assert not np.array_equal(late["up"], late["up"].astype(jnp.bfloat16))


@pytest.mark.long
def test_accumulate_skips_parameters_without_a_sum():
    fp8, params, state, x = make("mlp", "current")
    split, given = jgraph.split_backward(fp8), (params, state, None)
    y, residuals = jax.jit(split.forward)(given, x)
    _, _, stash = jax.jit(split.dgrad)(given, residuals, y)
    late = jax.jit(split.wgrad)(given, residuals, stash)[0]
    name = next(name for name, gradient in late.items() if gradient is not None)
    sums = {other: jnp.ones(leaf.shape, jnp.float32) if other == name else None for other, leaf in params.items()}
    found, *rest = jax.jit(split.accumulate)((sums, None, None), given, residuals, stash)
    assert rest == [None, None]
    assert [other for other, total in found.items() if total is not None] == [name]
    np.testing.assert_allclose(found[name], 1 + late[name], rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_scan_over_microbatches_shares_quantized_weights_and_combines_state(recipe):
    fp8, params, state, _ = make("mlp", recipe)
    xs, dys = normal(22, 4, B, D), normal(23, 4, B, D)
    split = jgraph.split_backward(fp8)

    @jax.jit
    def step(params, state, xs, dys):
        given = params, state, fp8.quantize(params, state, xs[0])

        def one(carry, batch):
            total, largest = carry
            x, dy = batch
            _, residuals = split.forward(given, x)
            dx, (_, after, of_weights), stash = split.dgrad(given, residuals, dy)
            assert jax.tree.leaves(of_weights) == []
            total, *_ = split.accumulate((total, None, None), given, residuals, stash)
            return (total, jax.tree.map(jnp.maximum, largest, after)), dx

        start = jax.tree.map(jnp.zeros_like, (params, state))
        return jax.lax.scan(one, start, (xs, dys))

    @jax.jit
    def whole(params, state, x, dy):
        return jax.vjp(fp8.apply, params, state, x)[1](dy)

    (total, after), dxs = step(params, state, xs, dys)
    each = [whole(params, state, x, dy) for x, dy in zip(xs, dys, strict=True)]
    assert_same(dxs, jnp.stack([dx for *_, dx in each]))
    assert_same(after, jax.tree.map(lambda *found: jnp.max(jnp.stack(found), axis=0), *[state for _, state, _ in each]))
    for name in ("up", "down"):
        np.testing.assert_allclose(total[name], sum(grads[name] for grads, *_ in each), rtol=1e-5, atol=1e-6)


def test_quantized_weights_are_used_in_place_of_the_parameters():
    fp8, params, state, x = make("mlp", "current")
    split, others = jgraph.split_backward(fp8), weights(30) | {"bias": params["bias"]}

    @jax.jit
    def found(params, weights):
        y, residuals = split.forward((params, state, weights), x)
        dx, _, _ = split.dgrad((params, state, weights), residuals, x)
        return y, dx

    given = fp8.quantize(others, state, x)
    assert_same(found(params, given), found(others, given))


@pytest.mark.long
def test_extra_arguments_and_auxiliary_outputs_pass_through():
    def fn(params, x, mask):
        y = mlp(params, x * mask)
        return y, jnp.sum(y)

    params, x, mask = STAGES["mlp"][1], normal(20, B, D), normal(24, B, 1) > 0
    split = jgraph.split_backward(jgraph.fp8(fn), has_aux=True)

    @jax.jit
    def run(params, x, mask):
        y, residuals, aux = split.forward((params, {}, None), x, mask)
        dx, _, _ = split.dgrad((params, {}, None), residuals, y)
        return y, aux, dx

    y, aux, dx = run(params, x, mask)
    assert aux == pytest.approx(float(jnp.sum(y)), rel=1e-6)
    assert_same(dx[~mask[:, 0]], 0)


def test_an_fp8_weight_without_a_delayed_gradient_is_refused():
    x = normal(20, B, D)
    tied = jgraph.split_backward(jgraph.fp8(lambda params, x: mlp(params, x) + params["up"][0, :D]))
    chosen = jgraph.split_backward(jgraph.fp8(mlp), delay="down")
    for split in (tied, chosen):
        with pytest.raises(SplitError, match="up") as error:
            split.forward((STAGES["mlp"][1], {}, None), x)
        assert error.value.field == "delay"


def test_params_without_state_and_weights_are_refused():
    with pytest.raises(SplitError) as error:
        jgraph.split_backward(jgraph.fp8(mlp)).forward(STAGES["mlp"][1], normal(20, B, D))
    assert error.value.field == "params"


@pytest.mark.long
def test_local_arrays_under_shard_map_can_be_split():
    fp8, params, state, x = make("mlp", "current")
    split, mesh = jgraph.split_backward(fp8), jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=(spec("data"), spec("data")))
    def run(params, x):
        given = jax.lax.pcast((params, state, None), "data", to="varying")
        y, residuals = split.forward(given, x)
        dx, _, stash = split.dgrad(given, residuals, y)
        late, *_ = split.wgrad(given, residuals, stash)
        return dx, late["up"]

    dx, dw = run(params, jnp.concatenate([x, x]))
    assert_same(dx[:B], dx[B:])
    assert_same(dw[:D], dw[D:])
