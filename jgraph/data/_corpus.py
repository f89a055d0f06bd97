"""Corpora: named texts, text files and directories of token files, each with a training side and a held-out side.

Text is read as bytes, one token each, or through a tokenizer. Documents are sorted by their SHA-256, so the order of files does
not matter; the lowest tenth is held out; a newline or the tokenizer's end of text follows each document. A directory of token
files, train-*.bin and heldout-*.bin, was split when it was made. Its files are memory-mapped. Chat records are split by the
SHA-256 of the record, and packed into rows on each side.
"""

import hashlib
import importlib.util
import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from jgraph.data import _texts
from jgraph.data._batches import Source
from jgraph.data._orders import Index
from jgraph.data._rows import Conversation, Truncate, pack_rows
from jgraph.data._texts import FIELD, Documents, Format
from jgraph.data._tokenfile import ENDS_FILE, Concatenated, TokenFile, Tokens, read_tokens
from jgraph.data.chat import ChatReader
from jgraph.data.tokenizer import TOKENIZER_FILE, Tokenizer, vocabulary
from jgraph.errors import DataError

Side = Literal["train", "heldout"]

# zlib looks back 32 KiB, so its rate settles early; this many bytes take about 3 s.
_ZLIB_BYTES = 32 << 20


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens to train on and held-out tokens, from different documents. `load` creates it."""

    name: str  # the entries of `data`, without weights, separated by spaces
    sources: tuple[Source, ...] = field(repr=False)
    heldout_sources: tuple[Source, ...] = field(repr=False)  # in the same order
    vocab_size: int  # larger than every id
    fingerprint: str  # SHA-256 of the contents, in hexadecimal. Does not depend on the order of the documents of a text
    tokenizer: Tokenizer = field(repr=False)  # for text of ids, use `decode`, which also accepts arrays
    # Size of the first 32 MiB of the text under zlib, in nats per byte. None if tokens are not bytes, or for several sources.
    zlib_nats_per_token: float | None = None

    @cached_property
    def train(self) -> Tokens:
        return _concatenated(self.sources)

    @cached_property
    def heldout(self) -> Tokens:
        return _concatenated(self.heldout_sources)

    @property
    def train_documents(self) -> int:
        return sum(source.num_documents for source in self.sources)

    @property
    def heldout_documents(self) -> int:
        return sum(source.num_documents for source in self.heldout_sources)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.tokenizer.decode([int(token) for token in ids])


def _concatenated(sources: Sequence[Source]) -> Tokens:
    return sources[0].tokens if len(sources) == 1 else Concatenated([source.tokens for source in sources])


def load(
    data: str | Sequence[str],
    *,
    seq_len: int,
    vocab_size: int | None,
    tokenizer: Tokenizer | Path | None = None,
    field: str = FIELD,
    documents: Documents = "joined",
    format: Format = "text",
    template: Path | None = None,
    truncate: Truncate = "end",
) -> Corpus:
    """Opens a corpus: reads texts into memory, and memory-maps token files. Writes nothing.

    Args:
        data: One entry or several: names of `--data` of `python -m jgraph.train`, with or without weights. Without weights, all
            texts together are one source, each directory of token files is one, and shares are proportional to sizes.
        seq_len: Predicted tokens per row. Each side of each source must have at least seq_len + 1 tokens.
        vocab_size: Rows of the model's embedding, larger than every id. None accepts all ids.
        tokenizer: The tokenizer that reads text, or its folder or tokenizer.json. None reads text beside token files with their
            tokenizer, and other text as bytes. A directory of token files with its own tokenizer does not use it.
        field: Field of the text in .jsonl files, or its column in .parquet files and datasets.
        documents: `separate` requires document boundaries of every source. `joined` accepts all sources.
        format: `chat` reads every entry as chat records, and packs them into rows.
        template: File of a chat template that replaces those of the folder, if `tokenizer` is not a `Tokenizer`.
        truncate: Action for a conversation that is longer than a row, described at `Truncate`.

    Returns:
        The corpus. A tenth of the documents of each text source is held out. Token files keep their sides.

    Raises:
        ConfigError: If a weight is not positive and finite, or only some entries have one.
        DataError: If data is missing, damaged, too short, or does not fit the tokenizer, the vocabulary or the settings.
    """
    names = [data] if isinstance(data, str) else data
    try:
        entries = _texts.weighted(names)
        groups = _groups(entries)
        if not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer.of(tokenizer, template)
        beside = _tokenizer_beside([name for name, _ in entries])
        if beside and tokenizer.name == "bytes" and not all(_is_tokens(name) for name, _ in entries):
            tokenizer = Tokenizer.of(beside)
        if format == "chat":
            reader = ChatReader(tokenizer)
            parts = [_with_weight(_read_chats(group, reader, seq_len, truncate), weight) for group, weight in groups]
        else:
            parts = [_with_weight(_open(group, tokenizer, field, documents), weight) for group, weight in groups]
    except OSError as e:
        raise DataError(f"`data` is {' '.join(names)}: cannot be read: {e}") from e
    for part in parts:
        _check(part, seq_len, vocab_size, documents)
    if len(parts) == 1:
        return parts[0]
    name = " ".join(part.name for part in parts)
    with _texts.named("data", name):
        _check_vocabularies([(part.name, part.vocab_size, part.train.dtype) for part in parts])
    return replace(
        parts[0],
        name=name,
        sources=tuple(source for part in parts for source in part.sources),
        heldout_sources=tuple(source for part in parts for source in part.heldout_sources),
        fingerprint=hashlib.sha256(b"".join(bytes.fromhex(part.fingerprint) for part in parts)).hexdigest(),
        zlib_nats_per_token=None,
    )


def _check(part: Corpus, seq_len: int, vocab_size: int | None, documents: Documents) -> None:
    """Raises DataError if a part of a corpus does not fit the model or the settings."""
    if min(len(part.train), len(part.heldout)) < seq_len + 1:
        raise DataError(
            f"`data` is {part.name}: {len(part.train)} tokens to train on and {len(part.heldout)} held out, "
            f"`seq_len` {seq_len} needs at least {seq_len + 1} of each: use a longer text or a smaller `seq_len`"
        )
    ids = part.vocab_size
    if isinstance(part.train, np.ndarray):  # in memory, so the largest id is known, and a smaller vocabulary may suffice
        ids = 1 + int(max(np.max(part.train[:]), np.max(part.heldout[:])))
    if vocab_size is not None and ids > vocab_size:
        raise DataError(f"`model.vocab_size` is {vocab_size}: `data` {part.name} needs at least {ids} token ids")
    for source in (*part.sources, *part.heldout_sources) if documents == "separate" else ():
        source.require_index("data_documents", "separate")


def _groups(entries: list[tuple[str, Fraction | None]]) -> list[tuple[list[str], Fraction | None]]:
    """Returns the names and the weight of each source. Texts without a weight are one source."""
    groups, texts = [], []
    for name, weight in entries:
        if weight is not None or _is_tokens(name):
            groups.append(([name], weight))
            continue
        if not texts:
            groups.append((texts, None))
        texts.append(name)
    return groups


def _is_tokens(name: str) -> bool:
    """True if a name is a directory of token files, as `python -m jgraph.data make` writes it."""
    # Unlike `Path.is_dir`, this is False for a name that is too long.
    return name not in _texts.CORPORA and os.path.isdir(name) and any(Path(name).glob("*.bin"))


def tokenizer_beside(data: Sequence[str]) -> Path | None:
    """Returns the first directory of token files that has a tokenizer. Raises DataError if two have different ones."""
    return _tokenizer_beside([name for name, _ in _texts.weighted(data)])


def is_text(data: Sequence[str]) -> bool:
    """True if every entry of `data` is a text that exists, a dataset or a named corpus, and none has token files.

    Does not open the files, and does not check that a dataset exists.
    """
    names = [name for name, _ in _texts.weighted(data)]
    return all(_texts.files_of(name) and not _is_tokens(name) for name in names)


def _tokenizer_beside(names: list[str]) -> Path | None:
    found = [(name, file.read_bytes()) for name in names if _is_tokens(name) and (file := vocabulary(Path(name)))]
    for (first, own), (second, other) in pairwise(found):
        if own != other:
            raise DataError(f"`data` {second} was made with another {TOKENIZER_FILE} than {first}; make one of them again")
    return Path(found[0][0]) if found else None


def _open(names: list[str], tokenizer: Tokenizer, field: str, documents: Documents) -> Corpus:
    name = " ".join(names)
    with _texts.named("data", name):
        if _is_tokens(name):
            return _open_directory(name, tokenizer)
        texts = [document for _, in_file in _texts.read("data", names, field, documents) for document in in_file]
        return _split_documents(name, texts, tokenizer)


def _read_chats(names: list[str], reader: ChatReader, seq_len: int, truncate: Truncate) -> Corpus:
    """Reads chat records as one source, and packs each side into rows."""
    name = " ".join(names)
    with _texts.named("data", name):
        if any(map(_is_tokens, names)):
            raise DataError("has token files, which hold text only: must be chat records for `data_format` chat")
        conversations = sorted(reader.read(names), key=lambda one: one.digest)
        digests = [one.digest for one in conversations]
        num_heldout = _texts.count_heldout(digests)
        hashed = hashlib.sha256(b"".join(digests))
        for one in conversations:
            hashed.update(len(one.ids).to_bytes(8, "little") + one.ids.tobytes() + one.trained.tobytes())

        def side(own: list[Conversation]) -> tuple[Source, ...]:
            return (pack_rows(own, seq_len=seq_len, truncate=truncate, dtype=reader.tokenizer.dtype, name=name),)

        return Corpus(
            name,
            sources=side(conversations[num_heldout:]),
            heldout_sources=side(conversations[:num_heldout]),
            vocab_size=reader.tokenizer.vocab_size,
            fingerprint=hashed.hexdigest(),
            tokenizer=reader.tokenizer,
        )


def _with_weight(part: Corpus, weight: Fraction | None) -> Corpus:
    """Sets the weight of a corpus of one source; None for its number of tokens."""
    weight = weight or Fraction(len(part.train))
    train, heldout = (tuple(replace(source, weight=weight) for source in side) for side in (part.sources, part.heldout_sources))
    return replace(part, sources=train, heldout_sources=heldout)


def _check_vocabularies(parts: list[tuple[str, int, np.dtype]]) -> None:
    """Raises DataError if parts of a corpus, each with its name, vocabulary size and dtype, come from different tokenizers."""
    first, *expected = parts[0]
    for part, *found in parts:
        if found != expected:
            raise DataError(
                f"{part} has a vocabulary of {found[0]} in {found[1]}, {first} one of {expected[0]} in "
                f"{expected[1]}: all must come from one tokenizer, which also reads text beside token files"
            )


def _split_documents(name: str, documents: list[bytes], tokenizer: Tokenizer) -> Corpus:
    by_hash = sorted((_texts.digest(document), document) for document in documents)
    digests = [key for key, _ in by_hash]
    texts = [document for _, document in by_hash]
    num_heldout = _texts.count_heldout(digests)
    heldout, train = (_tokenize(name, part, tokenizer) for part in (texts[:num_heldout], texts[num_heldout:]))
    ids = b"" if tokenizer.is_as_before else train.tokens[:].tobytes() + heldout.tokens[:].tobytes()
    return Corpus(
        name,
        sources=(train,),
        heldout_sources=(heldout,),
        vocab_size=tokenizer.vocab_size,
        # A hash of hashes changes with the bytes of a document and with its boundaries.
        fingerprint=hashlib.sha256(b"".join(digests) + tokenizer.source + ids).hexdigest(),
        tokenizer=tokenizer,
        zlib_nats_per_token=_zlib_nats(documents) if tokenizer.name == "bytes" else None,
    )


def _tokenize(name: str, documents: list[bytes], tokenizer: Tokenizer) -> Source:
    ids = [array.astype(tokenizer.dtype, copy=False) for array in tokenizer.documents(documents)]
    tokens = np.concatenate(ids)
    lengths = [len(array) for array in ids]
    index = Index(np.cumsum(lengths), [len(lengths)], [len(tokens)])
    return Source(tokens, index=index, name=name, num_documents=len(documents))


def side_files(directory: Path) -> dict[Side, list[Path]]:
    """Lists the token files of each side of a directory, sorted by name. Raises DataError if there are others, or none."""
    paths = sorted(directory.glob("*.bin"))
    sides: dict[Side, list[Path]] = {"train": [], "heldout": []}
    for side, files in sides.items():
        files += [path for path in paths if path.name.startswith(f"{side}-")]
    problems = [f"has no {side}-*.bin file" for side, files in sides.items() if not files]
    known = [path for files in sides.values() for path in files]
    problems += [f"{path.name} is neither train-*.bin nor heldout-*.bin" for path in paths if path not in known]
    if problems:
        raise DataError(f"{problems[0]}; make such a directory with python -m jgraph.data make")
    return sides


def _open_directory(name: str, tokenizer: Tokenizer) -> Corpus:
    """Maps all token files of a directory. Reads only their headers."""
    opened = {side: [TokenFile(path) for path in paths] for side, paths in side_files(Path(name)).items()}
    files = [file for of_side in opened.values() for file in of_side]
    _check_vocabularies([(file.path.name, file.header.vocab_size, file.header.dtype) for file in files])
    hashed = b""
    for side, of_side in opened.items():
        hashed += side.encode() + b"".join(bytes.fromhex(file.header.sha256) for file in of_side)
    return Corpus(
        name,
        sources=(_join(name, "train", opened["train"]),),
        heldout_sources=(_join(name, "heldout", opened["heldout"]),),
        vocab_size=files[0].header.vocab_size,
        fingerprint=hashlib.sha256(hashed).hexdigest(),
        tokenizer=_decoder(Path(name), tokenizer),
    )


def _decoder(directory: Path, tokenizer: Tokenizer) -> Tokenizer:
    """Returns the tokenizer of token files, else the given one. Ids become numbers if neither is known or `hf` is missing."""
    if vocabulary(directory) is None and tokenizer.name != "bytes":
        return tokenizer
    is_readable = vocabulary(directory) is not None and importlib.util.find_spec("transformers") is not None
    return Tokenizer.of(directory) if is_readable else Tokenizer(without=f"{directory} has no tokenizer")


def _join(name: str, side: Side, files: list[TokenFile]) -> Source:
    documents = [file.header.num_documents for file in files]
    index = None
    path = Path(name, ENDS_FILE.format(side=side))
    if path.exists():
        index = Index(read_tokens(path), documents, [len(file) for file in files])
        if len(index) != sum(documents):
            raise DataError(
                f"{path}: has the ends of {len(index)} documents, but the token files beside it have {sum(documents)}; "
                "remove it to shuffle by windows, or make all of them again"
            )
    return Source(Concatenated(files), index=index, name=name, num_documents=sum(documents))


def _zlib_nats(documents: list[bytes]) -> float:
    # In the order of the source, not by hash, because neighboring documents are similar and compress better.
    text = b"\n".join(documents)[:_ZLIB_BYTES]
    return 8 * math.log(2) * len(zlib.compress(text, level=9)) / len(text)
