"""`split_backward` on a GPU: cuDNN attention, and wgrads that cuBLASLt adds to main_grad."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgraph
from jgraph.xla import compile_and_report, compiler_options
from jgraph_models.gpt import Block, GPTConfig, attention_kernel
from jgraph_models.rotary import rotary

pytestmark = pytest.mark.gpu

CONFIG = GPTConfig(num_layers=2, d_model=1024, num_heads=8, num_kv_heads=8, d_ff=4096)


def block():
    graph, params = nnx.split(Block(CONFIG, rngs=nnx.Rngs(0)))
    table = rotary(512, CONFIG.head_size, CONFIG.rope_theta)
    x, dy = (jax.random.normal(jax.random.key(i), (2, 512, 1024), jnp.bfloat16) for i in (1, 2))
    return (lambda p, x: nnx.merge(graph, p)(x, table)), params, x, dy


def test_gradients_equal_jax_vjp_with_cudnn_attention():
    stage, params, x, dy = block()
    assert attention_kernel(CONFIG, 512) == "cudnn"
    split = jgraph.split_backward(stage)

    @jax.jit
    def ours(params, x, dy):
        _, residuals = split.forward(params, x)
        dx, early, stash = split.dgrad(params, residuals, dy)
        return split.merge(early, split.wgrad(params, residuals, stash)), dx

    theirs = jax.jit(lambda params, x, dy: jax.vjp(stage, params, x)[1](dy))(params, x, dy)
    for a, b in zip(jax.tree.leaves(ours(params, x, dy)), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        # jax.vjp rounds weight gradients to bfloat16 (2**-9). split_backward keeps float32.
        assert np.linalg.norm(a - b) <= 2**-7 * np.linalg.norm(b)


def test_wgrad_is_added_to_main_grad_inside_the_matmul():
    stage, params, x, _ = block()
    split = jgraph.split_backward(stage)
    spec = split.spec(params, x)
    main_grad = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
    lowered = jax.jit(split.accumulate, donate_argnums=0).lower(main_grad, params, spec.residuals, spec.stash)
    # Triton matmuls also add in their epilogue, but the program text does not show it.
    text = lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).as_text()
    matmuls = re.findall(r"f32\[\d+,\d+\].*custom_call_target=\"__cublas\$lt\$matmul\".*", text)
    assert len(matmuls) == len(spec.delayed) == 4
    assert all('"beta":1' in product for product in matmuls)


def test_forward_dgrad_and_wgrad_are_captured_completely():
    stage, params, x, dy = block()
    split = jgraph.split_backward(stage)
    spec = split.spec(params, x)
    main_grad = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
    parts = (
        jax.jit(split.forward).lower(params, x),
        jax.jit(split.dgrad).lower(params, spec.residuals, dy),
        jax.jit(split.accumulate, donate_argnums=0).lower(main_grad, params, spec.residuals, spec.stash),
    )
    for lowered in parts:
        _, report = compile_and_report(lowered, compiler_options("auto", ["xla_gpu_graph_min_graph_size=1"], platform="gpu"))
        assert report is not None
        assert report.captured == report.total
