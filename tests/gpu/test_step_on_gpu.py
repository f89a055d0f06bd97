"""The captured step on a GPU: cuDNN attention is captured, and capture does not change the losses."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jgraph.train.presets import preset
from jgraph.train.setup import TrainSetup
from jgraph_models.gpt import attention_kernel

pytestmark = pytest.mark.gpu


def small(**changes):
    """Returns the launch-bound preset with two layers."""
    config = preset("launch-bound")
    return config.changed(model=replace(config.model, num_layers=2), **changes)


def losses(config, steps=8):
    setup = TrainSetup.from_config(config)
    step = setup.compile_step()
    state = setup.init()
    shape = (steps, config.input.batch_size, config.input.seq_len + 1)
    batches = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, dtype=np.int32)
    values = []
    for tokens_BS in batches:
        state, metrics = step(state, tokens_BS)
        values.append(float(metrics.loss))
    return values, step.capture


def test_the_default_step_with_cudnn_attention_is_one_command_buffer():
    config = small(seq_len=256)
    assert attention_kernel(config.model, config.input.seq_len) == "cudnn"
    _, report = losses(config, steps=1)
    assert (report.command_buffers, report.captured) == (1, report.total)
    assert report.outside == ()


def test_capture_changes_the_losses_by_rounding_only():
    captured, on = losses(small())
    uncaptured, off = losses(small(graph="off"))
    assert on.captured
    assert not off.captured
    # Atomic additions into the embedding's gradient run in any order, so float32 rounding differs in eight bfloat16 steps.
    np.testing.assert_allclose(captured, uncaptured, rtol=1e-3)


def test_graph_full_runs_a_loop_over_microbatches_with_the_same_losses():
    config = small(batch_size=16, num_microbatches=16)
    looped, report = losses(config.changed(graph="full"))
    assert report.command_buffers >= 1
    np.testing.assert_allclose(looped, losses(config)[0], rtol=1e-3)


def test_the_state_keeps_its_addresses_over_steps():
    setup = TrainSetup.from_config(small())
    step = setup.compile_step()
    tokens_BS = np.zeros((2, 129), np.int32)
    state, _ = step(setup.init(), tokens_BS)
    addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    for _ in range(3):
        state, _ = step(state, tokens_BS)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)] == addresses
