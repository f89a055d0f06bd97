"""Slots: as few as ever live at once, never given away while somebody still needs what is there."""

import json
from pathlib import Path

import numpy as np
import pytest

from jgraph.errors import ConfigError, OrderError
from jgraph.schedule import NAMES, POOLS, Order, Schedule, assign, generate
from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, WGRAD
from tests.schedule.referee import OWN_POOLS, Foul, counted, referee
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
    """Of each pool (rank, first tick, last tick) of all that is ever kept there, told by the actions one by one."""
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
    """Rank 0 receives activations from rank 1, from rank 2 and from itself in one tick (the fourth); then all goes on one by
    one."""
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


def test_as_many_slots_as_are_ever_live_at_once_on_a_rank():
    for schedule in some_schedules(150, seed=1):
        slots = assign(schedule)
        for pool, spans in lives(schedule).items():
            for r in range(schedule.num_ranks):
                own = [(first, last) for rank, first, last in spans if rank == r]
                assert slots.counts[pool][r] == most_at_once(own, schedule.num_ticks), (pool, r)


def test_shared_slots_are_as_many_as_are_live_at_once_when_the_last_rank_frees_them():
    for schedule in some_schedules(150, seed=2):
        slots = assign(schedule, sharing="all")
        for pool in OWN_POOLS:
            together: dict[int, int] = {}
            for _, first, last in lives(schedule)[pool]:
                together[first] = max(last, together.get(first, -1))
            expected = most_at_once(list(together.items()), schedule.num_ticks)
            assert slots.counts[pool].tolist() == [expected] * schedule.num_ranks, pool


def test_a_slot_is_there_exactly_for_what_is_kept():
    for schedule in some_schedules(60, seed=3):
        for sharing in ("rank", "all"):
            slots = assign(schedule, sharing=sharing)
            assert set(slots.numbers) == set(slots.counts) == set(POOLS)
            for pool, spans in lives(schedule).items():
                table = slots.numbers[pool]
                assert table.shape == (schedule.num_stages, schedule.num_microbatches)
                assert (table >= 0).sum() == len(spans)
                assert table.min() >= -1


def test_sharing_never_needs_fewer_slots_than_the_rank_that_needs_most():
    for schedule in some_schedules(60, seed=4):
        own, shared = assign(schedule), assign(schedule, sharing="all")
        for pool in POOLS:
            assert (shared.counts[pool] >= own.counts[pool].max()).all()


def test_backwards_that_are_whole_leave_no_stash():
    slots = assign(generate("1f1b", pp=4, microbatches=8))
    assert slots.counts["stash"].tolist() == [0] * 4
    assert (slots.numbers["stash"] == -1).all()


@pytest.mark.parametrize("sharing", ["rank", "all"])
def test_three_arrivals_at_a_rank_in_one_tick_get_three_slots(sharing):
    referee(three_arrivals(), sharing)


def test_the_referee_sees_when_one_slot_is_given_to_two():
    schedule = generate("zb-v", pp=4, microbatches=12)
    for pool in POOLS:
        slots = assign(schedule)
        assert slots.counts[pool].max() > 1
        slots.numbers[pool][slots.numbers[pool] == 1] = 0
        with pytest.raises(Foul, match=f"{pool} of stage"):
            referee(schedule, slots=slots)


def test_the_referee_sees_when_something_is_used_in_the_tick_in_which_it_is_made():
    schedule = generate("zb-h1", pp=3, microbatches=4)
    slots = assign(schedule)
    for r, position in ((1, 0), (0, 3), (2, 2)):  # the first forward, dgrad and wgrad of a rank that have to wait
        ticks = [row.copy() for row in schedule.ticks]
        ticks[r][position] -= 1
        early = generate("zb-h1", pp=3, microbatches=4)
        object.__setattr__(early, "ticks", tuple(ticks))
        with pytest.raises(Foul, match=r"not through kind|goes from tick"):
            referee(early, slots=slots)


def test_the_referee_sees_when_ranks_do_not_share_a_number():
    schedule = generate("aligned", pp=4, microbatches=8)
    slots = assign(schedule, sharing="all")
    slots.numbers["forward_wgrad"][0] = slots.numbers["forward_wgrad"][0, ::-1].copy()
    with pytest.raises(Foul, match=r"different ranks|holds"):
        referee(schedule, "all", slots)


@hazardous
def test_orders_that_upstream_gets_wrong_are_accepted_and_safe(case):
    args = case["args"]
    order = Order.parse(
        args["order"], args["layers_per_chunk"], delay_wgrad=[c in args["dw"] for c in range(len(args["layers_per_chunk"]))]
    )
    for sharing in ("rank", "all"):
        assert referee(Schedule((order,)), sharing) > 0


@hazardous
def test_to_free_their_buffers_at_dgrad_is_refused_with_the_position(case):
    schedule = Schedule((Order.parse(case["args"]["order"]),))
    refusal = r"would overwrite what entry \d+, the wgrad of .* still needs.*release='wgrad'"
    with pytest.raises(OrderError, match=refusal) as caught:
        assign(schedule, release="dgrad")
    # The second forward takes the first one's input; the second dgrad takes the first one's stash.
    assert caught.value.position == {"min_input_hazard": 2, "min_grad_output_hazard": 3}[case["name"]]
    assert caught.value.rank == 0


def test_freeing_at_dgrad_is_allowed_where_every_wgrad_comes_at_once():
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2)):
        schedule = generate(name, pp=4, microbatches=8, chunks=chunks).split()
        early = assign(schedule, release="dgrad")
        referee(schedule, slots=early)


def test_freeing_at_dgrad_is_not_offered_where_ranks_share_numbers():
    with pytest.raises(OrderError, match="take sharing='rank' with it"):
        assign(generate("1f1b", pp=2, microbatches=2), sharing="all", release="dgrad")


def test_freeing_at_dgrad_is_either_refused_at_an_entry_that_makes_something_or_safe():
    refused = 0
    for schedule in some_schedules(300, seed=5):
        error = None
        try:
            slots = assign(schedule, release="dgrad")
        except OrderError as caught:
            error = caught
        if error is None:
            referee(schedule, slots=slots)
            assert all((slots.counts[pool] <= assign(schedule).counts[pool]).all() for pool in POOLS)
        else:
            refused += 1
            action = schedule[error.rank][error.position]
            assert action.kind in ("forward", "dgrad")
            assert f"entry {error.position}, the {action}, would overwrite" in str(error)
    assert 50 < refused < 600


def test_bytes_of_a_rank_are_its_slots_times_their_sizes():
    schedule = generate("zb-h1", pp=4, microbatches=8)
    slots = assign(schedule)
    sizes = {"forward_dgrad": 1, "forward_wgrad": 10, "stash": 100, "activation": 1000, "gradient": 10000}
    expected = [sum(size * int(slots.counts[pool][r]) for pool, size in sizes.items()) for r in range(4)]
    assert slots.bytes_per_rank(sizes).tolist() == expected
    assert slots.bytes_per_rank({"forward_wgrad": 2.5}).tolist() == [10.0] * 4
    assert slots.bytes_per_rank({}).tolist() == [0.0] * 4


def test_bytes_of_a_pool_that_is_not_there_are_refused_with_those_that_are():
    slots = assign(generate("1f1b", pp=2, microbatches=4))
    with pytest.raises(OrderError, match="`sizes` has 'stashes': must be one of " + ", ".join(POOLS)):
        slots.bytes_per_rank({"stash": 1, "stashes": 2})


@pytest.mark.parametrize("choice", [{"sharing": "al"}, {"release": "typo"}])
def test_a_choice_that_is_not_there_is_refused(choice):
    with pytest.raises(ConfigError, match="must be one of"):
        assign(generate("1f1b", pp=2, microbatches=2), **choice)
