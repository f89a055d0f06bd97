"""Compiles experts over two H200s that are not present: the overlap of all-to-alls."""

import dataclasses

import jax
import pytest

from jgraph.train.presets import preset
from jgraph.train.setup import TrainSetup
from jgraph.xla import aot, compiler_options
from jgraph.xla.explain import Overlap

pytestmark = [
    pytest.mark.target,
    pytest.mark.long,
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="grouped products are kernels from jax 0.11 on"),
]


def test_two_microbatches_overlap_their_exchanges_with_matmuls(h200):
    config = preset("gpt-moe")
    sizes = {"num_layers": 2, "d_model": 256, "num_heads": 4, "num_kv_heads": 4, "d_ff": 512, "vocab_size": 512}
    model = dataclasses.replace(config.model, attention="xla", **sizes)
    config = config.changed(model=model, seq_len=512, batch_size=16, fsdp=2, ep=2, num_microbatches=2)
    setup = TrainSetup.of(config)
    step = setup.step.on(aot.devices(2))
    options = compiler_options(
        "auto", (*setup.step.chosen_options("gpu"), *config.compile.xla_options), platform="gpu", num_devices=2
    )
    with aot.lowering_for("h200"):
        lowered = step.lower(setup.batch())
    found = [one for one in Overlap.of(aot.compile_lowered(lowered, options)[0]) if "bf16" in one.shape]
    # Two forward and two backward, for each layer and microbatch.
    assert [(one.kind, one.number) for one in found] == [("all-to-all", 16)]
    assert found[0].hidden >= 10
