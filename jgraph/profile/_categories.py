"""Assigns each instruction of a compiled program to a category such as forward, dgrad or wgrad.

The category comes from scopes of this library (`jgraph.scope`) and of JAX (`jvp`, `transpose`, `rematted_computation`).
Collectives are recognized by opcode. Instructions that compute nothing are copies. In a backward pass without a split, a matmul
of two operands that depend on the batch is a wgrad. Names of kernels are used only where the instruction is unknown.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jax.extend.core import primitives

from jgraph.profile.program import Program
from jgraph.profile.trace import Events
from jgraph.scopes import LABEL, innermost
from jgraph.xla.hlo import COLLECTIVES, Instruction

# Primitives of JAX with another name than XLA's opcode.
_PRIMITIVES: dict[str, str] = {
    **dict.fromkeys(("psum", "psum-invariant", "pmax", "pmin"), "all-reduce"),
    "ppermute": "collective-permute",
    "all-gather-invariant": "all-gather",
    "send-recv": "collective-permute",  # NCCL
}

CATEGORIES = (
    *("forward", "dgrad", "wgrad", "recompute", "attention", "router", "dispatch", "exchange", "experts", "combine"),
    *("loss", "quantize", "optimizer"),
    *dict.fromkeys(COLLECTIVES.values()),
    *("copies", "control", "other"),
)
"""All categories, in display order."""

# Opcodes that move, name or cast values without computing any.
_MOVES = {
    *("parameter", "constant", "bitcast", "bitcast-convert", "tuple", "get-tuple-element", "iota", "broadcast", "convert"),
    *("copy", "copy-start", "copy-done", "transpose", "reshape", "reverse", "pad", "concatenate"),
    *("slice", "dynamic-slice", "dynamic-update-slice", "gather"),
}
# Categories that include such instructions.
_MOVING = frozenset(("attention", "dispatch", "exchange", "combine", "loss", "quantize", "optimizer"))
_ACTIONS = ("forward", "dgrad", "wgrad")
# Loop counters, conditions and pool slots: no part of the model.
_CONTROL = frozenset(("while", "conditional", "partition-id", "replica-id"))
_INTEGERS = frozenset(("pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64"))
# Parts of JAX's name of an operation that are not scopes of the program.
_NOT_SCOPES = {primitive.name for primitive in vars(primitives).values() if hasattr(primitive, "name")}
_NOT_SCOPES |= {"", "split", "body", "cond", "while", "closed_call", "eval_jaxpr", "shard_map"}
_NOT_SCOPES |= {"checkpoint", "rematted_computation"}


@dataclass(frozen=True)
class Purpose:
    """The purpose of an instruction."""

    category: str  # one of `CATEGORIES`
    action: str = ""  # of a pipeline: `forward`, `dgrad`, `wgrad`, or empty
    is_work: bool = False  # matmuls and attention, which dominate the time of an action


def purposes(events: Events, programs: Mapping[str, Program]) -> tuple[Purpose, ...]:
    """Returns the purpose of each event. Without a known instruction, it is the one that the names show."""
    known = {
        (module, op): purpose_of(programs[module], programs[module].instructions[op])
        for module, op in set(zip(events.module, events.op, strict=True))
        if module in programs and op in programs[module].instructions
    }
    return tuple(
        known.get((module, op)) or purpose_of_hidden(op or name, scopes)
        for module, op, name, scopes in zip(events.module, events.op, events.name, events.scopes, strict=True)
    )


def scope_of(op_name: str) -> str:
    """Returns the named scopes, such as `decoder/layer` for `jit(step)/transpose(jvp(decoder))/layer/dot_general`."""
    if not op_name.startswith(("jit(", "pjit(", "pmap(")):
        return ""
    unwrapped = re.sub(r"\w+\(|\)", "", re.sub(r"\bp?(jit|map)\([^()]*\)|\bbranch_\d+_fun\b", "", op_name.split(";")[-1]))
    path = "/".join(part for part in unwrapped.split("/") if part not in _NOT_SCOPES)
    # The backward pass of a checkpoint repeats the path.
    return re.sub(r"^(.+)/\1(?=/|$)", r"\1", path)


def purpose_of(program: Program, instruction: Instruction) -> Purpose:
    """Returns the purpose of an instruction that launches a kernel: `other` if its names have no known scope."""
    parts = list(program.inside(instruction))
    for part in parts:
        if part.collective:
            return Purpose(part.collective)
    computes = any(part.opcode not in _MOVES for part in parts if part.opcode not in ("fusion", "call", "async-start"))
    names = _names(parts) or (_inherited(program, instruction) if computes else [])
    matmul = program.matmul(instruction)
    is_work = matmul is not None or any(part.is_attention for part in parts)
    # The last operation of a fusion determines its purpose. XLA merged the earlier operations into it.
    main = next(filter(_by_scopes, (*names[:1], *names[:0:-1])), "")
    if matmul is not None:
        main = matmul.op_name or main
    action = next((action for action in map(_action, (main, *names)) if action), "")
    category = _by_scopes(main)
    if not category and (instruction.opcode in _CONTROL or all(shape.dtype in _INTEGERS for shape in instruction.shapes)):
        return Purpose("control", action)
    if not computes and category not in _MOVING:
        return Purpose("copies", action)
    if matmul is not None and category == "dgrad" and not action and program.batch_dependent.issuperset(matmul.operands[:2]):
        category = "wgrad"
    return Purpose(category or "other", action, is_work)


def purpose_of_hidden(op: str, scopes: str = "") -> Purpose:
    """Returns the purpose of an instruction that is not in the text of the program, inside an asynchronous start.

    XLA names a collective after JAX's primitive or its opcode. Other names are those of kernels or copies.
    """
    if op.startswith(("Memcpy", "Memset")):
        return Purpose("copies")
    if op.startswith("ncclDevKernel_"):  # such as ncclDevKernel_AllGather_RING_LL
        op = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", op.split("_")[1].partition("(")[0]).lower()
    stem = re.split(r"[.\d]", op.replace("_", "-"))[0].removesuffix("-start")
    category = COLLECTIVES.get(_PRIMITIVES.get(stem, stem))
    return Purpose(category) if category else Purpose(_by_scopes(scopes) or "other", _action(scopes))


def _names(parts: Iterable[Instruction]) -> list[str]:
    return [part.op_name for part in parts if part.op_name and part.opcode not in ("parameter", "constant")]


def _inherited(program: Program, instruction: Instruction) -> list[str]:
    """Returns the names of the nearest preceding instruction with a category, for an instruction that XLA added."""
    names = list(instruction.operands)
    seen: set[str] = set()
    for name in names:
        if name in program.instructions and name not in seen:
            seen.add(name)
            source = program.instructions[name]
            if found := [scopes for scopes in _names(program.inside(source)) if _by_scopes(scopes)]:
                return found
            names += source.operands
    return []


def _by_scopes(scopes: str) -> str:
    """Returns the category of the innermost scope. Empty if no scope has one."""
    found = innermost(scopes)
    return found if found in ("", *CATEGORIES) else "other"


def _action(scopes: str) -> str:
    return next((found for found in LABEL.findall(scopes) if found in _ACTIONS), "")
