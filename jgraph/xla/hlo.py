"""Parses the text of a compiled program: instructions, input-output aliases, and the source line of each operation.

The text is `compiled.as_text()`. Only this file depends on its format.
"""

import math
import re
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

from jgraph.errors import ProfileError

COLLECTIVES: dict[str, str] = {
    **{name: name for name in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")},
    "ragged-all-to-all": "all-to-all",
    "collective-broadcast": "all-gather",
    **dict.fromkeys(("collective-permute", "send", "recv"), "transfer"),
}
"""The pattern of communication of each collective, by opcode without `-start` and `-done`."""

# Device groups: explicit lists, `[groups,size]<=[...]` (an iota that counts through the devices), or a mesh with some axes.
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    r"(\{\{[\d,{}]*\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[[^\]]*\] \{[^}]*\})"
)
_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128, "bf16": 16}
_ARRAY = re.compile(r"\b([a-z]+[a-z0-9]*)\[([0-9,]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# `{output path}: (parameter, {path in the parameter}, kind)`. A path is empty or has one index for each level of tuples.
_ENTRY = r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}(?:, (?:may|must)-alias)?\)"
_ALIASES = re.compile(rf".*input_output_alias=\{{((?:[ ,]*{_ENTRY})*)")
# Ordered side effects such as printing pass a token. JAX puts tokens before the arguments and outputs of the user.
_TOKENS = re.compile(r".*?entry_computation_layout=\{\(((?:token\[\](?:, )?)*).*?->\(?((?:token\[\](?:, )?)*)")
_PACKAGE = Path(__file__).parents[1]
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


@dataclass(frozen=True)
class Shape:
    """The shape and dtype of an array. `str` formats them as XLA does, e.g. `bf16[16,1024]`."""

    dtype: str  # XLA's name, e.g. `bf16`, `f32`, `s32`, `pred` or `f8e4m3fn`
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without padding. 0 for tokens and opaque values."""
        bits = _BITS[self.dtype] if self.dtype in _BITS else int((re.findall(r"\d+", self.dtype) or ["8"])[0])
        return self.size * bits // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One HLO instruction: one line of the text of a program."""

    name: str  # without `%`, e.g. `fusion.3`
    opcode: str
    shapes: tuple[Shape, ...]  # of the arrays in the result, or one with the dtype `token` if it has none
    operands: tuple[str, ...]  # names of the instructions that compute them, in order
    text: str = field(repr=False)  # the whole line

    @property
    def op_name(self) -> str:
        """JAX's name of the operation, e.g. `jit(step)/fft`. Empty for instructions that XLA added."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.text)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    @property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that this instruction calls: of a fusion, loop, branch or reduction. Empty if none."""
        branches = _BRANCHES.search(self.text)
        return (*_CALLED.findall(self.text), *(re.findall(r"[\w.\-]+", branches[1]) if branches else ()))

    @property
    def target(self) -> str:
        """The name of the function that a custom call runs, e.g. `__cublas$gemm`. Empty for other opcodes."""
        found = re.search(r'custom_call_target="([^"]*)"', self.text)
        return found[1] if found else ""

    @property
    def collective(self) -> str:
        """The pattern of communication of a collective, one of the values of `COLLECTIVES`. Empty for other instructions."""
        return COLLECTIVES.get(re.sub(r"-(start|done|update)$", "", self.opcode), "")

    @property
    def is_matmul(self) -> bool:
        """True for a matmul or convolution, including custom calls of cuBLAS. False for a fusion that contains one."""
        return self.opcode in ("dot", "convolution") or "$matmul" in self.target or "$gemm" in self.target

    @property
    def is_attention(self) -> bool:
        """True for a custom call of cuDNN's fused attention, forward or backward."""
        return "fmha" in self.target


@dataclass(frozen=True)
class Computation:
    """A function of a program: the entry computation, or the body of a fusion, loop, branch or reduction."""

    name: str  # without `%`
    instructions: Mapping[str, Instruction]  # in the order of execution; the last one is the root and computes the result

    def parameters(self) -> list[Instruction]:
        """Returns the instructions with the opcode `parameter`, in the order of the arguments of this computation."""
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(re.findall(r"parameter\((\d+)\)", i.text)[0]))


@dataclass(frozen=True)
class HloModule:
    """A compiled program, parsed from `jax.stages.Compiled.as_text()` on first use. Damaged text raises ProfileError."""

    text: str = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses the instructions at once, so that truncated or damaged text raises ProfileError now."""
        module = cls(text)
        if module.entry not in module.computations:
            raise ProfileError("the text does not contain a complete program")
        return module

    @property
    def name(self) -> str:
        """The name of the program, e.g. `jit_step`, which profiles show. Empty if the text has none."""
        found = re.match(r"HloModule ([\w.\-]+)", self.text)
        return found[1] if found else ""

    @property
    def entry(self) -> str:
        """The name of the computation that runs first, without `%`. Empty if the text has none."""
        found = re.search(r"^ENTRY %?([\w.\-]+) \(", self.text, re.MULTILINE)
        return found[1] if found else ""

    @cached_property
    def computations(self) -> dict[str, Computation]:
        """All computations that have instructions, by name, in the order of the text."""
        computations: dict[str, dict[str, Instruction]] = {}
        current = None
        for line in self.text.splitlines():
            if header := _HEADER.match(line):
                current = computations.setdefault(header[2], {})
            elif line.startswith("}"):
                current = None
            elif current is not None and (found := _LINE.match(line)):
                current[found[1]] = _instruction(found[1], line, found.end())
        if current is not None:
            raise ProfileError("the text does not contain a complete program")
        return {name: Computation(name, instructions) for name, instructions in computations.items() if instructions}

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """The instructions of all computations by name. Names are unique in a program."""
        return {name: i for computation in self.computations.values() for name, i in computation.instructions.items()}

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields an instruction and, for a fusion, call or asynchronous start (not a loop), those inside it, recursively."""
        yield instruction
        if instruction.opcode in ("fusion", "async-start", "call"):
            for name in instruction.called:
                if name not in self.computations:
                    raise ProfileError(f"the text of the program is damaged: {instruction.name} calls {name}, which is missing")
                for inner in self.computations[name].instructions.values():
                    yield from self.inside(inner)

    def parts(self, instruction: Instruction) -> list[Instruction]:
        """Returns an instruction and those inside it. The root of a fusion, which determines its purpose, is the second."""
        first, *inner = self.inside(instruction)
        return [first, *(part for part in reversed(inner) if part.opcode not in ("parameter", "constant"))]

    @property
    def collectives(self) -> Counter[tuple[str, str]]:
        """Number of collectives by (key of `COLLECTIVES`, device groups in XLA's notation, e.g. `{{0,1},{2,3}}`, or "")."""
        # An asynchronous collective counts once, and so does a collective in a loop.
        found: Counter[tuple[str, str]] = Counter()
        for instruction in self.instructions.values():
            if (kind := instruction.opcode.removesuffix("-start")) in COLLECTIVES:
                groups = _GROUPS.search(instruction.text)
                found[kind, groups[1] if groups else ""] += 1
        return found

    @property
    def aliases(self) -> dict[int, int]:
        """Maps output leaves in donated buffers to their argument leaves, counted without the tokens of ordered effects."""
        tokens = _TOKENS.match(self.text)
        arguments, outputs = (text.count("token") for text in tokens.groups()) if tokens else (0, 0)
        # JAX passes flat leaves, so a path has at most one index: none for a single output or a separate parameter, one for an
        # output among several or for a parameter in the one tuple that holds them all.
        assert not any("," in output + path for output, _, path in self._aliases), "nested tuples"
        return {int(o or 0) - outputs: int(path or parameter) - arguments for o, parameter, path in self._aliases}

    @cached_property
    def _aliases(self) -> list[tuple[str, str, str]]:
        found = _ALIASES.match(self.text)
        return re.findall(_ENTRY, found[1]) if found else []

    def calls(self, instruction: Instruction) -> Iterator[tuple[str, str]]:
        """Yields (file, line) of the Python calls that traced an instruction, innermost first. Nothing if XLA added it."""
        files, locations, frames = (self._tables.get(name, {}) for name in ("FileNames", "FileLocations", "StackFrames"))
        found = re.search(r"stack_frame_id=(\d+)", instruction.text)
        frame = int(found[1]) if found else 0
        while frame in frames:
            numbers = _numbers(frames[frame])
            location = _numbers(locations.get(numbers.get("file_location_id", 0), ""))
            if file := files.get(location.get("file_name_id", 0)):
                yield file.strip('"'), str(location.get("line", 0))
            # XLA writes parent_frame_id one too high. A parent always precedes its children, and the outermost frame names
            # itself.
            frame = min(numbers.get("parent_frame_id", 0), frame) - 1

    @cached_property
    def _tables(self) -> dict[str, dict[int, str]]:
        """The tables at the top of the text, as rows by number."""
        tables: dict[str, dict[int, str]] = {}
        rows: dict[int, str] = {}
        for line in self.text.splitlines():
            if line.startswith(("%", "ENTRY")):
                break
            if row := re.match(r"(\d+) (.*)$", line):
                rows[int(row[1])] = row[2]
            elif line:
                rows = tables.setdefault(line.strip(), {})
        return tables


@dataclass(frozen=True)
class Op:
    """The origin of an instruction of a compiled program. `str` formats it as `NAME at FILE:LINE`."""

    instruction: str  # XLA's name, e.g. `fft.0`
    name: str = ""  # JAX's name, e.g. `jit(step)/fft`, for a fusion that of its root; empty for instructions that XLA added
    source: str = ""  # `file:line` of a call, relative to the working directory if it is inside; empty without source lines
    target: str = ""  # the function that a custom call runs

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        # A combined collective has the names of all its parts, mostly equal ones.
        return ":".join(dict.fromkeys((self.name or self.instruction).split(":"))) + where


def operations(module: HloModule, instructions: Collection[str]) -> dict[str, Op]:
    """Looks up JAX's name and the source line of instructions, by name. Leaves out names that the program does not have."""
    found = {name: module.instructions[name] for name in instructions if name in module.instructions}
    origins = {name: next((p for p in module.parts(one) if p.op_name), one) for name, one in found.items()}
    return {name: Op(name, at.op_name, source_of(module, at), found[name].target) for name, at in origins.items()}


def source_of(module: HloModule, instruction: Instruction) -> str:
    """Returns `file:line` of the innermost call in the user's code, otherwise in this package, otherwise in a library."""
    calls = [(Path(file), line) for file, line in module.calls(instruction)]
    if not calls:
        return ""
    path, line = min(calls, key=lambda call: _distance(call[0]))
    cwd = Path.cwd()
    return f"{path.relative_to(cwd) if path.is_relative_to(cwd) else path}:{line}"


def _distance(path: Path) -> int:
    """Returns 0 for the user's code, 1 for this package, 2 for a library."""
    if str(path).startswith("<") or not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return 2
    return 2 if path.is_relative_to(_STANDARD_LIBRARY) else int(path.is_relative_to(_PACKAGE))


def _numbers(row: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", row)}


def _instruction(name: str, line: str, start: int) -> Instruction:
    """Parses a line. The shape of the result begins at index `start`."""
    try:
        end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
        opcode, _, _ = line[end:].partition("(")
        opening = end + len(opcode)
        operands = re.findall(r"%([\w.\-]+)", line[opening : _closing(line, opening)])
    except (IndexError, ValueError):
        raise ProfileError(f"the text of the program is truncated or damaged at instruction {name}") from None
    arrays = _ARRAY.findall(line[start:end])
    shapes = tuple(Shape(dtype, tuple(map(int, dims.split(","))) if dims else ()) for dtype, dims in arrays)
    return Instruction(name, opcode.strip(), shapes or (Shape("token", ()),), tuple(operands), line)


def _closing(line: str, start: int) -> int:
    """Returns the index after the parenthesis that closes the one at `start`."""
    depth = 0
    for position in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[position], 0)
        if not depth:
            return position + 1
    return len(line)
