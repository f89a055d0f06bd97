"""Actions of a pipeline rank and their text forms.

An action is a forward, a dgrad, a wgrad or a full backward (dgrad and wgrad in one action) of one chunk for one microbatch.

Actions have two text forms. Transformer Engine's signed numbers give the 1-based chunk and leave the microbatch implicit: `2`
is a forward, `-2` a dgrad and `-2.5` a wgrad of chunk 2. PyTorch's schedule files give the stage, the kind and the microbatch:
`5F3`, `5I3`, `5W3` and `5B3` are the forward, dgrad, wgrad and full backward of stage 5 for microbatch 3.
"""

import re
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from jgraph.errors import OrderError

Kind = Literal["forward", "dgrad", "wgrad", "backward"]

# Arrays store a kind as its index in KINDS. "backward" is the full backward: dgrad and wgrad in one action.
KINDS: tuple[Kind, ...] = ("forward", "dgrad", "wgrad", "backward")
FORWARD, DGRAD, WGRAD, BACKWARD = range(4)
IDLE = 4
LETTERS = "FIWB"

_CELL = re.compile(r"(\d{1,9})([FIWB])(\d{1,9})")


@dataclass(frozen=True)
class Action:
    """One action of a rank: a part of the computation of one stage for one microbatch."""

    kind: Kind
    chunk: int  # its index on its rank, 0-based
    microbatch: int  # 0-based

    def __str__(self) -> str:
        """Returns a text such as `dgrad of chunk 2, microbatch 0`: the chunk counts from 1, the microbatch from 0."""
        return f"{self.kind} of chunk {self.chunk + 1}, microbatch {self.microbatch}"


def check_integer(name: str, value: object, minimum: int = 1) -> None:
    """Raises OrderError if an argument is not an integer of at least `minimum`. NumPy integers are allowed, bools are not."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
        raise OrderError(f"`{name}` is {value!r}: must be an integer >= {minimum}", field=name)


def parse_cell(text: str) -> tuple[int, int, int]:
    """Parses a cell of a schedule file: `5F3` is (0, 5, 3), the kind `KINDS[0]` of stage 5 for microbatch 3."""
    match = _CELL.fullmatch(text)
    if match is None:
        form = "write the stage, one of the letters F, I, W, B, and the microbatch, e.g. 5F3"
        raise OrderError(f"{_cut(repr(text))} is not an action; {form}")
    stage, letter, microbatch = match.groups()
    return LETTERS.index(letter), int(stage), int(microbatch)


def show(value: object) -> str:
    """Returns the repr of a value, cut to 40 characters, and the name of its type: `'abc' (str)`. Never raises."""
    try:
        text = repr(value)
    except Exception:  # An arbitrary object may raise anything in __repr__. Report the invalid order instead.
        text = "an unprintable object"
    return f"{_cut(text)} ({type(value).__name__})"


def _cut(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
