"""Tests the order of rows: permutations that are not stored, documents reshuffled each epoch, and mixtures."""

import tracemalloc
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jgraph.data import Batches, Index, Source, heldout_batches
from jgraph.data._batches import Packed, _counts, _deal
from jgraph.data._orders import _bits, permutation, shuffled_documents
from jgraph.errors import DataError

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=200)
# If these values change, runs no longer resume with the same data.
FIRST_NUMBERS = [217755117, 153221646, 883335260, 879066693, 45120963, 271479682, 813643810, 559554245]
FIRST_SOURCES = [0, 1, 0, 2, 0, 1, 0, 2, 0, 1]
FIRST_TOKENS = [127, 151, 55, 7, 103, 18]


def index_of(lengths, parts: int = 1) -> Index:
    """Returns an index of documents with these lengths, stored in `parts` files."""
    pieces = [part for part in np.array_split(np.array(lengths), parts) if len(part)]
    ends = np.concatenate([np.cumsum(part) for part in pieces]).astype(np.uint16)
    return Index(ends, [len(part) for part in pieces], [int(part.sum()) for part in pieces])


def source_of(lengths, *, first: int = 0, weight=1, parts: int = 1) -> Source:
    """Returns a source with tokens that count up from `first`."""
    tokens = np.arange(first, first + sum(lengths), dtype=np.uint16)
    return Source(tokens, Fraction(weight), index_of(lengths, parts))


def batches_of(*sources, batch_size=4, seq_len=8, seed=0, shuffle="documents", **processes) -> Batches:
    return Batches(sources, batch_size=batch_size, seq_len=seq_len, seed=seed, shuffle=shuffle, **processes)


# --- Permutations ---


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_a_permutation_has_every_number_once_and_supports_random_access(size, seed):
    permute = permutation(size, np.random.Philox(key=seed))
    found = permute(np.arange(size))
    assert sorted(found.tolist()) == list(range(size))
    assert permute(np.array([size - 1, 0])).tolist() == [found[-1], found[0]]


def test_permutations_and_mixtures_have_fixed_values():
    assert [_deal([5, 3, 2], row)[0] for row in range(10)] == FIRST_SOURCES
    assert permutation(10**9, _bits(1, 2, 3))(np.arange(8)).tolist() == FIRST_NUMBERS


@pytest.mark.long
def test_permutations_are_uniform():
    counts = np.zeros((10, 10))
    for seed in range(300):
        counts[np.arange(10), permutation(10, np.random.Philox(key=seed))(np.arange(10))] += 1
    # Chi-squared with 81 degrees of freedom exceeds 130 once in 2,000 draws.
    assert ((counts - 30) ** 2 / 30).sum() < 130


# --- Documents ---


@pytest.mark.long
@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 20), st.integers(1, 4), st.integers(0, 2**64 - 1))
def test_an_epoch_predicts_each_token_at_most_once_and_omits_at_most_one_row(lengths, seq_len, parts, seed):
    if sum(lengths) <= seq_len:
        return
    order = shuffled_documents(sum(lengths), index_of(lengths, parts), seq_len=seq_len, seed=seed)
    rows = order.num_rows
    for epoch in range(2):
        spans = order.spans(np.arange(epoch * rows, epoch * rows + rows))
        predicted = np.concatenate([np.concatenate([np.arange(*span) for span in row])[1:] for row in spans])
        assert len(np.unique(predicted)) == len(predicted) == rows * seq_len
        assert sum(lengths) - len(predicted) <= seq_len


@settings(max_examples=30)
@given(LENGTHS, st.integers(0, 2**32))
def test_each_span_is_inside_one_document(lengths, seed):
    lengths = [30, *lengths]
    index = index_of(lengths)
    order = shuffled_documents(sum(lengths), index, seq_len=8, seed=seed)
    starts = {0, *np.cumsum(lengths).tolist()}
    for spans in order.spans(np.arange(order.num_rows)):
        assert sum(stop - start for start, stop in spans) == 9
        assert all(not starts & set(range(start + 1, stop)) for start, stop in spans)
        # Only the first span may start, and only the last may end, inside a document.
        assert all(start in starts for start, _ in spans[1:])
        assert all(stop in starts for _, stop in spans[:-1])


def test_each_epoch_has_different_neighboring_documents():
    order = shuffled_documents(800, index_of([4] * 200), seq_len=7, seed=0)
    neighbors = [
        {(a, b) for spans in order.spans(np.arange(first, first + order.num_rows)) for (a, _), (b, _) in pairwise(spans)}
        for first in (0, order.num_rows)
    ]
    assert len(neighbors[0]) > 100
    assert len(neighbors[0] & neighbors[1]) < 10


def test_shuffled_documents_have_fixed_first_tokens():
    batches = batches_of(source_of([3, 50, 2, 7, 90, 1]))
    assert [int(batches[step][0, 0]) for step in range(6)] == FIRST_TOKENS


@pytest.mark.parametrize("kind", ["windows", "documents", "packed"])
def test_sources_of_equal_length_have_different_orders(kind):
    sources = [source_of([9] * 40) for _ in range(2)]
    if kind == "packed":
        sources = [replace(source, packed=Packed(np.ones(360, bool), 40, 360, 0, 0)) for source in sources]
    batches = batches_of(*sources, batch_size=80, shuffle="windows" if kind == "packed" else kind)
    one, other = (batches[0][source::2, 0].tolist() for source in range(2))
    assert one != other
    assert kind != "packed" or sorted(one) == sorted(other) == list(range(0, 360, 9))


def test_an_index_that_does_not_match_the_tokens_is_refused():
    with pytest.raises(DataError, match="has 21 tokens, but its documents have 20"):
        batches_of(Source(np.arange(21, dtype=np.uint16), index=index_of([10, 10])))[0]


def test_shuffling_documents_without_an_index_is_refused_with_a_remedy():
    with pytest.raises(DataError, match=r"make it again .* or leave `data_shuffle` out"):
        batches_of(Source(np.arange(100, dtype=np.uint16)))


@pytest.mark.long
@pytest.mark.once
def test_ten_million_documents_are_shuffled_in_bounded_memory_at_any_step(tmp_path):
    documents = 10_000_000
    ends = np.memmap(tmp_path / "ends", np.uint32, mode="w+", shape=documents)
    per_file = documents // 100
    sizes = []
    for i in range(100):
        lengths = np.random.default_rng(i).integers(1, 2000, per_file)
        ends[i * per_file : (i + 1) * per_file] = np.cumsum(lengths)
        sizes.append(int(lengths.sum()))
    index = Index(ends, [per_file] * 100, sizes)
    tracemalloc.start()
    try:
        order = shuffled_documents(sum(sizes), index, seq_len=1024, seed=0)
        late = 3 * order.num_rows + order.num_rows // 2
        spans = order.spans(np.arange(late, late + 64))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20
    assert shuffled_documents(sum(sizes), index, seq_len=1024, seed=0).spans(np.arange(late, late + 64)) == spans


# --- Mixtures ---

WEIGHTS = st.lists(st.integers(1, 10**6), min_size=1, max_size=6)


@settings(max_examples=50)
@given(WEIGHTS)
def test_rows_are_assigned_to_sources_in_proportion_to_their_weights(weights):
    taken = [0] * len(weights)
    for row in range(60):
        assert _counts(weights, row) == taken
        parts = [weight * row / sum(weights) for weight in weights]
        assert all(abs(count - part) <= max(1, len(weights) / 2) for count, part in zip(taken, parts, strict=True))
        source, before = _deal(weights, row)
        assert before == taken[source]
        taken[source] += 1
    late = 10**15
    assert sum(_counts(weights, late)) == late


@pytest.mark.parametrize("shuffle", ["windows", "documents"])
def test_a_mixture_depends_on_seed_and_step_but_not_on_the_number_of_processes(shuffle):
    sources = [source_of([5, 30, 9] * 10, weight=Fraction(7, 10)), source_of([12] * 20, first=1000, weight=Fraction(3, 10))]
    whole = [batches_of(*sources, batch_size=8, shuffle=shuffle)[step] for step in range(30)]
    assert np.array_equal(batches_of(*sources, batch_size=8, shuffle=shuffle)[17], whole[17]), (
        "a resumed run reads the same batch"
    )
    assert not np.array_equal(batches_of(*sources, batch_size=8, shuffle=shuffle, seed=1)[17], whole[17])
    for rows in ([0, 1, 4, 5], [2, 3, 6, 7], [5]):
        part = batches_of(*sources, batch_size=8, shuffle=shuffle, rows=rows)
        assert all(np.array_equal(part[step], whole[step][rows]) for step in (0, 17, 29))
    of_second = [row for batch in whole for row in batch if row[0] >= 1000]
    assert len(of_second) == 72
    per_epoch = round(30 * 8 * 0.3 / batches_of(*sources, batch_size=8, shuffle=shuffle).epochs(30)[1][1])
    assert len({int(row[0]) for row in of_second[:per_epoch]}) == per_epoch, "an epoch repeats no row"


def test_epochs_are_counted_for_each_source():
    sources = [source_of([81], weight=3), source_of([41], weight=1)]
    assert [times for _, times in batches_of(*sources).epochs(10)] == [3, 2]


def test_held_out_rows_of_a_mixture_follow_its_weights():
    sources = [source_of([800], weight=3), source_of([100], first=1000)]
    rows = np.concatenate(heldout_batches(sources, batch_size=4, seq_len=8, limit=5))
    assert (rows[:, 0] >= 1000).sum() == 5
    rows = np.concatenate(heldout_batches(sources, batch_size=4, seq_len=8, limit=99))
    assert len(rows) == 48, "all twelve windows of the second source"
    assert len({int(row[0]) for row in rows}) == len(rows)
