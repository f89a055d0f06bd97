"""Tests launch counts with profiler events observed with jax 0.10 to 0.12 on an H200 or found in their libraries."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jgraph.errors import JgraphError
from jgraph.xla import Launches, compiler_options, count_launches
from jgraph.xla.launches import graph_events, launches_of


def profile_of(events, plane="/host:CPU"):
    """Returns a fake profile with `events`, a mapping of event names to counts."""
    names = [SimpleNamespace(name=name, duration_ns=1.0) for name, number in events.items() for _ in range(number)]
    line = SimpleNamespace(events=names)
    return SimpleNamespace(planes=[SimpleNamespace(name=plane, lines=[line])])


def counted(**events):
    """Counts launches in a fake profile. `__` in an event name is replaced by `::`."""
    return launches_of(graph_events(profile_of({name.replace("__", "::"): number for name, number in events.items()})))


def test_a_program_without_graphs_has_no_launches():
    assert counted() == Launches(0, 0, 0)
    assert counted(PjRtCApiLoadedExecutable__Execute=3, cudaLaunchKernel=7, cuLaunchKernel=7) == Launches(0, 0, 0)


def test_a_steady_loop_only_launches_and_event_name_suffixes_are_ignored():
    events = {"cuGraphLaunch (CudaGraph:496)": 2, "cuGraphLaunch (CudaGraph:7)": 3, "command_buffer::execute#device=0#": 5}
    assert launches_of(graph_events(profile_of(events))) == Launches(launches=5, updates=0, records=0)
    assert graph_events(profile_of(events, plane="/device:GPU:0")) == {}


def test_a_new_graph_counts_as_a_record():
    found = counted(command_buffer__initialize=1, cuGraphInstantiateWithFlags=1, cuGraphLaunch=1, command_buffer__execute=1)
    assert found == Launches(launches=1, updates=0, records=1)


def test_a_moved_array_counts_as_a_graph_update():
    found = counted(command_buffer__update=4, cuGraphExecKernelNodeSetParams=400, cuGraphLaunch=4, command_buffer__execute=4)
    assert found == Launches(launches=4, updates=4, records=0)


def test_recording_into_an_existing_graph_counts_as_an_update():
    assert counted(command_buffer__initialize=2, cuGraphInstantiate=1, cuGraphLaunch=2) == Launches(2, 1, 1)


@pytest.mark.parametrize("record", ["initialize", "record", "record_for_va_remapping"])
def test_xla_events_are_counted_if_driver_events_are_missing(record):
    events = {"command_buffer__execute": 6, "command_buffer__update": 2, f"command_buffer__{record}": 1}
    assert counted(**events) == Launches(launches=6, updates=2, records=1)


@pytest.fixture
def step():
    step = jax.jit(lambda x: x @ x)
    step(jnp.ones((8, 8)))
    return step


def test_on_a_cpu_all_counts_are_zero_and_no_files_are_left(step, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with count_launches() as count:
        step(jnp.ones((8, 8)))
    assert (count.launches, count.updates, count.records) == (0, 0, 0)
    assert count == Launches(0, 0, 0)
    assert list(tmp_path.iterdir()) == []


def test_counts_are_available_only_after_the_block():
    with count_launches() as count, pytest.raises(JgraphError, match=r"`updates` is counted when .* read it after the block"):
        count.updates  # noqa: B018
    assert count.updates == 0


def test_a_second_profile_is_refused_and_the_first_continues():
    with count_launches() as count, pytest.raises(JgraphError, match="end the other profile first"), count_launches():
        pass
    assert count.launches == 0


def test_an_error_in_the_block_propagates_and_ends_the_profile(step):
    with pytest.raises(KeyError), count_launches():
        raise KeyError
    with count_launches() as count:
        step(jnp.ones((8, 8)))
    assert count.launches == 0


@pytest.mark.gpu
def test_an_in_place_step_launches_one_graph_and_a_moved_array_updates_it():
    options = compiler_options("full", ["xla_enable_command_buffers_during_profiling=true"], platform="gpu")
    state = jnp.ones((256, 256)) / 256
    step = jax.jit(lambda s: jnp.tanh(s @ s), donate_argnums=0).lower(state).compile(compiler_options=options)
    with count_launches() as first:
        state = step(state)
    assert (first.launches, first.records) == (1, 1)
    for _ in range(3):
        state = step(state)
    with count_launches() as steady:
        for _ in range(5):
            state = step(state)
    assert (steady.launches, steady.updates, steady.records) == (5, 0, 0)
    kept = [jnp.ones((256, 256)) for _ in range(5)]
    with count_launches() as moved:
        kept = [step(array) for array in kept]
    assert moved.launches == 5
    assert moved.updates > 0
