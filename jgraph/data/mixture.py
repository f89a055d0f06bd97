"""Mixtures: which source each row comes from, so that every source has its share at any time, and not only on average."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np

from jgraph.data.orders import DocumentOrder, Index, Order, Shuffle, WindowOrder
from jgraph.data.tokenfile import Tokens
from jgraph.errors import DataError


@dataclass(frozen=True, eq=False)
class Source:
    """A stream of tokens, and its share of a mixture.

    Attributes:
        tokens: 1-D ids.
        weight: its share of the rows, relative to the weights of the others; positive.
        index: where its documents lie; None where nobody knows.
        name: as `load` was given it.
    """

    tokens: Tokens
    weight: Fraction = Fraction(1)
    index: Index | None = None
    name: str = "data"

    def order(self, shuffle: Shuffle, *, seq_len: int, seed: int, number: int) -> Order:
        """Returns the order of its rows; `number` tells sources of one seed apart. Raises DataError for want of an index."""
        how = {"seq_len": seq_len, "seed": seed, "source": number}
        if shuffle == "windows":
            return WindowOrder(len(self.tokens), **how)
        return DocumentOrder(len(self.tokens), self._indexed("data_shuffle", "documents"), **how)

    def firsts(self, start: int, stop: int) -> np.ndarray:
        """Returns which tokens of a span begin a document, the first one among them. Raises DataError for want of an index."""
        found = self._indexed("data_documents", "separate").firsts(start, stop)
        found[0] = True
        return found

    def _indexed(self, field: str, value: str) -> Index:
        if self.index is None:
            raise DataError(
                f"`data` {self.name} does not say where its documents end, as `{field}` {value} needs; "
                f"make it again with python -m jgraph.data make, or leave `{field}` out",
                field=field,
            )
        return self.index


class Shares:
    """Deals rows to sources by their weights.

    The first source gets row r where its share of r + 1 rows, rounded, is more than that of r rows; what it leaves is dealt to
    the others in the same way. So it takes no memory to say whose row r is and how many its source had before, and
    the first r rows hold each source's share to within half the number of sources.
    """

    def __init__(self, weights: Sequence[Fraction]):
        rest, self._parts = sum(weights, Fraction(0)), []
        for weight in weights:
            self._parts.append((weight / rest).as_integer_ratio())
            rest -= weight

    def counts(self, rows: int) -> list[int]:
        """Returns how many of the first rows each source has."""
        counts = []
        for part in self._parts:
            counts.append(_rounded(rows, part))
            rows -= counts[-1]
        return counts

    def whose(self, row: int) -> tuple[int, int]:
        """Returns the source of a row, and how many rows that source had before."""
        for source, part in enumerate(self._parts):
            before = _rounded(row, part)
            if _rounded(row + 1, part) > before:
                return source, before
            row -= before
        raise AssertionError("the last source takes all that is left")

    def most(self, limits: Sequence[int], rows: int) -> int:
        """Returns the largest number of rows, at most `rows`, of which no source has more than its limit."""
        fits = partial(self._fits, limits)
        return rows if fits(rows) else bisect_left(range(rows), True, key=lambda n: not fits(n)) - 1

    def _fits(self, limits: Sequence[int], rows: int) -> bool:
        return all(count <= limit for count, limit in zip(self.counts(rows), limits, strict=True))


def _rounded(rows: int, part: tuple[int, int]) -> int:
    return (2 * rows * part[0] + part[1]) // (2 * part[1])
