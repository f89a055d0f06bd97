"""Locks a run directory, so that only one run writes to it."""

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from jgraph.errors import ConfigError, os_errors
from jgraph.train.rundir import RunDir


@contextlib.contextmanager
def locked(run_dir: RunDir, warn: Callable[[str], object]) -> Iterator[None]:
    """Creates a run directory if it is missing, and locks it against other processes inside the `with` block. Does not wait.

    Writes the file `lock` with the id and the host of this process, as JSON. At the end of the block, deletes this file, and
    deletes the run directory if no other file is in the directory. The operating system releases the lock if the process is
    killed. On a file system that does not support locks, the content of the file decides: the directory counts as locked while
    the process in the file lives, and always if that process is on another machine.

    Args:
        run_dir: The run directory. Call its method `check` before, because `check` rejects a directory with unknown files.
        warn: Called with one line if the file system supports locks and no process holds this one, but the file names a process
            on another machine. The block then runs.

    Raises:
        ConfigError: At the start of the block, if another process holds the lock, or the directory or file cannot be written.
    """
    path = run_dir.lock_file
    with os_errors("run_dir", run_dir.path):
        run_dir.path.mkdir(parents=True, exist_ok=True)
    with os_errors("run_dir", path):
        file = _open_locked(path)
    try:
        if (previous := _holder(file)) and previous["host"] != socket.gethostname():
            warn(
                f"`run_dir` is {run_dir.path}: process {previous['pid']} on {previous['host']} did not release this directory; "
                "if that process is still running, stop one of the two"
            )
        with os_errors("run_dir", path):
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
            file.flush()
        yield
    finally:
        # Removed before the lock is released, so that the next process creates a new file.
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the directory is not empty, or the disk of the lock file is full
            run_dir.path.rmdir()
        with contextlib.suppress(OSError):
            file.close()


def _open_locked(path: Path) -> TextIO:
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except BlockingIOError:
            raise _held(path, file, "wait until it ends") from None
        except OSError as e:
            if e.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
            holder = _holder(file)
            if not holder or (holder["host"] == socket.gethostname() and not _is_alive(holder["pid"])):
                return file
            raise _held(path, file, f"if it has ended, remove {path}") from e
        # The owner removed the file before it was locked.
        file.close()


def _held(path: Path, file: TextIO, advice: str) -> ConfigError:
    holder = _holder(file)
    process = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
    file.close()
    message = f"`run_dir` is {path.parent}: {process} is writing there; {advice}, or name another `run_dir`"
    return ConfigError(message, field="run_dir")


def _holder(file: TextIO) -> dict[str, Any] | None:
    """Returns the pid and host in a lock file, or None if it has none."""
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return {"pid": int(holder["pid"]), "host": str(holder["host"])}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
