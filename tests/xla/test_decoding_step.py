"""Tests the decoding step compiled for an H200 target: one command buffer, in-place cache, few kernels per layer."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jgraph
from jgraph.inference.generate import _begin, _next_token, settings_of
from jgraph.train import presets
from jgraph.xla import aot, check_identity
from jgraph_models.gpt import GPT

pytestmark = [pytest.mark.target, pytest.mark.long]


def compiled(preset, rows, num_layers, sampling):
    """Returns the program, its capture report and the carry's shapes, for 128 prompt tokens and 256 new tokens."""
    config = dataclasses.replace(presets.preset(preset).model, attention="xla", num_layers=num_layers)
    model = jgraph.functional(lambda: GPT(config, rngs=nnx.Rngs(0)))
    weights = jax.eval_shape(model.decoder.prepare, model.shapes, {})
    ints, key = partial(jax.ShapeDtypeStruct, dtype=jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
    begin = partial(_begin.__wrapped__, decoder=model.decoder, slots=384, length=384, where=None)
    carry = jax.eval_shape(begin, weights, ints((rows, 128)), ints((rows,)), key, sampling, ints((1,)))
    step = jax.jit(partial(_next_token.__wrapped__, decoder=model.decoder, where=None), donate_argnums=0, keep_unused=True)
    return *aot.compile_for(step, carry, weights, sampling, ints((1,))), carry


CASES = {
    "greedy": ("gpt-1b3", 1, settings_of(0, 0, 1.0)),
    "top-k and top-p": ("gpt-1b3", 1, settings_of(0.8, 40, 0.9)),
    "four prompts": ("qwen3-0.6b", 4, settings_of(0.8, 0, 1.0)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_decoding_step_is_one_command_buffer_and_updates_its_cache_in_place(h200, case):
    preset, rows, sampling = CASES[case]
    program, report, carry = compiled(preset, rows, 2, sampling)
    assert (report.command_buffers, report.captured, report.outside) == (1, report.total, ())
    check_identity(program, carry)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="kernels of Mosaic need jax 0.11 or newer")
def test_a_layer_needs_at_most_seven_kernels_for_one_prompt(h200):
    totals = [compiled("gpt-1b3", 1, layers, {})[1].total for layers in (2, 4)]
    assert (totals[1] - totals[0]) / 2 <= 7
