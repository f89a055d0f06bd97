"""Pipelines and sharded state on several GPUs: the losses of one GPU, capture by the mode of `--graph`, and no hangs."""

import functools
import math

import jax
import numpy as np
import pytest

from jgraph_models.gpt import GPTConfig
from tests.gpu import ranks

pytestmark = pytest.mark.gpu

STEPS = 20
MODEL = GPTConfig(
    num_layers=4, d_model=128, num_heads=2, num_kv_heads=2, d_ff=256, vocab_size=256, attention="xla", compute_dtype="float32"
)
CONFIG = ranks.CONFIG.changed(steps=STEPS, model=MODEL)


@functools.cache
def losses(config):
    """Returns the losses of `STEPS` steps and the capture report."""
    values, step = ranks.trained(config)
    return values, step.capture


@pytest.mark.parametrize("graph", ["off", "auto", "full"])
@pytest.mark.parametrize(
    "fields",
    [
        {"dp": 2},
        {"pp": 2},
        {"pp": 2, "schedule": "zb-h1"},
        {"fsdp": 2},
        {"fsdp": 2, "gather_per": "pass"},
        {"tp": 2},
        {"pp": 4},
        {"fsdp": 4},
        {"fsdp": 2, "pp": 2},
    ],
    ids=str,
)
def test_several_gpus_have_the_losses_of_one(fields, graph):
    ranks = math.prod(fields.get(axis, 1) for axis in ("dp", "fsdp", "tp", "pp"))
    if len(jax.devices()) < ranks:
        pytest.skip(f"needs {ranks} GPUs, found {len(jax.devices())}")
    values, report = losses(CONFIG.changed(graph=graph, **fields))
    alone, _ = losses(CONFIG)
    np.testing.assert_allclose(values, alone, rtol=1e-5)
    assert values[-1] < values[0]
    if report is not None and "pp" not in fields:
        assert (report.command_buffers == 0) == (graph == "off")
        if graph == "full":
            # CUDA cannot instantiate a loop with collectives, so only the loop over microbatches is outside.
            assert [(outside.kind, outside.count) for outside in report.outside] == [("While", 1)]
