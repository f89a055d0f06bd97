"""Traces as arrays: steps, attribution of time, and invalid files."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from jaxlib.xla_client import hlo

from jgraph.errors import ProfileError
from jgraph.profile.attribution import choose_step, collectives
from jgraph.profile.program import Program
from jgraph.profile.trace import Events, Trace, owners, read, steps

PROGRAM = Program("HloModule jit_step\n")


def events(rows):
    """Returns events from rows of (start, end, op) or (start, end, op, module)."""
    rows = sorted((*row, "jit_step")[:4] for row in rows)
    start, end, op, modules = zip(*rows, strict=True)
    unknown = ("",) * len(rows)
    texts = tuple(op), tuple(op), unknown, modules, ("stream",) * len(rows), unknown
    return Events(np.array(start, float), np.array(end, float), *texts)


def shares(found, yields):
    start, end, owner = owners(found, yields)
    assert (start[1:] >= end[:-1]).all()
    return np.bincount(owner, end - start, len(found))


INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.booleans()), min_size=1, max_size=25)


@given(INTERVALS)
def test_time_is_attributed_once(rows):
    found = events([(start, start + length, str(i)) for i, (start, length, _) in enumerate(rows)])
    yields = np.array([rows[int(op)][2] for op in found.op], bool)
    ticks = np.arange(60) + 0.5
    covered = ((found.start[:, None] < ticks) & (ticks < found.end[:, None])).any(0).sum()
    own = shares(found, yields)
    assert own.sum() == pytest.approx(covered)
    assert (own <= found.end - found.start + 1e-9).all()
    # Collectives get only time that no other event covers.
    others = ((found.start[:, None] < ticks) & (ticks < found.end[:, None]) & ~yields[:, None]).any(0).sum()
    assert own[yields].sum() == pytest.approx(covered - others)


def test_the_time_of_a_nested_event_is_not_counted_for_the_outer_event():
    loop, body, gather = 0, 1, 2
    found = events([(0, 10, "while"), (2, 5, "body"), (4, 12, "all-gather")])
    own = shares(found, np.array([False, False, True]))
    assert (own[loop], own[body], own[gather]) == (7, 3, 2)


def test_steps_are_found_by_an_event_that_runs_once_per_step():
    found = events(
        [
            row
            for k in range(3)
            for row in [(10 * k, 10 * k + 1, "a"), (10 * k + 1, 10 * k + 2, "b"), (10 * k + 3, 10 * k + 9, "b")]
        ]
    )
    assert steps(found, 3) == [(0, 1), (10, 11), (20, 21)]
    with pytest.raises(ProfileError, match="must be the number of steps in the trace, but no kernel ran 4 times"):
        steps(found, 4)


def test_the_last_step_but_one_is_chosen_with_its_events_before_the_next_step():
    rows = [(0, 4, "a"), (10, 15, "a"), (16, 18, "copy"), (20, 26, "a"), (30, 37, "a")]
    one, other = events(rows), events([(start + 1, end + 1, op) for start, end, op in rows if op == "a"])
    chosen = choose_step(Trace("CPU", {0: one, 1: other}, {}), PROGRAM, 4)
    assert [step.ms for step in chosen.values()] == [10, 10]
    assert chosen[0].all_ms == (10, 10, 10, 7)
    assert (chosen[0].events.start.tolist(), chosen[1].events.start.tolist()) == ([0], [1])
    chosen = choose_step(Trace("CPU", {0: one}, {}), PROGRAM, 4)
    assert chosen[0].events.end.tolist() == [6]


def loop(*, count=4, step="jit_step(1)", module="jit_loss(2)"):
    """Returns rows of a loop of two programs of two instructions. The first program has a loop of its own."""
    return [
        row
        for start in range(0, 20 * count, 20)
        for row in [
            (start, start + 4, "a", step),
            *((start + 4 + i, start + 5 + i, "body", step) for i in range(4)),
            (start + 10, start + 12, "a", module),
        ]
    ]


@pytest.mark.parametrize(
    ("rows", "annotated", "all_ms", "found_by"),
    [
        (loop(), 0, (20, 20, 20, 4), "4 steps: the executions of jit_step, the program with the longest time."),
        (loop(), 2, (20, 20, 20, 4), "4 steps: the executions of jit_step"),  # nothing ran twice
        ([*loop(), (30, 31, "b", "jit_step(1)"), (70, 71, "b", "jit_step(1)")], 2, (40, 1), "2 steps, marked by jax.profiler"),
        # The first call was compiled for other dtypes.
        ([(-90, -20, "a", "jit_step(0)"), *loop()], 0, (20, 20, 20, 4), "4 steps: the executions of jit_step"),
        (loop(count=1), 0, (12,), "The whole trace is one step, because no program was repeated."),
    ],
    ids=["repeated", "wrong annotations", "annotated", "compiled twice", "once"],
)
def test_steps_are_found_without_their_number(rows, annotated, all_ms, found_by):
    (step,) = choose_step(Trace("CPU", {0: events(rows)}, {}, annotated=annotated)).values()
    assert step.all_ms == all_ms
    assert step.found_by.startswith(found_by)


def test_a_program_from_the_compilation_cache_is_found_by_its_instructions():
    def proto(name):
        line = f"  ROOT %{name} = f32[] constant(0)"
        module = hlo.hlo_module_from_text(f"HloModule jit_step\n\nENTRY %main () -> f32[] {{\n{line}\n}}\n")
        return module.as_serialized_hlo_module_proto()

    programs = {"jit_step(1)": proto("other"), "jit_step(7)": proto("a"), "jit_step(8)": b"of another version of XLA"}
    (step,) = choose_step(Trace("CPU", {0: events(loop())}, {}, programs)).values()
    assert {module: list(program.instructions) for module, program in step.programs.items()} == {"jit_step(1)": ["a"]}


def test_a_step_has_the_events_of_all_programs():
    (step,) = choose_step(Trace("CPU", {0: events(loop())}, {})).values()
    assert (step.ms, step.events.module.count("jit_step(1)"), step.events.module.count("jit_loss(2)")) == (20, 5, 1)


def test_a_collective_names_the_kernels_that_hide_it():
    found = events([(0, 10, "all-gather.1"), (2, 5, "a"), (5, 6, "b"), (8, 9, "a"), (20, 22, "all-gather.1")])
    (row,) = collectives(choose_step(Trace("GPU", {0: found}, {}), count=1)[0])
    assert {key: row[key] for key in ("count", "ms", "exposed_ms", "hidden_ms")} == {
        "count": 2,
        "ms": 12,
        "exposed_ms": 7,
        "hidden_ms": 5,
    }
    assert row["hidden_by"] == [("a", 4), ("b", 1)]


def test_a_path_without_a_trace_is_refused(tmp_path):
    with pytest.raises(ProfileError, match=r"has no trace: must contain a \*\.xplane\.pb"):
        read(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "foreign"])
def test_a_damaged_trace_is_refused_with_its_name(damage, recorded, tmp_path):
    whole = next(recorded("one").rglob("uncaptured/*.xplane.pb")).read_bytes()
    file = tmp_path / "bad.xplane.pb"
    file.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"once upon a time" * 100)
    with pytest.raises(ProfileError, match=r"bad\.xplane\.pb cannot be read as a trace"):
        read(file)


def test_an_empty_trace_is_refused(tmp_path):
    file = tmp_path / "empty.xplane.pb"
    file.write_bytes(b"")
    with pytest.raises(ProfileError, match="it has neither a GPU nor a CPU program"):
        read(file)
