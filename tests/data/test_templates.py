"""Ids and masks of random records, templates and tokenizers equal those of transformers; a process renders, within limits."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer as Rust, processors

from jgraph.data import Tokenizer, _limits, chat as chat_module
from jgraph.data.chat import ChatReader, prompt
from jgraph.errors import DataError
from tests import chats

G, END = "{% generation %}", "{% endgeneration %}"
TURNS = "{% for m in messages %}"
PLAIN = f"{TURNS}<|im_start|>{{{{ m.role }}}}\n%s<|im_end|>{{% endfor %}}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
IS_BOT = "{% if m.role == 'assistant' %}"


def marked(text: str) -> str:
    """Returns a template of turns, with a mark around the turns of the assistant."""
    own = f"<|im_start|>{{{{ m.role }}}}\n{IS_BOT}{G}{text}<|im_end|>{END}{{% else %}}{text}<|im_end|>{{% endif %}}"
    return f"{TURNS}{own}{{% endfor %}}{PROMPT}"


THINK = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
CALLS = "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
PARTS = "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
KINDS: dict[str, str | dict[str, str]] = {
    "chatml": chats.CHATML,
    "llama": chats.LLAMA,
    "mistral": chats.MISTRAL,
    "reasoning": marked(THINK),
    "calls": marked(CALLS),
    "parts": marked(PARTS),
    "trimmed": marked("  {{- m.content | trim -}}  "),
    "named": {"default": marked("{{ m.content }}"), "tool_use": "{{ tools | tojson }}" + marked("{{ m.content }}")},
    "macro": f"{{% macro text(m) %}}{{{{ m.content | upper }}}}{{% endmacro %}}{marked('{{ text(m) }}')}",
    "capture": f"{{% set first %}}[{{{{ messages[0].content }}}}]{{% endset %}}{{{{ first }}}}{marked('{{ m.content }}')}",
    "namespace": "{% set ns = namespace(n=0) %}" + marked("{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.content }}{{ eos_token }}"),
}
BOS, WHERE = ("adds", "declares", "has none"), ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")
TEXTS = ["Hi", "  naïve 🙂  ", "", "<|im_end|> inside", "二\n\n</s>", "e\u0301 \u00a0x", "{{ 1 }}", "<think>"]


def save(folder: Path, template: str | dict[str, str], bos: str, where: str) -> Path:
    """Saves a tokenizer with its special tokens in one of three files, and a template."""
    chats.save_tokenizer(folder)
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    names |= {} if bos == "has none" else {"bos_token": "<s>"}
    fields, added = json.loads((folder / "tokenizer.json").read_text()), {}
    if where != "tokenizer.json":  # the last one gets a token that the vocabulary lacks
        fields["added_tokens"] = [one for one in fields["added_tokens"] if one["content"] not in ("<|im_start|>", "<|im_end|>")]
        added = {"<|im_start|>": fields["model"]["vocab"].pop("<|im_start|>"), "<|im_end|>": 400}
    rust = Rust.from_str(json.dumps(fields))
    if bos == "adds":
        rust.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", chats.SPECIAL.index("<s>"))])
    rust.save(str(folder / "tokenizer.json"))
    if where == "added_tokens.json":
        (folder / where).write_text(json.dumps(added))
    elif added:
        options = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
        names["added_tokens_decoder"] = {str(number): {"content": text, **options} for text, number in added.items()}
    named = [{"name": name, "template": one} for name, one in template.items()] if isinstance(template, dict) else template
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"chat_template": named}))
    return folder


def record(draw: random.Random, kind: str) -> dict[str, object]:
    messages = [chats.message("system", draw.choice(TEXTS))] if draw.random() < 0.3 else []
    for _ in range(draw.randint(1, 3)):
        answer = chats.message("assistant", draw.choice(TEXTS))
        if draw.random() < 0.4:
            answer[draw.choice(["reasoning_content", "reasoning", "thinking"])] = draw.choice(TEXTS)
        if draw.random() < 0.3 and kind in ("chatml", "calls"):
            answer["tool_calls"] = [{"function": {"name": "f", "arguments": {"x": draw.choice(TEXTS), "y": None}}}]
        if draw.random() < 0.3:
            answer["name"] = None
        messages += [chats.message("user", draw.choice(TEXTS)), answer]
    if kind == "parts":
        for one in messages:
            one["content"] = draw.choice([one["content"], [{"type": "text", "text": one["content"]}]])
    return {"messages": messages} | ({"tools": draw.choice([chats.TOOLS, []])} if draw.random() < 0.4 else {})


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_masks_equal_those_of_transformers(tmp_path, rendered_here, kind):
    draw, template = random.Random(kind), KINDS[kind]
    bos, where = draw.choice(BOS), draw.choice(WHERE)
    if kind == "mistral":
        bos = "adds"
    theirs = transformers.AutoTokenizer.from_pretrained(save(tmp_path / "marked", template, bos, where))
    without = {name: chats.without_marks(one) for name, one in template.items()} if isinstance(template, dict) else None
    save(tmp_path / "plain", without or chats.without_marks(str(template)), bos, where)
    records = [record(draw, kind) for _ in range(12)]
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in records))
    readers = {name: ChatReader(tmp_path / name) for name in ("marked", "plain")}
    for found in (reader.read([str(data)]) for reader in readers.values()):
        for own, one in zip(found, records, strict=True):
            expected = theirs.apply_chat_template(
                one["messages"], tools=one.get("tools"), return_assistant_tokens_mask=True, return_dict=True
            )
            np.testing.assert_array_equal(own.ids, expected["input_ids"])
            np.testing.assert_array_equal(own.trained, np.array(expected["assistant_masks"], bool))
            assert own.trained.any()
            assert not own.trained.all()


@pytest.mark.parametrize("bos", BOS)
@pytest.mark.parametrize("where", WHERE)
def test_documents_prompts_and_completions_have_the_ids_of_transformers(tmp_path, bos, where):
    folder = save(tmp_path / "folder", "", bos, where)
    ours, theirs = Tokenizer.of(folder), transformers.AutoTokenizer.from_pretrained(folder)
    eos = chats.SPECIAL.index("</s>")
    for text, ids in zip(TEXTS, ours.documents(text.encode() for text in TEXTS), strict=True):
        expected = theirs(text).input_ids
        assert ours.encode(text) == expected
        assert (expected[:1] == [chats.SPECIAL.index("<s>")]) == (bos == "adds")
        assert ids.tolist() == (expected if text.endswith("</s>") else [*expected, eos])
        both, trained = ours.completion(text, "x</s>")
        assert both.tolist() == [*expected, *theirs("x</s>", add_special_tokens=False).input_ids]
        assert trained.tolist() == [False] * len(expected) + [True] * 2
    assert ours.completion("a", "b")[0][-1] == eos
    assert (ours.bos, ours.ends, ours.document_end) == (theirs.bos_token_id, (eos,), [eos])


def test_functions_and_filters_of_templates_equal_those_of_transformers(tmp_path):
    source = """
    {%- set time = namespace(year=strftime_now('%Y')) %}
    {{- time.year }} {{ messages | tojson(indent=2) }} {{ {'b': "<'&>ü", 'a': none} | tojson(sort_keys=true) }}
    {% for number in range(4) %}
      {% if number == 1 %}{% continue %}{% elif number == 3 %}{% break %}{% endif %}
      {{ number }}{{ undefined_name }}{{ unk_token }}{{ dict(a=1) }}
    {% endfor %}
    """
    folder = chats.save_tokenizer(tmp_path, source).parent
    messages = [chats.message("user", "</b> ü", name=None)]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompt(Tokenizer.of(folder), messages)[0] == expected


# --- The process ---


def read(tmp_path, template, *, turns=("Hi", "Hello!")):
    (tmp_path / "t.jinja").write_text(template)
    records = [{"messages": [chats.message("user", turn), chats.message("assistant", "A")]} for turn in turns]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    reader = ChatReader(None, tmp_path / "t.jinja")
    return [reader.tokenizer.decode(one.ids.tolist()) for one in reader.read([str(tmp_path / "chat.jsonl")])]


@pytest.mark.long
def test_templates_are_rendered_in_a_process_with_the_date_of_training(tmp_path):
    template = (
        "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert read(tmp_path, template) == ["26 Jul 2024HiA", "26 Jul 2024Hello!A"]


def test_the_hook_of_the_date_is_needed_while_transformers_passes_no_functions_to_templates():
    """If this test fails, pass `strftime_now` to `render_jinja_template` and delete the hook in `_generated`."""
    template = "{{ strftime_now }}"
    assert chat_module._render([], chat_template=template, strftime_now=lambda form: form)[0] == "<function>"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "it takes more than 1 seconds"),
        pytest.param("{% set x = 'a' * 3000000000 %}", "it needs more than 2 GiB of memory", marks=pytest.mark.long),
        pytest.param("{{ raise_exception('two\nlines') }}", "two lines", marks=pytest.mark.long),
    ],
)
def test_a_template_that_does_not_end_or_exhausts_memory_is_refused_with_its_record(tmp_path, monkeypatch, code, message):
    monkeypatch.setattr(_limits, "_SECONDS", 1)
    template = "{% if messages[0].content == 'bad' %}" + code + "{% endif %}{% generation %}x{% endgeneration %}"
    with pytest.raises(DataError, match=re.escape(f"chat.jsonl: line 2: the chat template fails: {message}")) as error:
        read(tmp_path, template, turns=("Hi", "bad"))
    assert "\n" not in str(error.value)
