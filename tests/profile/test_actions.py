"""Simulated pipeline runs are converted to the kernels of a trace and read back."""

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from jgraph.errors import ProfileError
from jgraph.profile import _actions as actions
from jgraph.schedule import Costs, Simulation, generate, simulate
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, IDLE, WGRAD
from jgraph.schedule.tables import tick_table

COSTS = {"forward": 2.0, "dgrad": 3.0, "wgrad": 1.0, "backward": 4.5}
EXECUTION: dict[str, Any] = {"aligned": "lockstep", "general": "neighbours"}
CASES = [  # name, P, M, chunks, runtime
    ("aligned", 2, 4, 1, "aligned"),
    ("aligned", 4, 6, 1, "aligned"),
    ("aligned", 4, 8, 2, "aligned"),
    ("aligned", 4, 6, 1, "general"),
    ("zb-h1", 4, 8, 1, "general"),
    ("zb-v", 2, 6, 2, "general"),
    ("1f1b", 4, 8, 1, "general"),
    ("interleaved-1f1b", 2, 4, 2, "general"),
    ("dualpipe-v", 2, 6, 2, "general"),
]
cases = pytest.mark.parametrize(("name", "P", "M", "chunks", "runtime"), CASES)


def as_run(schedule, starts, ends):
    return Simulation(schedule, *(tuple(np.asarray(row, float) for row in rows) for rows in (starts, ends)), latency=0.0)


def schedule_of(name, P, M, chunks, runtime):
    schedule = generate(name, pp=P, microbatches=M, chunks=chunks)
    return schedule.newest_first() if runtime == "aligned" else schedule  # as `Pipeline.build` does


def run_of(schedule, runtime):
    return simulate(schedule, Costs(**COSTS), execution=EXECUTION[runtime])


def kernels(run, runtime, count=3):
    """Returns the kernels of each rank, `count` per action. A backward has `count` of dgrad and of wgrad, alternating."""
    kinds, schedule = tick_table(run.schedule).kind, run.schedule
    begin = np.full(len(kinds), np.inf)  # the first start of each tick on any rank
    for ticks, starts in zip(schedule.ticks, run.starts, strict=True):
        np.minimum.at(begin, ticks, starts)
    ranks = []
    for r, order in enumerate(schedule):
        found = {FORWARD: [], DGRAD: [], WGRAD: []}
        for kind, start, end in zip(order.kinds.tolist(), run.starts[r], run.ends[r], strict=True):
            halves = (DGRAD, WGRAD) if kind == BACKWARD else (kind,)
            edges = np.linspace(start, end, count * len(halves) + 1).tolist()
            for i, piece in enumerate(pairwise(edges)):
                found[halves[i % len(halves)]].append(piece)
        if runtime == "aligned":
            for tick in np.flatnonzero(kinds[:, r] == IDLE):
                # A rank that is idle in a tick runs the actions of the other ranks, except for wgrads.
                for kind in {int(kind) for kind in kinds[tick]} - {IDLE, WGRAD}:
                    found[kind] += [(begin[tick] + 0.1 * j, begin[tick] + 0.1 * j + 0.05) for j in range(count)]
        ranks.append({kind: np.array(sorted(times)).reshape(-1, 2) for kind, times in found.items()})
    return ranks


def with_a_slow_action(schedule, runtime, rank, position, more):
    """Simulates a run in ticks with one action that takes `more` longer."""
    took = [np.array([COSTS[action.kind] for action in order]) for order in schedule]
    took[rank][position] += more
    home = schedule.rank_of_stage
    neighbours = {r: {r} for r in range(schedule.num_ranks)}
    for a, b in zip(home[:-1].tolist(), home[1:].tolist(), strict=True):
        neighbours[a].add(b)
        neighbours[b].add(a)
    if runtime == "aligned":
        neighbours = {r: set(neighbours) for r in neighbours}
    clock, starts = [0.0] * schedule.num_ranks, [np.zeros(len(order)) for order in schedule]
    for tick in range(schedule.num_ticks):
        left = list(clock)
        for r in range(schedule.num_ranks):
            for i in np.flatnonzero(schedule.ticks[r] == tick):
                starts[r][i], left[r] = clock[r], clock[r] + took[r][i]
        clock = [max(left[q] for q in neighbours[r]) for r in range(schedule.num_ranks)]
    return as_run(schedule, starts, [start + own for start, own in zip(starts, took, strict=True)])


@cases
def test_kernels_are_read_back_as_the_simulated_actions(name, P, M, chunks, runtime):
    run = run_of(schedule_of(name, P, M, chunks, runtime), runtime)
    read = actions.measured(run.schedule, kernels(run, runtime), runtime)
    for found, expected in ((read.starts, run.starts), (read.ends, run.ends)):
        for row, expected_row in zip(found, expected, strict=True):
            np.testing.assert_array_equal(row, expected_row)
    assert actions.costs(read) == {kind: COSTS[kind] for kind in actions.costs(read)}
    assert (read.makespan, read.bubble) == (run.makespan, pytest.approx(run.bubble))


def test_an_action_ends_with_the_kernel_that_ends_last():
    run = run_of(generate("zb-h1", pp=2, microbatches=4), "general")
    ranks = kernels(run, "general")
    for kernels_by_kind in ranks:
        for times in kernels_by_kind.values():
            times[::3, 1] = times[2::3, 1]  # the first of three kernels runs beside the others and ends last
            times[2::3, 1] -= 0.01
    read = actions.measured(run.schedule, ranks, "general")
    np.testing.assert_array_equal(np.concatenate(read.ends), np.concatenate(run.ends))


def test_time_begins_with_the_first_action():
    run = run_of(schedule_of("aligned", 4, 6, 1, "aligned"), "aligned")
    later = [{kind: times + 1234.5 for kind, times in rank.items()} for rank in kernels(run, "aligned")]
    # An idle rank starts before the others. Its kernels belong to no action.
    later[3][FORWARD][:3] -= 0.25
    read = actions.measured(run.schedule, later, "aligned")
    np.testing.assert_allclose(np.concatenate(read.starts), np.concatenate(run.starts))


@cases
def test_without_a_slow_action_the_step_runs_as_planned(name, P, M, chunks, runtime):
    run = run_of(schedule_of(name, P, M, chunks, runtime), runtime)
    plan = actions.planned(run.schedule, actions.costs(run), runtime)
    played = with_a_slow_action(run.schedule, runtime, 0, 0, more=0.0)
    np.testing.assert_array_equal(np.concatenate(plan.starts), np.concatenate(played.starts))
    np.testing.assert_array_equal(np.concatenate(plan.starts), np.concatenate(run.starts))


@cases
def test_a_slow_action_is_listed_and_actions_that_wait_for_it_are_not(name, P, M, chunks, runtime):
    schedule, rng = schedule_of(name, P, M, chunks, runtime), np.random.default_rng(0)
    for _ in range(20):
        rank = int(rng.integers(P))
        position = int(rng.integers(len(schedule[rank])))
        run = with_a_slow_action(schedule, runtime, rank, position, more=50.0)
        listed = actions.report(schedule, actions.measured(schedule, kernels(run, runtime), runtime), runtime)
        (first,) = (listed["actions"][i] for i in listed["slow"])
        slow = schedule[rank][position]
        assert (first["rank"], first["kind"], first["microbatch"]) == (rank, slow.kind, slow.microbatch)
        assert first["slow_ms"] == pytest.approx(50.0)


@pytest.mark.parametrize(("kind", "word"), [(FORWARD, "forward"), (DGRAD, "dgrad"), (WGRAD, "wgrad")])
@pytest.mark.parametrize("runtime", ["aligned", "general"])
def test_kernels_that_do_not_match_the_actions_are_refused_with_their_counts(kind, word, runtime):
    schedule = schedule_of("aligned", 2, 4, 1, runtime)
    ranks = kernels(run_of(schedule, runtime), runtime)
    ran, does = len(ranks[1][kind]) - 1, len(ranks[1][kind]) // 3
    ranks[1][kind] = ranks[1][kind][:-1]
    with pytest.raises(ProfileError, match=f"rank 1 ran {ran} kernels of {word} in {does} actions"):
        actions.measured(schedule, ranks, runtime)
    del ranks[1][kind]
    with pytest.raises(ProfileError, match=f"rank 1 ran 0 kernels of {word}"):
        actions.measured(schedule, ranks, runtime)


def test_a_trace_with_another_number_of_ranks_is_refused():
    run = run_of(generate("zb-h1", pp=2, microbatches=4), "general")
    with pytest.raises(ProfileError, match="the trace has 1 ranks, the schedule 2"):
        actions.measured(run.schedule, kernels(run, "general")[:1], "general")


@cases
def test_the_report_is_json_with_the_expected_fields(name, P, M, chunks, runtime):
    schedule = schedule_of(name, P, M, chunks, runtime)
    run = with_a_slow_action(schedule, runtime, 0, 3, more=0.75)
    found = json.loads(json.dumps(actions.report(schedule, run, runtime), allow_nan=False))
    assert list(found) == ["schedule", "ranks", "microbatches", "chunks", "costs_ms", "planned", "measured", "actions", "slow"]
    assert (found["schedule"], found["ranks"], found["microbatches"], found["chunks"]) == (name, P, M, chunks)
    assert set(found["actions"][0]) == {
        *("rank", "kind", "chunk", "microbatch", "planned_start_ms", "planned_end_ms", "start_ms", "end_ms"),
        "slow_ms",
    }
    kinds = {action["kind"] for action in found["actions"]}
    assert kinds == set(found["costs_ms"])
    each = [(a["rank"], a["kind"], a["chunk"], a["microbatch"]) for a in found["actions"]]
    assert each == [(r, a.kind, a.chunk, a.microbatch) for r, order in enumerate(schedule) for a in order]
    assert found["planned"]["step_ms"] == max(action["planned_end_ms"] for action in found["actions"])
    assert found["measured"]["step_ms"] == max(action["end_ms"] for action in found["actions"])
    busy = sum(action["end_ms"] - action["start_ms"] for action in found["actions"])
    assert found["measured"]["bubble"] == pytest.approx(1 - busy / P / found["measured"]["step_ms"], abs=1e-4)
    assert found["planned"]["bubble"] == pytest.approx(run_of(schedule, runtime).bubble)
    assert [found["actions"][i]["slow_ms"] for i in found["slow"]] == [0.75]
