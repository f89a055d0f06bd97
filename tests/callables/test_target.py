"""Executables of graphed callables compiled for an H200: fully captured, with main_grad updated in place."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jgraph
from jgraph.precision.config import XLA_OPTIONS
from jgraph.xla import alias_map, aot, compiler_options
from jgraph.xla.explain import FP8Products
from jgraph_models.gpt import Block, GPTConfig
from jgraph_models.rotary import rotary
from tests.callables import chain

pytestmark = pytest.mark.target


def blocks(count, device, **kwargs):
    config = GPTConfig(vocab_size=256, num_layers=count, d_model=64, num_heads=2, num_kv_heads=2, d_ff=256)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))
    table = rotary(32, config.head_size, config.rope_theta)

    def stage(params, x):
        return nnx.merge(graphdef, params)(x, table)

    x = jax.ShapeDtypeStruct((2, 32, 64), jnp.bfloat16)
    return jgraph.make_graphed_callables((stage,) * count, (params,) * count, ((x,),) * count, devices=[device], **kwargs)


@functools.cache
def aliased(device):
    return blocks(1, device, param_grads="aliased")


@pytest.mark.parametrize("delay", [pytest.param(False, marks=[pytest.mark.long, pytest.mark.once]), True])
def test_every_executable_of_a_block_is_one_command_buffer(h200, delay):
    graphed = blocks(1, h200[0], delay_wgrad=True) if delay else aliased(h200[0])
    reports = dict(graphed.reports())
    assert set(reports) == ({"forward_0", "dgrad_0", "wgrad_0"} if delay else {"forward_0", "backward_0"})
    for report in reports.values():
        assert report.command_buffers == 1
        assert report.captured == report.total
        assert report.outside == ()


@pytest.mark.long
def test_main_grad_is_updated_in_place_on_an_h200(h200):
    parts = aliased(h200[0])[0].parts
    assert len(parts["backward"].adds) == 6
    assert alias_map(parts["backward"].compiled) == {i: i for i in range(6)}


@pytest.mark.long
@pytest.mark.once
def test_a_joined_order_is_one_command_buffer_on_an_h200(h200):
    params = jax.eval_shape(functools.partial(chain.make_params, 0))
    graphed = jgraph.make_graphed_callables(
        (chain.stage,) * 2,
        (params,) * 2,
        chain.sample(2),
        order=[1, 2, -2, -1, -2.5, -1.5],
        delay_wgrad=True,
        reuse_buffers=True,
        devices=[h200[0]],
    )
    plan = graphed._plan(graphed.schedule, half_square, (), outputs="drop", join="segments")
    (instruction,) = plan.instructions
    assert instruction.executable.report.command_buffers == 1
    assert instruction.executable.report.captured == instruction.executable.report.total
    count = len(instruction.executable.io.sums)
    assert count == 4  # two matmuls per stage; the gradient of the bias is owned
    aliases = alias_map(instruction.executable.compiled)
    assert {out: aliases[out] for out in range(count)} == {i: i for i in range(count)}


@pytest.mark.long
def test_every_matmul_of_two_ranks_is_fp8_and_gelu_is_fused_into_quantization(h200):
    params = {"up": jax.ShapeDtypeStruct((64, 192), jnp.float32), "down": jax.ShapeDtypeStruct((192, 64), jnp.float32)}
    x = jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)

    def stage(params, x):
        return x + jax.nn.gelu(x @ params["up"].astype(x.dtype)) @ params["down"].astype(x.dtype)

    fp8 = jgraph.fp8(stage, jgraph.FP8Config(recipe="delayed"))
    state = jax.eval_shape(fp8.init, params, x)
    given = params, state, jax.eval_shape(fp8.quantize, params, state, x)
    with aot.lowering_for("h200"):
        graphed = jgraph.make_graphed_callables(
            (fp8, fp8),
            (given, given),
            ((x,), (x,)),
            order=[[1, -1, -1.5]] * 2,
            delay_wgrad=True,
            devices=aot.devices(2),
            compiler_options=compiler_options("auto", XLA_OPTIONS, platform="gpu"),
        )
    for i in range(2):
        parts = graphed[i].parts
        assert {kind: FP8Products.count(part.compiled).products for kind, part in parts.items()} == dict.fromkeys(parts, 2)
        assert set(parts) == {"forward", "dgrad", "wgrad"}
        is_written = " tanh(" in "".join(part.compiled.as_text() for part in parts.values())
        assert is_written == (jax.__version_info__ < (0, 11))  # JAX before 0.11 has no kernel to fuse it into


def test_every_instruction_has_its_own_executable(h200):
    params = jax.eval_shape(functools.partial(chain.make_params, 0))
    graphed = jgraph.make_graphed_callables(chain.stage, params, (chain.sample(1)[0][0],), order=[1, -1] * 2, devices=[h200[0]])
    args = (jax.ShapeDtypeStruct((chain.B, chain.D), jnp.float32),)
    plan = graphed._plan(graphed.schedule, chain.loss_fn, args, outputs="drop", join="nothing")
    assert len({id(i.executable.compiled.runtime_executable()) for i in plan.instructions}) == 4


def half_square(y):
    return 0.5 * jnp.sum(jnp.square(y.astype(jnp.float32)))
