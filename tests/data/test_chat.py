"""Chat records are rendered, masked, packed into rows, and read as batches."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, settings, strategies as st

from jgraph.data import Batches, Tokenizer, heldout_batches, load
from jgraph.data.__main__ import main
from jgraph.data._rows import Conversation, best_fit, pack_rows
from jgraph.data.chat import ChatReader, prompt
from jgraph.errors import DataError
from tests import chats

MESSAGES = [chats.message("user", "Hi"), chats.message("assistant", "Hello!")]


def write(path: Path, records: list[object]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


pytestmark = pytest.mark.usefixtures("rendered_here")


@pytest.fixture
def folder(tmp_path):
    return chats.save_tokenizer(tmp_path / "folder", chats.CHATML).parent


def read(tmp_path, records, tokenizer=None, template: str | None = None):
    """Returns the text of each record and its trained text."""
    file = None if template is None else tmp_path / "template.jinja"
    if file is not None:
        file.write_text(template, encoding="utf-8")
    reader = ChatReader(tokenizer, file)
    decode, found = reader.tokenizer.decode, reader.read([write(tmp_path / "chat.jsonl", records)])
    return [(decode(one.ids.tolist()), decode(one.ids[one.trained].tolist())) for one in found]


# --- Rendering ---


@pytest.mark.parametrize("name", chats.TEMPLATES)
def test_the_prefixes_of_turns_give_the_mask_of_generation_marks(tmp_path, name):
    marked = chats.save_tokenizer(tmp_path / "marked", chats.TEMPLATES[name])
    plain = chats.save_tokenizer(tmp_path / "plain", chats.without_marks(chats.TEMPLATES[name]))
    data = write(tmp_path / "chat.jsonl", chats.conversations())
    ours, theirs = ([*ChatReader(file).read([data])] for file in (plain, marked))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.trained, b.trained)
        assert b.trained.any()


def test_every_turn_of_the_assistant_is_trained_with_its_end(tmp_path, folder):
    record = {"messages": [*MESSAGES, chats.message("user", "Bye"), chats.message("assistant", "Bye!")]}
    ((_, trained),) = read(tmp_path, [record], folder / "tokenizer.json")
    assert trained == "Hello!<|im_end|>\nBye!<|im_end|>\n"


@pytest.mark.parametrize("template", [chats.CHATML, chats.without_marks(chats.CHATML)])
def test_a_completion_of_messages_is_trained_without_earlier_turns_of_its_prompt(tmp_path, folder, template):
    prompt = [*MESSAGES, chats.message("user", "Bye")]
    record = {"prompt": prompt, "completion": [chats.message("assistant", "Bye!")]}
    ((text, trained),) = read(tmp_path, [record], folder / "tokenizer.json", template)
    assert trained == "Bye!<|im_end|>\n"
    assert "Hello!" in text


def test_two_strings_are_joined_without_a_template_and_end_with_the_eos_token(tmp_path):
    tokenizer = chats.save_tokenizer(tmp_path / "folder")
    assert read(tmp_path, [{"prompt": "2 + 2 =", "completion": " 4"}], tokenizer) == [("2 + 2 = 4</s>", " 4</s>")]
    (tokenizer.parent / "tokenizer_config.json").unlink()
    assert read(tmp_path, [{"prompt": "2 + 2 =", "completion": " 4"}], tokenizer)[0][1] == " 4<|endoftext|>"


def test_without_a_tokenizer_records_are_bytes_with_a_mask_of_bytes(tmp_path):
    records = [{"prompt": "ü→", "completion": "ñ."}, {"messages": MESSAGES}]
    template = "{% for m in messages %}→{% generation %}{{ m.content }}é{% endgeneration %}ü{% endfor %}"
    assert read(tmp_path, records, template=template) == [("ü→ñ.\n", "ñ.\n"), ("→Hiéü→Hello!éü", "HiéHello!é")]


def test_the_date_in_training_data_does_not_depend_on_the_day(tmp_path):
    template = (
        "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert read(tmp_path, [{"messages": MESSAGES}], template=template)[0][0] == "26 Jul 2024HiHello!"


@pytest.mark.parametrize(("name", "end"), [("chatml", "<|im_end|>"), ("llama", "<|eot_id|>"), ("mistral", "</s>")])
def test_the_text_that_ends_an_answer_is_found_in_the_template(tmp_path, name, end):
    tokenizer = Tokenizer.of(chats.save_tokenizer(tmp_path / "folder", chats.TEMPLATES[name]))
    ids, ends = prompt(tokenizer, [chats.message("user", "Hi")])
    assert ends == [end]
    assert ids.count(chats.SPECIAL.index("<s>")) == (name != "chatml")


def test_a_template_that_refuses_the_messages_of_a_prompt_fails_in_one_line(tmp_path):
    template = "{{ raise_exception('no system\\n message') }}"
    tokenizer = Tokenizer.of(chats.save_tokenizer(tmp_path / "folder", template))
    with pytest.raises(DataError, match=r"^the chat template fails: no system message$"):
        prompt(tokenizer, [chats.message("system", "Hi")])


def test_a_template_file_replaces_all_templates_of_the_folder(tmp_path, folder):
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools{{ messages[-1].content }}")
    record = {"messages": MESSAGES, "tools": chats.TOOLS}
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert read(tmp_path, [record], folder / "tokenizer.json", template) == [("HiHello!", "HiHello!")]


@pytest.mark.parametrize(
    ("record", "template", "message"),
    [
        ({"messages": MESSAGES}, None, "line 1: has messages, and `data_template` is empty: must be a Jinja file"),
        ({"text": "a"}, None, "has none of the fields messages, prompt, completion, tools: must have 'messages'"),
        ({"prompt": "a", "completion": MESSAGES}, None, "has the fields 'prompt', 'completion': must have 'messages'"),
        ({"messages": ["a"]}, "a", "has the fields 'messages': must have 'messages', a list of messages with 'role'"),
        ({"messages": []}, "a", "has the fields 'messages': must have 'messages'"),
        ({"messages": MESSAGES, "tools": "{"}, "a", "has a value that JSON does not have"),
        ({"messages": MESSAGES, "tools": "[1]"}, "a", "fails: Tools should either be a JSON schema"),
        (
            {"messages": [MESSAGES[0], {**MESSAGES[1], "weight": 0.5}]},
            "a",
            "a message with weight 0.5, train None: must be 0 or 1",
        ),
        (
            {"messages": [MESSAGES[0], {**MESSAGES[1], "train": "no"}]},
            "a",
            "with weight None, train 'no': must be 0 or 1, a boolean",
        ),
        (
            {"messages": MESSAGES},
            "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}|{{ x | length }}",
            "text of {% generation %} moves after it was generated",
        ),
        ({"messages": MESSAGES}, "{{ raise_exception('no system') }}", "fails: no system"),
        ({"messages": MESSAGES}, "{{ messages[0].content + 1 }}", "fails: can only concatenate str"),
        (
            {"messages": MESSAGES},
            "{{ ''.__class__.__mro__ }}",
            "fails: access to attribute '__class__' of 'str' object is unsafe",
        ),
        ({"messages": MESSAGES}, "{{ messages.append(1) }}", "is unsafe"),
        ({"messages": MESSAGES}, "{% if %}", "fails: Expected an expression"),
        ({"messages": MESSAGES}, "{{ messages | length }}", "the first 1 messages in another way if more follow"),
        (["a"], "a", "line 1 is an array: must be an object with chat messages"),
    ],
)
def test_a_wrong_record_or_template_is_refused_in_one_line(tmp_path, record, template, message):
    with pytest.raises(DataError, match=re.escape(message)) as error:
        read(tmp_path, [record], template=template)
    assert "\n" not in str(error.value)


def test_a_missing_library_is_refused_only_if_it_is_used(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert read(tmp_path, [{"prompt": "a", "completion": "b"}]) == [("ab\n", "b\n")]
    with pytest.raises(DataError, match=re.escape("needs the transformers library: pip install 'jgraph[hf]'")):
        Tokenizer.of(chats.save_tokenizer(tmp_path / "folder"))


@pytest.mark.parametrize("name", ["transformers", "jinja2"])
def test_a_library_that_a_template_needs_is_missing_only_for_messages(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    strings = {"prompt": "a", "completion": "b"}
    assert read(tmp_path, [strings], template="{{ messages }}") == [("ab\n", "b\n")]
    with pytest.raises(DataError, match=re.escape(f"needs the {name} library: pip install 'jgraph[hf]'")):
        read(tmp_path, [strings, {"messages": MESSAGES}], template="{{ messages }}")


def test_template_code_sees_the_text_as_it_is(tmp_path):
    """A template never sees marks of the assistant's text, e.g. in a length."""
    source = "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}|{{ x | length }}"
    (tmp_path / "t.jinja").write_text(source)
    tokenizer = Tokenizer.of(None, tmp_path / "t.jinja")
    assert tokenizer.decode(prompt(tokenizer, MESSAGES)[0]) == "a|3"


MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %};{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "trained"),
    [
        ("{{ '{#' }}" + MARKED + "{{ '#}' }}", "Hello!"),
        ("{# {% generation %} #}" + chats.without_marks(MARKED), "Hello!;"),
        ("{% raw %}{% generation %}{% endraw %}" + chats.without_marks(MARKED), "Hello!;"),
        ("{% set x = '{% generation %}' %}" + chats.without_marks(MARKED), "Hello!;"),
    ],
)
def test_text_that_looks_like_a_mark_or_a_comment_is_none(tmp_path, template, trained):
    assert read(tmp_path, [{"messages": MESSAGES}], template=template)[0][1] == trained


def test_an_empty_template_file_replaces_the_template_of_the_folder(tmp_path, folder):
    assert read(tmp_path, [{"messages": MESSAGES}], folder, "") == [("", "")]


@pytest.mark.parametrize("excluded", [{"weight": 0}, {"train": False}, {"weight": 0.0, "train": True}])
@pytest.mark.parametrize("template", [chats.CHATML, chats.without_marks(chats.CHATML)])
def test_a_turn_with_weight_0_is_not_trained_and_renders_as_before(tmp_path, folder, template, excluded):
    record = {"messages": [*MESSAGES, chats.message("user", "Bye"), chats.message("assistant", "Bye!", weight=1)]}
    ((text, _),) = read(tmp_path, [record], folder / "tokenizer.json", template)
    record["messages"][1] = record["messages"][1] | excluded
    assert read(tmp_path, [record], folder / "tokenizer.json", template) == [(text, "Bye!<|im_end|>\n")]
    dump = "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}"
    assert not re.search("weight|train", read(tmp_path, [record], template=dump)[0][0])


def test_a_turn_with_two_spans_is_excluded_by_the_prefixes_of_turns_or_refused(tmp_path):
    two = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    )
    two += "|{% generation %}.{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    turns = [*MESSAGES, chats.message("user", "Bye"), chats.message("assistant", "Bye!")]
    turns[1] = turns[1] | {"train": False}
    assert read(tmp_path, [{"messages": turns}], template=two)[0][1] == "Bye!."
    with pytest.raises(DataError, match="renders the first 3 messages in another way if more follow"):
        read(tmp_path, [{"messages": turns}], template="{{ messages | length }}" + two)


def test_tools_are_read_from_a_json_string(tmp_path, folder):
    records = [{"messages": MESSAGES, "tools": tools} for tools in (chats.TOOLS, json.dumps(chats.TOOLS))]
    found = read(tmp_path, records, folder / "tokenizer.json")
    assert found[0] == found[1]
    assert '"name": "add"' in found[0][0]


def test_an_empty_string_of_tools_is_no_tools(tmp_path, folder):
    found = read(tmp_path, [{"messages": MESSAGES, "tools": tools} for tools in ("", [])], folder / "tokenizer.json")
    assert found[0] == found[1]
    assert "Hello!" in found[0][1]


def test_the_order_of_keys_and_unpaired_surrogates_change_no_digest_and_no_token(tmp_path, folder):
    message = {"role": "assistant", "content": "a\ud800b"}
    records = [{"messages": [MESSAGES[0], message]}, {"messages": [MESSAGES[0], dict(reversed(message.items()))]}]
    records.append({"messages": [MESSAGES[0], message | {"content": "a?b"}]})
    found = [*ChatReader(folder).read([write(tmp_path / "chat.jsonl", records)])]
    assert found[0].digest == found[1].digest == found[2].digest
    for other in found[1:]:
        np.testing.assert_array_equal(other.ids, found[0].ids)
        np.testing.assert_array_equal(other.trained, found[0].trained)
    assert found[0].trained.any()


# --- Packing ---

LENGTHS = st.lists(st.integers(2, 30), min_size=1, max_size=60)


def some(lengths: list[int], *, trained: float = 0.5) -> list[Conversation]:
    random = np.random.default_rng(0)
    found = []
    for number, length in enumerate(lengths):
        mask = random.random(length) < trained
        mask[-1] = True
        found.append(Conversation(number.to_bytes(4, "big"), 1000 * (1 + number) + np.arange(length), mask))
    return found


@given(LENGTHS)
def test_rows_are_filled_best_fit_with_every_item_once(lengths):
    rows = best_fit(lengths, 30)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    fill = [sum(lengths[item] for item in row) for row in rows]
    assert max(fill) <= 30
    assert sum(fill_ <= 15 for fill_ in fill) <= 1  # otherwise two rows would fit into one


def test_an_item_goes_to_the_row_with_the_least_space_that_is_enough():
    assert best_fit([6, 7, 3, 2, 2], 10) == [[1, 2], [0, 3, 4]]


@pytest.mark.long
@settings(max_examples=30)
@given(LENGTHS, st.integers(1, 5), st.integers(0, 2**63))
def test_an_epoch_has_every_conversation_once_in_one_row_with_its_mask(lengths, batch_size, seed):
    T = 29
    conversations = some(lengths)
    source = pack_rows(conversations, seq_len=T, truncate="end", dtype=np.uint32)
    batches = Batches([source], batch_size=batch_size, seq_len=T, seed=seed, documents="separate")
    num_rows = source.num_rows(T)
    rows = []
    for step in range(-(-num_rows // batch_size)):
        batch = batches[step]
        np.testing.assert_allclose(batch["weights"].mean(), 1, rtol=1e-5)
        assert np.count_nonzero(batch["weights"]) == batches.trained_tokens(range(step, step + 1))
        assert len(np.unique(batch["weights"][batch["weights"] > 0])) == 1
        rows += [{name: leaf[i] for name, leaf in batch.items()} for i in range(batch_size)]
    seen = []
    for row in rows[:num_rows]:
        numbers = row["tokens"] // 1000  # 0 for padding
        for number in np.unique(numbers[numbers > 0]):
            at = np.flatnonzero(numbers == number)
            own = conversations[number - 1]
            np.testing.assert_array_equal(row["tokens"][at[0] : at[0] + len(own.ids)], own.ids)
            np.testing.assert_array_equal(row["weights"][at[1:] - 1] > 0, own.trained[1:])
            assert at[0] == 0 or row["weights"][at[0] - 1] == 0
            assert set(row["starts"][at[at < T]]) <= {at[0]}
            seen.append(number - 1)
        padding = np.flatnonzero(numbers == 0)
        assert not row["weights"][padding[padding > 0] - 1].any()
        assert set(row["starts"][padding[padding < T]]) <= set(padding[:1])
    assert sorted(seen) == list(range(len(lengths)))


@pytest.mark.parametrize(
    ("truncate", "first", "counts"), [("end", 0, (2, 1, 1)), ("start", 2, (3, 2, 0)), ("drop", 40, (1, 0, 2))]
)
def test_a_long_conversation_is_cut_or_left_out(truncate, first, counts):
    ids = np.arange(10)
    late = ids >= 8  # the start has no trained token
    conversations = [
        Conversation(b"0", ids, ids % 2 == 1),
        Conversation(b"1", ids + 20, late),
        Conversation(b"2", ids[:4] + 40, ids[:4] > 1),
    ]
    source = pack_rows(conversations, seq_len=7, truncate=truncate, dtype=np.uint16)
    assert source.packed is not None
    assert (source.packed.conversations, source.packed.truncated, source.packed.dropped) == counts
    rows = source.tokens[:].reshape(-1, 8)
    size = 4 if truncate == "drop" else 8
    np.testing.assert_array_equal(rows[0][:size], np.arange(first, first + size))
    assert not rows[0][size:].any()
    assert len(rows) == {"end": 2, "start": 3, "drop": 1}[truncate]


def test_conversations_that_do_not_fit_are_errors_if_the_user_wants_that():
    with pytest.raises(DataError, match="a conversation has 10 tokens, and a row of `seq_len` 7 has 8"):
        pack_rows(some([10]), seq_len=7, truncate="error", dtype=np.uint16)
    with pytest.raises(DataError, match="1 records have no token of the assistant in a row"):
        pack_rows([Conversation(b"0", np.arange(4), np.arange(4) == 0)], seq_len=7, truncate="end", dtype=np.uint16)


def test_a_process_reads_its_rows_with_the_weights_of_the_whole_batch():
    source = pack_rows(some([20, 9, 14, 25, 3, 30, 11]), seq_len=29, truncate="end", dtype=np.uint32)
    options = {"batch_size": 4, "seq_len": 29, "seed": 3, "documents": "separate"}
    whole, part = (Batches([source], **options, rows=rows)[5] for rows in (None, [1, 2]))
    for name, leaf in part.items():
        np.testing.assert_array_equal(leaf, whole[name][1:3])


# --- Corpora ---


@pytest.fixture
def corpus_file(tmp_path):
    records = [
        {"messages": [chats.message("user", f"Is {i} even?"), chats.message("assistant", "Yes, " * (i % 7) + f"{i}.")]}
        for i in range(60)
    ]
    return write(tmp_path / "even.jsonl", records)


def load_chat(data, folder, seq_len=63, **options):
    return load(
        data,
        seq_len=seq_len,
        vocab_size=None,
        tokenizer=folder / "tokenizer.json",
        format="chat",
        documents="separate",
        **options,
    )


def test_the_held_out_side_depends_on_the_records_only(tmp_path, folder, corpus_file):
    corpus = load_chat(corpus_file, folder)
    lines = Path(corpus_file).read_text().splitlines(keepends=True)
    (tmp_path / "reversed.jsonl").write_text("".join(reversed(lines)))
    again = load_chat(str(tmp_path / "reversed.jsonl"), folder, truncate="drop")
    assert again.fingerprint == corpus.fingerprint
    np.testing.assert_array_equal(corpus.heldout[:], again.heldout[:])
    np.testing.assert_array_equal(corpus.train[:], again.train[:])
    counts = [side[0].packed for side in (corpus.sources, corpus.heldout_sources)]
    assert sum(part.conversations for part in counts) == 60
    assert 0 < counts[1].conversations < 15
    (folder / "chat_template.jinja").write_text(chats.LLAMA)
    other = load_chat(corpus_file, folder)
    assert other.fingerprint != corpus.fingerprint
    assert other.heldout_documents == corpus.heldout_documents


def test_held_out_batches_are_packed_rows_with_a_mean_weight_of_one(folder, corpus_file):
    corpus = load_chat(corpus_file, folder)
    num_rows = corpus.heldout_sources[0].num_rows(63)
    batches = heldout_batches(corpus.heldout_sources, batch_size=1, seq_len=63, limit=99, documents="separate")
    np.testing.assert_array_equal(np.concatenate([batch["tokens"][0] for batch in batches]), corpus.heldout[:])
    assert len(batches) == num_rows
    np.testing.assert_allclose(np.mean([batch["weights"] for batch in batches]), 1, rtol=1e-5)
    trained = sum(np.count_nonzero(batch["weights"]) for batch in batches)
    assert trained == corpus.heldout_sources[0].packed.trained.sum()


def test_parquet_files_and_datasets_have_the_conversations_of_json_lines(tmp_path, folder, corpus_file):
    datasets = pytest.importorskip("datasets")
    records = [json.loads(line) for line in Path(corpus_file).read_text().splitlines()]
    # Keys that only some rows have are null in the others.
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    records[3]["messages"][1] |= {"tool_calls": [call, {"function": {"name": "g", "arguments": {"b": None}}}], "train": False}
    records[4]["messages"][1] |= {"tool_calls": [call]}
    del records[3]["messages"][1]["tool_calls"][1]["function"]["arguments"]["b"]
    corpus_file = write(Path(corpus_file), records)
    text = "{{ m.content }}{% generation %}{{ m.tool_calls | tojson if m.tool_calls else '' }}.{% endgeneration %}"
    (folder / "chat_template.jinja").write_text("{% for m in messages %}" + text + "{% endfor %}")
    datasets.Dataset.from_list(records).save_to_disk(str(tmp_path / "saved"))
    table = pyarrow.Table.from_pylist([record | {"id": 1} for record in records])
    pyarrow.parquet.write_table(table, tmp_path / "even.parquet")
    expected = load_chat(corpus_file, folder, 255)
    for name in (str(tmp_path / "even.parquet"), f"hf:{tmp_path / 'saved'}"):
        assert load_chat(name, folder, 255).fingerprint == expected.fingerprint


def test_weighted_sources_share_the_rows(tmp_path, folder, corpus_file):
    other = write(tmp_path / "other.jsonl", [{"prompt": f"{i}", "completion": "odd"} for i in range(30)])
    corpus = load_chat([f"{corpus_file}:3", f"{other}:1"], folder)
    batches = Batches(corpus.sources, batch_size=4, seq_len=63, seed=0, documents="separate")
    for step in range(4):
        starts_other = [np.isin(row, corpus.sources[1].tokens[:]).all() for row in batches[step]["tokens"]]
        assert sum(starts_other) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("python-docs", "must be a .jsonl or .parquet file or a dataset"),
        ("tokens", "has token files, which hold text only"),
    ],
)
def test_other_data_is_refused_with_the_format_chat(tmp_path, folder, monkeypatch, data, message):
    monkeypatch.chdir(tmp_path)
    Path("tokens").mkdir()
    Path("tokens/train-0.bin").write_bytes(b"")
    with pytest.raises(DataError, match=re.escape(message)):
        load_chat(data, folder)


@pytest.mark.parametrize("record", [{"messages": MESSAGES}, {"prompt": "a", "completion": "b"}])
def test_chat_records_are_refused_as_text_with_the_remedy(tmp_path, record, capsys):
    data = write(tmp_path / "chat.jsonl", [record])
    with pytest.raises(DataError, match=r"line 1 is a chat record .*: set `data_format` to chat"):
        load(data, seq_len=4, vocab_size=None)
    tokenizer = chats.save_tokenizer(tmp_path / "folder")
    assert main(["make", "--text", data, "--tokenizer", str(tokenizer), "--out", str(tmp_path / "tokens")]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "is a chat record" in err
    assert "token files hold text only" in err


# --- The command line ---


def test_show_prints_a_record_with_its_trained_text_marked(tmp_path, folder, capsys):
    data = write(tmp_path / "chat.jsonl", [{"prompt": "a", "completion": "b"}, {"messages": MESSAGES}])
    assert main(["show", data, "--format", "chat", "--tokenizer", str(folder), "--record", "1"]) == 0
    shown, counts = capsys.readouterr().out.split("\n\n")
    assert shown == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello!<|im_end|>\n]]"
    reader = ChatReader(folder / "tokenizer.json")
    first, second = reader.read([data])
    tokens, trained = len(first.ids) + len(second.ids), first.trained.sum() + second.trained.sum()
    assert counts.splitlines() == [
        f"record 1: {len(second.ids)} tokens, {second.trained.sum()} trained",
        f"total: 2 conversations, {tokens} tokens, {trained} trained",
    ]


def test_show_colours_the_trained_text_on_a_terminal(tmp_path, folder, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    data = write(tmp_path / "chat.jsonl", [{"messages": MESSAGES}])
    assert main(["show", data, "--format", "chat", "--tokenizer", str(folder / "tokenizer.json")]) == 0
    assert "\x1b[1;32mHello!<|im_end|>" in capsys.readouterr().out


def test_show_names_its_own_flags_in_errors(tmp_path, capsys):
    data = write(tmp_path / "chat.jsonl", [{"messages": MESSAGES}])
    assert main(["show", data]) == 2
    assert "and --template is empty: must be a Jinja file" in capsys.readouterr().err
    assert main(["show", "python-docs", "--tokenizer", "folder"]) == 2
    assert "--tokenizer is folder: must be left out unless --format is chat" in capsys.readouterr().err


@pytest.mark.long
def test_show_refuses_a_record_that_does_not_exist(tmp_path, folder, capsys):
    data = write(tmp_path / "chat.jsonl", [{"messages": MESSAGES}])
    assert main(["show", data, "--format", "chat", "--tokenizer", str(folder), "--record", "1"]) == 2
    assert "--record is 1: must be a number below 1" in capsys.readouterr().err
