"""Token files against their hashes, once, while a run trains on them.

A file whose hash was right is noted in `.verified.json` beside it, with its size and the time of its last change of any kind
(ctime, which no copy takes along). Where nothing can be written there, files are read again by the next run.
"""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from jgraph.data.tokenfile import read_header, verify
from jgraph.errors import DataError

VERIFIED = ".verified.json"


def verify_once(path: Path) -> None:
    """Reads a file and checks it against its header, unless that was done since it last changed.

    Raises:
        DataError: as `tokenfile.verify`.
        OSError: the file cannot be read.
    """
    note = path.with_name(VERIFIED)
    seen = os.stat(path)  # before it is read: what changes meanwhile is another file
    entry = [seen.st_size, seen.st_ctime_ns, read_header(path).sha256]
    if _notes(note).get(path.name) == entry:
        return
    verify(path)
    scratch = note.with_name(f"{note.name}.{os.getpid()}.partial")
    try:
        scratch.write_text(json.dumps(_notes(note) | {path.name: entry}))
        scratch.replace(note)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink()


def verify_in_background(paths: Sequence[Path]) -> Callable[[], None]:
    """Starts a thread that verifies the files, and returns a function that raises DataError once one has been found damaged."""
    found: list[DataError] = []

    def work() -> None:
        for path in paths:
            try:
                verify_once(path)
            except FileNotFoundError:
                continue  # whoever has it open still has it
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


def _notes(note: Path) -> dict:
    try:
        notes = json.loads(note.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}
