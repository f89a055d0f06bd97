"""Decodes a stream of tokens into text. Never splits a character, and omits text after a stop string."""

from collections.abc import Callable, Sequence


class TextStream:
    """Decodes the new tokens of one text incrementally. Made by `TextStream(decode, prompt=(), stop=())`.

    `decode(tokens)` returns the string of a list of token ids, `prompt` has the token ids before the text, and `stop` has the
    strings that end the text. The text of the prompt is not returned.

    A token can end inside a UTF-8 character, which decodes as U+FFFD until the next token completes it. Text that ends with
    U+FFFD is therefore held back, and so is text that may be the beginning of a stop string.

    Call `push` with each new token, in order, and `finish` after the last one. The concatenation of the returned strings is the
    text up to the first stop string.

    Attributes:
        ended: True once the text contains a stop string, or after `finish`.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = (), stop: Sequence[str] = ()):
        """Starts an empty text. Decodes nothing.

        Args:
            decode: `decode(tokens)` returns the string of a list of token ids. `push` and `finish` call it twice each: with the
                tokens before the new text as context, and with the new tokens appended.
            prompt: Token ids before the text, because some tokenizers decode the first token of a text differently. They are
                copied, and their text is not returned.
            stop: Strings that end the text. The text from the first stop string on is never returned. Each must be nonempty.
        """
        self._decode, self._stop = decode, tuple(stop)
        # Decoded tokens since the last complete character (context for `decode`), and tokens that are not decoded yet.
        self._decoded, self._pending = list(prompt), []
        self._held_back = ""
        self.ended = False

    def push(self, token: int) -> str:
        """Adds a token to the text.

        Args:
            token: Id of the next token.

        Returns:
            The text that is now certain and that no earlier call returned. It can include text that earlier calls held back.
            Empty if the token ends inside a character, if all new text may be the beginning of a stop string, or if `ended` was
            True before the call. If a stop string is complete, `ended` becomes True, and the result is the text before the stop
            string.
        """
        self._pending.append(token)
        return "" if self.ended else self._emit(self._decode_pending(flush=False))

    def finish(self) -> str:
        """Ends the text and sets `ended`.

        Returns:
            The text that was held back, up to the first stop string. It has U+FFFD in place of an incomplete character. Empty
            if the text had already ended.
        """
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
