import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jgraph.data import Batches, Concatenated, TokenFile, heldout_batches, write_tokens
from jgraph.data._tokenfile import read_header, read_tokens, verify
from jgraph.errors import DataError


@pytest.fixture
def token_file(tmp_path) -> Path:
    path = tmp_path / "train-0.bin"
    write_tokens(path, [np.arange(100)], vocab_size=100)
    return path


def overwrite(path: Path, offset: int, data: bytes) -> None:
    contents = bytearray(path.read_bytes())
    contents[offset : offset + len(data)] = data
    path.write_bytes(contents)


@settings(max_examples=40)
@given(
    st.sampled_from([1, 256, 65_536, 65_537, 2**32 - 1]).flatmap(
        lambda vocab: st.tuples(
            st.just(vocab), st.lists(st.lists(st.integers(0, vocab - 1), min_size=1), min_size=1, max_size=5)
        )
    )
)
def test_tokens_are_unchanged_by_a_round_trip_and_use_two_bytes_if_possible(case):
    vocab_size, documents = case
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train-0.bin")
        written = write_tokens(path, [np.array(document, np.int64) for document in documents], vocab_size=vocab_size)
        tokens = read_tokens(path)
        assert tokens.tolist() == [token for document in documents for token in document]
        assert tokens.dtype == (np.uint16 if vocab_size <= 65_536 else np.uint32)
        assert read_header(path) == verify(path) == written
        assert (written.vocab_size, written.num_documents) == (vocab_size, len(documents))


def test_reading_memory_maps_the_file(token_file):
    tokens = read_tokens(token_file)
    assert isinstance(tokens, np.memmap)
    assert not tokens.flags.writeable


def test_the_header_has_the_documented_layout(token_file):
    start = token_file.read_bytes()
    assert start[:8] == b"JGTOKENS"
    fields = [(8, 4), (12, 4), (16, 8), (24, 8), (32, 4)]
    assert [int.from_bytes(start[at : at + size], "little") for at, size in fields] == [1, 2, 100, 1, 100]
    assert start[68:128] == bytes(60)
    assert len(start) == 128 + 2 * 100


@pytest.mark.parametrize("cut", [1, 200, 250])
def test_a_truncated_file_is_refused_with_expected_and_actual_bytes(token_file, cut):
    token_file.write_bytes(token_file.read_bytes()[:-cut])
    with pytest.raises(DataError, match=rf"train-0.bin: has {328 - cut} bytes, but .* (328|128): truncated"):
        read_tokens(token_file)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"NOTTOKEN", r"starts with b'NOTTOKEN', a token file starts with b'JGTOKENS'"),
        (8, b"\x07", "has version 7, but this jgraph reads version 1"),
        (12, b"\x03", "3 bytes per token, must be 2 or 4"),
        (16, b"\x05", "328 bytes, but 5 tokens need 138: damaged"),
    ],
)
def test_an_invalid_header_is_refused(token_file, offset, data, message):
    overwrite(token_file, offset, data)
    with pytest.raises(DataError, match=f"train-0.bin: .*{message}"):
        read_header(token_file)


def test_only_verify_finds_a_changed_token(token_file):
    overwrite(token_file, 128, b"\x01")
    assert read_tokens(token_file)[0] == 1
    with pytest.raises(DataError, match=r"SHA-256 is .*, its header has .*: damaged"):
        verify(token_file)


def read_all(path: Path) -> None:
    TokenFile(path)[:]


def read_a_batch(path: Path) -> None:
    Batches(TokenFile(path), batch_size=3, seq_len=30, seed=0)[0]


def read_heldout_batches(path: Path) -> None:
    heldout_batches(TokenFile(path), batch_size=1, seq_len=30, limit=10)


@pytest.mark.parametrize("read", [verify, read_all, read_a_batch, read_heldout_batches])
def test_reading_a_token_outside_the_vocabulary_raises_an_error_with_its_index(token_file, read):
    overwrite(token_file, 128 + 2 * 70, b"\xff\xff")
    with pytest.raises(DataError, match=r"train-0.bin: token 70 is 65535: must be in \[0, 100\)"):
        read(token_file)


def test_a_file_of_an_older_version_with_the_largest_id_in_its_header_is_read(token_file):
    overwrite(token_file, 68, b"\x64")
    verify(token_file)
    assert TokenFile(token_file)[:].tolist() == list(range(100))


def test_an_invalid_token_is_reported_with_its_own_file_and_index(token_file, tmp_path):
    write_tokens(tmp_path / "train-1.bin", [np.arange(50)], vocab_size=100)
    overwrite(tmp_path / "train-1.bin", 128 + 2 * 7, b"\xff")
    tokens = Concatenated([TokenFile(token_file), TokenFile(tmp_path / "train-1.bin")])
    assert len(tokens[60:107]) == 47
    with pytest.raises(DataError, match=r"train-1.bin: token 7 is 255"):
        tokens[60:110]


@pytest.mark.parametrize("change", ["cut", "overwritten"])
def test_a_file_changed_while_it_is_open_is_refused(token_file, change):
    tokens = TokenFile(token_file)
    if change == "cut":
        with token_file.open("r+b") as file:
            file.truncate(0)
    else:
        time.sleep(0.02)  # longer than the resolution of file timestamps
        overwrite(token_file, 128, b"\x01")
    with pytest.raises(DataError, match=r"train-0.bin: was written to while it is in use"):
        tokens[:5]


@pytest.mark.parametrize("change", ["removed", "replaced"])
def test_a_removed_or_replaced_file_stays_readable(token_file, change):
    tokens = TokenFile(token_file)
    if change == "removed":
        token_file.unlink()
    else:
        write_tokens(token_file, [np.zeros(9, np.int64)], vocab_size=100)
    assert tokens[:5].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("ids", [[-1], [100]])
def test_ids_outside_the_vocabulary_are_refused(tmp_path, ids):
    with pytest.raises(DataError, match=r"must be in \[0, 100\)"):
        write_tokens(tmp_path / "train-0.bin", [np.arange(3), np.array(ids)], vocab_size=100)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("document", [np.ones(3), np.ones((2, 2), np.int64), np.ones(3, bool)])
def test_a_document_must_be_a_1d_integer_array(tmp_path, document):
    with pytest.raises(DataError, match=r"document at token 3 is of .*: must be a 1-D array of integers"):
        write_tokens(tmp_path / "train-0.bin", [np.arange(3), document], vocab_size=100)


@pytest.mark.parametrize("vocab_size", [-1, 0, 2**32])
def test_an_invalid_vocabulary_size_is_refused_before_documents_are_read(tmp_path, vocab_size):
    with pytest.raises(DataError, match=f"vocab_size is {vocab_size}: must be in"):
        write_tokens(tmp_path / "train-0.bin", iter(lambda: pytest.fail("a document was read"), None), vocab_size=vocab_size)


def test_writing_no_tokens_is_refused_and_creates_no_file(tmp_path):
    with pytest.raises(DataError, match="no tokens to write"):
        write_tokens(tmp_path / "train-0.bin", [], vocab_size=100)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_write_keeps_the_earlier_file(token_file):
    def documents():
        yield np.zeros(5, np.int64)
        raise KeyboardInterrupt

    before = token_file.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        write_tokens(token_file, documents(), vocab_size=100)
    assert [path.name for path in token_file.parent.iterdir()] == ["train-0.bin"]
    assert token_file.read_bytes() == before


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 30), st.integers(0, 30))
def test_concatenated_parts_are_sliced_like_one_array(lengths, start, stop):
    whole = np.arange(sum(lengths), dtype=np.uint16)
    view = Concatenated(np.split(whole, np.cumsum(lengths)[:-1]))
    assert len(view) == len(whole)
    assert np.array_equal(view[start:stop], whole[start:stop])


def test_a_stride_is_refused():
    with pytest.raises(IndexError, match=r"^stride is 2: must be 1$"):
        Concatenated([np.arange(5, dtype=np.uint16)])[::2]


def test_a_slice_inside_one_part_is_a_view():
    parts = [np.arange(5, dtype=np.uint16), np.arange(5, dtype=np.uint16)]
    assert np.shares_memory(Concatenated(parts)[6:9], parts[1])
