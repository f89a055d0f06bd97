"""What XLA put into command buffers, and why the rest stayed outside.

Command buffers are made from thunks, the steps of an executable, after the last HLO pass: the compiled text does not show them.
XLA writes the thunks down, before and after, into the directory that `xla_dump_to` names; that is what is read here.
"""

import contextlib
import itertools
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jgraph.xla import cache
from jgraph.xla.hlo import HloModule
from jgraph.xla.source import Op, operations, thunk_instructions

# Which command of `xla_gpu_enable_command_buffer` lets XLA record which kinds of thunk; other kinds cannot be recorded.
_KINDS_OF_COMMAND = {
    "FUSION": "Kernel CustomKernel Copy PartitionId ReplicaId",
    "WHILE": "While",
    "CONDITIONAL": "Conditional",
    "CUBLAS": "Gemm",
    "CUBLASLT": "CublasLtMatmul",
    "CUDNN": "CuDnn",
    "CONVOLUTION": "Convolution",
    "CUSTOM_CALL": "CustomCall SelectK",
    "DYNAMIC_SLICE_FUSION": "DynamicSliceFusion",
    "HOST_EXECUTE": "HostExecuteStart HostExecuteDone",
    "COLLECTIVES_KERNEL": "CollectiveKernel",
    "COLLECTIVES": "AllGather AllReduce AllToAll CollectiveBroadcast CollectivePermute Group RaggedAllToAll ReduceScatter "
    "Recv Send",
}
_COMMAND_OF_KIND = {kind: command for command, kinds in _KINDS_OF_COMMAND.items() for kind in kinds.split()}
# Only join or group others: nothing of their own runs on the device, and they are recorded if what they hold is.
_BOOKKEEPING = {"AsyncStart", "AsyncDone", "Sequential", "WaitForStreams"}
_UNROLL = "xla_gpu_command_buffer_unroll_loops=true"
# What a program can do instead of a thunk that XLA has no command for.
_REWRITES = {
    "Fft": "write a short transform as a matrix product, or put it first or last in the program",
    "Infeed": "pass the values as arguments",
    "Outfeed": "return the values",
}
_ELSEWHERE = "put it first or last in the program, or in a program of its own, so that the rest stays in one piece"
_CALLBACK = "return the values instead of calling Python with them"
_SHOWN = 3
# Calls whose handlers say that they can be recorded: kernels of Pallas' Mosaic. Of others the dump tells nothing.
_RECORDABLE_CALLS = ("mosaic_gpu",)


class _Why(NamedTuple):
    reason: str
    remedy: str


_OFF = _Why("command buffers are off", "`graph` auto or full")
_UNKNOWN = _Why("XLA does not say why", "TF_CPP_VMODULE=command_buffer_conversion_pass=3 makes XLA say why")


@dataclass(frozen=True)
class Outside:
    """Thunks of one kind that run outside command buffers, for one reason.

    Attributes:
        kind: XLA's name of the thunk without its `k`, e.g. `Fft`. Thunks held back by the loop or branch around them are
            counted under `While` or `Conditional`.
        count: how many, each counted once however often a loop runs it.
        reason: in plain words.
        remedy: what would bring them in: arguments of `compiler_options`, options of XLA, or another way to write it.
        ops: the operations they run, each once, in order; of those that a loop or branch holds back, the loop or branch. Empty
            where the installed XLA does not tell.
    """

    kind: str
    count: int
    reason: str
    remedy: str = ""
    ops: tuple[Op, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.count} {self.kind}: {self.reason}" + (f": {self.remedy}" if self.remedy else "")]
        # First those that have a line: XLA makes operations of its own between them.
        places = list(dict.fromkeys(str(op) for op in sorted(self.ops, key=lambda op: not op.source)))
        lines += [f"  {place}" for place in places[:_SHOWN]]
        if len(places) > _SHOWN:
            lines.append(f"  and {len(places) - _SHOWN} more")
        return "\n".join(lines)


@dataclass(frozen=True)
class CaptureReport:
    """Counts what a compiled program launches: `captured` of `total` thunks in `command_buffers`; `outside` lists the rest."""

    command_buffers: int
    captured: int
    total: int
    outside: tuple[Outside, ...] = ()

    @property
    def holds_collectives(self) -> bool:
        """Whether the collectives that there are lie in command buffers, all of them."""
        collective = (_COMMAND_OF_KIND.get(outside.kind, "").startswith("COLLECTIVES") for outside in self.outside)
        return self.command_buffers > 0 and not any(collective)

    def __str__(self) -> str:
        summary = f"command buffers: {self.command_buffers}, captured {self.captured} of {self.total} thunks"
        return "\n".join([summary, *(f"outside: {o}".replace("\n", "\n  ") for o in self.outside)]).replace("\n", "\n  ")


def compile_and_report(
    lowered: jax.stages.Lowered, compiler_options: Mapping[str, str | bool | int | float], *, platform: str | None = None
) -> tuple[jax.stages.Compiled, CaptureReport | None]:
    """Compiles, and reads off what was captured.

    The thunks are found through a dump into a temporary directory, which is removed again. Of a program that comes out of
    jax's persistent compilation cache, the report is the one that was kept when it was compiled (`jgraph.xla.cache`).

    Args:
        lowered, compiler_options: from `jax.jit(f).lower(...)` and `jgraph.xla.compiler_options`.
        platform: the one `lowered` is for, `cpu` or `gpu`/`cuda`; the default backend's by default.

    Returns:
        The compiled program, and the report; None for a platform without command buffers, and where XLA wrote nothing down:
        the options turn dumps off, or the cache has the program and no report of it.
    """
    options: dict[str, Any] = dict(compiler_options)
    if (platform or jax.default_backend()) not in ("gpu", "cuda"):
        return lowered.compile(compiler_options=options), None
    program = lowered.compiler_ir()
    assert program is not None
    module = program.operation.attributes["sym_name"].value
    with tempfile.TemporaryDirectory(prefix="jgraph-capture-") as directory:
        # The module itself and not the small ones that the autotuner compiles, as protocol buffers: the shortest of XLA's
        # formats, and naming one turns off the long text with the buffer assignment.
        dumps = {
            "xla_dump_to": directory,
            "xla_dump_hlo_module_re": f"^{re.escape(module)}$",
            "xla_dump_hlo_as_proto": True,
        } | options
        compiled = lowered.compile(compiler_options=dumps)
        report = _read_dump(Path(dumps["xla_dump_to"]), module, compiled)
        # XLA writes down what it is given only where it compiles.
        hit = not any(Path(dumps["xla_dump_to"]).glob("*.before_optimizations*"))
    kept = cache.report_file(lowered, compiled, options)
    if kept and hit:
        return compiled, _kept(kept) or report
    if kept and report:
        _keep(kept, report)
    return compiled, report


def _keep(file: Path, report: CaptureReport) -> None:
    """Writes a report, if that is possible; other processes see all of it or nothing."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            new.write(json.dumps(asdict(report)))
        Path(new.name).replace(file)


def _kept(file: Path) -> CaptureReport | None:
    """Reads a report that was kept; None where there is none, or another version wrote it."""
    try:
        fields = json.loads(file.read_text())
        outside = [o | {"ops": tuple(Op(**op) for op in o["ops"])} for o in fields["outside"]]
        return CaptureReport(**fields | {"outside": tuple(Outside(**o) for o in outside)})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _read_dump(directory: Path, module: str, compiled: jax.stages.Compiled) -> CaptureReport | None:
    before = "thunk_sequence.txt"
    programs = sorted(directory.glob(f"module_*.{module}.{before}"), key=lambda file: file.stat().st_mtime_ns)
    if not programs:
        return None
    program = str(programs[-1]).removesuffix(before)

    def read(suffix: str) -> str:
        file = Path(program + suffix)
        return file.read_text() if file.exists() else ""

    metadata = Path(program + "thunk_metadata.pb")
    instructions = thunk_instructions(metadata.read_bytes()) if metadata.exists() else {}
    known = operations(HloModule(compiled.as_text() or ""), set(instructions.values()))
    ops = {thunk: known[instruction] for thunk, instruction in instructions.items() if instruction in known}
    # XLA writes the thunks as they are before its passes, and again only if those changed something.
    return report_of(read("thunk_sequence_after_thunk_passes.txt") or read(before), read("config.pbtxt"), ops)


def report_of(thunks: str, config: str, ops: Mapping[tuple[int, str], Op] | None = None) -> CaptureReport:
    """Returns the report of one dump.

    Args:
        thunks: XLA's `thunk_sequence_after_thunk_passes.txt`; the one without `_after_thunk_passes` if that is absent.
        config: XLA's `config.pbtxt` of the same module, which says what it was allowed to capture.
        ops: the operation that each thunk runs, by its number and kind (`kFft`), as far as known.
    """
    size = re.search(r"^\s*xla_gpu_graph_min_graph_size: (\d+)", config, re.MULTILINE)
    reasons = _Reasons(
        commands=frozenset(re.findall(r"^\s*xla_gpu_enable_command_buffer: (\w+)", config, re.MULTILINE)),
        min_size=int(size[1]) if size else 0,
        unrolls="xla_gpu_command_buffer_unroll_loops: true" in config,
    )
    top = _parse(thunks)
    everything = list(_walk([top]))
    for thunk in everything:
        op = (ops or {}).get((thunk.number, f"k{thunk.kind}"))
        thunk.recordable |= op is not None and op.target.startswith(_RECORDABLE_CALLS)
        for held in _walk([thunk]) if thunk.kind == "CommandBuffer" else ():
            held.recordable = True
    outside: dict[tuple[str, str, str], list[Op | None]] = {}
    for thunk, why in reasons.outside(top.blocks):
        op = (ops or {}).get((thunk.number, f"k{thunk.kind}"))
        # Calls of Python and of a solver are the same to XLA, and not to who wrote them: jax.debug.print and its like.
        python = thunk.kind == "CustomCall" and op is not None and "callback" in op.name.rpartition("/")[2]
        outside.setdefault((thunk.kind, why.reason, _CALLBACK if python else why.remedy), []).append(op)
    total = sum(thunk.is_leaf for thunk in everything)
    return CaptureReport(
        command_buffers=sum(thunk.kind == "CommandBuffer" for thunk in everything),
        captured=total - sum(map(len, outside.values())),
        total=total,
        outside=tuple(
            Outside(kind, len(found), reason, remedy, tuple(dict.fromkeys(filter(None, found))))
            for (kind, reason, remedy), found in sorted(outside.items())
        ),
    )


@dataclass
class _Thunk:
    """A line of the dump. Blocks are the sequences it holds: one of a command buffer, condition and body of a loop.

    Of a custom call, `recordable` says that it is known to be so.
    """

    kind: str
    indent: int
    number: int = 0
    blocks: list[list["_Thunk"]] = field(default_factory=list)
    recordable: bool = False

    @property
    def is_leaf(self) -> bool:
        return not self.blocks and self.kind not in _BOOKKEEPING


def _parse(text: str) -> _Thunk:
    """Reads a tree by indentation. Labels such as `body:` separate sequences and are not always indented; the first thunk of a
    kSequential stands on the same line, and has nothing below it."""
    top = _Thunk("", -1)
    open_thunks = [top]
    label = True
    for line in text.splitlines():
        found = re.findall(r"(^ *|  )(\d+): k(\w+)", line)
        for column, (spaces, number, kind) in enumerate(found):
            indent = len(spaces) if column == 0 else len(line)
            while open_thunks[-1].indent >= indent:
                open_thunks.pop()
            parent, thunk = open_thunks[-1], _Thunk(kind, indent, int(number))
            if label or not parent.blocks:
                parent.blocks.append([])
            parent.blocks[-1].append(thunk)
            open_thunks.append(thunk)
            label = False
        label = label or not found
    return top


def _walk(thunks: list[_Thunk]) -> Iterator[_Thunk]:
    for thunk in thunks:
        yield thunk
        for block in thunk.blocks:
            yield from _walk(block)


@dataclass(frozen=True)
class _Reasons:
    """XLA's rules for what it records, as far as they matter to a user."""

    commands: frozenset[str]
    min_size: int
    unrolls: bool

    def outside(self, blocks: list[list[_Thunk]], around: tuple[_Thunk, _Why] | None = None) -> Iterator[tuple[_Thunk, _Why]]:
        """Finds every leaf that no command buffer holds, and why. `around` speaks for those that a loop holds back."""
        remedy = "`xla_options` xla_gpu_graph_min_graph_size=1, or `graph` full"
        too_few = _Why(f"fewer than {self.min_size} in a row", remedy)
        for block in blocks:
            for obstacle, run in itertools.groupby(block, self.of):
                thunks = list(run)
                short = sum(t.kind not in ("AsyncStart", "AsyncDone") for t in _walk(thunks)) < self.min_size
                for thunk in thunks:
                    if thunk.kind == "CommandBuffer":
                        continue
                    why = obstacle or (too_few if short else _UNKNOWN)
                    if thunk.kind in ("While", "Conditional"):
                        yield from self.outside(thunk.blocks, (thunk, why))
                    elif thunk.blocks:
                        yield from self.outside(thunk.blocks, around or (thunk, why))
                    elif thunk.is_leaf:
                        yield (thunk, why) if obstacle or around is None else around

    def of(self, thunk: _Thunk) -> _Why | None:
        """Says why XLA cannot record this thunk with all that it holds; None if it can, given enough neighbours."""
        if thunk.kind == "CommandBuffer":
            return _Why("captured", "")  # ends the row of those that could be recorded
        if not self.commands:
            return _OFF if any(t.is_leaf for t in _walk([thunk])) else None
        inside = [t for block in thunk.blocks for t in _walk(block)]
        found = {why.reason: why.remedy for why in self.alone(thunk)}
        if thunk.kind == "While" and not self.unrolls and any(t.kind == "DynamicSliceFusion" for t in inside):
            found["the loop slices an array by its counter"] = f"`xla_options` {_UNROLL}, or unroll it"
        for t in inside:
            for why in self.alone(t):
                holds = "" if thunk.kind in _BOOKKEEPING else f"it holds {t.kind}: "
                if why.reason not in found:
                    found[holds + why.reason] = why.remedy
        return _Why(" and ".join(found), "; ".join(dict.fromkeys(found.values()))) if found else None

    def alone(self, thunk: _Thunk) -> Iterator[_Why]:
        """Says what of the thunk itself keeps it from being recorded, leaving aside what it holds."""
        command = _COMMAND_OF_KIND.get(thunk.kind)
        if thunk.kind == "CommandBuffer" or thunk.kind in _BOOKKEEPING:
            return
        if command is None:
            yield _Why("XLA has no command for it", _REWRITES.get(thunk.kind, _ELSEWHERE))
        elif command not in self.commands:
            remedies = {"HOST_EXECUTE": "none: no training step computes on the host"}
            if "COLLECTIVES" in self.commands:
                remedies |= dict.fromkeys(("CONDITIONAL", "WHILE"), "unroll it: no graph can have branches and collectives")
            yield _Why(f"{command} is off by default", remedies.get(command, "`graph` full"))
        elif thunk.kind == "CustomCall" and not thunk.recordable:
            remedy = f"{_ELSEWHERE}; a kernel of your own can be registered as COMMAND_BUFFER_COMPATIBLE"
            or_few = f", or there are fewer than {self.min_size} in a row" if self.min_size > 1 else ""
            yield _Why(f"its handler does not say that it can be recorded{or_few}", remedy)
