"""Pictures of a simulated schedule: a timeline for the terminal, and an SVG with the memory curve beneath it.

Colours are Okabe and Ito's (jfly.uni-koeln.de/color, 2008), told apart by colour-blind readers; all carry black text.
"""

from pathlib import Path

import numpy as np
from rich.color import Color
from rich.style import Style
from rich.text import Text

from jgraph.schedule.action import BACKWARD, DGRAD, FORWARD, LETTERS, WGRAD
from jgraph.schedule.simulate import Simulation

COLOURS = {FORWARD: "#56B4E9", DGRAD: "#E69F00", WGRAD: "#009E73", BACKWARD: "#D55E00"}
NAMES = {FORWARD: "forward", DGRAD: "dgrad", WGRAD: "wgrad", BACKWARD: "dgrad and wgrad"}

_MOST_ROWS = 16
_MOST_NUMBERS = 2500


def tint(kind: int, chunk: int) -> str:
    """Colour of an action: later chunks are lighter."""
    share = min(0.6, 0.45 * chunk) if chunk else 0.0
    red, green, blue = (int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(value + (255 - value) * share):02X}" for value in (red, green, blue))


def rows_shown(count: int) -> list[int | None]:
    """Ranks to draw, all or the first and last with None for those between."""
    if count <= _MOST_ROWS:
        return list(range(count))
    half = _MOST_ROWS // 2 - 1
    return [*range(half), None, *range(count - half, count)]


def timeline(run: Simulation, *, width: int, colour: bool) -> Text:
    """One line a rank, time to scale: cells with microbatch numbers where they fit, dots where the rank is idle.

    Where the shortest action would be narrower than two columns, only the first and the last part are shown.

    Args:
        run: what to draw.
        width: columns, at least 40.
        colour: cells in colours; without, cells start with their letter (small for chunk 2 and up).
    """
    label = len(f"rank {run.schedule.num_ranks - 1}") + 1
    columns = max(width, 40) - label
    shortest = min(float((end - start).min()) for start, end in zip(run.starts, run.ends, strict=True))
    total = columns
    if run.makespan / shortest * 2 > columns:
        # What is shown is then wide enough for the numbers.
        total = int(np.ceil(run.makespan / shortest * (len(str(run.schedule.num_microbatches - 1)) + 2)))
    scale = total / run.makespan
    half = (columns - 3) // 2
    windows = [(0, columns)] if total == columns else [(0, half), (total - half, total)]
    text = Text(no_wrap=True, end="")
    for r in rows_shown(run.schedule.num_ranks):
        text.append((f"rank {r}" if r is not None else "...").ljust(label))
        for i, window in enumerate(windows):
            if i:
                text.append(" \u2026 ")
            if r is not None:
                _cells(text, run, r, scale, window, colour)
        text.append("\n")
    text.append(" " * label + _axis(run.makespan, scale, windows) + "\n")
    return text


def _cells(text: Text, run: Simulation, r: int, scale: float, window: tuple[int, int], colour: bool) -> None:
    order = run.schedule[r]
    begin, end = (np.rint(times * scale).astype(int).tolist() for times in (run.starts[r], run.ends[r]))
    at = window[0]
    rows = zip(begin, end, order.kinds.tolist(), order.chunks.tolist(), order.microbatches.tolist(), strict=True)
    for first, last, kind, chunk, microbatch in rows:
        left, right = max(first, at), min(last, window[1])
        if right <= left:
            continue
        text.append("\u00b7" * (left - at), style="dim")
        if colour:
            # A cell whose number does not fit is told from the next of its kind by a mark at its start.
            number = str(microbatch) if len(str(microbatch)) < last - first else "\u258f"
            style = Style(color=Color.parse("#000000"), bgcolor=Color.parse(tint(kind, chunk)))
        else:
            letter = LETTERS[kind] if chunk == 0 else LETTERS[kind].lower()
            number = f"{letter}{microbatch}" if len(str(microbatch)) + 1 < last - first else letter
            style = Style()
        filling = " " if colour else "-"
        text.append(number.ljust(last - first, filling)[left - first : right - first], style=style)
        at = right
    text.append("\u00b7" * (window[1] - at), style="dim")


def _axis(makespan: float, scale: float, windows: list[tuple[int, int]]) -> str:
    """The times at both ends of each part."""
    parts = []
    for first, last in windows:
        start, stop = f"{first / scale:.4g}", f"{min(last / scale, makespan):.4g}"
        parts.append(start + stop.rjust(last - first - len(start)))
    return "   ".join(parts)


def legend(run: Simulation, *, colour: bool) -> Text:
    """What the cells mean."""
    text = Text()
    kinds = sorted({int(kind) for order in run.schedule for kind in np.unique(order.kinds)})
    for kind in kinds:
        style = Style(color=Color.parse("#000000"), bgcolor=Color.parse(COLOURS[kind])) if colour else Style()
        text.append(f" {LETTERS[kind]} ", style=style).append(f" {NAMES[kind]}  ")
    text.append("\u00b7 idle  the number is the microbatch")
    if max(order.num_chunks for order in run.schedule) > 1:
        text.append("; lighter: later chunks" if colour else "; small letters: later chunks")
    return text


def write_svg(run: Simulation, path: Path) -> None:
    """Writes the picture; the same bytes for the same run."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jgraph", "hatch.linewidth": 0.4}):
        figure(run).savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def figure(run: Simulation):
    """The picture as a matplotlib figure: ranks as rows, time to scale, and what is held over time beneath."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = run.schedule.num_ranks
    actions = sum(map(len, run.schedule))
    size = (float(np.clip(actions / ranks * 0.22, 9, 60)), 0.34 * ranks + 3.2)
    result = Figure(figsize=size, layout="constrained")
    top, bottom = result.subplots(2, 1, sharex=True, height_ratios=[0.34 * ranks + 0.6, 1.8])
    unit = size[0] * 0.9 / run.makespan
    for r, (order, starts, ends) in enumerate(zip(run.schedule, run.starts, run.ends, strict=True)):
        idle = {"facecolor": "white", "edgecolor": "#BBBBBB", "hatch": "////", "linewidth": 0}
        top.broken_barh([(0, run.makespan)], (r - 0.42, 0.84), **idle)
        for kind, chunk in {(int(k), int(c)) for k, c in zip(order.kinds, order.chunks, strict=True)}:
            mask = (order.kinds == kind) & (order.chunks == chunk)
            bars = list(zip(starts[mask], (ends - starts)[mask], strict=True))
            top.broken_barh(bars, (r - 0.42, 0.84), facecolor=tint(kind, chunk), edgecolor="black", linewidth=0.4)
        if actions <= _MOST_NUMBERS:
            for start, end, m in zip(starts, ends, order.microbatches, strict=True):
                if (end - start) * unit > 0.075 * len(str(m)):
                    top.text((start + end) / 2, r, str(m), ha="center", va="center", fontsize=7)
    top.set(ylim=(ranks - 0.5, -0.5), yticks=range(ranks), yticklabels=[f"rank {r}" for r in range(ranks)])
    top.set_title(f"{run.schedule.name}: time {run.makespan:.4g}, bubble {run.bubble:.1%}", loc="left", fontsize=10)
    kinds = sorted({int(kind) for order in run.schedule for kind in np.unique(order.kinds)})
    handles = [Patch(facecolor=COLOURS[kind], edgecolor="black", label=f"{LETTERS[kind]} {NAMES[kind]}") for kind in kinds]
    if max(order.num_chunks for order in run.schedule) > 1:
        handles.append(Patch(facecolor=tint(kinds[0], 1), edgecolor="black", label="lighter: later chunks"))
    handles.append(Patch(facecolor="white", edgecolor="#BBBBBB", hatch="////", label="idle"))
    top.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles), fontsize=8, frameon=False)
    _memory(run, bottom)
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, run.makespan)
    return result


def _memory(run: Simulation, axes) -> None:
    """What forward left and wgrad still needs, in microbatches of a rank's layers; of many the first, last and fullest."""
    ranks = run.schedule.num_ranks
    share = 1 / max(order.num_chunks for order in run.schedule)
    curves = run.memory({"forward_wgrad": share})
    fullest = int(np.argmax([level.max(initial=0) for _, level in curves]))
    for r in range(ranks) if ranks <= 8 else sorted({0, fullest, ranks - 1}):
        times, level = curves[r]
        axes.step([*times, run.makespan], [*level, 0], where="post", label=f"rank {r}", linewidth=1)
    axes.set(xlabel="time", ylabel="held\n(microbatches)", ylim=(0, 1.3 * max(level.max(initial=0) for _, level in curves)))
    axes.legend(fontsize=7, ncols=4, frameon=False, loc="upper right")
