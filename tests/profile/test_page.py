import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgraph.inspect.draw import COLORS, tint
from jgraph.page import render
from jgraph.schedule.action import KINDS
from tests import browser
from tests.profile.synthetic import profile

pytestmark = pytest.mark.long

PANELS = ["Summary", "Where the time went", "What to fix first", "Where in the code", "Collectives", "CUDA graphs"]
PANELS += ["Pipeline", "Memory", "Timeline"]
NOTHING = "\N{EN DASH}"
EMPTY = {"captured": None, "uncaptured": None, "groups": [], "collectives": [], "roofline": None, "pipeline": None}
EMPTY |= {"lines": [], "scopes": [], "graphs": []}
EMPTY |= {"memory": {"pools": {}, "predicted_peak": None, "compiled_peak": None, "measured_peak": None}}
EMPTY |= {"timeline": {"names": [], "categories": [], "tracks": []}}
TITLES = "[...document.querySelectorAll('h2')].map((title) => title.textContent)"
TABLES = """Object.fromEntries([...document.querySelectorAll("table")].map((table) => [table.id, [...table.tBodies[0].rows].map(
  (row) => [...row.querySelectorAll(".number")].map((cell) => [Number(cell.dataset.value ?? NaN), cell.textContent]))]))"""


def see(tmp_path: Path, data: dict[str, Any], expression: str, **options: Any) -> Any:
    """Calls `browser.see` with the page of a profile."""
    return browser.see(tmp_path, render("jgraph.profile", data), expression, **options)


def test_the_page_has_no_external_references():
    text = render("jgraph.profile", profile(4))
    assert not re.findall(r"https?:|@import|\bimport\s*\(|fetch\(|XMLHttpRequest", text)
    assert set(re.findall(r"url\(([^)]*)\)", text)) <= {"#idle"}
    assert set(re.findall(r"<[^>]*\b(?:src|href)=\"([^\"]*)\"", text)) <= {"data:,"}


@pytest.mark.parametrize("name", ["</script><script>alert(1)</script>", "<!--<script>", "\u2028 ' \" & \\", "𝛁·ü"])
def test_special_characters_in_names_are_preserved(name):
    data = profile(4)
    data["title"] = data["groups"][0]["label"] = data["timeline"]["names"][0] = name
    text = render("jgraph.profile", data)
    assert browser.data_in(text) == data
    assert text.count("</script>") == render("jgraph.profile", profile()).count("</script>")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_numbers_are_refused(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        render("jgraph.profile", profile() | {"captured": {"step_ms": value}})


def test_actions_have_the_colors_of_schedule_timelines():
    colors = dict(re.findall(r"\b(forward|dgrad|wgrad): \"(#\w{6})\"", render("jgraph.profile", profile())))
    assert colors == {KINDS[kind]: color for kind, color in COLORS.items() if KINDS[kind] != "backward"}


def test_text_has_enough_contrast_in_light_and_dark():
    for of in browser.themes(render("jgraph.profile", profile())):
        pairs = [(text, ground) for text in ("ink", "muted", "accent") for ground in ("page", "panel")]
        assert min(browser.contrast(of[text], of[ground]) for text, ground in pairs) >= 4.5


@browser.needed
@pytest.mark.parametrize(
    ("ranks", "changes", "shown"),
    [
        (4, {}, PANELS),
        (1, {}, [title for title in PANELS if title not in {"Pipeline", "Collectives"}]),
        (1, EMPTY, []),
        (4, EMPTY | {"captured": profile()["captured"]}, ["Summary"]),
        (4, {"captured": None, "roofline": None, "groups": []}, [title for title in PANELS if title != "What to fix first"]),
    ],
    ids=["all", "one-gpu", "nothing", "captured", "uncaptured"],
)
def test_only_panels_with_content_are_shown(tmp_path, ranks, changes, shown):
    sizes = "[...document.querySelectorAll('section')].map((panel) => panel.offsetHeight - panel.firstChild.offsetHeight)"
    requests = "performance.getEntriesByType('resource').map((entry) => entry.name)"
    titles, heights, requested = see(tmp_path, profile(ranks) | changes, f"[{TITLES}, {sizes}, {requests}]")
    assert titles == shown
    assert all(height > 60 for height in heights)
    assert requested == []


@browser.needed
@pytest.mark.parametrize("ranks", [1, 4])
def test_tables_have_the_numbers_of_the_profile(tmp_path, ranks):
    data = profile(ranks)
    tables = see(tmp_path, data, TABLES)
    captured, uncaptured, pools = data["captured"], data["uncaptured"], data["memory"]["pools"]

    def over_ranks(get):
        return sum(map(get, uncaptured["ranks"])) / ranks

    def of(category, key):
        return over_ranks(lambda rank: rank["categories"][category][key])

    def slow(action):
        return [action["rank"], action["end_ms"] - action["start_ms"], action["slow_ms"]]

    step, idle = uncaptured["step_ms"], over_ranks(lambda rank: rank["idle_ms"])
    expected: dict[str, list[list[float | None]]] = {
        "summary-table": [
            [captured["step_ms"], step],
            [captured["busy_ms"], over_ranks(lambda rank: rank["busy_ms"])],
            [captured["idle_ms"], idle],
            *([captured[key], None] for key in ("launches", "updates", "records", "launch_ms", "update_ms")),
        ],
        "categories": [
            *(
                [of(category, "ms"), of(category, "ms") / step, of(category, "kernel_ms"), of(category, "kernels")]
                for category in uncaptured["ranks"][0]["categories"]
            ),
            [idle, idle / step, None, None],
        ],
        "groups": [
            [g["count"], g["ms"], g["roofline_ms"], g["roofline_ms"] and g["roofline_ms"] / g["ms"], g["over_ms"]]
            for g in data["groups"]
        ],
        "line": [[row["ms"], row["ms"] / step, row["count"]] for row in data["lines"]],
        "scope": [[row["ms"], row["ms"] / step, row["count"]] for row in data["scopes"]],
        "graphs": [[row[key] for key in ("launches", "count", "ms", "named_ms")] for row in data["graphs"]],
        "pools": [[size] for size in [*pools.values(), sum(pools.values())]]
        + [[data["memory"][f"{name}_peak"]] for name in ("predicted", "compiled", "measured")],
        "buffers": [[b["count"], b["nbytes"] / 2**20, b["count"] * b["nbytes"]] for b in data["memory"]["buffers"]],
    }
    if ranks > 1:
        keys = ("count", "ms", "exposed_ms", "hidden_ms")
        expected["collectives"] = [[row[key] for key in keys] for row in data["collectives"]]
        pipeline = data["pipeline"]
        expected["bubbles"] = [[pipeline[run]["step_ms"], pipeline[run]["bubble"]] for run in ("planned", "measured")]
        expected["slow"] = [slow(pipeline["actions"][i]) for i in pipeline["slow"]]
    assert tables.keys() == expected.keys()
    for name, rows in expected.items():
        seen = [[math.nan if value is None else value for value, _ in row] for row in tables[name]]
        assert seen == [pytest.approx([math.nan if v is None else v for v in row], rel=1e-12, nan_ok=True) for row in rows], (
            name
        )
    for value, text in (cell for rows in tables.values() for row in rows for cell in row):
        # The cell shows a percentage, GiB or the number itself.
        scale = 0.01 if text.endswith("%") else 2**30 if value and value > 1e6 else 1
        shown = None if text == NOTHING else float(text.removesuffix(" %").replace(",", "")) * scale
        assert shown == (None if value is None else pytest.approx(value, abs=0.0505 * scale, rel=1e-3))


@browser.needed
def test_temporary_buffers_are_areas_on_each_other_and_their_peak_is_marked(tmp_path):
    data = profile()
    areas, legend, texts, line = see(
        tmp_path,
        data,
        """[[...document.querySelectorAll("#memory polygon")].map((area) => [area.getAttribute("fill"), area.dataset.tip,
          area.getAttribute("points").split(" ").map((point) => point.split(",").map(Number))]),
          document.querySelector("#memory .legend").innerText,
          [...document.querySelectorAll("#memory svg text")].map((text) => text.textContent),
          Number(document.querySelector("#memory svg .end").getAttribute("x1"))]""",
    )
    colors = dict(re.findall(r"\b(\w+): \"(#\w{6})\"", render("jgraph.profile", data)))
    assert [color for color, *_ in areas] == [colors["forward"], colors["loss"]]
    assert legend.split() == ["forward", "loss"]
    assert "peak 3.00 GiB" in texts
    # 4 samples above, and 4 below from right to left. The first area is on the axis, the second on the first.
    forward, loss = (np.array(points) for *_, points in areas)
    np.testing.assert_array_equal(loss[4:], forward[:4][::-1])
    assert set(forward[4:, 1]) == {forward[3, 1]}
    heights = forward[3, 1] - forward[:4, 1]
    np.testing.assert_allclose(heights / heights[1], np.array([1, 3, 2, 0]) / 3, atol=0.01)
    np.testing.assert_allclose(
        (forward[:4, 0] - forward[0, 0]) / (forward[3, 0] - forward[0, 0]), np.array([0, 2, 3, 9]) / 9, atol=0.01
    )
    # Two samples have the largest sum, and the line is at the first.
    assert line == pytest.approx(forward[1, 0], abs=0.06)
    assert areas[0][1] == "forward\n3.00 GiB at the peak, at most 3.00 GiB"


@browser.needed
def test_a_profile_without_a_buffer_assignment_has_the_other_memory_only(tmp_path):
    data = profile()
    of = """[document.querySelector("#pools").outerHTML, document.querySelectorAll("#memory svg, #buffers").length,
      document.querySelectorAll("#memory .bar").length]"""
    pools, charts, bars = see(tmp_path, data, of)
    assert (charts, bars) == (2, len(data["memory"]["pools"]) + 4)
    del data["memory"]["usage"], data["memory"]["buffers"]
    assert see(tmp_path, data, of) == [pools, 0, bars]


@browser.needed
def test_a_profile_without_rooflines_and_source_lines_has_no_empty_columns(tmp_path):
    data = profile() | {"roofline": None, "captured": None}
    unknown = {"source": "", "roofline_ms": None, "bound": "", "over_ms": None}
    data["groups"] = [group | unknown for group in data["groups"]]
    heads = "[...document.querySelectorAll('#groups thead th')].map((head) => head.textContent)"
    columns, text = see(tmp_path, data, f"[{heads}, document.getElementById('summary').innerText]")
    assert columns == ["kernels", "category", "count", "ms"]
    assert f"A step takes {data['uncaptured']['step_ms']:.4g} ms" in text
    assert "command buffers" not in text


@browser.needed
def test_a_source_line_is_shortened_to_its_folder_and_file(tmp_path):
    tip = "document.querySelector('#line code').dataset.tip"
    shown, full = see(tmp_path, profile(), f"[document.querySelector('#line code').textContent, {tip}]")
    assert (shown, full) == ("models/gpt.py:143", "/home/me/src/models/gpt.py:143")


@browser.needed
@pytest.mark.parametrize("flags", [(), browser.DARK], ids=["light", "dark"])
def test_the_page_fits_a_width_of_1000_pixels_and_its_boxes_are_readable(tmp_path, flags):
    data = profile(4)
    data["groups"][0] |= {"label": "fusion_" * 40, "source": "models/" * 30}
    data["title"] = data["about"]["flags"] = "x" * 300
    data["timeline"]["tracks"][0]["stream"] = "Stream " * 20
    pairs = """[...document.querySelectorAll("svg .label")].flatMap((text) => {
      const at = (box) => Math.abs(Number(box.getAttribute("x")) + box.getAttribute("width") / 2 - text.getAttribute("x"))
        + Math.abs(Number(box.getAttribute("y")) + box.getAttribute("height") / 2 - text.getAttribute("y"));
      const box = [...text.closest("svg").querySelectorAll("rect")].find((box) => at(box) < 0.01);
      const texts = [box.getAttribute("fill"), text.style.fill];
      const inside = text.getBBox().width <= box.getBoundingClientRect().width;
      return text.style.fill ? [[...texts, inside]] : [];
    })"""
    width, scroll_width, dark, boxes = see(
        tmp_path,
        data,
        f"[innerWidth, document.documentElement.scrollWidth, matchMedia('(prefers-color-scheme: dark)').matches, {pairs}]",
        flags=flags,
    )
    assert (width, dark) == (1000, bool(flags))
    assert scroll_width <= width
    assert len(boxes) > 100
    black_or_white = {"rgb(0, 0, 0)": "#000000", "rgb(255, 255, 255)": "#ffffff"}
    assert min(browser.contrast(fill, black_or_white[text]) for fill, text, _ in boxes) >= 4.5
    assert all(inside for *_, inside in boxes)


@browser.needed
def test_boxes_of_the_pipeline_are_to_scale_and_have_the_colors_of_their_chunks(tmp_path):
    data = profile(4)
    pipeline = data["pipeline"]
    pipeline["chunks"] = 2
    for action in pipeline["actions"]:
        action["chunk"] = action["microbatch"] % 2
    boxes = see(
        tmp_path,
        data,
        """[...document.querySelectorAll("#pipeline g g")].map((row) => [...row.children].map(
          (box) => [box.getAttribute("fill"), Number(box.getAttribute("x")), Number(box.getAttribute("width"))]))""",
    )
    for row, rank_and_run in zip(boxes, [(r, run) for run in ("planned_", "") for r in range(4)], strict=True):
        rank, run = rank_and_run
        actions = [action for action in pipeline["actions"] if action["rank"] == rank]
        assert [fill.upper() for fill, *_ in row] == [tint(KINDS.index(a["kind"]), a["chunk"], 2) for a in actions]
        left, width = np.array([[at, size] for _, at, size in row]).T
        starts, ends = (np.array([a[f"{run}{key}_ms"] for a in actions]) for key in ("start", "end"))
        scale = (left[-1] - left[0]) / (starts[-1] - starts[0])
        np.testing.assert_allclose(left - left[0], (starts - starts[0]) * scale, atol=1e-6)
        np.testing.assert_allclose(width, (ends - starts) * scale, atol=1e-6)


@browser.needed
def test_arrow_keys_move_between_boxes_and_slow_actions_link_to_their_boxes(tmp_path):
    data = profile(4)
    first = next(action for action in data["pipeline"]["actions"] if action["rank"] == 0)
    slowest = data["pipeline"]["actions"][data["pipeline"]["slow"][0]]
    before = f"""{browser.KEY}
      const seen = [];
      const look = () => seen.push(document.activeElement.dataset.tip.split("\\n")[0]);
      document.querySelector("#pipeline [tabindex='0']").focus();
      look();
      for (const name of ["ArrowDown", "ArrowRight", "ArrowUp", "Home"]) {{ key(document.activeElement, name); look(); }}
      document.querySelector("#slow tbody button").click();
      look();"""
    seen, stops, tip = see(
        tmp_path,
        data,
        "[seen, document.querySelectorAll('#pipeline svg [tabindex=\"0\"]').length, tip.textContent]",
        before=before,
    )
    assert seen[0] == seen[-2] == f"{first['kind']} of microbatch 0, rank 0"
    assert [text[-6:] for text in seen] == ["rank 0", "rank 1", "rank 1", "rank 0", "rank 0", "rank 3"]
    assert seen[-1] == f"{slowest['kind']} of microbatch {slowest['microbatch']}, rank {slowest['rank']}"
    assert stops == 1
    assert f"{slowest['slow_ms']:.3f} ms above the median" in tip


@browser.needed
def test_tables_are_sorted_by_their_headers_and_all_groups_are_shown_on_demand(tmp_path):
    data = profile(4)
    before = """const seen = [];
      const button = document.querySelector("#what-to-fix-first p button");
      const look = () => {
        const rows = [...document.querySelectorAll("#groups tbody tr")].filter((row) => row.offsetHeight);
        const sorted = [...document.querySelectorAll("#groups [aria-sort]")].map((head) => head.getAttribute("aria-sort"));
        seen.push([rows.map((row) => row.cells[5].dataset.value ?? null), sorted.filter((sort) => sort !== "none"), sorted[5]]);
      };
      const least = document.querySelectorAll("#groups thead button")[5];
      look(); least.click(); look(); least.click(); look(); button.click(); look(); button.click(); look();"""
    start, down, up, every, short = see(tmp_path, data, "seen", before=before)
    rooflines = [group["roofline_ms"] for group in data["groups"]]
    known = sorted(least for least in rooflines if least is not None)
    unknown = rooflines.count(None)

    def numbers(texts):
        return [text and float(text) for text in texts]

    assert (numbers(start[0]), *start[1:]) == (rooflines[:20], ["descending"], "none")
    assert (numbers(down[0]), *down[1:]) == (known[::-1][:20], ["descending"], "descending")
    assert (numbers(up[0]), *up[1:]) == (known[:20], ["ascending"], "ascending")
    assert numbers(every[0]) == known + [None] * unknown
    assert short == up


@browser.needed
def test_the_timeline_draws_events_in_their_color_and_the_longest_event_of_a_pixel(tmp_path):
    data = profile()
    # A thousand kernels on about eight pixels. One in the middle is longer than the others.
    short = {"start_ms": [10 + 0.001 * i for i in range(1000)], "ms": [0.0002] * 1000, "name": [0] * 1000}
    short["ms"][500], categories = 0.0008, [0] * 500 + [5] + [0] * 499
    tracks = [
        {"rank": 0, "stream": "a", "start_ms": [25.0, 0.0], "ms": [75.0, 20.0], "name": [0, 1], "category": [1, 2]},
        {"rank": 0, "stream": "b", **short, "category": categories},
        {"rank": 0, "stream": "c", "start_ms": [], "ms": [], "name": [], "category": []},
    ]
    data["timeline"]["tracks"] = tracks
    colors, height = see(
        tmp_path,
        data,
        """[[[0.1, 13], [0.22, 13], [0.9, 13], [0.102, 35], [0.105001, 35], [0.5, 35]].map(([share, y]) => {
          const left = 10 + Math.max(...["a", "b"].map((name) => widthOf(`rank 0 · ${name}`)));
          return [...pen.getImageData(Math.floor(left + share * (canvas.width - left)), y, 1, 1).data];
        }), canvas.height]""",
        before='const canvas = document.querySelector("canvas"); const pen = canvas.getContext("2d");',
    )
    page_colors = dict(re.findall(r"\b(\w+): \"(#\w{6})\"", render("jgraph.profile", data)))

    def opaque(category):
        return [*bytes.fromhex(page_colors[category][1:]), 255]

    assert colors[0] == opaque("wgrad")
    assert colors[2] == opaque("dgrad")
    assert colors[1][3] == colors[5][3] == 0
    assert colors[3][:3] == pytest.approx(opaque("forward")[:3], abs=3)
    assert colors[4][:3] == pytest.approx(opaque("loss")[:3], abs=3)
    assert 0 < colors[3][3] < 255
    assert height == 2 * 22 + 22


@browser.needed
def test_keys_zoom_and_move_the_timeline(tmp_path):
    data = profile()
    track = {"rank": 0, "stream": "a", "name": [0, 1, 2], "category": [0, 1, 2]}
    apart, nested = (
        {"start_ms": [0.0, 60.0, 80.0], "ms": [20.0, 10.0, 20.0]},
        {"start_ms": [0.0, 5.0, 20.0], "ms": [99.0, 5.0, 5.0]},
    )
    data["timeline"]["tracks"] = [track | apart, track | nested]
    before = f"""{browser.KEY}
      const seen = [];
      const canvas = document.querySelector("canvas");
      const range = () => document.getElementById("timeline-range").textContent.match(/[\\d.]+/g).slice(0, 2).map(Number);
      canvas.focus();
      const tips = [];
      for (const name of ["+", "ArrowRight", "ArrowLeft", "-", "Enter", "Home", "ArrowDown"]) {{
        key(canvas, name);
        seen.push(range());
        tips.push(document.getElementById("tip").textContent.split("\\n")[0]);
      }}
      key(canvas, "Escape");"""
    seen, tips, hidden = see(tmp_path, data, "[seen, tips, document.getElementById('tip').hidden]", before=before)
    third = 100 / 3
    assert seen[0] == pytest.approx([third / 2, 100 - third / 2], abs=1e-3)
    assert seen[1] == pytest.approx([time + 2 * third / 10 for time in seen[0]], abs=2e-3)
    assert seen[2] == pytest.approx(seen[0], abs=2e-3)
    assert seen[3] == pytest.approx([0, 100], abs=2e-3)
    assert seen[4] == [40, 90]
    assert seen[5] == [0, 100]
    names = data["timeline"]["names"]
    assert (tips[0], tips[4], tips[6]) == ("nothing runs here", names[1], names[0])
    assert hidden


@browser.needed
def test_names_are_escaped(tmp_path):
    data = profile(4)
    name = "<img src=x onerror='throw 1'><b>bold</b>"
    data["title"] = data["groups"][0]["label"] = data["about"]["notes"][0] = data["pipeline"]["schedule"] = name
    data["about"]["flags"] = name
    text, elements = see(tmp_path, data, "[document.body.innerText, document.querySelectorAll('b, img').length]")
    assert elements == 0
    assert text.count(name) >= 5


@browser.needed
def test_a_page_of_50_000_events_opens_within_3_seconds(tmp_path):
    # Measured in real time, from the start of the navigation to the last panel.
    assert see(tmp_path, profile(events=50_000), "Number(document.documentElement.dataset.ready)") < 3000
