"""Chat records as tokens with a loss mask: what `apply_chat_template` of `transformers` gives for each conversation."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from multiprocessing import Pipe
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

from jgraph.data import _render
from jgraph.data._rows import Conversation
from jgraph.data._texts import CHAT_FIELDS, Rows, digest, library, read_records
from jgraph.data.tokenizer import TEMPLATE_FILE, Tokenizer
from jgraph.errors import DataError

_RECORDS_AT_ONCE = 256
_SECONDS = 10


class ChatReader:
    """Reads chat records with a tokenizer, or that of a folder. `template` is a file instead of the template of the folder."""

    def __init__(self, tokenizer: Tokenizer | Path | None, template: Path | None = None):
        self.tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.of(tokenizer, template)

    def read(self, names: Sequence[str]) -> Iterator[Conversation]:
        """Yields the conversations of files and datasets, in order. Reads them lazily. Raises DataError for a wrong record."""
        with ExitStack() as stack:
            pipe: list[Any] = []

            def conversations(rows: Rows) -> Iterator[Conversation]:
                while batch := [self._record(*row) for row in islice(rows, _RECORDS_AT_ONCE)]:
                    jobs = [(place, job) for place, _, job in batch if isinstance(job, dict)]
                    if jobs and not pipe:
                        pipe.append(stack.enter_context(_process()))
                    texts, spans = zip(*_rendered(pipe[0], jobs), strict=True) if jobs else ((), ())
                    masked = self.tokenizer.rendered(texts, spans)
                    for _, key, job in batch:
                        yield Conversation(key, *(next(masked) if isinstance(job, dict) else self.tokenizer.completion(*job)))

            yield from read_records(names, CHAT_FIELDS, conversations)

    def _record(self, place: str, row: dict[str, Any]) -> tuple[str, bytes, Any]:
        """Checks a record. Returns its place and digest, and its two strings or the arguments of `_render.conversation`."""
        record = {name: row[name] for name in CHAT_FIELDS if row.get(name) is not None}
        try:
            key = digest(json.dumps(record, sort_keys=True, ensure_ascii=False).encode(errors="replace"))
            tools = json.loads(record["tools"]) if isinstance(record.get("tools"), str) else record.get("tools")
        except (TypeError, ValueError, RecursionError) as e:  # a column of a Parquet file may have dates
            raise DataError(f"{place}: has a value that JSON does not have ({e})") from e
        messages, prompt, completion = (record.get(name) for name in CHAT_FIELDS[:3])
        if messages is None and isinstance(prompt, str) and isinstance(completion, str):
            return place, key, (prompt, completion)
        context: Any = prompt if messages is None else []
        turns: Any = completion if messages is None else messages
        everything = [*context, *turns] if isinstance(context, list) and isinstance(turns, list) else []
        if not everything or not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in everything):
            must = "a list of messages with 'role', or 'prompt' and 'completion' as two strings or two such lists"
            names = f"the fields {', '.join(map(repr, record))}" if record else f"none of the fields {', '.join(CHAT_FIELDS)}"
            raise DataError(f"{place}: has {names}: must have 'messages', {must}")
        if (chat := self.tokenizer.chat(tools)) is None:
            must = f"a Jinja file, because neither {TEMPLATE_FILE} nor a template in tokenizer_config.json was found"
            raise DataError(f"{place}: has messages, and `data_template` is empty: must be {must}", field="data_template")
        counts = []
        for number, one in enumerate(everything):
            weight, train = one.pop("weight", None), one.pop("train", None)
            if weight not in (None, 0, 1) or train not in (None, False, True):
                raise DataError(f"{place}: has a message with weight {weight!r}, train {train!r}: must be 0 or 1, a boolean")
            counts.append(number >= len(context) and weight in (None, 1) and train in (None, True))
        return place, key, {"messages": everything, "counts": counts, "tools": tools, **chat}


@contextmanager
def _process() -> Iterator[Any]:
    """Starts a process that renders, and yields the connection to it."""
    library("transformers", extra="hf"), library("jinja2", extra="hf")
    ours, theirs = Pipe()
    options: Any = {"env": os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, "stderr": DEVNULL}
    command, number = [sys.executable, "-P", _render.__file__], theirs.fileno()
    with ours, Popen([*command, str(number)], pass_fds=[number], stdin=DEVNULL, **options) as process:
        try:
            theirs.close()
            ours.recv_bytes()
            yield ours
        finally:
            process.kill()


def _rendered(pipe: Any, jobs: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields the text and the spans of each job. A job is named by its place in errors."""
    pipe.send_bytes(json.dumps([job for _, job in jobs]).encode())
    for place, _ in jobs:
        try:
            answer = json.loads(pipe.recv_bytes()) if pipe.poll(_SECONDS) else f"it takes more than {_SECONDS} seconds"
        except EOFError:
            answer = "it needs more memory than there is"
        if isinstance(answer, str):
            raise DataError(f"{place}: the chat template fails: {answer}")
        yield answer
