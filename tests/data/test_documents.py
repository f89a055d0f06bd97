import pytest
from hypothesis import given, strategies as st

from jgraph.data._texts import count_heldout, cut, digest
from jgraph.errors import ConfigError, DataError

DOCUMENTS = st.lists(st.binary(min_size=1, max_size=8), min_size=2, max_size=60).filter(lambda d: len(set(d)) > 1)


def heldout_of(documents: list[bytes], fraction: float = 0.1) -> set[bytes]:
    by_hash = sorted(documents, key=digest)
    return set(by_hash[: count_heldout([digest(document) for document in by_hash], fraction)])


def test_endoftext_lines_separate_documents_and_are_not_part_of_them():
    assert cut(b"a\nb\n<|endoftext|>\nc <|endoftext|> c\r\n<|endoftext|>\r\n\n<|endoftext|>") == [b"a\nb", b"c <|endoftext|> c"]


def test_text_without_separators_is_cut_at_line_ends_into_blocks_of_16_kib():
    lines = [b"line %d" % i for i in range(30_000)]
    documents = cut(b"\n".join(lines))
    assert b"\n".join(documents).split(b"\n") == lines
    assert all(16_384 <= len(document) + 1 < 16_400 for document in documents[:-1])


def test_short_text_without_separators_is_cut_into_about_eight_blocks():
    assert 7 <= len(cut(b"a few words\n" * 40)) <= 8


@given(st.text(alphabet="aé€😀", min_size=1, max_size=400))
def test_characters_are_not_cut_in_a_text_without_line_ends(text):
    assert "".join(document.decode() for document in cut(text.encode())) == text


def test_appending_text_changes_only_the_last_block():
    text = b"".join(b"line %d\n" % i for i in range(30_000))
    before = cut(text)
    assert cut(text + b"more\n" * 9000)[: len(before) - 1] == before[:-1]


@given(DOCUMENTS, st.sampled_from([1e-9, 0.1, 0.5, 1 - 1e-9]))
def test_held_out_and_training_documents_are_disjoint(documents, fraction):
    by_hash = sorted(documents, key=digest)
    count = count_heldout([digest(document) for document in by_hash], fraction)
    assert 0 < count < len(documents)
    assert not set(by_hash[:count]) & set(by_hash[count:])


@given(st.randoms(use_true_random=False))
def test_adding_documents_does_not_move_existing_documents(random):
    documents = [b"%d" % i for i in range(100)]
    added = [random.randbytes(6) for _ in range(50)]
    assert heldout_of(documents + added) & set(documents) == heldout_of(documents)


def test_about_the_requested_fraction_is_held_out():
    documents = [b"%d" % i for i in range(4000)]
    assert len(heldout_of(documents, 0.25)) == pytest.approx(1000, abs=100)


@pytest.mark.parametrize("documents", [[], [b"one"], [b"same", b"same"]])
def test_fewer_than_two_different_documents_are_refused(documents):
    with pytest.raises(DataError, match=f"has {len(documents)} documents, but no two different"):
        count_heldout(sorted(digest(document) for document in documents))


@pytest.mark.parametrize("fraction", [0, 1, float("nan")])
def test_a_fraction_outside_zero_to_one_is_refused(fraction):
    with pytest.raises(ConfigError, match="`heldout_fraction`"):
        count_heldout([b"a", b"b"], fraction)
