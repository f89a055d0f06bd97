"""Maps instructions of a compiled program to JAX's operation names and to lines of the user's code."""

import sysconfig
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from jgraph.xla import _protobuf
from jgraph.xla.hlo import HloModule, Instruction

_PACKAGE = Path(__file__).parents[1]
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


@dataclass(frozen=True)
class Op:
    """An operation of a compiled program.

    Attributes:
        instruction: XLA's name, e.g. `fft.0`.
        name: JAX's name, e.g. `jit(step)/fft`. Empty for operations that XLA added. A fusion has the name of its root.
        source: `file:line` of the innermost call in the user's code, relative to the working directory if the file is inside
            it. Empty if the program has no source lines.
        target: The target of a custom call.
    """

    instruction: str
    name: str = ""
    source: str = ""
    target: str = ""

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        # A combined collective has the names of all its parts, mostly equal ones.
        return ":".join(dict.fromkeys((self.name or self.instruction).split(":"))) + where


def operations(module: HloModule, instructions: Collection[str]) -> dict[str, Op]:
    """Returns operations by the name of their instruction. Omits names that the program does not have."""
    found = {name: module.instructions[name] for name in instructions if name in module.instructions}
    return {name: Op(name, found[name].op_name, _source(module, found[name]), found[name].target) for name in found}


def thunk_instructions(metadata: bytes) -> dict[tuple[int, str], str]:
    """Maps the number and kind of a thunk, e.g. `(7, "kFft")`, to the name of its instruction.

    Args:
        metadata: XLA's `thunk_metadata.pb`, a list of (1: (1: instruction, 3: number), 2: kind).
    """
    names: dict[tuple[int, str], str] = {}
    for thunk in _protobuf.submessages(_protobuf.fields(metadata), 1):
        for info in _protobuf.submessages(thunk, 1):
            if (number := _protobuf.integer(info, 3)) is not None:
                names[number, _protobuf.text(thunk, 2)] = _protobuf.text(info, 1)
    return names


def _source(module: HloModule, instruction: Instruction) -> str:
    """Returns the innermost call in the user's code, otherwise in this package, otherwise in a library."""
    calls = [(Path(file), line) for file, line in module.calls(instruction)]
    if not calls:
        return ""
    (path, line), here = min(calls, key=lambda call: _distance(call[0])), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{line}"


def _distance(path: Path) -> int:
    """Returns 0 for the user's code, 1 for this package, 2 for a library."""
    if str(path).startswith("<") or not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return 2
    return 2 if path.is_relative_to(_STANDARD_LIBRARY) else int(path.is_relative_to(_PACKAGE))
