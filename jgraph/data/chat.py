"""Chat records: rendering with a chat template, the loss mask, and packing of whole conversations into rows.

A record has `messages`, or `prompt` and `completion` as two strings or two lists of messages. Messages are rendered with the
Jinja template of a Hugging Face folder. The loss counts the assistant's text: the text between `{% generation %}` and
`{% endgeneration %}` if the template has these marks. Otherwise it is the text that a turn of the assistant adds to the
messages before it with the generation prompt.
"""

import json
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from jgraph.data._batches import Index, Packed, Source
from jgraph.data._texts import digest, library, read_records
from jgraph.data.tokenizer import Encoder, load_tokenizer
from jgraph.errors import DataError

Truncate: TypeAlias = Literal["end", "start", "drop", "error"]
Message: TypeAlias = Mapping[str, Any]
_Span: TypeAlias = tuple[int, int]

TEMPLATE_FILE = "chat_template.jinja"
_FIELDS = ("messages", "prompt", "completion", "tools")
_HAS_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Unicode reserves these code points for internal use. They mark the assistant's text in a rendered template.
_BEGIN, _END, _CONTENT = "\ufdd0", "\ufdd1", "\ufdd2"
# Training data must not depend on the day of the run. Templates of Llama 3 have this date as their default.
_DATE = date(2024, 7, 26)
_RECORDS_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A chat template in the Jinja language of `transformers`. Its first use compiles it in a sandbox, with the jinja2 library.

    Attributes:
        source: The text of the template.
        special_tokens: Texts of special tokens, such as `bos_token`, by the name that the template uses.
        name: The file of the template, for messages.
        today: The date that `strftime_now` formats; None for the current time.
    """

    source: str = field(repr=False)
    special_tokens: Mapping[str, str]
    name: str
    today: date | None = None

    @classmethod
    def find(cls, folder: Path | None, file: Path | None = None, *, today: date | None = None) -> "ChatTemplate | None":
        """Reads a template and special tokens.

        Args:
            folder: Folder with tokenizer_config.json, special_tokens_map.json and chat_template.jinja, each of which may be
                missing. None for no folder.
            file: File of the template. None reads chat_template.jinja of the folder, or the field `chat_template` of its
                tokenizer_config.json.
            today: The date that `strftime_now` formats; None for the current time.

        Returns:
            The template. None if there is none.

        Raises:
            DataError: If a file cannot be read, or a JSON file is not an object.
        """
        config = {} if folder is None else _json(folder / "tokenizer_config.json")
        special = special_tokens(folder)
        if file is None and folder is not None and (folder / TEMPLATE_FILE).exists():
            file = folder / TEMPLATE_FILE
        if file is not None:
            try:
                return cls(file.read_text(encoding="utf-8"), special, str(file), today)
            except (OSError, UnicodeDecodeError) as e:
                raise DataError(f"`data_template` is {file}: cannot be read ({e})", field="data_template") from e
        found = config.get("chat_template")
        if isinstance(found, list):  # several templates by name
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            found = named.get("default")
        return cls(found, special, f"{folder}/tokenizer_config.json", today) if isinstance(found, str) else None

    @property
    def has_marks(self) -> bool:
        """True if the template marks the assistant's text with `{% generation %}`."""
        return _HAS_MARKS.search(self.source) is not None

    def render(
        self, messages: Sequence[Message], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Renders messages.

        Args:
            messages: Messages with a `role`, `content` and other fields that the template reads. Fields with the value None
                are left out.
            tools: Descriptions of tools, as the template reads them; None for none.
            add_generation_prompt: Whether to end with the text that begins a turn of the assistant.

        Returns:
            The text, and the [start, stop) characters of the text in `{% generation %}` marks.

        Raises:
            DataError: If jinja2 is not installed, or the template has a syntax error, refuses the messages or fails.
        """
        template = self._compiled
        context = {"tools": tools, "documents": None, **self.special_tokens}
        plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            text = template.render(messages=plain, add_generation_prompt=add_generation_prompt, **context)
        except Exception as e:  # a template can raise any error of Python
            raise DataError(f"the chat template {self.name} fails: {e}") from e
        parts, spans, begin = re.split(f"([{_BEGIN}{_END}])", text), [], 0
        text = ""
        for part in parts:
            if part == _BEGIN:
                begin = len(text)
            elif part == _END:
                spans.append((begin, len(text)))
            else:
                text += part
        return text, spans

    def end_of_turn(self) -> str:
        """Returns the text that follows the content of a turn of the assistant, without white space around it.

        For example "<|im_end|>". Empty if there is none, or the template refuses a conversation of two turns.
        """
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _CONTENT}]
        try:
            return self.render(turns)[0].rpartition(_CONTENT)[2].strip()
        except DataError:
            return ""

    @cached_property
    def _compiled(self) -> Any:
        jinja2, sandbox = library("jinja2", extra="chat"), library("jinja2.sandbox", extra="chat")
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_extension()]
        )

        def raise_exception(message: str) -> None:
            raise jinja2.TemplateError(message)

        def strftime_now(form: str) -> str:
            return (self.today or datetime.now()).strftime(form)

        def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # Jinja's own filter escapes HTML

        environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
        environment.filters["tojson"] = tojson
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as e:
            raise DataError(f"the chat template {self.name} has an error: {e}", field="data_template") from e


def _generation_extension() -> Any:
    """Returns a Jinja extension that puts `_BEGIN` and `_END` around the text in `{% generation %}` blocks."""
    ext, nodes = library("jinja2.ext", extra="chat"), library("jinja2.nodes", extra="chat")

    class Generation(ext.Extension):
        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> list[Any]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (_BEGIN, _END))
            return [begin, nodes.Scope(body, lineno=line), end]

    return Generation


def special_tokens(folder: Path | None) -> dict[str, str]:
    """Reads the texts of special tokens, such as `bos_token` and `eos_token`, by name.

    Args:
        folder: Folder with tokenizer_config.json and special_tokens_map.json; both may be missing. None for no folder.

    Returns:
        The tokens of tokenizer_config.json, and those of special_tokens_map.json that it lacks.

    Raises:
        DataError: If a file cannot be read or is not a JSON object.
    """
    found: dict[str, str] = {}
    files = [] if folder is None else [folder / "special_tokens_map.json", folder / "tokenizer_config.json"]
    for file in files:
        for key, value in _json(file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def end_ids(tokenizer: Path) -> list[int]:
    """Returns the ids that end an answer: of generation_config.json, and the `eos_token` of tokenizer_config.json.

    Args:
        tokenizer: A tokenizer.json. The other files are in its folder and may be missing.

    Raises:
        DataError: If a file cannot be read or is not a JSON object, or the tokenizers library is missing.
    """
    found = _json(tokenizer.parent / "generation_config.json").get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    if eos := special_tokens(tokenizer.parent).get("eos_token"):
        ids = [*ids, load_tokenizer(tokenizer).token_to_id(eos)]
    return [one for one in ids if isinstance(one, int)]


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError, RecursionError) as e:
        raise DataError(f"{path}: cannot be read ({e})") from e
    if not isinstance(found, dict):
        raise DataError(f"{path}: must be a JSON object")
    return found


class Conversation(NamedTuple):
    """The tokens of a record.

    Attributes:
        digest: SHA-256 of the record, 32 bytes.
        ids: Token ids, 1-D int32.
        trained: bool, one per token: True for tokens that count in the loss.
    """

    digest: bytes
    ids: np.ndarray
    trained: np.ndarray


class _Rendered(NamedTuple):
    """The text of a record, with the spans of characters to train, and whether the end-of-text token follows."""

    digest: bytes
    text: str
    spans: list[_Span]
    ends: bool


class ChatReader:
    """Reads chat records as tokens with a loss mask.

    Attributes:
        template: The chat template; None if there is none. Records of two strings need none.
        vocab_size: Largest id + 1.

    Args:
        tokenizer: A tokenizer.json; None reads the UTF-8 bytes of the text. Its folder is searched for the template and for
            special tokens.
        template: File of the template; None for the template of the folder.

    Raises:
        DataError: If a file cannot be read or is damaged, or the tokenizers library is missing.
    """

    def __init__(self, tokenizer: Path | None, template: Path | None = None):
        folder = None if tokenizer is None else tokenizer.parent
        self.template = ChatTemplate.find(folder, template, today=_DATE)
        self._encode: _Encode = _encode_bytes
        self.vocab_size = 256
        if tokenizer is not None:
            encoder = _ChatEncoder(tokenizer, special_tokens(folder).get("eos_token"))
            self._encode, self.vocab_size = encoder.encode_spans, encoder.vocab_size

    def read(self, names: Sequence[str]) -> Iterator[Conversation]:
        """Yields the conversations of files and datasets, in order. Reads them lazily.

        Args:
            names: .jsonl and .parquet files, directories, globs and datasets (`hf:owner/name`).

        Raises:
            DataError: If a file cannot be read, or a record cannot be rendered.
        """
        rendered = read_records(names, _FIELDS, self._render)
        while batch := list(islice(rendered, _RECORDS_AT_ONCE)):
            for one, (ids, trained) in zip(batch, self._encode(batch), strict=True):
                yield Conversation(one.digest, ids, trained)

    def _render(self, record: dict[str, Any]) -> _Rendered:
        record = {name: record[name] for name in _FIELDS if record.get(name) is not None}
        try:
            canonical = json.dumps(record, sort_keys=True, ensure_ascii=False)
        except (TypeError, ValueError) as e:  # a column of a Parquet file may have dates
            raise DataError(f"has a value that JSON does not have ({e})") from e
        if any(mark in canonical for mark in (_BEGIN, _END)):
            raise DataError("has U+FDD0 or U+FDD1, which Unicode reserves for internal use")
        key = digest(canonical.encode(errors="replace"))
        messages, prompt, completion = (record.get(name) for name in ("messages", "prompt", "completion"))
        if messages is None and isinstance(prompt, str) and isinstance(completion, str):
            return _Rendered(key, prompt + completion, [(len(prompt), len(prompt) + len(completion))], ends=True)
        given = [[], messages] if messages is not None else [prompt, completion]
        if not all(isinstance(part, list) and all(map(_is_message, part)) for part in given):
            must = "a list of messages with 'role', or 'prompt' and 'completion' as two strings or two such lists"
            names = f"the fields {', '.join(map(repr, record))}" if record else f"none of the fields {', '.join(_FIELDS)}"
            raise DataError(f"has {names}: must have 'messages', {must}")
        if self.template is None:
            must = f"a Jinja file, because neither {TEMPLATE_FILE} nor a template in tokenizer_config.json was found"
            raise DataError(f"has messages, and `data_template` is empty: must be {must}", field="data_template")
        return _Rendered(key, *self._mask(given[0], given[1], record.get("tools")), ends=False)

    def _mask(self, context: list[Message], turns: list[Message], tools: Any) -> tuple[str, list[_Span]]:
        """Renders `context` and `turns`. Returns the text, and the spans of the assistant's text in `turns`."""
        assert self.template is not None
        everything, render = [*context, *turns], self.template.render
        text, spans = render(everything, tools=tools)

        def prefix(count: int, *, prompt: bool) -> int:
            start = render(everything[:count], tools=tools, add_generation_prompt=prompt)[0]
            if not text.startswith(start):
                raise DataError(
                    f"the chat template {self.template and self.template.name} renders the first {count} messages in another "
                    "way if more follow: mark the assistant's text in the template with {% generation %}"
                )
            return len(start)

        if self.template.has_marks:
            first = prefix(len(context), prompt=True) if context else 0
            return text, [(start, stop) for start, stop in spans if start >= first]
        numbers = [n for n in range(len(context), len(everything)) if everything[n]["role"] == "assistant"]
        return text, [(prefix(n, prompt=True), prefix(n + 1, prompt=False)) for n in numbers]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


_Encode: TypeAlias = Callable[[Sequence[_Rendered]], Iterable[tuple[np.ndarray, np.ndarray]]]


def _encode_bytes(batch: Sequence[_Rendered]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for one in batch:
        ids = np.frombuffer(one.text.encode(errors="replace") + b"\n" * one.ends, np.uint8).astype(np.int32)
        trained = np.zeros(len(ids), bool)
        for start, stop in one.spans:
            first = len(one.text[:start].encode(errors="replace"))
            trained[first : first + len(one.text[start:stop].encode(errors="replace"))] = True
        trained[len(ids) - one.ends :] = True
        yield ids, trained


class _ChatEncoder(Encoder):
    """Converts rendered records to ids and masks. Unlike in other text, special tokens in the text get their ids."""

    def __init__(self, path: Path, eos_token: str | None):
        super().__init__(path)
        self._tokenizer.encode_special_tokens = False
        eos = None if eos_token is None else self._tokenizer.token_to_id(eos_token)
        self._end = self._end if eos is None else [eos]

    def encode_spans(self, batch: Sequence[_Rendered]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the ids and the mask of each text: True for tokens that overlap with a span, and for the end of text."""
        texts = [one.text.encode(errors="replace").decode() for one in batch]  # JSON can encode an unpaired surrogate
        try:
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        except Exception as e:  # the library raises Exception itself
            raise DataError(f"the tokenizer cannot encode this text: {e}") from e
        for one, encoding in zip(batch, encodings, strict=True):
            starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            spans = np.array([*one.spans, (len(one.text) + 1, len(one.text) + 1)], np.int64)
            # The first span that ends after the start of the token.
            span = np.minimum(np.searchsorted(spans[:, 1], starts, side="right"), len(spans) - 1)
            end = self._end if one.ends else []
            trained = np.concatenate([stops > spans[span, 0], np.ones(len(end), bool)])
            yield np.array([*encoding.ids, *end], np.int32), trained


# --- Packing ---


def packed(
    conversations: Iterable[Conversation], *, seq_len: int, truncate: Truncate, dtype: np.dtype | type, name: str = "data"
) -> Source:
    """Packs whole conversations into rows. The result depends on the order of the conversations only.

    Args:
        conversations: The conversations.
        seq_len: Predicted tokens per row. A row has seq_len + 1 tokens.
        truncate: Action for a conversation with more tokens than a row: `end` removes tokens at its end, `start` at its
            beginning. `drop` leaves it out. `error` raises an error.
        dtype: dtype of the tokens.
        name: Name of the source.

    Returns:
        The source. Its documents are the conversations and the padding at the end of a row, with the id 0. Conversations
        without a token in the loss are left out.

    Raises:
        DataError: If a conversation is too long and `truncate` is `error`, or no conversation is left.
    """
    size, truncated, dropped, kept = seq_len + 1, 0, 0, []
    for one in conversations:
        is_long = len(one.ids) > size
        if is_long and truncate == "error":
            must = f"end, start or drop: a conversation has {len(one.ids)} tokens, and a row of `seq_len` {seq_len} has {size}"
            raise DataError(f"`data_truncate` is error: must be {must}", field="data_truncate")
        part = slice(-size, None) if truncate == "start" else slice(size)
        ids, trained = one.ids[part], one.trained[part].copy()
        trained[:1] = False  # nothing predicts the first token
        if (is_long and truncate == "drop") or not trained.any():
            dropped += 1
        else:
            truncated += is_long
            kept.append((ids, trained))
    if not kept:
        raise DataError(f"{dropped} records have no token of the assistant in a row of `seq_len` {seq_len}")
    rows = best_fit([len(ids) for ids, _ in kept], size)
    tokens, mask, lengths = np.zeros((len(rows), size), dtype), np.zeros((len(rows), size), bool), []
    for row, own in enumerate(rows):
        at = 0
        for number in own:
            ids, trained = kept[number]
            tokens[row, at : at + len(ids)], mask[row, at : at + len(ids)] = ids, trained
            lengths.append(len(ids))
            at += len(ids)
        if at < size:
            lengths.append(size - at)
    index = Index(np.cumsum(lengths), [len(lengths)], [tokens.size])
    counts = Packed(mask.ravel(), len(kept), sum(len(ids) for ids, _ in kept), truncated, dropped)
    return Source(tokens.ravel(), index=index, name=name, num_documents=len(kept), packed=counts)


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Packs items into rows: the longest first, each into the row with the least free space that is enough.

    This is the algorithm "best fit decreasing" for bin packing. Items of equal length stay in order.

    Args:
        lengths: Lengths of the items, in [1, size].
        size: Length of a row.

    Returns:
        The indices of the items in each row.
    """
    rows: list[list[int]] = []
    with_space: dict[int, list[int]] = {}  # rows by their free space
    spaces: list[int] = []  # keys of `with_space`, ascending
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        at = bisect_left(spaces, lengths[item])
        if at == len(spaces):
            row, space = len(rows), size
            rows.append([])
        else:
            space = spaces[at]
            row = with_space[space].pop()
            if not with_space[space]:
                del with_space[space], spaces[at]
        rows[row].append(item)
        if space := space - lengths[item]:
            if space not in with_space:
                with_space[space] = []
                insort(spaces, space)
            with_space[space].append(row)
    return rows


def describe(sources: Sequence[Source], seq_len: int) -> str:
    """Returns one line about packed sources: conversations, rows, tokens, tokens in the loss, truncated and dropped records.

    Args:
        sources: Sources of `packed`.
        seq_len: Predicted tokens per row.
    """
    parts = [source.packed for source in sources if source.packed is not None]
    names = ("conversations", "tokens", "truncated", "dropped")
    counts = {name: sum(getattr(part, name) for part in parts) for name in names}
    rows, trained = sum(source.num_rows(seq_len) for source in sources), sum(int(part.trained.sum()) for part in parts)
    return (
        f"{counts['conversations']:,} conversations in {rows:,} rows: {counts['tokens']:,} tokens, {trained:,} trained; "
        f"{counts['truncated']:,} truncated, {counts['dropped']:,} dropped"
    )
