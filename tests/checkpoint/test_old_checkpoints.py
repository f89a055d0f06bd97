"""Checkpoints that revision a67d4ea5 wrote on each layout are restored bit for bit on every layout of today.

`tests/checkpoint/old/make.py` made the checkpoints, and describes their models and layouts.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jgraph import Checkpoints
from tests.checkpoint.old import make
from tests.checkpoint.old.make import CASES, digests

Tree = Any

STORED: dict[str, dict[str, str]] = json.loads((make.FOLDER / "digests.json").read_text())
TARGETS = [(case, layout) for case, choices in CASES.items() for layout in choices.layouts]
# Every way to store parameters once: packed, padded, stacked, split and mixed with frozen ones.
FAST = {
    *(("dense", layout) for layout in ("one", "fsdp_tp")),
    *(("frozen", "pp_fsdp"), ("experts", "pp_ep")),
    *(("chunks", "pp_chunks"), ("lora", "pp_tp"), ("fp8", "pp"), ("adafactor", "pp"), ("muon", "tp")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Callable[[str], Path]:
    """Returns a function that returns the folder of the checkpoints of a case: one directory per layout that wrote them."""

    @cache
    def of(case: str) -> Path:
        directory = tmp_path_factory.mktemp(case)
        shutil.unpack_archive(make.FOLDER / f"{case}.tar.xz", directory, filter="data")
        return directory

    return of


def restored(directory: Path, like: Tree) -> Tree:
    checkpoints = Checkpoints(directory, keep=1)
    found = checkpoints.restore_latest(like)
    checkpoints.close()
    assert found is not None
    assert found[0] == make.STEP
    return found[1]


def placed(tree: Tree) -> Tree:
    """Returns shape, dtype and sharding of every leaf."""
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), tree)


def packed(step: Any, tree: Tree, carried: Tree) -> dict[str, str]:
    """Returns the digests of the parameters in the initial state of a step. Leaves that are None become zeros."""
    shapes = step.update.shapes
    whole = jax.tree.map(lambda shape, leaf: np.zeros(shape.shape, shape.dtype) if leaf is None else leaf, shapes, tree)
    return digests(step.init(whole, carried).params)


def assert_is_own_state(step: Any, canonical: Any, state: Tree, moments: Sequence[str]) -> None:
    """Checks a canonical state in the layout of a step: there and back, and against initial states with the same arrays."""
    own = canonical.back(state)
    if step.mesh is not None:
        assert placed(own) == placed(step.state)
    assert digests(canonical.of(own)) == digests(state)
    params, carried, opt_state = jax.device_get((state.params, state.carried, state.opt_state))
    assert digests(own.params) == packed(step, params, carried)
    if not moments:
        assert digests(own.opt_state) == digests(state.opt_state)
    for name in moments:
        found, expected = digests(getattr(own.opt_state[0], name)), packed(step, getattr(opt_state[0], name), carried)
        assert found
        assert found == {array: expected[array] for array in found}


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        pytest.param(*each, marks=[pytest.mark.long] * (each[0] in ("adafactor", "experts", "frozen", "lora")))
        for each in sorted(FAST)
    ],
)
def test_an_old_checkpoint_of_another_layout_is_restored_bit_for_bit(case, layout, folder):
    layouts = CASES[case].layouts
    source = layouts[layouts.index(layout) - 1]
    step = CASES[case].step(layout)
    canonical = step.canonical
    state = restored(folder(case) / source, canonical.shapes())
    assert digests(state) == STORED[case]
    assert_is_own_state(step, canonical, state, CASES[case].moments)


@pytest.mark.long
@pytest.mark.parametrize(("case", "layout"), TARGETS)
def test_the_old_checkpoints_of_all_layouts_are_restored_bit_for_bit(case, layout, folder):
    step, layouts = CASES[case].step(layout), CASES[case].layouts
    canonical = step.canonical
    state = None
    # What is restored does not depend on the layout: whole arrays, spread over its devices. One or two layouts of a case read
    # all checkpoints, the others their own and that of another layout.
    neighbor = layouts[layouts.index(layout) - 1]
    for source in layouts if (case, layout) in FAST else (layout, neighbor):
        state = restored(folder(case) / source, canonical.shapes())
        assert digests(state) == STORED[case], source
    if (case, layout) not in FAST:
        assert_is_own_state(step, canonical, state, CASES[case].moments)


def test_the_stored_states_are_those_of_the_script():
    for name, case in CASES.items():
        assert digests(make.values(case.step("one").canonical.shapes())) == STORED[name]


def test_the_fast_targets_have_every_case_and_every_axis():
    assert {case for case, _ in FAST} == set(CASES)
    axes = {axis for _, layout in FAST for axis in make.LAYOUTS[layout].axes}
    assert axes >= {"pipe", "fsdp", "tensor"}
