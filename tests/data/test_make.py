import json
import re
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers

from jgraph.data import load, make_token_files, write_tokens
from jgraph.data.__main__ import main
from jgraph.data._tokenfile import read_header, read_tokens, verify
from jgraph.data.tokenizer import Tokenizer as Reader
from jgraph.errors import ConfigError, DataError


@pytest.fixture
def make(tmp_path, text_file, tokenizer_file):
    """Returns a function that makes token files and returns their directory. Keyword arguments override defaults."""

    def make(*, texts=(text_file,), tokenizer=tokenizer_file, out=tmp_path / "tokens", **options):
        make_token_files(texts, tokenizer, out, **options)
        return out

    return make


def all_tokens(folder, side):
    return np.concatenate([read_tokens(path) for path in sorted(folder.glob(f"{side}-*.bin"))])


def assert_one_line(captured, *parts):
    assert re.fullmatch(r"jgraph\.data: error: [^\n]+\n", captured.err)
    assert all(part in captured.err for part in parts)
    assert not captured.out


def test_documents_are_not_truncated_by_the_tokenizer(make, stories, tokenizer_file):
    folder = make()
    reader = Tokenizer.from_file(str(tokenizer_file))
    text = "".join(reader.decode(all_tokens(folder, side), skip_special_tokens=False) for side in ("train", "heldout"))
    assert sorted(text.split("<|endoftext|>")[:-1]) == sorted(stories)


def test_tokenized_and_byte_level_text_have_the_same_held_out_documents(make, text_file):
    tokens, as_bytes = (load(str(data), seq_len=4, vocab_size=512) for data in (make(), text_file))
    assert tokens.decode(tokens.heldout[:]).replace("<|endoftext|>", "\n") == as_bytes.decode(as_bytes.heldout[:])


def test_shards_end_at_document_boundaries_and_do_not_change_the_tokens(make, tmp_path):
    one, many = make(), make(out=tmp_path / "many", shard_tokens=300)
    headers = [read_header(path) for path in sorted(many.glob("train-*.bin"))]
    assert len(headers) > 3
    assert all(header.num_tokens >= 300 for header in headers[:-1])
    assert sum(header.num_documents for header in headers) == read_header(one / "train-00000.bin").num_documents
    assert np.array_equal(all_tokens(one, "train"), all_tokens(many, "train"))
    assert all(tokens[-1] == 0 for tokens in map(read_tokens, many.glob("*.bin")))


def test_an_id_outside_the_vocabulary_is_refused_and_not_stored(make, tmp_path, monkeypatch, tokenizer_file):
    def wrong(self, documents):
        return (np.array([3, 65_536 + 3]) for _ in documents)

    monkeypatch.setattr(type(Reader.of(tokenizer_file)), "documents", wrong)
    with pytest.raises(DataError, match=r"token 1 is 65539: must be in \[0, 300\)"):
        make()
    assert not (tmp_path / "tokens").exists()


def test_the_order_of_the_files_does_not_change_the_tokens(make, tmp_path, stories):
    texts = [tmp_path / f"{i}.txt" for i in range(len(stories))]
    for path, story in zip(texts, stories, strict=True):
        path.write_text(story)
    forward, backward = make(texts=texts, out=tmp_path / "a"), make(texts=texts[::-1], out=tmp_path / "b")
    assert np.array_equal(all_tokens(forward, "train"), all_tokens(backward, "train"))
    assert sum(read_header(path).num_documents for path in forward.glob("*.bin")) == len(stories)


def test_the_name_of_a_special_token_inside_a_document_is_that_token_as_in_transformers(make, tmp_path):
    path = tmp_path / "tricky.txt"
    path.write_text("\n<|endoftext|>\n".join(f"say <|endoftext|> {i}" for i in range(30)))
    assert (all_tokens(make(texts=[path]), "train") == 0).sum() == 2 * sum(
        read_header(file).num_documents for file in (tmp_path / "tokens").glob("train-*.bin")
    )


def test_a_tokenizer_without_end_of_text_separates_documents_with_a_newline(make, tmp_path, text_file):
    path = tmp_path / "chars.json"
    characters = sorted(set(text_file.read_text()) | {"\n"})
    Tokenizer(models.BPE({character: i for i, character in enumerate(characters)}, [])).save(str(path))
    corpus = load(str(make(tokenizer=path)), seq_len=4, vocab_size=512)
    assert (corpus.heldout[:] == characters.index("\n")).sum() == corpus.heldout_documents


@pytest.mark.parametrize("declared", [{"tokenizer_class": "LlamaTokenizer"}, {}])
def test_the_copy_of_a_tokenizer_has_the_class_that_its_folder_has_by_config_json(make, tmp_path, declared):
    """`transformers` reads the model type beside a tokenizer: here Mistral's, later that of an exported model."""
    folder = tmp_path / "folder"
    folder.mkdir()
    vocab = {
        name: number for number, name in enumerate(["<unk>", "<s>", "</s>", "▁", "a", "▁a", *map(chr, range(98, 123)), "\n"])
    }
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"} | declared))
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    made, texts = make(tokenizer=folder), ["<s>a b", "</s> a", " a"]
    expected = [Reader.of(folder).encode(text) for text in texts]
    assert [Reader.of(made).encode(text) for text in texts] == expected
    (made / "config.json").write_text('{"model_type": "qwen3"}')
    assert [Reader.of(made).encode(text) for text in texts] == expected


def test_a_vocabulary_above_65536_uses_four_bytes_per_token(make, tmp_path, text_file):
    path = tmp_path / "large.json"
    words = [*sorted(set(text_file.read_text()) | {"\n"}), *(f"word{i}" for i in range(65_536))]
    Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [])).save(str(path))
    assert read_header(make(tokenizer=path) / "train-00000.bin").bytes_per_token == 4


def test_an_interrupted_make_leaves_no_files(make, tmp_path, monkeypatch):
    before = set(tmp_path.iterdir())
    calls = []

    def interrupted(path, documents, *, vocab_size):
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        write_tokens(path, documents, vocab_size=vocab_size)

    monkeypatch.setattr("jgraph.data._make.write_tokens", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make()
    assert len(calls) == 3
    assert set(tmp_path.iterdir()) == before


def test_an_empty_output_directory_is_used_and_a_nonempty_one_is_refused(make, tmp_path):
    (tmp_path / "tokens").mkdir()
    make()
    with pytest.raises(ConfigError, match=r"`out` is .*tokens: must not exist, or be an empty directory"):
        make()


def test_a_missing_tokenizers_library_raises_an_error_with_the_install_command(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match=r"pip install 'jgraph\[hf\]'"):
        make()


def test_a_file_that_is_not_a_tokenizer_is_refused(make, text_file):
    with pytest.raises(DataError, match=r"stories.txt: is not a tokenizer that transformers can read"):
        make(tokenizer=text_file)


def test_a_folder_without_a_tokenizer_is_refused(make, tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(
        DataError, match=r"^`tokenizer` is \S+/folder: must be a folder with a tokenizer\.json or other vocabulary$"
    ):
        make(tokenizer=tmp_path / "folder")


def test_no_text_is_refused(make):
    with pytest.raises(DataError, match=r"^`text` is empty: name at least one text file$"):
        make(texts=[])


def test_text_that_the_tokenizer_cannot_encode_is_refused_with_its_file_name(make, tmp_path):
    path = tmp_path / "two-words.json"
    Tokenizer(models.WordLevel({"\n": 0, "hello": 1}, unk_token="[UNK]")).save(str(path))
    with pytest.raises(DataError, match=r"`text` is .*stories.txt: the tokenizer cannot encode this text: .*UNK"):
        make(tokenizer=path)


def test_text_that_is_not_utf8_is_refused_with_its_file_name(make, tmp_path, text_file):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 au lait " * 100)
    with pytest.raises(DataError, match=r"`text` is .*latin.txt: not UTF-8"):
        make(texts=[text_file, path])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"shard_tokens": 0}, "`shard_tokens` is 0"), ({"heldout_fraction": 1.0}, r"`heldout_fraction` is 1.0")],
)
def test_numbers_out_of_range_are_refused(make, options, message):
    with pytest.raises(ConfigError, match=message):
        make(**options)


def test_a_named_corpus_is_tokenized(make):
    made, named = (load(str(data), seq_len=4, vocab_size=None) for data in (make(texts=["python-docs"]), "python-docs"))
    assert (made.train_documents, made.heldout_documents) == (named.train_documents, named.heldout_documents)


def test_an_empty_text_is_refused(make, tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"`text` is .*empty.txt: the file is empty"):
        make(texts=[tmp_path / "empty.txt"])


def test_the_command_line_makes_verifies_and_shows_token_files(tmp_path, text_file, tokenizer_file, capsys):
    out = tmp_path / "tokens"
    assert main(["make", "--text", str(text_file), "--tokenizer", str(tokenizer_file), "--out", str(out)]) == 0
    made = capsys.readouterr().out
    names = ["heldout-00000.bin", "heldout.ends", "tokenizer.json", "train-00000.bin", "train.ends"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert main(["show", str(out)]) == 0
    assert capsys.readouterr().out == made
    assert load(str(out), seq_len=4, vocab_size=300).fingerprint in made
    assert main(["verify", str(out)]) == 0
    verified = capsys.readouterr().out
    assert all(f"{path.name}: {verify(path).num_tokens:,} tokens" in verified for path in out.glob("*.bin"))


def test_the_command_line_shows_the_zlib_baseline(capsys):
    assert main(["show", "python-docs"]) == 0
    assert re.search(r"zlib -9 +1\.\d\d\d nats per token", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["heldout-00000.bin", "train.ends"])
def test_a_damaged_file_fails_verification_with_a_one_line_error(make, capsys, name):
    path = make() / name
    path.write_bytes(path.read_bytes()[:-2] + b"\1\0")
    assert main(["verify", str(path.parent)]) == 2
    captured = capsys.readouterr()
    assert re.fullmatch(rf"jgraph\.data: error: .*{name}: SHA-256 [^\n]+\n", captured.err)


def test_the_index_matches_the_document_ends_in_the_token_files(make):
    corpus = load(str(make(shard_tokens=300)), seq_len=4, vocab_size=512)
    for source in (*corpus.sources, *corpus.heldout_sources):
        starts, lengths = source.index.spans(np.arange(len(source.index)))
        assert (starts + lengths)[:-1].tolist() == starts[1:].tolist()
        assert np.flatnonzero(source.tokens[:] == 0).tolist() == (starts + lengths - 1).tolist()


def test_an_index_of_other_token_files_is_refused_with_a_remedy(make):
    folder = make(shard_tokens=300)
    (folder / "train-00001.bin").unlink()
    with pytest.raises(DataError, match=r"train.ends: has the ends of \d+ documents, .* remove it"):
        load(str(folder), seq_len=4, vocab_size=512)


def test_a_missing_text_prints_a_one_line_error(tmp_path, tokenizer_file, capsys):
    arguments = ["--text", str(tmp_path / "none"), "--tokenizer", str(tokenizer_file), "--out", str(tmp_path / "tokens")]
    assert main(["make", *arguments]) == 2
    assert_one_line(capsys.readouterr(), "--text is", "no such file")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], "make"),
        (["bogus"], "bogus"),
        (["verify"], "required"),
        (["show", "synthetic", "--nope"], "--nope"),
        (["make"], "--text"),
    ],
)
def test_wrong_arguments_print_a_one_line_error(args, expected, capsys):
    assert main(args) == 2
    assert_one_line(capsys.readouterr(), expected)


def test_an_unknown_corpus_prints_a_one_line_error_and_exits_with_2():
    command = [sys.executable, "-m", "jgraph.data", "show", "synthetics"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"jgraph\.data: error: [^\n]+not one of the corpora [^\n]+, synthetic\n", done.stderr)


def test_the_help_documents_the_file_header(capsys):
    assert main(["--help"]) == 0
    assert "magic, the bytes JGTOKENS" in capsys.readouterr().out


def test_importing_the_reader_imports_neither_transformers_nor_tyro():
    code = "import sys, jgraph.data; print({'transformers', 'tokenizers', 'jinja2', 'tyro'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
