"""A tokenizer.json through the optional `tokenizers` library: text to ids to make token files, ids to text to read samples."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jgraph.errors import DataError

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
# A tokenizer.json does not say which of its tokens ends a text; these are the usual names.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_DOCUMENTS_AT_ONCE = 256


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back.

    Attributes:
        encode: a text to ids.
        decode: ids to text. What is no UTF-8 reads as U+FFFD; without a tokenizer.json, ids read as numbers.
        ends: ids that end a text; empty where none is known to.
        name: of its file, or `bytes`.
    """

    encode: Callable[[str], list[int]] = field(repr=False)
    decode: Callable[[Sequence[int]], str] = field(repr=False)
    ends: tuple[int, ...] = ()
    name: str = "bytes"

    @classmethod
    def of_bytes(cls) -> "Tokenizer":
        """Returns that of models of bytes."""
        return cls(lambda text: list(text.encode(errors="surrogateescape")), decode_bytes)

    @classmethod
    def of_file(cls, path: Path, *, ends: Sequence[int] = (), add_special_tokens: bool = False) -> "Tokenizer":
        """Returns that of a tokenizer.json; `ends` are known besides the usual ones. Raises DataError as `Encoder`."""
        tokenizer = _load(path)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids = tokenizer.get_vocab(with_added_tokens=True)
        ends = tuple(dict.fromkeys((*ends, *(ids[name] for name in _END_OF_TEXT if name in ids))))

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

        return cls(encode, lambda ids: tokenizer.decode(ids, skip_special_tokens=False), ends, str(path))

    @classmethod
    def of_numbers(cls, why: str) -> "Tokenizer":
        """Returns one that has no text for ids, and raises DataError for a text."""

        def encode(text: str) -> list[int]:
            raise DataError(f"{why}: prompts must be ids, or bring the {TOKENIZER_FILE}")

        return cls(encode, _numbers, name="numbers")


def decode_bytes(ids: Sequence[int]) -> str:
    """Returns the text of bytes. 0xFF is in no UTF-8: an id beyond the bytes, of a model with more rows, shows as U+FFFD."""
    return bytes(min(token, 0xFF) for token in ids).decode(errors="replace")


def _numbers(ids: Sequence[int]) -> str:
    return "".join(f"{token} " for token in ids)


class Encoder:
    """Documents to ids, each followed by the end-of-text token, or by a newline where the tokenizer has none.

    Attributes:
        vocab_size: largest id + 1.

    Raises:
        DataError: the library is not installed, or the file is no tokenizer.json.
    """

    def __init__(self, path: Path):
        self._tokenizer = _load(path)
        # A file may ask for truncation and padding, which would drop and make up text.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Documents are text: "<|endoftext|>" written inside one is no end of text.
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError(f"{path}: its vocabulary is empty; name a trained tokenizer.json")
        self.vocab_size = max(ids.values()) + 1
        end = _end_of_text(ids)
        self._end = self._encode(["\n"])[0].ids if end is None else [end]

    def encode(self, documents: Sequence[bytes]) -> Iterator[np.ndarray]:
        """Yields the ids of each document as a 1-D int64 array. Raises DataError for one that is not UTF-8, or has no ids."""
        for first in range(0, len(documents), _DOCUMENTS_AT_ONCE):
            texts = [_decode_utf8(document) for document in documents[first : first + _DOCUMENTS_AT_ONCE]]
            for encoding in self._encode(texts):
                yield np.array(encoding.ids + self._end, np.int64)

    def _encode(self, texts: list[str]) -> list[Any]:
        try:
            return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as e:  # the library raises Exception itself
            raise DataError(f"the tokenizer cannot encode this text: {e}") from e


def end_of_text(path: Path) -> int | None:
    """Returns the id after each document of token files made by a tokenizer.json; None where that is a newline's.

    Raises:
        DataError: as `Encoder`.
    """
    return _end_of_text(_load(path).get_vocab(with_added_tokens=True))


def _end_of_text(ids: Mapping[str, int]) -> int | None:
    return next((ids[name] for name in _END_OF_TEXT if name in ids), None)


def load_decoder(path: Path) -> Callable[[Sequence[int]], str]:
    """Returns a function from ids to text, or to numbers where the tokenizer's file or the library is missing."""
    if not path.exists() or importlib.util.find_spec("tokenizers") is None:
        return lambda ids: " ".join(str(token) for token in ids)
    tokenizer = _load(path)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def _load(path: Path) -> "tokenizers.Tokenizer":
    try:
        import tokenizers
    except ImportError as e:
        raise DataError(f"{path}: needs the tokenizers library: pip install 'jgraph[tokenizers]'") from e
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as e:  # the library raises Exception itself
        raise DataError(f"{path}: is not a tokenizer.json of the tokenizers library ({e})") from e


def _decode_utf8(document: bytes) -> str:
    try:
        return document.decode()
    except UnicodeDecodeError as e:
        raise DataError(f"not UTF-8 near {document[max(0, e.start - 20) : e.start + 20]!r}; convert it, e.g. with iconv") from e
