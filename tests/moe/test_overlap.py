"""Experts over two H200s that are not here: which all-to-alls XLA hides, and behind what."""

import dataclasses
import re

import jax
import pytest

import jgraph
from jgraph.training.setup import TrainSetup
from jgraph.xla import aot, compiler_options

pytestmark = [pytest.mark.target, pytest.mark.long]


def exchanges(text):
    """The all-to-alls of rows in a scheduled program, each with the products between its start and its end."""
    lines, found = text[text.index("\nENTRY") :].splitlines(), []
    starts = {}
    for number, line in enumerate(lines):
        if start := re.search(r"%(\S+) = \(?\(?bf16.* all-to-all-start\(", line):
            starts[start.group(1)] = number
        elif (end := re.search(r" all-to-all-done\(.*%([^ )]+)\)", line)) and end.group(1) in starts:
            between = lines[starts[end.group(1)] : number]
            found.append(sum("mosaic_gpu" in line or "__cublas" in line for line in between))
    return found


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="grouped products are kernels from jax 0.11 on")
def test_two_microbatches_hide_each_others_exchanges_behind_products(h200):
    config = jgraph.preset("gpt-moe")
    sizes = {"num_layers": 2, "d_model": 256, "num_heads": 4, "num_kv_heads": 4, "d_ff": 512, "vocab_size": 512}
    model = dataclasses.replace(config.model, attention="xla", **sizes)
    config = dataclasses.replace(config, model=model, seq_len=512, batch_size=16, fsdp=2, ep=2, num_microbatches=2)
    setup = TrainSetup.of(config)
    step = setup.step.on(aot.devices(2))
    options = compiler_options("auto", (*setup.chosen_options("gpu"), *config.xla_options), platform="gpu", num_devices=2)
    with aot.lowering_for("h200"):
        lowered = step.lower(setup.batch())
    products = exchanges(aot.compile_lowered(lowered, options)[0].as_text())
    # Two forward and two backward, of a layer and microbatch.
    assert len(products) == 16
    assert sum(number > 0 for number in products) >= 10
