"""Draws a simulated schedule as a timeline for the terminal, or as an SVG with the memory use below the timeline.

Ranks are rows, rank 0 on top; time runs to the right, to scale. The colors are the colorblind-safe palette of Okabe and Ito
(jfly.uni-koeln.de/color, 2008). Black text is readable on all of them and on their tints for later chunks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.style import Style
from rich.text import Text

from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, LETTERS, WGRAD
from jgraph.schedule.simulate import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {FORWARD: "#56B4E9", DGRAD: "#E69F00", WGRAD: "#009E73", BACKWARD: "#D55E00"}
TEXT = "#000000"
GAP = " … "

_LABELS = {FORWARD: "forward", DGRAD: "dgrad", WGRAD: "wgrad", BACKWARD: "full backward"}
_IDLE_CELL, _CONTINUED = "·", "-"
_MAX_ROWS, _MAX_LINES = 16, 40
# The layout of 100 numbers takes 10 ms.
_MAX_NUMBERS = 2500
# Larger schedules are rasterized: a path takes 215 bytes, and viewers fail to open the file.
_MAX_PATHS = 20_000
_MIN_INCHES, _MAX_INCHES = 8.0, 18.0
_RC: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "jgraph", "hatch.linewidth": 0.5, "font.size": 9.0}
_HATCH = {"facecolor": "white", "edgecolor": "#BBBBBB", "hatch": "/////", "linewidth": 0.0}


def tint(kind: int, chunk: int, chunks: int) -> str:
    """Returns the color of an action; later chunks are lighter.

    Args:
        kind: Index of the kind in `KINDS`.
        chunk: Chunk of the action, 0-based.
        chunks: Number of chunks per rank.

    Returns:
        The color as `#RRGGBB`.
    """
    share = 0.55 * chunk / max(chunks - 1, 1)
    parts = (int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(value + (255 - value) * share):02X}" for value in parts)


def rows_shown(count: int) -> list[int | None]:
    """Returns the ranks to show: all of `count` ranks, or the first and the last 7 with None between them if there are many."""
    if count <= _MAX_ROWS:
        return list(range(count))
    half = _MAX_ROWS // 2 - 1
    return [*range(half), None, *range(count - half, count)]


def timeline(run: Simulation, *, width: int, colour: bool) -> Text:
    """Draws the timeline of a schedule as text, with a line per rank and a line of times.

    A cell is an action, with its microbatch if it fits; dots are idle time. If the shortest action would be narrower than two
    columns, the timeline is wrapped into several bands of lines. If the bands would exceed 40 lines, only the first and the
    last part of the timeline are shown.

    Args:
        run: The simulated schedule.
        width: Number of columns; smaller values than 40 count as 40.
        colour: Whether to color the cells. Without colors, a cell starts with the letter of its kind, in lower case for chunks
            after the first, or with a dash if the start of the cell is cut off.

    Returns:
        The lines.
    """
    ranks = run.schedule.num_ranks
    label = len(f"rank {ranks - 1} ")
    scale, bands = _layout(run, max(width, 40) - label)
    text = Text(no_wrap=True, end="")
    for windows in bands:
        for r in rows_shown(ranks):
            if r is None:
                gap = f"ranks {_MAX_ROWS // 2 - 1} to {ranks - _MAX_ROWS // 2} are not shown"
                text.append(f"{'...':{label}}{gap}\n", style="dim")
                continue
            text.append(f"rank {r}".ljust(label))
            for i, window in enumerate(windows):
                text.append(GAP if i else "", style="dim")
                _append_cells(text, run, r, scale, window, colour)
            text.append("\n")
        text.append(" " * label + _axis(run.makespan, scale, windows) + "\n", style="dim")
    return text


def _layout(run: Simulation, columns: int) -> tuple[float, list[list[tuple[int, int]]]]:
    """Returns the columns per unit of time, and for each band the ranges of columns that it shows side by side."""
    shortest = _shortest(run)
    # An integer number of columns, so that equal actions have equal widths.
    cell = int(columns * shortest / run.makespan)
    if cell < 2:
        cell = len(str(run.schedule.num_microbatches - 1)) + 1
    scale = cell / shortest
    total = int(np.ceil(run.makespan * scale - 1e-6))
    count = -(-total // (columns - columns % cell)) if total > columns else 1
    if count == 1 or count * (run.schedule.num_ranks + 1) <= _MAX_LINES:
        step = -(-total // count // cell) * cell
        return scale, [[(at, min(at + step, total))] for at in range(0, total, step)]
    half = (columns - len(GAP)) // 2
    half -= half % cell
    return scale, [[(0, half), (total - half, total)]]


def _shortest(run: Simulation) -> float:
    """Returns the duration of the shortest action, but at least 1/16 of the longest."""
    spans = np.concatenate([end - start for start, end in zip(run.starts, run.ends, strict=True)])
    # Limits the width: a very short action may vanish instead. After a far longer action its duration even rounds to 0.
    return float(max(spans.min(), spans.max() / 16))


def _append_cells(text: Text, run: Simulation, r: int, scale: float, window: tuple[int, int], colour: bool) -> None:
    """Appends the cells of rank `r` within the range of columns `window`."""
    order, chunks, at = run.schedule[r], run.schedule.num_chunks, window[0]
    # Python integers, because a large latency would overflow an int64 array.
    begin, end = ([round(time) for time in (times * scale).tolist()] for times in (run.starts[r], run.ends[r]))
    cells = zip(begin, end, order.kinds.tolist(), order.chunks.tolist(), map(str, order.microbatches), strict=True)
    for first, last, kind, chunk, microbatch in cells:
        left, right = max(first, at), min(last, window[1])
        if right <= left:
            continue
        text.append(_IDLE_CELL * (left - at), style="dim")
        # The larger part of a cut cell shows the microbatch.
        number = microbatch if 2 * (right - left) >= last - first + (first < left) else ""
        if colour:
            # Adjacent cells of the same color need a separator: a space beside the number, or a line at the start.
            cell = number.center(right - left) if len(number) < right - left else "▏".ljust(right - left)
            text.append(cell, style=Style(color=TEXT, bgcolor=tint(kind, chunk, chunks)))
        else:
            letter = _CONTINUED if first < left else LETTERS[kind] if chunk == 0 else LETTERS[kind].lower()
            text.append((letter + number if len(number) < right - left else letter).ljust(right - left))
        at = right
    text.append(_IDLE_CELL * (window[1] - at), style="dim")


def _axis(makespan: float, scale: float, windows: list[tuple[int, int]]) -> str:
    """Returns the line of times: the start and the end of each window, or the start only if it is too narrow."""
    parts = []
    for first, last in windows:
        start, stop = f"{first / scale:.4g}", f"{min(last / scale, makespan):.4g}"
        room = last - first - len(start) - len(stop)
        parts.append(start + " " * room + stop if room > 0 else start[: last - first].ljust(last - first))
    return (" " * len(GAP)).join(parts)


def legend(run: Simulation, *, colour: bool) -> Text:
    """Returns the legend of the timeline.

    Args:
        run: The simulated schedule; only its kinds of actions are listed.
        colour: Whether the timeline is colored.

    Returns:
        One line.
    """
    text = Text()
    for kind in _kinds(run):
        style = Style(color=TEXT, bgcolor=COLOURS[kind]) if colour else ""
        text.append(f" {LETTERS[kind]} " if colour else LETTERS[kind], style=style).append(f" {_LABELS[kind]}   ")
    text.append(_IDLE_CELL * 3 if colour else _IDLE_CELL, style="dim").append(" idle   number: microbatch")
    chunks = run.schedule.num_chunks
    if chunks > 1 and colour:
        text.append("   chunks ")
        for chunk in range(chunks) if chunks <= 8 else (0, chunks - 1):
            text.append(f" {chunk + 1} ", style=Style(color=TEXT, bgcolor=tint(FORWARD, chunk, chunks)))
    elif chunks > 1:
        text.append(f"   lower case: chunk 2{f' to {chunks}' if chunks > 2 else ''}")
    return text


def write_svg(run: Simulation, path: Path) -> None:
    """Writes the figure as SVG. The same run gives the same bytes.

    Args:
        run: The simulated schedule.
        path: File to write.

    Raises:
        OSError: If the file cannot be written.
    """
    import matplotlib

    with matplotlib.rc_context(_RC):
        figure(run).savefig(path, format="svg", dpi=150, metadata={"Date": None, "Creator": None})


def figure(run: Simulation) -> Figure:
    """Returns a matplotlib figure with the timeline and, below it, the memory use over time."""
    from matplotlib.figure import Figure

    ranks = run.schedule.num_ranks
    digits = len(str(run.schedule.num_microbatches - 1))
    width = float(np.clip(run.makespan / _shortest(run) * (0.075 * digits + 0.07), _MIN_INCHES, _MAX_INCHES))
    row = float(np.clip(6 / ranks, 0.14, 0.34))
    result = Figure(figsize=(width, row * ranks + 2.9), layout="constrained")
    top, bottom = result.subplots(2, 1, sharex=True, height_ratios=[row * ranks, 1.4])
    inches = (width - 0.8) / run.makespan
    for r in range(ranks):
        top.broken_barh([(0, run.makespan)], (r - 0.42, 0.84), **_HATCH)
    for r in range(ranks):
        _bars(run, top, r, inches)
    if sum(map(len, run.schedule)) <= _MAX_NUMBERS:
        _draw_microbatches(run, top, inches, 7 if width < _MAX_INCHES else 6)
    step = -(-ranks // 32)
    top.set(ylim=(ranks - 0.5, -0.5), yticks=range(0, ranks, step), yticklabels=[f"rank {r}" for r in range(0, ranks, step)])
    top.set_title(_title(run), loc="left", fontsize=10, pad=22)
    _legend(run, top)
    _memory(run, bottom)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, run.makespan)
    top.spines["left"].set_visible(False)
    top.tick_params(length=0, labelbottom=False)
    return result


def _title(run: Simulation) -> str:
    """Returns the title: the schedule, its makespan and its bubble."""
    # matplotlib parses dollars as math. A name from JSON may hold lone surrogates, which cannot be encoded.
    schedule = str(run.schedule).encode(errors="replace").decode().replace("$", r"\$")
    return f"{schedule}, makespan {run.makespan:.4g}, bubble {run.bubble:.1%}"


def _bars(run: Simulation, axes: Axes, r: int, inches: float) -> None:
    """Draws the actions of rank `r`, one collection per color."""
    order, starts, spans = run.schedule[r], run.starts[r], run.ends[r] - run.starts[r]
    # Thin bars need thin edges, which would otherwise cover them.
    style = {"edgecolor": TEXT, "linewidth": min(0.5, 5 * inches * float(spans.min()))}
    style["rasterized"] = sum(map(len, run.schedule)) > _MAX_PATHS
    for kind, chunk in np.unique(np.stack([order.kinds, order.chunks], axis=1), axis=0).tolist():
        own = (order.kinds == kind) & (order.chunks == chunk)
        bars = np.stack([starts[own], spans[own]], axis=1).tolist()
        axes.broken_barh(bars, (r - 0.42, 0.84), facecolor=tint(kind, chunk, run.schedule.num_chunks), **style)


def _draw_microbatches(run: Simulation, axes: Axes, inches: float, size: int) -> None:
    """Writes the microbatch into every bar that is wide enough; `inches` is the width of a unit of time."""
    for r, order in enumerate(run.schedule):
        for start, end, m in zip(run.starts[r].tolist(), run.ends[r].tolist(), order.microbatches.tolist(), strict=True):
            if (end - start) * inches > 0.009 * size * len(str(m)) + 0.02:
                number = axes.text((start + end) / 2, r, str(m), ha="center", va="center", fontsize=size, color=TEXT)
                number.set_in_layout(False)


def _legend(run: Simulation, axes: Axes) -> None:
    """Adds the legend above the timeline."""
    from matplotlib.patches import Patch

    kinds, chunks = _kinds(run), run.schedule.num_chunks
    handles = [Patch(facecolor=COLOURS[kind], edgecolor=TEXT, linewidth=0.5, label=_LABELS[kind]) for kind in kinds]
    if chunks > 1:
        label = "lighter: chunk 2" + f" to {chunks}" * (chunks > 2)
        handles.append(Patch(facecolor=tint(kinds[0], chunks - 1, chunks), edgecolor=TEXT, linewidth=0.5, label=label))
    handles.append(Patch(**_HATCH, label="idle"))
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "borderpad": 0.2}
    axes.legend(handles=handles, ncols=len(handles), fontsize=8, frameon=False, columnspacing=1.4, **place)


def _memory(run: Simulation, axes: Axes) -> None:
    """Draws the residuals held for wgrads over time, for up to 8 ranks, or else for the first, the last and the fullest."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    ranks = run.schedule.num_ranks
    curves = run.memory({"forward_wgrad": 1 / run.schedule.num_chunks})
    fullest = int(np.argmax([level.max(initial=0) for _, level in curves]))
    shown = list(range(ranks)) if ranks <= 8 else sorted({0, fullest, ranks - 1})
    for i, r in enumerate(shown):
        times, level = curves[r]
        # Keep the last level at each time. Later ranks have thinner lines, so that equal curves stay visible.
        last = np.append(np.diff(times) > 0, True)
        label = f"rank {r}" + " (fullest)" * (ranks > 8 and r == fullest)
        share = i / max(len(shown) - 1, 1)
        line = {"color": colormaps["magma"](0.75 * share), "linewidth": 3 - 2 * share}
        axes.step([*times[last], run.makespan], [*level[last], 0], where="post", label=label, **line)
    axes.set_title("residuals held by a rank, in microbatches (all layers)", loc="left", fontsize=9)
    axes.set(xlabel="time (unit of the costs)", ylim=(0, None))
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, handlelength=1.2, borderaxespad=0.2)


def _kinds(run: Simulation) -> list[int]:
    """Returns the kinds of actions that occur, ascending."""
    return np.unique(np.concatenate([order.kinds for order in run.schedule])).tolist()
