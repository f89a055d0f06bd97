"""Draws the SVG pictures of README and of notes/: bars of step times, and timelines of pipelines.

A picture follows the color scheme of the page that shows it. Its background is opaque, so that it can be read where a viewer
ignores the scheme.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jgraph.inspect.draw import LABELS, tint
from jgraph.schedule import Simulation
from jgraph.schedule.action import FORWARD

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Colors of a class on a light page and on a dark page.
COLORS = {
    "panel": ("#f6f8fa", "#161b22"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "ours": ("#00897b", "#26a69a"),
    "peer": ("#adb5bd", "#59636e"),
    "idle": ("#e1e5ea", "#2d333b"),
}
CELL_TEXT = "#000000"  # on the colors of actions, which are the same on light and dark pages

_STYLE = """<style>
{light}
@media (prefers-color-scheme: dark) {{
{dark}
}}
</style>
<rect class="panel" width="100%" height="100%" rx="6"/>"""
_MARGIN, _DIGIT = 14, 8
_SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" \
font-family="system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif" font-size="14">
<title>{title}</title>
{style}
{parts}
</svg>
"""


@dataclass(frozen=True)
class Bar:
    """A time in milliseconds, and its ratio to the first bar of its group."""

    name: str
    ms: str
    ratio: str


def bars(title: str, groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    """Returns a picture with a group of horizontal bars per work. The lengths are the ratios."""
    names, row, head = 144, 17, 28  # width of the names, distance of bars, height of a heading
    largest = max(float(bar.ratio) for _, group in groups for bar in group)
    unit = min(190, 314 / largest)  # width of a ratio of 1
    width = round(_MARGIN + names + largest * unit + 128)
    y, parts = _MARGIN + 14, [_text(_MARGIN, _MARGIN + 12, title, "muted")]
    for work, group in groups:
        parts += [_text(_MARGIN, y + head - 6, work)]
        y += head
        for i, bar in enumerate(group):
            length = float(bar.ratio) * unit
            label = f"{bar.ms} ms, {bar.ratio} x" if i else f"{bar.ms} ms"
            parts += [
                _text(_MARGIN + names - 8, y + 11, bar.name, "muted", anchor="end"),
                _rect(_MARGIN + names, y + 1, length, row - 3, "peer" if i else "ours"),
                _text(_MARGIN + names + length + 6, y + 11, label),
            ]
            y += row
    return _document(title, width, y + _MARGIN, parts)


def timeline(title: str, run: Simulation, unit: str) -> str:
    """Returns a picture with a row per rank. An action is a cell with its microbatch, and time runs to the right, to scale."""
    left, top, row, chunks = _MARGIN + 56, 60, 26, run.schedule.num_chunks
    spans = [end - start for start, end in zip(run.starts, run.ends, strict=True)]
    digits = len(str(run.schedule.num_microbatches - 1))
    scale = (_DIGIT * digits + 8) / float(np.median(np.concatenate(spans)))
    width = round(left + run.makespan * scale + _MARGIN)
    kinds = sorted({kind for order in run.schedule for kind in order.kinds.tolist()})
    items = [(tint(kind, 0, chunks), LABELS[kind]) for kind in kinds]
    if chunks == 2:
        items += [(tint(FORWARD, 1, 2), "lighter: chunk 2")]
    items += [("idle", "idle")]
    parts = [_text(_MARGIN, 24, f"{title}: {run.makespan:.4g} {unit}, bubble {run.bubble:.1%}")]
    offsets = accumulate((28 + 9 * len(label) for _, label in items), initial=_MARGIN)
    for (fill, label), x in zip(items, offsets, strict=False):
        parts += [_rect(x, 36, 14, 14, fill), _text(x + 19, 48, label, "muted")]
    for r, order in enumerate(run.schedule):
        y = top + row * r
        parts += [_text(left - 8, y + 16, f"rank {r}", "muted", anchor="end")]
        parts += [_rect(left, y, run.makespan * scale, row - 4, "idle")]
        columns = (run.starts[r] * scale, spans[r] * scale, order.kinds, order.chunks, order.microbatches)
        for start, span, kind, chunk, m in zip(*(column.tolist() for column in columns), strict=True):
            parts += [_rect(left + start + 0.5, y, span - 1, row - 4, tint(kind, chunk, chunks))]
            if span > _DIGIT * len(str(m)):
                parts += [_text(left + start + span / 2, y + 16, str(m), "cell", anchor="middle")]
    return _document(title, width, top + row * run.schedule.num_ranks + _MARGIN - 4, parts)


def save_figure(figure: "Figure", path: Path) -> None:
    """Writes a matplotlib figure without background as a picture that follows the color scheme of its page."""
    figure.savefig(file := StringIO(), format="svg", facecolor="none", metadata={"Date": None})
    head, end, parts = file.getvalue().partition("</defs>")
    black = '<g class="ink">' + parts.replace("#000000", "currentColor").replace("</svg>", "</g>\n</svg>")
    path.write_text(f"{head}{end}\n{_style()}\n{black}")


def _document(title: str, width: int, height: int, parts: list[str]) -> str:
    return _SVG.format(width=width, height=height, title=html.escape(title), style=_style(), parts="\n".join(parts))


def _style() -> str:
    """Returns the colors of all classes, and the background."""
    light, dark = (
        "\n".join(f".{name} {{ color: {pair[scheme]}; fill: {pair[scheme]}; }}" for name, pair in COLORS.items())
        for scheme in range(2)
    )
    return _STYLE.format(light=f"{light}\n.cell {{ fill: {CELL_TEXT}; font-size: 12px; }}", dark=dark)


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    """Returns a rectangle. `fill` is a color `#RRGGBB`, or a class."""
    look = f'fill="{fill}"' if fill.startswith("#") else f'class="{fill}"'
    return f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" {look}/>'


def _text(x: float, y: float, text: str, kind: str = "ink", *, anchor: str = "start") -> str:
    return f'<text x="{x:.2f}" y="{y}" class="{kind}" text-anchor="{anchor}">{html.escape(text)}</text>'
