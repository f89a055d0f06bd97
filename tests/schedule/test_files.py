"""Schedules as CSV and JSON."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jgraph.errors import OrderError
from jgraph.schedule import NAMES, generate, read, write
from jgraph.schedule.files import from_csv, from_json, to_csv, to_json


@pytest.mark.parametrize("name", NAMES)
def test_a_csv_says_everything(name):
    schedule = generate(name, pp=3, microbatches=7, chunks=1)
    again = from_csv(to_csv(schedule))
    assert again.orders == schedule.orders
    assert again.placement == schedule.placement
    assert [t.tolist() for t in again.ticks] == [t.tolist() for t in schedule.ticks]


@pytest.mark.parametrize("name", NAMES)
def test_json_says_the_signed_numbers(name):
    schedule = generate(name, pp=3, microbatches=7, chunks=1)
    again = from_json(to_json(schedule))
    # Signed numbers say of a chunk, not of an entry, that wgrads are delayed: dualpipe-v comes back with all split.
    assert again.orders == (schedule.split() if name == "dualpipe-v" else schedule).orders
    assert (again.placement, again.name) == (schedule.placement, schedule.name)
    if name != "dualpipe-v":
        assert [t.tolist() for t in again.ticks] == [t.tolist() for t in schedule.ticks]


def test_a_compact_csv_says_the_sequence():
    schedule = from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert schedule.orders == generate("1f1b", pp=2, microbatches=2).orders
    assert schedule.ticks[1].tolist() == [1, 2, 3, 4]


def test_a_bare_list_of_orders_is_a_schedule():
    assert from_json("[[1, -1], [1, -1]]").num_ranks == 2


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_files_are_told_apart_by_suffix(tmp_path, suffix):
    schedule = generate("zb-v", pp=2, microbatches=4)
    write(schedule, tmp_path / f"schedule{suffix}")
    assert read(tmp_path / f"schedule{suffix}").orders == schedule.orders


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "one row per rank"),
        ("0F0,0X0\n", "rank 0, cell 1: '0X0' is no action"),
        ("0F0,0B0\n\n", "rank 1 has no action"),
        ("0F1,0B0\n", "rank 0, entry 0 .* must be microbatch 0"),
        ("0F0,0B0\n0F0,0B0\n", "each of 0 to 1"),
        ("0F0,0I0\n", "its wgrad never comes"),
        ("0F0,0B0,1F0,1B0\n", "rank 0, entry 1"),
    ],
)
def test_a_csv_that_says_no_schedule_is_refused(text, match):
    with pytest.raises(OrderError, match=match):
        from_csv(text)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not JSON"),
        ("3", "one list of signed numbers per rank"),
        ("{}", "one list of signed numbers per rank"),
        ('{"orders": [[1, -1]], "order": 1}', "no field 'order'"),
        ('{"orders": [[1, -1], [1, "x"]]}', "rank 1, entry 1"),
        ('{"orders": [[1, -1]], "placement": [["0"]]}', "placement must be"),
        ('{"orders": [[1, -1]], "ticks": [[0.5, 1]]}', "ticks must be"),
        ('{"orders": [[1, -1]], "ticks": [[1, 0]]}', "go up"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_json_that_says_no_schedule_is_refused(text, match):
    with pytest.raises(OrderError, match=match):
        from_json(text)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.txt", b"", "neither"),
        ("a.csv", None, "cannot read"),
        ("a.json", b"\xff", "cannot read"),
        ("a.csv", b"x", "no action"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, match):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(OrderError, match=match) as caught:
        read(tmp_path / name)
    assert name in str(caught.value)


CELLS = st.lists(
    st.lists(st.sampled_from(["0F0", "0B0", "1F0", "1I0", "1W0", "", "0F1", "x", " 2B0 "]), max_size=6), max_size=3
)


@given(text=CELLS.map(lambda rows: "\n".join(map(",".join, rows))) | st.text(max_size=20))
@settings(max_examples=500, deadline=None, derandomize=True)
def test_any_text_is_a_schedule_or_an_order_error(text):
    for parse in (from_csv, from_json):
        try:
            parse(text)
        except OrderError:
            continue


def test_what_is_written_is_json_that_others_can_read():
    body = json.loads(to_json(generate("aligned", pp=2, microbatches=3)))
    assert body["orders"][0] == [1, 1, 1, -1, -1.5, -1, -1.5, -1, -1.5]
    assert set(body) == {"name", "placement", "orders", "ticks"}
