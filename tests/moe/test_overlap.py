"""Tests that all-to-alls overlap with matmuls in a program compiled for two H200 targets."""

import dataclasses
from collections.abc import Iterator

import jax
import pytest

from jgraph.train.presets import preset
from jgraph.train.setup import TrainSetup
from jgraph.xla import aot, compiler_options
from jgraph.xla.hlo import COLLECTIVES, HloModule
from jgraph.xla.options import known

pytestmark = [
    pytest.mark.target,
    pytest.mark.long,
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="grouped matmuls are kernels since jax 0.11"),
]


def overlaps(module: HloModule) -> Iterator[tuple[str, str, bool]]:
    """Yields (kind, result, is_hidden) of each asynchronous collective. Hidden: it overlaps a matmul or kernel."""

    def inside(instruction):
        called = (module.computations[name] for name in instruction.called)
        return [instruction, *(part for computation in called for part in computation.instructions.values())]

    for computation in module.computations.values():
        scheduled = list(computation.instructions.values())
        position = {instruction.name: i for i, instruction in enumerate(scheduled)}
        for end, done in enumerate(scheduled):
            if done.opcode.endswith("-done"):
                start = scheduled[position[done.operands[0]]]
                kind = (inside(start)[-1] if start.opcode == "async-start" else start).opcode.removesuffix("-start")
                between = (part for other in scheduled[position[start.name] + 1 : end] for part in inside(other))
                if kind in COLLECTIVES:
                    yield kind, str(start.shapes[-1]), any(part.is_matmul or part.opcode == "custom-call" for part in between)


@pytest.mark.parametrize("num_microbatches", [2, pytest.param(4, marks=pytest.mark.once)])  # four: pairs in a loop
def test_two_microbatches_overlap_their_exchanges_with_matmuls(h200, num_microbatches):
    config = preset("gpt-moe")
    sizes = {"num_layers": 2, "d_model": 256, "num_heads": 4, "num_kv_heads": 4, "d_ff": 512, "vocab_size": 512}
    model = dataclasses.replace(config.model, attention="xla", **sizes)
    batch = {"seq_len": 512, "batch_size": 8 * num_microbatches, "num_microbatches": num_microbatches}
    config = config.changed(model=model, fsdp=2, ep=2, **batch)
    setup = TrainSetup.from_config(config)
    step = setup.step.on(aot.devices(2))
    options = compiler_options(
        "auto", (*known(setup.step.bound.xla_options, "gpu"), *config.compile.xla_options), platform="gpu", num_devices=2
    )
    with aot.lowering_for("h200"):
        lowered = step.lower(setup.batch())
    compiled, _ = aot.compile_lowered(lowered, options)
    found = [(kind, is_hidden) for kind, result, is_hidden in overlaps(HloModule.parse(compiled.as_text())) if "bf16" in result]
    # Two forward and two backward all-to-alls per layer and microbatch of a pair.
    assert [kind for kind, _ in found] == ["all-to-all"] * 16
    assert sum(is_hidden for _, is_hidden in found) >= 10
