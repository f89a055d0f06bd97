"""The program of a token, compiled for an H200 that is not here: one command buffer, updated in place, few kernels a layer."""

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
    """(program, capture report, shapes of the carry) for prompts of at most 128 tokens and 256 more."""
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
def test_a_token_is_a_single_command_buffer_that_updates_its_cache_in_place(h200, case):
    preset, rows, sampling = CASES[case]
    program, report, carry = compiled(preset, rows, 2, sampling)
    assert (report.command_buffers, report.captured, report.outside) == (1, report.total, ())
    check_identity(program, carry)


def test_a_layer_of_one_text_takes_few_kernels_and_splits_no_product(h200):
    totals = [compiled("gpt-1b3", 1, layers, {})[1].total for layers in (2, 4)]
    assert (totals[1] - totals[0]) / 2 <= 7
