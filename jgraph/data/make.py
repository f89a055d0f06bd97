"""Text to a directory of token files, in memory no larger than one text file and a line per document.

First every document is tokenized into a spool file in the order it comes; then the documents are copied from there in the
order of their hashes, the held-out ones first. All happens in a hidden directory that gets its name when it is complete.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import tee
from pathlib import Path
from typing import TypeAlias

import numpy as np

from jgraph.data.documents import HELDOUT_FRACTION, count_heldout, digest, threshold
from jgraph.data.files import FIELD, documents_of, files_of
from jgraph.data.tokenfile import ENDS_FILE, token_dtype, write_tokens
from jgraph.data.tokenizer import TOKENIZER_FILE, Encoder, decode_utf8, train_bpe
from jgraph.errors import DataError, download_hint, os_errors, require

SHARD_TOKENS = 1 << 27


# A document's hash and its span of tokens in the spool.
_Document: TypeAlias = tuple[bytes, int, int]


def make_token_files(
    texts: Sequence[Path],
    tokenizer: Path | int,
    out: Path,
    *,
    field: str = FIELD,
    heldout_fraction: float = HELDOUT_FRACTION,
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Tokenizes files into `out`: train-*.bin, heldout-*.bin, where their documents end, and the tokenizer.

    Args:
        texts: files, directories and globs (see `files`). Their order does not matter.
        tokenizer: a tokenizer.json of the `tokenizers` library; or the size of the vocabulary of a byte-level BPE that is
            trained on the documents that are not held out.
        out: a directory that does not exist yet or is empty.
        field: where the text is in JSON Lines and Parquet.
        heldout_fraction: documents whose SHA-256 is in this lowest part are held out; in (0, 1).
        shard_tokens: a file is closed with the document that reaches this many tokens.

    Raises:
        ConfigError: a number is out of range; the tokenizer or a directory of texts cannot be read, or `out` not be created.
        DataError: a text is missing, empty, damaged, not UTF-8; all documents are equal; `out` is in use; or no tokenizer.
        OSError: a token file cannot be written. Then, as after any interruption, `out` is as it was.
    """
    require(0 < shard_tokens < 2**31, "shard_tokens", shard_tokens, "positive and below 2**31")
    require(0 < heldout_fraction < 1, "heldout_fraction", heldout_fraction, "in (0, 1)")  # before hours of tokenizing
    files = _files(texts, tokenizer, out)
    out = out.absolute()
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    encoder = None
    if isinstance(tokenizer, Path):
        with os_errors("tokenizer", tokenizer, "read"):
            encoder = Encoder(tokenizer)
    with os_errors("out", out):
        partial.mkdir(parents=True)
    try:
        if isinstance(tokenizer, int):
            train_bpe(_trained(files, field, heldout_fraction), tokenizer, partial / TOKENIZER_FILE)
        else:
            shutil.copyfile(tokenizer, partial / TOKENIZER_FILE)
        encoder = encoder or Encoder(partial / TOKENIZER_FILE)
        spool = partial / "spool"
        documents = sorted(_tokenize(files, field, encoder, spool))
        num_heldout = count_heldout([key for key, _, _ in documents], heldout_fraction)
        tokens = np.memmap(spool, dtype=token_dtype(encoder.vocab_size), mode="r")
        for side, part in (("heldout", documents[:num_heldout]), ("train", documents[num_heldout:])):
            ends = []
            for index, shard in enumerate(_shards(part, shard_tokens)):
                spans = (tokens[start:stop] for _, start, stop in shard)
                write_tokens(partial / f"{side}-{index:05d}.bin", spans, vocab_size=encoder.vocab_size)
                ends.append(np.cumsum([stop - start for _, start, stop in shard], dtype=np.int64))
            write_tokens(partial / ENDS_FILE.format(side=side), ends, vocab_size=1 + max(int(own[-1]) for own in ends))
        spool.unlink()
        partial.rename(out)
    except OSError as e:
        # Python names the file if opening it fails, but not if writing to it fails.
        if e.filename is not None and partial.name not in str(e.filename):
            raise
        with os_errors("out", out):
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _files(texts: Sequence[Path], tokenizer: Path | int, out: Path) -> list[tuple[Path, Path]]:
    """Returns all files to read, each with what named it."""
    if not texts:
        raise DataError("`text` is empty: name at least one text file")
    files = []
    for text in texts:
        with os_errors("text", text, "read"):
            found = files_of(str(text))
        if not found:
            problem = "has no files" if text.is_dir() else f"no such file{download_hint(text, kind='dataset')}"
            raise DataError(f"`text` is {text}: {problem}")
        files += [(path, text) for path in found]
    if isinstance(tokenizer, Path) and not tokenizer.is_file():
        problem = "a directory; name a file" if tokenizer.is_dir() else f"no such file{download_hint(tokenizer)}"
        raise DataError(f"`tokenizer` is {tokenizer}: {problem}")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"`out` is {out}: it exists and is not an empty directory; name another")
    return files


def _trained(files: Sequence[tuple[Path, Path]], field: str, heldout_fraction: float) -> Iterator[str]:
    """Yields the documents that are not held out."""
    held_out = threshold(heldout_fraction)
    for path, _ in files:
        with _named(path):
            documents = _documents(path, field, len(files))
            yield from map(decode_utf8, (document for document in documents if digest(document) >= held_out))


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError as e:
        # In this module the argument that names the field is called `field`.
        raise DataError(f"`text` is {path}: {e}".replace("`data_field`", "`field`")) from e


def _documents(path: Path, field: str, of_files: int) -> Iterator[bytes]:
    """Yields the documents of a file. Raises DataError if the file cannot be read."""
    try:
        yield from documents_of(path, field, of_files=of_files)
    except OSError as e:
        raise DataError(f"cannot be read ({e.strerror or e})") from e


def _tokenize(files: Sequence[tuple[Path, Path]], field: str, encoder: Encoder, spool: Path) -> Iterator[_Document]:
    dtype = token_dtype(encoder.vocab_size)
    start = 0
    empty = {text for _, text in files}
    with spool.open("wb") as file:
        for path, text in files:
            with _named(path):
                # As many documents wait in between as are encoded together.
                documents, again = tee(_documents(path, field, len(files)))
                for document, ids in zip(again, encoder.encode(documents), strict=True):
                    # Before they are stored, where those that do not fit would become others.
                    largest, vocab_size = ids.max(initial=0), encoder.vocab_size
                    if largest >= vocab_size:
                        raise DataError(f"the tokenizer gives id {largest} where its vocabulary ends at {vocab_size - 1}")
                    file.write(ids.astype(dtype).tobytes())
                    yield digest(document), start, start + len(ids)
                    start += len(ids)
                    empty.discard(text)
    for text in empty:
        raise DataError(f"`text` is {text}: the file is empty; name one with text in it")


def _shards(documents: Sequence[_Document], shard_tokens: int) -> Iterator[Sequence[_Document]]:
    first = num_tokens = 0
    for index, (_, start, stop) in enumerate(documents, start=1):
        num_tokens += stop - start
        if num_tokens >= shard_tokens or index == len(documents):
            yield documents[first:index]
            first, num_tokens = index, 0
