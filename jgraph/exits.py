"""Ends the process of a command. Imports nothing of jgraph, because a help text must appear at once."""

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import NoReturn


def end_with(main: Callable[[], int]) -> NoReturn:
    """Runs a command, and ends the process with its exit code after all exit handlers, without Python's finalization.

    In the finalization of Python 3.11 to 3.13, a thread of a library in C++ that takes Python's lock aborts the process
    (python/cpython#87135). XLA and TensorStore have such threads.
    """
    codes = [1]  # that of an exception
    # Handlers that are registered later run before it.
    atexit.register(lambda: leave(codes[-1]))
    try:
        codes.append(main())
    except SystemExit as e:
        codes.append(e.code if isinstance(e.code, int) else int(e.code is not None))
        raise
    sys.exit(codes[-1])


def leave(code: int) -> NoReturn:
    """Ends the process at once, after writing what was printed."""
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(code)


def leave_alone(code: int) -> None:
    """Lets the exit of this process skip earlier exit handlers, such as that of JAX, which waits for other processes."""
    atexit.register(functools.partial(leave, code))
