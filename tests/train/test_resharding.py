"""Checkpoints are restored on other devices: training continues with the same losses, and a round trip is exact."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jgraph.checkpoint.store import Checkpoints
from jgraph.errors import CheckpointError
from jgraph.step.state import TrainState
from jgraph.train.config import TrainConfig
from jgraph.train.setup import TrainSetup
from tests.train.test_pipeline_training import batches_of, config_of, initial_state

pytestmark = pytest.mark.long

STEPS, SAVED = 4, 2
ONE, PP, FSDP, TP_CP, PP_TP, CHUNKS = "one device", "pp=2", "fsdp=2", "tp=2 cp=2", "pp=2 tp=2", "chunks=2"
MESHES: dict[str, dict[str, Any]] = {
    ONE: {},
    PP: {"pp": 2},
    FSDP: {"fsdp": 2},
    TP_CP: {"tp": 2, "cp": 2},
    PP_TP: {"pp": 2, "tp": 2},
    CHUNKS: {"pp": 2, "chunks": 2, "schedule": "interleaved-1f1b", "remat": "layer"},
}


def once(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.once)


def config_on(mesh: str) -> TrainConfig:
    return config_of(num_layers=4, num_microbatches=2, steps=STEPS, **MESHES[mesh])


@functools.cache
def compiled(mesh: str) -> tuple[TrainSetup, Any]:
    config = config_on(mesh)
    setup = TrainSetup.from_config(config)
    return setup, setup.compile_step()


def trained(mesh: str, state: TrainState, steps: range) -> tuple[TrainState, list[float]]:
    """Returns the state after `steps` and their losses. Donates `state`."""
    setup, step = compiled(mesh)
    batches, losses = batches_of(setup.config), []
    for i in steps:
        state, metrics = step(state, setup.step.place(batches[i]))
        losses.append(float(metrics.loss))
    return state, losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns a function that trains once per mesh. It returns a checkpoint directory and the losses after the checkpoint."""

    @functools.cache
    def save(mesh: str) -> tuple[Path, list[float]]:
        setup, directory = compiled(mesh)[0], tmp_path_factory.mktemp("saved")
        checkpoints = Checkpoints(directory, 1)
        state, _ = trained(mesh, initial_state(setup), range(SAVED))
        checkpoints.save(SAVED, setup.step.canonical.of(state))
        _, losses = trained(mesh, state, range(SAVED, STEPS))
        checkpoints.close()
        return directory, losses

    return save


def restored(directory: Path, setup: TrainSetup) -> TrainState:
    checkpoints = Checkpoints(directory, 1)
    try:
        found = checkpoints.restore_latest(setup.step.canonical.shapes())
    finally:
        checkpoints.close()
    assert found is not None
    return setup.step.canonical.back(found[1])


def bits(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf).view(f"uint{8 * leaf.dtype.itemsize}") for leaf in jax.tree.leaves(jax.device_get(tree))]


def assert_same_bits(ours: Any, theirs: Any):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    jax.tree.map(np.testing.assert_array_equal, bits(ours), bits(theirs))


# Every mesh saves a checkpoint once and reads one of another mesh once.
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *((FSDP, PP), (TP_CP, PP_TP)),
        *(once(PP, CHUNKS), once(CHUNKS, ONE), once(ONE, TP_CP), once(PP_TP, FSDP)),
    ],
)
def test_a_checkpoint_resumes_on_another_mesh_with_the_same_losses(saved, capfd, before, after):
    state = restored(saved(before)[0], compiled(after)[0])
    _, losses = trained(after, state, range(SAVED, STEPS))
    np.testing.assert_allclose(losses, saved(ONE)[1], rtol=1e-5)
    # XLA's partitioner prints warnings about inefficient resharding to stderr.
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("mesh", [PP, once(TP_CP)])
def test_a_checkpoint_resumes_on_the_same_mesh_bit_for_bit(saved, mesh):
    directory, losses = saved(mesh)
    assert trained(mesh, restored(directory, compiled(mesh)[0]), range(SAVED, STEPS))[1] == losses


@pytest.mark.parametrize("fields", [{"fsdp": 2, "dp": 2}, {"pp": 2, "dp": 2}, {"pp": 4, "chunks": 2}])
def test_conversion_to_the_canonical_state_and_back_keeps_every_bit(fields):
    setup = TrainSetup.from_config(
        config_of(num_layers=1 + fields.get("pp", 1) * fields.get("chunks", 1), num_microbatches=2, **fields)
    )
    shapes = setup.step.canonical.shapes()
    ranks = setup.step.num_devices // fields.get("dp", 1)
    # No device holds more than its share.
    assert {leaf.size // math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(shapes.params)} == {ranks}
    random = np.random.default_rng(0)
    # Random bits include negative zeros, subnormals, infinities and NaNs with payloads.
    canonical = jax.tree.map(
        lambda leaf: jax.device_put(
            random.integers(0, 2**32, leaf.shape, np.uint32).view(leaf.dtype) if leaf.ndim else np.zeros((), leaf.dtype),
            leaf.sharding,
        ),
        shapes,
    )
    state = setup.step.canonical.back(canonical)
    again = setup.step.canonical.of(state)
    assert_same_bits(again, canonical)
    assert_same_bits(setup.step.canonical.back(again), state)
    for tree, expected in ((again, shapes), (state, setup.step.state)):
        jax.tree.map(lambda leaf, like: assert_sharding(leaf, like.sharding), tree, expected)


def assert_sharding(leaf: jax.Array, sharding: jax.sharding.Sharding):
    assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_another_model_is_refused_with_the_leaves_that_differ(saved):
    config = config_on(ONE)
    wider = TrainSetup.from_config(config.changed(model=dataclasses.replace(config.model, d_ff=96)))
    message = (
        r"does not fit this run: \.params\['blocks'\]\[0\]\['mlp'\]\['down'\].*float32\[64, 32\] in the checkpoint, float32\[96"
    )
    with pytest.raises(CheckpointError, match=message):
        restored(saved(ONE)[0], wider)
