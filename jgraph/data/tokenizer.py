"""Text to token ids and back, by `transformers` for a Hugging Face folder or a tokenizer.json. Otherwise ids are bytes."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from jgraph.data._texts import check_links, decode_utf8, library, without_surrogates
from jgraph.data._tokenfile import token_dtype
from jgraph.errors import DataError

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# Files without which a folder has no tokenizer, and all files that a tokenizer may consist of.
_VOCABULARY = (TOKENIZER_FILE, "vocab.*", "*.model", "*.tiktoken", "tekken.json")
_FILES = (*_VOCABULARY, "tokenizer*.json", "vocab*", "merges*", "*.spm", "special_tokens_map.json", "added_tokens.json")
_FILES += ("chat_template*", "additional_chat_templates/*.jinja", "generation_config.json")
# A tokenizer without a declared end-of-text token may have one. These are the usual names.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
_AT_ONCE = 256  # documents in a call of `transformers`

Span: TypeAlias = tuple[int, int]
"""The first character of a part of a text, and the one after its last."""


def tokenizer_files(folder: Path, patterns: Sequence[str] = _FILES) -> list[str]:
    """Returns the paths in a folder of the files of its tokenizer, sorted. Raises DataError for a link out of the folder."""
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    check_links(folder, *found)
    return sorted(path.relative_to(folder).as_posix() for path in found)


def vocabulary(folder: Path | None) -> Path | None:
    """Returns the file in a folder with the vocabulary of its tokenizer; None if it has no tokenizer."""
    found = [file for pattern in _VOCABULARY for file in tokenizer_files(folder, [pattern])] if folder else []
    return folder / found[0] if folder and found else None


def declaration(file: Path) -> str:
    """Returns the tokenizer_config.json for a tokenizer.json without one: it declares the end-of-text token."""
    text = file.read_text(encoding="utf-8")
    found = next(({"eos_token": name} for name in _END_OF_TEXT if f'"{name}"' in text), {})
    return json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | found)


class Tokenizer:
    """Converts text to ids and back. `Tokenizer()` reads text as bytes; `Tokenizer.of` also reads the tokenizer of a folder."""

    name: str  # the path of the folder, `bytes`, or `numbers` for ids without text
    vocab_size = 256
    dtype = np.dtype(np.uint8)  # holds every id
    bos: int | None = None  # begin of text, if the tokenizer declares one
    document_end: Sequence[int] = (10,)  # ids after a document: the end of text if the tokenizer has one, else a newline
    ends: tuple[int, ...]  # each of these ids ends a generated text
    kind = ""  # the class of `transformers`
    source = b""  # tokenizer.json, a part of the fingerprint of a corpus
    # Ids are a part of the fingerprint if False. Turns False when `documents` yields other ids than versions of jgraph without
    # `transformers` did, so read it after the last document.
    is_as_before = True

    def __init__(self, template: str | None = None, ends: Sequence[int] = (), *, without: str = ""):
        self.name = "numbers" if without else "bytes"
        self.ends = tuple(ends)
        self._template = template
        self._without = without  # why text cannot be encoded, for the error

    @staticmethod
    def of(path: Path | None, template: Path | None = None, ends: Sequence[int] = ()) -> "Tokenizer":
        """Returns a tokenizer.

        Args:
            path: A folder with a tokenizer, or its tokenizer.json. None, or a folder without a vocabulary, for bytes.
            template: A file with a chat template, which replaces those of the folder.
            ends: Ids that end a text, beside those of the folder.

        Returns:
            The tokenizer of the folder, or of bytes.

        Raises:
            DataError: If the template cannot be read, or `transformers` cannot read the tokenizer.
            OSError: If `path` is another file, and cannot be read.
        """
        folder = path.parent if path and path.name == TOKENIZER_FILE else path
        is_bytes = folder is None or (folder.is_dir() and vocabulary(folder) is None)
        if folder and is_bytes and template is None and tokenizer_files(folder, [TEMPLATE_FILE]):
            template = folder / TEMPLATE_FILE
        try:
            text = None if template is None else template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise DataError(f"`data_template` is {template}: cannot be read ({e})", field="data_template") from e
        return Tokenizer(text, ends) if folder is None or is_bytes else _HuggingFace(folder, text, ends)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Returns the ids of a text.

        Args:
            text: The text.
            special: Whether to add the special tokens that the tokenizer adds, such as a begin-of-text token.
        """
        if self._without:
            raise DataError(f"{self._without}: prompts must be ids; to use text, add the {TOKENIZER_FILE}")
        return list(text.encode(errors="surrogateescape"))

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Returns the text of ids. Invalid UTF-8 becomes U+FFFD.

        Args:
            ids: Non-negative integers.
            special: Whether the text includes special tokens.
        """
        if self._without:
            return "".join(f"{token} " for token in ids)
        return bytes(min(token, 0xFF) for token in ids).decode(errors="replace")  # 0xFF is not valid in UTF-8

    def documents(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yields the ids of each document with its end. Raises DataError if a tokenizer reads one that is not UTF-8."""
        return (np.frombuffer(document + b"\n", np.uint8) for document in documents)

    def completion(self, prompt: str, completion: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of two texts, and the mask of the tokens in the loss.

        Args:
            prompt: The text before.
            completion: The text in the loss.
        """
        before = self.encode(without_surrogates(prompt))
        after = self._ended(self.encode(without_surrogates(completion), special=False))
        return np.array([*before, *after], np.int32), np.arange(len(before) + len(after)) >= len(before)

    def masked(self, rendered: Sequence[tuple[str, Sequence[Span]]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the ids of texts with sorted spans, and the mask of the tokens that overlap with a span."""
        encoded = self._with_offsets([without_surrogates(text) for text, _ in rendered]) if rendered else ()
        for (ids, offsets), (_, spans) in zip(encoded, rendered, strict=True):
            starts, stops = np.array(offsets, np.int64).reshape(-1, 2).T
            bounds = np.array([*spans, (1 << 62, 1 << 62)], np.int64)  # the last one is after all tokens
            # The first span that ends after the start of the token.
            yield np.array(ids, np.int32), stops > bounds[np.searchsorted(bounds[:, 1], starts, side="right"), 0]

    def chat(self, tools: Any = None) -> dict[str, str] | None:
        """Returns the chat template for a record, and special tokens by the names that it uses; None without a template."""
        return None if self._template is None else {"chat_template": self._template}

    def _with_offsets(self, texts: list[str]) -> Iterable[tuple[Sequence[int], Sequence[Span] | np.ndarray]]:
        """Yields the ids of each text without special tokens, and the span of each token."""
        for text in texts:
            places = np.repeat(np.arange(len(text)), [len(one.encode()) for one in text])
            yield list(text.encode()), np.stack([places, places + 1], axis=1)

    def _ended(self, ids: list[int]) -> list[int]:
        return [*ids, *self.document_end]


class _HuggingFace(Tokenizer):
    """The tokenizer of a folder. `transformers` is imported here only."""

    def __init__(self, path: Path, template: str | None, ends: Sequence[int]):
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns that models need PyTorch
        transformers = library("transformers", extra="hf")
        is_folder = path.is_dir()
        if is_folder:
            tokenizer_files(path, [*_FILES, "config.json"])  # raises DataError for a link out of the folder
        file = path / TOKENIZER_FILE if is_folder else path
        self.source = b"" if is_folder and not file.exists() else file.read_bytes()
        try:
            if is_folder:
                hf = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
            else:
                hf = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
            ids = hf.get_vocab()
            self.vocab_size = max(ids.values()) + 1
            self.bos = hf.bos_token_id
        except Exception as e:  # the library raises Exception itself
            why = " ".join(str(e).split())
            if "trust_remote_code" in why:
                why = "it needs code of its own, which is never run; save it with a class of transformers"
            raise DataError(f"{path}: is not a tokenizer that transformers can read ({why})") from e
        named = [ids[name] for name in _END_OF_TEXT if name in ids]
        found = named if hf.eos_token_id is None else [hf.eos_token_id]
        super().__init__(template, [*dict.fromkeys((*ends, *found))])
        self._hf = hf
        self._eos = found[:1]
        self.name = str(path)
        self.kind = type(hf).__name__
        self.document_end = found[:1] or self.encode("\n", special=False)
        self.dtype = token_dtype(self.vocab_size)
        # Versions of jgraph without `transformers` had a special token at the end of documents only: the first `_END_OF_TEXT`.
        added = hf.added_tokens_decoder.items()
        self._added = {n for n, one in added if one.special or json.dumps(one.content).encode() not in self.source}
        self.is_as_before = bool(self.source) and found[:1] == named[:1] and not self.encode("")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return self._call([without_surrogates(text)], add_special_tokens=special)["input_ids"][0]

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        return self._hf.decode([*ids], skip_special_tokens=not special)

    def documents(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        documents = iter(documents)
        while texts := [decode_utf8(document) for document in islice(documents, _AT_ONCE)]:
            for ids in self._call(texts)["input_ids"]:
                self.is_as_before &= self._added.isdisjoint(ids)
                yield np.array(self._ended(ids), np.int64)

    def chat(self, tools: Any = None) -> dict[str, str] | None:
        if self._template is None and self._hf.chat_template is None:
            return None
        try:
            return {"chat_template": self._hf.get_chat_template(self._template, tools), **self._hf.special_tokens_map}
        except ValueError as e:  # none is the default
            raise DataError(f"{self.name}: {e}") from e

    def _with_offsets(self, texts: list[str]) -> Iterable[tuple[Sequence[int], Sequence[Span] | np.ndarray]]:
        found = self._call(texts, add_special_tokens=False, return_offsets_mapping=True)
        return zip(found["input_ids"], found["offset_mapping"], strict=True)

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if self._eos and ids[-1:] == self._eos else [*ids, *self.document_end]

    def _call(self, texts: list[str], **options: bool) -> Any:
        try:
            return self._hf(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False, **options)
        except Exception as e:  # the library raises Exception itself
            raise DataError(f"the tokenizer cannot encode this text: {' '.join(str(e).split())}") from e
