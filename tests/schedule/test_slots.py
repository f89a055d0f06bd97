"""Slots are as few as possible and are never reused while their array is still needed."""

import json
from pathlib import Path

import numpy as np
import pytest

from jgraph.schedule import NAMES, POOLS, Order, Schedule, assign, generate
from jgraph.schedule._slots import live_ranges
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, WGRAD
from tests.schedule.referee import Foul, counted, referee
from tests.schedule.strategies import delayed_ticks, random_schedule

HAZARDOUS = json.loads((Path(__file__).parent / "goldens" / "orders.json").read_text())["hazardous"]
hazardous = pytest.mark.parametrize("case", HAZARDOUS, ids=lambda case: case["name"])


def some_schedules(count: int, seed: int):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        schedule = random_schedule(rng)
        yield schedule
        yield delayed_ticks(rng, schedule)
    for name in NAMES:
        for P in (1, 3, 4):
            yield generate(name, pp=P, microbatches=9, chunks=2 if name in ("interleaved-1f1b", "aligned", "gpipe") else 1)


def lives(schedule: Schedule) -> dict[str, list[tuple[int, int, int]]]:
    """Returns (rank, first tick, last tick) of every array in each pool, collected action by action."""
    spans: dict[str, dict[tuple[int, int], list[int]]] = {pool: {} for pool in POOLS}
    home = {stage: r for r, stages in enumerate(schedule.placement) for stage in stages}
    actions = sorted(action for row in counted(schedule) for action in row)
    for tick, kind, stage, m in actions:
        tag = (stage, m)
        if kind == FORWARD:
            touched = ["forward_dgrad", "forward_wgrad"] + ["activation"] * (stage > 0)
            if stage < len(home) - 1:
                spans["activation"][stage + 1, m] = [tick + 1]
        else:
            touched = {
                DGRAD: ["forward_dgrad", "stash"],
                WGRAD: ["forward_wgrad", "stash"],
                BACKWARD: ["forward_dgrad", "forward_wgrad"],
            }[kind]
            if kind != WGRAD:
                touched += ["gradient"] * (stage < len(home) - 1)
                if stage > 0:
                    spans["gradient"][stage - 1, m] = [tick + 1]
        for pool in touched:
            spans[pool].setdefault(tag, []).append(tick)
    return {
        pool: [(home[stage], min(ticks), max(ticks)) for (stage, _), ticks in found.items()] for pool, found in spans.items()
    }


def most_at_once(spans: list[tuple[int, int]], num_ticks: int) -> int:
    return max((sum(first <= tick <= last for first, last in spans) for tick in range(num_ticks)), default=0)


def three_arrivals() -> Schedule:
    """Returns a schedule with three activations that arrive at rank 0 in the fourth tick, from ranks 1, 2 and 0.

    The remaining ticks have one action each.
    """
    placement = ((1, 2, 4), (0,), (3,))
    home = {s: (r, c) for r, stages in enumerate(placement) for c, s in enumerate(stages)}
    forwards = [[(0, 0)], [(0, 1), (1, 0)], [(2, 0)], [(0, 2), (1, 1), (3, 0)]]
    forwards += [[(4, 0)], [(2, 1)], [(3, 1)], [(4, 1)], [(1, 2)], [(2, 2)], [(3, 2)], [(4, 2)]]
    backwards = [[(s, m)] for m in range(3) for s in (4, 3, 2, 1, 0)]
    rows: list[list[tuple[int, int, int]]] = [[] for _ in placement]
    for tick, actions in enumerate(forwards + backwards):
        for s, _ in actions:
            r, c = home[s]
            rows[r].append((FORWARD if tick < len(forwards) else BACKWARD, c, tick))
    kinds, chunks, ticks = zip(*(np.array(row).T for row in rows), strict=True)
    return Schedule(tuple(map(Order, kinds, chunks)), placement, ticks)


def test_the_number_of_slots_is_the_maximum_of_live_arrays():
    for schedule in some_schedules(150, seed=1):
        slots = assign(schedule)
        for pool, spans in lives(schedule).items():
            for r in range(schedule.num_ranks):
                own = [(first, last) for rank, first, last in spans if rank == r]
                assert slots.counts[pool][r] == most_at_once(own, schedule.num_ticks), (pool, r)


def test_exactly_the_stored_arrays_have_a_slot():
    for schedule in some_schedules(60, seed=3):
        slots = assign(schedule)
        assert set(slots.numbers) == set(slots.counts) == set(POOLS)
        for pool, spans in lives(schedule).items():
            table = slots.numbers[pool]
            assert table.shape == (schedule.num_stages, schedule.num_microbatches)
            assert (table >= 0).sum() == len(spans)
            assert table.min() >= -1


def test_full_backwards_need_no_stash():
    slots = assign(generate("1f1b", pp=4, microbatches=8))
    assert slots.counts["stash"].tolist() == [0] * 4
    assert (slots.numbers["stash"] == -1).all()


def test_three_arrivals_in_one_tick_get_three_slots():
    referee(three_arrivals())


def test_the_referee_detects_a_slot_shared_by_two_arrays():
    schedule = generate("zb-v", pp=4, microbatches=12)
    for pool in POOLS:
        slots = assign(schedule)
        assert slots.counts[pool].max() > 1
        slots.numbers[pool][slots.numbers[pool] == 1] = 0
        with pytest.raises(Foul, match=f"{pool} of stage"):
            referee(schedule, slots=slots)


def test_the_referee_detects_a_use_in_the_tick_of_production():
    schedule = generate("zb-h1", pp=3, microbatches=4)
    slots = assign(schedule)
    for r, position in ((1, 0), (0, 3), (2, 2)):  # the first forward, dgrad and wgrad with a dependency
        ticks = [row.copy() for row in schedule.ticks]
        ticks[r][position] -= 1
        early = generate("zb-h1", pp=3, microbatches=4)
        object.__setattr__(early, "ticks", tuple(ticks))
        with pytest.raises(Foul, match=r"has not finished kind|has tick"):
            referee(early, slots=slots)


@hazardous
def test_orders_with_upstream_buffer_bugs_are_accepted_and_safe(case):
    args = case["args"]
    order = Order.parse(
        args["order"], args["layers_per_chunk"], delay_wgrad=[c in args["dw"] for c in range(len(args["layers_per_chunk"]))]
    )
    assert referee(Schedule((order,))) > 0


@hazardous
def test_freeing_buffers_at_dgrad_would_overwrite_arrays_that_a_wgrad_needs(case):
    schedule = Schedule((Order.parse(case["args"]["order"]),))
    ranges = live_ranges(schedule)
    (_, dgrad), (stashed, _) = ranges["forward_dgrad"], ranges["stash"]
    early = ranges | {"forward_wgrad": (ranges["forward_wgrad"][0], dgrad), "stash": (stashed, stashed)}
    with pytest.raises(Foul, match="of stage"):
        referee(schedule, slots=assign(schedule, early))
