"""Tokens: what sampling asks of a token stream, and several mapped files seen as one without copying them."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np


class Tokens(Protocol):
    """A 1-D stream of uint8, uint16 or uint32 ids: an array, a `TokenFile`, or `Concatenated`."""

    @property
    def dtype(self) -> np.dtype: ...

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> np.ndarray: ...


class Concatenated:
    """Streams of one dtype, end to end. A span inside one part is a view of it; only one that crosses parts is copied."""

    def __init__(self, parts: Sequence[Tokens]):
        """
        Args:
            parts: at least one 1-D stream, all of the same dtype.
        """
        assert len({part.dtype for part in parts}) == 1
        self.parts = tuple(parts)
        self._ends = tuple(accumulate(len(part) for part in parts))

    @property
    def dtype(self) -> np.dtype:
        return self.parts[0].dtype

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, span: slice, /) -> np.ndarray:
        start, stop, stride = span.indices(len(self))
        if stride != 1:
            raise IndexError(f"stride is {stride}: must be 1")
        pieces = []
        index = bisect_right(self._ends, start)
        while start < stop:
            part, end = self.parts[index], self._ends[index]
            part_start = end - len(part)
            pieces.append(part[start - part_start : min(stop, end) - part_start])
            start = end
            index += 1
        if not pieces:
            return self.parts[0][:0]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
