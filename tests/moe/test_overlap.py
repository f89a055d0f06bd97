"""Experts over two H200s that are not here: which all-to-alls are hidden, and behind what."""

import dataclasses

import jax
import pytest

import jgraph
from jgraph.training.setup import TrainSetup
from jgraph.xla import aot, compiler_options
from jgraph.xla.explain import Overlap
from jgraph.xla.hlo import HloModule

pytestmark = [
    pytest.mark.target,
    pytest.mark.long,
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="grouped products are kernels from jax 0.11 on"),
]


@pytest.fixture
def compiled(h200):
    """Compiles a step of two layers, of so many microbatches."""

    def of(microbatches):
        config = jgraph.preset("gpt-moe")
        sizes = {"num_layers": 2, "d_model": 256, "num_heads": 4, "num_kv_heads": 4, "d_ff": 512, "vocab_size": 512}
        model = dataclasses.replace(config.model, attention="xla", **sizes)
        sizes = {"seq_len": 512, "batch_size": 16, "fsdp": 2, "ep": 2, "num_microbatches": microbatches}
        setup = TrainSetup.of(dataclasses.replace(config, model=model, **sizes))
        step = setup.step.on(aot.devices(2))
        options = compiler_options("auto", (*setup.chosen_options("gpu"), *config.xla_options), platform="gpu", num_devices=2)
        with aot.lowering_for("h200"):
            lowered = step.lower(setup.batch())
        return aot.compile_lowered(lowered, options)[0]

    return of


def test_two_microbatches_hide_each_others_exchanges_behind_products(compiled):
    found = [one for one in Overlap.of(compiled(2)) if "bf16" in one.shape]
    # Two forward and two backward, of a layer and microbatch.
    assert [(one.kind, one.number) for one in found] == [("all-to-all", 16)]
    assert found[0].hidden >= 10


def test_exchanges_of_gradients_are_hidden_behind_the_experts_weight_gradients(compiled):
    behind = [
        sum("grouped_wgrad" in one.op_name for one in between)
        for begun, between in HloModule.of(compiled(1).as_text()).overlaps()
        if begun.opcode.startswith("all-to-all") and begun.shapes[-1].dtype == "bf16"
    ]
    # Two matrices of each layer, behind the exchange of its dgrad; left to itself the scheduler has them at the end.
    assert sorted(behind)[-2:] == [2, 2]
