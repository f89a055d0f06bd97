"""The watcher of programs from other projects, and the stored results."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks.others import table
from benchmarks.others.programs import PROGRAMS
from benchmarks.others.watch import watched
from jgraph.errors import DonationError


def train(donated):
    """A program that knows nothing of the watcher."""

    def step(state, x):
        return state + x, jnp.sum(x)

    step = jax.jit(step, donate_argnums=donated)
    state = jnp.zeros(3)
    for i in range(2):
        state, _ = step(state, jnp.full(3, i, jnp.float32))
    return state


def test_each_program_has_one_row_of_results_without_an_error():
    results = json.loads(table.RESULTS.read_text())
    assert results.keys() == PROGRAMS.keys()
    assert [name for name, result in results.items() if result["failed"]] == []


@pytest.mark.parametrize("uses_jgraph", [False, True])
def test_the_watched_step_records_the_sums_of_its_results_at_each_call(uses_jgraph):
    with watched("jax.jit", ("step",), uses_jgraph=uses_jgraph, explains=False) as seen:
        train(donated=0)
    assert seen.sums == [[0.0, 0.0, 0.0], [3.0, 3.0, 3.0]]


def test_the_watched_step_is_compiled_by_jgraph():
    with watched("jax.jit", ("step",), uses_jgraph=True, explains=False), pytest.raises(DonationError, match="of step: x"):
        train(donated=(0, 1))
    with watched("jax.jit", ("another",), uses_jgraph=True, explains=False) as seen, pytest.warns(UserWarning, match="donated"):
        train(donated=(0, 1))
    assert seen.sums == []
