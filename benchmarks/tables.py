"""Markdown tables of results. A benchmark defines the columns of its sections; the rest of the layout is shared."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.rows import PLACEMENTS, WITHIN, Row, fastest, is_comparable, placement, ratio, ratios, row_name, spread, verdict
from jgraph.device import peak_flops

Cell = Callable[[Row], str]

# Headings of stored category names.
CATEGORY_HEADINGS = {
    "actions": "forward, dgrad, wgrad",
    "ends": "embedding and head",
    "permutes": "transfers",
    "waiting for neighbours": "waiting for neighbors",
    "not told": "unexplained",
}


@dataclass(frozen=True)
class Section:
    """Layout of the table of one work.

    Attributes:
        title: Heading of the section.
        columns: Maps each column heading to the function that formats the cell of a row. The first column names the row.
        needs: Key without which a row shows only its name and its error.
        facts: Text after the date, versions, device and sizes.
        notes: Text below the table.
    """

    title: str
    columns: dict[str, Cell]
    needs: str = "ms"
    facts: str = ""
    notes: str = ""

    def draw(self, result: Row) -> list[str]:
        """Returns the Markdown lines of a result: heading, environment, table, time by category, notes."""
        name_cell, *cells = self.columns.values()
        rows = [
            [name_cell(row), *(cell(row) for cell in cells if self.needs in row), *([row["failed"]] if "failed" in row else [])]
            for row in result["rows"]
        ]
        lines = [f"## {self.title}", "", f"{environment_text(result)}{self.facts}.", "", *markdown(list(self.columns), rows)]
        split = [row for row in result["rows"] if row.get("categories")]
        if split:
            kinds = [kind for row in split for kind in row["categories"]]
            kinds = sorted(dict.fromkeys(kinds), key=lambda kind: kind in ("idle", "not told"))
            times = [[f"{row['categories'][kind]:.2f}" if kind in row["categories"] else "" for kind in kinds] for row in split]
            heads = [next(iter(self.columns)), "step, ms", *(f"{CATEGORY_HEADINGS.get(kind, kind)}, ms" for kind in kinds)]
            pairs = zip(split, times, strict=True)
            lines += ["", *markdown(heads, [[name_cell(row), f"{row['ms']:.2f}", *own] for row, own in pairs])]
        return [*lines, "", self.notes] if self.notes else lines


def number(key: str, form: str = ".2f", scale: float = 1.0) -> Cell:
    """Returns a cell function that formats a number. The cell is empty if the value is missing or 0."""
    return lambda row: format(row[key] * scale, form) if row.get(key) else ""


def mfu(flops: float) -> Cell:
    """Makes a cell with the model FLOPs utilization: FLOP/s over the bfloat16 peak. `flops` are per GPU and step."""

    def cell(row: Row) -> str:
        peak = peak_flops((row.get("device") or "").rpartition(" x ")[2])
        return f"{flops / row['ms'] * 1e3 / peak:.1%}" if peak else ""

    return cell


def tokens_per_second(tokens: int) -> Cell:
    """Makes a cell with the tokens per second of a step of `tokens`."""
    return lambda row: f"{tokens / row['ms'] * 1e3:,.0f}"


def teraflops(flops: float) -> Cell:
    """Makes a cell with the rate of a step of `flops`."""
    return lambda row: f"{flops / row['ms'] / 1e9:.0f}"


# Columns that several benchmarks share.
COLUMNS: dict[str, Cell] = {
    "peak memory, GB": number("peak_bytes", scale=1e-9),
    "temporary buffers, GB": number("temp_bytes", scale=1e-9),
    "compilation, s": number("compile_s", ".1f"),
    "graph launches, updates": lambda row: f"{row['launches']}, {row['updates']}" if "launches" in row else "",
    "power, W": number("power_watts", ".0f"),
    "clock, MHz": number("sm_clock_mhz", ".0f"),
}


def columns(*names: str) -> dict[str, Cell]:
    """Returns some of `COLUMNS`, in this order."""
    return {name: COLUMNS[name] for name in names}


def step_section(title: str, result: Row, cells: dict[str, Cell]) -> Section:
    """Returns the layout of the table of a training step on one GPU, with `cells` between its time and its memory."""
    ours = result["rows"][0] if result["rows"] else {}
    times = {"variant": row_name, "median step, ms": number("ms", ".3f"), "fastest, slowest, ms": spread}
    measured = columns("peak memory, GB", "power, W", "clock, MHz")
    return Section(title, times | cells | measured, notes=ours.get("capture") or "")


def against_first(result: Row) -> Cell:
    """Makes a cell with the time of a row over the time of the first row."""
    ours = result["rows"][0] if result["rows"] else {}
    return lambda row: ratio(row, ours)


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table. Pads short rows with empty cells."""
    return [line(heads), "|---" * len(heads) + "|", *(line([*row, *[""] * (len(heads) - len(row))]) for row in rows)]


def line(cells: Sequence[str]) -> str:
    """Formats one line of a Markdown table. Replaces `|` in cells by `/`."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def environment_text(result: Row) -> str:
    """Returns the date, revision, versions, device and sizes of a result."""
    env = result["environment"]
    versions = [f"{name} {env[name]}" for name in ("jax", "torch", "torchao", "transformer_engine") if name in env]
    parts = [env["date"], f"revision {env['revision']}", *versions]
    parts += [result["device"]] if result.get("device") else []
    return ", ".join([*parts, *([f"sizes {result['options']['sizes']}"] if "sizes" in result.get("options", {}) else [])])


HEADS = ["work", "devices", "fastest PyTorch, ms", "fastest jgraph, ms", "PyTorch / jgraph", "measured in"]


def comparison(works: Row) -> list[str]:
    """Returns the summary table: one line per work and placement that PyTorch was timed for. Empty without PyTorch rows."""
    rows = []
    for work, result in works.items():
        groups = group_by_placement(result["rows"]) if any(row["system"] == "torch" for row in result["rows"]) else {}
        for kind, own in groups.items():
            rows += [comparison_cells(f"{work}, parameters {kind}" if len(groups) > 1 else work, result, [own])]
    return markdown(HEADS, rows) if rows else []


def group_by_placement(rows: list[Row]) -> dict[str, list[Row]]:
    """Groups the rows of jgraph and PyTorch by placement, so that only equal placements are compared."""
    groups = {
        kind: [row for row in rows if row["system"] in ("jgraph", "torch") and is_comparable(row, kind)] for kind in PLACEMENTS
    }
    present = {placement(row) for row in rows if row["system"] == "jgraph" or placement(row) != "replicated"}
    return {kind: own for kind, own in groups.items() if kind in present}


def comparison_cells(title: str, result: Row, runs: list[list[Row]]) -> list[str]:
    """Returns the cells of a work under `HEADS`, from the rows of all its stored runs, newest first.

    If the newest run was timed in rounds, the others are ignored.
    """
    if any("rounds" in row for row in runs[0]):
        runs = runs[:1]
    torch, jgraph = ([row for run in runs if (row := fastest(run, system))] for system in ("torch", "jgraph"))
    count = count_peers([row for run in runs for row in run])
    cells = [title, result["device"] or "not recorded"]
    cells += [f"{_range(torch)} ({variant_text(torch[0])}; {count})" if torch else count]
    cells += [f"{_range(jgraph)} ({variant_text(jgraph[0])})" if jgraph else "did not run"]
    if not (torch and jgraph):
        return [*cells, "", ""]
    if len(torch) > 1:
        least, most = min(row["ms"] for row in torch), max(row["ms"] for row in torch)
        slowest, best = max(row["ms"] for row in jgraph), min(row["ms"] for row in jgraph)
        return [*cells, f"{least / slowest:.2f} to {most / best:.2f}", f"{len(torch)} PyTorch runs, {len(jgraph)} jgraph runs"]
    rounds = len(ratios(torch[0], jgraph[0]))
    return [*cells, ratio_text(torch[0], jgraph[0]), f"{rounds} rounds" if rounds > 1 else "one run"]


def count_peers(rows: list[Row]) -> str:
    """Describes the number of PyTorch variants that ran and that failed: "fastest of 3, 1 failed" or "only variant"."""
    ran_by_name = {variant_text(row): False for row in rows if row["system"] == "torch"}
    ran_by_name |= {variant_text(row): True for row in rows if row["system"] == "torch" and "ms" in row}
    ran, failed = sum(ran_by_name.values()), len(ran_by_name) - sum(ran_by_name.values())
    text = f"fastest of {ran}" if ran > 1 else "only variant" if ran else "" if failed else "not run"
    return ", ".join(filter(None, (text, f"{failed} failed" if failed else "")))


def ratio_text(peer: Row, ours: Row) -> str:
    """Formats the time of a peer over the time of jgraph. Notes that the repeats of a single run overlap."""
    repeats = (row.get("repeats_ms", []) for row in (ours, peer))
    is_tie = len(ratios(peer, ours)) < 2 and verdict(*repeats) == WITHIN
    return ratio(peer, ours, digits=2) + f", {WITHIN}" * is_tie


def short(ms: float) -> str:
    """Formats milliseconds with one decimal place from 10 ms on, and two below."""
    return f"{ms:.{1 if ms >= 10 else 2}f}"


def _range(rows: list[Row]) -> str:
    times = [row["ms"] for row in rows]
    return short(times[0]) if len(times) == 1 else f"{short(min(times))} to {short(max(times))}"


def variant_text(row: Row) -> str:
    """Returns schedule, variant and join of a row. Counts the XLA options, because their names are too long for a table."""
    options = row.get("variant", "").split()
    own = [option for option in options if not option.startswith("xla_")]
    xla = len(options) - len(own)
    join = f"join {row['join']}" if "join" in row else ""
    parts = [row.get("schedule"), " ".join(own), join, f"XLA options: {xla}" if xla else ""]
    return ", ".join(filter(None, parts)) or "default"
