"""Elementwise functions between two FP8 matmuls are computed only in the quantization kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgraph
from jgraph.kernels.quantize import CALLS
from jgraph.precision import transform
from jgraph.precision._fuse import fused
from tests.kernels.test_quantize import assert_within_one_step

pytestmark = pytest.mark.long

fuse = functools.partial(fused, implementation="xla")
ACTIVATIONS = {"tanh", "exp", "logistic", "erf", "erfc", "max", "integer_pow", "square"}


def primitives(fn, *args):
    """Returns the primitives in `ACTIVATIONS` that are computed outside the kernels."""

    def of(jaxpr):
        for eqn in jaxpr.eqns:
            inner = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
            if inner is not None and eqn.params.get("name") not in CALLS:
                yield from of(getattr(inner, "jaxpr", inner))
            yield eqn.primitive.name

    return set(of(jax.make_jaxpr(fn)(*args).jaxpr)) & ACTIVATIONS


def values(i, shape=(128, 64), dtype=jnp.float32):
    return 2 * jax.random.normal(jax.random.key(i), shape, dtype)


def quantized(fn):
    """Returns a function that quantizes `fn` of arrays in memory."""

    def run(*inputs):
        y = fn(*jax.lax.optimization_barrier(inputs))
        return jgraph.kernels.cast_transpose(y.reshape(-1, y.shape[-1]), jnp.float32(16))

    return run


@pytest.mark.parametrize(
    "fn",
    [
        jax.nn.gelu,
        functools.partial(jax.nn.gelu, approximate=False),
        jax.nn.silu,
        lambda x: jax.nn.relu(x) ** 2,
        lambda x: jnp.tanh(x.reshape(2, 64, 64)) / 2,
        lambda x: jnp.tanh(x + jnp.arange(64.0)),
        lambda x: jnp.tanh(x * jnp.cos(jnp.sum(x, 1, keepdims=True))),
        lambda x: jnp.tanh(x.reshape(2, 64, 64) * jnp.cos(x.reshape(2, 64, 64).sum(2))[..., None]),
    ],
)
def test_an_activation_is_fused_into_its_quantization(fn):
    x = values(0)
    assert primitives(quantized(fn), x)
    assert not primitives(fuse(quantized(fn)), x)
    assert_within_one_step(fuse(quantized(fn))(x), quantized(fn)(x))


def test_a_function_of_several_arrays_is_fused():
    def swiglu(x, y):
        return jax.nn.silu(x) * y

    x, y = values(0), values(1)
    assert not primitives(fuse(quantized(swiglu)), x, y)
    assert_within_one_step(fuse(quantized(swiglu))(x, y), quantized(swiglu)(x, y))


def test_an_array_with_another_reader_is_still_written():
    def both(x):
        y = jnp.tanh(jax.lax.optimization_barrier(x))
        return jgraph.kernels.cast_transpose(y, jnp.float32(16)), y.sum()

    assert primitives(fuse(both), values(0)) == {"tanh"}
    found, unfused = fuse(both)(values(0)), both(values(0))
    jax.tree.map(np.testing.assert_array_equal, found, unfused)


@pytest.mark.parametrize(
    "fn",
    [
        # An array without another reader would have to be written.
        lambda x: jnp.tanh(x) * jnp.arange(128.0 * 64).reshape(128, 64),
        # The factor is not a column with one value per row.
        lambda x: jnp.tanh(x.reshape(2, 64, 64) * jnp.cos(x.reshape(2, 64, 64).sum((0, 2)))[None, :, None]),
        lambda x: jnp.tanh(jnp.sort(x)),  # sort is not elementwise
        lambda x: jnp.tanh(x).T,
        lambda x: jnp.tanh(x) * jnp.abs(1j * x),  # kernels have no complex numbers
        # The argument of tanh is in memory only inside the function.
        jax.jit(lambda x: jnp.tanh(jax.lax.optimization_barrier(x + 1))),
        lambda x: jnp.where(x > 0, jnp.tanh(x), x),
        lambda x: sum(jnp.tanh(jax.lax.optimization_barrier(x + i)) for i in range(5)),  # more inputs than a kernel supports
    ],
)
def test_an_unsupported_function_is_not_fused(fn):
    x = values(0)
    assert primitives(fuse(quantized(fn)), x) >= {"tanh"}
    jax.tree.map(np.testing.assert_array_equal, fuse(quantized(fn))(x), quantized(fn)(x))


def test_user_functions_with_the_names_of_kernel_functions_are_not_fused():
    @jax.jit
    def amax(x):
        return jnp.tanh(x).max(1)

    @jax.jit
    def cast_transpose(x, scale):
        return x * scale

    def program(x):
        h = jnp.tanh(jax.lax.optimization_barrier(x))
        return amax(h), cast_transpose(h, 2.0)

    jax.tree.map(np.testing.assert_array_equal, fuse(program)(values(0)), program(values(0)))


@pytest.mark.parametrize("want", ["rows", "columns", "amax"])
@pytest.mark.parametrize("shape", [(128, 64), (64, 64)])
def test_a_fused_kernel_returns_only_the_requested_outputs(want, shape):
    def program(x):
        return jgraph.kernels.cast_transpose(jnp.tanh(jax.lax.optimization_barrier(x)), jnp.float32(16), want=want)

    assert not primitives(fuse(program), values(0, shape))
    found, unfused = fuse(program)(values(0, shape)), program(values(0, shape))
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, unfused)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=0.13), found, unfused)


def test_a_runtime_scalar_is_not_fused():
    def program(x, scale):
        return quantized(lambda x: jnp.tanh(x) * scale)(x)

    found, unfused = fuse(program)(values(0), jnp.float32(2)), program(values(0), jnp.float32(2))
    jax.tree.map(np.testing.assert_array_equal, found, unfused)


def test_a_fused_norm_reads_the_residual_written_for_other_readers():
    def residual(x, y):
        h = (x + y).astype(jnp.bfloat16)
        norm = jnp.tanh(h * jnp.cos(jnp.sum(h, 1, keepdims=True, dtype=jnp.float32)))
        return jgraph.kernels.cast_transpose(norm, jnp.float32(16)), h + 1

    x, y = values(0), values(1)
    assert "tanh" not in primitives(fuse(residual), x, y)
    (found, h), (unfused, expected) = fuse(residual)(x, y), residual(x, y)
    assert_within_one_step(found, unfused)
    np.testing.assert_array_equal(h, expected)


class MLP(nnx.Module):
    def __init__(self, activation, rngs):
        self.up = nnx.Linear(64, 128, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(128, 64, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        self.activation = activation

    def __call__(self, x):
        return self.down(self.activation(self.up(x)))


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("activation", [nnx.gelu, nnx.silu, nnx.relu])
def test_an_activation_and_its_gradient_are_never_written_to_memory(recipe, activation):
    graph, params = nnx.split(MLP(activation, nnx.Rngs(0)))
    x = values(0, (2, 64, 64), jnp.bfloat16)
    stage = jgraph.fp8(lambda params, x: nnx.merge(graph, params)(x), jgraph.FP8Config(recipe=recipe, history=2))
    state = stage.init(params, x)

    def loss(params, state):
        return jnp.mean(stage.apply(params, state, x).astype(jnp.float32) ** 2)

    plain = jax.value_and_grad(loss, argnums=(0, 1))
    of_loss = {"integer_pow", "square"}
    # The gradient of relu selects by a mask, which no kernel reads.
    left = of_loss | ({"max"} if activation is nnx.relu else set())
    assert primitives(plain, params, state) > primitives(fuse(plain), params, state)
    assert primitives(fuse(plain), params, state) <= left
    (value, grads), (expected, unfused) = fuse(plain)(params, state), plain(params, state)
    np.testing.assert_allclose(value, expected, rtol=1e-2)
    for a, b in zip(jax.tree.leaves(grads[0]), jax.tree.leaves(unfused[0]), strict=True):
        # Some values round differently, because the activation is not rounded to bfloat16 first.
        assert jnp.linalg.norm(a - b) <= 0.1 * jnp.linalg.norm(b)


@pytest.mark.parametrize(("recipe", "remat"), [("current", False), ("delayed", True)])
def test_the_parts_of_a_split_fuse_activations_into_quantization(monkeypatch, recipe, remat):
    graph, params = nnx.split(MLP(nnx.gelu, nnx.Rngs(0)))
    x = values(0, (4, 64, 64), jnp.bfloat16)

    def stage(params, x):
        return nnx.merge(graph, params)(x)

    def parts():
        fn = jax.checkpoint(stage, prevent_cse=False) if remat else stage
        fp8 = jgraph.fp8(fn, jgraph.FP8Config(recipe=recipe, history=2))
        split, given = jgraph.split_backward(fp8), (params, fp8.init(params, x), None)
        y, residuals = split.forward(given, x)
        dx, _, stash = split.dgrad(given, residuals, y)
        late = split.wgrad(given, residuals, stash)
        calls = ((split.forward, given, x), (split.dgrad, given, residuals, y), (split.wgrad, given, residuals, stash))
        return jax.tree.leaves((y, dx, late)), [primitives(*call) for call in calls]

    expected, written = parts()
    assert "tanh" in written[0]
    assert written[1]
    monkeypatch.setattr(transform, "fused", fuse)
    found, written = parts()
    assert written == [set()] * 3
    for a, b in zip(found, expected, strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        # Some values round differently, because the activation is not rounded to bfloat16 first.
        assert jnp.linalg.norm(a - b) <= 0.1 * jnp.linalg.norm(b)


def test_a_function_is_not_retraced_without_a_kernel():
    calls = []

    def fn(x):
        calls.append(x)
        return x

    assert fused(fn)(1.0) == 1.0
    assert calls == [1.0]
