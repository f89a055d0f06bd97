"""What XLA put into command buffers, and why the rest stayed outside.

Command buffers are made from thunks, the steps of an executable, after the last HLO pass: the compiled text does not show them.
XLA writes the thunks down, before and after, into the directory that `xla_dump_to` names; that is what is read here.
"""

import itertools
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

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
_VERBOSE = "TF_CPP_VMODULE=command_buffer_conversion_pass=3 makes XLA say why"


@dataclass(frozen=True)
class Outside:
    """Thunks of one kind that run outside command buffers, for one reason.

    Attributes:
        kind: XLA's name of the thunk without its `k`, e.g. `Fft`. Thunks held back by the loop or branch around them are
            counted under `While` or `Conditional`.
        count: how many, each counted once however often a loop runs it.
        reason: in plain words, with the flag that changes it where there is one.
    """

    kind: str
    count: int
    reason: str


@dataclass(frozen=True)
class CaptureReport:
    """What a compiled program launches: `captured` of `total` thunks in `command_buffers`; `outside` accounts for the rest."""

    command_buffers: int
    captured: int
    total: int
    outside: tuple[Outside, ...] = ()

    def __str__(self) -> str:
        summary = f"command buffers: {self.command_buffers}, captured {self.captured} of {self.total} thunks"
        return "\n".join([summary, *(f"  outside: {o.count} {o.kind}: {o.reason}" for o in self.outside)])


def compile_and_report(
    lowered: jax.stages.Lowered, compiler_options: Mapping[str, str | bool | int | float], *, platform: str | None = None
) -> tuple[jax.stages.Compiled, CaptureReport | None]:
    """Compiles, and reads off what was captured.

    The thunks are found through a dump into a temporary directory, which is removed again.

    Args:
        lowered: from `jax.jit(f).lower(...)`.
        compiler_options: as `jgraph.graph.compiler_options` returns them.
        platform: the one `lowered` is for, `cpu` or `gpu`/`cuda`; the default backend's by default.

    Returns:
        The compiled program, and the report; None for a platform without command buffers, and where XLA wrote nothing down:
        the options turn dumps off, or jax's persistent compilation cache had the program.
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
        options = {
            "xla_dump_to": directory,
            "xla_dump_hlo_module_re": f"^{re.escape(module)}$",
            "xla_dump_hlo_as_proto": True,
        } | options
        compiled = lowered.compile(compiler_options=options)
        return compiled, _read_dump(Path(options["xla_dump_to"]), module)


def _read_dump(directory: Path, module: str) -> CaptureReport | None:
    before = "thunk_sequence.txt"
    programs = sorted(directory.glob(f"module_*.{module}.{before}"), key=lambda file: file.stat().st_mtime_ns)
    if not programs:
        return None
    program = str(programs[-1]).removesuffix(before)

    def read(suffix: str) -> str:
        file = Path(program + suffix)
        return file.read_text() if file.exists() else ""

    # XLA writes the thunks as they are before its passes, and again only if those changed something.
    return report_of(read("thunk_sequence_after_thunk_passes.txt") or read(before), read("config.pbtxt"))


def report_of(thunks: str, config: str) -> CaptureReport:
    """The report of one dump.

    Args:
        thunks: XLA's `thunk_sequence_after_thunk_passes.txt`; the one without `_after_thunk_passes` if that is absent.
        config: XLA's `config.pbtxt` of the same module, which says what it was allowed to capture.
    """
    size = re.search(r"^\s*xla_gpu_graph_min_graph_size: (\d+)", config, re.MULTILINE)
    reasons = _Reasons(
        commands=frozenset(re.findall(r"^\s*xla_gpu_enable_command_buffer: (\w+)", config, re.MULTILINE)),
        min_size=int(size[1]) if size else 0,
        unrolls="xla_gpu_command_buffer_unroll_loops: true" in config,
    )
    top = _parse(thunks)
    everything = list(_walk([top]))
    outside = Counter(reasons.outside(top.blocks))
    total = sum(1 for thunk in everything if thunk.is_leaf)
    return CaptureReport(
        command_buffers=sum(thunk.kind == "CommandBuffer" for thunk in everything),
        captured=total - outside.total(),
        total=total,
        outside=tuple(Outside(kind, count, reason) for (kind, reason), count in sorted(outside.items())),
    )


@dataclass
class _Thunk:
    """A line of the dump. Blocks are the sequences it holds: one of a command buffer, condition and body of a loop."""

    kind: str
    indent: int
    blocks: list[list["_Thunk"]] = field(default_factory=list)

    @property
    def is_leaf(self) -> bool:
        return not self.blocks and self.kind not in _BOOKKEEPING


def _parse(text: str) -> _Thunk:
    """A tree by indentation, with two of XLA's habits: labels such as `body:` separate sequences and are not always indented;
    the first thunk of a kSequential stands on the same line, and has nothing below it."""
    top = _Thunk("", -1)
    open_thunks = [top]
    label = True
    for line in text.splitlines():
        found = re.findall(r"(^ *|  )\d+: k(\w+)", line)
        for column, (spaces, kind) in enumerate(found):
            indent = len(spaces) if column == 0 else len(line)
            while open_thunks[-1].indent >= indent:
                open_thunks.pop()
            parent, thunk = open_thunks[-1], _Thunk(kind, indent)
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

    def outside(self, blocks: list[list[_Thunk]], around: tuple[str, str] | None = None) -> Iterator[tuple[str, str]]:
        """(kind, reason) of every leaf that no command buffer holds. `around` speaks for those a loop holds back."""
        for block in blocks:
            for reason, run in itertools.groupby(block, self.of):
                thunks = list(run)
                short = sum(t.kind not in ("AsyncStart", "AsyncDone") for t in _walk(thunks)) < self.min_size
                for thunk in thunks:
                    if thunk.kind == "CommandBuffer":
                        continue
                    why = reason or (
                        f"fewer than {self.min_size} in a row: xla_gpu_graph_min_graph_size" if short else _VERBOSE
                    )
                    if thunk.kind in ("While", "Conditional"):
                        yield from self.outside(thunk.blocks, (thunk.kind, why))
                    elif thunk.blocks:
                        yield from self.outside(thunk.blocks, around or (thunk.kind, why))
                    elif thunk.is_leaf:
                        yield (thunk.kind, why) if reason or around is None else around

    def of(self, thunk: _Thunk) -> str:
        """Why XLA cannot record this thunk; empty if it can, given enough neighbours."""
        if thunk.kind in _BOOKKEEPING:
            return next(filter(None, (self.of(t) for block in thunk.blocks for t in block)), "")
        if thunk.kind == "CommandBuffer":
            return "captured"  # ends the row of those that could be recorded
        if not self.commands:
            return "command buffers are off: --graph auto or full"
        command = _COMMAND_OF_KIND.get(thunk.kind)
        if command is None:
            return "XLA has no command for it, as for all host copies, callbacks and calls of cuFFT or a solver"
        if command not in self.commands:
            full = command not in ("COLLECTIVES", "HOST_EXECUTE")
            return f"{command} is off by default" + (": --graph full" if full else ", and in --graph full: it is not safe yet")
        if thunk.kind == "CustomCall":
            return "its handler does not say that it can be recorded"
        inner = [t for block in thunk.blocks for t in _walk(block)]
        if thunk.kind == "While" and not self.unrolls and any(t.kind == "DynamicSliceFusion" for t in inner):
            return (
                "the loop slices an array by its counter: --xla-options xla_gpu_command_buffer_unroll_loops=true, or unroll it"
            )
        for t in inner if thunk.kind in ("While", "Conditional", "DynamicSliceFusion") else ():
            if t.kind not in ("CommandBuffer", *_BOOKKEEPING) and (reason := self.of(t)):
                return f"it holds {t.kind}, and {reason}"
        return ""
