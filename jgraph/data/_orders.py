"""The order of the rows of one source: whole streams, documents or packed rows, shuffled in each epoch.

`shuffled_windows` shuffles the rows of the stream. `shuffled_documents` shuffles documents, concatenates them, and shuffles
the rows of the result. Packed rows of conversations do not overlap; `shuffled_rows` shuffles them.

Random numbers are raw Philox output, which numpy keeps stable across versions; `Generator` methods may change (NEP 19).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from jgraph.errors import DataError

Span: TypeAlias = tuple[int, int]
_Epoch: TypeAlias = Callable[[np.ndarray], list[list[Span]]]
"""Maps int64 row numbers of one epoch, ascending, to the [start, stop) spans of each row."""

_BLOCK = 64  # documents for each stored prefix sum: 1.25 MB for ten million documents
_DOCUMENTS_AT_ONCE = 1 << 16  # arrays of half a MiB, which fit in a cache
_ROUNDS = 6  # even, so that the two halves of an odd number of bits end in their places
_FEWEST_BITS = 8  # with fewer, some permutations of ten numbers are clearly more frequent than others
# Odd 64-bit constants with irregular bits: the fractional parts of the golden ratio and of the square root of 3.
_GOLDEN, _ROOT = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)


@dataclass(frozen=True, eq=False)
class RowOrder:
    """The row order of one source, epoch after epoch."""

    num_rows: int  # of an epoch
    # Prepares an epoch from its number, in about 0.1 us per row or document: far less than reading the epoch. Caches the last
    # two epochs, because a batch may span two.
    epoch: Callable[[int], _Epoch]

    def spans(self, rows: np.ndarray) -> list[list[Span]]:
        """Returns the spans of each row. `rows` are int64, ascending, and continue from epoch to epoch."""
        numbers, places = np.divmod(rows, self.num_rows)
        return [spans for number in np.unique(numbers).tolist() for spans in self.epoch(number)(places[numbers == number])]


@dataclass(frozen=True, eq=False)
class Index:
    """The document boundaries of a stream of one or more parts, such as token files. `len(index)` counts the documents."""

    # Position after the last token of each document, relative to the start of its part: unsigned integers, memory-mapped for
    # token files, or int64.
    ends: np.ndarray
    documents: Sequence[int]  # of each part
    tokens: Sequence[int]  # of each part

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def _firsts(self) -> np.ndarray:
        return np.array([0, *accumulate(self.documents)][:-1])

    @cached_property
    def _bases(self) -> np.ndarray:
        return np.array([0, *accumulate(self.tokens)][:-1])

    def firsts(self, start: int, stop: int) -> np.ndarray:
        """Returns bool [stop - start], True for a token of the span that begins a document, and for its first token."""
        found = np.zeros(stop - start, bool)
        found[0] = True
        for first, base, documents, tokens in zip(self._firsts, self._bases, self.documents, self.tokens, strict=True):
            low, high = max(start, base), min(stop, base + tokens)
            if low < high:
                ends = self.ends[first : first + documents]
                inside = slice(*np.searchsorted(ends, [low - base, high - base]))  # a document begins where another ends
                found[ends[inside].astype(np.int64) + base - start] = True
                found[low - start] |= low == base
        return found

    def spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the position of the first token of each document in the stream, and its length, both int64 [n]."""
        parts = np.searchsorted(self._firsts, documents, side="right") - 1
        ends = self.ends[documents].astype(np.int64)
        starts = np.where(documents == self._firsts[parts], 0, self.ends[documents - 1].astype(np.int64))
        return starts + self._bases[parts], ends - starts


def shuffled_windows(num_tokens: int, *, seq_len: int, seed: int, source: int = 0) -> RowOrder:
    """Returns an order that cuts a stream into rows and shuffles the rows in each epoch."""
    # Each epoch cuts the stream at its own offset, so up to 2 * seq_len - 1 tokens at its ends are left out.
    num_rows = max(1, (num_tokens - seq_len) // seq_len)
    num_offsets = min(seq_len, num_tokens - num_rows * seq_len)

    @lru_cache(maxsize=2)
    def epoch(number: int) -> _Epoch:
        bits = _bits(seed, number, source)
        offset = int(bits.random_raw()) % num_offsets
        shuffled = np.argsort(bits.random_raw(num_rows), kind="stable").astype(np.uint32)

        def spans(places: np.ndarray) -> list[list[Span]]:
            starts = offset + shuffled[places].astype(np.int64) * seq_len
            return [[(start, start + seq_len + 1)] for start in starts.tolist()]

        return spans

    return RowOrder(num_rows, epoch)


def _bits(seed: int, epoch: int, source: int) -> np.random.Philox:
    # Draws increment the low bits of the counter. The highest 64 bits separate sources that share a key: their orders are
    # independent.
    return np.random.Philox(key=seed | epoch << 64, counter=source << 192)


def shuffled_rows(num_rows: int, *, seq_len: int, seed: int, source: int = 0) -> RowOrder:
    """Returns an order that shuffles packed rows, which do not overlap, in each epoch."""
    size = seq_len + 1

    @lru_cache(maxsize=2)
    def epoch(number: int) -> _Epoch:
        shuffled = permutation(num_rows, _bits(seed, number, source))
        return lambda places: [[(row * size, (row + 1) * size)] for row in shuffled(places).tolist()]

    return RowOrder(num_rows, epoch)


def shuffled_documents(num_tokens: int, index: Index, *, seq_len: int, seed: int, source: int = 0) -> RowOrder:
    """Returns an order that shuffles documents in each epoch, cuts their concatenation into rows, and shuffles the rows.

    An epoch leaves out at most seq_len tokens.
    """
    num_rows = (num_tokens - 1) // seq_len

    @lru_cache(maxsize=2)
    def epoch(number: int) -> _Epoch:
        bits = _bits(seed, number, source)
        shuffled = permutation(len(index), bits)
        rows = permutation(num_rows, bits)
        sums = [np.zeros(1, np.int64)]
        for first in range(0, len(index), _DOCUMENTS_AT_ONCE):
            places = np.arange(first, min(first + _DOCUMENTS_AT_ONCE, len(index)))
            _, lengths = index.spans(shuffled(places))
            sums.append(np.add.reduceat(lengths, np.arange(0, len(places), _BLOCK)))
        block_starts = np.cumsum(np.concatenate(sums))
        if block_starts[-1] != num_tokens:
            raise DataError(
                f"`data` has {num_tokens} tokens, but its documents have {block_starts[-1]}: it is damaged; copy it again"
            )

        def spans(places: np.ndarray) -> list[list[Span]]:
            starts = rows(places) * seq_len
            stops = starts + seq_len + 1
            # Every document of the blocks that a row touches, row after row.
            blocks = np.searchsorted(block_starts, starts, side="right") - 1
            firsts = blocks * _BLOCK
            sizes = np.minimum(np.searchsorted(block_starts, stops) * _BLOCK, len(index)) - firsts
            row = np.repeat(np.arange(len(places)), sizes)
            skipped = np.cumsum(sizes) - sizes
            begins, lengths = index.spans(shuffled(np.arange(len(row)) + (firsts - skipped)[row]))
            # The position of each document in the concatenation.
            before = np.cumsum(lengths) - lengths
            position = before + (block_starts[blocks] - before[skipped])[row]
            low, high = np.maximum(starts[row] - position, 0), np.minimum(stops[row] - position, lengths)
            found: list[list[Span]] = [[] for _ in places]
            for k in np.flatnonzero(low < high).tolist():
                found[row[k]].append((int(begins[k] + low[k]), int(begins[k] + high[k])))
            return found

        return spans

    return RowOrder(num_rows, epoch)


def permutation(size: int, bits: np.random.Philox) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a pseudorandom permutation of range(size) that takes no memory. Draws six numbers from `bits`."""
    # A Feistel network is a permutation of the numbers with a given count of bits, for any round function (Luby and Rackoff,
    # "How to construct pseudorandom permutations from pseudorandom functions", 1988).
    keys = bits.random_raw(_ROUNDS)
    num_bits = max(_FEWEST_BITS, (size - 1).bit_length())
    low_bits = num_bits // 2
    widths = np.array([num_bits - low_bits, low_bits], np.uint64)

    def feistel(numbers: np.ndarray) -> np.ndarray:
        high, low = numbers >> widths[1], numbers & ((np.uint64(1) << widths[1]) - np.uint64(1))
        for index, key in enumerate(keys):
            mixed = (low + key) * _GOLDEN
            mixed ^= mixed >> np.uint64(32)
            mixed *= _ROOT
            # The upper bits of a product depend on all bits of its factors.
            mixed >>= np.uint64(64) - widths[index % 2]
            high, low = low, high ^ mixed
        return high << widths[1] | low

    def permute(places: np.ndarray) -> np.ndarray:
        found = feistel(places.astype(np.uint64))
        # Results of at least `size` are permuted again until they are smaller: cycle walking (Black and Rogaway, "Ciphers with
        # arbitrary finite domains", 2002), less than one more round trip on average.
        while len(beyond := np.flatnonzero(found >= size)):
            found[beyond] = feistel(found[beyond])
        return found.astype(np.int64)

    return permute
