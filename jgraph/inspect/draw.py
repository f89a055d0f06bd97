"""Draws a simulated schedule as a timeline for the terminal.

Ranks are rows, rank 0 on top; time runs to the right, to scale. The colors are the colorblind-safe palette of Okabe and Ito
(jfly.uni-koeln.de/color, 2008). Black text is readable on all of them and on their tints for later chunks.
"""

from typing import Literal

import numpy as np
from rich.style import Style
from rich.text import Text

from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, LETTERS, WGRAD
from jgraph.schedule.simulate import Simulation

# The background of a cell has the color of its kind. Or, for terminals without colors, a cell starts with the letter of its
# kind: in lower case for chunks after the first, or a dash if the start of the cell is cut off.
Cells = Literal["colors", "letters"]

COLORS = {FORWARD: "#56B4E9", DGRAD: "#E69F00", WGRAD: "#009E73", BACKWARD: "#D55E00"}
TEXT = "#000000"

LABELS = {FORWARD: "forward", DGRAD: "dgrad", WGRAD: "wgrad", BACKWARD: "full backward"}
_IDLE, _CONTINUED = "·", "-"
_MAX_LINES = 40


def tint(kind: int, chunk: int, chunks: int) -> str:
    """Returns the color `#RRGGBB` of an action in a timeline. Later chunks are lighter."""
    share = 0.55 * chunk / max(chunks - 1, 1)
    parts = (int(COLORS[kind][i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(value + (255 - value) * share):02X}" for value in parts)


def timeline(run: Simulation, *, width: int, cells: Cells) -> Text:
    """Draws a line per rank and a line of times. A cell is an action with its microbatch, dots are idle time.

    Wraps into bands if cells become narrower than two columns, and shows the first bands and the last one, at least two.
    """
    ranks = run.schedule.num_ranks
    label = len(f"rank {ranks - 1} ")
    scale, bands = _layout(run, max(width, 40) - label)
    text = Text(no_wrap=True, end="")
    shown = 0
    for first, last in bands:
        if first > shown:
            text.append(f"{'...':{label}}times {shown / scale:.4g} to {first / scale:.4g} are not shown\n", style="dim")
        for r in range(ranks):
            text.append(f"rank {r}".ljust(label))
            _append_cells(text, run, r, scale, (first, last), cells)
            text.append("\n")
        start, stop = f"{first / scale:.4g}", f"{min(last / scale, run.makespan):.4g}"
        room = last - first - len(start)
        text.append(" " * label + (start + stop.rjust(room) if room > len(stop) else start) + "\n", style="dim")
        shown = last
    return text


def _layout(run: Simulation, columns: int) -> tuple[float, list[tuple[int, int]]]:
    """Returns the columns per unit of time, and the first and last column of each band."""
    spans = np.concatenate([end - start for start, end in zip(run.starts, run.ends, strict=True)])
    # At least 1/16 of the longest, which limits the width: a very short action may vanish instead. After a far longer action
    # its duration even rounds to 0.
    shortest = float(max(spans.min(), spans.max() / 16))
    # An integer number of columns, so that equal actions have equal widths.
    cell = int(columns * shortest / run.makespan)
    if cell < 2:
        cell = len(str(run.schedule.num_microbatches - 1)) + 1
    scale = cell / shortest
    total = int(np.ceil(run.makespan * scale - 1e-6))
    count = -(-total // (columns - columns % cell)) if total > columns else 1
    step = -(-total // count // cell) * cell
    starts = range(0, total, step)
    most = max(_MAX_LINES // (run.schedule.num_ranks + 1), 2)
    shown = starts if count <= most else [*starts[: most - 1], starts[-1]]
    return scale, [(at, min(at + step, total)) for at in shown]


def _append_cells(text: Text, run: Simulation, r: int, scale: float, window: tuple[int, int], style: Cells) -> None:
    """Appends the cells of rank `r` within the range of columns `window`."""
    order = run.schedule[r]
    at = window[0]
    # Python integers, because a large latency would overflow an int64 array.
    begin, end = ([round(time) for time in (times * scale).tolist()] for times in (run.starts[r], run.ends[r]))
    cells = zip(begin, end, order.kinds.tolist(), order.chunks.tolist(), map(str, order.microbatches), strict=True)
    for first, last, kind, chunk, microbatch in cells:
        left, right = max(first, at), min(last, window[1])
        if right <= left:
            continue
        text.append(_IDLE * (left - at), style="dim")
        # The larger part of a cut cell shows the microbatch.
        number = microbatch if 2 * (right - left) >= last - first + (first < left) else ""
        if style == "colors":
            # Adjacent cells of the same color need a separator: a space beside the number, or a line at the start.
            cell = number.center(right - left) if len(number) < right - left else "▏".ljust(right - left)
            text.append(cell, style=Style(color=TEXT, bgcolor=tint(kind, chunk, run.schedule.num_chunks)))
        else:
            letter = _CONTINUED if first < left else LETTERS[kind] if chunk == 0 else LETTERS[kind].lower()
            text.append((letter + number if len(number) < right - left else letter).ljust(right - left))
        at = right
    text.append(_IDLE * (window[1] - at), style="dim")


def legend(run: Simulation, *, cells: Cells) -> Text:
    """Returns a line with the kinds of actions in the schedule, without a newline."""
    text = Text()
    chunks = run.schedule.num_chunks
    for kind in np.unique(np.concatenate([order.kinds for order in run.schedule])).tolist():
        style = Style(color=TEXT, bgcolor=COLORS[kind]) if cells == "colors" else ""
        text.append(f" {LETTERS[kind]} " if cells == "colors" else LETTERS[kind], style=style).append(f" {LABELS[kind]}   ")
    text.append(_IDLE * 3 if cells == "colors" else _IDLE, style="dim").append(" idle   number: microbatch")
    if chunks > 1:
        later = f"chunk 2 to {chunks}" if chunks > 2 else "chunk 2"
        text.append(f"   {'lighter' if cells == 'colors' else 'lower case'}: {later}")
    return text
