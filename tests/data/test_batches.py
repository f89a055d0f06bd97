import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from jgraph.data import Ahead, Batches, Concatenated, Index, Source, apart, heldout_batches
from jgraph.data._orders import shuffled_windows
from jgraph.errors import ConfigError, DataError

TOKENS = np.arange(1000, dtype=np.uint16)
# If these values change, runs no longer resume with the same data.
FIRST_TOKENS = [859, 683, 603, 331, 27, 171, 315, 267]


def batches_of(tokens=TOKENS, *, batch_size=4, seq_len=16, seed=0, **processes) -> Batches:
    return Batches(tokens, batch_size=batch_size, seq_len=seq_len, seed=seed, **processes)


def first_tokens(batches: Batches, num_rows: int) -> list[int]:
    """Returns the first token of each of the first `num_rows` rows. It identifies the row if tokens count up."""
    steps = -(-num_rows // batches.batch_size)
    return np.concatenate([batches[step] for step in range(steps)])[:num_rows, 0].tolist()


def test_rows_are_consecutive_int32_tokens():
    batch = batches_of()[3]
    assert (batch.shape, batch.dtype) == ((4, 17), np.int32)
    assert (np.diff(batch, axis=1) == 1).all()


def test_a_batch_does_not_depend_on_the_steps_read_before():
    in_order = batches_of()
    in_order = [in_order[step] for step in range(60)]
    assert np.array_equal(batches_of()[59], in_order[59])
    assert np.array_equal(batches_of()[7], in_order[7])


def test_batches_have_fixed_first_tokens():
    assert first_tokens(batches_of(), 8) == FIRST_TOKENS


@settings(max_examples=60)
@given(st.integers(2, 400), st.integers(1, 40), st.integers(0, 2**64 - 1))
def test_each_epoch_reads_every_window_once(num_tokens, seq_len, seed):
    assume(num_tokens > seq_len)
    batches = batches_of(np.arange(num_tokens, dtype=np.uint16), batch_size=3, seq_len=seq_len, seed=seed)
    windows = shuffled_windows(num_tokens, seq_len=seq_len, seed=seed).num_rows
    starts = first_tokens(batches, 2 * windows)
    for epoch in (starts[:windows], starts[windows:]):
        offset = min(epoch)
        assert sorted(epoch) == [offset + window * seq_len for window in range(windows)]
        assert offset < seq_len
    assert num_tokens - windows * seq_len <= 2 * seq_len


def test_epochs_differ_in_offset_and_order():
    batches = batches_of()
    windows = shuffled_windows(len(TOKENS), seq_len=16, seed=0).num_rows
    starts = np.array(first_tokens(batches, 4 * windows)).reshape(4, windows)
    assert len({int(epoch.min()) for epoch in starts}) > 1
    orders = starts - starts.min(axis=1, keepdims=True)
    assert len({tuple(order) for order in orders.tolist()}) == 4


def test_different_seeds_give_different_batches():
    assert first_tokens(batches_of(seed=0), 8) != first_tokens(batches_of(seed=1), 8)


@pytest.mark.parametrize("rows", [[0], [2, 3, 4], [0, 1, 4, 5], np.arange(6)], ids=str)
def test_selected_rows_equal_the_rows_of_the_whole_batch(rows):
    assert np.array_equal(batches_of(batch_size=6, rows=rows)[40], batches_of(batch_size=6)[40][rows])


@pytest.mark.parametrize("rows", [[], [-1, 0], [0, 4], [1, 0], [1, 1]])
def test_row_indices_must_be_ascending_and_in_the_batch(rows):
    with pytest.raises(ConfigError, match="must be ascending indices of the rows of a batch of `batch_size` 4") as caught:
        batches_of(rows=rows)
    assert caught.value.field == "rows"


def test_prefetched_batches_are_unchanged_and_an_error_is_raised_at_its_step():
    class Damaged(np.ndarray):
        def __getitem__(self, span):
            if next(reads) == 3 * batches_of().batch_size:
                raise DataError("damaged")
            return super().__getitem__(span)

    reads = itertools.count()
    ahead = Ahead(batches_of(TOKENS.view(Damaged)))
    assert all(np.array_equal(ahead[step], batches_of()[step]) for step in range(3))
    with pytest.raises(DataError, match="damaged"):
        ahead[3]
    assert np.array_equal(Ahead(batches_of())[40], batches_of()[40])


def test_a_stream_of_one_window_repeats_it():
    assert first_tokens(batches_of(TOKENS[:17]), 5) == [0] * 5


@pytest.mark.parametrize("sample", [batches_of, lambda tokens: heldout_batches(tokens, batch_size=4, seq_len=16, limit=1)])
def test_a_stream_shorter_than_a_sequence_is_refused(sample):
    with pytest.raises(DataError, match="has 16 tokens, but `seq_len` 16 needs at least 17"):
        sample(TOKENS[:16])


def test_a_negative_step_is_refused():
    with pytest.raises(IndexError, match="step is -1"):
        batches_of()[-1]


def test_concatenated_files_give_the_batches_of_one_array():
    parts = Concatenated(np.split(TOKENS, [3, 500, 501]))
    assert all(np.array_equal(batches_of(parts)[step], batches_of()[step]) for step in range(20))
    heldout, expected = (heldout_batches(tokens, batch_size=4, seq_len=16, limit=5) for tokens in (parts, TOKENS))
    assert np.array_equal(heldout, expected)


@given(st.integers(2, 400), st.integers(1, 40), st.integers(1, 8), st.integers(1, 6))
def test_held_out_windows_are_in_order_unique_and_evenly_spaced(num_tokens, seq_len, batch_size, limit):
    assume(num_tokens > seq_len)
    batches = heldout_batches(np.arange(num_tokens, dtype=np.uint16), batch_size=batch_size, seq_len=seq_len, limit=limit)
    windows = (num_tokens - 1) // seq_len
    assert 1 <= len(batches) <= limit
    rows = np.concatenate(batches)
    assert len(rows) == (windows if windows < batch_size else min(limit, windows // batch_size) * batch_size)
    gaps = np.diff(rows[:, 0]) // seq_len
    assert (rows[:, 0] % seq_len == 0).all()
    assert gaps.min(initial=1) >= 1
    assert gaps.max(initial=0) - gaps.min(initial=windows) <= 1


def test_held_out_batches_cover_a_text_that_fits():
    rows = np.concatenate(heldout_batches(TOKENS[:129], batch_size=4, seq_len=16, limit=2))
    assert rows[:, 0].tolist() == list(range(0, 128, 16))


# --- Separate documents ---


TENS = (Source(TOKENS, index=Index(np.arange(10, 1001, 10), [100], [1000])),)


def test_rows_have_document_starts_and_zero_weight_across_documents():
    batch = apart(np.arange(7, dtype=np.int32)[None], np.array([[False, True, False, False, True, True, False]]))
    assert {name: (leaf.dtype, leaf.shape[1]) for name, leaf in batch.items()} == {
        "tokens": (np.int32, 7), "starts": (np.int32, 6), "weights": (np.float32, 6)
    }  # fmt: skip
    assert batch["starts"].tolist() == [[0, 1, 1, 1, 4, 5]]
    assert batch["weights"].tolist() == [[0, 2, 2, 0, 0, 2]]


def test_weights_have_mean_one_over_the_rows_of_all_processes():
    whole = batches_of(TENS, documents="separate")[3]
    for rows in ([0, 2], [1, 3]):
        part = batches_of(TENS, documents="separate", rows=rows)[3]
        for name, leaf in whole.items():
            np.testing.assert_array_equal(part[name], leaf[rows])
    np.testing.assert_array_equal(whole["tokens"], batches_of()[3])
    assert np.mean(whole["weights"]) == pytest.approx(1)
    ends = whole["tokens"][:, 1:] % 10 == 0
    assert (whole["weights"][ends] == 0).all()
    assert len(set(whole["weights"][~ends])) == 1


def test_shuffled_documents_are_separate():
    batch = batches_of(TENS, shuffle="documents", documents="separate")[2]
    tokens, starts = batch["tokens"][:, :-1], batch["starts"]
    assert (np.diff(batch["tokens"]) != 1).any()  # neighbors changed
    begins = np.maximum.accumulate(np.where(tokens % 10 == 0, np.arange(tokens.shape[1]), 0), axis=1)
    np.testing.assert_array_equal(starts, begins)


def test_held_out_weights_have_mean_one_over_all_batches():
    batches = heldout_batches(TENS, batch_size=4, seq_len=16, limit=5, documents="separate")
    assert np.mean([batch["weights"] for batch in batches]) == pytest.approx(1)
    assert len({np.mean(batch["weights"]) for batch in batches}) > 1
    joined = heldout_batches(TOKENS, batch_size=4, seq_len=16, limit=5)
    np.testing.assert_array_equal([batch["tokens"] for batch in batches], joined)


def test_rows_that_only_cross_document_boundaries_have_zero_weight():
    assert not apart(np.zeros((2, 5), np.int32), np.ones((2, 5), bool))["weights"].any()
