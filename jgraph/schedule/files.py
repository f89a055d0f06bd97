"""Reads schedules from PyTorch's CSV (a row per rank, a cell per tick). Reads and writes JSON with signed numbers."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from jgraph.errors import ConfigError, OrderError
from jgraph.schedule.action import parse_cell
from jgraph.schedule.order import Order
from jgraph.schedule.schedule import Schedule


def from_csv(text: str) -> Schedule:
    """Parses a CSV table in PyTorch's format.

    Columns are ticks if every action is in a later column than the actions that it depends on. Such a table has empty cells for
    idle ticks. Otherwise a row gives only the sequence of the actions, as in the compact tables that PyTorch writes, and
    actions get the earliest possible ticks.

    Args:
        text: The content of a file: one row per rank, without a header, and one cell such as `5F3` per action, with or without
            quotes. A cell has the stage, one of the letters F (forward), I (dgrad), W (wgrad) and B (full backward), and the
            microbatch. Empty cells are idle.

    Returns:
        The schedule, with the stages of the cells as its placement and the name `custom`.

    Raises:
        OrderError: If the text is empty, a row has no action, a cell has another form, or the schedule cannot run. The
            attribute `rank` of the error is the row, and `position` the index among the non-empty cells of this row.
    """
    orders, placement, ticks = [], [], []
    for r, row in enumerate(text.splitlines()):
        cells: list[tuple[int, int, int, int]] = []
        for column, value in enumerate(row.split(",")):
            if cell := value.strip().strip('"'):
                try:
                    cells.append((column, *parse_cell(cell)))
                except OrderError as error:
                    raise OrderError.of_rank(r, f", cell {column}: {error}", len(cells)) from None
        if not cells:
            raise OrderError.of_rank(r, " has no action; write one row with at least one action per rank")
        columns, kinds, stage, microbatches = np.array(cells).T
        stages = np.unique(stage)
        try:
            orders.append(_order(kinds, np.searchsorted(stages, stage), microbatches))
        except OrderError as error:
            raise OrderError.of_rank(r, f", {error}", error.position) from None
        placement.append(tuple(stages.tolist()))
        ticks.append(columns)
    if not orders:
        raise OrderError("the table is empty; write one row per rank")
    try:
        return Schedule(tuple(orders), tuple(placement), tuple(ticks))
    except OrderError:
        return Schedule(tuple(orders), tuple(placement))


def _order(kinds: np.ndarray, chunks: np.ndarray, microbatches: np.ndarray) -> Order:
    """Returns the order with the given microbatches, int [N]. Raises OrderError if no value of `wgrads` yields them."""
    order = Order(kinds, chunks)
    if (order.microbatches != microbatches).any():
        newest = replace(order, wgrads="newest")
        if (newest.microbatches == microbatches).all():
            return newest
        position = int(np.argmax(order.microbatches != microbatches))
        action = replace(order[position], microbatch=int(microbatches[position]))
        expected = f"microbatch {order.microbatches[position]}"
        raise OrderError.at(position, f"the {action}; microbatches go first in, first out, so this must be {expected}")
    return order


def to_json(schedule: Schedule) -> str:
    """Formats a schedule as JSON that `from_json` parses.

    Args:
        schedule: The schedule. Numbers of layers per chunk are not written.

    Returns:
        The text of a JSON object, with one key per line. The keys are `name`, `placement` (for each rank the list of its
        stages, 0-based), `orders` (for each rank a list of signed numbers: for the 1-based chunk c, c is its forward, -c its
        dgrad or full backward, and -c-0.5 its wgrad) and `ticks` (for each rank the list of the ticks of its actions). The key
        `wgrads` is added if the wgrads of the orders do not follow the rule `oldest`. In a chunk that also has separate wgrads,
        full backwards are written as dgrad and wgrad. This lengthens the order, so `ticks` is then omitted, and `from_json`
        assigns the earliest ticks.
    """
    numbers = [order.to_list() for order in schedule.orders]
    ticks = [t.tolist() for t in schedule.ticks]
    keep = all(len(row) == len(entries) for row, entries in zip(ticks, numbers, strict=True))
    body = {"name": schedule.name, "placement": schedule.placement, "orders": numbers} | ({"ticks": ticks} if keep else {})
    body |= {"wgrads": schedule[0].wgrads} if schedule[0].wgrads != "oldest" else {}
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in body.items()) + "\n}\n"


def from_json(text: str) -> Schedule:
    """Parses a schedule from JSON.

    Args:
        text: A JSON list of orders, one per rank, or a JSON object with the key `orders` and optionally `placement` (for each
            rank the list of its stages, 0-based), `ticks` (for each rank the list of the ticks of its actions), `wgrads`
            (`oldest` or `newest`, as in `Order`) and `name`. An order is a list of signed numbers: for the 1-based chunk c, c
            is its forward, -c its dgrad or full backward, and -c-0.5 its wgrad.

    Returns:
        The schedule. Without `placement`, chunk c of rank r is stage c * P + r for P ranks, all 0-based. Without `ticks`,
        actions get the earliest possible ticks. Without `wgrads`, it is `oldest`. Without `name`, it is `custom`.

    Raises:
        OrderError: If the text is not JSON of this form, has an unknown key, or the schedule cannot run. The attributes `rank`
            and `position` of the error locate the entry in the orders.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OrderError(f"this is not JSON: {error}") from None
    if isinstance(body, list):
        body = {"orders": body}
    if not isinstance(body, dict) or not isinstance(body.get("orders"), list):
        raise OrderError('a schedule must be {"orders": [[1, -1], ...]} with one list of signed numbers per rank')
    unknown = sorted(set(body) - {"name", "placement", "orders", "ticks", "wgrads"})
    if unknown:
        raise OrderError(f"a schedule has no field {unknown[0]!r}; the fields are orders, placement, ticks, wgrads and name")
    orders = []
    for r, numbers in enumerate(body["orders"]):
        try:
            order = Order.parse(numbers)
            orders.append(replace(order, wgrads=body.get("wgrads", "oldest")))
        except ConfigError as error:
            raise OrderError(str(error), rank=r, field=error.field) from None
        except OrderError as error:
            raise OrderError.of_rank(r, f", {error}", error.position) from None
    rows = {}
    for name in ("placement", "ticks"):
        value = body.get(name, [])
        if not isinstance(value, list) or not all(
            isinstance(row, list) and all(type(item) is int and 0 <= item < 2**31 for item in row) for row in value
        ):
            raise OrderError(f"{name} must be one list of integers >= 0 per rank")
        rows[name] = value
    placement = tuple(tuple(row) for row in rows["placement"])
    ticks = tuple(np.array(row, np.int64) for row in rows["ticks"])
    return Schedule(tuple(orders), placement, ticks, str(body.get("name", "custom")))


def write(schedule: Schedule, path: str | Path) -> None:
    """Writes a schedule to a JSON file that `read` reads. Replaces an existing file.

    Args:
        schedule: The schedule. Numbers of layers per chunk are not written.
        path: Path of the file, with the suffix `.json`. The folder must exist.

    Raises:
        OrderError: If the path has another suffix.
        OSError: If the file cannot be written.
    """
    if Path(path).suffix.lower() != ".json":
        raise OrderError(f"{path}: must be a .json file")
    Path(path).write_text(to_json(schedule), encoding="utf-8")


def read(path: str | Path, *, field: str = "") -> Schedule:
    """Reads a schedule file.

    Args:
        path: Path of a .json file with the content that `from_json` describes, or of a .csv file with the content that
            `from_csv` describes: one row per rank and cells such as `5F3`.
        field: Name of the argument through which the user gave the path. Error messages contain it. Empty for none.

    Returns:
        The schedule.

    Raises:
        OrderError: If the path has another suffix, the file cannot be read, its content has another form, or its schedule
            cannot run. If a single entry of the file is wrong, the attributes `rank` and `position` of the error locate it;
            else they are None.
    """
    path = Path(path)
    named = f"`{field}` is {path}" if field else str(path)
    parsers = {".csv": from_csv, ".json": from_json}
    if path.suffix.lower() not in parsers:
        raise OrderError(f"{named}: must be a .csv or .json file")
    try:
        return parsers[path.suffix.lower()](path.read_text(encoding="utf-8"))
    except OrderError as error:
        raise OrderError(f"{named}: {error}", position=error.position, rank=error.rank, field=field) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OrderError(f"{named}: cannot be read as a schedule ({reason})", field=field) from None
