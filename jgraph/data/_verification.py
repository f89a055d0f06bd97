"""Verifies token files against their hashes, once, while a run trains on them.

A file with the right hash is noted in a hidden file beside it, with its size and its ctime, which a copy does not preserve.
Files in a directory that cannot be written to are read again by the next run.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from jgraph.data.tokenfile import read_header, verify
from jgraph.errors import DataError


def verify_once(path: Path) -> None:
    """Reads a file and checks it against its header, unless that was done since its last change.

    Raises:
        DataError: As `tokenfile.verify`.
        OSError: If the file cannot be read.
    """
    note, seen = note_of(path), os.stat(path)  # before reading, so that a later change is noticed
    entry = f"{seen.st_size} {seen.st_ctime_ns} {read_header(path).sha256}".encode()
    with contextlib.suppress(OSError):
        if note.read_bytes() == entry:
            return
    verify(path)
    with contextlib.suppress(OSError):
        note.write_bytes(entry)


def note_of(path: Path) -> Path:
    """Returns the path of the note that a file was verified."""
    return path.with_name(f".{path.name}.verified")


def verify_in_background(paths: Sequence[Path]) -> Callable[[], None]:
    """Starts a thread that verifies files. Returns a function that raises DataError if it has found a damaged file."""
    found: list[DataError] = []

    def work() -> None:
        for path in paths:
            try:
                verify_once(path)
            except FileNotFoundError:
                continue  # a removed file stays mapped
            except OSError as e:
                found.append(DataError(f"{path}: cannot be read: {e}"))
            except DataError as e:
                found.append(e)

    def check() -> None:
        if found:
            raise found[0]

    if paths:
        threading.Thread(target=work, name="jgraph-verify", daemon=True).start()
    return check
