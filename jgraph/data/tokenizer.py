"""Converts text to ids and ids to text with a tokenizer.json, by the optional `tokenizers` library."""

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jgraph.data._texts import library
from jgraph.errors import DataError

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
# A tokenizer.json does not mark its end-of-text token. These are the usual names.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_DOCUMENTS_AT_ONCE = 256


@dataclass(frozen=True)
class Tokenizer:
    """Converts text to ids and ids to text.

    Attributes:
        encode: `encode(text)` returns the ids of a str as a list of ints. Raises DataError for a tokenizer of `of_numbers`.
        decode: `decode(ids)` returns the text of a sequence of ints as a str. Invalid UTF-8 becomes U+FFFD. A tokenizer of
            `of_numbers` returns the ids as decimal numbers.
        ends: Ids that end a text, a tuple of ints; empty if unknown.
        name: Path of the tokenizer.json; `bytes` for a tokenizer of `of_bytes`; `numbers` for one of `of_numbers`.
    """

    encode: Callable[[str], list[int]] = field(repr=False)
    decode: Callable[[Sequence[int]], str] = field(repr=False)
    ends: tuple[int, ...] = ()
    name: str = "bytes"

    @classmethod
    def of_bytes(cls) -> "Tokenizer":
        """Returns the tokenizer of byte-level models: the ids are the bytes of the UTF-8 text. It has no end-of-text id."""
        return cls(lambda text: list(text.encode(errors="surrogateescape")), decode_bytes)

    @classmethod
    def of_file(cls, path: Path, *, ends: Sequence[int] = (), add_special_tokens: bool = False) -> "Tokenizer":
        """Reads a tokenizer.json. The result neither truncates nor pads.

        Args:
            path: A tokenizer.json of the `tokenizers` library.
            ends: Ids that end a text. In the result, the ids of the tokens <|endoftext|>, <|end_of_text|>, </s> and <eos> are
                added to `ends`, if the file has these tokens.
            add_special_tokens: Whether `encode` adds the special tokens that the file defines, such as a begin-of-text token.

        Returns:
            The tokenizer. Its `decode` includes special tokens in the text.

        Raises:
            DataError: If the `tokenizers` library is missing, or the file is not a tokenizer.json.
            OSError: If the file cannot be read.
        """
        tokenizer = load_tokenizer(path)
        ids = tokenizer.get_vocab(with_added_tokens=True)
        ends = tuple(dict.fromkeys((*ends, *(ids[name] for name in _END_OF_TEXT if name in ids))))

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

        return cls(encode, lambda ids: tokenizer.decode(ids, skip_special_tokens=False), ends, str(path))

    @classmethod
    def of_numbers(cls, why: str) -> "Tokenizer":
        """Returns a tokenizer for ids without text. Its `decode` returns the ids as decimal numbers, each followed by a space.

        Args:
            why: Reason why there is no tokenizer.json. `encode` always raises a DataError. Its message starts with the reason.
        """

        def encode(text: str) -> list[int]:
            raise DataError(f"{why}: prompts must be ids; to use text, add the {TOKENIZER_FILE}")

        return cls(encode, _numbers, name="numbers")


def decode_bytes(ids: Sequence[int]) -> str:
    """Returns the text of byte ids. Invalid UTF-8, and ids above 255 from a model with a larger vocabulary, become U+FFFD.

    Args:
        ids: Non-negative integers.
    """
    return bytes(min(token, 0xFF) for token in ids).decode(errors="replace")  # 0xFF is not valid in UTF-8


def _numbers(ids: Sequence[int]) -> str:
    return "".join(f"{token} " for token in ids)


class Encoder:
    """Converts documents to ids. Appends the end-of-text token to every document.

    The end-of-text token is the first of <|endoftext|>, <|end_of_text|>, </s> and <eos> that the tokenizer.json has. If it has
    none of them, the ids of a newline are appended instead.

    Attributes:
        vocab_size: Largest id + 1.

    Args:
        path: A tokenizer.json of the `tokenizers` library.

    Raises:
        DataError: If the `tokenizers` library is missing, the file is not a tokenizer.json, or its vocabulary is empty.
        OSError: If the file cannot be read.
    """

    def __init__(self, path: Path):
        self._tokenizer = load_tokenizer(path)
        # Documents are text: "<|endoftext|>" inside one is not an end of text.
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError(f"{path}: its vocabulary is empty; name a trained tokenizer.json")
        self.vocab_size = max(ids.values()) + 1
        ends = [ids[name] for name in _END_OF_TEXT if name in ids]
        self._end = ends[:1] or self._encode(["\n"])[0].ids

    def encode(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yields the ids of each document with its end-of-text token, a 1-D int64 array, in order.

        The name of a special token inside a document, such as <|endoftext|>, is encoded like other text.

        Args:
            documents: UTF-8 texts. Read lazily, 256 at a time.

        Raises:
            DataError: If a document is not UTF-8 or cannot be encoded.
        """
        documents = iter(documents)
        while texts := [_decode_utf8(document) for document in islice(documents, _DOCUMENTS_AT_ONCE)]:
            for encoding in self._encode(texts):
                yield np.array(encoding.ids + self._end, np.int64)

    def _encode(self, texts: list[str]) -> "list[tokenizers.Encoding]":
        try:
            return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as e:  # the library raises Exception itself
            raise DataError(f"the tokenizer cannot encode this text: {e}") from e


def load_decoder(path: Path) -> Callable[[Sequence[int]], str]:
    """Returns a function that converts a sequence of ids to its text, a str. The text includes special tokens.

    Args:
        path: A tokenizer.json. If the file or the `tokenizers` library is missing, the function returns the ids as decimal
            numbers, separated by spaces.

    Raises:
        DataError: If the file is not a tokenizer.json.
    """
    if not path.exists() or importlib.util.find_spec("tokenizers") is None:
        return lambda ids: _numbers(ids).rstrip()
    return Tokenizer.of_file(path).decode


def load_tokenizer(path: Path) -> "tokenizers.Tokenizer":
    """Reads a tokenizer.json with the `tokenizers` library. Disables truncation and padding.

    Args:
        path: The file.

    Raises:
        DataError: If the library is missing, or the file is not a tokenizer.json.
        OSError: If the file cannot be read.
    """
    tokenizers, text = library("tokenizers"), path.read_text(encoding="utf-8", errors="replace")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as e:  # the library raises Exception itself
        raise DataError(f"{path}: is not a tokenizer.json of the tokenizers library ({e})") from e
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _decode_utf8(document: bytes) -> str:
    """Returns a document as text. Raises DataError if it is not UTF-8."""
    try:
        return document.decode()
    except UnicodeDecodeError as e:
        raise DataError(f"not UTF-8 near {document[max(0, e.start - 20) : e.start + 20]!r}; convert it, e.g. with iconv") from e
