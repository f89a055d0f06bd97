"""Reports the thunks that XLA captured in command buffers, and why others were not captured.

XLA builds command buffers from thunks, the steps of an executable, after the last HLO pass, so the compiled text does not show
them. XLA dumps the thunk sequence before and after into the directory `xla_dump_to`. This module reads that dump.
"""

import contextlib
import itertools
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax

from jgraph.xla import _buffers, _protobuf, cache
from jgraph.xla._buffers import Buffers, Usage
from jgraph.xla.hlo import HloModule, Op, operations
from jgraph.xla.options import OptionValue, option_errors

# Kinds of thunk that each command of `xla_gpu_enable_command_buffer` lets XLA record. Other kinds cannot be recorded.
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
    "COLLECTIVES_KERNEL": "CollectiveKernel",
    "COLLECTIVES": "AllGather AllReduce AllToAll CollectiveBroadcast CollectivePermute Group RaggedAllToAll ReduceScatter "
    "Recv Send",
}
_COMMAND_OF_KIND = {kind: command for command, kinds in _KINDS_OF_COMMAND.items() for kind in kinds.split()}
# Thunks that join or group other thunks and run nothing on the device. XLA records them if it records their contents.
_BOOKKEEPING = {"AsyncStart", "AsyncDone", "Sequential", "WaitForStreams"}
_SEPARATE = "put it first or last in the program, or in a program of its own, so that the rest stays in one piece"
_FFT = "write a short transform as a matmul, or put it first or last in the program"
_CALLBACK = "return the values instead of calling Python with them"
# Custom calls with handlers that can be recorded: Pallas Mosaic kernels. The dump does not show it for others.
_RECORDABLE_CALLS = "mosaic_gpu"
_MOST_SHOWN = 3

_ThunkKey: TypeAlias = tuple[int, str]
"""The number and kind of a thunk, e.g. `(7, "kFft")`."""


class _Why(NamedTuple):
    reason: str
    remedy: str


_CAPTURED = _Why("captured", "")
_OFF = _Why("command buffers are off", "`graph` auto or full")
_UNKNOWN = _Why("XLA gives no reason", "TF_CPP_VMODULE=command_buffer_conversion_pass=3 makes XLA log one")


@dataclass(frozen=True)
class Outside:
    """Thunks (XLA's units of execution) of one kind outside command buffers, for one reason. `str` formats them as text."""

    kind: str  # XLA's name without `k`, e.g. `Fft`; `While` or `Conditional` for the contents of one that cannot be captured
    count: int  # a thunk in a loop counts once
    reason: str
    remedy: str = ""  # arguments of `jgraph.compiler_options` in backticks, XLA options, or a change of the program
    ops: tuple[Op, ...] = ()  # distinct, in program order, or the loop or branch itself; empty if unknown

    def __str__(self) -> str:
        lines = [f"{self.count} {self.kind}: {self.reason}" + (f": {self.remedy}" if self.remedy else "")]
        # Operations with a source line come first, because XLA adds operations of its own between them.
        places = list(dict.fromkeys(str(op) for op in sorted(self.ops, key=lambda op: not op.source)))
        lines += [f"  {place}" for place in places[:_MOST_SHOWN]]
        if len(places) > _MOST_SHOWN:
            lines.append(f"  and {len(places) - _MOST_SHOWN} more")
        return "\n".join(lines)


@dataclass(frozen=True)
class CaptureReport:
    """Counts of the thunks of a program inside and outside command buffers (CUDA graphs). `str` formats the report.

    Attributes:
        command_buffers: Number of command buffers.
        captured: Number of thunks inside command buffers.
        total: Number of all thunks, without those that contain or group others, such as loops.
        outside: The thunks outside, one entry per kind, reason and remedy, sorted by these. Each has `count`.
        buffers: The largest temporary buffers that are in use when the program needs the most memory, largest sum first.
        usage: Temporary memory over the run of the program. None if XLA does not report it.
    """

    command_buffers: int
    captured: int
    total: int
    outside: tuple[Outside, ...] = ()
    buffers: tuple[Buffers, ...] = ()
    usage: Usage | None = None

    @property
    def holds_collectives(self) -> bool:
        """True if there is at least one command buffer and every collective of the program, if any, is inside one."""
        collective = (_COMMAND_OF_KIND.get(outside.kind, "").startswith("COLLECTIVES") for outside in self.outside)
        return self.command_buffers > 0 and not any(collective)

    def __str__(self) -> str:
        summary = f"command buffers: {self.command_buffers}, captured {self.captured} of {self.total} thunks"
        return "\n".join([summary, *(f"outside: {o}".replace("\n", "\n  ") for o in self.outside)]).replace("\n", "\n  ")


def compile_and_report(
    lowered: jax.stages.Lowered, compiler_options: Mapping[str, OptionValue], *, platform: str | None = None
) -> tuple[jax.stages.Compiled, CaptureReport | None]:
    """Compiles a program and reports its command buffers. Does not run it.

    The report is None on a CPU, if options or XLA_FLAGS disable XLA's dumps, or if JAX's cache has the program but no report.
    """
    options: dict[str, Any] = dict(compiler_options)
    if (platform or jax.default_backend()) not in ("gpu", "cuda"):
        with option_errors():
            return lowered.compile(compiler_options=options), None
    program = lowered.compiler_ir()
    assert program is not None
    module = program.operation.attributes["sym_name"].value
    with tempfile.TemporaryDirectory(prefix="jgraph-capture-") as directory, option_errors():
        # Restrict the dump to this module, because the autotuner compiles small ones. Protocol buffers are XLA's shortest
        # format, and selecting a format disables the long text with the buffer assignment.
        dumps = {
            "xla_dump_to": directory,
            "xla_dump_hlo_module_re": f"^{re.escape(module)}$",
            "xla_dump_hlo_as_proto": True,
        } | options
        compiled = lowered.compile(compiler_options=dumps)
        dump = Path(dumps["xla_dump_to"])
        report = _read_dump(dump, module, compiled)
        is_hit = not any(dump.glob("*.before_optimizations*"))  # XLA dumps its input only if it compiles
    stored = cache.report_file(lowered, compiled, options)
    if stored and is_hit:
        return compiled, _load(stored) or report
    if stored and report:
        _store(stored, report)
    return compiled, report


def _store(file: Path, report: CaptureReport) -> None:
    """Writes a report atomically. Does nothing if the directory is not writable."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            new.write(json.dumps(asdict(report)))
        Path(new.name).replace(file)


def _load(file: Path) -> CaptureReport | None:
    """Reads a stored report. Returns None if there is none, it is damaged, or another version wrote it."""
    try:
        fields = json.loads(file.read_text())
        outside = [o | {"ops": tuple(Op(**op) for op in o["ops"])} for o in fields["outside"]]
        buffers = tuple(Buffers(**group) for group in fields.get("buffers", ()))
        if usage := fields.get("usage"):
            usage = Usage(tuple(usage["allocations"]), {scope: tuple(sizes) for scope, sizes in usage["scopes"].items()})
        nested = {"outside": tuple(Outside(**o) for o in outside), "buffers": buffers, "usage": usage}
        return CaptureReport(**fields | nested)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _read_dump(directory: Path, module: str, compiled: jax.stages.Compiled) -> CaptureReport | None:
    before = "thunk_sequence.txt"
    programs = sorted(directory.glob(f"module_*.{module}.{before}"), key=lambda file: file.stat().st_mtime_ns)
    if not programs:
        return None
    program = str(programs[-1]).removesuffix(before)

    def read(suffix: str) -> bytes:
        file = Path(program + suffix)
        return file.read_bytes() if file.exists() else b""

    instructions = thunk_instructions(read("thunk_metadata.pb"))
    text = HloModule(compiled.as_text() or "")
    found = operations(text, set(instructions.values()))
    ops = {thunk: found[instruction] for thunk, instruction in instructions.items() if instruction in found}
    # XLA writes the sequence after its thunk passes only if they changed it.
    thunks = read("thunk_sequence_after_thunk_passes.txt") or read(before)
    report = report_of(thunks.decode(), read("config.pbtxt").decode(), ops)
    optimized = next(directory.glob(f"{Path(program).name}*_after_optimizations.hlo.pb"), None)
    # The other field of XLA's `HloProto` is the program.
    assignment = dict(_protobuf.fields(optimized.read_bytes())).get(3) if optimized else None
    if not isinstance(assignment, bytes):
        return report
    buffers, usage = _buffers.read(assignment, text, found)
    return replace(report, buffers=buffers, usage=usage)


def thunk_instructions(metadata: bytes) -> dict[_ThunkKey, str]:
    """Maps thunks to their HLO instructions, e.g. {(7, "kFft"): "fft.0"}, from the bytes of XLA's `thunk_metadata.pb`."""
    names: dict[_ThunkKey, str] = {}
    for thunk in _protobuf.submessages(_protobuf.fields(metadata), 1):
        for info in _protobuf.submessages(thunk, 1):
            if (number := _protobuf.integer(info, 3)) is not None:
                names[number, _protobuf.text(thunk, 2)] = _protobuf.text(info, 1)
    return names


def report_of(thunks: str, config: str, ops: Mapping[_ThunkKey, Op]) -> CaptureReport:
    """Returns the report of one dump: XLA's thunk sequence, the `config.pbtxt` of the module, and the known operations."""
    size = re.search(r"^\s*xla_gpu_graph_min_graph_size: (\d+)", config, re.MULTILINE)
    rules = _Rules(
        commands=frozenset(re.findall(r"^\s*xla_gpu_enable_command_buffer: (\w+)", config, re.MULTILINE)),
        min_size=int(size[1]) if size else 0,
        unrolls="xla_gpu_command_buffer_unroll_loops: true" in config,
    )
    top = _parse(thunks)
    everything = list(_walk([top]))
    for thunk in everything:
        thunk.op = ops.get((thunk.number, f"k{thunk.kind}"))
        thunk.recordable |= thunk.op is not None and thunk.op.target.startswith(_RECORDABLE_CALLS)
        for inner in _walk([thunk]) if thunk.kind == "CommandBuffer" else ():
            inner.recordable = True
    outside: dict[tuple[str, str, str], list[Op | None]] = {}
    for thunk, why in rules.outside(top.blocks):
        # XLA treats calls of Python and of a solver alike, but only the former, e.g. jax.debug.print, can return values
        # instead.
        python = thunk.kind == "CustomCall" and thunk.op is not None and "callback" in thunk.op.name.rpartition("/")[2]
        outside.setdefault((thunk.kind, why.reason, _CALLBACK if python else why.remedy), []).append(thunk.op)
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
    """A thunk of the dump."""

    kind: str  # XLA's name without its `k`
    indent: int  # its column in the dump
    number: int = 0
    # The thunk sequences inside it: one for a command buffer, condition and body for a loop.
    blocks: list[list["_Thunk"]] = field(default_factory=list)
    recordable: bool = False  # inside a command buffer, or a custom call with a handler that can be recorded
    op: Op | None = None

    @property
    def is_leaf(self) -> bool:
        return not self.blocks and self.kind not in _BOOKKEEPING


def _parse(text: str) -> _Thunk:
    """Parses the tree of thunks by indentation."""
    top = _Thunk("", -1)
    open_thunks = [top]
    label = True  # Labels such as `body:` separate sequences and are not always indented.
    for line in text.splitlines():
        found = re.findall(r"(^ *|  )(\d+): k(\w+)", line)
        for column, (spaces, number, kind) in enumerate(found):
            # The first thunk of a kSequential is on the same line and contains no others.
            indent = len(spaces) if column == 0 else len(line)
            while open_thunks[-1].indent >= indent:
                open_thunks.pop()
            parent = open_thunks[-1]
            thunk = _Thunk(kind, indent, int(number))
            if label or not parent.blocks:
                parent.blocks.append([])
            parent.blocks[-1].append(thunk)
            open_thunks.append(thunk)
            label = False
        label = label or not found
    return top


def _walk(thunks: Sequence[_Thunk]) -> Iterator[_Thunk]:
    for thunk in thunks:
        yield thunk
        for block in thunk.blocks:
            yield from _walk(block)


@dataclass(frozen=True)
class _Rules:
    """The rules by which XLA captures thunks, as far as they matter to users."""

    commands: frozenset[str]
    min_size: int
    unrolls: bool

    def outside(self, blocks: list[list[_Thunk]], around: tuple[_Thunk, _Why] | None = None) -> Iterator[tuple[_Thunk, _Why]]:
        """Yields every leaf outside command buffers with the reason. If an enclosing loop is the reason, yields `around`."""
        remedy = "`xla_options` xla_gpu_graph_min_graph_size=1, or `graph` full"
        too_few = _Why(f"fewer than {self.min_size} in a row", remedy)
        for block in blocks:
            for obstacle, row in itertools.groupby(block, self.obstacle):
                if obstacle is _CAPTURED:
                    continue
                thunks = list(row)
                is_short = sum(t.kind not in ("AsyncStart", "AsyncDone") for t in _walk(thunks)) < self.min_size
                why = obstacle or (too_few if is_short else _UNKNOWN)
                for thunk in thunks:
                    if thunk.kind in ("While", "Conditional"):
                        yield from self.outside(thunk.blocks, (thunk, why))
                    elif thunk.blocks:
                        yield from self.outside(thunk.blocks, around or (thunk, why))
                    elif thunk.is_leaf:
                        yield (thunk, why) if obstacle or around is None else around

    def obstacle(self, thunk: _Thunk) -> _Why | None:
        """Returns why XLA cannot record a thunk with its contents. None if it can, given enough neighbours."""
        if thunk.kind == "CommandBuffer":
            return _CAPTURED  # ends a row of recordable thunks
        if not self.commands:
            return _OFF if any(t.is_leaf for t in _walk([thunk])) else None
        inner = [t for block in thunk.blocks for t in _walk(block)]
        found = {why.reason: why.remedy for why in self.alone(thunk)}
        if thunk.kind == "While" and not self.unrolls and any(t.kind == "DynamicSliceFusion" for t in inner):
            found["the loop slices an array by its counter"] = (
                "`xla_options` xla_gpu_command_buffer_unroll_loops=true, or unroll it"
            )
        for t in inner:
            for why in self.alone(t):
                holds = "" if thunk.kind in _BOOKKEEPING else f"it holds {t.kind}: "
                if why.reason not in found:
                    found[holds + why.reason] = why.remedy
        return _Why(" and ".join(found), "; ".join(dict.fromkeys(found.values()))) if found else None

    def alone(self, thunk: _Thunk) -> Iterator[_Why]:
        """Yields why XLA cannot record a thunk, regardless of its contents."""
        if thunk.kind == "CommandBuffer" or thunk.kind in _BOOKKEEPING:
            return
        command = _COMMAND_OF_KIND.get(thunk.kind)
        if command is None:
            yield _Why("XLA has no command for it", _FFT if thunk.kind == "Fft" else _SEPARATE)
        elif command not in self.commands:
            is_excluded = command in ("CONDITIONAL", "WHILE") and "COLLECTIVES" in self.commands
            remedy = "unroll it: no graph can have branches and collectives" if is_excluded else "`graph` full"
            yield _Why(f"{command} is off by default", remedy)
        elif thunk.kind == "CustomCall" and not thunk.recordable:
            remedy = f"{_SEPARATE}; a kernel of your own can be registered as COMMAND_BUFFER_COMPATIBLE"
            or_few = f", or there are fewer than {self.min_size} in a row" if self.min_size > 1 else ""
            yield _Why(f"its handler does not declare that it can be recorded{or_few}", remedy)
