"""Frozen parameters: no gradient and no optimizer state on any layout, and the same losses as on one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jgraph.train.setup import TrainSetup
from jgraph.tree import leaf_names
from tests.train.test_pipeline_training import config_of, trained as train_all

STEPS = 3
FROZEN = ("embedding_VD", "*/kernel", "norm/*")
# tests/train/test_lora.py has frozen weights on other layouts.
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp=2 dp=2 microbatches": {"tp": 2, "dp": 2, "num_microbatches": 2},
    "fsdp=2 resharded": {"fsdp": 2, "gather_per": "pass"},
    "pp=2 fsdp=2": {"pp": 2, "fsdp": 2, "num_microbatches": 2},
    "pp=2 dispatch": {"pp": 2, "num_microbatches": 2, "pp_engine": "dispatch", "schedule": "1f1b"},
}


def trained(freeze: tuple[str, ...] = FROZEN, **fields: Any) -> tuple[TrainSetup, Any, list[float]]:
    fields = {"num_microbatches": 1} | fields
    found = train_all(config_of(num_layers=2, steps=STEPS, freeze=freeze, **fields))
    return found.setup, found.state, found.losses


def moments_of(setup: TrainSetup, state: Any) -> list[str]:
    return leaf_names(setup.step.canonical.of(state).opt_state[0].mu)


@functools.cache
def on_one_device() -> tuple[TrainSetup, Any, list[float]]:
    return trained()


@pytest.fixture(scope="module")
def expected():
    setup, state, losses = on_one_device()
    return setup.step.canonical.of(state), losses


def test_only_trained_parameters_have_moments_and_change():
    setup, state, _ = on_one_device()
    names = [name for name in leaf_names(setup.step.update.shapes) if name.endswith("scale") and not name.startswith("norm")]
    assert moments_of(setup, state) == names
    before, after = (jax.tree.leaves(setup.step.canonical.of(each).params) for each in (setup.init(), state))
    for name, old, new in zip(leaf_names(setup.step.update.shapes), before, after, strict=True):
        assert bool(jnp.array_equal(old, new)) is (name not in names)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_device(expected, layout):
    setup, state, losses = trained(**LAYOUTS[layout])
    canonical = setup.step.canonical.of(state)
    np.testing.assert_allclose(losses, expected[1], rtol=1e-5)
    assert jax.tree.structure(canonical) == jax.tree.structure(expected[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), canonical.params, expected[0].params)
    again = setup.step.canonical.back(canonical)
    jax.tree.map(np.testing.assert_array_equal, again, state)


@pytest.mark.long
def test_a_pipeline_keeps_the_state_of_frozen_layers_in_stacked_arrays():
    freeze = ("blocks/0/*",)
    one, pipeline = trained(freeze), trained(freeze, pp=2, num_microbatches=2)
    np.testing.assert_allclose(pipeline[2], one[2], rtol=1e-5)
    assert moments_of(*pipeline[:2]) == moments_of(*one[:2])


@pytest.mark.long
def test_a_run_without_frozen_parameters_has_moments_for_all():
    setup = TrainSetup.from_config(config_of(num_layers=2, num_microbatches=1))
    assert moments_of(setup, setup.init()) == leaf_names(setup.step.update.shapes)
