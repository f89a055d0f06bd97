"""A directory of token files: train-*.bin and heldout-*.bin, split when they were made, mapped and never loaded."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jgraph.data.tokenfile import TokenFile
from jgraph.data.tokens import Concatenated, Tokens
from jgraph.errors import DataError

Side = Literal["train", "heldout"]


@dataclass(frozen=True, eq=False)
class TokenDirectory:
    """The files of a directory, mapped.

    Attributes:
        train: 1-D uint16 or uint32 ids, the files end to end; a span is compared with the vocabulary when it is read.
        heldout: likewise.
        train_documents: documents in the files of that side.
        heldout_documents: likewise.
        vocab_size: the one that all headers state.
        fingerprint: SHA-256 over the hashes in the headers, side by side, file by file.
        files: those of both sides.
    """

    train: Tokens
    heldout: Tokens
    train_documents: int
    heldout_documents: int
    vocab_size: int
    fingerprint: str
    files: tuple[Path, ...]


def side_files(directory: Path) -> dict[Side, list[Path]]:
    """The token files of each side, by name.

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


def open_directory(directory: Path) -> TokenDirectory:
    """Maps all files of a directory, reading only their headers.

    Raises:
        DataError: as `side_files` and `TokenFile`, or the files come from different vocabularies.
        OSError: a file cannot be read.
    """
    sides = side_files(directory)
    try:
        opened = {side: [TokenFile(path) for path in files] for side, files in sides.items()}
    except DataError as e:
        raise DataError(f"`data` is {directory}: {e}") from e
    one = opened["train"][0]
    first = one.header
    hasher = hashlib.sha256()
    for side, files in opened.items():
        hasher.update(side.encode())
        for file in files:
            header = file.header
            if (header.vocab_size, header.dtype) != (first.vocab_size, first.dtype):
                raise DataError(
                    f"`data` is {directory}: {file.path.name} has a vocabulary of {header.vocab_size} in {header.dtype}, "
                    f"{one.path.name} one of {first.vocab_size} in {first.dtype}: all files must come from one tokenizer"
                )
            hasher.update(bytes.fromhex(header.sha256))
    return TokenDirectory(
        train=_end_to_end(opened["train"]),
        heldout=_end_to_end(opened["heldout"]),
        train_documents=sum(file.header.num_documents for file in opened["train"]),
        heldout_documents=sum(file.header.num_documents for file in opened["heldout"]),
        vocab_size=first.vocab_size,
        fingerprint=hasher.hexdigest(),
        files=tuple(file.path for files in opened.values() for file in files),
    )


def _end_to_end(files: list[TokenFile]) -> Tokens:
    return files[0] if len(files) == 1 else Concatenated(files)
