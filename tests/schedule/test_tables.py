"""Phases of aligned schedules, and schedules without tables. tests/pipeline/test_tables.py executes the tables."""

import pytest

from jgraph.errors import OrderError
from jgraph.schedule import NAMES, Order, Schedule, generate, phases, tabulate
from jgraph.schedule.action import IDLE
from jgraph.schedule.tables import tick_table

GRID = [(name, P, M, C) for name in NAMES for P in (1, 2, 3, 4, 6) for M in (1, 4, 7, 12, 13) for C in (1, 2, 3)]


def schedules():
    for name, P, M, C in GRID:
        try:
            yield generate(name, pp=P, microbatches=M, chunks=C)
        except OrderError:
            continue


def test_the_phases_of_an_aligned_schedule_cover_every_tick_once():
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


def test_phases_refuses_a_schedule_that_is_not_aligned():
    with pytest.raises(OrderError, match=r"tick \d+ has forward and backward"):
        phases(tick_table(generate("1f1b", pp=4, microbatches=8)))


def test_tabulate_refuses_transfers_between_distant_ranks():
    order = Order.parse([1, -1])
    with pytest.raises(OrderError, match="rank 0 sends to rank 2"):
        tabulate(Schedule((order,) * 4, ((0,), (2,), (1,), (3,))))


def test_tables_are_cached():
    schedule = generate("aligned", pp=2, microbatches=4)
    assert tick_table(schedule) is tick_table(schedule)
    assert tabulate(schedule) is tabulate(schedule)
    assert tabulate(schedule) is not tabulate(schedule, writing="makers")
