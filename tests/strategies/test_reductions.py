"""Tests the number, sizes and dtypes of parameter and gradient collectives in a step compiled for H200s."""

import dataclasses
import math
import re
from typing import Any

import jax
import pytest

from jgraph.profile.program import Program
from jgraph.train.config import TrainConfig
from jgraph.train.setup import TrainSetup
from jgraph.xla import aot
from jgraph_models.gpt import GPTConfig

pytestmark = [pytest.mark.long, pytest.mark.once]

FLOAT, LOW = "f32", "bf16"
# No parameter size is divisible by 61, so a collective of activations is identified by its size.
SEQ, WIDTH, SMALL = 61, 512, 4096
LOW_SUMS = {"main_grads_dtype": "bfloat16", "decoupled_grad": True}


def setup_of(**fields: Any) -> TrainSetup:
    """Returns the setup of a small model on H200 targets."""
    sizes = {"num_heads": 4, "num_kv_heads": 4, "d_ff": 2048, "vocab_size": 512, "attention": "xla"}
    model = GPTConfig(num_layers=fields.get("pp", 1), d_model=WIDTH, **sizes)
    fields = {"steps": 4, "seq_len": SEQ, "batch_size": 4 * fields.get("num_microbatches", 1)} | fields
    setup = TrainSetup.from_config(TrainConfig.from_fields(**fields, model=model))
    return dataclasses.replace(setup, step=setup.step.on(aot.devices(8)[: setup.step.num_devices]))


def collectives(setup: TrainSetup) -> list[tuple[str, str, int]]:
    """Lists (kind, dtype, number of elements) of all collectives. A collective of two dtypes has two entries."""
    # A program with matmuls of a library compiles in two thirds of the time.
    options = setup.options("gpu") | {"xla_gpu_enable_triton_gemm": False}
    compiled, _ = aot.compile_lowered(setup.step.lower(setup.batch()), options)
    found = []
    for instruction in Program.parse(compiled.as_text()).instructions.values():
        if kind := re.fullmatch(r"(all-reduce|reduce-scatter|all-gather)(-done)?", instruction.opcode):
            for dtype in sorted({shape.dtype for shape in instruction.shapes}):
                elements = sum(shape.size for shape in instruction.shapes if shape.dtype == dtype)
                found.append((kind[1], dtype, elements))
    return found


@pytest.mark.target
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dp": 2, "num_microbatches": 2} | LOW_SUMS, {("all-reduce", LOW): 1}),
        ({"fsdp": 4, "gather_per": "pass"}, {("all-gather", LOW): 2, ("reduce-scatter", FLOAT): 1}),
        ({"fsdp": 2, "dp": 2}, {("all-gather", LOW): 1, ("reduce-scatter", FLOAT): 1, ("all-reduce", FLOAT): 1}),
        (
            {"fsdp": 2, "dp": 2} | LOW_SUMS,
            {("all-gather", LOW): 1, ("reduce-scatter", LOW): 1, ("all-reduce", LOW): 1},
        ),
        # Matrices of layers are gathered in the compute dtype, the embedding and vectors in their own dtype.
        (
            {"pp": 2, "fsdp": 2, "dp": 2, "num_microbatches": 2},
            {("all-gather", LOW): 1, ("all-gather", FLOAT): 1, ("reduce-scatter", FLOAT): 1, ("all-reduce", FLOAT): 1},
        ),
    ],
    ids=lambda value: " ".join(f"{name}={field}" for name, field in value.items() if isinstance(name, str)),
)
def test_gradients_are_reduced_once_per_step_in_main_grads_dtype(h200, fields, expected):
    setup = setup_of(**fields)
    config, params = setup.config, setup.step.state.params
    own = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(params))
    activations = config.input.microbatch_size // config.parallel.data_ranks * SEQ * WIDTH
    sizes: dict[tuple[str, str], list[int]] = {}
    for kind, dtype, elements in collectives(setup):
        # Pipeline ranks shard the vocabulary and all-reduce partial results with the size of activations.
        if config.parallel.pp > 1 and kind == "all-reduce" and elements % activations == 0:
            continue
        if elements > SMALL:
            sizes.setdefault((kind, dtype), []).append(elements)
        else:  # norms, losses, and in a pipeline the gradient of the final norm
            assert (kind, dtype) == ("all-reduce", FLOAT), (kind, dtype, elements)
    assert {found: len(each) for found, each in sizes.items()} == expected
    # Each reduction has all gradients, plus the loss and the gradient of the final norm.
    sums = [elements for (kind, _), each in sizes.items() if kind != "all-gather" for elements in each]
    assert all(abs(elements - own) <= WIDTH for elements in sums), (sums, own)
