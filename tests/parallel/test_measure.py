"""The choice of command buffers by timing: which one is taken, and that it is timed on a state that nobody else has."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jgraph.errors import ConfigError
from jgraph.parallel import Replicated, TrainStep, measure, measure_graph, train_step
from jgraph.parallel.measure import fastest

PARAMS, BATCH = {"w": np.ones((8, 1), np.float32)}, np.ones((4, 8), np.float32)


@pytest.mark.parametrize(
    ("seconds", "choice"),
    [
        ({"auto": 3.0, "off": 2.0, "full": 1.0}, "full"),
        ({"auto": 3.0, "off": 2.0, "full": 2.5}, "off"),
        ({"auto": 1.0, "off": 2.0, "full": 0.995}, "auto"),  # within what a repetition would change
        ({"auto": 1.0, "off": 2.0, "full": 0.98}, "full"),
        ({"auto": 1.0}, "auto"),
        ({"off": 2.0, "full": 3.0}, "off"),
    ],
)
def test_the_fastest_choice_is_taken_and_xlas_own_where_none_is_clearly_faster(seconds, choice):
    assert fastest(seconds) == choice


@pytest.fixture
def step():
    def loss(params, batch, key):
        return jnp.mean((batch @ params["w"]) ** 2)

    return train_step(loss, optax.sgd(0.1), Replicated(jax.make_mesh((2,), ("data",)), PARAMS))


@pytest.fixture
def states():
    """States that were made to measure with."""
    return []


@pytest.fixture
def measured(step, states, monkeypatch):
    monkeypatch.setattr(measure, "_SECONDS", 0.001)

    def init():
        states.append(step.init(PARAMS))
        return states[-1]

    return lambda: measure_graph(step, step.place(BATCH), init)


def refuses(monkeypatch, refused: dict[str, Exception], broken: dict[str, Exception]):
    """Makes choices fail: some when they are compiled, some when they are run first, as CUDA does."""
    compiles = TrainStep.compile

    def compile_one(self, batch, *, graph, xla_options=()):
        if graph in refused:
            raise refused[graph]
        compiled = compiles(self, batch)

        def run(state, batch):
            after = compiled(state, batch)
            if graph in broken:
                raise broken[graph]
            return after

        return run

    monkeypatch.setattr(TrainStep, "compile", compile_one)


def test_every_choice_is_timed_on_one_state_that_is_gone_afterwards(measured, states, step):
    found = measured()
    assert set(found.seconds) == {"auto", "off", "full"}
    assert found.graph == fastest(found.seconds)
    assert all(seconds > 0 for seconds in found.seconds.values())
    assert len(states) == 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(states))
    state, _ = found.step(step.init(PARAMS), step.place(BATCH))
    assert int(state.step) == 1


def test_a_choice_that_does_not_compile_or_run_is_out_with_its_first_line(measured, monkeypatch, states):
    error = jax.errors.JaxRuntimeError
    refuses(monkeypatch, {"off": ConfigError("no", field="x")}, {"full": error("CUDA_ERROR_INVALID_VALUE: graph\n at once")})
    found = measured()
    assert found.refused == {"off": "no", "full": "CUDA_ERROR_INVALID_VALUE: graph"}
    assert (found.graph, set(found.seconds)) == ("auto", {"auto"})
    assert len(states) == 2  # the step that failed took the first along


def test_where_no_choice_is_left_the_error_of_the_default_is_raised(measured, monkeypatch):
    refuses(monkeypatch, {graph: ConfigError(graph, field="x") for graph in ("auto", "off", "full")}, {})
    with pytest.raises(ConfigError, match="auto"):
        measured()


def test_what_another_process_cannot_run_is_out_and_the_slowest_process_decides(measured, monkeypatch):
    """Of two processes, the other one refuses `full`, and needs longer than ours for `auto`."""
    failed, times = [], []

    def all_gather(value):
        given = failed if isinstance(value, bool) else times
        given.append(value)
        if given is failed:
            return [value, len(failed) == 3]  # the third to be compiled
        return [value, 2**31 - 1 if len(times) == 2 else value]  # how long a turn is, then the first median

    monkeypatch.setattr(measure, "all_gather_scalar", all_gather)
    found = measured()
    assert set(found.refused) == {"full"}
    assert found.graph == "off"
    assert found.seconds["auto"] > 200


def test_each_wait_is_watched_with_the_choice_and_its_program(step, monkeypatch):
    monkeypatch.setattr(measure, "_SECONDS", 0.001)
    seen = {}

    @contextlib.contextmanager
    def over(told, program):
        seen[told()] = program
        yield

    measure_graph(step, step.place(BATCH), lambda: step.init(PARAMS), over=over)
    assert len(seen) == len(set(map(id, seen.values()))) == 3
    assert all(any(f"`graph` {graph}" in told for told in seen) for graph in ("auto", "off", "full"))
