"""A directory of token files: train-*.bin and heldout-*.bin, split when they were made, mapped and never loaded."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jgraph.data import tokenfile
from jgraph.data.tokens import Concatenated, Tokens
from jgraph.errors import DataError

Side = Literal["train", "heldout"]


@dataclass(frozen=True, eq=False)
class TokenDirectory:
    """The files of a directory, mapped.

    Attributes:
        train: 1-D uint16 or uint32 ids; an np.memmap when there is one file, else the files end to end.
        heldout: likewise.
        train_documents: documents in the files of that side.
        heldout_documents: likewise.
        vocab_size: the one that all headers state.
        fingerprint: SHA-256 over the hashes in the headers, side by side, file by file.
    """

    train: Tokens
    heldout: Tokens
    train_documents: int
    heldout_documents: int
    vocab_size: int
    fingerprint: str


def side_files(directory: Path) -> dict[Side, list[Path]]:
    """The token files of each side, by name.

    Raises:
        DataError: a side has none, or a .bin file belongs to neither.
    """
    paths = sorted(directory.glob("*.bin"))
    remedy = "make such a directory with python -m jgraph.data make"
    if not paths:
        raise DataError(f"--data is {directory}: has no .bin files; {remedy}")
    sides: dict[Side, list[Path]] = {"train": [], "heldout": []}
    for path in paths:
        side, dash, _ = path.name.partition("-")
        if not dash or side not in sides:
            raise DataError(f"--data is {directory}: {path.name} is neither train-*.bin nor heldout-*.bin; {remedy}")
        sides[side].append(path)
    for side, files in sides.items():
        if not files:
            raise DataError(f"--data is {directory}: has no {side}-*.bin file; {remedy}")
    return sides


def open_directory(directory: Path) -> TokenDirectory:
    """Maps all files of a directory, reading only their headers.

    Raises:
        DataError: as `side_files` and `tokenfile.read_header`, or the files come from different vocabularies.
        OSError: a file cannot be read.
    """
    sides = side_files(directory)
    try:
        headers = {path: tokenfile.read_header(path) for files in sides.values() for path in files}
    except DataError as e:
        raise DataError(f"--data is {directory}: {e}") from e
    first_path, first = next(iter(headers.items()))
    hasher = hashlib.sha256()
    for side, files in sides.items():
        hasher.update(side.encode())
        for path in files:
            header = headers[path]
            if (header.vocab_size, header.dtype) != (first.vocab_size, first.dtype):
                raise DataError(
                    f"--data is {directory}: {path.name} has a vocabulary of {header.vocab_size} in {header.dtype}, "
                    f"{first_path.name} one of {first.vocab_size} in {first.dtype}: all files must come from one tokenizer"
                )
            hasher.update(bytes.fromhex(header.sha256))
    return TokenDirectory(
        train=_end_to_end(sides["train"]),
        heldout=_end_to_end(sides["heldout"]),
        train_documents=sum(headers[path].num_documents for path in sides["train"]),
        heldout_documents=sum(headers[path].num_documents for path in sides["heldout"]),
        vocab_size=first.vocab_size,
        fingerprint=hasher.hexdigest(),
    )


def _end_to_end(files: list[Path]) -> Tokens:
    parts = [tokenfile.read_tokens(path) for path in files]
    return parts[0] if len(parts) == 1 else Concatenated(parts)
