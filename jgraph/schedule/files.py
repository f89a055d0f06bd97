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
    """Parses a table in PyTorch's format: a row per rank without header, and cells such as `5F3`, quoted or not, or empty."""
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
    # Columns are ticks if every action is in a later column than the actions that it depends on. Such a table has empty cells
    # for idle ticks. Otherwise a row gives only the sequence of the actions, as in the compact tables that PyTorch writes, and
    # actions get the earliest possible ticks.
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
    """Formats a schedule as JSON that `from_json` parses. Numbers of layers per chunk are not written."""
    # In a chunk that also has separate wgrads, `to_list` writes full backwards as dgrad and wgrad. This lengthens the order, so
    # ticks are then omitted, and `from_json` assigns the earliest ones.
    numbers = [order.to_list() for order in schedule.orders]
    ticks = [t.tolist() for t in schedule.ticks]
    keep = all(len(row) == len(entries) for row, entries in zip(ticks, numbers, strict=True))
    body = {"name": schedule.name, "placement": schedule.placement, "orders": numbers} | ({"ticks": ticks} if keep else {})
    body |= {"wgrads": schedule[0].wgrads} if schedule[0].wgrads != "oldest" else {}
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in body.items()) + "\n}\n"


def from_json(text: str) -> Schedule:
    """Parses a list of orders, or an object with `orders` and optionally `placement`, `ticks`, `wgrads` and `name`."""
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
    """Writes a schedule to a .json file that `read` reads. Replaces an existing file."""
    if Path(path).suffix.lower() != ".json":
        raise OrderError(f"{path}: must be a .json file")
    Path(path).write_text(to_json(schedule), encoding="utf-8")


def read(path: str | Path, *, field: str = "") -> Schedule:
    """Reads a .json file (`from_json`) or a .csv file (`from_csv`). Error messages name the caller's argument `field`."""
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
