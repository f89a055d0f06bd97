"""The text of a plan: a table of its options, the best command lines, and why others do not fit."""

from jgraph.plan._compile import Compiled
from jgraph.plan._plan import MARGIN, MARGIN_OF_PIPELINES, MARGIN_OF_XLA_ATTENTION, USABLE, Option, Plan, margin
from jgraph.plan._speed import FP8_MATMULS, MATMULS

_ROWS = 12
_COLUMNS: list[str] = [
    *("layout", "precision", "remat", "microbatches"),
    *("state", "gradients", "gathered", "activations", "buffers", "peak GiB", "exposed", "tokens/s"),
]
_PEAK = _COLUMNS.index("peak GiB") + 1
_GIB = 2**30
_MOST = 2**16  # GPUs


def text(plan: Plan) -> str:
    """Returns the table, command lines and notes."""
    fitting = [option for option in plan.options if option.fits]
    shown = fitting[:_ROWS] or plan.options[:3]
    rows = [_COLUMNS, *map(_row, shown)]
    if plan.check == "compiler":
        peaks = ["compiled", *(_peak(option.compiled) for option in shown)]
        rows = [[*row[:_PEAK], peak, *row[_PEAK:]] for row, peak in zip(rows, peaks, strict=True)]
    lines = [_title(plan), *_table(rows)]
    if len(fitting) > _ROWS:
        lines.append(f"and {len(fitting) - _ROWS} slower layouts that fit")
    if not fitting:
        lines.append(_too_small(plan))
    others = len(plan.options) - len(fitting)
    if others and fitting:
        lines.append(f"{others} other layouts do not fit")
    for reason, count in sorted(plan.refused.items(), key=lambda item: -item[1])[:3]:
        lines.append(f"refused in {count} layouts: {reason}" if count > 1 else f"refused: {reason}")
    if plan.check == "compiler" and fitting:
        lines += _compiled(plan)
    lines += [f"\n{option.command}" for option in plan.best]
    lines.append(
        f"\nstate: exact; other memory: predicted; a layout fits if its peak and {MARGIN:.0%} ({MARGIN_OF_PIPELINES:.0%} in a "
        f"pipeline, {MARGIN_OF_XLA_ATTENTION:.0%} with XLA's attention) are within {USABLE} of the memory. "
        f"Speeds are estimates: matmuls at {MATMULS:.0%} of the peak rate of bfloat16 ({FP8_MATMULS:.0%} in FP8), attention, "
        "passes over memory, starts of kernels, and exposed transfers."
    )
    return "\n".join(lines)


def _compiled(plan: Plan) -> list[str]:
    """Says how many layouts the compiler confirms, why it does not confirm others, and what its peaks include."""
    tried = [(_name(option), option.compiled) for option in plan.options if option.compiled]
    lines = [f"compiled layouts: {len(tried)}, the fastest first; {len(plan.best)} fit"]
    for layout, compiled in tried:
        if compiled.peak is None:
            lines.append(f"{layout} cannot be compiled: {compiled.about}")
        elif compiled.peak > plan.usable:
            needs = f"{compiled.peak / _GIB:.1f} GiB of {plan.usable / _GIB:.1f} GiB"
            says = f"{layout} does not fit by the compiler, which needs {needs}"
            lines.append("; ".join(filter(None, (says, compiled.about))))
    return lines + [f"note: {note}" for note in dict.fromkeys(note for _, compiled in tried for note in compiled.notes)]


def _name(option: Option) -> str:
    return f"{option.layout} in FP8" if option.config.is_fp8 else option.layout


def _peak(compiled: Compiled | None) -> str:
    return f"{compiled.peak / _GIB:.1f}" if compiled and compiled.peak is not None else "-"


def _title(plan: Plan) -> str:
    gpus = f"{plan.gpus} x {plan.gpu.upper()}" if plan.gpus > 1 else plan.gpu.upper()
    return (
        f"{plan.name}, {plan.params / 1e9:.2f} billion parameters, {plan.tokens:,} tokens per step on {gpus}, "
        f"{plan.usable / _GIB:.1f} GiB usable each"
    )


def _row(option: Option) -> list[str]:
    config, memory, speed = option.config, option.memory, option.speed
    parts = (memory.state, memory.gradients, memory.gathered, memory.activations, memory.buffers, memory.peak)
    return [
        option.layout,
        config.dtypes.precision,
        config.compile.remat,
        str(config.input.num_microbatches),
        # Other arrays are not predicted if the state alone does not fit.
        *(f"{number / _GIB:.1f}" if number or memory.peak > memory.state else "-" for number in parts),
        f"{speed.exposed / speed.step:.0%}",
        f"{speed.tokens_per_second:,.0f}",
    ]


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def _too_small(plan: Plan) -> str:
    """Says that nothing fits, by how much, and how many GPUs the state needs at least."""
    least = min(plan.options, key=lambda option: option.memory.peak)
    memory, grows = least.memory, 1 + margin(least.config)
    needs = 2 * plan.gpus
    # State and gradients are divided among more GPUs, other arrays stay.
    while (memory.state + memory.gradients) * plan.gpus / needs > plan.usable / grows - memory.gathered - memory.activations:
        needs *= 2
        if needs > _MOST:
            break
    is_state = memory.state > plan.usable
    size, what = (memory.state, "state alone needs") if is_state else (memory.peak * grows, "step with its margin needs")
    return (
        f"does not fit on {plan.gpus}, and not on fewer than {needs}: with {least.layout}, the {what} {size / _GIB:.1f} GiB of "
        f"{plan.usable / _GIB:.1f} GiB"
    )
