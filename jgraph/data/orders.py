"""Orders: which tokens of a stream are row k, for any k. A row is one or more spans of the stream, seq_len + 1 tokens in all.

`WindowOrder` cuts the stream into windows that overlap by one token: the last that a window predicts is the first that the
next one reads. Each epoch shifts the cuts by an offset of its own and takes the windows in an order of its own.

`DocumentOrder` puts the documents one after another in an order of each epoch's own, cuts that into such windows, and takes
those in an order of its own too. Both orders are computed, not stored (`permutation`). To find a row's documents it keeps,
for an epoch, how many tokens come before every 64th document: 1.25 MB for ten million.

Both draw from the raw output of Philox, which numpy promises to keep; the methods of its Generator may change (NEP 19).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from jgraph.data.permutation import Permutation
from jgraph.errors import DataError

E = TypeVar("E")
Span: TypeAlias = tuple[int, int]
Shuffle: TypeAlias = Literal["windows", "documents"]

_BLOCK = 64
# Documents looked at together: arrays of half a MiB, which stay in a cache.
_AT_ONCE = 1 << 16


class Order(Protocol):
    """Says what a stream's rows are: `num_rows` to an epoch, epoch after epoch."""

    num_rows: int

    def spans(self, rows: Sequence[int]) -> list[list[Span]]:
        """Returns the spans [start, stop) of the stream that each of the rows, from 0 on, is made of."""
        ...


class _Epochs(Generic[E]):
    """Keeps what an order knows of an epoch, by its number. The next one is made by a thread, so that no step waits for it."""

    def __init__(self, make: Callable[[int], E]):
        self._make, self._made = make, dict[int, Future[E]]()
        self._worker = ThreadPoolExecutor(1, "jgraph-epoch")

    def __getitem__(self, number: int, /) -> E:
        # The one before stays, for batches that span both.
        kept = {one: epoch for one, epoch in self._made.items() if abs(one - number) < 2}
        self._made = kept | {one: self._worker.submit(self._make, one) for one in (number, number + 1) if one not in kept}
        return self._made[number].result()


class WindowOrder:
    """Windows of the stream as it is, each once an epoch.

    The up to 2 * seq_len - 1 tokens at the ends of the stream that the offset leaves over vary from epoch to epoch.
    """

    def __init__(self, num_tokens: int, *, seq_len: int, seed: int, source: int = 0):
        self.num_rows = max(1, (num_tokens - seq_len) // seq_len)
        self._num_offsets = min(seq_len, num_tokens - self.num_rows * seq_len)
        self._seq_len, self._seed, self._source = seq_len, seed, source
        self._epochs = _Epochs(self._make)

    def spans(self, rows: Sequence[int]) -> list[list[Span]]:
        starts = [self._start(*divmod(row, self.num_rows)) for row in rows]
        return [[(start, start + self._seq_len + 1)] for start in starts]

    def _start(self, epoch: int, place: int) -> int:
        offset, order = self._epochs[epoch]
        return offset + int(order[place]) * self._seq_len

    def _make(self, epoch: int) -> tuple[int, np.ndarray]:
        bits = philox(self._seed, epoch, self._source)
        offset = int(bits.random_raw()) % self._num_offsets
        return offset, np.argsort(bits.random_raw(self.num_rows), kind="stable").astype(np.uint32)


@dataclass(frozen=True, eq=False)
class Index:
    """Says where the documents of a stream lie.

    Attributes:
        ends: where each document ends, 1-D, counted from the beginning of its own part; mapped, for token files.
        documents, tokens: how many there are in each part.
    """

    ends: np.ndarray
    documents: Sequence[int]
    tokens: Sequence[int]

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def _firsts(self) -> np.ndarray:
        return np.array([0, *accumulate(self.documents)][:-1])

    @cached_property
    def _bases(self) -> np.ndarray:
        return np.array([0, *accumulate(self.tokens)][:-1])

    def firsts(self, start: int, stop: int) -> np.ndarray:
        """Returns which tokens of a span of the stream begin a document."""
        found = np.zeros(stop - start, bool)
        for first, base, documents, tokens in zip(self._firsts, self._bases, self.documents, self.tokens, strict=True):
            low, high = max(start, base), min(stop, base + tokens)
            if low >= high:
                continue
            found[low - start] |= low == base
            ends = self.ends[first : first + documents]
            after = slice(*np.searchsorted(ends, [low - base, high - base]))  # the next one begins where one ends
            found[ends[after].astype(np.int64) + base - start] = True
        return found

    def spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns where in the stream documents begin and how many tokens they have, both int64."""
        parts = np.searchsorted(self._firsts, documents, side="right") - 1
        ends = self.ends[documents].astype(np.int64)
        starts = self.ends[documents - 1].astype(np.int64)  # of the first one, the last: not used
        starts[documents == self._firsts[parts]] = 0
        return starts + self._bases[parts], ends - starts


class DocumentOrder:
    """Whole documents in an order of each epoch's own, in windows, each once an epoch.

    Only the last up to seq_len tokens of an epoch's documents are left over.

    Raises:
        DataError: the index does not belong to the stream.
    """

    def __init__(self, num_tokens: int, index: Index, *, seq_len: int, seed: int, source: int = 0):
        self.num_rows = (num_tokens - 1) // seq_len
        self._num_tokens, self._index = num_tokens, index
        self._seq_len, self._seed, self._source = seq_len, seed, source
        self._epochs = _Epochs(self._make)

    def spans(self, rows: Sequence[int]) -> list[list[Span]]:
        places = np.array(rows, np.int64)
        spans: dict[int, list[Span]] = {}
        for number in np.unique(places // self.num_rows).tolist():
            own = places[places // self.num_rows == number]
            spans |= dict(zip(own.tolist(), self._epochs[number].spans(own % self.num_rows, self._seq_len), strict=True))
        return [spans[row] for row in rows]

    def _make(self, epoch: int) -> "_DocumentEpoch":
        return _DocumentEpoch(self._num_tokens, self._index, self.num_rows, philox(self._seed, epoch, self._source))


class _DocumentEpoch:
    """The documents in the order of one epoch, cut into rows, which are in an order of their own too."""

    def __init__(self, num_tokens: int, index: Index, num_rows: int, bits: np.random.Philox):
        self._index = index
        self._documents, self._rows = Permutation(len(index), bits), Permutation(num_rows, bits)
        sums = [np.zeros(1, np.int64)]
        for first in range(0, len(index), _AT_ONCE):
            places = np.arange(first, min(first + _AT_ONCE, len(index)))
            _, lengths = index.spans(self._documents(places))
            sums.append(np.add.reduceat(lengths, np.arange(0, len(places), _BLOCK)))
        self._sums = np.cumsum(np.concatenate(sums))
        if self._sums[-1] != num_tokens:
            raise DataError(f"`data` has {num_tokens} tokens where its documents have {self._sums[-1]}: damaged; copy it again")

    def spans(self, places: np.ndarray, seq_len: int) -> list[list[Span]]:
        starts = self._rows(places) * seq_len
        stops = starts + seq_len + 1
        # All documents of the blocks that the rows lie in, row after row.
        blocks = np.searchsorted(self._sums, starts, side="right") - 1
        firsts = blocks * _BLOCK
        sizes = np.minimum(np.searchsorted(self._sums, stops, side="left") * _BLOCK, len(self._index)) - firsts
        after = np.cumsum(sizes)
        documents = self._documents(np.repeat(firsts - (after - sizes), sizes) + np.arange(after[-1]))
        begins, lengths = self._index.spans(documents)
        spans = []
        rows = zip(starts, stops, self._sums[blocks], after - sizes, after, strict=True)
        for start, stop, before, low, high in rows:
            ends = before + np.cumsum(lengths[low:high])
            first, last = np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop, side="left")
            opens = begins[low + first : low + last + 1]
            closes = opens + lengths[low + first : low + last + 1]
            opens[0] += start - (ends[first] - lengths[low + first])
            closes[-1] -= ends[last] - stop
            spans.append(list(zip(opens.tolist(), closes.tolist(), strict=True)))
        return spans


def philox(seed: int, epoch: int, source: int) -> np.random.Philox:
    """Returns the bits of an epoch of one of a mixture's sources."""
    # A counter's low words count the draws; the upper half tells streams of one key apart.
    return np.random.Philox(key=seed | epoch << 64, counter=source << 192)
