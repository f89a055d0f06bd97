"""A layer of experts, compiled for an H200 that is not here: one command buffer without a word to the host."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jgraph
from jgraph.xla import aot


@pytest.mark.target
@pytest.mark.long
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="grouped products are kernels from jax 0.11 on")
def test_a_layer_and_its_gradients_are_a_single_command_buffer(h200):
    config = jgraph.MoEConfig(num_experts=8, z_loss=0.001)
    graph, params, state = nnx.split(nnx.eval_shape(lambda: jgraph.MoE(256, 512, config, rngs=nnx.Rngs(0))), nnx.Param, ...)

    def loss(params, state, x_BTD):
        moe = nnx.merge(graph, params, state)
        y_BTD = moe(x_BTD)
        return jnp.sum(y_BTD.astype(jnp.float32)), nnx.to_pure_dict(nnx.state(moe, nnx.Not(nnx.Param)))

    x_BTD = jax.ShapeDtypeStruct((2, 1024, 256), jnp.bfloat16)
    step = jax.jit(jax.value_and_grad(loss, (0, 2), has_aux=True))
    _, report = aot.compile_for(step, nnx.to_pure_dict(params), nnx.to_pure_dict(state), x_BTD)
    assert (report.command_buffers, report.captured, report.outside) == (1, report.total, ())
