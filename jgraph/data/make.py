"""Text to a directory of token files, in memory no larger than one input file and a line per document.

First every document is tokenized into a spool file in the order it comes; then the documents are copied from there in the
order of their hashes, the held-out ones first. All happens in a hidden directory that gets its name when it is complete.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from jgraph.data.documents import FEWEST_BLOCKS, HELDOUT_FRACTION, count_heldout, cut, digest
from jgraph.data.tokenfile import token_dtype, write_tokens
from jgraph.data.tokenizer import TOKENIZER_FILE, Encoder
from jgraph.errors import DataError, require

SHARD_TOKENS = 1 << 27


# A document's hash and its span of tokens in the spool.
_Document: TypeAlias = tuple[bytes, int, int]


def make_token_files(
    texts: Sequence[Path],
    tokenizer: Path,
    out: Path,
    *,
    heldout_fraction: float = HELDOUT_FRACTION,
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Tokenizes UTF-8 text files into `out`: train-*.bin, heldout-*.bin and a copy of the tokenizer.

    Args:
        texts: files, cut into documents as `documents.cut` says. Their order does not matter.
        tokenizer: a tokenizer.json of the `tokenizers` library.
        out: a directory that does not exist yet or is empty.
        heldout_fraction: documents whose SHA-256 is in this lowest part are held out; in (0, 1).
        shard_tokens: a file is closed with the document that reaches this many tokens.

    Raises:
        ConfigError: a number is out of range.
        DataError: a text is missing, empty, not UTF-8; all documents are equal; `out` is in use; or no tokenizer.
        OSError: something cannot be read or written. Then, as after any interruption, `out` is as it was.
    """
    require(shard_tokens > 0, "shard_tokens", shard_tokens, "positive")
    require(0 < heldout_fraction < 1, "heldout_fraction", heldout_fraction, "in (0, 1)")  # before hours of tokenizing
    _check_paths(texts, tokenizer, out)
    encoder = Encoder(tokenizer)
    out = out.absolute()
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        spool = partial / "spool"
        documents = sorted(_tokenize(texts, encoder, spool))
        num_heldout = count_heldout([key for key, _, _ in documents], heldout_fraction)
        tokens = np.memmap(spool, dtype=token_dtype(encoder.vocab_size), mode="r")
        for side, part in (("heldout", documents[:num_heldout]), ("train", documents[num_heldout:])):
            for index, shard in enumerate(_shards(part, shard_tokens)):
                spans = (tokens[start:stop] for _, start, stop in shard)
                write_tokens(partial / f"{side}-{index:05d}.bin", spans, vocab_size=encoder.vocab_size)
        spool.unlink()
        shutil.copyfile(tokenizer, partial / TOKENIZER_FILE)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_paths(texts: Sequence[Path], tokenizer: Path, out: Path) -> None:
    if not texts:
        raise DataError("`text` is empty: name at least one text file")
    for flag, path in [*(("`text`", text) for text in texts), ("`tokenizer`", tokenizer)]:
        if not path.is_file():
            raise DataError(f"{flag} is {path}: " + ("a directory; name a file" if path.is_dir() else "no such file"))
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise DataError(f"`out` is {out}: it exists and is not an empty directory; name another")


def _tokenize(texts: Sequence[Path], encoder: Encoder, spool: Path) -> Iterator[_Document]:
    dtype = token_dtype(encoder.vocab_size)
    start = 0
    with spool.open("wb") as file:
        for text in texts:
            # A short text without separators is cut finer when it is alone; among many such texts, each is one document.
            documents = cut(text.read_bytes(), fewest_blocks=-(-FEWEST_BLOCKS // len(texts)))
            if not documents:
                raise DataError(f"`text` is {text}: the file is empty; name one with text in it")
            try:
                for document, ids in zip(documents, encoder.encode(documents), strict=True):
                    # Before they are stored, where those that do not fit would become others.
                    largest, vocab_size = ids.max(initial=0), encoder.vocab_size
                    if largest >= vocab_size:
                        raise DataError(f"the tokenizer gives id {largest} where its vocabulary ends at {vocab_size - 1}")
                    file.write(ids.astype(dtype).tobytes())
                    yield digest(document), start, start + len(ids)
                    start += len(ids)
            except DataError as e:
                raise DataError(f"`text` is {text}: {e}") from e


def _shards(documents: Sequence[_Document], shard_tokens: int) -> Iterator[Sequence[_Document]]:
    first = num_tokens = 0
    for index, (_, start, stop) in enumerate(documents, start=1):
        num_tokens += stop - start
        if num_tokens >= shard_tokens or index == len(documents):
            yield documents[first:index]
            first, num_tokens = index, 0
