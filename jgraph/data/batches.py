"""Batches: a pure function of the step, so that a run resumes at the exact batch and any number of processes agree.

The stream is cut into windows of seq_len + 1 tokens that overlap by one: the last token that a window predicts is the first
that the next one reads. Each epoch shifts the cuts by an offset of its own and takes the windows in an order of its own.
Both come from the raw output of Philox, which numpy promises to keep; the methods of its Generator may change (NEP 19).
"""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache

import numpy as np

from jgraph.data.tokenfile import Tokens
from jgraph.errors import DataError, require

# B batch, T sequence


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

    def __post_init__(self):
        assert 0 <= self.process_index < self.process_count
        divisible = f"divisible by the number of processes, {self.process_count}"
        require(self.batch_size % self.process_count == 0, "batch_size", self.batch_size, divisible)
        _check_length(self.tokens, self.seq_len)

    @property
    def num_windows(self) -> int:
        """Windows of an epoch, whatever its offset."""
        return max(1, (len(self.tokens) - self.seq_len) // self.seq_len)

    def __getitem__(self, step: int, /) -> np.ndarray:
        """Returns the rows of this process at a 0-based step: int32 of shape (batch_size // process_count, seq_len + 1).

        Raises:
            IndexError: the step is negative. There is no last step: epoch follows epoch.
            DataError: a token file is damaged or was changed (see `TokenFile`).
        """
        if step < 0:
            raise IndexError(f"step is {step}: must be 0 or more")
        if self.check is not None:
            self.check()
        rows = self.batch_size // self.process_count
        first = step * self.batch_size + self.process_index * rows
        return _gather(self.tokens, [self._start(row) for row in range(first, first + rows)], self.seq_len)

    def _start(self, row: int) -> int:
        epoch, place = divmod(row, self.num_windows)
        num_offsets = min(self.seq_len, len(self.tokens) - self.num_windows * self.seq_len)
        offset, order = _epoch(self.seed, epoch, self.num_windows, num_offsets)
        return offset + int(order[place]) * self.seq_len


def heldout_batches(tokens: Tokens, *, batch_size: int, seq_len: int, limit: int) -> list[np.ndarray]:
    """Returns windows to evaluate on, in the order of the text, each at most once, so that a mean weighs them equally.

    Args:
        tokens, batch_size, seq_len: as `Batches` has them.
        limit: largest number of batches, at least 1; a longer text is sampled evenly.

    Returns:
        At least one int32 array of shape (batch_size, seq_len + 1). Fewer windows than batch_size make a single batch with
        that many rows; otherwise those beyond a multiple of batch_size are left out, evenly over the text.

    Raises:
        DataError: the stream is shorter than seq_len + 1.
    """
    assert limit >= 1
    _check_length(tokens, seq_len)
    num_windows = (len(tokens) - 1) // seq_len
    if num_windows < batch_size:
        return [_gather(tokens, [window * seq_len for window in range(num_windows)], seq_len)]
    num_chosen = min(limit, num_windows // batch_size) * batch_size
    starts = [row * num_windows // num_chosen * seq_len for row in range(num_chosen)]
    return [_gather(tokens, starts[i : i + batch_size], seq_len) for i in range(0, num_chosen, batch_size)]


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


def _check_length(tokens: Tokens, seq_len: int) -> None:
    if len(tokens) < seq_len + 1:
        raise DataError(
            f"`data` has {len(tokens)} tokens where `seq_len` {seq_len} needs at least {seq_len + 1}: "
            "use a longer text or a smaller `seq_len`"
        )
