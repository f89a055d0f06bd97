import threading

import numpy as np
import pytest

from jgraph.data import Batches, _verification, verify_in_background, write_tokens
from jgraph.data._verification import note_of, verify_once
from jgraph.errors import DataError


@pytest.fixture
def paths(tmp_path):
    paths = [tmp_path / "train-0.bin", tmp_path / "train-1.bin"]
    for path in paths:
        write_tokens(path, [np.arange(100)], vocab_size=100)
    return paths


@pytest.fixture
def reads(monkeypatch):
    """Names of the files that were read whole."""
    names = []

    def verify(path):
        names.append(path.name)

    monkeypatch.setattr(_verification, "verify", verify)
    return names


def damage(path):
    contents = bytearray(path.read_bytes())
    contents[130] ^= 2
    path.write_bytes(contents)


def wait():
    for thread in threading.enumerate():
        if thread.name == "jgraph-verify":
            thread.join()


def test_files_that_are_as_their_headers_say_pass(paths):
    check = verify_in_background(paths)
    wait()
    check()


def test_a_damaged_file_stops_the_batches_whichever_file_it_is(paths):
    damage(paths[1])
    batches = Batches(np.arange(99), batch_size=1, seq_len=9, seed=0, check=verify_in_background(paths))
    wait()
    with pytest.raises(DataError, match=r"train-1.bin: SHA-256 is .*: damaged"):
        batches[0]


def test_a_file_that_cannot_be_read_is_told_and_one_that_was_removed_is_not(paths, monkeypatch):
    def verify(path):
        raise OSError("input/output error")

    monkeypatch.setattr(_verification, "verify", verify)
    paths[0].unlink()
    check = verify_in_background(paths)
    wait()
    with pytest.raises(DataError, match=r"train-1.bin: cannot be read: input/output error"):
        check()


def test_a_file_is_read_once(paths, reads):
    for path in [*paths, *paths]:
        verify_once(path)
    assert reads == ["train-0.bin", "train-1.bin"]


def test_a_file_that_was_changed_is_read_again(paths, reads):
    verify_once(paths[0])
    write_tokens(paths[0], [np.arange(100)], vocab_size=100)
    verify_once(paths[0])
    assert reads == ["train-0.bin", "train-0.bin"]


def test_a_damaged_file_is_not_remembered_as_a_good_one(paths):
    damage(paths[0])
    for _ in range(2):
        with pytest.raises(DataError, match="damaged"):
            verify_once(paths[0])


@pytest.mark.parametrize("note", [b"", b"\xff", b"1 2 3"])
def test_a_damaged_note_makes_files_be_read_again_and_is_replaced(paths, reads, note):
    note_of(paths[0]).write_bytes(note)
    verify_once(paths[0])
    verify_once(paths[0])
    assert reads == ["train-0.bin"]


def test_where_nothing_can_be_written_files_are_read_each_time(paths, reads):
    # A directory in the note's place is refused to root, too, whom permissions do not stop.
    note_of(paths[0]).mkdir()
    verify_once(paths[0])
    verify_once(paths[0])
    assert reads == ["train-0.bin", "train-0.bin"]
