"""Formats the results of programs from other projects as the table of notes/guide/other-programs.md."""

import json
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown

RESULTS = Path(__file__).with_name("results.json")


def table() -> str:
    """Returns the table, with one row per program."""
    heads = [
        "program",
        "version",
        "jax",
        "captured, `auto`",
        "outside",
        "captured, `full`",
        "with unrolled loops",
        "donated, dropped",
        "`jgraph.jit`",
    ]
    results = json.loads(RESULTS.read_text())
    return "\n".join(markdown(heads, (_cells(name, result) for name, result in results.items())))


def _cells(name: str, result: dict[str, Any]) -> list[str]:
    auto, full, unrolled = (result[options] for options in ("auto", "full", "unrolled"))
    jit = result["jit"]
    revision = f", {result['revision']}" if result["revision"] else ""
    return [
        f"{name}: {result['source']}",
        f"{result['package']} {result['version']}{revision}",
        result["jax"],
        _captured(auto),
        "; ".join(f"{outside['count']} {outside['kind']}: {outside['reason']}" for outside in auto.get("outside", ())),
        _captured(full),
        _captured(unrolled),
        f"{auto['donated']}, {len(auto['dropped'])}" if "donated" in auto else "",
        jit["failed"] or (f"equal for {jit['steps']} steps" if jit["equal"] else "differs"),
    ]


def _captured(report: dict[str, Any]) -> str:
    return report.get("failed") or f"{report['captured']} of {report['total']}"
