"""One callable's own executables, for calls one by one."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jgraph.graphed.compile import Executable, How, Task, TaskGroup, compile_groups
from jgraph.graphed.shaped import Shaped
from jgraph.schedule.action import Kind


@dataclass(frozen=True, eq=False)
class Part:
    """One executable of a callable.

    Attributes:
        executable: gives what the part computes; new gradients come last, and what it only hands on is not given.
        reads: which arrays the executable reads: places in (params, x, extra) of `forward`, in (params, residuals, dy) of
            `dgrad` and `backward`, in (params, residuals that wgrad needs, stash) of `wgrad`.
        updates: places of the gradients added into main_grad: argument 0 and output 0.
        new: places of the gradients that are arrays of their own.
    """

    executable: Executable
    reads: tuple[int, ...]
    updates: tuple[int, ...]
    new: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Entry:
    """A callable's executables for one set of shapes, by kind: `forward`, and `backward` or `dgrad` and `wgrad`."""

    shaped: Shaped
    parts: Mapping[str, Part]

    @cached_property
    def aliased(self) -> frozenset[int]:
        """Places of the gradients that lie in main_grad."""
        return frozenset(place for part in self.parts.values() for place in part.updates)


def compile_entries(
    callables: Sequence[Shaped], kinds: Sequence[Sequence[Kind]], aliased: Sequence[Collection[int]], options: Mapping[str, Any]
) -> list[Entry]:
    """Compiles parts of callables, several at a time.

    Args:
        callables: in any order.
        kinds: which parts, for each callable.
        aliased: places of the parameters whose gradients are added into main_grad, for each callable.
        options: for XLA.
    """
    avals: dict[int, jax.ShapeDtypeStruct] = {}
    tasks = [_tasks(*one, avals) for one in zip(callables, kinds, aliased, strict=True)]
    every = set(avals)
    names: list[tuple[int, Kind]] = [(n, kind) for n, wanted in enumerate(kinds) for kind in wanted]
    groups = [TaskGroup([tasks[n][1][kind]], every) for n, kind in names]
    executables = compile_groups(groups, callables, avals, options)
    parts: list[dict[str, Part]] = [{} for _ in callables]
    for (n, kind), executable in zip(names, executables, strict=True):
        params, task = tasks[n][0], tasks[n][1][kind]
        place = {r: i for i, r in enumerate((*params, *task.ins))}
        updates, new = (tuple(p for p, _, how in task.grads if how == that) for that in ("add", "new"))
        parts[n][kind] = Part(executable, tuple(place[r] for r in executable.io.read), updates, new)
    return [Entry(shaped, made) for shaped, made in zip(callables, parts, strict=True)]


def _tasks(
    shaped: Shaped, kinds: Sequence[Kind], aliased: Collection[int], avals: dict[int, jax.ShapeDtypeStruct]
) -> tuple[tuple[int, ...], dict[Kind, Task]]:
    """Returns the registers of a callable's params, new in `avals`, and its parts as tasks."""

    def registers(side_avals: Sequence[Any]) -> tuple[int, ...]:
        new = tuple(range(len(avals), len(avals) + len(side_avals)))
        avals.update(zip(new, side_avals, strict=True))
        return new

    params = registers(shaped.params.avals)
    inputs = registers([*shaped.x.avals, *shaped.extra.avals])
    y, residuals = registers(shaped.y.avals), registers(shaped.residuals.avals)
    dy, stash = registers(shaped.y.avals), registers(shaped.stash.avals)
    dx = registers(shaped.x.avals if shaped.takes_gradient else ())
    gradients = registers(
        [
            jax.ShapeDtypeStruct(aval.shape, "float32" if place in aliased else aval.dtype)
            for place, aval in enumerate(shaped.params.avals)
        ]
    )

    def read(kind: str) -> tuple[int, ...]:
        return tuple(params[place] for place in shaped.reads[kind])

    def grads(places: Sequence[int]) -> tuple[tuple[int, int, How], ...]:
        return tuple((place, gradients[place], "add" if place in aliased else "new") for place in places)

    made = (*y, *(r if source is None else None for r, source in zip(residuals, shaped.residuals_from, strict=True)))
    if list(kinds) == ["forward"]:  # no backward will come
        made = (*y, *[None] * len(residuals))
    kept = residuals[shaped.num_dgrad :]
    left = (*dx, *(r if source is None else None for r, source in zip(stash, shaped.stash_from, strict=True)))
    late, every = grads(shaped.late), grads((*shaped.early, *shaped.late))
    return params, {
        "forward": Task("forward", shaped.index, inputs, made, read("forward")),
        "dgrad": Task("dgrad", shaped.index, (*residuals, *dy), left, read("dgrad"), grads(shaped.early)),
        "wgrad": Task("wgrad", shaped.index, (*kept, *stash), (), read("wgrad"), late),
        "backward": Task("backward", shaped.index, (*residuals, *dy), dx, read("dgrad") + read("wgrad"), every),
    }
