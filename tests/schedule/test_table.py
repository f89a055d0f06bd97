"""Tables are played here as a scan would: one row a tick, what was sent in the last tick arrives first, slots by number."""

import numpy as np
import pytest

from jgraph.errors import OrderError
from jgraph.schedule import NAMES, Order, Schedule, assign, generate, phases, tick_table
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, IDLE, WGRAD

GRID = [(name, P, M, C) for name in NAMES for P in (1, 2, 3, 4, 6) for M in (1, 4, 7, 12, 13) for C in (1, 2, 3)]


def schedules():
    for name, P, M, C in GRID:
        try:
            yield generate(name, pp=P, microbatches=M, chunks=C)
        except OrderError:
            continue


def play_table(schedule: Schedule, sharing: str) -> None:
    """Every read must find the tag (stage, microbatch) that it is about; every action must happen once."""
    table = tick_table(schedule, assign(schedule, sharing=sharing))
    pools = {pool: np.full((count + 1, schedule.num_ranks, 2), -1) for pool, count in table.counts.items()}
    sent = [None] * schedule.num_ranks
    done = []
    for t in range(len(table.kind)):
        for source, step in (("previous", -1), ("next", 1), ("same", 0)):
            for r in range(schedule.num_ranks):
                for pool in ("activation", "gradient"):
                    slot = getattr(table.arrivals[source], pool)[t, r]
                    if slot >= 0:
                        made = sent[(r + step) % schedule.num_ranks]
                        assert made is not None
                        assert made[0] == pool
                        pools[pool][slot, r] = made[1:]
        sent = [None] * schedule.num_ranks
        for r in range(schedule.num_ranks):
            kind, stage, m = (int(column[t, r]) for column in (table.kind, table.stage, table.microbatch))
            slot = {pool: int(table.slots[pool][t, r]) for pool in pools}
            if kind == IDLE:
                assert set(slot.values()) == {-1}
                continue

            def read(pool, tag, slot=slot, r=r):
                assert 0 <= slot[pool] < table.counts[pool]
                assert tuple(pools[pool][slot[pool], r]) == tag, pool

            done.append((kind, stage, m))
            assert schedule.placement[r][table.chunk[t, r]] == stage
            if kind == FORWARD:
                if stage > 0:
                    read("activation", (stage, m))
                for pool in ("forward_dgrad", "forward_wgrad"):
                    pools[pool][slot[pool], r] = stage, m
                sent[r] = ("activation", stage + 1, m)
            if kind in (DGRAD, BACKWARD):
                read("forward_dgrad", (stage, m))
                if stage < schedule.num_stages - 1:
                    read("gradient", (stage, m))
                sent[r] = ("gradient", stage - 1, m)
            if kind == DGRAD:
                pools["stash"][slot["stash"], r] = stage, m
            if kind in (WGRAD, BACKWARD):
                read("forward_wgrad", (stage, m))
            if kind == WGRAD:
                read("stash", (stage, m))
    assert len(done) == len(set(done)) == sum(map(len, schedule.orders))


@pytest.mark.parametrize("sharing", ["rank", "all"])
def test_a_scan_over_the_table_finds_in_every_slot_what_it_is_about(sharing):
    for schedule in schedules():
        play_table(schedule, sharing)


def test_the_rounds_of_an_aligned_schedule_cover_every_tick_once():
    for schedule in schedules():
        if schedule.name != "aligned":
            continue
        table = tick_table(schedule)
        tick = 0
        for phase in phases(table):
            assert phase.first_tick == tick
            for i in range(phase.rounds):
                for j, kinds in enumerate(phase.kinds):
                    row = table.kind[tick + i * len(phase.kinds) + j]
                    assert {("forward", "dgrad", "wgrad")[k] for k in row if k != IDLE} <= set(kinds)
            tick += phase.rounds * len(phase.kinds)
        assert tick == schedule.num_ticks


def test_phases_are_fill_then_steady_then_drain():
    names = [phase.name for phase in phases(tick_table(generate("aligned", pp=4, microbatches=16, chunks=2)))]
    assert [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name] == ["fill", "steady", "drain"]


def test_a_schedule_that_is_not_aligned_has_no_phases():
    with pytest.raises(OrderError, match=r"tick \d+ has forward and backward"):
        phases(tick_table(generate("1f1b", pp=4, microbatches=8)))


def test_stages_that_are_far_apart_have_no_table():
    order = Order.parse([1, -1])
    with pytest.raises(OrderError, match="rank 0 sends to rank 2"):
        tick_table(Schedule((order,) * 4, ((0,), (2,), (1,), (3,))))
