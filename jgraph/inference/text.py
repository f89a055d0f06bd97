"""Decodes a stream of tokens into text. Never splits a character, and omits text after a stop string."""

from collections.abc import Callable, Sequence


class TextStream:
    """Decodes the new tokens of one text: `push` each, then `finish`. The results together end before the first stop string.

    Text is held back if it ends with U+FFFD, as that of a partial UTF-8 character does, or if it may begin a stop string.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = (), stop: Sequence[str] = ()):
        # `prompt` is context, because some tokenizers decode the first token of a text differently. Its text is not returned.
        self._decode = decode
        self._stop = tuple(stop)  # none is empty
        # Decoded tokens since the last complete character (context for `decode`), and tokens that are not decoded yet.
        self._decoded = list(prompt)
        self._pending: list[int] = []
        self._held_back = ""  # may begin a stop string
        self.ended = False

    def push(self, token: int) -> str:
        """Returns the text that is now certain and that no earlier call returned. A complete stop string sets `ended`."""
        self._pending.append(token)
        return "" if self.ended else self._emit(self._decode_pending(flush=False))

    def finish(self) -> str:
        """Returns the text that was held back, with U+FFFD for an incomplete character. Sets `ended`."""
        if self.ended:
            return ""
        text = self._emit(self._decode_pending(flush=True))
        if not self.ended:
            text += self._held_back
            self.ended = True
        return text

    def _decode_pending(self, *, flush: bool) -> str:
        before, after = self._decode(self._decoded), self._decode(self._decoded + self._pending)
        if not flush and after.endswith("\ufffd"):
            return ""
        # The last decoded tokens are enough context, so the cost of a call does not grow with the text.
        self._decoded, self._pending = self._pending or self._decoded, []
        # A prompt may end inside a character. Otherwise, tokens do not change the text of earlier tokens.
        return after[len(before if after.startswith(before) else before.rstrip("\ufffd")) :]

    def _emit(self, text: str) -> str:
        text = self._held_back + text
        ends = [found for stop in self._stop if (found := text.find(stop)) >= 0]
        if ends:
            self.ended = True
            return text[: min(ends)]
        partial_stops = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        safe = len(text) - max(partial_stops, default=0)
        self._held_back = text[safe:]
        return text[:safe]
