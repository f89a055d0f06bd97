"""SIGTERM and SIGINT as requests to stop after the current step."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class StopRequest:
    """Records SIGTERM and SIGINT inside a `with` block, in place of ending the process.

    Only the main thread may replace signal handlers; elsewhere the block replaces none. `name` is the first signal, also one
    that another process has received.
    """

    def __init__(self):
        self.name = ""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        in_main_thread = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGTERM, signal.SIGINT) if in_main_thread else ():
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # The second Ctrl-C ends the run at once, without a checkpoint.
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = self.name or signal.Signals(number).name
