"""Text as it comes, token by token: no half characters, and no further than a text that ends it."""

from collections.abc import Callable, Sequence


class TextStream:
    """Turns one text's new tokens into pieces of text.

    A token may end inside a character, and what decodes as U+FFFD may be whole with the next one. So such an end is kept back,
    and so is what may be the beginning of a stop text.

    Args:
        decode: ids to text.
        prompt: the ids before; a tokenizer may treat the first token of a text in another way.
        stop: texts that end it; they are not part of it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = (), stop: Sequence[str] = ()):
        self._decode, self._stop = decode, tuple(stop)
        # Those told already, back to where a character began, and those after them.
        self._told, self._new = list(prompt), []
        self._kept = ""
        self.ended = False

    def push(self, token: int) -> str:
        """Returns what text is sure after a token more; nothing once it has ended."""
        self._new.append(token)
        return "" if self.ended else self._take(self._settled(everything=False))

    def finish(self) -> str:
        """Ends the text. Returns what was kept back."""
        text = "" if self.ended else self._take(self._settled(everything=True))
        if not self.ended:
            text, self._kept, self.ended = text + self._kept, "", True
        return text

    def _settled(self, *, everything: bool) -> str:
        before, after = self._decode(self._told), self._decode(self._told + self._new)
        if not everything and after.endswith("\ufffd"):
            return ""
        self._told, self._new = self._new or self._told, []
        return after[len(before) :]

    def _take(self, text: str) -> str:
        text = self._kept + text
        ends = [found for stop in self._stop if (found := text.find(stop)) >= 0]
        if ends:
            self.ended, self._kept = True, ""
            return text[: min(ends)]
        beginnings = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        sure = len(text) - max(beginnings, default=0)
        self._kept = text[sure:]
        return text[:sure]
