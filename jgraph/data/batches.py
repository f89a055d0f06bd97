"""Batches: a pure function of the step, so that a run resumes at the exact batch and any number of processes agree.

Rows are numbered from the first of step 0 on. `Shares` says which source row r comes from and how many of its rows came
before, the source's order which tokens those are; nothing need be remembered from one row to the next.

Where documents are to be kept apart, a batch says where each begins, and how much each prediction counts (`apart`).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from jgraph.data.documents import Documents
from jgraph.data.mixture import Shares, Source
from jgraph.data.orders import Order, Shuffle, Span
from jgraph.data.tokenfile import Tokens
from jgraph.errors import DataError, require

# B batch, T sequence, S = T + 1

Batch: TypeAlias = np.ndarray | dict[str, np.ndarray]
Row: TypeAlias = tuple[Source, list[Span]]


@dataclass(frozen=True, eq=False)
class Batches:
    """Shuffled training batches, by step: `batches[step]`.

    The rows of a source's epoch are each taken once. A batch may span two epochs.

    Attributes:
        tokens: 1-D stream of ids, or the sources of a mixture; each has at least seq_len + 1 tokens.
        batch_size: rows of a step, over all processes.
        seq_len: tokens that each row predicts.
        seed: of offsets and orders, in [0, 2**64).
        shuffle: what has an order of its own in each epoch: windows of the stream, or its documents and then windows of those.
        rows: Indices in a batch of the rows to read, ascending, such as `TrainStep.batch_rows` returns for a process. None
            reads all rows.
        check: called before each batch; what it raises, reading a batch raises.
        documents: whether they are kept apart.

    Raises:
        ConfigError: `rows` are not ascending indices in [0, batch_size).
        DataError: a stream is shorter than seq_len + 1, or does not say where its documents end where that is asked for.
    """

    tokens: Tokens | Sequence[Source]
    _: KW_ONLY
    batch_size: int
    seq_len: int
    seed: int
    shuffle: Shuffle = "windows"
    rows: Sequence[int] | np.ndarray | None = None
    check: Callable[[], None] | None = None
    documents: Documents = "joined"

    def __post_init__(self):
        own = self._own
        fits = len(own) > 0 and own[0] >= 0 and own[-1] < self.batch_size and bool((np.diff(own) > 0).all())
        require(fits, "rows", own.tolist(), f"ascending indices of the rows of a batch of `batch_size` {self.batch_size}")
        for source in self.sources:
            _check_length(source.tokens, self.seq_len)
        assert self.orders, "there is at least one source"

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        return _sources(self.tokens)

    @cached_property
    def orders(self) -> list[Order]:
        """How each source's rows follow each other."""
        how = {"seq_len": self.seq_len, "seed": self.seed}
        return [source.order(self.shuffle, **how, number=number) for number, source in enumerate(self.sources)]

    @cached_property
    def _shares(self) -> Shares:
        return Shares([source.weight for source in self.sources])

    def epochs(self, steps: int) -> list[tuple[str, float]]:
        """Returns the name of each source and how often the first steps read it."""
        rows = zip(self.sources, self._shares.counts(steps * self.batch_size), self.orders, strict=True)
        return [(source.name, count / order.num_rows) for source, count, order in rows]

    def __getitem__(self, step: int, /) -> Batch:
        """Returns the batch of a 0-based step, or its `rows`: int32 of shape (rows, seq_len + 1).

        With documents `separate` a dict, as `apart` has it; its weights are of the whole batch.

        Raises:
            IndexError: the step is negative. There is no last step: epoch follows epoch.
            DataError: a token file is damaged or was changed (see `TokenFile`).
        """
        if step < 0:
            raise IndexError(f"step is {step}: must be 0 or more")
        if self.check is not None:
            self.check()
        first = step * self.batch_size
        if self.documents == "joined":
            return _tokens(self._rows((first + self._own).tolist()), self.seq_len)
        rows = self._rows(range(first, first + self.batch_size))  # weights depend on the whole batch
        return apart(_tokens([rows[i] for i in self._own], self.seq_len), _firsts(rows), self._own)

    def spans(self, step: int) -> list[tuple[int, list[Span]]]:
        """Returns the source and the spans of tokens of each row of `rows` at a step."""
        return self._spans((step * self.batch_size + self._own).tolist())

    @cached_property
    def _own(self) -> np.ndarray:
        return np.arange(self.batch_size) if self.rows is None else np.asarray(self.rows, np.int64)

    def _spans(self, rows: Sequence[int]) -> list[tuple[int, list[Span]]]:
        whose = [self._shares.whose(row) for row in rows]
        # A source's rows together, and then back in their places.
        found = {
            number: iter(order.spans([place for source, place in whose if source == number]))
            for number, order in enumerate(self.orders)
        }
        return [(source, next(found[source])) for source, _ in whose]

    def _rows(self, rows: Sequence[int]) -> list[Row]:
        return [(self.sources[source], spans) for source, spans in self._spans(rows)]


def apart(rows_BS: np.ndarray, firsts_BS: np.ndarray, own: slice | np.ndarray = slice(None)) -> dict[str, np.ndarray]:
    """Returns rows of tokens with what keeps their documents apart.

    The target of a document's last token would be another document's first: it does not count. The others count alike, with a
    mean of 1 over all rows. So the mean of weighted losses, over any microbatches and devices, is that over what counts.

    Args:
        rows_BS: int32 ids.
        firsts_BS: bools, which tokens of all rows begin a document; a row's first token always does.
        own: Slice or indices of `rows_BS` in all rows.

    Returns:
        `tokens`, the rows; `starts`, int32 [B, T], where in its row the document of a token that is read begins; `weights`,
        float32 [B, T], what the loss of the token after it is multiplied by.
    """
    T = rows_BS.shape[1] - 1
    counts_BT = ~firsts_BS[:, 1:]
    weight = np.float32(counts_BT.size / max(1, np.count_nonzero(counts_BT)))
    starts_BT = np.maximum.accumulate(np.where(firsts_BS[own, :T], np.arange(T, dtype=np.int32), np.int32(0)), axis=1)
    return {"tokens": rows_BS, "starts": starts_BT, "weights": counts_BT[own] * weight}


def heldout_batches(
    tokens: Tokens | Sequence[Source], *, batch_size: int, seq_len: int, limit: int, documents: Documents = "joined"
) -> list[Batch]:
    """Returns windows to evaluate on, in the order of the text, each at most once, so that a mean weighs them equally.

    Args:
        tokens, batch_size, seq_len, documents: as `Batches` has them; each source of a mixture has its share of the windows.
        limit: largest number of batches, at least 1; a longer text is sampled evenly.

    Returns:
        At least one int32 array of shape (batch_size, seq_len + 1). Fewer windows than batch_size make a single batch with
        that many rows; otherwise those beyond a multiple of batch_size are left out, evenly over the text. With documents
        `separate` dicts, as `apart` has them; their weights are of all batches.

    Raises:
        DataError: a stream is shorter than seq_len + 1, or does not say where its documents end.
    """
    assert limit >= 1
    sources = _sources(tokens)
    for source in sources:
        _check_length(source.tokens, seq_len)
    windows = [(len(source.tokens) - 1) // seq_len for source in sources]
    shares = Shares([source.weight for source in sources])
    num_chosen = shares.most(windows, limit * batch_size)
    if num_chosen >= batch_size:
        num_chosen -= num_chosen % batch_size
    chosen = shares.counts(num_chosen)
    rows = []
    for source, place in map(shares.whose, range(num_chosen)):
        start = place * windows[source] // chosen[source] * seq_len
        rows.append((sources[source], [(start, start + seq_len + 1)]))
    rows_BS, parts = _tokens(rows, seq_len), [slice(i, i + batch_size) for i in range(0, num_chosen, batch_size)]
    if documents == "joined":
        return [rows_BS[part] for part in parts]
    firsts_BS = _firsts(rows)
    return [apart(rows_BS[part], firsts_BS, part) for part in parts]


class Ahead:
    """Batches by step, of which a thread reads the next ones while one is used."""

    def __init__(self, batches: Batches, *, steps: int = 2):
        self._batches, self._steps = batches, steps
        self._worker = ThreadPoolExecutor(1, "jgraph-read")
        self._read: dict[int, Future[Batch]] = {}

    def __getitem__(self, step: int, /) -> Batch:
        """Returns a batch, as `Batches` does, and raises what reading it raised."""
        wanted = range(step, step + self._steps + 1)
        self._read = {one: self._read.get(one) or self._worker.submit(self._batches.__getitem__, one) for one in wanted}
        return self._read[step].result()


def _sources(tokens: Tokens | Sequence[Source]) -> tuple[Source, ...]:
    return tuple(tokens) if isinstance(tokens, Sequence) else (Source(tokens),)


def _tokens(rows: Sequence[Row], seq_len: int) -> np.ndarray:
    rows_BS = np.empty((len(rows), seq_len + 1), np.int32)
    for (source, spans), row in zip(rows, rows_BS, strict=True):
        at = 0
        for start, stop in spans:
            row[at : at + stop - start] = source.tokens[start:stop]
            at += stop - start
    return rows_BS


def _firsts(rows: Sequence[Row]) -> np.ndarray:
    """Returns which tokens begin a document; those that begin a span do, for what is before them is elsewhere in the text."""
    return np.stack([np.concatenate([source.firsts(*span) for span in spans]) for source, spans in rows])


def _check_length(tokens: Tokens, seq_len: int) -> None:
    if len(tokens) < seq_len + 1:
        raise DataError(
            f"`data` has {len(tokens)} tokens where `seq_len` {seq_len} needs at least {seq_len + 1}: "
            "use a longer text or a smaller `seq_len`"
        )
