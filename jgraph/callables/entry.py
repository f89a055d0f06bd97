"""One callable's own executables, for calls one by one."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jgraph.callables.compile import Executable, How, Interface, Task, compile_tasks, interface, left_by
from jgraph.callables.shaped import Shaped, Side
from jgraph.schedule.action import Kind


@dataclass(frozen=True, eq=False)
class Entry:
    """A callable's executables, by kind: `forward`, and `backward` or `dgrad` and `wgrad`.

    What one reads are places in (params, x, extra) of `forward`, in (params, residuals, dy) of `dgrad` and `backward`, in
    (params, residuals that wgrad needs, stash) of `wgrad`. It gives what the part computes, but for what that only hands on;
    new gradients come last.
    """

    shaped: Shaped
    parts: Mapping[str, Executable]

    def places(self, kind: str, how: How) -> tuple[int, ...]:
        """Returns the parameters whose gradients a part makes as `new` arrays, or is to `add` into main_grad."""
        grads = self.parts[kind].io.tasks[0].grads if kind in self.parts else ()
        return tuple(place for place, _, found in grads if found == how)


def compile_entries(
    callables: Sequence[Shaped], kinds: Sequence[Sequence[Kind]], aliased: Sequence[Collection[int]], options: Mapping[str, Any]
) -> list[Entry]:
    """Compiles for each callable the parts of these kinds, several at a time; gradients of the parameters whose places are
    `aliased` are added into main_grad."""
    names: list[tuple[int, Kind]] = [(n, kind) for n, wanted in enumerate(kinds) for kind in wanted]
    interfaces = [_interface(callables[n], kind, aliased[n], is_alone=len(kinds[n]) == 1) for n, kind in names]
    parts: list[dict[str, Executable]] = [{} for _ in callables]
    for (n, kind), executable in zip(names, compile_tasks(interfaces, callables, options), strict=True):
        parts[n][kind] = executable
    return [Entry(shaped, made) for shaped, made in zip(callables, parts, strict=True)]


def _interface(shaped: Shaped, kind: Kind, aliased: Collection[int], *, is_alone: bool) -> Interface:
    """Returns a part as a task. Its first registers are its arguments, as `Entry` counts them; all that it makes is wanted."""
    avals = list(shaped.params.avals)

    def register(aval: Any) -> int:
        avals.append(aval)
        return len(avals) - 1

    def new(*sides: Side) -> list[int]:
        return [register(aval) for side in sides for aval in side.avals]

    outs: list[int | None] = []
    places, reads = {"dgrad": shaped.early, "wgrad": shaped.late}.get(kind, ()), (kind,)
    if kind == "forward":
        ins = new(shaped.x, shaped.extra)
        # Where no backward will come, nothing is left for it.
        nothing: list[int | None] = [None] * len(shaped.residuals)
        outs += new(shaped.y)
        outs += nothing if is_alone else left_by(shaped.residuals, shaped.residuals_from, ins, register)[1]
    elif kind == "wgrad":
        ins = [*map(register, shaped.residuals.avals[shaped.num_dgrad :]), *new(shaped.stash)]
    else:
        ins = new(shaped.residuals, shaped.y)
        outs += new(shaped.x) if shaped.takes_gradient else []
        if kind == "dgrad":
            outs += left_by(shaped.stash, shaped.stash_from, ins, register)[1]
        else:
            places, reads = (*shaped.early, *shaped.late), ("dgrad", "wgrad")
    params = tuple(place for part in reads for place in shaped.reads[part])
    grads: list[tuple[int, int, How]] = []
    for place in places:
        aval, is_sum = shaped.params.avals[place], place in aliased
        gradient = register(jax.ShapeDtypeStruct(aval.shape, "float32" if is_sum else aval.dtype))
        grads.append((place, gradient, "add" if is_sum else "new"))
    return interface([Task(kind, shaped.index, tuple(ins), tuple(outs), params, tuple(grads))], avals, range(len(avals)))
