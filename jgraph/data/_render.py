"""Renders chat templates with `transformers`. As a program, it does so for `ChatReader`, with a limit of memory.

A template is a program of whoever wrote it: it may run forever or use all memory, and only a process can be stopped.
"""

import contextlib
import functools
import json
import re
import resource
import signal
import sys
from collections.abc import Sequence
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

Span: TypeAlias = tuple[int, int]
_LIMIT_BYTES = 2 << 30
_MARK, _COMMENT = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}"), re.compile(r"\{#.*?#\}", re.DOTALL)
# Training data must not depend on the day of the run. Templates of Llama 3 have this date as their default.
_DATE = datetime(2024, 7, 26)


def render(messages: Sequence[Any], *, tools: Any = None, **options: Any) -> tuple[str, list[Span]]:
    """Returns the text of `apply_chat_template`, and its spans of the assistant if `options` ask for them."""
    from transformers.utils.chat_template_utils import render_jinja_template

    plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
    found: Any = render_jinja_template([plain], tools=tools, **options)
    return found[0][0], [*found[1][0]] if found[1] else []


@functools.cache
def _generated(template: str) -> list[str]:
    """Pins the date of a template. Returns a list that receives the text of each `{% generation %}` block.

    `transformers` has no public way to do either: templates receive no functions.
    """
    import jinja2
    from transformers.utils import chat_template_utils

    environment, found = chat_template_utils._compile_jinja_template(template).environment, []
    environment.globals["strftime_now"] = _DATE.strftime
    tracker: Any = next(one for one in environment.extensions.values() if "generation" in one.tags)
    inner = tracker._generation_support

    @jinja2.pass_eval_context
    def support(*args: Any, **options: Any) -> str:
        found.append(inner(*args, **options))
        return found[-1]

    tracker._generation_support = support
    return found


def conversation(messages: list[Any], counts: list[bool], **options: Any) -> tuple[str, list[Span]]:
    """Returns the text, and the spans of the turns of the assistant that count in the loss, one bool per message."""
    template: str = options["chat_template"]
    (generated := _generated(template)).clear()
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    marked = _MARK.search(_COMMENT.sub("", template)) is not None
    text, spans = render(messages, return_assistant_tokens_mask=marked, **options)
    if marked and (generated != [text[slice(*span)] for span in spans] or spans != sorted(spans, key=lambda span: span[1])):
        raise ValueError("text of {% generation %} moves after it was generated, as in a variable: mark it where it is written")

    def prefix(count: int, *, prompt: bool) -> int:
        start = render(messages[:count], add_generation_prompt=prompt, **options)[0]
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


def _serve(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process closes the pipe
    import transformers.utils.chat_template_utils  # noqa: F401

    resource.setrlimit(resource.RLIMIT_DATA, (_LIMIT_BYTES, _LIMIT_BYTES))
    pipe.send_bytes(b"")
    while True:
        for job in json.loads(pipe.recv_bytes()):
            try:
                answer = json.dumps(conversation(**job))
            except MemoryError:
                answer = json.dumps(f"it needs more than {_LIMIT_BYTES >> 30} GiB of memory")
            except Exception as e:  # a template can raise any error of Python
                answer = json.dumps(" ".join(str(e).split()))
            pipe.send_bytes(answer.encode())


if __name__ == "__main__":
    with contextlib.suppress(EOFError, OSError):
        _serve(Connection(int(sys.argv[1])))
