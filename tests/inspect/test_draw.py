"""Timelines show the simulated actions at their times."""

import re
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from rich.cells import cell_len
from rich.style import Style

from jgraph.inspect import draw
from jgraph.schedule import Costs, Simulation, generate, simulate
from jgraph.schedule.action import LETTERS
from tests.schedule.strategies import schedules


def run_of(name: str, pp: int, microbatches: int, chunks: int = 1, **options) -> Simulation:
    return simulate(generate(name, pp=pp, microbatches=microbatches, chunks=chunks), Costs().per_chunk(chunks), **options)


def plain(run: Simulation, width: int = 100) -> str:
    return draw.timeline(run, width=width, cells="letters").plain


def rows(text: str, rank: int) -> list[str]:
    """Returns the lines of a rank without the label, one per band."""
    label = max(map(len, re.findall(r"^rank \d+ +", text, re.M)))
    return [line[label:] for line in text.splitlines() if re.match(rf"rank {rank} ", line)]


def actions(row: str) -> list[tuple[str, str]]:
    """Returns (letter, number) of the cells that start in a row; the number is "" if it did not fit. Allows no other text."""
    tokens = re.findall(r"([FIWBfiwb-])(\d*) *|·+", row)
    assert "".join(m.group(0) for m in re.finditer(r"[FIWBfiwb-]\d* *|·+", row)) == row, row
    return [(letter, number) for letter, number in tokens if letter not in ("", "-")]


def expected(run: Simulation, rank: int) -> list[tuple[str, str]]:
    order = run.schedule[rank]
    kinds = zip(order.kinds.tolist(), order.chunks.tolist(), strict=True)
    letters = [LETTERS[kind] if chunk == 0 else LETTERS[kind].lower() for kind, chunk in kinds]
    return list(zip(letters, map(str, order.microbatches), strict=True))


TINY = [
    ("zb-h1", 3, 4, 1),
    ("zb-v", 2, 3, 2),
    ("1f1b", 4, 4, 1),
    ("gpipe", 2, 2, 3),
    ("dualpipe-v", 2, 4, 2),
    ("aligned", 1, 1, 1),
]


@pytest.mark.parametrize(("name", "pp", "microbatches", "chunks"), TINY)
def test_a_small_schedule_shows_every_action_once_in_sequence_with_its_microbatch(name, pp, microbatches, chunks):
    run = run_of(name, pp, microbatches, chunks)
    text = plain(run, 200)
    for r in range(pp):
        (row,) = rows(text, r)
        assert actions(row) == expected(run, r)


@pytest.mark.parametrize(("name", "pp", "microbatches", "chunks"), TINY)
def test_dots_mark_exactly_the_idle_time(name, pp, microbatches, chunks):
    run = run_of(name, pp, microbatches, chunks, latency=1 / chunks)
    text = plain(run, 200)
    for r in range(pp):
        (row,) = rows(text, r)
        middles = (np.arange(len(row)) + 0.5) * run.makespan / len(row)
        busy = ((run.starts[r][:, None] < middles) & (middles < run.ends[r][:, None])).any(axis=0)
        assert "".join("·" if not b else "#" for b in busy) == re.sub("[^·]", "#", row)


@settings(max_examples=40)
@given(schedules())
def test_every_action_of_a_random_schedule_starts_once_across_bands(schedule):
    run = simulate(schedule)
    text = plain(run, 60)
    for r in range(schedule.num_ranks):
        found = actions("".join(rows(text, r)).replace("…", ""))
        assert [letter for letter, _ in found] == [letter for letter, _ in expected(run, r)]
        assert all(number in ("", m) for (_, number), (_, m) in zip(found, expected(run, r), strict=True))


def test_a_long_schedule_wraps_into_bands_with_continuous_times():
    run = run_of("aligned", 4, 16, 2, execution="lockstep")
    text = plain(run)
    parts = [len(row) for row in rows(text, 0)]
    assert len(parts) > 1
    assert [len(row) for row in rows(text, 3)] == parts
    times = [float(t) for line in text.splitlines() if not line.startswith("rank") for t in line.split()]
    assert times[0] == 0
    assert times[-1] == run.makespan
    assert times[1:-1:2] == times[2:-1:2]


def test_a_very_long_schedule_shows_the_start_and_the_end():
    run = run_of("1f1b", 8, 64)
    text = plain(run)
    assert len(text.splitlines()) <= 41
    ((first, last),) = re.findall(r"times (\S+) to (\S+) are not shown", text)
    assert 0 < float(first) < float(last) < run.makespan
    for r in range(8):
        *start, end = map(actions, rows(text, r))
        start = [action for band in start for action in band]
        assert [letter for letter, _ in start] == [letter for letter, _ in expected(run, r)[: len(start)]]
        assert end == expected(run, r)[len(run.schedule[r]) - len(end) :]


@pytest.mark.parametrize("width", [60, 100, 200])
@pytest.mark.parametrize("pp", [1, 2, 5, 8, 16, 17, 64])
def test_no_line_is_wider_than_the_console(pp, width):
    for name, microbatches, chunks in (("1f1b", 1, 1), ("gpipe", 7, 2), ("zb-v", 64, 2), ("zb-h2", 11, 1)):
        run = run_of(name, pp, microbatches, chunks, latency=0.3)
        for cells in ("colors", "letters"):
            text = draw.timeline(run, width=width, cells=cells).plain
            assert max(map(cell_len, text.splitlines())) <= width
            shown = {int(r) for r in re.findall(r"^rank (\d+)", text, re.M)}
            assert shown == {*range(pp)}


def test_bands_use_the_full_width_if_cells_divide_it():
    run = run_of("zb-h1", 2, 12)
    widest = [max(map(len, plain(run, width).splitlines())) for width in range(40, 75)]
    assert all(wide <= width for wide, width in zip(widest, range(40, 75), strict=True))
    # 13 and 19 cells of 3 columns beside a label of 7.
    assert {46, 64} <= set(widest)


@pytest.mark.parametrize(("costs", "latency"), [((1, 1, 1), 1e30), ((1e30, 1, 1e-30), 0), ((1e-30, 1e-30, 1e-30), 1e30)])
def test_extreme_times_are_drawn(costs, latency):
    # The shortest action rounds to a duration of 0 after the longest.
    run = simulate(generate("zb-h1", pp=3, microbatches=6), Costs(*costs), latency=latency)
    assert max(map(len, plain(run).splitlines())) <= 100


def luminance(color: str) -> float:
    """Returns the relative luminance of WCAG 2.2."""
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
def test_text_has_sufficient_contrast_on_every_color(chunks):
    for kind in draw.COLORS:
        for chunk in range(chunks):
            light, dark = sorted((luminance(draw.tint(kind, chunk, chunks)), luminance(draw.TEXT)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_every_kind_and_chunk_has_a_distinct_color():
    colors = [draw.tint(kind, chunk, 4) for kind in draw.COLORS for chunk in range(4)]
    for a, b in combinations(colors, 2):
        differences = [abs(int(a[i : i + 2], 16) - int(b[i : i + 2], 16)) for i in (1, 3, 5)]
        assert max(differences) > 20, (a, b)
    assert [draw.tint(kind, 0, 4) for kind in draw.COLORS] == list(draw.COLORS.values())


def test_cells_have_the_color_of_their_kind_and_chunk_and_show_the_microbatch():
    run = run_of("zb-v", 2, 3, 2)
    text = draw.timeline(run, width=200, cells="colors")
    found = []
    for span in text.spans:
        style = span.style if isinstance(span.style, Style) else Style.parse(span.style)
        if style.bgcolor:
            found.append(
                (style.bgcolor.name.upper(), style.color and style.color.name, text.plain[span.start : span.end].strip())
            )
    expected_cells = [
        (draw.tint(action_kind, chunk, 2), draw.TEXT, str(m))
        for order in run.schedule
        for action_kind, chunk, m in zip(order.kinds.tolist(), order.chunks.tolist(), order.microbatches.tolist(), strict=True)
    ]
    assert found == expected_cells


@pytest.mark.parametrize("cells", ["colors", "letters"])
def test_the_legend_lists_exactly_the_drawn_kinds_and_chunks(cells):
    one, two = (draw.legend(run, cells=cells).plain for run in (run_of("1f1b", 2, 2), run_of("zb-v", 2, 2, 2)))
    assert "B" in one
    assert "full backward" in one
    assert " W " not in one
    assert "chunk" not in one
    for word in ("F", "I", "W", "forward", "dgrad", "wgrad", "idle", "microbatch", "chunk 2"):
        assert word in two
    assert "full backward" not in two
    assert ("lower case" in two) is (cells == "letters")
