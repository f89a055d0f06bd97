"""Decodes a stream of tokens into text. Never splits a character, and omits text after a stop string."""

from collections.abc import Callable, Sequence


class TextStream:
    """Decodes the new tokens of one text incrementally.

    A token can end inside a UTF-8 character, which decodes as U+FFFD until the next token completes it. Text that ends with
    U+FFFD is therefore held back, and so is text that may be the beginning of a stop string.

    Attributes:
        ended: True once the text contains a stop string, or after `finish`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = (), stop: Sequence[str] = ()):
        """Starts a text.

        Args:
            decode: Decodes token ids to a string.
            prompt: Token ids before the text, because some tokenizers decode the first token of a text differently.
            stop: Strings that end the text. They are omitted.
        """
        self._decode, self._stop = decode, tuple(stop)
        # Decoded tokens since the last complete character (context for `decode`), and tokens that are not decoded yet.
        self._decoded, self._pending = list(prompt), []
        self._held_back = ""
        self.ended = False

    def push(self, token: int) -> str:
        """Adds a token. Returns the text that it completes, or an empty string after the end."""
        self._pending.append(token)
        return "" if self.ended else self._emit(self._decode_pending(flush=False))

    def finish(self) -> str:
        """Ends the text. Returns the text that was held back."""
        text = "" if self.ended else self._emit(self._decode_pending(flush=True))
        if not self.ended:
            text, self._held_back, self.ended = text + self._held_back, "", True
        return text

    def _decode_pending(self, *, flush: bool) -> str:
        before, after = self._decode(self._decoded), self._decode(self._decoded + self._pending)
        if not flush and after.endswith("\ufffd"):
            return ""
        self._decoded, self._pending = self._pending or self._decoded, []
        return after[len(before) :]

    def _emit(self, text: str) -> str:
        text = self._held_back + text
        ends = [found for stop in self._stop if (found := text.find(stop)) >= 0]
        if ends:
            self.ended, self._held_back = True, ""
            return text[: min(ends)]
        partial_stops = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        safe = len(text) - max(partial_stops, default=0)
        self._held_back = text[safe:]
        return text[:safe]
