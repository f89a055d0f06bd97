"""Batches: a pure function of the step, so that a run resumes at the exact batch and any number of processes agree.

The stream is cut into windows of seq_len + 1 tokens that overlap by one: the last token that a window predicts is the first
that the next one reads. Each epoch shifts the cuts by an offset of its own and takes the windows in an order of its own.
Both come from the raw output of Philox, which numpy promises to keep; the methods of its Generator may change (NEP 19).

Where documents are to be kept apart, a batch says where each begins, and how much each prediction counts (`apart`).
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from jgraph.data.tokenfile import Tokens
from jgraph.errors import DataError, require

# B batch, T sequence, S = T + 1

Batch: TypeAlias = np.ndarray | dict[str, np.ndarray]
Firsts: TypeAlias = Callable[[int, np.ndarray], np.ndarray]
"""(start, ids) of a span of the stream -> bools, True where a token begins a document; of a span's first token anything."""


@dataclass(frozen=True, eq=False)
class Batches:
    """Shuffled training batches, by step: `batches[step]`.

    The windows of an epoch are each taken once. The up to 2 * seq_len - 1 tokens at the ends of the stream that the offset
    leaves over vary from epoch to epoch. A batch may span two epochs.

    Attributes:
        tokens: 1-D stream of ids, at least seq_len + 1.
        batch_size: rows of a step, over all processes.
        seq_len: tokens that each row predicts.
        seed: of offsets and orders, in [0, 2**64).
        process_index: which rows are ours; concatenated by process index, the parts are the batch of a single process.
        process_count: must divide batch_size.
        check: called before each batch; what it raises, reading a batch raises.
        firsts: keeps documents apart; None joins them.

    Raises:
        ConfigError: process_count does not divide batch_size.
        DataError: the stream is shorter than seq_len + 1.
    """

    tokens: Tokens
    _: KW_ONLY
    batch_size: int
    seq_len: int
    seed: int
    process_index: int = 0
    process_count: int = 1
    check: Callable[[], None] | None = None
    firsts: Firsts | None = None

    def __post_init__(self):
        assert 0 <= self.process_index < self.process_count
        divisible = f"divisible by the number of processes, {self.process_count}"
        require(self.batch_size % self.process_count == 0, "batch_size", self.batch_size, divisible)
        _check_length(self.tokens, self.seq_len)

    @property
    def num_windows(self) -> int:
        """Windows of an epoch, whatever its offset."""
        return max(1, (len(self.tokens) - self.seq_len) // self.seq_len)

    def __getitem__(self, step: int, /) -> Batch:
        """Returns the rows of this process at a 0-based step: int32 of shape (batch_size // process_count, seq_len + 1).

        With `firsts` a dict, as `apart` has it; its weights are of the whole batch.

        Raises:
            IndexError: the step is negative. There is no last step: epoch follows epoch.
            DataError: a token file is damaged or was changed (see `TokenFile`).
        """
        if step < 0:
            raise IndexError(f"step is {step}: must be 0 or more")
        if self.check is not None:
            self.check()
        rows = self.batch_size // self.process_count
        own = slice(self.process_index * rows, (self.process_index + 1) * rows)
        starts = [self._start(step * self.batch_size + row) for row in range(self.batch_size)]
        if self.firsts is None:
            return _gather(self.tokens, starts[own], self.seq_len)
        rows_BS = _gather(self.tokens, starts, self.seq_len)
        return {name: leaf[own] for name, leaf in apart(rows_BS, _firsts(self.firsts, starts, rows_BS)).items()}

    def _start(self, row: int) -> int:
        epoch, place = divmod(row, self.num_windows)
        num_offsets = min(self.seq_len, len(self.tokens) - self.num_windows * self.seq_len)
        offset, order = _epoch(self.seed, epoch, self.num_windows, num_offsets)
        return offset + int(order[place]) * self.seq_len


def apart(rows_BS: np.ndarray, firsts_BS: np.ndarray) -> dict[str, np.ndarray]:
    """Returns rows of tokens with what keeps their documents apart.

    The target of a document's last token would be another document's first: it does not count. The others count alike, with a
    mean of 1 over all rows. So the mean of weighted losses, over any microbatches and devices, is that over what counts.

    Args:
        rows_BS: int32 ids.
        firsts_BS: bools, which of them begin a document; a row's first token always does.

    Returns:
        `tokens`, the rows; `starts`, int32 [B, T], where in its row the document of a token that is read begins; `weights`,
        float32 [B, T], what the loss of the token after it is multiplied by.
    """
    T = rows_BS.shape[1] - 1
    starts_BT = np.maximum.accumulate(np.where(firsts_BS[:, :T], np.arange(T, dtype=np.int32), np.int32(0)), axis=1)
    counts_BT = ~firsts_BS[:, 1:]
    weights_BT = counts_BT * np.float32(counts_BT.size / max(1, np.count_nonzero(counts_BT)))
    return {"tokens": rows_BS, "starts": starts_BT, "weights": weights_BT}


def heldout_batches(tokens: Tokens, *, batch_size: int, seq_len: int, limit: int, firsts: Firsts | None = None) -> list[Batch]:
    """Returns windows to evaluate on, in the order of the text, each at most once, so that a mean weighs them equally.

    Args:
        tokens, batch_size, seq_len, firsts: as `Batches` has them.
        limit: largest number of batches, at least 1; a longer text is sampled evenly.

    Returns:
        At least one int32 array of shape (batch_size, seq_len + 1). Fewer windows than batch_size make a single batch with
        that many rows; otherwise those beyond a multiple of batch_size are left out, evenly over the text. With `firsts` dicts,
        as `apart` has them; their weights are of all batches.

    Raises:
        DataError: the stream is shorter than seq_len + 1.
    """
    assert limit >= 1
    _check_length(tokens, seq_len)
    num_windows = (len(tokens) - 1) // seq_len
    batch_size = min(batch_size, num_windows)
    num_chosen = min(limit, num_windows // batch_size) * batch_size
    starts = [row * num_windows // num_chosen * seq_len for row in range(num_chosen)]
    rows_BS = _gather(tokens, starts, seq_len)
    parts = [slice(i, i + batch_size) for i in range(0, num_chosen, batch_size)]
    if firsts is None:
        return [rows_BS[part] for part in parts]
    whole = apart(rows_BS, _firsts(firsts, starts, rows_BS))
    return [{name: leaf[part] for name, leaf in whole.items()} for part in parts]


# Two entries, for the batch that spans two epochs: then the order of an epoch is drawn once, not at every step.
@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, num_windows: int, num_offsets: int) -> tuple[int, np.ndarray]:
    bits = np.random.Philox(key=seed | epoch << 64)
    offset = int(bits.random_raw()) % num_offsets
    return offset, np.argsort(bits.random_raw(num_windows), kind="stable")


def _gather(tokens: Tokens, starts: list[int], seq_len: int) -> np.ndarray:
    rows_BT = np.empty((len(starts), seq_len + 1), np.int32)
    for row, start in zip(rows_BT, starts, strict=True):
        row[:] = tokens[start : start + seq_len + 1]
    return rows_BT


def _firsts(firsts: Firsts, starts: list[int], rows_BS: np.ndarray) -> np.ndarray:
    return np.stack([firsts(start, row) for start, row in zip(starts, rows_BS, strict=True)])


def _check_length(tokens: Tokens, seq_len: int) -> None:
    if len(tokens) < seq_len + 1:
        raise DataError(
            f"`data` has {len(tokens)} tokens where `seq_len` {seq_len} needs at least {seq_len + 1}: "
            "use a longer text or a smaller `seq_len`"
        )
