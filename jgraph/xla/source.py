"""Where the operations of a compiled program come from: jax's name for each, and the line of the user's code."""

import sysconfig
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from jgraph.xla.hlo import HloModule, Instruction
from jgraph.xla.options import _fields, _submessages, _text

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
        target: what a custom call calls.
    """

    instruction: str
    name: str = ""
    source: str = ""
    target: str = ""

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        # Collectives that XLA made one have the names of all, mostly the same over and over.
        return ":".join(dict.fromkeys((self.name or self.instruction).split(":"))) + where


def operations(module: HloModule, instructions: Collection[str]) -> dict[str, Op]:
    """Returns the operations of these instructions, by instruction; those that the program does not have are left out."""
    found = {name: module.instructions[name] for name in instructions if name in module.instructions}
    return {name: Op(name, found[name].op_name, _source(module, found[name]), found[name].target) for name in found}


def thunk_instructions(metadata: bytes) -> dict[tuple[int, str], str]:
    """Returns which instruction each thunk runs, by the thunk's number and kind (`kFft`).

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


def _source(module: HloModule, instruction: Instruction) -> str:
    calls = [(Path(file), line) for file, line in module.calls(instruction)]
    own = [call for call in calls if not _is_library(call[0])]
    users = [call for call in own if not call[0].is_relative_to(_OURS)]
    # The user's code, else ours, else a library's: always the innermost call.
    for path, line in [*users, *own, *calls][:1]:
        here = Path.cwd()
        return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"
    return ""


def _is_library(path: Path) -> bool:
    return (
        str(path).startswith("<")
        or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
        or any(path.is_relative_to(library) for library in _LIBRARIES)
    )
