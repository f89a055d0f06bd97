"""Tokenizes text into a directory of token files. Needs memory for one text file, and for a few bytes per document.

Documents are tokenized into a spool, a token file in the order of the text, then copied in the order of their hashes, held-out
documents first. The directory is hidden until it is complete.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import tee
from pathlib import Path
from typing import TypeAlias

import numpy as np

from jgraph.data._texts import (
    FIELD,
    HELDOUT_FRACTION,
    check_empty,
    copy_files,
    count_heldout,
    digest,
    named,
    new_folder,
    read,
)
from jgraph.data._tokenfile import ENDS_FILE, read_tokens, write_tokens
from jgraph.data.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, Tokenizer, tokenizer_files
from jgraph.errors import DataError, download_hint, os_errors, require

SHARD_TOKENS = 1 << 27

_Document: TypeAlias = tuple[bytes, int, int]
"""The hash of a document and its [start, stop) tokens in the spool."""


def make_token_files(
    texts: Sequence[str | Path],  # names in `jgraph.data._texts`, in any order
    tokenizer: Path,  # a Hugging Face folder, or a tokenizer.json
    out: Path,  # new or empty. Missing parents are created
    *,
    field: str = FIELD,
    heldout_fraction: float = HELDOUT_FRACTION,
    shard_tokens: int = SHARD_TOKENS,  # a file ends with the document that reaches this number
) -> None:
    """Tokenizes text into a new directory of token files, with copies of the files of the tokenizer.

    Writes train-00000.bin, train-00001.bin and so on, the ends of their documents in train.ends, and the same for held-out
    documents. The documents of each side are in the order of their SHA-256.
    """
    require(0 < shard_tokens < 2**31, "shard_tokens", shard_tokens, "positive and below 2**31")
    require(0 < heldout_fraction < 1, "heldout_fraction", heldout_fraction, "in (0, 1)")  # before hours of tokenizing
    if not texts:
        raise DataError("`text` is empty: name at least one text file")
    if not tokenizer.exists():
        raise DataError(f"`tokenizer` is {tokenizer}: no such file or folder{download_hint(tokenizer)}")
    check_empty(out, field="out")
    with os_errors("tokenizer", tokenizer, "read"):
        encoder = Tokenizer.of(tokenizer)
        if encoder.name == "bytes":
            raise DataError(f"`tokenizer` is {tokenizer}: must be a folder with a tokenizer.json or other vocabulary")
        folder = Path(encoder.name)
        files = {name: folder / name for name in tokenizer_files(folder)} if folder.is_dir() else {TOKENIZER_FILE: tokenizer}
    size = {"vocab_size": encoder.vocab_size}
    with os_errors("out", out), new_folder(out) as partial:
        copy_files(files, partial)
        spool = partial / "spool"
        declared = partial / TOKENIZER_CONFIG_FILE
        fields = json.loads(declared.read_text(encoding="utf-8")) if declared.exists() else {}
        if fields or encoder.kind != "TokenizersBackend":
            # `transformers` also chooses a class by the model type of a config.json beside it: later none, or another one.
            declared.write_text(json.dumps(fields | {"tokenizer_class": encoder.kind}, indent=2), encoding="utf-8")
        documents: list[_Document] = []
        write_tokens(spool, _tokenize(texts, field, encoder, documents), **size)
        documents.sort()
        num_heldout = count_heldout([key for key, _, _ in documents], heldout_fraction)
        tokens = read_tokens(spool)
        for side, part in (("heldout", documents[:num_heldout]), ("train", documents[num_heldout:])):
            ends = []
            for index, shard in enumerate(_shards(part, shard_tokens)):
                spans = (tokens[start:stop] for _, start, stop in shard)
                write_tokens(partial / f"{side}-{index:05d}.bin", spans, **size)
                ends.append(np.cumsum([stop - start for _, start, stop in shard], dtype=np.int64))
            write_tokens(partial / ENDS_FILE.format(side=side), ends, vocab_size=1 + max(int(array[-1]) for array in ends))
        spool.unlink()


def _tokenize(texts: Sequence[str | Path], field: str, encoder: Tokenizer, found: list[_Document]) -> Iterator[np.ndarray]:
    """Yields the ids of all documents. Appends their hashes and positions to `found`."""
    start = 0
    for path, documents in read("text", [str(text) for text in texts], field):
        # `tee` holds as many documents as are encoded together.
        documents, again = tee(documents)
        with named("text", path):
            for document, ids in zip(again, encoder.documents(documents), strict=True):
                found.append((digest(document), start, start + len(ids)))
                yield ids
                start += len(ids)


def _shards(documents: Sequence[_Document], shard_tokens: int) -> Iterator[Sequence[_Document]]:
    first = num_tokens = 0
    for index, (_, start, stop) in enumerate(documents, start=1):
        num_tokens += stop - start
        if num_tokens >= shard_tokens or index == len(documents):
            yield documents[first:index]
            first = index
            num_tokens = 0
