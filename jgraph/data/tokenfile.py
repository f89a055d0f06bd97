"""Token files: a 128-byte header, then the token ids, little-endian.

    offset  size  field
         0     8  magic, the bytes JGTOKENS
         8     4  version, uint32: 1
        12     4  bytes per token, uint32: 2 (uint16) or 4 (uint32)
        16     8  number of tokens, uint64
        24     8  number of documents, uint64
        32     4  vocabulary size, uint32: every id is smaller
        36    32  SHA-256 of the token ids as stored
        68    60  zeros
       128        token ids

Reading maps the file and looks at nothing but the header, whose promise about the length is checked; `verify` reads all.
"""

import hashlib
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jgraph.errors import DataError

_MAGIC = b"JGTOKENS"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQI32s60x")
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Header:
    """What a token file says of itself. `sha256` is of the token ids alone, as hexadecimal digits."""

    bytes_per_token: int
    num_tokens: int
    num_documents: int
    vocab_size: int
    sha256: str

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(f"<u{self.bytes_per_token}")

    @property
    def file_bytes(self) -> int:
        return _HEADER.size + self.num_tokens * self.bytes_per_token

    def pack(self) -> bytes:
        fields = (self.bytes_per_token, self.num_tokens, self.num_documents, self.vocab_size, bytes.fromhex(self.sha256))
        return _HEADER.pack(_MAGIC, _VERSION, *fields)


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype of a token file that holds every id below `vocab_size`: uint16 up to 65536, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_tokens(path: Path, documents: Iterable[np.ndarray], *, vocab_size: int) -> Header:
    """Writes a token file, document by document, under a temporary name that becomes `path` only when all is on disk.

    Args:
        path: the file; one that exists is replaced.
        documents: 1-D arrays of non-negative integers, end-of-text tokens included.
        vocab_size: recorded in the header; decides the stored dtype.

    Returns:
        The header that was written.

    Raises:
        DataError: an id is not below `vocab_size`, or there are no tokens.
        OSError: the file cannot be written.
    """
    dtype = token_dtype(vocab_size)
    hasher = hashlib.sha256()
    num_tokens = num_documents = 0
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.seek(_HEADER.size)
            for document in documents:
                _check_ids(document, vocab_size, path)
                payload = document.astype(dtype, copy=False).tobytes()
                hasher.update(payload)
                file.write(payload)
                num_tokens += len(document)
                num_documents += 1
            if num_tokens == 0:
                raise DataError(f"{path}: there are no tokens to write; use a longer text")
            header = Header(dtype.itemsize, num_tokens, num_documents, vocab_size, hasher.hexdigest())
            file.seek(0)
            file.write(header.pack())
            file.flush()
            # The name must not reach the disk before the contents do.
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return header


def read_header(path: Path) -> Header:
    """Reads and checks a header, and that the file is as long as the header says.

    Raises:
        DataError: not a token file, of another version, truncated, overlong, or without tokens.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(_HEADER.size)
        found_bytes = os.fstat(file.fileno()).st_size
    if start[: len(_MAGIC)] != _MAGIC:
        raise DataError(
            f"{path}: starts with {start[: len(_MAGIC)]!r}, a token file starts with {_MAGIC!r}; "
            "make one with python -m jgraph.data make"
        )
    if len(start) < _HEADER.size:
        raise DataError(f"{path}: has {found_bytes} bytes where the header alone has {_HEADER.size}: truncated; copy it again")
    _, version, bytes_per_token, num_tokens, num_documents, vocab_size, sha256 = _HEADER.unpack(start)
    if version != _VERSION:
        raise DataError(f"{path}: is of version {version}, this jgraph reads version {_VERSION}; make it again")
    if bytes_per_token not in (2, 4):
        raise DataError(f"{path}: header says {bytes_per_token} bytes per token, must be 2 or 4: damaged; copy it again")
    header = Header(bytes_per_token, num_tokens, num_documents, vocab_size, sha256.hex())
    if found_bytes != header.file_bytes:
        state = "truncated" if found_bytes < header.file_bytes else "damaged"
        raise DataError(
            f"{path}: has {found_bytes} bytes where {num_tokens} tokens need {header.file_bytes}: {state}; copy it again"
        )
    if num_tokens == 0:
        raise DataError(f"{path}: holds no tokens; make it again from a longer text")
    return header


def read_tokens(path: Path) -> np.memmap:
    """Maps the token ids of a file: 1-D uint16 or uint32, read-only. Reads only the header; raises as `read_header`."""
    header = read_header(path)
    return np.memmap(path, dtype=header.dtype, mode="r", offset=_HEADER.size, shape=(header.num_tokens,))


def verify(path: Path) -> Header:
    """Reads a whole file and checks it against its header.

    Raises:
        DataError: as `read_header`, or the token ids do not match their hash, or one is not below the vocabulary size.
        OSError: the file cannot be read.
    """
    header = read_header(path)
    hasher = hashlib.sha256()
    tokens = read_tokens(path)
    chunk_tokens = _CHUNK_BYTES // header.bytes_per_token
    for start in range(0, header.num_tokens, chunk_tokens):
        chunk = tokens[start : start + chunk_tokens]
        _check_ids(chunk, header.vocab_size, path)
        hasher.update(chunk.tobytes())
    if hasher.hexdigest() != header.sha256:
        raise DataError(f"{path}: SHA-256 is {hasher.hexdigest()}, header says {header.sha256}: damaged; copy it again")
    return header


def _check_ids(ids: np.ndarray, vocab_size: int, path: Path) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise DataError(f"{path}: holds token ids from {ids.min()} to {ids.max()}: must be in [0, {vocab_size})")
