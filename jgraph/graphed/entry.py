"""One callable's own executables, for calls one by one, and what a call's arguments are checked against."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import jax
from jax.core import Tracer

from jgraph.errors import CallableError
from jgraph.graphed.compile import Compiler, How, Job, Program, Task
from jgraph.graphed.shaped import Shaped, Side, shape_of
from jgraph.schedule.action import Kind


@dataclass(frozen=True, eq=False)
class Part:
    """One executable of a callable.

    Attributes:
        program: gives what the part computes; new gradients come last, and what it only hands on is not given.
        reads: which arrays the executable reads: places in (params, x, extra) of `forward`, in (params, residuals, dy) of
            `dgrad` and `backward`, in (params, residuals that wgrad needs, stash) of `wgrad`.
        updates: places of the gradients added into main_grad: argument 0 and output 0.
        new: places of the gradients that are arrays of their own.
    """

    program: Program
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


@dataclass(frozen=True)
class Wanted:
    """Parts of a callable to compile.

    Attributes:
        shaped: the callable.
        kinds: which parts.
        aliased: places of the parameters whose gradients are added into main_grad.
        keep: what forward keeps: `nothing` where no backward will come.
    """

    shaped: Shaped
    kinds: tuple[Kind, ...]
    aliased: frozenset[int]
    keep: Literal["residuals", "nothing"]


def compile_parts(wanted: Sequence[Wanted], options: Mapping[str, Any]) -> list[dict[str, Part]]:
    """Compiles parts of callables, several at a time; by kind, for each of `wanted`."""
    avals: dict[int, jax.ShapeDtypeStruct] = {}
    tasks = [_tasks(want, avals) for want in wanted]
    every = set(avals)
    names: list[tuple[int, Kind]] = [(n, kind) for n, want in enumerate(wanted) for kind in want.kinds]
    compiler = Compiler({want.shaped.index: want.shaped for want in wanted}, options)
    programs = compiler.programs([Job([tasks[n][1][kind]], every) for n, kind in names], avals)
    parts: list[dict[str, Part]] = [{} for _ in wanted]
    for (n, kind), program in zip(names, programs, strict=True):
        params, task = tasks[n][0], tasks[n][1][kind]
        place = {r: i for i, r in enumerate((*params, *task.ins))}
        updates, new = (tuple(p for p, _, how in task.grads if how == that) for that in ("add", "new"))
        parts[n][kind] = Part(program, tuple(place[r] for r in program.read), updates, new)
    return parts


def _tasks(want: Wanted, avals: dict[int, jax.ShapeDtypeStruct]) -> tuple[tuple[int, ...], dict[Kind, Task]]:
    """Registers of a callable's params, new in `avals`, and its parts as tasks."""
    part, aliased = want.shaped, want.aliased

    def registers(side_avals: Sequence[Any]) -> tuple[int, ...]:
        new = tuple(range(len(avals), len(avals) + len(side_avals)))
        avals.update(zip(new, side_avals, strict=True))
        return new

    params = registers(part.params.avals)
    inputs = registers([*part.x.avals, *part.extra.avals])
    y, residuals = registers(part.y.avals), registers(part.residuals.avals)
    dy, stash = registers(part.y.avals), registers(part.stash.avals)
    dx = registers(part.x.avals if part.takes_gradient else ())
    gradients = registers(
        [
            jax.ShapeDtypeStruct(aval.shape, "float32" if place in aliased else aval.dtype)
            for place, aval in enumerate(part.params.avals)
        ]
    )

    def read(kind: str) -> tuple[int, ...]:
        return tuple(params[place] for place in part.reads[kind])

    def grads(places: Sequence[int]) -> tuple[tuple[int, int, How], ...]:
        return tuple((place, gradients[place], "add" if place in aliased else "new") for place in places)

    made = (*y, *(r if source is None else None for r, source in zip(residuals, part.residuals_from, strict=True)))
    if want.keep == "nothing":
        made = (*y, *[None] * len(residuals))
    kept = residuals[part.num_dgrad :]
    left = (*dx, *(r if source is None else None for r, source in zip(stash, part.stash_from, strict=True)))
    late, every = grads(part.late), grads((*part.early, *part.late))
    return params, {
        "forward": Task("forward", part.index, inputs, made, read("forward")),
        "dgrad": Task("dgrad", part.index, (*residuals, *dy), left, read("dgrad"), grads(part.early)),
        "wgrad": Task("wgrad", part.index, (*kept, *stash), (), read("wgrad"), late),
        "backward": Task("backward", part.index, (*residuals, *dy), dx, read("dgrad") + read("wgrad"), every),
    }


def check_concrete(name: str, tree: Any) -> None:
    """Raises CallableError where a transformation of jax stands around the call, so that arguments are no arrays."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree)):
        raise CallableError(
            f"{name} is called inside of jax.jit, jax.grad, jax.vmap or another transformation, and is compiled already: call "
            f"it outside, its gradients come from backward; inside, call the function that it was made of"
        )


def differences(side: Side, given: Any, name: str, device: Any) -> list[str]:
    """Everything in which an argument differs from what was built: paths, shapes, dtypes, devices."""
    here = Side.of(given)
    leaves = dict(zip(here.paths, jax.tree.leaves(given), strict=True))
    wanted, found = dict(zip(side.paths, side.avals, strict=True)), dict(zip(here.paths, here.avals, strict=True))
    texts = []
    for path in dict.fromkeys((*wanted, *found)):
        where = f"{name}{path and '/' + path}"
        if path not in found:
            texts.append(f"{where} is missing")
        elif path not in wanted:
            texts.append(f"{where} is not known")
        else:
            texts += _leaf_differences(where, wanted[path], found[path], leaves[path], device)
    if not texts and here.tree != side.tree:
        texts.append(f"{name} has the structure {here.tree}, built for {side.tree}")
    return texts


def _leaf_differences(where: str, wanted: Any, found: Any, leaf: Any, device: Any) -> list[str]:
    texts = []
    if found != wanted:
        texts.append(f"{where} is {_show(found)}, built for {_show(wanted)}")
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            texts.append(f"{where} was donated or deleted by the caller")
        elif leaf.devices() != {device} and leaf.committed:
            texts.append(f"{where} is on {', '.join(map(str, sorted(leaf.devices(), key=str)))}, built for {device}")
    return texts


def _show(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"


def signature(params: Any, args: Any, kwargs: Any) -> Any:
    """What an entry is for: structures, shapes and dtypes."""
    leaves, tree = jax.tree.flatten((params, args, kwargs))
    return tree, *((aval.shape, aval.dtype) for aval in map(shape_of, leaves))
