"""Corpora: a text by name, a text file or a directory of token files as two streams of tokens, one of them held out.

Text is read as bytes, a token each, or through a tokenizer. Documents are sorted by their SHA-256 (so that no order of files
matters), the lowest tenth is held out, and a newline follows each, or the tokenizer's end of text. A directory of token files,
train-*.bin and heldout-*.bin, was split when it was made; its files are mapped, never loaded.
"""

import difflib
import hashlib
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jgraph.data.batches import Firsts
from jgraph.data.documents import count_heldout, cut, digest, separate
from jgraph.data.sources import CORPORA, SYNTHETIC_ENTROPY
from jgraph.data.tokenfile import Concatenated, TokenFile, Tokens, token_dtype
from jgraph.data.tokenizer import TOKENIZER_FILE, Encoder, decode_bytes, end_of_text, load_decoder
from jgraph.errors import DataError

Side = Literal["train", "heldout"]
Documents = Literal["joined", "separate"]

# zlib looks back 32 KiB, so its rate settles early; this many bytes take about 3 s.
_ZLIB_BYTES = 32 << 20


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens to train on and tokens held out, from different documents.

    Attributes:
        name: as `load` was given it.
        train, heldout: 1-D ids, uint8 for bytes, else uint16 or uint32; those of token files are mapped, and checked when read.
        train_documents, heldout_documents: their numbers.
        vocab_size: every id is smaller; 256 for bytes.
        fingerprint: SHA-256 of the contents as 64 hexadecimal digits; does not depend on the order of documents.
        zlib_nats_per_token: what zlib, level 9, needs for a byte of the text (of its first 32 MiB); None for other tokens.
        entropy_nats_per_token: what the best model would need; None where nobody knows.
        files: token files, to be verified.
        decoder: ids to text; call `decode`.
        train_firsts, heldout_firsts: tell documents apart, for `Batches` and `heldout_batches`; None where they are joined.
    """

    name: str
    train: Tokens
    heldout: Tokens
    train_documents: int
    heldout_documents: int
    vocab_size: int
    fingerprint: str
    zlib_nats_per_token: float | None = None
    entropy_nats_per_token: float | None = None
    files: tuple[Path, ...] = ()
    decoder: Callable[[Sequence[int]], str] = field(kw_only=True, repr=False)
    train_firsts: Firsts | None = field(default=None, repr=False)
    heldout_firsts: Firsts | None = field(default=None, repr=False)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of 1-D ids. What is no UTF-8 reads as U+FFFD; without a tokenizer, ids read as numbers."""
        return self.decoder([int(token) for token in ids])


def load(
    data: str, *, seq_len: int, vocab_size: int | None, tokenizer: Path | None = None, documents: Documents = "joined"
) -> Corpus:
    """Opens a corpus.

    Args:
        data: `python-docs`, `python-source`, `synthetic`, a text file, or a directory of token files. A corpus name wins
            over a file of that name; write ./NAME for the file.
        seq_len: each side must have at least seq_len + 1 tokens.
        vocab_size: rows of the model's embedding; token ids must be smaller.
        tokenizer: a tokenizer.json, through which text is read; None reads bytes. Token files were made by their own.
        documents: `separate` finds where documents begin.

    Raises:
        DataError: there is no such thing, or it cannot be read, is empty, too short, damaged, or has ids that are too large; or
            nothing separates its documents.
    """
    path = Path(data)
    try:
        if data in CORPORA:
            corpus = _from_documents(data, CORPORA[data](), tokenizer, documents)
        elif path.is_dir():
            corpus = _from_directory(data, documents)
        elif path.is_file():
            corpus = _from_documents(data, _read_text(path, documents), tokenizer, documents)
        else:
            close = difflib.get_close_matches(data, CORPORA, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            known = ", ".join(CORPORA)
            raise DataError(f"`data` is {data}: no such file or directory, and not one of the corpora {known}{hint}")
    except OSError as e:
        raise DataError(f"`data` is {data}: cannot be read: {e}") from e
    if min(len(corpus.train), len(corpus.heldout)) < seq_len + 1:
        raise DataError(
            f"`data` is {corpus.name}: {len(corpus.train)} tokens to train on and {len(corpus.heldout)} held out, "
            f"`seq_len` {seq_len} needs at least {seq_len + 1} of each: use a longer text or a smaller `seq_len`"
        )
    # Text is in memory: a model may be as small as its largest byte allows. Token files are taken by their header's word.
    ids = corpus.vocab_size
    if corpus.train.dtype == np.uint8:
        ids = 1 + int(max(np.max(corpus.train[:]), np.max(corpus.heldout[:])))
    if vocab_size is not None and ids > vocab_size:
        raise DataError(f"`model.vocab_size` is {vocab_size}: `data` {corpus.name} needs at least {ids} token ids")
    return corpus


def _read_text(path: Path, documents: Documents) -> list[bytes]:
    text = path.read_bytes()
    if text.startswith(b"JGTOKENS"):
        raise DataError(f"`data` is {path}: a single token file; name the directory that it is in, {path.parent}")
    if not text.strip():
        raise DataError(f"`data` is {path}: the file is empty; name one with text in it")
    if documents == "separate" and len(separate(text)) == 1:
        raise _joined_only(path, "which has no lines that read <|endoftext|>")
    return cut(text)


def _joined_only(data: Any, why: str) -> DataError:
    message = f"must be joined for `data` {data}, {why}: nothing says where a document ends"
    return DataError(f"`documents` is separate: {message}", field="documents")


def _from_documents(name: str, documents: list[bytes], tokenizer: Path | None, how: Documents) -> Corpus:
    by_hash = sorted((digest(document), document) for document in documents if document.strip())
    digests = [key for key, _ in by_hash]
    try:
        num_heldout = count_heldout(digests)
        encoder = Encoder(tokenizer) if tokenizer else None
        sides = [_ids([document for _, document in own], encoder) for own in (by_hash[num_heldout:], by_hash[:num_heldout])]
    except DataError as e:
        raise DataError(f"`data` is {name}: {e}") from e
    train_firsts, heldout_firsts = (_starts(lengths) if how == "separate" else None for _, lengths in sides)
    return Corpus(
        name,
        *(ids for ids, _ in sides),
        train_documents=len(by_hash) - num_heldout,
        heldout_documents=num_heldout,
        vocab_size=encoder.vocab_size if encoder else 256,
        # A hash of hashes: it changes with the bytes of a document and with where one ends and the next begins.
        fingerprint=hashlib.sha256(b"".join(digests) + (tokenizer.read_bytes() if tokenizer else b"")).hexdigest(),
        zlib_nats_per_token=None if encoder else _zlib_nats(documents),
        entropy_nats_per_token=SYNTHETIC_ENTROPY if name == "synthetic" and not encoder else None,
        decoder=load_decoder(tokenizer) if tokenizer else decode_bytes,
        train_firsts=train_firsts,
        heldout_firsts=heldout_firsts,
    )


def _ids(documents: list[bytes], encoder: Encoder | None) -> tuple[np.ndarray, list[int]]:
    """Returns the tokens of documents, one after another, and how many each has."""
    if encoder is None:
        ended = [document + b"\n" for document in documents]
        return np.frombuffer(b"".join(ended), np.uint8), list(map(len, ended))
    encoded = list(encoder.encode(documents))
    return np.concatenate(encoded).astype(token_dtype(encoder.vocab_size)), list(map(len, encoded))


def _starts(lengths: list[int]) -> Firsts:
    """Tells the first tokens of documents of these lengths."""
    starts = np.cumsum([0, *lengths])

    def firsts(start: int, ids: np.ndarray) -> np.ndarray:
        begin, end = np.searchsorted(starts, [start, start + len(ids)])
        found = np.zeros(len(ids), bool)
        found[starts[begin:end] - start] = True
        return found

    return firsts


def _after(end: int) -> Firsts:
    """Tells the tokens that come after an end of text."""

    def firsts(_: int, ids: np.ndarray) -> np.ndarray:
        return np.concatenate([[True], ids[:-1] == end])

    return firsts


def side_files(directory: Path) -> dict[Side, list[Path]]:
    """Returns the token files of each side of a directory, by name.

    Raises:
        DataError: a side has none, or a .bin file belongs to neither.
    """
    paths = sorted(directory.glob("*.bin"))
    remedy = "make such a directory with python -m jgraph.data make"
    if not paths:
        raise DataError(f"`data` is {directory}: has no .bin files; {remedy}")
    sides: dict[Side, list[Path]] = {"train": [], "heldout": []}
    for path in paths:
        side, dash, _ = path.name.partition("-")
        if not dash or side not in sides:
            raise DataError(f"`data` is {directory}: {path.name} is neither train-*.bin nor heldout-*.bin; {remedy}")
        sides[side].append(path)
    for side, files in sides.items():
        if not files:
            raise DataError(f"`data` is {directory}: has no {side}-*.bin file; {remedy}")
    return sides


def _from_directory(name: str, how: Documents) -> Corpus:
    """Maps all token files of a directory, reading only their headers."""
    sides = side_files(Path(name))
    try:
        opened = {side: [TokenFile(path) for path in files] for side, files in sides.items()}
    except DataError as e:
        raise DataError(f"`data` is {name}: {e}") from e
    one = opened["train"][0]
    first = one.header
    hasher = hashlib.sha256()
    for side, files in opened.items():
        hasher.update(side.encode())
        for file in files:
            header = file.header
            if (header.vocab_size, header.dtype) != (first.vocab_size, first.dtype):
                raise DataError(
                    f"`data` is {name}: {file.path.name} has a vocabulary of {header.vocab_size} in {header.dtype}, "
                    f"{one.path.name} one of {first.vocab_size} in {first.dtype}: all files must come from one tokenizer"
                )
            hasher.update(bytes.fromhex(header.sha256))
    firsts = None
    if how == "separate":
        tokenizer = Path(name, TOKENIZER_FILE)
        if not tokenizer.exists() or (end := end_of_text(tokenizer)) is None:
            raise _joined_only(name, f"whose {TOKENIZER_FILE} is missing or has no end-of-text token")
        firsts = _after(end)
    documents = {side: sum(file.header.num_documents for file in files) for side, files in opened.items()}
    return Corpus(
        name,
        train=Concatenated(opened["train"]),
        heldout=Concatenated(opened["heldout"]),
        train_documents=documents["train"],
        heldout_documents=documents["heldout"],
        vocab_size=first.vocab_size,
        fingerprint=hasher.hexdigest(),
        files=tuple(file.path for files in opened.values() for file in files),
        decoder=load_decoder(Path(name, TOKENIZER_FILE)),
        train_firsts=firsts,
        heldout_firsts=firsts,
    )


def _zlib_nats(documents: list[bytes]) -> float:
    # In the order of the source, where neighbours are alike, not by hash: zlib should get the text as one would compress it.
    text = b"\n".join(documents)[:_ZLIB_BYTES]
    return 8 * math.log(2) * len(zlib.compress(text, level=9)) / len(text)
