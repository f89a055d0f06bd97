"""Simulates schedule tables with names in place of arrays. Like the program, every rank does every write of every tick.

A name is (pool, stage, microbatch). An unused result is None and may overwrite only free slots.
"""

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from jgraph.errors import OrderError
from jgraph.schedule import NAMES, Schedule, assign, generate, tabulate
from jgraph.schedule._slots import POOLS
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, IDLE, WGRAD
from jgraph.schedule.tables import ScheduleTables, TickTable, Writing
from tests.schedule.strategies import delayed_ticks, schedules

# T ticks, P ranks, r this rank, M microbatches

Name = tuple[str, int, int] | None

# (pools read by an action, pools with an entry freed by the action)
FINDS = {
    FORWARD: ((), ()),
    DGRAD: (("forward_dgrad", "forward_wgrad"), ("forward_dgrad",)),
    WGRAD: (("forward_wgrad", "stash"), ("forward_wgrad", "stash")),
    BACKWARD: (("forward_dgrad", "forward_wgrad"), ("forward_dgrad", "forward_wgrad")),
    IDLE: ((), ()),
}
MAKES = {FORWARD: ("forward_dgrad", "forward_wgrad"), DGRAD: ("stash",), WGRAD: (), BACKWARD: (), IDLE: ()}
# Pools that an action may write to, on this rank or on another rank.
SENDS = {FORWARD: ("activation", "loss"), DGRAD: ("gradient",), WGRAD: (), BACKWARD: ("gradient",), IDLE: ()}


def simulate(schedule: Schedule, cs: ScheduleTables, writing: Writing) -> None:
    """Simulates a schedule. Fails if a name is not found, or is overwritten before its last use."""
    table, last, home = cs.table, schedule.num_stages - 1, schedule.rank_of_stage
    pools: list[dict[str, list[Name]]] = [{pool: [None] * count for pool, count in cs.slots.items()} for _ in schedule]
    awaited: set[Name] = set()
    used = 0
    # A stash passed directly from dgrad to wgrad is not stored in a pool.
    passed = [writing == "makers" and passes_stash(table, t) for t in range(len(table.kind))]

    def write(pool: str, r: int, slot: int, name: Name) -> None:
        assert slot >= 0
        before = pools[r][pool][slot]
        assert before not in awaited, f"{name} overwrites {before} on rank {r}"
        if name is not None and not (name[0] == pool and 0 <= name[1] <= last and home[name[1]] == r):
            name = None
        pools[r][pool][slot] = name
        if name is not None:
            awaited.add(name)

    for t in range(len(table.kind)):
        sent: list[Name] = [None] * len(schedule)
        writes: list[tuple[str, int, int, Name]] = []
        for r in range(len(schedule)):
            kind, s, m = (int(column[t, r]) for column in (table.kind, table.stage, table.microbatch))
            finds, ends = FINDS[kind]
            if kind == FORWARD:
                finds = ends = ("activation",) if s > 0 else ()
                assert s > 0 or cs.enter[t] == m
                assert s < last or cs.leave[t] == m
                sent[r] = "activation", s + 1, m
            if kind in (DGRAD, BACKWARD):
                dy = "gradient" if s < last else "loss"
                finds, ends = (*finds, dy), (*ends, dy)
                assert s > 0 or cs.back[t] == m
                sent[r] = "gradient", s - 1, m
            if kind == WGRAD and t > 0 and passed[t - 1]:
                finds = ends = ("forward_wgrad",)
            for pool in finds:
                assert pools[r][pool][cs.reads[pool][t, r]] == (pool, s, m), (t, r, kind)
            awaited -= {(pool, s, m) for pool in ends}
            used += len(ends)
            for pool, column in cs.writes.items():
                made = pool in MAKES[kind] or (pool == "loss" and kind == FORWARD and s == last)
                in_hand = pool == "stash" and passed[t]
                # If only some ranks do an action, only these write its residuals and stash.
                only_makers = pool in POOLS[:3] and (writing == "all" or (table.kind[t] == WGRAD).any())
                if not in_hand and (made or not only_makers):
                    writes.append((pool, r, int(column[t, r]), (pool, s, m) if made else None))
        # The program reads, then writes, then receives.
        for (source, pool), column in cs.arrivals.items():
            came = dict(enumerate(sent)) if source == "same" else {to: sent[r] for r, to in cs.hops[source]}
            writes += [(pool, r, int(column[t, r]), came.get(r)) for r in range(len(schedule))]
        kinds = table.kind[t].tolist()
        made_now = {pool for r in range(len(schedule)) for pool in MAKES[kinds[r]] + SENDS[kinds[r]]}
        for pool, r, slot, name in writes:
            if writing == "all" or pool in made_now:
                write(pool, r, slot, name)
    assert not awaited
    split = int((table.kind == WGRAD).sum())
    S, M = schedule.num_stages, schedule.num_microbatches
    # Two residual pools, the stash of split backwards, activations and gradients between stages, and the dy of the loss.
    assert used == 2 * S * M + split - len(schedule) * sum(passed) + 2 * (S - 1) * M + M


def passes_stash(table: TickTable, t: int) -> bool:
    """Returns whether every rank does a dgrad in tick `t` and its wgrad in the next tick."""
    if t + 1 == len(table.kind) or {*table.kind[t]} != {DGRAD} or {*table.kind[t + 1]} != {WGRAD}:
        return False
    return bool((table.stage[t] == table.stage[t + 1]).all() and (table.microbatch[t] == table.microbatch[t + 1]).all())


def check(schedule: Schedule, writing: Writing) -> None:
    cs = tabulate(schedule, writing=writing)
    simulate(schedule, cs, writing)
    for numbers in (cs.enter, cs.leave, cs.back):
        assert sorted(numbers[numbers >= 0]) == list(range(schedule.num_microbatches))
    for pairs in cs.hops.values():
        senders, receivers = zip(*pairs, strict=True)
        assert len(set(senders)) == len(senders)
        assert len(set(receivers)) == len(receivers)
    for pool, counts in assign(schedule).counts.items():
        # At most one extra slot for an unused result. Fewer slots if stashes are passed directly.
        least = 0 if (pool, writing) == ("stash", "makers") else counts.max()
        most = counts.max() + (pool in POOLS[3:] or writing == "makers")
        assert least <= cs.slots[pool] <= most
    assert all(column.dtype == np.int32 for group in (cs.reads, cs.writes, cs.arrivals) for column in group.values())


@pytest.mark.parametrize("C", [1, 2, 3])
@pytest.mark.parametrize("P", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_read_finds_its_array_and_idle_ranks_overwrite_only_free_slots(name, P, C):
    played, own = 0, 2 if name == "interleaved-1f1b" else 1
    for M in (1, P, 2 * P, 2 * P + 1):
        try:
            schedule = generate(name, pp=P, microbatches=M, chunks=C)
        except OrderError as error:
            # Some schedules do not support this number of microbatches or chunks.
            assert "needs at least" in str(error) or own != C  # noqa: PT017
            continue
        check(schedule, "all")
        check(schedule, "makers")
        played += 1
    assert played > 0 or own != C


@pytest.mark.parametrize(("P", "M", "held", "waiting"), [(1, 4, 1, 0), (2, 16, 3, 2), (4, 16, 7, 6)])
def test_an_aligned_pipeline_has_one_slot_per_pending_array(P, M, held, waiting):
    slots = tabulate(generate("aligned", pp=P, microbatches=M).newest_first(), writing="makers").slots
    assert slots["forward_dgrad"] == slots["forward_wgrad"] == held
    assert slots["stash"] == waiting


@pytest.mark.long
@given(schedules(), st.integers(0, 2**32 - 1), st.sampled_from(["all", "makers"]))
@settings(max_examples=100)
def test_random_schedules_with_idle_ticks_are_valid(schedule, seed, writing):
    try:
        tabulate(schedule)
    except OrderError:
        assume(False)  # consecutive stages are not on neighboring ranks
    check(schedule, writing)
    check(delayed_ticks(np.random.default_rng(seed), schedule), writing)


def test_consecutive_stages_on_distant_ranks_are_refused():
    schedule = generate("1f1b", pp=4, microbatches=4)
    moved = Schedule(tuple(schedule.orders[s] for s in (0, 2, 1, 3)), ((0,), (2,), (1,), (3,)))
    with pytest.raises(OrderError, match="not its neighbor"):
        tabulate(moved)
