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
    """Creates a run directory if it is missing, and locks it inside the `with` block. Does not wait.

    `RunDir.check` comes before, because it refuses a directory with unknown files. At the end, an empty directory is deleted.
    The operating system releases the lock of a killed process. On a file system without locks, the content of the file decides:
    the process in it holds the lock while it lives, and always if it is on another machine.
    """
    path = run_dir.lock_file
    own = {"pid": os.getpid(), "host": socket.gethostname()}
    with os_errors("run_dir", run_dir.path):
        run_dir.path.mkdir(parents=True, exist_ok=True)
    with os_errors("run_dir", path):
        file = _open_locked(path, own)
    try:
        previous = _holder(file)
        if previous and previous["host"] != own["host"]:
            warn(
                f"`run_dir` is {run_dir.path}: process {previous['pid']} on {previous['host']} did not release this directory; "
                "if that process is still running, stop one of the two"
            )
        if previous != own:
            with os_errors("run_dir", path):
                file.truncate(0)
                _write(file, own)
        yield
    finally:
        # Removed before the lock is released, so that the next process creates a new file.
        if _is_at(path, file):
            release(run_dir)
        with contextlib.suppress(OSError):
            file.close()


def release(run_dir: RunDir) -> None:
    """Removes the lock file, and the directory if it is empty then."""
    run_dir.lock_file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the directory is not empty, or the disk of the lock file is full
        run_dir.path.rmdir()


def _open_locked(path: Path, own: dict[str, Any]) -> TextIO:
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, file):
                return file
        except BlockingIOError:
            holder = _holder(file)
            file.close()
            raise _held(path, holder, "wait until it ends") from None
        except OSError as e:
            file.close()
            if e.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise
            return _create_locked(path, own)
        # The owner removed the file before it was locked.
        file.close()


def _create_locked(path: Path, own: dict[str, Any]) -> TextIO:
    """Locks without `flock`. Only the process that creates `lock.tmp` may replace the lock file of a dead process."""
    scratch = path.with_name(f"{path.name}.tmp")
    try:
        file = scratch.open("x+")
    except FileExistsError:
        raise _held(path, None, f"if it has ended, remove {scratch}") from None
    try:
        with path.open("a+") as current:
            holder = _holder(current)
        if holder and (holder["host"] != own["host"] or _is_alive(holder["pid"])):
            raise _held(path, holder, f"if it has ended, remove {path}")
        _write(file, own)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        file.close()
        raise
    return file


def _held(path: Path, holder: dict[str, Any] | None, advice: str) -> ConfigError:
    process = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
    message = f"`run_dir` is {path.parent}: {process} is writing there; {advice}, or name another `run_dir`"
    return ConfigError(message, field="run_dir")


def _is_at(path: Path, file: TextIO) -> bool:
    """Returns False if the file was removed or replaced since it was opened."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _write(file: TextIO, holder: dict[str, Any]) -> None:
    file.write(json.dumps(holder) + "\n")
    file.flush()


def _holder(file: TextIO) -> dict[str, Any] | None:
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
