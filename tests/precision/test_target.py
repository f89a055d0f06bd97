"""FP8 steps cross-compiled for an H200, and MXFP8 steps for a B200: kernels, matmuls and capture."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import jgraph
from jgraph import FP8Config
from jgraph.precision.config import XLA_OPTIONS
from jgraph.schedule import generate
from jgraph.xla import aot, compiler_options
from jgraph.xla.explain import FP8Products
from jgraph.xla.hlo import HloModule
from jgraph_models.gpt import GPT, GPTConfig, pipeline_model

pytestmark = [pytest.mark.target, pytest.mark.long]

CONFIG = GPTConfig(num_layers=1, d_model=128, num_heads=2, num_kv_heads=2, d_ff=512, vocab_size=256, attention="xla")
# A process compiles Mosaic kernels for one architecture only.
WITHOUT_MOSAIC = replace(CONFIG, norm="xla")
TOKENS = jax.ShapeDtypeStruct((8, 129), jnp.int32)
MATMULS = 4  # linear layers of a block


HAS_KERNEL = jax.__version_info__ >= (0, 11)


def model_and_loss(config=CONFIG):
    model = jgraph.functional(lambda: GPT(config, rngs=nnx.Rngs(0)))
    return model, lambda params, tokens, key: model.loss(params, tokens, key)[0]


def explained(step, target="h200", batch=TOKENS):
    options = compiler_options("auto", XLA_OPTIONS, platform="gpu", num_devices=step.num_devices)
    if step.mesh is not None:
        step = step.on(aot.devices(step.num_devices, gpu=target))
    return jgraph.explain(
        step.jitted(),
        step.state,
        step.placed_shapes(batch),
        target=target,
        compiler_options=options,
    )


def assert_captured(report, microbatches):
    """Microbatches are a loop: its body is a command buffer, between two others."""
    outside = [found.kind for found in report.capture.outside]
    assert (report.capture.command_buffers, outside) == ((1, []) if microbatches == 1 else (3, ["While"]))


@pytest.mark.once
@pytest.mark.parametrize(("recipe", "microbatches"), [("current", 1), ("delayed", 2)])
def test_an_fp8_step_is_captured_with_every_linear_layer_in_fp8(h200, recipe, microbatches):
    model, loss = model_and_loss()
    step = jgraph.train_step(
        loss,
        jgraph.elementwise(optax.adamw(1e-3)),
        jgraph.Replicated(None, model.shapes),
        num_microbatches=microbatches,
        fp8=FP8Config(recipe=recipe),
        batch=TOKENS,
    )
    report = explained(step)
    assert_captured(report, microbatches)
    assert report.fp8.products == 3 * MATMULS
    assert (report.fp8.transposes == 0) == HAS_KERNEL
    assert not report.dropped


PRODUCTS = 2 + 3 + 3  # of `shared_operand`: x has no gradient
MATRICES = {name: jax.ShapeDtypeStruct((256, 256), jnp.float32) for name in ("in", "q", "k")}
ROWS = jax.ShapeDtypeStruct((512, 256), jnp.float32)


def shared_operand(params, x, key):
    hidden = x.astype(jnp.bfloat16) @ params["in"].astype(jnp.bfloat16)
    q, k = (hidden @ params[name].astype(jnp.bfloat16) for name in "qk")
    return jnp.mean((q * k).astype(jnp.float32))


@pytest.mark.parametrize(("wgrad", "products"), [("fp8", PRODUCTS), ("bf16", PRODUCTS - 3)])
def test_matmuls_that_share_an_operand_stay_in_fp8_except_those_of_a_bf16_wgrad(h200, wgrad, products):
    # XLA's dot merger would join q and k, and run them in bfloat16.
    fp8 = FP8Config(recipe="current", wgrad=wgrad)
    step = jgraph.train_step(shared_operand, optax.sgd(1e-3), jgraph.Replicated(None, MATRICES), fp8=fp8, batch=ROWS)
    assert explained(step, batch=ROWS).fp8.products == products


def test_an_mxfp8_step_for_a_b200_is_captured_with_block_scaled_matmuls(h200):
    model, loss = model_and_loss(WITHOUT_MOSAIC)
    strategy, config = jgraph.Replicated(None, model.shapes), FP8Config(recipe="mxfp8")
    step = jgraph.train_step(
        loss, jgraph.elementwise(optax.adamw(1e-3)), strategy, num_microbatches=2, fp8=config, batch=TOKENS
    )
    report = explained(step, "b200")
    assert_captured(report, 2)
    assert report.fp8.products == 3 * MATMULS
    assert not report.dropped


def test_every_matmul_of_a_sharded_mxfp8_step_is_a_cudnn_call_on_a_b200_and_none_on_an_h200(h200):
    strategy = jgraph.FullySharded(Mesh(np.array(jax.devices()[:2]), ("fsdp",)), MATRICES, compute_dtype=jnp.bfloat16)
    step = jgraph.train_step(shared_operand, optax.sgd(1e-3), strategy, fp8=FP8Config(recipe="mxfp8"), batch=ROWS)

    def calls(gpu):
        there = step.on(aot.devices(2, gpu=gpu))
        options = compiler_options("auto", XLA_OPTIONS, platform="gpu", num_devices=2)
        compiled, _ = aot.compile_for(there.jitted(), there.state, there.placed_shapes(ROWS), gpu=gpu, compiler_options=options)
        found = HloModule.parse(compiled.as_text()).instructions.values()
        return [[i.target for i in found].count(name) for name in ("__cudnn$blockScaledDot", "__cublas$lt$matmul")]

    assert calls("b200") == [PRODUCTS, 0]
    assert calls("h200") == [0, PRODUCTS]


@pytest.mark.skipif(not HAS_KERNEL, reason="JAX before 0.11 has no kernel to fuse it into")
def test_gelu_and_its_gradient_are_fused_into_quantization(h200):
    model, loss = model_and_loss()
    step = jgraph.train_step(loss, optax.sgd(1e-3), jgraph.Replicated(None, model.shapes), fp8=FP8Config(), batch=TOKENS)
    tokens = step.placed_shapes(TOKENS)
    assert "tanh" in str(jax.make_jaxpr(step.jitted())(step.state, tokens))
    with aot.lowering_for("h200"):
        assert "tanh" not in str(jax.make_jaxpr(step.jitted())(step.state, tokens))


@pytest.mark.skipif(not HAS_KERNEL, reason="JAX before 0.11 has no kernel to fuse it into")
def test_pipeline_stages_fuse_gelu_into_quantization(h200):
    def traced(step):
        return str(jax.make_jaxpr(step.jitted())(step.state, step.placed_shapes(TOKENS)))

    step = pipelined(FP8Config())
    assert "tanh" in traced(step)
    with aot.lowering_for("h200"):
        assert "tanh" not in traced(step.on(aot.devices(2)))


@pytest.mark.once
@pytest.mark.parametrize(("name", "microbatches"), [("dp", 1), ("fsdp", 2)])
def test_fp8_wgrads_summed_over_devices_have_the_dtype_of_the_sum(h200, name, microbatches):
    model, loss = model_and_loss()
    devices = np.array(jax.devices()[:2])
    # 1,280 and 640 tokens per device: no activation has the shape of a weight.
    batch = jax.ShapeDtypeStruct((8, 321), jnp.int32)
    strategy = {
        "dp": lambda: jgraph.Replicated(Mesh(devices, ("data",)), model.shapes),
        "fsdp": lambda: jgraph.FullySharded(Mesh(devices, ("fsdp",)), model.shapes, compute_dtype=jnp.bfloat16),
    }[name]()
    step = jgraph.train_step(
        loss,
        jgraph.elementwise(optax.adamw(1e-3)),
        strategy,
        num_microbatches=microbatches,
        fp8=FP8Config(),
        batch=batch,
    )
    options = compiler_options("auto", XLA_OPTIONS, platform="gpu", num_devices=step.num_devices)
    step = step.on(aot.devices(step.num_devices))
    tokens = step.placed_shapes(batch)
    compiled, _ = aot.compile_for(step.jitted(), step.state, tokens, compiler_options=options)
    module = HloModule.parse(compiled.as_text())
    found = [i for i in module.instructions.values() if i.target == "__cublas$lt$matmul$f8"]
    assert len(found) == 3 * MATMULS
    wgrads = [i for i in found if i.shapes[0].dtype == "f32"]
    assert len(wgrads) == MATMULS
    # No other array with the shape of a weight is cast from bfloat16 to float32.
    shapes = {i.shapes[0].dims for i in wgrads}
    casts = [i for i in module.instructions.values() if i.opcode == "convert" and i.shapes[0].dims in shapes]
    assert not [i for i in casts if i.shapes[0].dtype == "f32" and module.instructions[i.operands[0]].shapes[0].dtype == "bf16"]


def pipelined(fp8):
    config = replace(CONFIG, num_layers=2)  # one layer per rank
    model, _ = model_and_loss(config)
    mesh, schedule = Mesh(np.array(jax.devices()[:2]), ("pipe",)), generate("zb-h1", pp=2, microbatches=4)
    strategy = jgraph.Pipelined(mesh, model.shapes, schedule, compute_dtype=jnp.bfloat16)
    pieces = pipeline_model(config, 2)
    return jgraph.train_step(pieces, optax.sgd(1e-3), strategy, num_microbatches=4, fp8=fp8, batch=TOKENS)


def test_every_matmul_in_the_loop_of_a_pipeline_is_fp8(h200):
    report = explained(pipelined(FP8Config(recipe="delayed")))
    assert report.fp8.products == 3 * MATMULS
    assert (report.fp8.transposes == 0) == HAS_KERNEL


@pytest.mark.parametrize("wgrad", ["fp8", pytest.param("bf16", marks=pytest.mark.once)])
def test_a_split_stage_has_only_fp8_matmuls_that_accumulate_main_grad(h200, wgrad):
    def stage(params, x):
        return x + jax.nn.gelu(x @ params["up"].astype(x.dtype)) @ params["down"].astype(x.dtype)

    params = {"up": jax.ShapeDtypeStruct((256, 512), jnp.float32), "down": jax.ShapeDtypeStruct((512, 256), jnp.float32)}
    x = jax.ShapeDtypeStruct((384, 256), jnp.bfloat16)
    fp8 = jgraph.fp8(stage, FP8Config(recipe="delayed", wgrad=wgrad))
    state = jax.eval_shape(fp8.init, params, x)
    given = params, state, jax.eval_shape(fp8.quantize, params, state, x)
    split = jgraph.split_backward(fp8)
    here = split.spec(given, x)
    with aot.lowering_for("h200"):  # the trace for an H200 uses other kernels
        spec = split.spec(given, x)
    assert spec.residuals.trace is not here.residuals.trace
    parts = {
        "forward": (split.forward, given, x),
        "dgrad": (split.dgrad, given, spec.residuals, spec.y),
        "wgrad": (split.accumulate, (params, None, None), given, spec.residuals, spec.stash),
    }
    options = compiler_options("auto", XLA_OPTIONS, platform="gpu")
    for part, (run, *args) in parts.items():
        compiled, _ = aot.compile_for(jax.jit(run), *args, compiler_options=options)
        products = re.findall(r'custom_call_target="(__cublas[^"]*)"', compiled.as_text())
        in_bf16 = part == "wgrad" and wgrad == "bf16"
        assert products == ["__cublas$lt$matmul" + "$f8" * (not in_bf16)] * 2, part
        if HAS_KERNEL:
            assert FP8Products.count(compiled).transposes == 0, part
        assert compiled.as_text().count('"beta":1') == (2 if part == "wgrad" else 0), part
