"""One report of a compiled program: what of it is captured, what became of the donated buffers, how much memory it takes.

Everything is read off the compiled program, for the device at hand or for a GPU that is not here.
"""

import contextlib
import dataclasses
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jgraph.errors import ConfigError
from jgraph.xla import aot as targets
from jgraph.xla.capture import CaptureReport, compile_and_report
from jgraph.xla.donation import Donation, donations
from jgraph.xla.hlo import HloModule
from jgraph.xla.options import option_errors

_SHOWN = 8
_HOW = (
    "`graph` full is compiler_options=jgraph.xla.compiler_options('full', platform='gpu'); "
    "`xla_options` name=value are further entries of it"
)


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory by XLA's own account; `aliased` counts the outputs that lie in donated buffers."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> "Memory | None":
        """Returns the memory of a program; None where XLA does not tell."""
        found = compiled.memory_analysis()
        names = ("argument", "output", "alias", "temp")
        return None if found is None else cls(*(getattr(found, f"{name}_size_in_bytes") for name in names))

    @property
    def total(self) -> int:
        """All of it at once, each buffer counted once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def __str__(self) -> str:
        parts = dataclasses.asdict(self) | {"together": self.total}
        return ", ".join(f"{name} {_bytes(number)}" for name, number in parts.items())


@dataclass(frozen=True)
class FP8Products:
    """Matrix products in FP8 of a program compiled for a GPU.

    Attributes:
        products: those whose operands are in FP8.
        transposes: of FP8 arrays, by XLA: passes over memory that a kernel could have saved.
    """

    products: int
    transposes: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> "FP8Products":
        """Counts them in a program's text."""
        text = compiled.as_text() or ""
        if "f8e" not in text:  # to read all of a program takes seconds
            return cls(0, 0)
        instructions = HloModule(text).instructions

        def in_fp8(names: Sequence[str]) -> list[bool]:
            found = [instructions[name].shapes for name in names if name in instructions]
            return [shape.dtype.startswith("f8") for shapes in found for shape in shapes[:1]]

        transposes = [i for i in instructions.values() if i.opcode == "transpose" and any(in_fp8([i.name]))]
        # Of a library's kernels and ours; what quantizes into a pool takes the pool, and gives it.
        calls = [i for i in instructions.values() if i.opcode == "custom-call" and not any(in_fp8([i.name]))]
        return cls(sum(sum(in_fp8(i.operands)) == 2 for i in calls), len(transposes))

    def __str__(self) -> str:
        return f"fp8: {self.products} products, {self.transposes} transposes by XLA"


@dataclass(frozen=True)
class Overlap:
    """Asynchronous collectives of a kind and shape, and how many have a product or a kernel between their start and end."""

    kind: str
    shape: str
    number: int
    hidden: int

    @classmethod
    def of(cls, compiled: jax.stages.Compiled) -> "tuple[Overlap, ...]":
        """Counts them in a program's text, those that are most first."""
        text = compiled.as_text() or ""
        if "-start(" not in text and " async-start" not in text:
            return ()
        module, number, hidden = HloModule(text), Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for start, between in module.overlaps():
            kind = module.collective(start), str(start.shapes[-1])
            number[kind] += 1
            hidden[kind] += any(module.works(one) for one in between)
        return tuple(cls(*kind, count, hidden[kind]) for kind, count in number.most_common())

    def __str__(self) -> str:
        return f"  {self.number} {self.kind} {self.shape}: {self.hidden} behind products or kernels"


@dataclass(frozen=True)
class Explanation:
    """Capture, donations and memory of a compiled program; `str` of it is the report. Made by `explain`.

    Attributes:
        name: of the function.
        device: XLA's name of the GPU or CPU it was compiled for.
        capture: command buffers, and thunks in and outside of them; None where XLA does not tell, and `notes` say why.
        donations: every donated leaf and the output in its buffer.
        memory: None where XLA does not tell.
        fp8: products in FP8, as far as a GPU has any.
        overlaps: asynchronous collectives outside of loops, and how many XLA put something behind.
        notes: what the report could not say, and why.
    """

    name: str
    device: str
    capture: CaptureReport | None
    donations: tuple[Donation, ...]
    memory: Memory | None
    fp8: FP8Products = FP8Products(0, 0)
    overlaps: tuple[Overlap, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def dropped(self) -> tuple[Donation, ...]:
        """Leaves donated for nothing: no output lies in the buffer."""
        return tuple(donation for donation in self.donations if donation.dropped)

    @property
    def crosswise(self) -> tuple[Donation, ...]:
        """Leaves given to another output than the one in their place."""
        return tuple(donation for donation in self.donations if donation.crosswise)

    def to_json(self) -> str:
        """Returns the fields as a JSON object, with `total` in memory, `dropped` and `crosswise` in donations."""
        fields = dataclasses.asdict(self)
        for told, donation in zip(fields["donations"], self.donations, strict=True):
            told |= {"dropped": donation.dropped, "crosswise": donation.crosswise}
        if self.memory is not None:
            fields["memory"]["total"] = self.memory.total
        return json.dumps(fields)

    def __str__(self) -> str:
        lines = [f"{self.name} on {self.device}"]
        if self.capture is not None:
            lines.append(str(self.capture))
        lines += _donation_lines(self.donations)
        if self.memory is not None:
            lines.append(f"memory: {self.memory}")
        if self.fp8.products:
            lines.append(str(self.fp8))
        if self.overlaps:
            lines += ["asynchronous collectives:", *map(str, self.overlaps)]
        if self.capture is not None and any("`graph` full" in o.remedy for o in self.capture.outside):
            lines.append(f"note: {_HOW}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def explain(
    fn: Callable[..., Any],
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    target: str | None = None,
    compiler_options: Mapping[str, str | bool | int | float] | None = None,
) -> Explanation:
    """Reports what XLA made of a function: CUDA graphs, donated buffers, memory. Compiles it and runs nothing.

    As `jax.jit(fn).lower(*args).compile()`, but it reads the compiled program for you, and a GPU need not be here.

    >>> report = jgraph.explain(lambda state, x: state + x, jnp.zeros(4), jnp.ones(4), donate_argnums=0)  # print it
    >>> report.dropped  # leaves donated for nothing
    ()

    Args:
        fn: a function, or the result of `jax.jit`. With `target`, close over static arguments (`functools.partial`).
        args: its positional arguments: pytrees of arrays or `jax.ShapeDtypeStruct`, of which only shapes and dtypes are read.
        donate_argnums: of a plain function, as `jax.jit` takes them; a jitted one has its own.
        target: `h200`, `h100` or `b200` to compile for that GPU without having one; None for the default device of jax.
        compiler_options: as `jgraph.xla.compiler_options` returns them.

    Returns:
        Explanation, whose `str` is the report. It takes the place of jax's warnings about donations.

    Raises:
        ConfigError: `fn` is not a function, or it is jitted and `donate_argnums` are given too.
        CompilerOptionError: XLA refuses an option.
        TargetError: no such target, its compiler is not installed, or the program cannot be compiled without a GPU.
    """
    if not callable(fn):
        raise ConfigError(f"explain takes a function, not {type(fn).__name__}", field="fn")
    jitted: Any = fn
    if not isinstance(fn, jax.stages.Wrapped):
        jitted = jax.jit(fn, donate_argnums=donate_argnums)
    elif donate_argnums not in ((), []):
        raise ConfigError("explain got donate_argnums for a jitted function: give them to jax.jit", field="donate_argnums")
    options = compiler_options or {}
    device = targets.devices(gpu=target)[0] if target else jax.devices()[0]
    with warnings.catch_warnings(), targets.lowering_for(target) if target else contextlib.nullcontext():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        traced = jitted.trace(*(targets.placed(args, gpu=target) if target else args))
        lowered = traced.lower()
    if target:
        compiled, capture = targets.compile_lowered(lowered, options)
    else:
        with option_errors():
            compiled, capture = compile_and_report(lowered, options)
    return Explanation(
        name=getattr(fn, "__name__", type(fn).__name__),
        device=device.device_kind + (", which is not here" if target else ""),
        capture=capture,
        donations=donations(lowered, compiled, _argument_names(traced, lowered)),
        memory=Memory.of(compiled),
        fp8=FP8Products.of(compiled),
        overlaps=Overlap.of(compiled),
        notes=tuple(_notes(capture, target)),
    )


def _notes(capture: CaptureReport | None, target: str | None) -> Iterator[str]:
    if target is not None:
        yield "compiled without the GPU: matrix products are not tuned, so kernels may differ from those on one"
    if capture is None:
        platform = jax.default_backend()
        if platform in ("gpu", "cuda"):
            yield "XLA wrote down no thunks: dumps are off in XLA_FLAGS, or jax's persistent compilation cache had the program"
        else:
            yield f"there are no command buffers on a {platform}: target='h200' says what a GPU would capture"
    elif capture.outside:
        ops = [op for outside in capture.outside for op in outside.ops]
        if not ops:
            yield "the XLA at hand does not say which operations its thunks run: those outside are only counted"
        elif not any(op.source for op in ops):
            yield "the program holds no source lines for the operations outside: jax left them out, or XLA made the operations"


def _argument_names(traced: jax.stages.Traced, lowered: jax.stages.Lowered) -> list[str]:
    """Returns paths of the arguments' leaves, by the function's own names (`state['w']`) or, without names, `args[0]['w']`."""
    infos, _ = jax.tree_util.tree_flatten_with_path(lowered.args_info)
    names = traced.jaxpr.jaxpr.debug_info.arg_names
    if names is not None and len(names) == len(infos) and all(names):
        return list(names)
    roots = ("args", "kwargs")
    return [roots[path[0].idx] + jax.tree_util.keystr(path[1:]) for path, _ in infos]


def _donation_lines(found: Sequence[Donation]) -> Iterator[str]:
    if not found:
        yield "donated: nothing"
        return
    wrong = [donation for donation in found if donation.dropped or donation.crosswise]
    right = [donation for donation in found if not (donation.dropped or donation.crosswise)]
    dropped = sum(donation.dropped for donation in found)
    leaves = f"{len(found)} {'leaf' if len(found) == 1 else 'leaves'} of {_bytes(sum(d.nbytes for d in found))}"
    yield f"donated: {leaves}: {len(right)} reused, {dropped} dropped, {len(wrong) - dropped} crosswise"
    yield from (f"  {donation}" for donation in (*wrong, *right[:_SHOWN]))
    if len(right) > _SHOWN:
        yield f"  and {len(right) - _SHOWN} more"


def _bytes(number: int) -> str:
    power = max(k for k in range(4) if k == 0 or number >= 1024**k)
    return f"{number / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"
