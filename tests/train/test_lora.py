"""LoRA: adapters alone are trained, with the same losses on every layout, with FP8 base weights, and after a restart."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.lora import AdaptedModel, separated
from jgraph.train.config import LoRAConfig
from jgraph.train.setup import TrainSetup
from jgraph.tree import leaf_names
from tests.train.test_pipeline_training import batches_of, config_of

STEPS = 3
LORA = LoRAConfig(rank=4, alpha=8, base_dtype="float32")
LAYOUTS: dict[str, dict[str, Any]] = {
    "microbatches": {"num_microbatches": 2},
    "fsdp=4": {"fsdp": 4},
    "fsdp=2 resharded": {"fsdp": 2, "reshard_after_forward": True},
    "tp=2": {"tp": 2},
    "tp=2 cp=2": {"tp": 2, "cp": 2},
    "tp=2 fsdp=2": {"tp": 2, "fsdp": 2},
    "pp=2": {"pp": 2, "num_microbatches": 2},
    "pp=2 zb-h1": {"pp": 2, "num_microbatches": 2, "schedule": "zb-h1"},
    "pp=2 tp=2": {"pp": 2, "tp": 2, "num_microbatches": 2},
    "pp=2 fsdp=2": {"pp": 2, "fsdp": 2, "num_microbatches": 2},
    "pp=2 dispatch": {"pp": 2, "num_microbatches": 2, "pp_engine": "dispatch", "schedule": "1f1b"},
}


def trained(model: dict[str, Any] | None = None, **fields: Any) -> tuple[TrainSetup, Any, list[float]]:
    values: dict[str, Any] = {"num_microbatches": 1, "lora": LORA} | fields
    config = config_of(num_layers=2, steps=STEPS, **values)
    if model is not None:
        config = config.changed(model=dataclasses.replace(config.model, **model))
    setup = TrainSetup.of(config)
    step, state, losses, batches = setup.compile_step(), setup.init(), [], batches_of(setup.config)
    for i in range(STEPS):
        state, metrics = step(state, setup.step.place(batches[i]))
        losses.append(float(metrics.loss))
    return setup, state, losses


@pytest.fixture(scope="module")
def expected():
    setup, state, losses = trained()
    return setup.step.canonical.of(state), losses


def test_adapters_alone_have_moments_and_change():
    setup, state, _ = trained()
    before, after = (setup.step.canonical.of(each) for each in (setup.init(), state))
    assert isinstance(setup.model, AdaptedModel)
    adapters = [name for name in leaf_names(setup.model.shapes) if "_lora_" in name]
    assert sorted(setup.model.trained) == sorted(adapters)
    assert leaf_names(after.opt_state[0].mu) == adapters
    for name, old, new in zip(leaf_names(before.params), *map(jax.tree.leaves, (before.params, after.params)), strict=True):
        assert bool(jnp.array_equal(old, new)) is (name not in adapters)


def test_base_weights_are_stored_in_the_base_dtype():
    setup = TrainSetup.of(config_of(num_microbatches=1, lora=LoRAConfig(rank=2)))
    base, low = separated(setup.step.canonical.shapes().params)
    assert {leaf.dtype for leaf in jax.tree.leaves(base)} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(low)} == {jnp.dtype(jnp.float32)}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_device(expected, layout):
    setup, state, losses = trained(**LAYOUTS[layout])
    canonical = setup.step.canonical.of(state)
    np.testing.assert_allclose(losses, expected[1], rtol=1e-5)
    assert jax.tree.structure(canonical) == jax.tree.structure(expected[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), canonical.params, expected[0].params)
    jax.tree.map(np.testing.assert_array_equal, setup.step.canonical.back(canonical), state)


@pytest.mark.long
@pytest.mark.parametrize("model", [{"scan_layers": True}, {"mlp": "swiglu", "num_kv_heads": 1, "head": "untied"}])
@pytest.mark.parametrize("layout", ["fsdp=4", "pp=2"])
def test_models_with_stacked_layers_and_other_parts_train_as_on_one_device(model, layout):
    np.testing.assert_allclose(trained(model, **LAYOUTS[layout])[2], trained(model)[2], rtol=1e-5)
