"""Tables of results in Markdown: a benchmark says how a section of its table looks, all else is the same for all."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.rows import PARAMETERS, WITHIN, Row, fastest, is_peer, parameters, ratio, ratios, verdict
from jgraph.device import peak_flops

Cell = Callable[[Row], str]


@dataclass(frozen=True)
class Section:
    """Says how the rows of a work are drawn.

    Attributes:
        title: above them.
        columns: heads, and the cell of a row; the first one names the row.
        needs: a row without this key shows only its name and why it failed.
        facts: after date, versions, device and sizes.
        notes: below.
    """

    title: str
    columns: dict[str, Cell]
    needs: str = "ms"
    facts: str = ""
    notes: str = ""

    def draw(self, result: Row) -> list[str]:
        names, *cells = self.columns.values()
        rows = [
            [names(row), *(cell(row) for cell in cells if self.needs in row), *([row["failed"]] if "failed" in row else [])]
            for row in result["rows"]
        ]
        lines = [f"## {self.title}", "", f"{about(result)}{self.facts}.", "", *markdown(list(self.columns), rows)]
        split = [row for row in result["rows"] if row.get("categories")]
        if split:
            kinds = [kind for row in split for kind in row["categories"]]
            kinds = sorted(dict.fromkeys(kinds), key=lambda kind: kind in ("idle", "not told"))
            times = [[f"{row['categories'][kind]:.2f}" if kind in row["categories"] else "" for kind in kinds] for row in split]
            heads = [next(iter(self.columns)), "ms", *kinds]
            of = zip(split, times, strict=True)
            lines += ["", *markdown(heads, [[names(row), f"{row['ms']:.2f}", *own] for row, own in of])]
        return [*lines, "", self.notes] if self.notes else lines


def number(key: str, form: str = ".2f", scale: float = 1.0) -> Cell:
    return lambda row: format(row[key] * scale, form) if row.get(key) else ""


def mfu(flops: float) -> Cell:
    """Returns the share of the datasheet's bfloat16 rate; `flops` are those of a GPU in a step."""

    def cell(row: Row) -> str:
        peak = peak_flops((row.get("device") or "").rpartition(" x ")[2])
        return f"{flops / row['ms'] * 1e3 / peak:.1%}" if peak else ""

    return cell


# What several benchmarks show.
COLUMNS: dict[str, Cell] = {
    "peak GB": number("peak_bytes", scale=1e-9),
    "temporaries GB": number("temp_bytes", scale=1e-9),
    "compile s": number("compile_s", ".1f"),
    "launches, updates": lambda row: f"{row['launches']}, {row['updates']}" if "launches" in row else "",
    "W": number("power_watts", ".0f"),
    "MHz": number("sm_clock_mhz", ".0f"),
}


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table; short rows are filled up."""
    return [line(heads), "|---" * len(heads) + "|", *(line([*row, *[""] * (len(heads) - len(row))]) for row in rows)]


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def about(result: Row) -> str:
    env = result["environment"]
    versions = [f"{name} {env[name]}" for name in ("jax", "torch", "torchao", "transformer_engine") if name in env]
    told = [env["date"], f"revision {env['revision']}", *versions]
    told += [result["device"]] if result.get("device") else []
    return ", ".join([*told, *([f"sizes {result['options']['sizes']}"] if "sizes" in result.get("options", {}) else [])])


# PyTorch's fastest and ours
HEADS = ["work", "devices", "PyTorch", "jgraph", "PyTorch / jgraph", "of"]


def comparison(works: Row) -> list[str]:
    """Draws a row for each work with peers; parameters that are kept are not compared with those that are gathered again."""
    rows = []
    for work, result in works.items():
        groups = alike(result["rows"]) if any(row["system"] == "torch" for row in result["rows"]) else {}
        for kind, own in groups.items():
            rows += [versus(f"{work}, parameters {kind}" if len(groups) > 1 else work, result, [own])]
    return markdown(HEADS, rows) if rows else []


def alike(rows: list[Row]) -> dict[str, list[Row]]:
    """Returns ours and PyTorch's by what becomes of parameters: like is compared with like."""
    groups = {kind: [row for row in rows if row["system"] in ("jgraph", "torch") and is_peer(row, kind)] for kind in PARAMETERS}
    has = {parameters(row) for row in rows if row["system"] == "jgraph" or parameters(row) != "whole"}
    return {kind: own for kind, own in groups.items() if kind in has}


def versus(title: str, result: Row, runs: list[list[Row]]) -> list[str]:
    """Returns the cells of a work, by `HEADS`.

    Args:
        result: the work's own run.
        runs: rows of all stored runs of the work, its own first; where peers had turns in that, it alone counts.
    """
    if any("rounds" in row for row in runs[0]):
        runs = runs[:1]
    torch, ours = ([row for run in runs if (row := fastest(run, system))] for system in ("torch", "jgraph"))
    of = tried([row for run in runs for row in run])
    cells = [title, result["device"] or "not told"]
    cells += [f"{_range(torch)} ({how(torch[0])}; {of})" if torch else of]
    cells += [f"{_range(ours)} ({how(ours[0])})" if ours else "did not run"]
    if not (torch and ours):
        return [*cells, "", ""]
    if len(torch) > 1:
        least, most = min(row["ms"] for row in torch), max(row["ms"] for row in torch)
        slowest, best = max(row["ms"] for row in ours), min(row["ms"] for row in ours)
        return [*cells, f"{least / slowest:.2f} to {most / best:.2f}", f"{len(torch)} runs of PyTorch's, {len(ours)} of ours"]
    rounds = len(ratios(torch[0], ours[0]))
    return [*cells, told_ratio(torch[0], ours[0]), f"{rounds} rounds" if rounds > 1 else "one run"]


def tried(rows: list[Row]) -> str:
    """Tells how many of PyTorch's were tried."""
    ran_by_name = {how(row): False for row in rows if row["system"] == "torch"}
    ran_by_name |= {how(row): True for row in rows if row["system"] == "torch" and "ms" in row}
    ran, failed = sum(ran_by_name.values()), len(ran_by_name) - sum(ran_by_name.values())
    told = f"fastest of {ran}" if ran > 1 else "alone" if ran else "" if failed else "not run"
    return ", ".join(filter(None, (told, f"{failed} failed" if failed else "")))


def told_ratio(peer: Row, ours: Row) -> str:
    """Returns their ratio, and whether they can be told apart where there were no rounds."""
    alike = len(ratios(peer, ours)) < 2 and verdict(ours["repeats_ms"], peer["repeats_ms"]) == WITHIN
    return ratio(peer, ours, digits=2) + f", {WITHIN}" * alike


def short(ms: float) -> str:
    return f"{ms:.{1 if ms >= 10 else 2}f}"


def _range(rows: list[Row]) -> str:
    times = [row["ms"] for row in rows]
    return short(times[0]) if len(times) == 1 else f"{short(min(times))} to {short(max(times))}"


def how(row: Row) -> str:
    """Returns schedule, variant and join; of XLA's options how many, as their names are longer than a table is wide."""
    words = row.get("variant", "").split()
    own = [word for word in words if not word.startswith("xla_")]
    xla = len(words) - len(own)
    join = f"join {row['join']}" if "join" in row else ""
    parts = [row.get("schedule"), " ".join(own), join, f"XLA options: {xla}" if xla else ""]
    return ", ".join(filter(None, parts)) or "as it comes"
