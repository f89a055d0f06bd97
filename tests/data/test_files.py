"""Tests the values of `data`: files, directories, globs, JSON Lines, Parquet, datasets and mixtures."""

import json
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from jgraph.data import load, make_token_files, write_tokens
from jgraph.data._texts import weighted
from jgraph.errors import ConfigError, DataError


def open_corpus(*data, **options):
    return load([str(entry) for entry in data], **{"seq_len": 16, "vocab_size": 512} | options)


@pytest.fixture
def folder(tmp_path, stories):
    """Writes one file per story into subdirectories, with a hidden file and an empty file."""
    for i, story in enumerate(stories):
        path = tmp_path / "texts" / f"part{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(story)
    (tmp_path / "texts" / ".hidden").write_text("hidden files are ignored")
    (tmp_path / "texts" / "empty.txt").touch()
    return tmp_path / "texts"


@pytest.fixture
def tokens(tmp_path, text_file, tokenizer_file):
    make_token_files([text_file], tokenizer_file, tmp_path / "tokens", shard_tokens=500)
    return tmp_path / "tokens"


def test_a_directory_a_glob_and_files_with_the_same_documents_are_the_same_corpus(folder, text_file):
    named = [[folder], [f"{folder}/**/*.txt"], sorted(folder.glob("*/*.txt")), [text_file]]
    found = [open_corpus(*data) for data in named]
    assert len({corpus.fingerprint for corpus in found}) == 1
    assert all(np.array_equal(corpus.train, found[0].train) and len(corpus.sources) == 1 for corpus in found)


def test_each_json_line_is_a_document(tmp_path, text_file, stories):
    path = tmp_path / "pages.jsonl"
    path.write_text("\n".join(json.dumps({"text": 3, "body": story}) for story in [*stories, " "]) + "\n\n")
    assert open_corpus(path, field="body").fingerprint == open_corpus(text_file).fingerprint


def test_each_parquet_row_is_a_document(tmp_path, text_file, stories):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "pages.parquet"
    parquet.write_table(pyarrow.table({"body": [*stories, None], "id": range(len(stories) + 1)}), path)
    assert open_corpus(path, field="body").fingerprint == open_corpus(text_file).fingerprint
    for field, message in (
        ("text", "row 1 has the fields 'body', 'id', not 'text': set `data_field`"),
        ("id", "row 1: field 'id' is a number: must be a string"),
    ):
        with pytest.raises(DataError, match=message):
            open_corpus(path, field=field)
    path.write_bytes(b"not Parquet")
    with pytest.raises(DataError, match=r"pages.parquet: damaged, or not a Parquet file"):
        open_corpus(path)


@pytest.mark.parametrize(
    ("name", "library", "extra"), [("pages.parquet", "pyarrow", "parquet"), ("hf:owner/name", "datasets", "datasets")]
)
def test_a_missing_library_raises_an_error_with_the_install_command(tmp_path, monkeypatch, name, library, extra):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pages.parquet").touch()
    with pytest.raises(DataError, match=rf"{name}: needs the {library} library: pip install 'jgraph\[{extra}\]'"):
        open_corpus(name)


@pytest.mark.long
def test_each_dataset_row_is_a_document_and_makes_the_same_token_files_as_text(tmp_path, text_file, stories, tokenizer_file):
    datasets = pytest.importorskip("datasets")
    rows = [{"body": story, "id": number} for number, story in enumerate(stories)]
    (tmp_path / "streamed").mkdir()
    (tmp_path / "streamed" / "pages.jsonl").write_text("\n".join(map(json.dumps, rows)))
    datasets.Dataset.from_list([*rows, {"body": None, "id": 0}]).save_to_disk(tmp_path / "saved")
    for name in ("streamed", "saved"):
        assert open_corpus(f"hf:{tmp_path}/{name}", field="body").fingerprint == open_corpus(text_file).fingerprint
    weighted_corpus = open_corpus(f"hf:{tmp_path}/streamed@train:3", f"{text_file}:1", field="body")
    assert [source.weight for source in weighted_corpus.sources] == [3, 1]
    for field, split, message in (
        ("text", "train", "row 1 has the fields 'body', 'id', not 'text'"),
        ("id", "train", "row 1: field 'id' is a number: must be a string"),
        ("body", "test", "Bad split: test"),
    ):
        with pytest.raises(DataError, match=rf"`data` is hf:.*streamed@{split}: {message}"):
            open_corpus(f"hf:{tmp_path}/streamed@{split}", field=field)
    for name, text, field in (("a", Path(f"hf:{tmp_path}/streamed"), "body"), ("b", text_file, "text")):
        make_token_files([text], tokenizer_file, tmp_path / name, field=field)
    assert open_corpus(tmp_path / "a").fingerprint == open_corpus(tmp_path / "b").fingerprint


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "one"}\n{"text"\n',
            r"a.jsonl: line 2 is not valid JSON .*must be an object",
        ),
        (
            "a.jsonl",
            b'{"body": "one", "id": 1}\n',
            r"a.jsonl: line 1 has the fields 'body', 'id', not 'text'",
        ),
        ("a.jsonl", b"[1]\n", r"a.jsonl: line 1 is an array: must be an object with a string in field 'text'"),
        ("a.png", b"\x89PNG\0", r"a.png: not a text .*'.*texts/\*.txt'"),
    ],
)
def test_an_invalid_file_is_refused_with_its_name_and_line(folder, name, contents, message):
    (folder / name).write_bytes(contents)
    with pytest.raises(DataError, match=message):
        open_corpus(folder)


def test_a_glob_without_a_match_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"\*.none: no such file"):
        open_corpus(f"{tmp_path}/*.none")


def test_make_reads_directories_and_json_lines_like_training(folder, tmp_path, text_file, tokenizer_file, tokens):
    (folder / "part0" / "pages.jsonl").write_text(json.dumps({"text": "a page " * 9}))
    (tmp_path / "stories.txt").write_text(text_file.read_text() + "\n<|endoftext|>\n" + "a page " * 9)
    for name, texts in (("a", [folder]), ("b", [text_file])):
        make_token_files(texts, tokenizer_file, tmp_path / name)
    made, one = open_corpus(tmp_path / "a"), open_corpus(tmp_path / "b")
    assert made.train_documents == open_corpus(folder).train_documents
    assert made.fingerprint == one.fingerprint


# --- Weights ---


def test_a_weight_follows_a_colon_and_is_an_exact_fraction():
    assert weighted(["code:0.7", "a:b:3", "prose:1e-3"]) == [
        ("code", Fraction(7, 10)),
        ("a:b", 3),
        ("prose", Fraction(1, 1000)),
    ]
    assert weighted(["code", "a:b"]) == [("code", None), ("a:b", None)]


def test_an_existing_path_that_ends_like_a_weight_is_a_path(tmp_path):
    path = tmp_path / "chapter:1"
    path.touch()
    assert weighted([str(path), "b"]) == [(str(path), None), ("b", None)]
    assert weighted([f"{path}:2"]) == [(str(path), 2)]


@pytest.mark.parametrize("data", [["a:0"], ["a:-1"], ["a:nan"], ["a:inf"], ["a:0.5", "b"], ["a:1e-999"]])
def test_weights_must_be_positive_and_set_for_every_source(data):
    with pytest.raises(ConfigError) as caught:
        weighted(data)
    assert caught.value.field == "data"


# --- Several sources ---


def test_each_weighted_text_is_a_separate_source(folder, tmp_path):
    corpus = open_corpus(f"{folder}/part0:0.7", f"{folder}/part1:0.3")
    assert [source.weight for source in corpus.sources] == [Fraction(7, 10), Fraction(3, 10)]
    assert len(corpus.train) == sum(len(source.tokens) for source in corpus.sources)
    swapped = open_corpus(f"{folder}/part1:0.7", f"{folder}/part0:0.3")
    assert corpus.fingerprint != swapped.fingerprint, "the weights of the sources are swapped"


def test_text_mixed_with_token_files_uses_their_tokenizer_and_is_weighted_by_size(tokens, folder):
    corpus = open_corpus(folder / "part0", tokens, folder / "part1")
    text, files = corpus.sources
    assert (text.weight, files.weight) == (len(text.tokens), len(files.tokens))
    both = open_corpus(f"{folder}/part[01]", tokenizer=tokens / "tokenizer.json")
    assert corpus.decode(text.tokens[:]) == both.decode(both.train[:])


def test_token_files_with_different_tokenizers_are_refused(tokens, tmp_path):
    (tmp_path / "bare").mkdir()
    for side in ("train", "heldout"):
        write_tokens(tmp_path / "bare" / f"{side}-0.bin", [np.arange(40)], vocab_size=40)
    with pytest.raises(DataError, match=r"bare has a vocabulary of 40 in uint16, .*tokens one of 300"):
        open_corpus(tokens, tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"bare was made with another tokenizer.json than .*tokens"):
        open_corpus(tokens, tmp_path / "bare")


def test_a_source_shorter_than_a_sequence_is_named_in_the_error(folder, tokens):
    with pytest.raises(DataError, match=r"`data` is .*part0: \d+ tokens to train on"):
        open_corpus(f"{folder}/part0:1", "python-docs:1", seq_len=50_000)
