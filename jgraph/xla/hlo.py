"""XLA's text of a compiled program, read: instructions, aliases, and the stack of calls behind each operation.

The text is `compiled.as_text()`. This is the only file that knows how it is written.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from jgraph.errors import ProfileError

# What only moves, names or casts values.
_MOVES = {
    *("parameter", "constant", "bitcast", "bitcast-convert", "tuple", "get-tuple-element", "iota", "broadcast", "convert"),
    *("copy", "copy-start", "copy-done", "transpose", "reshape", "reverse", "pad", "concatenate"),
    *("slice", "dynamic-slice", "dynamic-update-slice", "gather"),
}
_COLLECTIVES = {
    *("all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all"),
    *("reduce-scatter", "recv", "send"),
}
# Lists of devices; `[groups,size]<=[...]`, which counts through them; or a mesh and some of its axes.
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
# `{output path}: (parameter, {path in the parameter}, kind)`. A path is empty, or one index a level of tuples.
_ENTRY = r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}(?:, (?:may|must)-alias)?\)"
_ALIASES = re.compile(rf".*input_output_alias=\{{((?:[ ,]*{_ENTRY})*)")
# Ordered side effects, such as printing, pass a token that jax puts before the arguments and outputs of the user.
_TOKENS = re.compile(r".*?entry_computation_layout=\{\(((?:token\[\](?:, )?)*).*?->\(?((?:token\[\](?:, )?)*)")


@dataclass(frozen=True)
class Shape:
    """The shape and dtype of an array, e.g. `bf16[16,1024]`."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        bits = _BITS[self.dtype] if self.dtype in _BITS else int((re.findall(r"\d+", self.dtype) or ["8"])[0])
        return self.size * bits // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a program, `text`: its name without `%`, XLA's opcode, the shapes of its results, its operands' names."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    text: str = field(repr=False)

    @property
    def op_name(self) -> str:
        """jax's name of the operation, e.g. `jit(step)/fft`; empty where XLA made it by itself."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.text)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it calls."""
        branches = _BRANCHES.search(self.text)
        return (*_CALLED.findall(self.text), *(re.findall(r"[\w.\-]+", branches[1]) if branches else ()))

    @property
    def target(self) -> str:
        """The target of a custom call."""
        found = re.search(r'custom_call_target="([^"]*)"', self.text)
        return found[1] if found else ""

    @property
    def is_product(self) -> bool:
        return self.opcode in ("dot", "convolution") or "$matmul" in self.target or "$gemm" in self.target

    @property
    def is_attention(self) -> bool:
        return "fmha" in self.target

    @property
    def only_moves(self) -> bool:
        return self.opcode in _MOVES


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in order; the last is the root."""

    name: str
    instructions: Mapping[str, Instruction]

    @property
    def root(self) -> Instruction:
        return list(self.instructions.values())[-1]

    def parameters(self) -> list[Instruction]:
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(re.findall(r"parameter\((\d+)\)", i.text)[0]))


@dataclass(frozen=True)
class HloModule:
    """A compiled program; each part of `text` is read when it is first asked for."""

    text: str = field(repr=False)

    @classmethod
    def of(cls, text: str) -> Self:
        """Reads all of a text. Raises ProfileError for one that is cut or none at all."""
        module = cls(text)
        if module.entry not in module.computations:
            raise ProfileError("there is no whole program in the text")
        return module

    @property
    def name(self) -> str:
        """The program's name, as profilers give it."""
        found = re.match(r"HloModule ([\w.\-]+)", self.text)
        return found[1] if found else ""

    @property
    def entry(self) -> str:
        """The name of the computation that is run."""
        found = re.search(r"^ENTRY %?([\w.\-]+) \(", self.text, re.MULTILINE)
        return found[1] if found else ""

    @cached_property
    def computations(self) -> dict[str, Computation]:
        """All computations by name. Raises ProfileError where the text is cut."""
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
            raise ProfileError("there is no whole program in the text")
        return {name: Computation(name, instructions) for name, instructions in computations.items() if instructions}

    @cached_property
    def instructions(self) -> dict[str, Instruction]:
        """All instructions by name; names are unique in a program."""
        return {name: i for computation in self.computations.values() for name, i in computation.instructions.items()}

    @property
    def collectives(self) -> Counter[tuple[str, str]]:
        """Counts collectives by kind and groups of devices as XLA writes these; of an asynchronous one, what starts it."""
        found: Counter[tuple[str, str]] = Counter()
        for instruction in self.instructions.values():
            if (kind := instruction.opcode.removesuffix("-start")) in _COLLECTIVES:
                groups = _GROUPS.search(instruction.text)
                found[kind, groups[1] if groups else ""] += 1
        return found

    def overlaps(self) -> Iterator[tuple[Instruction, list[Instruction]]]:
        """Yields what starts an asynchronous collective of the entry, and what the schedule has between that and its end."""
        if self.entry not in self.computations:
            return
        found = list(self.computations[self.entry].instructions.values())
        places = {instruction.name: place for place, instruction in enumerate(found)}
        for end, done in enumerate(found):
            start = places.get(done.operands[0], end) if done.opcode.endswith("-done") else end
            if self.collective(found[start]) and start < end:
                yield found[start], found[start + 1 : end]

    def collective(self, instruction: Instruction) -> str:
        """Returns the kind of collective that an instruction starts, or is: `all-gather`, say; empty for any other."""
        called = [self.computations[name].root.opcode for name in instruction.called if name in self.computations]
        opcode = called[0] if instruction.opcode == "async-start" and called else instruction.opcode
        return kind if (kind := opcode.removesuffix("-start")) in _COLLECTIVES else ""

    def works(self, instruction: Instruction) -> bool:
        """Returns whether an instruction is or has in it a matrix product, attention, or another kernel that was not XLA's."""
        called = (self.computations[name] for name in instruction.called if name in self.computations)
        parts = [instruction, *(part for computation in called for part in computation.instructions.values())]
        return any(part.is_product or part.opcode == "custom-call" for part in parts)

    @property
    def aliases(self) -> dict[int, int]:
        """Flat index of an output leaf to that of the argument leaf whose buffer it takes; tokens are not counted."""
        tokens = _TOKENS.match(self.text)
        arguments, outputs = (text.count("token") for text in tokens.groups()) if tokens else (0, 0)
        # jax hands over flat leaves, so a path has one index at most: none for a single output or a parameter by itself, and
        # one for an output among several or a parameter inside the one tuple that holds them all.
        assert not any("," in output + path for output, _, path in self._aliases), "nested tuples"
        return {int(o or 0) - outputs: int(path or parameter) - arguments for o, parameter, path in self._aliases}

    @cached_property
    def _aliases(self) -> list[tuple[str, str, str]]:
        found = _ALIASES.match(self.text)
        return re.findall(_ENTRY, found[1]) if found else []

    def calls(self, instruction: Instruction) -> Iterator[tuple[str, str]]:
        """Yields (file, line) of the call that made an operation and of its callers, innermost first."""
        files, locations, frames = (self._tables.get(name, {}) for name in ("FileNames", "FileLocations", "StackFrames"))
        found = re.search(r"stack_frame_id=(\d+)", instruction.text)
        frame = int(found[1]) if found else 0
        while frame in frames:
            numbers = _numbers(frames[frame])
            location = _numbers(locations.get(numbers.get("file_location_id", 0), ""))
            if file := files.get(location.get("file_name_id", 0)):
                yield file.strip('"'), str(location.get("line", 0))
            # The number of a caller is written one too high; a caller always comes before whom it calls.
            frame = min(numbers.get("parent_frame_id", 0), frame) - 1

    @cached_property
    def _tables(self) -> dict[str, dict[int, str]]:
        """The tables at the top of the text, rows by number."""
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


def _numbers(row: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", row)}


def _instruction(name: str, line: str, start: int) -> Instruction:
    """Reads a line, of which the result's shape begins at `start`."""
    try:
        end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
        opcode, _, _ = line[end:].partition("(")
        opening = end + len(opcode)
        operands = re.findall(r"%([\w.\-]+)", line[opening : _closing(line, opening)])
    except (IndexError, ValueError):
        raise ProfileError(f"the program's text is cut or damaged at {name}") from None
    arrays = _ARRAY.findall(line[start:end])
    shapes = tuple(Shape(dtype, tuple(map(int, dims.split(","))) if dims else ()) for dtype, dims in arrays)
    return Instruction(name, opcode.strip(), shapes or (Shape("token", ()),), tuple(operands), line)


def _closing(line: str, start: int) -> int:
    """Returns the position after the parenthesis that closes the one at `start`."""
    depth = 0
    for position in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[position], 0)
        if not depth:
            return position + 1
    return len(line)
