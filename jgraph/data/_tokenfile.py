"""Token files: a 128-byte header, then the token ids, little-endian.

    offset  size  field
         0     8  magic, the bytes JGTOKENS
         8     4  version, uint32: 1
        12     4  bytes per token, uint32: 2 (uint16) or 4 (uint32)
        16     8  number of tokens, uint64
        24     8  number of documents, uint64
        32     4  vocabulary size, uint32: larger than every id
        36    32  SHA-256 of the token ids as stored
        68    60  ignored; written as zeros
       128        token ids

train.ends, beside train-*.bin, has the same format. Its ids are the ends of the documents, relative to the start of the file of
each document. heldout.ends has the ends of the held-out documents.

Opening a file maps it and reads only the header. `TokenFile` checks every id that it returns against the header; `verify`
reads the whole file.
"""

import hashlib
import os
import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias

import numpy as np

from jgraph.errors import DataError

ENDS_FILE = "{side}.ends"

_MAGIC = b"JGTOKENS"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQI32s60x")
_CHUNK_TOKENS = 1 << 22
_LARGEST_VOCABULARY = 2**32 - 1


@dataclass(frozen=True)
class Header:
    """The header of a token file."""

    bytes_per_token: int
    num_tokens: int
    num_documents: int
    vocab_size: int  # larger than every id
    sha256: str  # of the ids as stored, 64 hexadecimal digits

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(f"<u{self.bytes_per_token}")


class TokenFile:
    """The ids of a token file as a 1-D stream, memory-mapped. Opening it reads only the header.

    `file[start:stop]` returns a read-only view of the map. It raises DataError if an id is not below the vocabulary size in the
    header, or the file was written to since it was opened.
    """

    def __init__(self, path: Path):
        self.path = path
        self._opened = os.stat(path)
        self.header = read_header(path)
        self._ids = np.asarray(read_tokens(path))

    @property
    def dtype(self) -> np.dtype:
        return self._ids.dtype

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, span: slice, /) -> np.ndarray:
        self._check_unchanged()
        ids = self._ids[span]
        _check_ids(ids, self.header.vocab_size, self.path, first=span.indices(len(self))[0])
        return ids

    def _check_unchanged(self) -> None:
        # Reading pages beyond the end of a truncated file would kill the process.
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            return
        # The map of a removed or replaced file does not change.
        same_file = now.st_ino == self._opened.st_ino
        if same_file and (now.st_size, now.st_mtime_ns) != (self._opened.st_size, self._opened.st_mtime_ns):
            raise DataError(f"{self.path}: was written to while it is in use; write new tokens to a new file, or restart")


class Concatenated:
    """One or more streams of ids of one dtype, end to end, as one 1-D stream. Copies nothing when it is created.

    `stream[start:stop]` returns a view if the ids are in one part, else a copy.
    """

    def __init__(self, parts: "Sequence[Tokens]"):
        assert len({part.dtype for part in parts}) == 1
        self.parts = tuple(parts)
        self._ends = tuple(accumulate(len(part) for part in parts))

    @property
    def dtype(self) -> np.dtype:
        return self.parts[0].dtype

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, span: slice, /) -> np.ndarray:
        start, stop, stride = span.indices(len(self))
        if stride != 1:
            raise IndexError(f"stride is {stride}: must be 1")
        pieces = [self.parts[0][:0]]
        for index in range(bisect_right(self._ends, start), len(self.parts)):
            base = self._ends[index] - len(self.parts[index])
            if base >= stop:
                break
            pieces.append(self.parts[index][max(start - base, 0) : max(stop - base, 0)])
        return pieces[-1] if len(pieces) < 3 else np.concatenate(pieces)


Tokens: TypeAlias = np.ndarray | TokenFile | Concatenated
"""A 1-D stream of uint8, uint16 or uint32 ids."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the dtype of a token file with ids below `vocab_size`: little-endian uint16 up to 65536, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_tokens(path: Path, documents: Iterable[np.ndarray], *, vocab_size: int) -> Header:
    """Writes a token file, document by document, under a hidden temporary name until it is complete.

    If an error is raised, deletes the temporary file and leaves an existing file unchanged.
    """
    if not 0 < vocab_size <= _LARGEST_VOCABULARY:
        raise DataError(f"{path}: vocab_size is {vocab_size}: must be in [1, {_LARGEST_VOCABULARY}], 32 bits per id")
    dtype = token_dtype(vocab_size)
    hasher = hashlib.sha256()
    num_tokens = num_documents = 0
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.seek(_HEADER.size)
            for document in documents:  # read once. Each has its end-of-text token already
                if document.ndim != 1 or not np.issubdtype(document.dtype, np.integer):
                    kind = f"{document.dtype}{list(document.shape)}"
                    raise DataError(f"{path}: the document at token {num_tokens} is of {kind}: must be a 1-D array of integers")
                _check_ids(document, vocab_size, path, first=num_tokens)
                payload = document.astype(dtype, copy=False).tobytes()
                hasher.update(payload)
                file.write(payload)
                num_tokens += len(document)
                num_documents += 1
            if num_tokens == 0:
                raise DataError(f"{path}: there are no tokens to write; use a longer text")
            fields = (dtype.itemsize, num_tokens, num_documents, vocab_size)
            file.seek(0)
            file.write(_HEADER.pack(_MAGIC, _VERSION, *fields, hasher.digest()))
            file.flush()
            os.fsync(file.fileno())  # the contents must reach the disk before the name
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return Header(*fields, hasher.hexdigest())


def read_header(path: Path) -> Header:
    """Reads the header of a token file, and checks it against the length of the file. Does not read the ids."""
    with path.open("rb") as file:
        start = file.read(_HEADER.size)
        found_bytes = os.fstat(file.fileno()).st_size
    magic = start[: len(_MAGIC)]
    if magic != _MAGIC:
        must = f"a token file starts with {_MAGIC!r}; make one with python -m jgraph.data make"
        raise DataError(f"{path}: starts with {magic!r}, {must}")
    if len(start) < _HEADER.size:
        raise DataError(f"{path}: has {found_bytes} bytes, but a header needs {_HEADER.size}: truncated; copy it again")
    _, version, bytes_per_token, num_tokens, num_documents, vocab_size, sha256 = _HEADER.unpack(start)
    file_bytes = _HEADER.size + num_tokens * bytes_per_token
    damaged = "truncated; copy it again" if found_bytes < file_bytes else "damaged; copy it again"
    for is_wrong, problem in (
        (version != _VERSION, f"has version {version}, but this jgraph reads version {_VERSION}; make it again"),
        (bytes_per_token not in (2, 4), f"its header has {bytes_per_token} bytes per token, must be 2 or 4: {damaged}"),
        (found_bytes != file_bytes, f"has {found_bytes} bytes, but {num_tokens} tokens need {file_bytes}: {damaged}"),
        (num_tokens == 0, "has no tokens; make it again from a longer text"),
    ):
        if is_wrong:
            raise DataError(f"{path}: {problem}")
    return Header(bytes_per_token, num_tokens, num_documents, vocab_size, sha256.hex())


def read_tokens(path: Path) -> np.memmap:
    """Memory-maps the ids of a token file, read-only. Reads only the header, and does not check the ids."""
    header = read_header(path)
    return np.memmap(path, dtype=header.dtype, mode="r", offset=_HEADER.size, shape=(header.num_tokens,))


def verify(path: Path) -> Header:
    """Reads a whole token file and checks it against its header: the SHA-256 and the largest id."""
    header = read_header(path)
    hasher = hashlib.sha256()
    first = 0
    # Read instead of mapped, because the process would be killed if the file was truncated meanwhile.
    with path.open("rb") as file:
        file.seek(_HEADER.size)
        while len(chunk := np.fromfile(file, header.dtype, _CHUNK_TOKENS)):
            _check_ids(chunk, header.vocab_size, path, first=first)
            hasher.update(chunk.data)
            first += len(chunk)
    if hasher.hexdigest() != header.sha256:
        raise DataError(f"{path}: SHA-256 is {hasher.hexdigest()}, its header has {header.sha256}: damaged; copy it again")
    return header


def _check_ids(ids: np.ndarray, vocab_size: int, path: Path, *, first: int) -> None:
    """Raises DataError for an id outside [0, vocab_size). `first` is the position of ids[0] in the file, for the message."""
    if ids.max(initial=0) >= vocab_size or (ids.dtype.kind == "i" and ids.min(initial=0) < 0):
        place = int(np.argmax((ids >= vocab_size) | (ids < 0)))
        must = f"must be in [0, {vocab_size}), its vocabulary"
        remedy = "copy the file again if it is damaged, or make it again for a larger vocabulary"
        raise DataError(f"{path}: token {first + place} is {ids[place]}: {must}; {remedy}")
