"""Where the operations of a compiled program come from: jax's name for each, and the line of the user's code.

XLA's text of a program carries both as metadata of its instructions: the line itself in older releases, a number in a table of
stack frames at the top of the text in newer ones. Which instruction a thunk runs is in the dump, as a protocol buffer.
"""

import re
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jgraph.xla.options import _fields, _submessages, _text

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_TABLE = re.compile(r"^(\d+) (.*)$")
_OURS = Path(__file__).parents[1]
_LIBRARIES = tuple(
    Path(path) for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib", "purelib", "platlib")
)


@dataclass(frozen=True)
class Op:
    """An operation of a compiled program.

    Attributes:
        instruction: XLA's name for it, e.g. `fft.0`.
        name: jax's, e.g. `jit(step)/fft`; empty where XLA made the operation itself. A fusion has the name of its last part.
        source: `file:line` of the innermost call in the user's code, the file relative to the working directory if it is in
            there; empty where the program does not tell.
    """

    instruction: str
    name: str = ""
    source: str = ""

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        # Collectives that XLA made one have the names of all, mostly the same over and over.
        return ":".join(dict.fromkeys((self.name or self.instruction).split(":"))) + where


def operations(program: str, instructions: Collection[str]) -> dict[str, Op]:
    """The operations of these instructions, by instruction; those that the program does not have are left out.

    Args:
        program: XLA's text of the program, `compiled.as_text()`.
        instructions: names without `%`, which are unique in a program.
    """
    frames = _Frames.of(program)
    found: dict[str, Op] = {}
    for line in program.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None or match[1] not in instructions:
            continue
        metadata = line.partition(", metadata={")[2]
        name = re.match(r'.*?op_name="((?:[^"\\]|\\.)*)"', metadata)
        found[match[1]] = Op(match[1], re.sub(r"\\(.)", r"\1", name[1]) if name else "", _source(metadata, frames))
    return found


def thunk_instructions(metadata: bytes) -> dict[tuple[int, str], str]:
    """Which instruction each thunk runs, by the thunk's number and kind (`kFft`).

    Args:
        metadata: XLA's `thunk_metadata.pb`; a list of (1: (1: instruction, 3: number), 2: kind).
    """
    names: dict[tuple[int, str], str] = {}
    for thunk in _submessages(_fields(metadata), 1):
        for info in _submessages(thunk, 1):
            number = dict(info).get(3)
            if isinstance(number, int):
                names[number, _text(thunk, 2)] = _text(info, 1)
    return names


def _source(metadata: str, frames: "_Frames") -> str:
    if line := re.search(r'source_file="([^"]*)" source_line=(\d+)', metadata):
        return _shown(line[1], line[2])
    if frame := re.search(r"stack_frame_id=(\d+)", metadata):
        calls = list(frames.calls(int(frame[1])))
        # Code of the user, else ours, else a library's: always the innermost.
        for wanted in ((False,), (False, True)):
            for file, line in calls:
                if not _is_library(file) and Path(file).is_relative_to(_OURS) in wanted:
                    return _shown(file, line)
        if calls:
            return _shown(*calls[0])
    return ""


def _is_library(file: str) -> bool:
    path = Path(file)
    return (
        file.startswith("<")
        or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
        or any(path.is_relative_to(library) for library in _LIBRARIES)
    )


def _shown(file: str, line: str) -> str:
    path = Path(file)
    here = Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"


@dataclass(frozen=True)
class _Frames:
    """The tables at the top of a program: files and locations by number, frames as (location, frame of the caller)."""

    files: Mapping[int, str]
    locations: Mapping[int, tuple[int, str]]
    frames: Mapping[int, tuple[int, int]]

    @classmethod
    def of(cls, program: str) -> "_Frames":
        tables: dict[str, dict[int, str]] = {"FileNames": {}, "FileLocations": {}, "StackFrames": {}}
        table: dict[int, str] | None = None
        for line in program.splitlines():
            if line.startswith(("%", "ENTRY")):
                break
            if entry := _TABLE.match(line):
                if table is not None:
                    table[int(entry[1])] = entry[2]
            elif line:
                table = tables.get(line.strip())
        locations = {number: _numbers(entry) for number, entry in tables["FileLocations"].items()}
        frames = {number: _numbers(entry) for number, entry in tables["StackFrames"].items()}
        # Without a caller stands 0 or, where all numbers of callers are one higher, 1.
        shift = frames.get(1, {}).get("parent_frame_id", 0)
        return cls(
            files={number: name.strip('"') for number, name in tables["FileNames"].items()},
            locations={n: (entry.get("file_name_id", 0), str(entry.get("line", 0))) for n, entry in locations.items()},
            frames={
                n: (entry.get("file_location_id", 0), entry.get("parent_frame_id", 0) - shift) for n, entry in frames.items()
            },
        )

    def calls(self, frame: int) -> Iterator[tuple[str, str]]:
        """(file, line) of a frame and of those that called it, innermost first."""
        seen: set[int] = set()
        while frame in self.frames and frame not in seen:
            seen.add(frame)
            location, frame = self.frames[frame]
            file, line = self.locations.get(location, (0, ""))
            if file in self.files:
                yield self.files[file], line


def _numbers(entry: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", entry)}
