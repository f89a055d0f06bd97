"""Tests capture and donation of the training step compiled for an H200 target.

Uses XLA's attention, because cuDNN's attention cannot be compiled without a GPU.
"""

import dataclasses
import functools

import pytest

from jgraph.moe.config import MoEConfig
from jgraph.train import presets
from jgraph.train.config import LoRAConfig
from jgraph.train.setup import TrainSetup
from jgraph.xla import aot, check_identity
from tests.own import Settings
from tests.target_fixture import reused_kernels

pytestmark = [pytest.mark.target, pytest.mark.long]


def config_of(preset, **changes):
    """Returns the preset with XLA's attention and with `changes` to the model configuration."""
    config = presets.preset(preset)
    return config.changed(model=dataclasses.replace(config.model, attention="xla", **changes))


def compile_step(config, graph="auto", num_microbatches=1):
    """Returns the compiled training step, its capture report and the state's shapes, with the preset's XLA options."""
    setup = TrainSetup.from_config(config.changed(graph=graph, num_microbatches=num_microbatches))
    step, batch = setup.step, setup.batch()
    if step.mesh is not None:
        step = step.on(aot.devices(step.num_devices))
        batch = step.placed_shapes(batch)
    options = setup.options("gpu") | reused_kernels()
    compiled, report = aot.compile_for(step.jitted(), step.state, batch, compiler_options=options)
    return compiled, report, step.state


# Activations take most of the memory of one microbatch: 4 x 512 tokens per data rank, and two matrices of attention scores.
MICROBATCH = 4
SMALL = config_of("cpu-tiny", num_layers=1, d_model=64, num_heads=4, num_kv_heads=2, d_ff=256, compute_dtype="bfloat16")
SMALL = SMALL.changed(seq_len=512, model=dataclasses.replace(SMALL.model, mlp="swiglu", head="untied"))
EXPERTS = dataclasses.replace(SMALL.model, moe=MoEConfig(num_experts=4, experts_per_token=2, d_ff=128))
LOOPS = {
    "one device": {},
    "data parallel in fp8": {"dp": 2, "precision": "fp8"},
    "sharded with lora": {"fsdp": 2, "lora": LoRAConfig(rank=4)},
    "tensor parallel": {"tp": 2},
    "experts": {"model": EXPERTS},
    "carried state": {"module": "tests.own:Normed", "model": Settings(width=64, rate=0)},
}


@functools.cache
def loop_of(case, num_microbatches, graph="auto"):
    """Compiles the step of a case with microbatches of one size."""
    config = SMALL.changed(**LOOPS[case])
    batch_size = MICROBATCH * num_microbatches * config.parallel.data_ranks
    return compile_step(config.changed(batch_size=batch_size), graph, num_microbatches)


STEPS = {
    "two layers of launch-bound": lambda: compile_step(config_of("launch-bound", num_layers=2)),
    "two layers of gpt-124m": lambda: compile_step(config_of("gpt-124m", num_layers=2)),
    "swiglu, untied, grouped queries": lambda: loop_of("one device", 1),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.once) if "swiglu" not in name else name for name in STEPS]
)
def test_the_default_step_is_one_command_buffer_and_updates_its_state_in_place(h200, name):
    compiled, report, state = STEPS[name]()
    assert (report.command_buffers, report.captured, report.outside) == (1, report.total, ())
    assert report.total > 20
    check_identity(compiled, state)


@pytest.mark.parametrize(
    "case", [name if name == "one device" else pytest.param(name, marks=pytest.mark.once) for name in LOOPS]
)
def test_microbatches_are_a_loop_with_a_captured_body_and_the_memory_of_one_microbatch(h200, case):
    one, of_one, _ = loop_of(case, 1)
    compiled, report, state = loop_of(case, 8)
    assert compiled.memory_analysis().temp_size_in_bytes < 1.25 * one.memory_analysis().temp_size_in_bytes
    assert report.total < 2 * of_one.total
    # In the body, only collectives, the few kernels between two of them, and the loops of experts stay outside.
    for found in report.outside:
        stays = found.reason.startswith("COLLECTIVES is off by default") or "and it holds" in found.reason
        inner = [op for op in found.ops if "/while/body" in op.name and "jgraph.experts" not in op.name]
        assert stays or not inner, found
    # Without a known number of iterations, the host would wait for the condition in every iteration.
    assert '"known_trip_count":{"n":"8"}' in compiled.as_text()
    check_identity(compiled, state)


def test_the_report_suggests_graph_full_for_the_loop_of_microbatches(h200):
    _, report, _ = loop_of("one device", 8)
    # Three command buffers: before the loop, its body, and after it.
    assert (report.command_buffers, report.captured) == (3, report.total - 1)
    (outside,) = report.outside
    assert (outside.kind, outside.count) == ("While", 1)
    # Since jax 0.11 norms are kernels, and XLA lets them read their scales from a packed array.
    assert outside.reason.startswith("WHILE is off by default")
    assert "`graph` full" in outside.remedy


def test_graph_full_captures_the_loop_of_microbatches(h200):
    # The slice by the counter is fused. A separate slice thunk would keep the loop outside.
    compiled, report, state = loop_of("one device", 8, "full")
    assert (report.command_buffers, report.captured, report.outside) == (1, report.total, ())
    check_identity(compiled, state)
