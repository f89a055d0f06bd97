"""Tests that an MoE layer compiled for an H200 target is one command buffer."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jgraph
from jgraph.precision._fuse import fused
from jgraph.xla import aot, explain


@pytest.mark.target
@pytest.mark.long
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="grouped matmuls are kernels since jax 0.11")
@pytest.mark.parametrize("format", [None, "e4m3" if jax.__version_info__ < (0, 12) else "hybrid"])
def test_a_layer_and_its_gradients_are_a_single_command_buffer(h200, format):
    config = jgraph.MoEConfig(num_experts=8, z_loss=0.001)
    graph, params, state = nnx.split(nnx.eval_shape(lambda: jgraph.MoE(256, 512, config, rngs=nnx.Rngs(0))), nnx.Param, ...)

    def layer(params, state, x_BTD):
        moe = nnx.merge(graph, params, state)
        return moe(x_BTD), nnx.to_pure_dict(nnx.state(moe, nnx.Not(nnx.Param)))

    def loss(params, state, x_BTD):
        fp8 = jgraph.fp8(layer, jgraph.FP8Config(format=format)) if format else None
        y_BTD, after = fp8.apply(params, {}, state, x_BTD) if fp8 else layer(params, state, x_BTD)
        return jnp.sum(y_BTD.astype(jnp.float32) ** 2), after

    x_BTD = jax.ShapeDtypeStruct((2, 1024, 256), jnp.bfloat16)
    step = jax.value_and_grad(loss, (0, 2), has_aux=True)
    step = fused(step) if format else step
    compiled, report = aot.compile_for(jax.jit(step), nnx.to_pure_dict(params), nnx.to_pure_dict(state), x_BTD)
    assert (report.command_buffers, report.captured, report.outside) == (1, report.total, ())
    assert explain.FP8Products.count(compiled) == explain.FP8Products(4 if format else 0, 0)
