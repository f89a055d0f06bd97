"""A tokenizer.json through the optional `tokenizers` library: text to ids to make token files, ids to text to read samples."""

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jgraph.errors import DataError, require

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
        ends = [ids[name] for name in _END_OF_TEXT if name in ids]
        self._end = ends[:1] or self._encode(["\n"])[0].ids

    def encode(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yields the ids of each document as a 1-D int64 array. Raises DataError for one that is not UTF-8, or has no ids."""
        documents = iter(documents)
        while texts := [decode_utf8(document) for document in islice(documents, _DOCUMENTS_AT_ONCE)]:
            for encoding in self._encode(texts):
                yield np.array(encoding.ids + self._end, np.int64)

    def _encode(self, texts: list[str]) -> list[Any]:
        try:
            return self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as e:  # the library raises Exception itself
            raise DataError(f"the tokenizer cannot encode this text: {e}") from e


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE, in which every text has ids, and writes its tokenizer.json.

    Args:
        texts: read once, and never all in memory.
        vocab_size: ids, the 256 bytes and <|endoftext|> among them; fewer where the text has no more pairs to merge.
        path: the file to write.

    Raises:
        ConfigError: If `vocab_size` is less than 257.
        DataError: If the library is not installed.
        OSError: If the file cannot be written.
    """
    require(vocab_size > 256, "train_bpe", vocab_size, "at least 257: the 256 bytes and <|endoftext|>")
    library = _library(path)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END_OF_TEXT[0]],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    try:
        tokenizer.save(str(path))
    except Exception as e:  # the library raises no subclass
        raise OSError(str(e)) from e


def load_decoder(path: Path) -> Callable[[Sequence[int]], str]:
    """Returns a function from ids to text, or to numbers where the tokenizer's file or the library is missing."""
    if not path.exists() or importlib.util.find_spec("tokenizers") is None:
        return lambda ids: " ".join(str(token) for token in ids)
    tokenizer = _load(path)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def _library(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError as e:
        raise DataError(f"{path}: needs the tokenizers library: pip install 'jgraph[tokenizers]'") from e
    return tokenizers


def _load(path: Path) -> "tokenizers.Tokenizer":
    tokenizers = _library(path)
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as e:  # the library raises Exception itself
        raise DataError(f"{path}: is not a tokenizer.json of the tokenizers library ({e})") from e


def decode_utf8(document: bytes) -> str:
    """Returns a document as text. Raises DataError for one that is not UTF-8."""
    try:
        return document.decode()
    except UnicodeDecodeError as e:
        raise DataError(f"not UTF-8 near {document[max(0, e.start - 20) : e.start + 20]!r}; convert it, e.g. with iconv") from e
