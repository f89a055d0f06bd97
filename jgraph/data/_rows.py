"""Packs whole conversations into rows of a fixed length."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from jgraph.data._batches import Packed, Source
from jgraph.data._orders import Index
from jgraph.errors import DataError

# Action for a conversation that is longer than a row: remove tokens at its end or its start, leave it out, or raise an error.
Truncate: TypeAlias = Literal["end", "start", "drop", "error"]


class Conversation(NamedTuple):
    """The tokens of a record."""

    digest: bytes  # SHA-256 of the record
    ids: np.ndarray  # int32
    trained: np.ndarray  # bool, one per token: True for tokens that count in the loss


def pack_rows(
    conversations: Iterable[Conversation], *, seq_len: int, truncate: Truncate, dtype: np.dtype | type, name: str = "data"
) -> Source:
    """Packs whole conversations into rows. The result depends on the order of the conversations only.

    The documents of the source are the conversations, and the padding at the end of a row, with the id 0.
    """
    size = seq_len + 1
    kept = []
    truncated = dropped = 0
    for one in conversations:
        is_long = len(one.ids) > size
        if is_long and truncate == "error":
            must = f"end, start or drop: a conversation has {len(one.ids)} tokens, and a row of `seq_len` {seq_len} has {size}"
            raise DataError(f"`data_truncate` is error: must be {must}", field="data_truncate")
        part = slice(-size, None) if truncate == "start" else slice(size)
        ids, trained = one.ids[part], one.trained[part].copy()
        trained[:1] = False  # nothing predicts the first token
        if (is_long and truncate == "drop") or not trained.any():
            dropped += 1
        else:
            truncated += is_long
            kept.append((ids, trained))
    if not kept:
        raise DataError(f"{dropped} records have no token of the assistant in a row of `seq_len` {seq_len}")
    rows = best_fit([len(ids) for ids, _ in kept], size)
    tokens = np.zeros((len(rows), size), dtype)
    mask = np.zeros((len(rows), size), bool)
    lengths = []
    for row, own in enumerate(rows):
        at = 0
        for number in own:
            ids, trained = kept[number]
            tokens[row, at : at + len(ids)] = ids
            mask[row, at : at + len(ids)] = trained
            lengths.append(len(ids))
            at += len(ids)
        if at < size:
            lengths.append(size - at)
    index = Index(np.cumsum(lengths), [len(lengths)], [tokens.size])
    counts = Packed(mask.ravel(), len(kept), sum(len(ids) for ids, _ in kept), truncated, dropped)
    return Source(tokens.ravel(), index=index, name=name, num_documents=len(kept), packed=counts)


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Packs items into rows, the longest first, each into the row with the least free space that is enough."""
    # The algorithm "best fit decreasing" for bin packing. Items of equal length stay in order.
    rows: list[list[int]] = []
    with_space: dict[int, list[int]] = {}  # rows by their free space
    spaces: list[int] = []  # keys of `with_space`, ascending
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        at = bisect_left(spaces, lengths[item])
        if at == len(spaces):
            row = len(rows)
            space = size
            rows.append([])
        else:
            space = spaces[at]
            row = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[at]
        rows[row].append(item)
        space -= lengths[item]
        if space > 0:
            if space not in with_space:
                with_space[space] = []
                insort(spaces, space)
            with_space[space].append(row)
    return rows


def describe(sources: Sequence[Source], seq_len: int) -> str:
    """Returns one line about packed sources."""
    parts = [source.packed for source in sources if source.packed is not None]
    names = ("conversations", "tokens", "truncated", "dropped")
    counts = {name: sum(getattr(part, name) for part in parts) for name in names}
    rows = sum(source.num_rows(seq_len) for source in sources)
    trained = sum(int(part.trained.sum()) for part in parts)
    return (
        f"{counts['conversations']:,} conversations in {rows:,} rows: {counts['tokens']:,} tokens, {trained:,} trained; "
        f"{counts['truncated']:,} truncated, {counts['dropped']:,} dropped"
    )
