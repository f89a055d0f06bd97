"""Corpora: texts by name, files of text and directories of token files as two sides of tokens, one of them held out.

Text is read as bytes, a token each, or through a tokenizer. Documents are sorted by their SHA-256 (so that no order of files
matters), the lowest tenth is held out, and a newline follows each, or the tokenizer's end of text. A directory of token files,
train-*.bin and heldout-*.bin, was split when it was made; its files are mapped, never loaded.
"""

import difflib
import hashlib
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from jgraph.data.documents import Documents, count_heldout, digest
from jgraph.data.files import FIELD, documents_of, files_of, is_token_directory, weighted
from jgraph.data.mixture import Source
from jgraph.data.orders import Index
from jgraph.data.sources import CORPORA, SYNTHETIC_ENTROPY
from jgraph.data.tokenfile import ENDS_FILE, Concatenated, TokenFile, Tokens, read_tokens, token_dtype
from jgraph.data.tokenizer import TOKENIZER_FILE, Encoder, decode_bytes, load_decoder
from jgraph.errors import DataError, download_hint

Side = Literal["train", "heldout"]

# zlib looks back 32 KiB, so its rate settles early; this many bytes take about 3 s.
_ZLIB_BYTES = 32 << 20


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokens to train on and tokens held out, from different documents.

    Attributes:
        name: as `load` was given it.
        train, heldout: 1-D ids, uint8 for bytes, else uint16 or uint32; those of token files are mapped, and checked when read.
            Those of several sources are end to end.
        train_documents, heldout_documents: their numbers.
        vocab_size: every id is smaller; 256 for bytes.
        fingerprint: SHA-256 of the contents as 64 hexadecimal digits; does not depend on the order of documents.
        zlib_nats_per_token: what zlib, level 9, needs for a byte of the text (of its first 32 MiB); None for other tokens.
        entropy_nats_per_token: what the best model would need; None where nobody knows.
        files: token files, to be verified.
        decoder: ids to text; call `decode`.
        sources, heldout_sources: what `train` and `heldout` consist of, with their weights and where their documents lie.
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
    sources: tuple[Source, ...] = field(kw_only=True, repr=False)
    heldout_sources: tuple[Source, ...] = field(kw_only=True, repr=False)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of 1-D ids. What is no UTF-8 reads as U+FFFD; without a tokenizer, ids read as numbers."""
        return self.decoder([int(token) for token in ids])


def load(
    data: str | Sequence[str],
    *,
    seq_len: int,
    vocab_size: int | None,
    tokenizer: Path | None = None,
    field: str = FIELD,
    documents: Documents = "joined",
) -> Corpus:
    """Opens a corpus.

    Args:
        data: one or several of `python-docs`, `python-source`, `synthetic`, a file, a directory or a glob (see `files`), and a
            directory of token files. A corpus name wins over a file of that name; write ./NAME for the file. NAME:WEIGHT makes
            each a source with that share of the rows. Without weights all texts are one source, each directory of token files
            is one, and their shares are as large as they are.
        seq_len: each side of each source must have at least seq_len + 1 tokens.
        vocab_size: rows of the model's embedding; token ids must be smaller.
        tokenizer: a tokenizer.json, through which text is read. None reads text beside token files through theirs, and else
            as bytes. Token files were made by their own.
        field: where the text is in JSON Lines and Parquet.
        documents: `separate` needs a text that says where its documents end.

    Raises:
        ConfigError: a weight is not positive, or only some have one.
        DataError: there is no such thing, or it cannot be read, is empty, too short, damaged, or has ids that are too large;
            or token files come from different tokenizers; or nothing says where documents end.
    """
    try:
        groups = _groups(weighted([data] if isinstance(data, str) else data))
        tokenizer = tokenizer or _tokenizer_beside([name for names, _ in groups for name in names])
    except OSError as e:
        raise DataError(f"`data` is {data if isinstance(data, str) else ' '.join(data)}: cannot be read: {e}") from e
    parts = []
    for names, weight in groups:
        part = _open(names, tokenizer, field, documents)
        if min(len(part.train), len(part.heldout)) < seq_len + 1:
            raise DataError(
                f"`data` is {part.name}: {len(part.train)} tokens to train on and {len(part.heldout)} held out, "
                f"`seq_len` {seq_len} needs at least {seq_len + 1} of each: use a longer text or a smaller `seq_len`"
            )
        # Text is in memory: a model may be as small as its largest byte allows. Token files are taken by their header's word.
        ids = part.vocab_size
        if part.train.dtype == np.uint8:
            ids = 1 + int(max(np.max(part.train[:]), np.max(part.heldout[:])))
        if vocab_size is not None and ids > vocab_size:
            raise DataError(f"`model.vocab_size` is {vocab_size}: `data` {part.name} needs at least {ids} token ids")
        weight = weight or Fraction(len(part.train))
        (train,), (heldout,) = part.sources, part.heldout_sources
        if documents == "separate":
            train.firsts(0, 1), heldout.firsts(0, 1)
        weighed = replace(train, weight=weight), replace(heldout, weight=weight)
        parts.append(replace(part, sources=weighed[:1], heldout_sources=weighed[1:]))
    return parts[0] if len(parts) == 1 else _joined(parts)


def _groups(entries: list[tuple[str, Fraction | None]]) -> list[tuple[list[str], Fraction | None]]:
    """Returns what each source is read from, and its weight: texts without one are read together."""
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
    return name not in CORPORA and is_token_directory(Path(name))


def tokenizer_file(data: Sequence[str]) -> Path | None:
    """Returns the tokenizer.json of the first token files that `data` names; None where there is none."""
    try:
        return _tokenizer_beside([name for name, _ in weighted(data)])
    except OSError:
        return None


def is_text(data: Sequence[str]) -> bool:
    """Returns whether `data` names texts that are there, and no token files."""
    names = [name for name, _ in weighted(data)]
    return all(name in CORPORA or (files_of(name) and not _is_tokens(name)) for name in names)


def _tokenizer_beside(names: list[str]) -> Path | None:
    found = [path for name in names if _is_tokens(name) and (path := Path(name, TOKENIZER_FILE)).exists()]
    for one, other in pairwise(found):
        if one.read_bytes() != other.read_bytes():
            raise DataError(
                f"`data` {other.parent} was made with another {TOKENIZER_FILE} than {one.parent}; make one of them again"
            )
    return found[0] if found else None


def _open(names: list[str], tokenizer: Path | None, field: str, documents: Documents) -> Corpus:
    """Opens what makes up one source: a directory of token files, or texts."""
    name = " ".join(names)
    try:
        if _is_tokens(names[0]):
            return _from_directory(name)
        return _from_documents(name, _documents(names, field, documents), tokenizer)
    except OSError as e:
        raise DataError(f"`data` is {name}: cannot be read: {e}") from e


def _documents(names: list[str], field: str, how: Documents) -> list[bytes]:
    files = {name: [] if name in CORPORA else _files(name) for name in names}
    of_files = sum(len(paths) or 1 for paths in files.values())
    documents = []
    for name, paths in files.items():
        own = CORPORA[name]() if name in CORPORA else []
        for path in paths:
            try:
                own += documents_of(path, field, of_files=of_files, documents=how)
            except DataError as e:
                raise DataError(f"`data` is {path}: {e}", field=e.field) from e
        if not own:
            raise DataError(f"`data` is {name}: the file is empty; name one with text in it")
        documents += own
    return documents


def _files(name: str) -> list[Path]:
    paths = files_of(name)
    if paths:
        return paths
    if Path(name).is_dir():
        raise DataError(
            f"`data` is {name}: has no files; name one with texts, or make token files with python -m jgraph.data make"
        )
    close = difflib.get_close_matches(name, CORPORA, n=1)
    hint = f"; did you mean {close[0]}?" if close else download_hint(name, kind="dataset")
    raise DataError(f"`data` is {name}: no such file or directory, and not one of the corpora {', '.join(CORPORA)}{hint}")


def _joined(parts: list[Corpus]) -> Corpus:
    first = parts[0]
    for part in parts:
        if (part.vocab_size, part.train.dtype) != (first.vocab_size, first.train.dtype):
            raise DataError(
                f"`data` {part.name} has a vocabulary of {part.vocab_size}, {first.name} one of {first.vocab_size}: all must "
                f"come from one tokenizer; text is read through the {TOKENIZER_FILE} of the token files beside it"
            )
    return Corpus(
        " ".join(part.name for part in parts),
        Concatenated([part.train for part in parts]),
        Concatenated([part.heldout for part in parts]),
        train_documents=sum(part.train_documents for part in parts),
        heldout_documents=sum(part.heldout_documents for part in parts),
        vocab_size=first.vocab_size,
        fingerprint=hashlib.sha256(b"".join(bytes.fromhex(part.fingerprint) for part in parts)).hexdigest(),
        files=tuple(path for part in parts for path in part.files),
        decoder=next((part.decoder for part in parts if not part.files), first.decoder),
        sources=tuple(source for part in parts for source in part.sources),
        heldout_sources=tuple(source for part in parts for source in part.heldout_sources),
    )


def _from_documents(name: str, documents: list[bytes], tokenizer: Path | None) -> Corpus:
    by_hash = sorted((digest(document), document) for document in documents if document.strip())
    digests = [key for key, _ in by_hash]
    try:
        num_heldout = count_heldout(digests)
        encoder = Encoder(tokenizer) if tokenizer else None
        sides = [
            _source(name, [document for _, document in own], encoder) for own in (by_hash[num_heldout:], by_hash[:num_heldout])
        ]
    except DataError as e:
        raise DataError(f"`data` is {name}: {e}") from e
    return Corpus(
        name,
        *(side.tokens for side in sides),
        train_documents=len(by_hash) - num_heldout,
        heldout_documents=num_heldout,
        vocab_size=encoder.vocab_size if encoder else 256,
        # A hash of hashes: it changes with the bytes of a document and with where one ends and the next begins.
        fingerprint=hashlib.sha256(b"".join(digests) + (tokenizer.read_bytes() if tokenizer else b"")).hexdigest(),
        zlib_nats_per_token=None if encoder else _zlib_nats(documents),
        entropy_nats_per_token=SYNTHETIC_ENTROPY if name == "synthetic" and not encoder else None,
        decoder=load_decoder(tokenizer) if tokenizer else decode_bytes,
        sources=(sides[0],),
        heldout_sources=(sides[1],),
    )


def _source(name: str, documents: list[bytes], encoder: Encoder | None) -> Source:
    """Returns the tokens of documents, one after another."""
    if encoder is None:
        tokens = np.frombuffer(b"".join(document + b"\n" for document in documents), np.uint8)
        lengths = [len(document) + 1 for document in documents]
    else:
        ids = list(encoder.encode(documents))
        tokens, lengths = np.concatenate(ids).astype(token_dtype(encoder.vocab_size)), [len(own) for own in ids]
    return Source(tokens, index=Index(np.cumsum(lengths), [len(lengths)], [len(tokens)]), name=name)


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


def _from_directory(name: str) -> Corpus:
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
    documents = {side: sum(file.header.num_documents for file in files) for side, files in opened.items()}
    sources = {side: Source(Concatenated(files), index=_index(side, files), name=name) for side, files in opened.items()}
    return Corpus(
        name,
        train=sources["train"].tokens,
        heldout=sources["heldout"].tokens,
        train_documents=documents["train"],
        heldout_documents=documents["heldout"],
        vocab_size=first.vocab_size,
        fingerprint=hasher.hexdigest(),
        files=tuple(path for files in sides.values() for path in (*files, *ends_files(files))),
        decoder=load_decoder(Path(name, TOKENIZER_FILE)),
        sources=(sources["train"],),
        heldout_sources=(sources["heldout"],),
    )


def ends_files(files: list[Path]) -> list[Path]:
    """Returns the file, if there is one, that says where the documents of one side's token files end."""
    path = files[0].with_name(ENDS_FILE.format(side=files[0].name.partition("-")[0]))
    return [path] if path.exists() else []


def _index(side: str, files: list[TokenFile]) -> Index | None:
    for path in ends_files([file.path for file in files]):
        headers = [file.header for file in files]
        index = Index(read_tokens(path), [one.num_documents for one in headers], [one.num_tokens for one in headers])
        if len(index) != sum(index.documents):
            raise DataError(
                f"{path}: has the ends of {len(index)} documents where the {side} files beside it have {sum(index.documents)}; "
                "remove it, which leaves shuffling by windows, or make all of them again"
            )
        return index
    return None


def _zlib_nats(documents: list[bytes]) -> float:
    # In the order of the source, where neighbours are alike, not by hash: zlib should get the text as one would compress it.
    text = b"\n".join(documents)[:_ZLIB_BYTES]
    return 8 * math.log(2) * len(zlib.compress(text, level=9)) / len(text)
