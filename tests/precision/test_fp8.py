"""`jgraph.fp8` finds the matmuls in a trace. They agree with a NumPy emulation of FP8, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgraph
from jgraph import FP8Config
from jgraph.errors import ConfigError
from jgraph.kernels.grouped import grouped_dot
from jgraph.precision.loss import describe
from jgraph.xla.explain import FP8Products
from tests.autodiff.stages import grouped_mlp, grouped_params

# B batch, D model, F hidden
B, D, F, H, K = 32, 48, 64, 4, 16


def normal(i, *shape, scale=1.0, dtype=jnp.float32):
    return jnp.asarray(scale * np.random.default_rng(i).standard_normal(shape), dtype)


def rounded(x, dtype):
    """Quantizes an array by its own scale and dequantizes it in float64."""
    x = np.asarray(x, np.float64)
    scale = 2.0 ** np.floor(np.log2(float(jnp.finfo(dtype).max) / np.abs(x).max()))
    return (x * scale).astype(np.float32).astype(dtype).astype(np.float64) / scale


def expected(x, w, dy):
    """Computes y, dx and dw from quantized operands, each with the same matmul of the magnitudes."""
    x, w, dy = rounded(x, jnp.float8_e4m3fn), rounded(w, jnp.float8_e4m3fn), rounded(dy, jnp.float8_e5m2)
    return [(a @ b, np.abs(a) @ np.abs(b)) for a, b in ((x, w), (dy, w.T), (x.T, dy))]


def check(found, exact):
    # Results are bfloat16 (8 bits). A matmul accumulates in float32 on a CPU and in 14 bits on a GPU.
    for a, (b, magnitude) in zip(found, exact, strict=True):
        np.testing.assert_array_less(np.abs(np.asarray(a, np.float64) - b), 2.0**-8 * np.abs(b) + 2.0**-13 * magnitude + 1e-30)


def with_gradients(fn, dy, *args):
    """Returns the result of a function and the gradients of its arguments, from one program."""

    @jax.jit
    def run(dy, *args):
        y, pull_back = jax.vjp(fn, *args)
        return y, *pull_back(dy)

    return run(dy, *args)


# Ways to write the matmul of [B, D] and [D, F]: (function of w and x, function that reshapes w from [D, F]).
WAYS = {
    "matmul": (lambda w, x: x @ w.astype(x.dtype), lambda w: w),
    "einsum with heads": (
        lambda w, x: jnp.einsum("bd,dhk->bhk", x, w.astype(x.dtype)).reshape(B, F),
        lambda w: w.reshape(D, H, K),
    ),
    "transposed": (lambda w, x: x @ w.T.astype(x.dtype), lambda w: w.T),
    "weight first": (lambda w, x: (w.T.astype(x.dtype) @ x.T).T, lambda w: w),
    "a slice": (lambda w, x: x @ w[:, :F].astype(x.dtype), lambda w: jnp.concatenate([w, 0 * w], 1)),
    "checkpoint": (jax.checkpoint(lambda w, x: x @ w.astype(x.dtype)), lambda w: w),
    "jit": (jax.jit(lambda w, x: x @ w.astype(x.dtype)), lambda w: w),
    "scan": (lambda w, x: jax.lax.scan(lambda c, w: (c, c @ w.astype(x.dtype)), x, w)[1][0], lambda w: w[None]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_matmul_and_its_gradients_use_quantized_operands(way):
    fn, place = WAYS[way]
    w_DF, x_BD, dy_BF = normal(0, D, F), normal(1, B, D, dtype=jnp.bfloat16), normal(2, B, F, dtype=jnp.bfloat16)
    stage = jgraph.fp8(fn)
    y, pull_back = jax.vjp(lambda w, x: stage.apply(w, {}, x), place(w_DF), x_BD)
    dw, dx = pull_back(dy_BF)
    (dw,) = jax.linear_transpose(place, w_DF)(dw) if way != "a slice" else (dw[:, :F],)
    check((y, dx, dw), expected(x_BD, w_DF, dy_BF))


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_without_gradient_has_no_operands_of_wgrad(way):
    fn, place = WAYS[way]
    w, x, dy = place(normal(0, D, F)), normal(1, B, D, dtype=jnp.bfloat16), normal(2, B, F, dtype=jnp.bfloat16)
    stage = jgraph.fp8(fn)

    def gradients(w, x, *, trained):
        if trained:
            return jax.vjp(lambda w, x: stage.apply(w, {}, x), w, x)[1](dy)
        return jax.vjp(lambda x: stage.apply(w, {}, x), x)[1](dy)

    np.testing.assert_array_equal(gradients(w, x, trained=False)[0], gradients(w, x, trained=True)[1])
    # Operands of wgrad are transposed: [D, B] and [F, B].
    transposed = {"e4m3fn": f"f8_e4m3fn[{D},{B}]", "e5m2": f"f8_e5m2[{F},{B}]"}
    for trained in (True, False):
        program = str(jax.make_jaxpr(functools.partial(gradients, trained=trained))(w, x))
        assert [text in program for text in transposed.values()] == [trained, trained]


def test_a_bf16_wgrad_uses_unquantized_operands():
    w, x, dy = normal(0, D, F), normal(1, B, D, dtype=jnp.bfloat16), normal(2, B, F, dtype=jnp.bfloat16)
    stage = jgraph.fp8(WAYS["matmul"][0], FP8Config(wgrad="bf16"))
    dw = jax.vjp(lambda w: stage.apply(w, {}, x), w)[1](dy)[0]
    exact = jax.vjp(lambda w: x @ w.astype(x.dtype), w)[1](dy)[0]
    np.testing.assert_allclose(dw, exact, rtol=2**-8)


@pytest.mark.parametrize(("accumulation", "in_float32"), [("full", 2), ("fast", 0)])
def test_accumulation_selects_the_precision_of_dgrad_and_wgrad(accumulation, in_float32):
    w, x = normal(0, D, F), normal(1, B, D, dtype=jnp.bfloat16)
    stage = jgraph.fp8(WAYS["matmul"][0], FP8Config(accumulation=accumulation))
    traced = jax.make_jaxpr(jax.grad(lambda w, x: jnp.sum(stage.apply(w, {}, x)), argnums=(0, 1)))(w, x)
    matmuls = [eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert len(matmuls) == 3
    assert sum(eqn.params["precision"] == highest for eqn in matmuls) == in_float32


def test_the_e4m3_format_rounds_gradients_less_than_hybrid():
    w, x, dy = normal(0, D, F), normal(1, B, D), normal(2, B, F)

    def error(format):
        stage = jgraph.fp8(lambda w, x: x @ w, FP8Config(format=format))
        dx = jax.vjp(lambda x: stage.apply(w, {}, x), x)[1](dy)[0]
        return float(jnp.linalg.norm(dx - dy @ w.T))

    assert error("e4m3") < error("hybrid")


def block(params, x):
    for layer in params["blocks"]:
        x = x + jax.nn.gelu(x @ layer["up"].astype(x.dtype)) @ layer["down"].astype(x.dtype)
    return jnp.mean(jnp.square((x @ params["head"].astype(x.dtype)).astype(jnp.float32)))


PARAMS = {
    "blocks": [{"up": normal(i, D, F, scale=0.1), "down": normal(9 + i, F, D, scale=0.1)} for i in range(3)],
    "head": normal(20, D, 16),
}
X = normal(21, B, D, dtype=jnp.bfloat16)


def quantized(config, fn=block, params=PARAMS, x=X):
    return [product.name for product in jgraph.fp8(fn, config).plan(params, x).products if not product.kept]


def test_keep_excludes_the_head_by_default_and_other_layers_by_pattern():
    assert "head" not in quantized(FP8Config())
    assert "head" in quantized(FP8Config(keep=()))
    assert quantized(FP8Config(keep=("*down",))) == [*(f"blocks/{i}/up" for i in range(3)), "head"]


@pytest.mark.long
def test_a_kept_matmul_in_a_scan_is_not_quantized():
    def layer(x, p):
        return jnp.tanh(x @ p["quantized"]) @ p["kept"], None

    def unrolled(params, x):
        return functools.reduce(lambda x, i: layer(x, jax.tree.map(lambda leaf: leaf[i], params))[0], range(3), x)

    params, x, dy = {"quantized": normal(1, 3, D, F), "kept": normal(2, 3, F, D)}, normal(3, B, D), normal(4, B, D)
    config = FP8Config(keep=("kept",))
    ways = jgraph.fp8(lambda params, x: jax.lax.scan(layer, x, params)[0], config), jgraph.fp8(unrolled, config)
    assert [(p.name, p.kept) for p in ways[0].plan(params, x).products] == [("quantized", ""), ("kept", "kept by `fp8.keep`")]
    found, expected = (with_gradients(lambda p, x, f=f: f.apply(p, {}, x), dy, params, x) for f in ways)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)


def test_a_function_may_close_over_a_traced_array():
    params, x = {"w": normal(1, D, F)}, normal(2, B, D)

    def scaled(factor, x):
        return jgraph.fp8(lambda params, x: x @ params["w"] * factor).apply(params, {}, x)

    expected = jgraph.fp8(lambda params, x: x @ params["w"] * 3.0).apply(params, {}, x)
    np.testing.assert_allclose(jax.jit(scaled)(3.0, x), expected, rtol=1e-6)


def test_a_grouped_matmul_quantizes_forward_and_dgrad_but_not_wgrad():
    sizes = (20, 0, 9)  # three rows have no group
    w_GDF, x_BD, dy_BF = normal(0, 3, D, F), normal(1, B, D, dtype=jnp.bfloat16), normal(2, B, F, dtype=jnp.bfloat16)

    def run(w, x):
        return grouped_dot(x, w.astype(x.dtype), jnp.array(sizes, jnp.int32))

    y, pull_back = jax.vjp(lambda w, x: jgraph.fp8(run, FP8Config(format="e4m3")).apply(w, {}, x), w_GDF, x_BD)
    dw, dx = pull_back(dy_BF)
    np.testing.assert_array_equal(dw, jax.vjp(run, w_GDF, x_BD)[1](dy_BF)[0])
    x, w, dy = rounded(x_BD, jnp.float8_e4m3fn), rounded(w_GDF, jnp.float8_e4m3fn), rounded(dy_BF, jnp.float8_e4m3fn)
    groups = np.repeat(range(3), sizes)
    pairs = [(x[:29, None], w[groups]), (dy[:29, None], w[groups].swapaxes(1, 2))]
    check((y[:29], dx[:29]), [((a @ b)[:, 0], (np.abs(a) @ np.abs(b))[:, 0]) for a, b in pairs])
    assert not np.any(y[29:])
    assert not np.any(dx[29:])


@pytest.mark.parametrize("kind", ["plain", "grouped"])
def test_delayed_scaling_on_constant_arrays_equals_current_scaling(kind):
    # The operands have very different magnitudes, so each needs its own scale.
    x, dy = normal(1, B, D, scale=2.0**20), normal(2, B, F, scale=2.0**-20)
    w = normal(0, D, F) if kind == "plain" else normal(0, 2, D, F)

    def run(w, x):
        return x @ w if kind == "plain" else grouped_dot(x, w, jnp.array([20, B - 20], jnp.int32))

    def step(config, state):
        y, dw, state, dx = with_gradients(jgraph.fp8(run, config).apply, dy, w, state, x)
        return (y, dw, dx), state

    delayed = FP8Config(format="e4m3", recipe="delayed")
    _, state = step(delayed, jgraph.fp8(run, delayed).init(w, x))
    assert state.window[0, 0].tolist() == [float(jnp.max(jnp.abs(operand))) for operand in (x, w, dy)]
    found, _ = step(delayed, state)
    exact, _ = step(FP8Config(format="e4m3"), {})
    jax.tree.map(np.testing.assert_array_equal, found, exact)


def test_the_report_counts_a_grouped_matmul_without_its_wgrad():
    params, x = {"in": normal(0, 32, 32), "experts": grouped_params()}, normal(1, B, 32)

    def products_in(format):
        stage = jgraph.fp8(lambda params, x: grouped_mlp(params["experts"], x @ params["in"]), FP8Config(format=format))
        return stage.plan(params, x).products

    products = products_in("e4m3")
    assert {product.name: product.kept for product in products} == {
        "in": "",
        "experts/router": "a router",
        "experts/up": "",
        "experts/down": "",
    }
    assert [product.sizes for product in products[2:]] == [(2 * B, 32, 128), (2 * B, 64, 32)]
    line = describe(products, FP8Config(), FP8Products(7, 0))
    assert "3 of 4 matmuls with parameters; 1 not: a router, 7 with their gradients; compiled: 7," in line
    needs = {product.kept for product in products_in("hybrid")[2:]}
    old = jax.__version_info__ < (0, 12)
    assert needs == {"a grouped product, which needs `fp8.format` e4m3 before jax 0.12" if old else ""}


def test_a_router_is_not_quantized():
    params = {"up": normal(0, D, F), "moe": {"router": normal(1, F, 16)}}
    assert quantized(FP8Config(), lambda p, x: x @ p["up"] @ p["moe"]["router"], params) == ["up"]


def test_inner_blocks_exclude_the_first_and_last_block():
    assert quantized(FP8Config(blocks="inner")) == ["blocks/1/up", "blocks/1/down"]


def test_a_keep_pattern_without_a_match_is_refused():
    with pytest.raises(ConfigError) as error:
        quantized(FP8Config(keep=("*attention*",)))
    assert error.value.field == "fp8.keep"


def test_inner_blocks_require_numbered_layers():
    with pytest.raises(ConfigError) as error:
        quantized(FP8Config(blocks="inner"), lambda w, x: x @ w["w"], {"w": normal(0, D, F)}, normal(1, B, D))
    assert error.value.field == "fp8.blocks"


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda p, x: x[:, :40] @ p["w"][:40], "40"),
        (lambda p, x: x @ jnp.tanh(p["w"]), "computed"),
        (lambda p, x: jnp.einsum("bd,bdf->bf", x, jnp.broadcast_to(p["w"], (B, D, F))), "batch"),
        (lambda p, x: x * p["w"][0, 0], "no matrix"),
    ],
)
def test_a_function_without_an_fp8_matmul_is_refused_with_the_reason(fn, why):
    with pytest.raises(ConfigError, match=why) as error:
        jgraph.fp8(fn).init({"w": normal(0, D, F)}, normal(1, B, D))
    assert error.value.field == "fn"


def test_a_weight_used_twice_has_one_amax_per_use():
    def twice(w, x):
        return (100 * jnp.tanh(x @ w)) @ w

    stage, w, x = jgraph.fp8(twice, FP8Config(recipe="delayed")), normal(0, D, D), normal(1, B, D)
    assert [product.name for product in stage.plan(w, x).products] == ["", "#2"]
    state = jax.jit(jax.grad(lambda state: jnp.sum(stage.apply(w, state, x))))(stage.init(w, x))
    assert state.window[0, :, 0].tolist() == [float(jnp.max(jnp.abs(x))), 100]


@pytest.mark.long
def test_every_scan_iteration_has_its_own_amax():
    def layers(w, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (10 * x @ w, None), x, w)[0])

    stage, w, x = jgraph.fp8(layers, FP8Config(recipe="delayed")), jnp.stack([jnp.eye(D)] * 3), normal(1, B, D)
    state = jax.grad(lambda state: stage.apply(w, state, x))(stage.init(w, x))
    largest = state.window[0, :, 0]
    np.testing.assert_allclose(largest[1:] / largest[:-1], 10, rtol=0.1)
    assert state.window[0, :, 2].tolist() == [100, 10, 1]


@pytest.mark.long
def test_delayed_scaling_recovers_from_an_activation_spike():
    w, x = {"w": normal(0, D, F)}, normal(1, B, D)
    stage = jgraph.fp8(lambda p, x: jnp.mean((x @ p["w"]) ** 2), FP8Config(recipe="delayed", history=2))

    def error(state, x):
        return abs(float(stage.apply(w, state, x) / jnp.mean((x @ w["w"]) ** 2)) - 1)

    state, found = stage.init(w, x), []
    for x_now in (x, x, x.at[0, 0].set(1e4), x, x, x):
        found.append(error(state, x_now))
        state = jax.grad(lambda state, x=x_now: stage.apply(w, state, x))(state)
    assert np.isfinite(found).all()
    assert found[2] > 0.5  # the scale of earlier steps clips the spike
    assert max(found[1], found[5]) < 0.02


@pytest.mark.parametrize("operand", ["w", "x"])
def test_a_margin_leaves_room_for_a_growing_operand(operand):
    w, x = normal(0, D, F), normal(1, B, D)
    larger = {"w": (3 * w, x), "x": (w, 3 * x)}[operand]

    def error(margin):
        stage = jgraph.fp8(lambda w, x: x @ w, FP8Config(recipe="delayed", margin=margin))
        state = jax.grad(lambda state: jnp.sum(stage.apply(w, state, x)))(stage.init(w, x))
        exact = larger[1] @ larger[0]
        return jnp.linalg.norm(stage.apply(larger[0], state, larger[1]) - exact) / jnp.linalg.norm(exact)

    assert error(margin=2) < 0.05 < error(margin=0)


def test_tiny_arrays_get_the_largest_invertible_scale():
    w, x = 2.0**100 * normal(0, D, F), 2.0**-124 * normal(1, B, D)
    stage, exact = jgraph.fp8(lambda w, x: x @ w), x @ w
    assert jnp.linalg.norm(stage.apply(w, {}, x) - exact) < 0.05 * jnp.linalg.norm(exact)
    (weight,) = stage.quantize(2.0**-124 * normal(0, D, F), {}, x)
    assert float(weight.scale) == 2.0**126


def test_current_scaling_adapts_to_a_spike_immediately():
    w, x = normal(0, D, F), normal(1, B, D).at[0, 0].set(1e4)
    stage = jgraph.fp8(lambda w, x: jnp.mean((x @ w) ** 2))
    assert abs(float(stage.apply(w, {}, x) / jnp.mean((x @ w) ** 2)) - 1) < 0.05


@pytest.mark.long
def test_a_flax_module_needs_no_changes_for_fp8():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(4, D, decode=False, rngs=rngs)
            self.mlp = nnx.Linear(D, F, rngs=rngs)

        def loss(self, batch):
            return jnp.mean(self.mlp(self.attention(batch)) ** 2)

    model = jgraph.functional(lambda: Model(nnx.Rngs(0)))
    batch = normal(1, 2, 16, D)
    stage = jgraph.fp8(lambda params, batch: model.loss(params, batch, jax.random.key(0))[0])
    found = stage.plan(model.shapes, batch).products
    assert [product.name for product in found if not product.kept] == [
        *(f"attention/{name}/kernel" for name in ("query", "key", "value", "out")),
        "mlp/kernel",
    ]
    params, _ = jax.jit(model.init)()
    near = jax.jit(lambda params: (stage.apply(params, {}, batch), model.loss(params, batch, jax.random.key(0))[0]))(params)
    np.testing.assert_allclose(*near, rtol=0.1)


def test_first_and_last_count_the_blocks_that_are_not_quantized():
    counts = {(1, 0): (1, 2), (0, 1): (0, 1), (2, 0): (2,), (0, 0): (0, 1, 2)}
    for (first, last), blocks in counts.items():
        names = [f"blocks/{i}/{name}" for i in blocks for name in ("up", "down")]
        assert quantized(FP8Config(blocks="inner", first=first, last=last)) == names
    with pytest.raises(ConfigError, match=r"kept by `fp8\.blocks`"):
        quantized(FP8Config(blocks="inner", first=2, last=2))


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"first": 2}, "fp8.first"), ({"last": -1, "blocks": "inner"}, "fp8.last"), ({"compute": "calibrate"}, "fp8.compute")],
)
def test_a_choice_without_effect_is_refused(fields, field):
    with pytest.raises(ConfigError) as error:
        FP8Config(**fields)
    assert error.value.field == field


CALIBRATION = FP8Config(recipe="delayed", compute="calibrate")


@pytest.mark.parametrize("way", WAYS)
def test_calibration_observes_the_arrays_of_an_unquantized_matmul(way):
    fn, place = WAYS[way]
    w, x_BD, dy_BF = place(normal(0, D, F)), normal(1, B, D, dtype=jnp.bfloat16), normal(2, B, F, dtype=jnp.bfloat16)
    stage = jgraph.fp8(fn, CALIBRATION)
    y, pull_back = jax.vjp(lambda w, state, x: stage.apply(w, state, x), w, stage.init(w, x_BD), x_BD)
    dw, state, dx = pull_back(dy_BF)
    plain, pull_plain_back = jax.vjp(fn, w, x_BD)
    jax.tree.map(np.testing.assert_array_equal, (y, dw, dx), (plain, *pull_plain_back(dy_BF)))
    assert state.window[0, 0].tolist() == [float(jnp.max(jnp.abs(array))) for array in (x_BD, w, dy_BF)]


def test_fp8_after_calibration_uses_the_scales_of_the_histories():
    w, x = normal(0, D, F, scale=2.0**-20), normal(1, B, D, scale=2.0**20)
    dy = normal(2, B, F)

    def step(config, state):
        stage = jgraph.fp8(lambda w, x: x @ w, config)
        y, pull_back = jax.vjp(lambda w, state, x: stage.apply(w, state, x), w, state, x)
        dw, state, dx = pull_back(dy)
        return (y, dw, dx), state

    delayed, zeros = FP8Config(recipe="delayed"), jgraph.fp8(lambda w, x: x @ w, CALIBRATION).init(w, x)
    _, warm = step(CALIBRATION, zeros)
    jax.tree.map(np.testing.assert_array_equal, step(delayed, warm)[0], step(FP8Config(), {})[0])
    assert jnp.max(jnp.abs(step(delayed, zeros)[0][0])) == 0  # without calibration, scale 1 rounds w to zero


MXFP8 = FP8Config(recipe="mxfp8")


def in_blocks(x, axis):
    """Quantizes an array to E4M3 with a scale for each 32 elements along an axis, and dequantizes it in float64."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    blocks = x.reshape(-1, 32)
    scale = 2.0 ** np.ceil(np.log2(np.abs(blocks).max(1, keepdims=True) / 448))
    values = (blocks / scale).astype(np.float32).astype(jnp.float8_e4m3fn).astype(np.float64) * scale
    return np.moveaxis(values.reshape(x.shape), -1, axis)


@pytest.mark.parametrize("way", WAYS)
def test_mxfp8_quantizes_every_operand_along_its_contracted_axis(way):
    fn, place = WAYS[way]
    wide = 2 * D  # a multiple of 32
    if way == "einsum with heads":
        fn = lambda w, x: jnp.einsum("bd,dhk->bhk", x, w.astype(x.dtype)).reshape(B, F)  # noqa: E731
        place = lambda w: w.reshape(wide, H, K)  # noqa: E731
    # The columns have very different magnitudes, so a scale for the whole array would round small ones to zero.
    w_DF = normal(0, wide, F, dtype=jnp.bfloat16).astype(jnp.float32) * 2.0 ** -jnp.arange(F)
    x_BD, dy_BF = normal(1, B, wide, dtype=jnp.bfloat16), normal(2, B, F, dtype=jnp.bfloat16)
    stage = jgraph.fp8(fn, MXFP8)
    y, dw, dx = with_gradients(lambda w, x: stage.apply(w, {}, x), dy_BF, place(w_DF), x_BD)
    (dw,) = jax.linear_transpose(place, w_DF)(dw) if way != "a slice" else (dw[:, :F],)
    products = ((x_BD, w_DF), (dy_BF, w_DF.T), (x_BD.T, dy_BF))
    operands = [(in_blocks(a, 1), in_blocks(b, 0)) for a, b in products]
    check((y, dx, dw), [(a @ b, np.abs(a) @ np.abs(b)) for a, b in operands])


@pytest.mark.parametrize("recipe", ["mxfp8", "current"])
def test_mxfp8_keeps_the_precision_of_small_blocks(recipe):
    w, x = normal(0, D * 2, F), normal(1, B, D * 2).at[0].multiply(2.0**20)  # an outlier row
    y, exact = jgraph.fp8(lambda w, x: x @ w, FP8Config(recipe=recipe)).apply(w, {}, x), x @ w
    error = jnp.linalg.norm((y - exact)[1:]) / jnp.linalg.norm(exact[1:])
    assert error > 0.01
    assert (error < 0.05) == (recipe == "mxfp8")


@pytest.mark.long
def test_mxfp8_needs_multiples_of_32_and_no_grouped_matmul():
    with pytest.raises(ConfigError, match="multiples of 32"):
        jgraph.fp8(lambda w, x: x @ w, MXFP8).init(normal(0, 48, F), normal(1, B, 48))
    with pytest.raises(ConfigError, match="grouped product, which has no mxfp8 kernel"):
        jgraph.fp8(lambda w, x: grouped_dot(x, w, jnp.array([B], jnp.int32)), MXFP8).init(normal(0, 1, F, F), normal(1, B, F))


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_matmul_adds_fewer_than_fifty_equations_to_a_step(recipe):
    # The time to trace and lower a step is in proportion to its equations. A program without FP8 has three per matmul.
    def equations(num_layers):
        params = {f"w{i}": jnp.ones((F, F)) for i in range(num_layers)}
        linear = jgraph.fp8(lambda params, x: functools.reduce(jnp.matmul, params.values(), x), FP8Config(recipe=recipe))
        x = jnp.ones((B, F))
        state = linear.init(params, x)

        def step(params, state):
            weights = linear.quantize(params, state, x)
            return jax.grad(lambda *given: linear.apply(*given, x, weights=weights).sum(), argnums=(0, 1))(params, state)

        return len(jax.make_jaxpr(step)(params, state).jaxpr.eqns)

    assert equations(4) - equations(2) < 2 * 50
