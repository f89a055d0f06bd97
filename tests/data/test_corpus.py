import hashlib
import math
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from jgraph.data import CORPORA, Concatenated, TokenFile, _texts, load, make_token_files, write_tokens
from jgraph.errors import DataError


def open_corpus(data, *, seq_len=16, vocab_size=256):
    return load(str(data), seq_len=seq_len, vocab_size=vocab_size)


@pytest.fixture
def token_directory(tmp_path, text_file, tokenizer_file):
    make_token_files([text_file], tokenizer_file, tmp_path / "tokens", shard_tokens=500)
    return tmp_path / "tokens"


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name == "python-source")) for name in CORPORA])
def test_a_named_corpus_is_the_same_each_time_it_is_opened(name):
    first, second = open_corpus(name), open_corpus(name)
    assert first.fingerprint == second.fingerprint
    assert np.array_equal(first.train[:], second.train[:])
    assert first.train.dtype == first.heldout.dtype == np.uint8
    assert first.vocab_size == 256


def test_python_docs_has_each_topic_once():
    from pydoc_data.topics import topics

    corpus = open_corpus("python-docs")
    assert corpus.train_documents + corpus.heldout_documents == len(topics)
    both = corpus.decode(corpus.train[:]) + corpus.decode(corpus.heldout[:])
    assert all(topic + "\n" in both for topic in topics.values())
    assert len(both) == sum(len(topic) + 1 for topic in topics.values())
    assert 1.4 < corpus.zlib_nats_per_token < 1.8


def test_synthetic_has_a_fixed_fingerprint():
    corpus = open_corpus("synthetic")
    assert corpus.fingerprint == "c4ae420ed81171a78f8ff6721bb40c42857e4c496b425424a3b1b9ef118d6448"


@pytest.mark.long
def test_synthetic_has_the_documented_entropy():
    text = bytes(open_corpus("synthetic").train[:])
    pairs = Counter(pairwise(text))
    triples = Counter(zip(text, text[1:], text[2:], strict=False))
    inside = {triple: count for triple, count in triples.items() if ord("\n") not in triple}
    total = sum(inside.values())
    measured = -sum(count * math.log(count / pairs[triple[:2]]) for triple, count in inside.items()) / total
    assert measured == pytest.approx(1.75 * math.log(2), abs=0.01)


def test_a_text_file_is_split_by_document_hash(text_file, stories):
    corpus = open_corpus(text_file)
    heldout, train = (corpus.decode(side[:]).split("\n")[:-1] for side in (corpus.heldout, corpus.train))
    assert sorted(heldout + train) == sorted(stories)
    assert (len(heldout), len(train)) == (corpus.heldout_documents, corpus.train_documents)
    limit = 2**256 // 10
    assert {int(hashlib.sha256(story.encode()).hexdigest(), 16) < limit for story in heldout} == {True}
    assert {int(hashlib.sha256(story.encode()).hexdigest(), 16) < limit for story in train} == {False}


def test_the_fingerprint_depends_on_document_boundaries_but_not_on_their_order(tmp_path, stories):
    paths = [tmp_path / name for name in ("forward", "backward", "joined")]
    paths[0].write_text("\n<|endoftext|>\n".join(stories))
    paths[1].write_text("\n<|endoftext|>\n".join(reversed(stories)))
    paths[2].write_text("\n<|endoftext|>\n".join(stories).replace("\n<|endoftext|>", "", 1))
    forward, backward, joined = (open_corpus(path) for path in paths)
    assert forward.fingerprint == backward.fingerprint != joined.fingerprint
    assert np.array_equal(forward.train[:], backward.train[:])


def test_part_of_a_text_without_separators_is_held_out(tmp_path):
    path = tmp_path / "plain.txt"
    path.write_text("".join(f"line {i}\n" for i in range(200)))
    corpus = open_corpus(path)
    assert 0 < corpus.heldout_documents < corpus.train_documents


def test_invalid_utf8_bytes_decode_to_replacement_characters(text_file):
    assert (
        open_corpus(text_file).decode(np.array([104, 105, 0xC3, 300])) == "hi\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"
    )


def test_a_token_directory_is_memory_mapped(token_directory):
    corpus = open_corpus(token_directory, vocab_size=512)
    assert np.shares_memory(corpus.heldout[:5], corpus.heldout[2:9])
    assert not corpus.heldout[:5].flags.writeable
    assert isinstance(corpus.train, Concatenated)
    assert all(isinstance(part, TokenFile) for part in corpus.train.parts)
    assert corpus.zlib_nats_per_token is None


def test_opening_a_token_directory_does_not_read_the_tokens(token_directory):
    fingerprint = open_corpus(token_directory, vocab_size=512).fingerprint
    for path in token_directory.glob("*.bin"):
        contents = path.read_bytes()
        path.write_bytes(contents[:128] + b"\xff" * (len(contents) - 128))
    assert open_corpus(token_directory, vocab_size=512).fingerprint == fingerprint


def test_a_token_directory_decodes_with_its_tokenizer(token_directory, stories):
    corpus = open_corpus(token_directory, vocab_size=512)
    documents = corpus.decode(corpus.train[:]).split("<|endoftext|>")[:-1]
    assert set(documents) < set(stories)
    assert len(documents) == corpus.train_documents


def test_text_read_with_a_tokenizer_equals_its_token_files(token_directory, text_file, tokenizer_file):
    files = open_corpus(token_directory, vocab_size=None)
    text = load(str(text_file), seq_len=16, vocab_size=None, tokenizer=tokenizer_file)
    np.testing.assert_array_equal(text.train, files.train[:])
    np.testing.assert_array_equal(text.heldout, files.heldout[:])
    assert text.decode(text.heldout[:9]) == files.decode(files.heldout[:9])
    assert (text.vocab_size, text.zlib_nats_per_token) == (files.vocab_size, None)
    assert text.fingerprint != open_corpus(text_file).fingerprint, "different tokens have a different fingerprint"


@pytest.mark.parametrize("absent", ["file", "library"])
def test_a_token_directory_without_tokenizer_decodes_to_numbers(token_directory, monkeypatch, absent):
    if absent == "file":
        (token_directory / "tokenizer.json").unlink()
    else:
        monkeypatch.setitem(sys.modules, "transformers", None)
    assert open_corpus(token_directory, vocab_size=512).decode([3, 14, 15]) == "3 14 15 "


def test_an_unknown_corpus_is_refused_with_the_valid_names():
    with pytest.raises(DataError, match=r"`data` is pyton-docs: .*python-docs, python-source, synthetic"):
        open_corpus("pyton-docs")


def test_a_path_opens_a_file_with_the_same_name_as_a_corpus(tmp_path, text_file, monkeypatch):
    text_file.rename(tmp_path / "synthetic")
    monkeypatch.chdir(tmp_path)
    assert open_corpus("./synthetic").fingerprint != open_corpus("synthetic").fingerprint


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"`data` is .*absent.txt: no such file or directory"):
        open_corpus(tmp_path / "absent.txt")


@pytest.mark.parametrize("contents", [b"", b" \n\n"])
def test_an_empty_file_is_refused(tmp_path, contents):
    path = tmp_path / "empty.txt"
    path.write_bytes(contents)
    with pytest.raises(DataError, match=r"`data` is .*empty.txt: the file is empty"):
        open_corpus(path)


def test_a_text_with_one_repeated_document_is_refused(tmp_path):
    path = tmp_path / "same.txt"
    path.write_bytes(b"same\n<|endoftext|>\n" * 3)
    with pytest.raises(DataError, match=r"`data` is .*same.txt: the text has 3 documents, but no two different"):
        open_corpus(path)


def test_a_text_shorter_than_a_sequence_is_refused_with_its_sizes(text_file):
    corpus = open_corpus(text_file)
    sizes = f"{len(corpus.train)} tokens to train on and {len(corpus.heldout)} held out"
    with pytest.raises(DataError, match=f"{sizes}, `seq_len` 99999 needs at least 100000 of each"):
        open_corpus(text_file, seq_len=99_999)


def test_an_unreadable_file_raises_a_data_error():
    with pytest.raises(DataError, match=r"`data` is xxx.*: cannot be read"):
        open_corpus("x" * 5000)


def test_a_byte_outside_the_vocabulary_is_refused_and_the_largest_id_is_accepted(text_file):
    largest = max(text_file.read_bytes())
    open_corpus(text_file, vocab_size=largest + 1)
    with pytest.raises(DataError, match=f"`model.vocab_size` is {largest}: .* needs at least {largest + 1} token ids"):
        open_corpus(text_file, vocab_size=largest)


def test_token_files_with_a_larger_vocabulary_are_refused(token_directory):
    with pytest.raises(DataError, match=r"`model.vocab_size` is 256: `data` .*tokens needs at least 300 token ids"):
        open_corpus(token_directory)


def test_a_single_token_file_is_refused_with_its_directory(token_directory):
    with pytest.raises(DataError, match=r"a single token file; name its directory, .*tokens"):
        open_corpus(token_directory / "heldout-00000.bin")


def test_a_directory_without_files_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"`data` is .*: has no files; .* with python -m jgraph.data make"):
        open_corpus(tmp_path)


def test_a_directory_without_held_out_files_is_refused(token_directory):
    (token_directory / "heldout-00000.bin").unlink()
    with pytest.raises(DataError, match=r"has no heldout-\*.bin file"):
        open_corpus(token_directory)


def test_a_directory_with_an_unexpected_file_is_refused(token_directory):
    (token_directory / "val.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"val.bin is neither train-\*.bin nor heldout-\*.bin"):
        open_corpus(token_directory)


def test_a_directory_with_a_truncated_file_is_refused(token_directory):
    path = token_directory / "train-00000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"`data` is .*train-00000.bin: has \d+ bytes, but \d+ tokens need \d+: truncated"):
        open_corpus(token_directory, vocab_size=512)


def test_files_with_different_vocabularies_are_refused(token_directory):
    write_tokens(token_directory / "train-00001.bin", [np.arange(9)], vocab_size=9)
    with pytest.raises(DataError, match=r"train-00001.bin has a vocabulary of 9 .* must come from one tokenizer"):
        open_corpus(token_directory, vocab_size=512)


@pytest.mark.parametrize("read", ["bytes", "text through a tokenizer", "token files"])
def test_document_boundaries_are_found_in_every_span(text_file, tokenizer_file, token_directory, stories, read):
    data = token_directory if read == "token files" else text_file
    tokenizer = tokenizer_file if read == "text through a tokenizer" else None
    corpus = load(str(data), seq_len=16, vocab_size=512, tokenizer=tokenizer, documents="separate")
    found = []
    for source in (*corpus.sources, *corpus.heldout_sources):
        tokens, length = source.tokens, len(source.tokens)
        marks = np.concatenate([source.index.firsts(at, min(at + 51, length))[1:] for at in range(0, length - 1, 50)])
        starts = [0, *(1 + np.flatnonzero(marks)), length]
        found += [corpus.decode(tokens[start:stop]) for start, stop in pairwise(starts)]
    end = "\n" if read == "bytes" else "<|endoftext|>"
    assert sorted(found) == sorted(story + end for story in stories)


@pytest.mark.parametrize("missing", ["lines that separate", "the index"])
def test_separate_documents_need_document_boundaries(tmp_path, token_directory, missing):
    data = token_directory
    if missing == "the index":
        (token_directory / "heldout.ends").unlink()
    else:
        data = tmp_path / "plain.txt"
        data.write_text("".join(f"line {i}\n" for i in range(200)))
    with pytest.raises(DataError) as error:
        load(str(data), seq_len=4, vocab_size=512, documents="separate")
    assert error.value.field == "data_documents"
    assert str(data) in str(error.value)
    assert len(load(str(data), seq_len=4, vocab_size=512).train) > 5


def test_a_byte_order_mark_is_not_text_and_lines_may_end_in_any_way(tmp_path):
    for number, end in enumerate((b"\n", b"\r\n", b"\r")):
        path = tmp_path / f"{number}.txt"
        lines = [b"one\xef\xbb\xbf", b"<|endoftext|> ", b"two <|endoftext|>", b"<|endoftext|>", b"3"]
        path.write_bytes(b"\xef\xbb\xbf" + end.join(lines))
        ((_, documents),) = [(name, [*own]) for name, own in _texts.read("data", [str(path)], "text")]
        assert documents == [b"one\xef\xbb\xbf", b"two <|endoftext|>", b"3"]


@pytest.mark.parametrize("special", [False, True])
def test_a_fingerprint_of_earlier_versions_stays_if_the_ids_stay(text_file, tokenizer_file, special):
    """Versions without `transformers` read special tokens in documents as text."""
    if special:
        text_file.write_text(text_file.read_text().replace("cat", "<|endoftext|>", 1))
    corpus = load(str(text_file), seq_len=16, vocab_size=None, tokenizer=tokenizer_file)
    digests = sorted(_texts.digest(document) for document in _texts.cut(text_file.read_bytes()))
    before = hashlib.sha256(b"".join(digests) + tokenizer_file.read_bytes()).hexdigest()
    assert (corpus.fingerprint == before) is not special
