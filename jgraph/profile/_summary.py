"""Prints a short summary of a profile."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from jgraph.profile._categories import CATEGORIES

_MOST_SHOWN = 5


def show(profile: Mapping[str, Any], console: Console) -> None:
    """Prints the time of a step, its categories, and the kernels that are furthest above their roofline.

    Args:
        profile: The contents of profile.json.
        console: The console.
    """

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    say(profile["title"])
    if graphs := profile["captured"]:
        say(
            f"captured: {graphs['step_ms']:.2f} ms a step, {graphs['idle_ms']:.2f} idle; {graphs['launches']:g} launches, "
            f"{graphs['updates']:g} updates, {graphs['records']:g} records of graphs, {graphs['launch_ms']:.2f} ms of the host"
        )
    named = profile["uncaptured"]
    attributed = np.mean([rank["attributed"] for rank in named["ranks"]])
    say(f"without capture, traced: {named['step_ms']:.2f} ms a step, {attributed:.1%} of the busy time attributed")
    console.print(_categories(named))
    for group in [group for group in profile["groups"] if group["over_ms"]][:_MOST_SHOWN]:
        say(
            f"  {group['over_ms']:7.3f} ms above its roofline of {group['roofline_ms']:.3f}: {group['category']}, "
            f"{group['label']} ({group['count']} kernels{', ' + group['source'] if group['source'] else ''})"
        )
    if pipeline := profile["pipeline"]:
        planned, ran = pipeline["planned"], pipeline["measured"]
        say(
            f"pipeline: planned {planned['step_ms']:.2f} ms, {planned['bubble']:.1%} idle; ran {ran['step_ms']:.2f} ms, "
            f"{ran['bubble']:.1%} idle"
        )
    for note in profile["about"]["notes"]:
        say(note)


def _categories(named: Mapping[str, Any]) -> Table:
    ranks = named["ranks"]
    table = Table(box=box.SIMPLE)
    table.add_column("category")
    for name in ("ms", "share", "kernels' ms", "kernels"):
        table.add_column(name, justify="right")
    for category in CATEGORIES:
        found = [rank["categories"].get(category, {"ms": 0.0, "kernel_ms": 0.0, "kernels": 0}) for rank in ranks]
        if any(one["kernels"] for one in found):
            ms, kernel_ms, kernels = (float(np.mean([one[key] for one in found])) for key in ("ms", "kernel_ms", "kernels"))
            table.add_row(category, f"{ms:.3f}", f"{ms / named['step_ms']:.1%}", f"{kernel_ms:.3f}", f"{kernels:g}")
    idle = float(np.mean([rank["idle_ms"] for rank in ranks]))
    table.add_row("idle", f"{idle:.3f}", f"{idle / named['step_ms']:.1%}", "", "")
    return table
