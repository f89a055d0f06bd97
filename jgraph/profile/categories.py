"""What an instruction of a compiled program was for: forward, dgrad, wgrad and so on, from the scopes it was traced in.

The scopes are the library's own (`jgraph.scope`) and jax's (`jvp`, `transpose`, `rematted_computation`); collectives are told
by their opcode, copies by computing nothing. In a backward pass that nobody split, a product whose factors both depend on the
batch makes a weight's gradient. A kernel's name is never looked at.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from jgraph.profile.program import Program
from jgraph.profile.trace import Events
from jgraph.scopes import PREFIX
from jgraph.xla.hlo import Instruction

COLLECTIVES: dict[str, str] = {
    **{name: name for name in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")},
    "ragged-all-to-all": "all-to-all",
    "collective-broadcast": "all-gather",
    **dict.fromkeys(("collective-permute", "send", "recv"), "transfer"),
}
"""Categories by opcode, without `-start` and `-done`."""

# jax's primitives that have another name than XLA's opcode.
_PRIMITIVES: dict[str, str] = {
    **dict.fromkeys(("psum", "psum-invariant", "pmax", "pmin"), "all-reduce"),
    "ppermute": "collective-permute",
    "all-gather-invariant": "all-gather",
}

CATEGORIES = (
    *("forward", "dgrad", "wgrad", "recompute", "attention", "router", "dispatch", "exchange", "experts", "combine"),
    *("loss", "quantize", "optimizer"),
    *dict.fromkeys(COLLECTIVES.values()),
    *("copies", "control", "other"),
)
"""All categories, in the order in which they are shown."""

# Of these, what only moves is work too.
_MOVING = frozenset(("attention", "dispatch", "exchange", "combine", "loss", "quantize", "optimizer"))
_ACTIONS = ("forward", "dgrad", "wgrad")
# Counters of loops, conditions, places in pools: nothing that a model computes.
_CONTROL = frozenset(("while", "conditional", "partition-id", "replica-id"))
_INTEGERS = frozenset(("pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64"))
_SCOPE = re.compile(re.escape(PREFIX) + r"(\w+)")


@dataclass(frozen=True)
class Purpose:
    """What an instruction was for: one of `CATEGORIES`, and the action of a pipeline that it is part of, or "".

    Those that `works` marks are matrix products and attention, which make up an action's time.
    """

    category: str
    action: str = ""
    works: bool = False


OTHER = Purpose("other")


def purposes(events: Events, program: Program | None) -> tuple[Purpose, ...]:
    """Returns what each event was for; without the program, by what the trace says of scopes."""
    if program is None:
        return tuple(purpose_of_hidden("", scopes) for scopes in events.scopes)
    known = {op: purpose_of(program, program.instructions[op]) for op in set(events.op) if op in program.instructions}
    rows = zip(events.module, events.op, events.scopes, strict=True)
    return tuple(OTHER if m != program.name else known.get(op) or purpose_of_hidden(op, scopes) for m, op, scopes in rows)


def purpose_of(program: Program, instruction: Instruction) -> Purpose:
    """Returns what an instruction was for that a kernel was launched for."""
    parts = list(program.inside(instruction))
    for part in parts:
        if collective := COLLECTIVES.get(re.sub(r"-(start|done|update)$", "", part.opcode)):
            return Purpose(collective)
    computes = any(not part.only_moves for part in parts if part.opcode not in ("fusion", "call", "async-start"))
    named = _names(parts) or (_inherited(program, instruction) if computes else [])
    product = program.product(instruction)
    works = product is not None or any(part.is_attention for part in parts)
    # Of a fusion the last operation is what it was made for; what comes before it was drawn in.
    meant = next(filter(_by_scopes, (*named[:1], *named[:0:-1])), "")
    if product is not None:
        meant = product.op_name or meant
    action = next((action for action in map(_action, (meant, *named)) if action), "")
    category = _by_scopes(meant)
    if not category and (instruction.opcode in _CONTROL or all(shape.dtype in _INTEGERS for shape in instruction.shapes)):
        return Purpose("control", action)
    if not computes and category not in _MOVING:
        return Purpose("copies", action)
    if product is not None and category == "dgrad" and not action:
        factors = product.operands[:2]
        category = "wgrad" if all(name in program.of_batch for name in factors) else category
    return Purpose(category or "other", action, works)


def purpose_of_hidden(op: str, scopes: str = "") -> Purpose:
    """Returns the purpose of an instruction that no text of the program shows, by its name and jax's name of the operation.

    Such are all where the program is not at hand, when a joint backward is all dgrad, and those within the start of an
    asynchronous one. XLA names instructions after jax's primitives: a collective's name begins with its primitive or opcode.
    """
    stem = re.split(r"[.\d]", op.replace("_", "-"))[0].removesuffix("-start")
    category = COLLECTIVES.get(_PRIMITIVES.get(stem, stem))
    return Purpose(category) if category else Purpose(_by_scopes(scopes) or "other", _action(scopes))


def _names(parts: Iterable[Instruction]) -> list[str]:
    return [part.op_name for part in parts if part.op_name and part.opcode not in ("parameter", "constant")]


def _inherited(program: Program, instruction: Instruction) -> list[str]:
    """Returns names of the nearest instruction before this one that has any: what XLA made by itself, it made of that."""
    home = program.home[instruction.name].instructions
    names, seen = list(instruction.operands), set[str]()
    for name in names:
        if name in home and name not in seen:
            seen.add(name)
            if found := [scopes for scopes in _names(program.inside(home[name])) if _by_scopes(scopes)]:
                return found
            names += home[name].operands
    return []


def _by_scopes(scopes: str) -> str:
    """Returns the category that a name tells, the innermost first; empty where it tells none."""
    scopes = scopes.split(";")[-1]
    if "rematted_computation" in scopes:
        return "recompute"
    if "dot_product_attention" in scopes:
        return "attention"
    if found := _SCOPE.findall(scopes):
        return found[-1] if found[-1] in CATEGORIES else "other"
    if "transpose(" in scopes:
        return "dgrad"
    return "forward" if "jvp(" in scopes else ""


def _action(scopes: str) -> str:
    return next((found for found in _SCOPE.findall(scopes) if found in _ACTIONS), "")
