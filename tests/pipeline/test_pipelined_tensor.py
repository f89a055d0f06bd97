"""Pipelines with tensor and context parallelism: results of one device, and the placement of parameters."""

from typing import Any

import jax
import numpy as np
import pytest

from jgraph.train.setup import TrainSetup
from jgraph.tree import leaf_names
from tests.train.test_partitioned_training import PIPELINE, assert_same_on_one_device, config, layouts


@pytest.mark.long
@pytest.mark.parametrize("fields", layouts({"pp": 2, "num_microbatches": 2, "schedule": "1f1b", "tp": 2}))
def test_twenty_steps_of_a_pipeline_equal_one_device(fields):
    assert_same_on_one_device(fields)


@pytest.mark.long
@pytest.mark.parametrize(
    "fields",
    layouts(
        # Both schedules with each axis, and every pair of axes once.
        {"schedule": "zb-h1", "tp": 4},
        {"schedule": "1f1b", "cp": 4},
        {"schedule": "zb-h1", "cp": 2, "tp": 2},
        {"schedule": "1f1b", "dp": 2, "tp": 2},
        {"schedule": "zb-h1", "dp": 2, "cp": 2},
        {"schedule": "zb-h1", "fsdp": 2, "tp": 2},
        {"schedule": "1f1b", "fsdp": 2, "cp": 2},
    ),
)
def test_twenty_steps_of_pipelines_with_other_axes_equal_one_device(fields):
    assert_same_on_one_device(PIPELINE | fields)


def placed(**fields: Any) -> tuple[TrainSetup, dict[str, Any]]:
    """Returns the setup and the PartitionSpec of each parameter by name, as a tuple with an entry for each axis."""
    setup = TrainSetup.from_config(config(**PIPELINE | {"schedule": "1f1b"} | fields))
    params = setup.step.state.params
    leaves = zip(leaf_names(params), jax.tree.leaves(params), strict=True)
    return setup, {name: (*leaf.sharding.spec, *[None] * (leaf.ndim - len(leaf.sharding.spec))) for name, leaf in leaves}


def test_tensor_fsdp_and_pipe_together_shard_every_matrix():
    _, specs = placed(fsdp=2, tp=2, model={"attention_bias": "qkv", "head": "untied"})
    assert specs["layers/0/0/attention/qkv/kernel"] == ("pipe", "fsdp", "tensor")
    assert specs["layers/0/0/attention/out/kernel"] == ("pipe", "tensor", "fsdp")
    assert specs["layers/0/0/mlp/up/kernel"] == ("pipe", "fsdp", "tensor")
    assert specs["layers/0/0/mlp/down/kernel"] == ("pipe", "tensor", "fsdp")
    # A bias has only the axis of tensor.
    assert specs["layers/0/0/attention/qkv/bias"] == ("pipe", "tensor")
    # The vocabulary is sharded over the ranks, and each rank's part over tensor.
    assert specs["outer/embedding_VD"] == (("pipe", "tensor"), "fsdp")
    assert specs["outer/head_DV"] == ("fsdp", ("pipe", "tensor"))


def test_a_vocabulary_that_ranks_and_tensor_cannot_share_is_sharded_over_the_ranks():
    # The padded vocabulary of 62 has 31 tokens per rank.
    _, specs = placed(tp=2, model={"vocab_size": 61})
    assert specs["outer/embedding_VD"] == ("pipe", None)


@pytest.mark.parametrize("fields", [{"tp": 2}, {"fsdp": 2, "tp": 2}, {"cp": 2, "tp": 2}], ids=str)
def test_no_device_holds_more_than_its_share_of_a_layer(fields):
    setup, _ = placed(**fields)
    params = setup.step.state.params
    kernels = [leaf for name, leaf in zip(leaf_names(params), jax.tree.leaves(params), strict=True) if "kernel" in name]
    assert kernels
    assert {leaf.size // int(np.prod(leaf.sharding.shard_shape(leaf.shape))) for leaf in kernels} == {
        2 * 2 * fields.get("fsdp", 1)
    }
