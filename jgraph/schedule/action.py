"""Actions: what a rank can do with one microbatch of one chunk, and how that is written.

Two text forms. Transformer Engine's signed numbers say the chunk, 1-based, and leave the microbatch to the counting: `2`
forward, `-2` dgrad, `-2.5` wgrad of chunk 2. The form of PyTorch's schedule files says everything: `5F3`, `5I3`, `5W3`, `5B3`
are forward, dgrad, wgrad, and both at once, of stage 5 and microbatch 3.
"""

import re
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from jgraph.errors import OrderError

Kind = Literal["forward", "dgrad", "wgrad", "backward"]

# A kind in an array is its place in KINDS. "backward" is dgrad and wgrad in one action.
KINDS: tuple[Kind, ...] = ("forward", "dgrad", "wgrad", "backward")
FORWARD, DGRAD, WGRAD, BACKWARD = range(4)
IDLE = 4
LETTERS = "FIWB"

_CELL = re.compile(r"(\d{1,9})([FIWB])(\d{1,9})")


@dataclass(frozen=True)
class Action:
    """One forward, dgrad, wgrad or whole backward of a chunk for a microbatch, both 0-based."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of chunk {self.chunk + 1}, microbatch {self.microbatch}"


def cell(kind: int, stage: int, microbatch: int) -> str:
    """Returns the text of an action in a schedule file, e.g. `5F3`."""
    return f"{stage}{LETTERS[kind]}{microbatch}"


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raises OrderError if the value of an argument is no whole number, or too small."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise OrderError(f"`{name}` is {value!r}: must be a whole number >= {least}", field=name)


def parse_cell(text: str) -> tuple[int, int, int]:
    """`5F3` -> (kind, stage, microbatch). Raises OrderError."""
    match = _CELL.fullmatch(text.strip())
    if match is None:
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise OrderError(
            f"{shown!r} is no action; an action is stage, letter, microbatch, e.g. 5F3, with a letter of F, I, W, B"
        )
    stage, letter, microbatch = match.groups()
    return LETTERS.index(letter), int(stage), int(microbatch)
