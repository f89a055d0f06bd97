"""Calls a function in a process of its own, with limits of time and memory. This module is also the program of the process.

A thread cannot be stopped, and a signal reaches the main thread only. A process can be killed.
"""

import contextlib
import functools
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from subprocess import DEVNULL, Popen
from typing import Any, TypeAlias

from jgraph.errors import DataError

_SECONDS = 10
_BYTES = 2 << 30

Call: TypeAlias = Callable[[Sequence[dict[str, Any]]], Iterator[Any]]
"""Yields the results of calls, one per dict of arguments. A result is a str, the error, if the call fails."""


@contextlib.contextmanager
def limited(function: str, *imports: str) -> Iterator[Call]:
    """Yields a function that calls `module:function` in a process, each time for up to 10 seconds and 2 GiB of memory."""
    with contextlib.ExitStack() as stack:
        # The process starts at the first call. Arguments and results must be values of JSON.
        start = functools.cache(lambda: stack.enter_context(_process(function, imports)))

        def call(jobs: Sequence[dict[str, Any]]) -> Iterator[Any]:
            pipe = start()
            pipe.send_bytes(json.dumps(jobs).encode())
            for _ in jobs:
                if not pipe.poll(_SECONDS):  # no other call is possible after it
                    yield f"it takes more than {_SECONDS} seconds"
                try:
                    yield json.loads(pipe.recv_bytes())
                except EOFError:
                    yield "it needs more memory than there is"

        yield call


@contextlib.contextmanager
def _process(function: str, imports: Sequence[str]) -> Iterator[Any]:
    ours, theirs = Pipe()
    command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), function, *imports]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    options: Any = {"pass_fds": [theirs.fileno()], "env": environment, "stdin": DEVNULL, "stderr": DEVNULL}
    with ours, Popen(command, **options) as process:
        try:
            theirs.close()
            try:
                ours.recv_bytes()  # it is ready
            except EOFError:
                raise DataError(f"the process for {function} does not start: {' '.join(command)} fails") from None
            yield ours
        finally:
            process.kill()


def _serve(pipe: Connection, function: str, *imports: str) -> None:
    """Calls the function until the other process closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, _, name = function.partition(":")
    called = getattr(importlib.import_module(module), name)
    for each in imports:  # now, so that they take no time of a call
        importlib.import_module(each)
    resource.setrlimit(resource.RLIMIT_DATA, (_BYTES, _BYTES))
    pipe.send_bytes(b"")
    while True:
        for job in json.loads(pipe.recv_bytes()):
            try:
                answer = json.dumps(called(**job))
            except MemoryError:
                answer = json.dumps(f"it needs more than {_BYTES >> 30} GiB of memory")
            except Exception as e:  # the function may run code of others
                answer = json.dumps(" ".join(str(e).split()))
            pipe.send_bytes(answer.encode())


if __name__ == "__main__":
    with contextlib.suppress(EOFError, OSError):
        _serve(Connection(int(sys.argv[1])), *sys.argv[2:])
