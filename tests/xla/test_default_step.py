"""Tests capture and donation of the training step compiled for an H200 target.

Uses XLA's attention, because cuDNN's attention cannot be compiled without a GPU.
"""

import dataclasses

import pytest

from jgraph.train import presets
from jgraph.train.setup import TrainSetup
from jgraph.xla import aot, check_identity, compiler_options

pytestmark = [pytest.mark.target, pytest.mark.long]


def config_of(preset, **changes):
    """Returns the preset with XLA's attention and with `changes` to the model configuration."""
    config = presets.preset(preset)
    return config.changed(model=dataclasses.replace(config.model, attention="xla", **changes))


def compile_step(config, graph="auto", num_microbatches=1):
    """Returns the compiled training step, its capture report and the state's shapes, with the preset's XLA options."""
    setup = TrainSetup.from_config(config.changed(graph=graph, num_microbatches=num_microbatches))
    options = compiler_options(graph, config.compile.xla_options, platform="gpu")
    state, tokens_BS = (setup.step.state, setup.batch())
    compiled, report = aot.compile_for(setup.step.jitted(), state, tokens_BS, compiler_options=options)
    return compiled, report, state


CASES = {
    "two layers of launch-bound": config_of("launch-bound", num_layers=2),
    "two layers of gpt-124m": config_of("gpt-124m", num_layers=2),
    "swiglu, untied, grouped queries": config_of("cpu-tiny", mlp="swiglu", head="untied", num_kv_heads=2, num_layers=1),
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.once) if "swiglu" not in name else name for name in CASES]
)
def test_the_default_step_is_one_command_buffer_and_updates_its_state_in_place(h200, case):
    compiled, report, state = compile_step(CASES[case])
    assert (report.command_buffers, report.captured, report.outside) == (1, report.total, ())
    assert report.total > 20
    check_identity(compiled, state)


SMALL = config_of("cpu-tiny", num_layers=1, compute_dtype="bfloat16").changed(batch_size=16)


@pytest.fixture(scope="module")
def eight(h200):
    return compile_step(SMALL, num_microbatches=8)


def test_microbatches_are_a_loop_with_a_captured_body_and_reuse_their_memory(eight):
    whole, of_whole, _ = compile_step(SMALL)
    compiled, report, state = eight
    # Three command buffers: before the loop, its body, and after it.
    assert (report.command_buffers, report.captured) == (3, report.total - 1)
    assert report.total < 1.2 * of_whole.total
    assert compiled.memory_analysis().temp_size_in_bytes < 0.5 * whole.memory_analysis().temp_size_in_bytes
    # Without a known number of iterations, the host would wait for the condition in every iteration.
    assert '"known_trip_count":{"n":"8"}' in compiled.as_text()
    check_identity(compiled, state)


def test_the_report_suggests_graph_full_for_the_loop_of_microbatches(eight):
    (outside,) = eight[1].outside
    assert (outside.kind, outside.count) == ("While", 1)
    # Since jax 0.11 norms are kernels, and XLA lets them read their scales from a packed array.
    assert outside.reason.startswith("WHILE is off by default")
    assert "`graph` full" in outside.remedy


def test_graph_full_captures_the_loop_of_microbatches(h200):
    # The slice by the counter is fused. A separate slice thunk would keep the loop outside.
    compiled, report, state = compile_step(SMALL, graph="full", num_microbatches=8)
    assert (report.command_buffers, report.captured, report.outside) == (1, report.total, ())
    check_identity(compiled, state)
