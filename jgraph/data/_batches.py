"""Batches: a pure function of (seed, step), so that a run resumes at the exact batch on any number of processes.

Rows are numbered from the first row of step 0. `_deal` maps a row to a source and to a row of that source. The order of the
source maps this row to tokens. No state is kept between rows.

A row has seq_len + 1 tokens and overlaps its neighbour by one: its last target is the next row's first input. Packed rows of
conversations do not overlap.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from functools import cached_property
from operator import gt
from typing import Literal, TypeAlias

import numpy as np

from jgraph.data._orders import Index, RowOrder, Span, shuffled_documents, shuffled_rows, shuffled_windows
from jgraph.data._texts import Documents
from jgraph.data._tokenfile import Tokens
from jgraph.errors import DataError, require

# B batch, T sequence, S = T + 1

Batch: TypeAlias = np.ndarray | dict[str, np.ndarray]
Shuffle: TypeAlias = Literal["windows", "documents"]

_STEPS_AHEAD = 2  # their batches are in memory, and the requested one


@dataclass(frozen=True, eq=False)
class Packed:
    """Loss mask and counts of a stream that consists of rows of whole conversations. Made by `pack_rows`."""

    # bool, one per token of the stream. False for padding and for the first token of a conversation, which nothing predicts.
    trained: np.ndarray
    conversations: int
    tokens: int  # of the conversations, without padding
    truncated: int  # conversations, cut because they were longer than a row
    dropped: int  # records in no row: too long, or without a trained token


@dataclass(frozen=True, eq=False)
class Source:
    """A stream of tokens and its weight in a mixture of sources."""

    tokens: Tokens
    weight: Fraction = Fraction(1)  # positive. The share of the rows is the weight, divided by the sum of all sources' weights
    index: Index | None = None  # None if unknown
    name: str = "data"  # for messages. From `load`, the entry of the user
    num_documents: int = 0  # 0 if unknown
    packed: Packed | None = None  # None for text. Otherwise the stream consists of rows of seq_len + 1 tokens

    def num_rows(self, seq_len: int) -> int:
        """Returns the number of rows in the order of the stream. Rows of text overlap by one token, packed rows do not."""
        return (len(self.tokens) - 1) // seq_len if self.packed is None else len(self.tokens) // (seq_len + 1)

    def require_index(self, field: str, value: str) -> Index:
        """Returns the document boundaries, or raises an error that names the setting that needs them."""
        if self.index is None:
            raise DataError(
                f"`data` {self.name} has no document boundaries, which `{field}` {value} needs; "
                f"make it again with python -m jgraph.data make, or leave `{field}` out",
                field=field,
            )
        return self.index


_Rows: TypeAlias = list[tuple[Source, list[Span]]]


@dataclass(frozen=True, eq=False)
class Batches:
    """Shuffled training batches: `batches[step]` is the batch of a step from 0, by the attributes and the step only.

    An epoch of a source reads each of its rows once, in another order than the epochs before. A batch may span two epochs.
    """

    tokens: Tokens | Sequence[Source]  # 1-D ids, or the sources of a mixture, each with at least seq_len + 1 tokens
    _: KW_ONLY
    batch_size: int  # rows per step, over all processes
    seq_len: int  # predicted tokens per row. A row has one token more
    seed: int  # in [0, 2**64)
    shuffle: Shuffle = "windows"
    # Ascending indices of the rows to read, such as `TrainStep.batch_rows`, the rows of this process. None reads all rows.
    rows: Sequence[int] | np.ndarray | None = None
    documents: Documents = "joined"

    def __post_init__(self):
        rows = self._local_rows
        fits = len(rows) > 0 and rows[0] >= 0 and rows[-1] < self.batch_size and bool((np.diff(rows) > 0).all())
        require(fits, "rows", rows.tolist(), f"ascending indices of the rows of a batch of `batch_size` {self.batch_size}")
        assert self._orders, "there is at least one source"

    @cached_property
    def _local_rows(self) -> np.ndarray:
        return np.arange(self.batch_size) if self.rows is None else np.asarray(self.rows, np.int64)

    @cached_property
    def _sources(self) -> tuple[Source, ...]:
        return _sources(self.tokens, self.seq_len)

    @cached_property
    def _weights(self) -> list[int]:
        return _integers(self._sources)

    @cached_property
    def _orders(self) -> list[RowOrder]:
        orders = []
        for number, source in enumerate(self._sources):
            options = {"seq_len": self.seq_len, "seed": self.seed, "source": number}
            if source.packed is not None:
                orders.append(shuffled_rows(source.num_rows(self.seq_len), **options))
            elif self.shuffle == "windows":
                orders.append(shuffled_windows(len(source.tokens), **options))
            else:
                index = source.require_index("data_shuffle", "documents")
                orders.append(shuffled_documents(len(source.tokens), index, **options))
        return orders

    def epochs(self, steps: int) -> list[tuple[str, float]]:
        """Returns (name, fractional epochs) of each source in the first `steps` steps of all processes. Reads no tokens."""
        rows = zip(self._sources, _counts(self._weights, steps * self.batch_size), self._orders, strict=True)
        return [(source.name, count / order.num_rows) for source, count, order in rows]

    def __getitem__(self, step: int, /) -> Batch:
        """Reads the batch of a step, or only its rows `rows`: ids, int32 [R, seq_len + 1].

        With `documents` separate, returns the dict of `apart`, with weights that have a mean of 1 over the whole batch.
        """
        if step < 0:
            raise IndexError(f"step is {step}: must be 0 or more")
        first = step * self.batch_size
        if self.documents == "joined":
            return _read(self._find((first + self._local_rows).tolist()), self.seq_len)
        rows = self._find(range(first, first + self.batch_size))  # the weights depend on all rows
        own = _read([rows[i] for i in self._local_rows], self.seq_len)
        return apart(own, _firsts(rows), self._local_rows, trained=_trained(rows))

    def trained_tokens(self, steps: range) -> int:
        """Counts the tokens in the loss of consecutive steps of chat data, over all processes. Reads masks only."""
        trained = _trained(self._find(range(steps.start * self.batch_size, steps.stop * self.batch_size)))
        assert trained is not None, "only chat data has masks"
        return int(np.count_nonzero(trained))

    def _find(self, rows: Sequence[int]) -> _Rows:
        dealt = [_deal(self._weights, row) for row in rows]
        spans = []
        for number, order in enumerate(self._orders):
            places = [place for source, place in dealt if source == number]
            spans.append(iter(order.spans(np.array(places, np.int64))))
        return [(self._sources[source], next(spans[source])) for source, _ in dealt]


def apart(
    rows_BS: np.ndarray,
    # bool for all rows of the batch or evaluation: True for tokens that begin a document, and for the first token of each row.
    firsts_BS: np.ndarray,
    own: slice | np.ndarray = slice(None),  # `rows_BS` in all rows
    *,
    # bool for all rows: True for tokens that count in the loss. Must be False for the first token of every document. None for
    # all tokens except the first ones of documents.
    trained: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Returns a dict of ids, document starts and loss weights, to keep the documents of a row separate.

    `tokens` is `rows_BS` itself. `starts`, int32 [B, T], has the position in its row of the first token of the same document.
    `weights`, float32 [B, T], has the loss weight of each prediction.
    """
    # The last token of a document would predict the first token of another, so its weight is 0. All other weights are equal,
    # with a mean of 1 over all rows. The mean of the weighted losses, over any microbatches and devices, is therefore the mean
    # over the predictions inside documents.
    T = rows_BS.shape[1] - 1
    counts_BT = (~firsts_BS if trained is None else trained)[:, 1:]
    weight = np.float32(counts_BT.size / max(1, np.count_nonzero(counts_BT)))
    starts_BT = np.maximum.accumulate(np.where(firsts_BS[own, :T], np.arange(T, dtype=np.int32), np.int32(0)), axis=1)
    return {"tokens": rows_BS, "starts": starts_BT, "weights": counts_BT[own] * weight}


def heldout_batches(
    tokens: Tokens | Sequence[Source], *, batch_size: int, seq_len: int, limit: int, documents: Documents = "joined"
) -> list[Batch]:
    """Reads evaluation batches of windows in the order of the text. Each window is read at most once.

    All batches have the same size. Windows that do not fill a batch are left out, evenly over the text. Batches have the form
    of those of `Batches`; weights have a mean of 1 over all of them.
    """
    assert limit >= 1
    sources = _sources(tokens, seq_len)
    weights = _integers(sources)
    windows = [source.num_rows(seq_len) for source in sources]
    # The largest number of rows that no source is too short for. `limit` batches sample a longer text evenly.
    num_rows = bisect_left(range(1, limit * batch_size + 1), True, key=lambda n: any(map(gt, _counts(weights, n), windows)))
    if num_rows >= batch_size:
        num_rows -= num_rows % batch_size
    counts = _counts(weights, num_rows)
    rows: _Rows = []
    for row in range(num_rows):
        number, place = _deal(weights, row)
        # Windows overlap by one token: the last target is the next window's first input. Packed rows do not overlap.
        stride = seq_len if sources[number].packed is None else seq_len + 1
        start = place * windows[number] // counts[number] * stride
        rows.append((sources[number], [(start, start + seq_len + 1)]))
    rows_BS = _read(rows, seq_len)
    parts = [slice(i, i + batch_size) for i in range(0, num_rows, batch_size)]
    if documents == "joined":
        return [rows_BS[part] for part in parts]
    firsts_BS = _firsts(rows)
    trained_BS = _trained(rows)
    return [apart(rows_BS[part], firsts_BS, part, trained=trained_BS) for part in parts]


class Ahead:
    """Reads the batches of the next steps in a thread while a step runs. `ahead[step]` equals `batches[step]`."""

    def __init__(self, batches: Batches):
        self._batches = batches
        # The thread ends with the process.
        self._worker = ThreadPoolExecutor(1, "jgraph-read")
        self._read: dict[int, Future[Batch]] = {}

    def __getitem__(self, step: int, /) -> Batch:
        """Waits if the batch is not read yet. Forgets batches of earlier steps; a later request reads them again."""
        steps = range(step, step + 1 + _STEPS_AHEAD)
        self._read = {s: self._read.get(s) or self._worker.submit(self._batches.__getitem__, s) for s in steps}
        return self._read[step].result()


def _sources(tokens: Tokens | Sequence[Source], seq_len: int) -> tuple[Source, ...]:
    sources = tuple(tokens) if isinstance(tokens, Sequence) else (Source(tokens),)
    for source in sources:
        if len(source.tokens) < seq_len + 1:
            raise DataError(
                f"`data` has {len(source.tokens)} tokens, but `seq_len` {seq_len} needs at least {seq_len + 1}: "
                "use a longer text or a smaller `seq_len`"
            )
    return sources


def _integers(sources: Sequence[Source]) -> list[int]:
    """Returns the weights of the sources as integers in the same proportion."""
    scale = math.lcm(*(source.weight.denominator for source in sources))
    return [int(source.weight * scale) for source in sources]


def _counts(weights: Sequence[int], rows: int) -> list[int]:
    """Returns the number of rows that each source has in the first `rows` rows.

    The first source gets its share, rounded. The remaining rows are divided among the other sources in the same way. Each count
    is within half the number of sources of the exact share.
    """
    rest = sum(weights)
    counts = []
    for weight in weights:
        counts.append((2 * rows * weight + rest) // (2 * rest))
        rows -= counts[-1]
        rest -= weight
    return counts


def _deal(weights: Sequence[int], row: int) -> tuple[int, int]:
    """Returns the source of a row, and the number of earlier rows of that source."""
    before, after = _counts(weights, row), _counts(weights, row + 1)
    source = next(source for source, count in enumerate(before) if after[source] > count)
    return source, before[source]


def _read(rows: _Rows, seq_len: int) -> np.ndarray:
    rows_BS = np.empty((len(rows), seq_len + 1), np.int32)
    for (source, spans), row in zip(rows, rows_BS, strict=True):
        at = 0
        for start, stop in spans:
            row[at : at + stop - start] = source.tokens[start:stop]
            at += stop - start
    return rows_BS


def _firsts(rows: _Rows) -> np.ndarray:
    """Returns the mask of the tokens that begin a document or a span. Spans are not adjacent in the text."""
    indices = ((source.require_index("data_documents", "separate"), spans) for source, spans in rows)
    return np.stack([np.concatenate([index.firsts(*span) for span in spans]) for index, spans in indices])


def _trained(rows: _Rows) -> np.ndarray | None:
    """Returns the loss mask of packed rows, bool [rows, seq_len + 1]. None for text."""
    masks = [source.packed.trained[start:stop] for source, ((start, stop), *_) in rows if source.packed is not None]
    return np.stack(masks) if masks else None
