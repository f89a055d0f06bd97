"""Chat records as tokens with a loss mask: what `apply_chat_template` of `transformers` gives for each conversation."""

import contextlib
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from jgraph.data._limits import Call, limited
from jgraph.data._rows import Conversation
from jgraph.data._texts import CHAT_FIELDS, Rows, digest, library, read_records
from jgraph.data.tokenizer import TEMPLATE_FILE, Tokenizer
from jgraph.errors import DataError

_RECORDS_AT_ONCE = 256
# Training data must not depend on the day of the run. Templates of Llama 3 have this date as their default.
_DATE = datetime(2024, 7, 26)
_ANSWER = "\ufdd0"


@dataclass(frozen=True)
class _Record:
    """A checked record, as two texts or as a job for the template."""

    place: str  # in its file, for messages
    digest: bytes
    texts: tuple[str, str] | None = None  # prompt and completion
    job: dict[str, Any] | None = None  # arguments of `conversation`


class ChatReader:
    """Reads chat records with a tokenizer, or that of a folder. `template` is a file instead of the template of the folder."""

    def __init__(self, tokenizer: Tokenizer | Path | None, template: Path | None = None):
        self.tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.of(tokenizer, template)

    def read(self, names: Sequence[str]) -> Iterator[Conversation]:
        """Yields the conversations of files and datasets, in order. Reads them lazily. Raises DataError for a wrong record."""
        # A template is a program of whoever wrote it.
        with limited(f"{__name__}:{conversation.__name__}", "transformers.utils.chat_template_utils") as render:
            yield from read_records(names, CHAT_FIELDS, functools.partial(self._conversations, render))

    def _conversations(self, render: Call, rows: Rows) -> Iterator[Conversation]:
        while batch := [self._record(*row) for row in islice(rows, _RECORDS_AT_ONCE)]:
            jobs = [(one.place, one.job) for one in batch if one.job is not None]
            masked = self.tokenizer.masked([*_rendered(render, jobs)] if jobs else [])
            for one in batch:
                tokens = next(masked) if one.texts is None else self.tokenizer.completion(*one.texts)
                yield Conversation(one.digest, *tokens)

    def _record(self, place: str, row: dict[str, Any]) -> _Record:
        record = {name: row[name] for name in CHAT_FIELDS if row.get(name) is not None}
        try:
            key = digest(json.dumps(record, sort_keys=True, ensure_ascii=False).encode(errors="replace"))
            tools = json.loads(record["tools"] or "[]") if isinstance(record.get("tools"), str) else record.get("tools")
        except (TypeError, ValueError, RecursionError) as e:  # a column of a Parquet file may have dates
            raise DataError(f"{place}: has a value that JSON does not have ({e})") from e
        context: Any = record.get("prompt")
        turns: Any = record.get("completion")
        if "messages" in record:
            context, turns = [], record["messages"]
        elif isinstance(context, str) and isinstance(turns, str):
            return _Record(place, key, texts=(context, turns))
        messages = [*context, *turns] if isinstance(context, list) and isinstance(turns, list) else []
        if not messages or not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in messages):
            must = "a list of messages with 'role', or 'prompt' and 'completion' as two strings or two such lists"
            names = f"the fields {', '.join(map(repr, record))}" if record else f"none of the fields {', '.join(CHAT_FIELDS)}"
            raise DataError(f"{place}: has {names}: must have 'messages', {must}")
        if (chat := self.tokenizer.chat(tools)) is None:
            must = f"a Jinja file, because neither {TEMPLATE_FILE} nor a template in tokenizer_config.json was found"
            raise DataError(f"{place}: has messages, and `data_template` is empty: must be {must}", field="data_template")
        weights = [(one.pop("weight", None), one.pop("train", None)) for one in messages]
        for weight, train in weights:
            if weight not in (None, 0, 1) or train not in (None, False, True):
                raise DataError(f"{place}: has a message with weight {weight!r}, train {train!r}: must be 0 or 1, a boolean")
        counts = [weight in (None, 1) and train in (None, True) for weight, train in weights]
        counts[: len(context)] = [False] * len(context)
        return _Record(place, key, job={"messages": messages, "counts": counts, "tools": tools, **chat})


def _rendered(render: Call, jobs: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[Any]:
    """Yields the results of a template. Raises DataError with the place of the record that it fails for."""
    for name in ("transformers", "jinja2"):
        library(name, extra="hf")
    for (place, _), answer in zip(jobs, render([job for _, job in jobs]), strict=True):
        if isinstance(answer, str):
            raise DataError(f"{place}: the chat template fails: {answer}")
        yield answer


def prompt(tokenizer: Tokenizer, messages: Sequence[Any], tools: Any = None) -> tuple[list[int], list[str]]:
    """Returns the ids that ask for an answer, and the text with which the template ends an answer, in a list if any."""
    options = tokenizer.chat(tools) or {}
    try:
        text = _render(messages, tools=tools, add_generation_prompt=True, **options)[0]
    except Exception as e:  # a template can raise any error of Python
        raise DataError(f"the chat template fails: {' '.join(str(e).split())}") from e
    end = ""
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": _ANSWER}]
    with contextlib.suppress(Exception):  # it refuses such a conversation
        end = _render(turns, **options)[0].rpartition(_ANSWER)[2].strip()
    return tokenizer.encode(text, special=False), [end] if end else []


def _render(messages: Sequence[Any], *, tools: Any = None, **options: Any) -> tuple[str, list[Any]]:
    """Returns the text of `apply_chat_template`, and its spans of the assistant if `options` ask for them."""
    from transformers.utils.chat_template_utils import render_jinja_template

    plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
    found: Any = render_jinja_template([plain], tools=tools, **options)
    return found[0][0], [*found[1][0]] if found[1] else []


@functools.cache
def _generated(template: str) -> tuple[list[str], bool]:
    """Pins the date of a template. Returns a list that gets the text of each `{% generation %}` block, and if it has any.

    `transformers` has no public way to do either: templates receive no functions.
    """
    from jinja2 import nodes, pass_eval_context
    from transformers.utils import chat_template_utils

    environment = chat_template_utils._compile_jinja_template(template).environment
    found = []
    environment.globals["strftime_now"] = _DATE.strftime
    tracker: Any = next(one for one in environment.extensions.values() if "generation" in one.tags)
    inner = tracker._generation_support

    @pass_eval_context
    def support(*args: Any, **options: Any) -> str:
        found.append(inner(*args, **options))
        return found[-1]

    tracker._generation_support = support
    return found, environment.parse(template).find(nodes.ExtensionAttribute) is not None


def conversation(messages: list[Any], counts: list[bool], **options: Any) -> tuple[str, list[Any]]:
    """Returns the text, and the spans of the turns of the assistant that count in the loss, one bool per message."""
    template: str = options["chat_template"]
    generated, marked = _generated(template)
    generated.clear()
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    text, spans = _render(messages, return_assistant_tokens_mask=marked, **options)
    if marked and (generated != [text[slice(*span)] for span in spans] or spans != sorted(spans, key=lambda span: span[1])):
        raise ValueError("text of {% generation %} moves after it was generated, as in a variable: mark it where it is written")

    def prefix(count: int, *, prompt: bool) -> int:
        start = _render(messages[:count], add_generation_prompt=prompt, **options)[0]
        if not text.startswith(start):
            must = "mark each turn of the assistant in the template with one {% generation %}"
            raise ValueError(f"it renders the first {count} messages in another way if more follow: {must}")
        return len(start)

    chosen = [n for n in turns if counts[n]]
    if marked and (chosen == turns or len(spans) == len(turns)):
        return text, spans if chosen == turns else [span for span, n in zip(spans, turns, strict=True) if counts[n]]
    bounds = [(prefix(n, prompt=True), prefix(n + 1, prompt=False)) for n in chosen]
    inside = [span for span in spans if any(start <= span[0] and span[1] <= stop for start, stop in bounds)]
    return text, inside if marked else bounds
