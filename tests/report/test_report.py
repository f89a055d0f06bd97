"""The report of several runs: the data read from run directories, and the page in a browser."""

import json
from typing import Any

import pytest

from jgraph.errors import ConfigError
from jgraph.page import render
from jgraph.report.__main__ import main
from jgraph.report._runs import compared, thinned
from jgraph.train.config import OptimizerConfig, TrainConfig
from jgraph.train.rundir import RunDir
from tests import browser

PANELS = ["Runs", "Curves", "Samples", "What differs"]
TITLES = "[...document.querySelectorAll('h2')].map((title) => title.textContent)"


def entry(step: int, **numbers: Any) -> dict[str, Any]:
    defaults = {"loss": 6.0 / step, "grad_norm": 1.0, "learning_rate": 0.01, "mfu": None, "seconds": 0.5 * step}
    return {"step": step, **defaults, "tokens_per_second": 1000.0, "peak_memory_bytes": 2**30, **numbers}


@pytest.fixture
def run_dir(tmp_path):
    """Returns a function that writes a run directory."""

    def make(name: str, entries: list[dict[str, Any]], *, samples: bool = True, **fields: Any):
        run_dir = RunDir(tmp_path / name)
        corpus = {"name": "text", "fingerprint": "0" * 64, "train_tokens": 9, "heldout_tokens": 1}
        run_dir.write(
            TrainConfig.from_fields(steps=20, run_dir=str(run_dir.path), **fields), corpus, {"jax": "0.10.2", "device": "cpu"}
        )
        run_dir.metrics.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        if samples:
            run_dir.add_sample(20, "once ", "upon a time")
        return run_dir.path

    return make


@pytest.fixture
def two(run_dir):
    """Returns two runs of 20 steps. The second has another learning rate and a NaN loss."""
    first = [entry(step) for step in (1, 10)] + [entry(20, eval_loss=0.5)]
    second = [entry(1), entry(10, loss=None), entry(15, eval_loss=0.7), entry(20, eval_loss=None)]
    return [run_dir("a", first), run_dir("b", second, optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2))]


def see(tmp_path, paths, expression, **options):
    return browser.see(tmp_path, render("jgraph.report", compared(paths)), expression, **options)


# --- Data ---


def test_curves_have_the_entries_of_a_run_and_null_for_nonfinite_values(two):
    first, second = compared(two)["runs"]
    assert first["curves"]["loss"] == {"step": [1, 10, 20], "seconds": [0.5, 5.0, 10.0], "value": [6.0, 0.6, 0.3], "mean": None}
    assert second["curves"]["loss"]["value"] == [6.0, None, 0.4, 0.3]
    assert second["curves"]["eval_loss"] == {"step": [15, 20], "seconds": [7.5, 10.0], "value": [0.7, None], "mean": None}
    assert (first["name"], first["state"], first["done"], first["tokens_per_step"]) == ("a", "finished", 20, 32 * 256)
    assert first["samples"] == [{"step": 20, "prompt": "once ", "text": "upon a time"}]
    assert (first["config"]["optimizer.learning_rate"], first["config"]["versions.jax"]) == ("0.0003", "0.10.2")


def test_runs_with_unknown_settings_or_without_entries_are_shown(run_dir):
    earlier = run_dir(
        "earlier", [{"step": 1, "loss": 5.0, "own": 1, "grad_norm": 10**400}, {"step": 10, "loss": 1e999}], samples=False
    )
    RunDir(earlier).config.write_text('{"steps": 10, "batch_size": null, "optimizer": {"beta1": NaN}}')
    started = run_dir("started", [], samples=False)
    (started / "lock").touch()
    runs = compared([earlier, started])["runs"]
    assert [(run["state"], run["done"]) for run in runs] == [("finished", 10), ("running, or killed", 0)]
    assert runs[0]["curves"] == {"loss": {"step": [1, 10], "seconds": [None, None], "value": [5.0, None], "mean": None}}
    assert (runs[0]["tokens_per_step"], runs[0]["config"]["optimizer.beta1"]) == (None, "NaN")
    assert runs[1]["curves"] == {}


def test_runs_with_the_same_name_are_named_by_their_paths(tmp_path, two):
    (tmp_path / "other").mkdir()
    moved = two[1].rename(tmp_path / "other" / "a")
    assert [run["name"] for run in compared([two[0], moved])["runs"]] == [str(two[0]), str(moved)]


def test_a_thinned_curve_keeps_its_ends_its_extremes_and_its_gaps():
    values: list[float | None] = [1.0 + (i % 7) / 100 for i in range(100_000)]
    values[12_345], values[54_321], values[77_777] = 9.0, -9.0, None
    kept = thinned(values)
    assert {0, 12_345, 54_321, 77_777, 99_999} <= {i for i, _ in kept}
    assert 500 < len(kept) <= 2001
    assert [i for i, _ in kept] == sorted({i for i, _ in kept})
    assert all(mean == pytest.approx(1.03, abs=0.06) for _, mean in kept)
    assert [i for i, _ in thinned(values[:2000])] == list(range(2000))
    assert thinned([]) == []


# --- The command ---


def test_the_command_writes_one_self_contained_file(tmp_path, two, capsys):
    assert main([*map(str, two)]) == 0
    assert str(two[0] / "report.html") in capsys.readouterr().out
    page = (two[0] / "report.html").read_text()
    assert browser.data_in(page)["runs"] == compared(two)["runs"]
    assert "://" not in page
    assert main([str(two[1]), "--to", str(tmp_path / "x.html")]) == 0
    assert browser.data_in((tmp_path / "x.html").read_text())["title"] == "b"


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_a_path_without_a_run_is_refused(tmp_path, two, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="does not exist" if name == "absent" else "config.json") as error:
        compared([two[0], tmp_path / name])
    assert error.value.field == "runs"


@pytest.mark.parametrize("arguments", [[], ["--to", "no/such/folder/x.html"]])
def test_wrong_arguments_are_refused_in_one_line(two, capsys, arguments):
    assert main([*arguments, *(map(str, two) if arguments else ())]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# --- The page ---


def test_curves_and_text_have_enough_contrast_in_light_and_dark(two):
    for colors in browser.themes(render("jgraph.report", compared(two))):
        runs = [color for name, color in colors.items() if name.startswith("run-")]
        assert len(set(runs)) == 8
        assert min(browser.contrast(color, colors[ground]) for color in runs for ground in ("page", "panel")) >= 3
        pairs = [(text, ground) for text in ("ink", "muted", "accent") for ground in ("page", "panel")]
        assert min(browser.contrast(colors[text], colors[ground]) for text, ground in pairs) >= 4.5


@pytest.mark.long
@browser.needed
def test_only_panels_with_content_are_shown(tmp_path, two, run_dir):
    started = run_dir("started", [], samples=False)
    one = run_dir("one", [entry(1)], samples=False)
    assert see(tmp_path, two, TITLES) == PANELS
    assert see(tmp_path, [started], TITLES) == ["Runs", "Configuration"]
    titles, dots = see(tmp_path, [one], f"[{TITLES}, document.querySelectorAll('[data-curve=loss] circle').length]")
    assert (titles, dots) == (["Runs", "Curves", "Configuration"], 1)


@browser.needed
def test_the_page_has_the_numbers_of_the_runs_and_the_fields_that_differ(tmp_path, two):
    before = """const rows = (id) => [...document.querySelectorAll(`#${id} tbody tr`)];
      const texts = (rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent));
      const fields = rows("configuration-table");
      const differing = texts(fields.filter((row) => row.offsetHeight));
      document.querySelector("#what-differs p button").click();
      const shown = fields.filter((row) => row.offsetHeight).length;"""
    expression = "[texts(rows('runs-table')), differing, shown, document.querySelector('#samples pre').textContent]"
    runs, differing, fields, sample = see(tmp_path, two, expression, before=before)
    summary = ["finished", "20", "20", "0.3000"]
    assert runs == [
        ["a", *summary, "0.5000", "0.5000", "1,000", "10.0", "1.00", "cpu"],
        ["b", *summary, "0.7000", "0.7000", "1,000", "10.0", "1.00", "cpu"],
    ]
    assert differing == [["optimizer.learning_rate", "0.0003", "0.001"]]
    assert fields > 50
    assert sample == "once upon a time"


CHART = """const chart = () => document.querySelector("[data-curve=loss] svg");
  const lines = () => [...chart().querySelectorAll("[data-run] .curve:not(.raw)")].map((line) => line.getAttribute("d"));
  const xs = (line) => [...line.matchAll(/([ML])([\\d.]+) ([\\d.]+)/g)].map(([, pen, x, y]) => [pen, Number(x), Number(y)]);
  const change = (selector, set, type = "change") => {
    const input = document.querySelector(selector);
    set(input);
    input.dispatchEvent(new Event(type, { bubbles: true }));
  };"""


@pytest.mark.long
@browser.needed
def test_curves_are_to_scale_with_gaps_and_follow_the_controls(tmp_path, two):
    before = f"""{CHART}
      const seen = [lines().map(xs)];
      change("[value=tokens]", (input) => (input.checked = true));
      seen.push(lines().map(xs));
      change("#log", (input) => (input.checked = true));
      seen.push(lines().map(xs));
      change("#smoothing", (input) => (input.value = 0.5), "input");
      seen.push(lines().map(xs));
      change(".shown", (input) => (input.checked = false));
      seen.push(lines().map(xs));"""
    steps, tokens, logs, smooth, hidden = see(tmp_path, two, "seen", before=before)
    (first, second), up = steps, [y for *_, y in steps[0]]
    assert [pen for pen, *_ in first] == ["M", "L", "L"]
    assert [pen for pen, *_ in second] == ["M", "M", "L"], "the NaN loss leaves a gap"
    xs = [x for _, x, _ in first]
    assert (xs[1] - xs[0]) / (xs[2] - xs[0]) == pytest.approx(9 / 19, abs=2e-3)
    assert (up[1] - up[0]) / (up[2] - up[0]) == pytest.approx(5.4 / 5.7, abs=2e-2)
    assert tokens == steps, "every step has the same number of tokens"
    ys = [y for *_, y in logs[0]]
    assert (ys[1] - ys[0]) / (ys[2] - ys[0]) == pytest.approx(2.3026 / 2.9957, abs=2e-2)
    assert smooth[0][0] == logs[0][0]
    assert smooth[0][2][2] < logs[0][2][2], "smoothing moves the last point up"
    assert hidden == smooth[1:]


@pytest.mark.long
@browser.needed
def test_arrow_keys_move_between_entries_and_show_the_value_of_every_run(tmp_path, two):
    before = f"""{CHART} {browser.KEY}
      const tips = [];
      chart().focus();
      for (const name of ["ArrowRight", "ArrowRight", "End", "ArrowLeft", "Home"]) {{
        key(chart(), name);
        tips.push(document.getElementById("tip").textContent.split("\\n"));
      }}
      key(chart(), "Escape");"""
    state = (
        "[tips, document.getElementById('tip').hidden, document.activeElement === chart(), chart().getAttribute('aria-label')]"
    )
    tips, hidden, focused, label = see(tmp_path, two, state, before=before)
    assert tips == [
        ["step 1", "a: 6", "b: 6"],
        ["step 10", "a: 0.6", "b: 0.4 at 15"],
        ["step 20", "a: 0.3", "b: 0.3"],
        ["step 15", "a: 0.6 at 10", "b: 0.4"],
        ["step 1", "a: 6", "b: 6"],
    ]
    assert (hidden, focused) == (True, True)
    assert label == "Loss, nats a token by steps: a 0.3, b 0.3"


@pytest.mark.long
@browser.needed
@pytest.mark.parametrize("flags", [(), browser.DARK], ids=["light", "dark"])
def test_names_are_escaped_and_the_page_fits_a_width_of_1000_pixels(tmp_path, run_dir, flags):
    name = "<img src=x onerror='throw 1'><b>bold<"
    path = run_dir(name + "x" * 150, [entry(1), entry(20, eval_loss=3.0)], data=f"</script>{name}")
    RunDir(path).add_sample(30, f"</script>{name}", "y" * 2000)
    others = [run_dir(f"{number}", [entry(1), entry(20)]) for number in range(9)]
    expression = """[innerWidth, document.documentElement.scrollWidth, document.querySelectorAll("b, img").length,
      document.body.innerText.split("onerror").length, performance.getEntriesByType("resource").length,
      matchMedia("(prefers-color-scheme: dark)").matches, document.querySelectorAll("[stroke-dasharray='6 3']").length > 0]"""
    width, scroll_width, elements, name_count, requests, dark, dashed = see(tmp_path, [path, *others], expression, flags=flags)
    assert (width, dark, dashed) == (1000, bool(flags), True)
    assert scroll_width <= width
    assert (elements, requests) == (0, 0)
    assert name_count > 5
