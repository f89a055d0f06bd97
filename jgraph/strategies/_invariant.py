"""Moves values that do not depend on the microbatch out of the loop over microbatches. XLA does not."""

from collections.abc import Callable, Collection, Sequence
from typing import Literal, TypeVar

import jax
from jax.extend import core

from jgraph.autodiff import replay
from jgraph.autodiff.replay import Atom, aval_of
from jgraph.types import Tree

Once = Literal["casts", "casts and gathers"]
_Result = TypeVar("_Result")

# What lies between a parameter and its cast.
_MOVES = {"convert_element_type", "bitcast_convert_type", "reshape", "slice", "squeeze", "split", "transpose", "pvary", "pcast"}


def hoisted(once: Once, fn: Callable[..., _Result], *args: Tree) -> tuple[_Result, Callable[..., _Result]]:
    """Casts arrays that `fn` closes over to smaller dtypes, and optionally all-gathers them, now instead of in each call.

    Returns the shapes of the results, and the function for arguments with the shapes of `args`. Casts inside a scan or
    `jax.checkpoint` stay there, because these functions exist to not keep all results.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    jaxpr = closed.jaxpr
    given = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    gathers = once == "casts and gathers"
    moves = _moves(jaxpr, gathers=gathers)
    # in a fixed order
    results = dict.fromkeys(v for eqn in moves if _is_smaller(eqn) or _is_gather(eqn) for v in eqn.outvars)
    inside = _computing(jaxpr.eqns, jaxpr.outvars, results)
    read = {v for v in (*(v for eqn in inside for v in eqn.invars), *jaxpr.outvars) if not replay.is_literal(v)}
    kept = [v for v in results if v in read]
    given |= zip(kept, replay.run(_computing(moves, kept, ()), given, kept), strict=True)
    structure = jax.tree.structure(shapes)

    def call(*args: Tree) -> _Result:
        env = given | dict(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
        return structure.unflatten(replay.run(inside, env, jaxpr.outvars))

    return shapes, call


def _moves(jaxpr: core.Jaxpr, *, gathers: bool) -> list[core.JaxprEqn]:
    """Returns the equations that only move, cast or gather constants of a jaxpr."""
    moved, moves = set(jaxpr.constvars), []
    for eqn in jaxpr.eqns:
        moves_data = eqn.primitive.name in _MOVES or (gathers and _is_gather(eqn))
        if moves_data and moved.issuperset(v for v in eqn.invars if not replay.is_literal(v)):
            moved.update(eqn.outvars)
            moves.append(eqn)
    return moves


def _is_smaller(eqn: core.JaxprEqn) -> bool:
    return (
        eqn.primitive.name == "convert_element_type"
        and aval_of(eqn.outvars[0]).dtype.itemsize < aval_of(eqn.invars[0]).dtype.itemsize
    )


def _is_gather(eqn: core.JaxprEqn) -> bool:
    """True for an all-gather, also over one axis of a partitioned array."""
    return replay.runs(eqn, ("all_gather",))


def _computing(eqns: Sequence[core.JaxprEqn], wanted: Sequence[Atom], given: Collection[core.Var]) -> list[core.JaxprEqn]:
    """Returns the equations that compute the wanted values from the given ones, and those with effects."""
    live = {v for v in wanted if not replay.is_literal(v)}
    found = []
    for eqn in reversed(eqns):
        new = [v for v in eqn.outvars if v not in given]
        if not live.isdisjoint(new) or (eqn.effects and (new or not eqn.outvars)):
            live.update(v for v in eqn.invars if not replay.is_literal(v))
            found.append(eqn)
    return found[::-1]
