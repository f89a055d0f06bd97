"""Schedules are read from CSV and JSON, and written as JSON."""

import json

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jgraph.errors import OrderError
from jgraph.schedule import NAMES, Order, Schedule, generate, read, write
from jgraph.schedule.files import from_csv, from_json, to_json
from tests.schedule.strategies import schedules, to_csv

FORMS = {".csv": (to_csv, from_csv), ".json": (to_json, from_json)}
CHUNKS = dict.fromkeys(("zb-v", "dualpipe-v", "interleaved-1f1b"), (2,))
CASES = [(name, pp, chunks) for name in NAMES for pp in (1, 3) for chunks in CHUNKS.get(name, (1, 2))]
CASES = [case for case in CASES if case[2] == 1 or case[0] not in ("1f1b", "zb-h1", "zb-h2")]


def same(a, b):
    """True if two schedules have the same orders, placement and ticks."""
    ticks = [[t.tolist() for t in schedule.ticks] for schedule in (a, b)]
    return (a.orders, a.placement, ticks[0]) == (b.orders, b.placement, ticks[1])


@pytest.mark.parametrize(("name", "pp", "chunks"), CASES)
def test_csv_round_trips(name, pp, chunks):
    schedule = generate(name, pp=pp, microbatches=7, chunks=chunks)
    assert same(from_csv(to_csv(schedule)), schedule)


@pytest.mark.parametrize(("name", "pp", "chunks"), CASES)
def test_json_round_trips_orders_ticks_and_name(name, pp, chunks):
    schedule = generate(name, pp=pp, microbatches=7, chunks=chunks)
    restored = from_json(to_json(schedule))
    if name == "dualpipe-v":
        # Signed numbers cannot mix full and split backwards in a chunk, so all of them come back split.
        assert any(all(order.delay_wgrad) for order in restored.orders) == (pp > 1)
        schedule, restored = schedule.split(), restored.split()
    assert same(restored, schedule)
    assert restored.name == schedule.name == name


def test_files_keep_the_later_ticks_of_aligned_schedules():
    schedule = generate("aligned", pp=3, microbatches=7)
    assert not same(Schedule(schedule.orders, schedule.placement), schedule)
    for write_text, read_text in FORMS.values():
        assert same(read_text(write_text(schedule)), schedule)


@pytest.mark.parametrize("suffix", FORMS)
def test_files_keep_idle_ticks_before_and_between_actions(suffix):
    write_text, read_text = FORMS[suffix]
    schedule = Schedule((Order.parse([1, -1]),) * 2, (), (np.array([3, 9]), np.array([5, 7])))
    assert same(read_text(write_text(schedule)), schedule)


def test_a_csv_has_a_row_per_rank_and_a_cell_per_tick():
    schedule = Schedule((Order.parse([1, 2, -2, -2.5, -1]), Order.parse([1, -1])), ((0, 2), (1,)))
    assert same(from_csv("0F0,,2F0,2I0,2W0,0B0\n,1F0,,,1B0,\n"), schedule)


@pytest.mark.long
@given(schedules())
@settings(max_examples=100)
def test_random_schedules_round_trip_in_both_formats(schedule):
    assert same(from_csv(to_csv(schedule)), schedule)
    assert to_csv(from_csv(to_csv(schedule))) == to_csv(schedule)
    restored = from_json(to_json(schedule))
    assert restored.split().orders == schedule.split().orders
    assert restored.placement == schedule.placement
    mixed = any(
        (order.kinds[order.chunks == c] == 3).any() for order in schedule.orders for c in np.flatnonzero(order.delay_wgrad)
    )
    assert mixed or same(restored, schedule)


@pytest.mark.parametrize(("name", "pp", "chunks"), [case for case in CASES if case[1] > 1])
def test_a_csv_without_idle_cells_gets_the_earliest_ticks(name, pp, chunks):
    schedule = generate(name, pp=pp, microbatches=7, chunks=chunks)
    compact = "\n".join(",".join(cell for cell in row.split(",") if cell) for row in to_csv(schedule).splitlines())
    assert same(from_csv(compact), Schedule(schedule.orders, schedule.placement))


def test_a_compact_csv_of_pytorch_is_read():
    # Columns cannot be ticks: 1F0 is in the same column as 0F0, which makes its input.
    schedule = from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert same(schedule, generate("1f1b", pp=2, microbatches=2))
    assert schedule.ticks[1].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("text", ["0F0,0B0\r\n", "0F0,0B0", " 0F0 ,\t0B0", '"0F0","0B0"\n', ",0F0,,0B0,,\n"])
def test_csv_ignores_line_ends_spaces_quotes_and_empty_trailing_cells(text):
    assert from_csv(text).orders == (Order.parse([1, -1]),)


def test_a_json_list_of_orders_is_a_schedule():
    assert from_json("[[1, -1], [1, -1]]").num_ranks == 2


@pytest.mark.parametrize("suffix", [".csv", ".json", ".CSV", ".Json"])
def test_the_suffix_selects_the_format(tmp_path, suffix):
    schedule = generate("zb-v", pp=2, microbatches=4)
    write_text, _ = FORMS[suffix.lower()]
    (tmp_path / f"schedule{suffix}").write_text(write_text(schedule))
    assert same(read(tmp_path / f"schedule{suffix}"), schedule)


def test_json_keeps_a_name_with_special_characters(tmp_path):
    schedule = Schedule((Order.parse([1, -1]),), name='ein "Plan",\nzweite Zeile 好')
    write(schedule, tmp_path / "a.json")
    assert read(tmp_path / "a.json").name == schedule.name


def test_an_unknown_suffix_is_refused_before_the_file_is_created(tmp_path):
    with pytest.raises(OrderError, match=r"a\.csv: must be a \.json file"):
        write(generate("1f1b", pp=2, microbatches=2), tmp_path / "a.csv")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "one row per rank"),
        ("0F0,0X0\n", "rank 0, cell 1: '0X0' is not an action"),
        ("0F0,0B0\n\n", "rank 1 has no action"),
        ("0F1,0B0\n", "rank 0, entry 0 .* must be microbatch 0"),
        ("0F0,0B0\n0F0,0B0\n", "each of 0 to 1"),
        ("0F0,0I0\n", "its wgrad is missing"),
        ("0F0,0B0,1F0,1B0\n", "rank 0, entry 1"),
        ("\n", "rank 0 has no action"),
        (",,\n", "rank 0 has no action"),
        ("0F0;0B0", "rank 0, cell 0: '0F0;0B0' is not an action"),
        ("0F0,-1B0", "rank 0, cell 1: '-1B0' is not an action"),
        ("0F0,0f1", "rank 0, cell 1"),
        ("0F0,0F\n", "rank 0, cell 1: '0F' is not an action; write the stage, one of the letters F, I, W, B"),
        ("0F1000000000,0B0", "rank 0, cell 0"),
        ("\ufeff0F0,0B0", "rank 0, cell 0"),
        ("0F0,0B0\n2F0,2B0\n", "each of 0 to 1"),
        ("0F0,0B0\n1F0,1F1,1B0,1B1\n", "rank 1 has 2 microbatches, but rank 0 has 1"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "deadlocks: rank 0 at entry 1"),
    ],
)
def test_an_invalid_csv_is_refused(text, match):
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
        ('{"orders": [[1, -1]], "ticks": [[1, 0]]}', "ascending"),
        ("null", "one list of signed numbers per rank"),
        ("[]", "at least one Order"),
        ("[[]]", "rank 0, the order is empty"),
        ("[null]", "rank 0, an order must be a sequence"),
        ('["1"]', "rank 0, an order must be a sequence"),
        ("[[1, -1.0]]", "rank 0, entry 1 .* integers"),
        ("[[true, -1]]", "rank 0, entry 0"),
        ("[[1, NaN]]", "rank 0, entry 1"),
        ("[[1, -1e400]]", "rank 0, entry 1"),
        ("[[1, -1]] x", "not JSON"),
        ("[[1, 1" + "0" * 5000 + "]]", "not JSON"),
        ("\ufeff[[1, -1]]", "not JSON"),
        ('{"orders": [[1, -1]], "placement": [[true]]}', "placement must be"),
        ('{"orders": [[1, -1]], "placement": [[-1]]}', "placement must be"),
        ('{"orders": [[1, -1]], "placement": [0]}', "placement must be"),
        ('{"orders": [[1, -1]], "placement": [[1]]}', "each of 0 to 0"),
        ('{"orders": [[1, -1]], "ticks": [[]]}', "rank 0 has 2 actions, but 0 ticks"),
        ('{"orders": [[1, -1]], "ticks": [[0, 9999999999]]}', "ticks must be"),
        ('{"orders": [[1, -1], [1, -1]], "ticks": [[0, 1], [1, 2]]}', "rank 0, entry 1 .* at tick 1"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_an_invalid_json_is_refused(text, match):
    with pytest.raises(OrderError, match=match):
        from_json(text)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.txt", b"", r"must be a \.csv or \.json file"),
        ("a.csv", None, "cannot be read as a schedule"),
        ("a.json", b"\xff", "cannot be read as a schedule"),
        ("a.csv", b"x", "not an action"),
    ],
)
def test_the_error_names_an_unreadable_file(tmp_path, name, content, match):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(OrderError, match=match) as caught:
        read(tmp_path / name)
    assert name in str(caught.value)


def test_an_error_in_a_csv_gives_rank_cell_and_position(tmp_path):
    path = tmp_path / "plan.csv"
    path.write_text("0F0,,,0B0\n,1F0,,1X0\n")
    with pytest.raises(OrderError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: rank 1, cell 3: '1X0' is not an action; ")
    assert (caught.value.rank, caught.value.position) == (1, 1)


def test_an_error_in_a_json_order_gives_rank_and_position(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("[[1, -1], [1, -1, -1]]")
    with pytest.raises(OrderError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: rank 1, entry 2 is the dgrad of chunk 1, microbatch 1, which comes before")
    assert (caught.value.rank, caught.value.position) == (1, 2)


@pytest.mark.parametrize("suffix", FORMS)
def test_a_folder_and_an_empty_file_are_refused(tmp_path, suffix):
    (tmp_path / f"folder{suffix}").mkdir()
    (tmp_path / f"empty{suffix}").write_bytes(b"")
    with pytest.raises(OrderError, match=r"folder.*: cannot be read as a schedule \(Is a directory\)"):
        read(tmp_path / f"folder{suffix}")
    with pytest.raises(OrderError, match=r": the table is empty; write one row per rank$|: this is not JSON: "):
        read(tmp_path / f"empty{suffix}")


@pytest.mark.parametrize("suffix", FORMS)
@pytest.mark.parametrize("name", ["aligned", "dualpipe-v"])
def test_a_truncated_file_is_refused_unless_the_rest_is_a_schedule(tmp_path, suffix, name):
    write_text, read_text = FORMS[suffix]
    text = write_text(generate(name, pp=2, microbatches=5))
    taken = []
    for end in range(len(text)):
        try:
            read_text(text[:end])
            taken.append(end)
        except OrderError:
            continue
    # Truncation may remove idle cells, the line end, or whole rows if the remaining ranks have the first stages.
    rows = [row.strip(",") for row in text.splitlines()]
    for end in taken:
        kept = [row.strip(",") for row in text[:end].splitlines()]
        assert kept == rows[: len(kept)]
        assert len(kept) == len(rows) or (suffix, name) == (".csv", "aligned")
    assert taken[-1] == len(text) - 1


CELLS = st.lists(
    st.lists(st.sampled_from(["0F0", "0B0", "1F0", "1I0", "1W0", "", "0F1", "x", " 2B0 "]), max_size=6), max_size=3
)
# Excludes carriage returns, which the csv module refuses (see below) and reading a text file removes.
TEXT = st.text(st.characters(exclude_characters="\r"), max_size=20) | st.text('0123FIWB,"\n []{}-.5', max_size=30)


@pytest.mark.long
@given(text=CELLS.map(lambda rows: "\n".join(map(",".join, rows))) | TEXT)
@settings(max_examples=400)
def test_arbitrary_text_gives_a_schedule_or_an_order_error(text):
    for parse in (from_csv, from_json):
        try:
            parse(text)
        except OrderError:
            continue


@pytest.mark.long
@given(schedule=schedules(), suffix=st.sampled_from(list(FORMS)), data=st.data())
@settings(max_examples=200)
def test_a_corrupted_file_gives_a_schedule_or_an_order_error(schedule, suffix, data):
    write_text, read_text = FORMS[suffix]
    text = write_text(schedule)
    start, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 5))
    text = text[:start] + data.draw(TEXT) + text[start + length :]
    try:
        restored = read_text(text)
    except OrderError:
        return
    assert same(from_csv(to_csv(restored)), restored)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.integers(-3, 3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)
BODIES = st.fixed_dictionaries(
    {"orders": st.sampled_from([[[1, -1]], [[1, -1], [1, -1]], [[1, 2, -2, -1]]]) | VALUES},
    optional={
        "placement": st.lists(st.lists(st.integers(0, 3), max_size=2), max_size=2) | VALUES,
        "ticks": st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=2) | VALUES,
        "name": VALUES,
    },
)


@pytest.mark.long
@given(body=BODIES | VALUES)
@settings(max_examples=400)
def test_arbitrary_json_gives_a_schedule_or_an_order_error(body):
    try:
        schedule = from_json(json.dumps(body))
    except OrderError:
        return
    assert same(from_json(to_json(schedule)), schedule)


@given(content=st.binary(max_size=40), suffix=st.sampled_from(list(FORMS)))
@settings(max_examples=200)
def test_arbitrary_bytes_give_a_schedule_or_an_order_error_with_the_path(tmp_path_factory, content, suffix):
    path = tmp_path_factory.getbasetemp() / f"bytes{suffix}"
    path.write_bytes(content)
    try:
        read(path)
    except OrderError as error:
        problem = str(error)
    else:
        return
    assert str(path) in problem


@pytest.mark.parametrize("text", ["0F0\r0B0", "0F0," + "x" * 200_000, '0F0,"' + "0B0," * 50_000])
def test_an_error_of_the_csv_module_becomes_an_order_error(text):
    with pytest.raises(OrderError):
        from_csv(text)


def test_an_impossible_path_is_refused(tmp_path):
    with pytest.raises(OrderError, match="cannot be read as a schedule"):
        read(tmp_path / "a\0.csv")


def test_the_error_for_a_long_cell_is_short():
    with pytest.raises(OrderError) as caught:
        from_csv("y" * 100_000)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("value", ["0", "{}", "false", '""'])
@pytest.mark.parametrize("field", ["placement", "ticks"])
def test_a_json_field_must_be_a_list(field, value):
    with pytest.raises(OrderError, match=f"{field} must be"):
        from_json(f'{{"orders": [[1, -1]], "{field}": {value}}}')


def test_the_written_file_is_plain_json_with_signed_numbers():
    body = json.loads(to_json(generate("aligned", pp=2, microbatches=3)))
    assert body["orders"][0] == [1, 1, 1, -1, -1.5, -1, -1.5, -1, -1.5]
    assert set(body) == {"name", "placement", "orders", "ticks"}


def test_read_and_write_accept_a_string_path(tmp_path):
    schedule = generate("1f1b", pp=2, microbatches=2)
    write(schedule, str(tmp_path / "a.json"))
    assert same(read(str(tmp_path / "a.json")), schedule)


def test_a_huge_tick_is_refused():
    with pytest.raises(OrderError, match=r"2,147,483,648 ticks for 2 actions"):
        from_json('{"orders": [[1, -1]], "ticks": [[0, 2147483647]]}')
