"""Rendered chat records and their masks equal those of transformers."""

import json

import numpy as np
import pytest

from jgraph.data.chat import ChatReader, ChatTemplate
from tests import chats
from tests.parity.folders import transformers

pytestmark = pytest.mark.parity


@pytest.fixture(params=chats.TEMPLATES)
def theirs(request, tmp_path):
    """Returns a tokenizer of transformers with a template, saved in `tmp_path`."""
    file = chats.save_tokenizer(tmp_path)
    tokenizer = transformers().PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = chats.TEMPLATES[request.param]
    tokenizer.save_pretrained(tmp_path)
    return tokenizer


@pytest.mark.parametrize("prompt", [False, True])
def test_the_rendered_text_equals_that_of_transformers(theirs, tmp_path, prompt):
    ours = ChatTemplate.find(tmp_path)
    for record in chats.conversations():
        options = {"tools": record.get("tools"), "add_generation_prompt": prompt}
        expected = theirs.apply_chat_template(record["messages"], tokenize=False, **options)
        assert ours.render(record["messages"], **options)[0] == expected


def test_ids_and_mask_equal_those_of_transformers(theirs, tmp_path):
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chats.conversations()))
    reader = ChatReader(tmp_path / "tokenizer.json")
    found = list(reader.read([str(tmp_path / "chat.jsonl")]))
    for one, record in zip(found, chats.conversations(), strict=True):
        expected = theirs.apply_chat_template(
            record["messages"], tools=record.get("tools"), return_assistant_tokens_mask=True, return_dict=True
        )
        np.testing.assert_array_equal(one.ids, expected["input_ids"])
        np.testing.assert_array_equal(one.trained, np.array(expected["assistant_masks"], bool))
        assert one.trained.any()
        assert not one.trained.all()


def test_functions_and_filters_of_templates_equal_those_of_transformers(tmp_path):
    source = """
    {%- set time = namespace(year=strftime_now('%Y')) %}
    {{- time.year }} {{ messages | tojson(indent=2) }} {{ {'b': "<'&>ü", 'a': none} | tojson(sort_keys=true) }}
    {% for number in range(4) %}
      {% if number == 1 %}{% continue %}{% elif number == 3 %}{% break %}{% endif %}
      {{ number }}{{ undefined_name }}{{ unk_token }}
    {% endfor %}
    """
    file = chats.save_tokenizer(tmp_path, source)
    tokenizer = transformers().PreTrainedTokenizerFast(tokenizer_file=str(file), chat_template=source)
    messages = [chats.message("user", "</b> ü", name=None)]
    ours = ChatTemplate.find(tmp_path)
    assert ours.render(messages)[0] == tokenizer.apply_chat_template(messages, tokenize=False)
