"""SIGTERM and SIGINT as a wish to stop, that the loop grants between two steps."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class StopRequest:
    """Notes SIGTERM and SIGINT while it is entered; the handlers from before come back afterwards.

    Does nothing outside the main thread, the only one to which Python gives signals.

    Attributes:
        name: of the first signal, e.g. `SIGTERM`; empty before there is one.
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
        # Who presses Ctrl-C a second time does not want to wait for the checkpoint.
        if self.name and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = self.name or signal.Signals(number).name
