"""Pictures of README and of notes/ show the stored results, and can be read on light and dark pages."""

import re
from itertools import pairwise

import pytest

from benchmarks import compare, pictures, readme, runner
from benchmarks.readme import NOTES, README, gains, gains_picture, gains_table, timelines
from jgraph.inspect.draw import tint
from jgraph.schedule import Costs, generate, simulate
from tests.browser import contrast


def texts(picture: str) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]*)</text>", picture)


@pytest.mark.parametrize("pictured", [readme.PICTURED, readme.TEXTS], ids=["README", "benchmarks"])
def test_every_time_and_ratio_of_a_picture_is_in_its_row_of_the_table(pictured):
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in gains_table().splitlines()}
    names, row, shown = {*readme.PEERS.values(), "jgraph"}, "", []
    for text in texts(gains_picture(pictured))[1:]:
        if text in rows:
            row = text
            shown += [row]
        elif text not in names:
            ms, _, ratio = text.partition(" ms")
            assert f"{ratio.removeprefix(', ')} ({ms} ms)" in rows[row] if ratio else f"| {ms} ms |" in rows[row]
    assert shown == list(pictured)


def test_the_page_of_benchmarks_begins_with_a_picture_of_all_rows():
    text = readme.PAGE.read_text(encoding="utf-8")
    assert text.index(f"]({readme.ALL_SPEEDS})") < text.index("\n## ")
    assert (NOTES / readme.ALL_SPEEDS).read_text(encoding="utf-8") == gains_picture(readme.TEXTS)


def test_lengths_of_bars_are_the_ratios():
    drawn = pictures.bars("t", [("work", [pictures.Bar("jgraph", "2.00", "1"), pictures.Bar("PyTorch", "3.00", "1.50")])])
    ours, peer = (float(width) for width in re.findall(r'width="([\d.]+)" height="\d+" class="(?:ours|peer)"', drawn))
    assert peer / ours == pytest.approx(1.5)
    assert texts(drawn) == ["t", "work", "jgraph", "2.00 ms", "PyTorch", "3.00 ms, 1.50 x"]


@pytest.mark.parametrize("page", [README, NOTES / "index.md"], ids=lambda page: page.name)
def test_the_speeds_in_the_first_lines_of_a_page_are_those_of_the_table(page):
    ratios = {text: {kind: row["ms"] / ours["ms"] for kind, row in peers.items() if row} for text, ours, peers in gains()}
    launches, *_ = ratios.values()
    measured = {f"{launches['jax']:.1f}": "launch-bound, jax.jit", f"{ratios['GPT 1.3B, FP8']['te']:.1f}": "FP8, one GPU"}
    head = page.read_text(encoding="utf-8").partition("speed.svg")[0]
    claimed = re.findall(r"([\d.]+) times", head)
    assert claimed
    assert {*claimed} <= {*measured}


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_of_pictures_is_readable_on_their_background(scheme):
    for name in ("ink", "muted"):
        assert contrast(pictures.COLORS[name][scheme], pictures.COLORS["panel"][scheme]) >= 4.5
    for name in ("ours", "peer", "idle"):
        assert contrast(pictures.COLORS[name][scheme], pictures.COLORS["panel"][scheme]) >= 1.1


def test_a_timeline_has_a_cell_with_the_microbatch_at_the_time_of_each_action():
    run = simulate(generate("zb-v", pp=2, microbatches=3), Costs().per_chunk(2))
    drawn = pictures.timeline("t", run, "s")
    cell = r'<rect x="([\d.]+)" y="(\d+)" width="[\d.]+" height="22" fill="(#\w+)"/>\n<text [^>]*>(\d+)<'
    cells = re.findall(cell, drawn)
    for r, y in enumerate(sorted({int(y) for _, y, *_ in cells})):
        order, own = run.schedule[r], [cell for cell in cells if int(cell[1]) == y]
        kinds = zip(order.kinds.tolist(), order.chunks.tolist(), order.microbatches.tolist(), strict=True)
        assert [(fill, int(m)) for *_, fill, m in own] == [(tint(kind, chunk, 2), m) for kind, chunk, m in kinds]
        gaps = [float(b[0]) - float(a[0]) for a, b in pairwise(own)]
        times = [b - a for a, b in pairwise(run.starts[r].tolist())]
        assert gaps == pytest.approx([time * gaps[0] / times[0] for time in times], rel=1e-2)
    assert f"{run.makespan:.4g} s" in texts(drawn)[0]


def test_the_measured_step_of_the_pipeline_has_the_stored_time():
    drawn, (result,) = timelines(), compare.read(runner.RESULTS / "pipeline_trace.json").values()
    assert texts(drawn["develop/pipeline-measured.svg"])[0].startswith(f"measured step: {result['rows'][0]['ms']:.1f} ms")
    assert all("prefers-color-scheme: dark" in picture for picture in drawn.values())
