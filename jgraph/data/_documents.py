"""Documents: the unit of the split into training and held-out text.

The SHA-256 of its bytes decides the side of a document. So the split does not depend on the order of files, on a seed or on
other documents: text added to a corpus does not move existing documents. Equal documents are on the same side.
"""

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

from jgraph.errors import DataError, require

Documents: TypeAlias = Literal["joined", "separate"]
"""Whether tokens attend to other documents in their row."""

HELDOUT_FRACTION = 0.1
_BLOCK_BYTES = 16 * 1024
# At least this many blocks of a short text, so that about a tenth of it can be held out.
FEWEST_BLOCKS = 8
_SEPARATOR = re.compile(rb"^<\|endoftext\|>[ \t]*\r?$", re.MULTILINE)


def cut(text: bytes, *, fewest_blocks: int = FEWEST_BLOCKS) -> list[bytes]:
    """Cuts a text into documents, in order. Leaves out documents of white space.

    Lines that read `<|endoftext|>` separate documents. A text without such lines is cut at line ends into blocks of about
    16 KiB.

    Args:
        text: Bytes of any encoding. UTF-8 characters stay whole.
        fewest_blocks: A short text without separators is cut into at least about this many blocks.
    """
    documents = separate(text)
    if len(documents) != 1:
        return documents
    return _trim(_blocks(documents[0], size=min(_BLOCK_BYTES, -(-len(documents[0]) // fewest_blocks))))


def separate(text: bytes) -> list[bytes]:
    """Returns the documents between lines that read `<|endoftext|>`; without such lines, the whole text."""
    return _trim(_SEPARATOR.split(text))


def _trim(documents: Iterable[bytes]) -> list[bytes]:
    # The line ends around a document belong to the separator: adding text after a document must not change its hash.
    return [document.strip(b"\r\n") for document in documents if document.strip()]


def _blocks(text: bytes, *, size: int) -> Iterator[bytes]:
    start = 0
    while start < len(text):
        end = start + size
        line_end = text.find(b"\n", end, end + size)
        if line_end >= 0:
            end = line_end + 1
        else:
            # No line end near: step over the up to three continuation bytes (0b10xxxxxx) of a UTF-8 character.
            for _ in range(3):
                end += end < len(text) and text[end] & 0xC0 == 0x80
        yield text[start:end]
        start = end


def digest(document: bytes) -> bytes:
    """Returns the SHA-256 of a document. It decides the position in the corpus and the side of the split."""
    return hashlib.sha256(document).digest()


def count_heldout(digests: Sequence[bytes], heldout_fraction: float = HELDOUT_FRACTION) -> int:
    """Counts the held-out documents: the documents with a hash in the lowest `heldout_fraction`.

    If a side would be empty, the document nearest to the threshold changes sides, with its equals.

    Args:
        digests: Ascending SHA-256 digests, one per document.
        heldout_fraction: In (0, 1).

    Returns:
        k, with 0 < k < len(digests): documents [0, k) are held out, the others are for training.

    Raises:
        ConfigError: If the fraction is not in (0, 1).
        DataError: If there are no two different documents.
    """
    require(0 < heldout_fraction < 1, "heldout_fraction", heldout_fraction, "in (0, 1)")
    equals_of_first = bisect_right(digests, digests[0]) if digests else 0
    if equals_of_first == len(digests):
        raise DataError(
            f"the text has {len(digests)} documents, none different from another: at least two different ones are needed, "
            "one to train on and one to hold out; use a longer text"
        )
    first_equal_of_last = bisect_left(digests, digests[-1])
    return min(max(bisect_left(digests, threshold(heldout_fraction)), equals_of_first), first_equal_of_last)


def threshold(heldout_fraction: float) -> bytes:
    """Returns the exclusive upper bound of the held-out digests."""
    return int(heldout_fraction * 2**64).to_bytes(8, "big")
