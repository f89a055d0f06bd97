"""Donation, proven: which argument's buffer each output of a compiled program takes.

jax drops a donation whose shape, dtype or layout does not fit, often without a warning, and pairs equal shapes in the order
they come, so the buffer of a leaf that stopped fitting goes to the next that fits. The compiled program says what happened.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeAlias

import jax

from jgraph.errors import DonationError
from jgraph.xla.hlo import HloModule

PyTree: TypeAlias = Any


@dataclass(frozen=True)
class Donation:
    """What became of a donated leaf.

    Attributes:
        leaf, array, nbytes: its path, e.g. `state['w']`, its dtype and shape, e.g. `float32[8,8]`, and its size.
        output: path of the output that lies in its buffer; empty if none does, and the donation was for nothing.
        counterpart: path of the output in its place, where what was donated comes back in a tree of the same structure.
        reason: why no output lies in its buffer.
    """

    leaf: str
    array: str
    nbytes: int
    output: str = ""
    counterpart: str = ""
    reason: str = ""

    @property
    def dropped(self) -> bool:
        """Whether nothing lies in its buffer."""
        return not self.output

    @property
    def crosswise(self) -> bool:
        """Whether another output than its counterpart lies in its buffer, so that a loop around the program swaps buffers."""
        return bool(self.output and self.counterpart and self.output != self.counterpart)

    def __str__(self) -> str:
        if self.dropped:
            return f"{self.leaf} {self.array}: dropped, {self.reason}"
        crossed = f", crosswise: its place is {self.counterpart}" if self.crosswise else ""
        return f"{self.leaf} {self.array} -> {self.output}{crossed}"


def alias_map(compiled: jax.stages.Compiled) -> dict[int, int]:
    """Returns which output lies in the buffer of which argument, on any platform.

    From the flat index of an output leaf to that of an argument leaf; outputs in buffers of their own are absent. Arguments are
    counted as the program takes them: without `keep_unused=True` in `jax.jit`, unused ones are not among them.
    """
    text = compiled.as_text()
    assert text is not None, "XLA keeps the text of a program it has compiled"
    return HloModule(text).aliases


def check_identity(compiled: jax.stages.Compiled, state: object) -> None:
    """Proves that every leaf of the state is updated in place.

    Args:
        compiled: from a `jax.jit(f, donate_argnums=0, keep_unused=True)` whose argument 0 and output 0 are the state.
        state: a pytree of the state's structure; only its structure and names are read, so shapes will do.

    Raises:
        DonationError: some leaves get a new buffer, or the buffer of another leaf, in which case every step swaps them.
    """
    names = [jax.tree_util.keystr(path) or "the state" for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    aliases = alias_map(compiled)
    copied = [i for i in range(len(names)) if i not in aliases]
    crossed = [i for i in range(len(names)) if aliases.get(i, i) != i]
    problems: list[str] = []
    if copied:
        problems.append(
            f"{len(copied)} of {len(names)} leaves of the state are not updated in place: "
            f"{', '.join(names[i] for i in copied)}; "
            "check that shape, dtype and layout are the same in and out and that jax.jit has donate_argnums=0"
        )
    if crossed:
        owners = {i: names[k] if (k := aliases[i]) < len(names) else f"argument leaf {k}" for i in crossed}
        pairs = ", ".join(f"{names[i]} takes the buffer of {owner}" for i, owner in owners.items())
        problems.append(
            f"leaves of the state change buffers: {pairs}; check that the state is returned in the order it came in"
        )
    if problems:
        raise DonationError("; ".join(problems), leaves=tuple(names[i] for i in sorted(copied + crossed)))


def donations(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, names: Sequence[str]) -> tuple[Donation, ...]:
    """Returns every donated leaf of a program, in order, on any platform; `names` are those of all leaves of the arguments."""
    infos = jax.tree.leaves(lowered.args_info)
    # An argument that the program does not use is left out of it, and has no sharding.
    used = jax.tree.leaves(jax.tree.map(lambda _, sharding: sharding is not None, lowered.args_info, compiled.input_shardings))
    outputs = [
        ("result" + jax.tree_util.keystr(path), o) for path, o in jax.tree_util.tree_flatten_with_path(lowered.out_info)[0]
    ]
    positions = [i for i, is_used in enumerate(used) if is_used]
    taken = {positions[argument]: output for output, argument in alias_map(compiled).items()}
    places = _counterparts(lowered.args_info, lowered.out_info)
    found: list[Donation] = []
    for i, (name, info) in enumerate(zip(names, infos, strict=True)):
        if not info.donated:
            continue
        array = _array(info)
        counterpart = outputs[places[i]] if i in places else ("", None)
        reason = "" if i in taken else _why_dropped(i, infos, used, [o for _, o in outputs], taken)
        if reason and used[i] and counterpart[1] is not None and _array(counterpart[1]) != array:
            reason = f"{counterpart[0]} in its place is {_array(counterpart[1])}"
        output = outputs[taken[i]][0] if i in taken else ""
        nbytes = prod(info.shape) * info.dtype.itemsize
        found.append(Donation(name, array, nbytes, output, counterpart[0], reason))
    return tuple(found)


def _why_dropped(i: int, infos: Sequence[Any], used: Sequence[bool], outputs: Sequence[Any], taken: dict[int, int]) -> str:
    if not used[i]:
        return "the program does not use it"
    array = _array(infos[i])
    fitting = [k for k, output in enumerate(outputs) if _array(output) == array]
    if not fitting:
        return f"no output is {array}"
    if set(fitting) <= set(taken.values()):
        return f"every output that is {array} lies in another donated buffer"
    return "XLA did not take it: check that sharding and layout are the same in and out"


def _array(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


class _Part(NamedTuple):
    """A part of a tree: the number of its first leaf, how far down it is, its structure and what its leaves are."""

    first: int
    depth: int
    structure: Any
    arrays: tuple[str, ...]

    @property
    def form(self) -> Any:
        """What a part in its place has to share."""
        return (self.structure, self.arrays) if jax.tree_util.treedef_is_leaf(self.structure) else self.structure

    @property
    def leaves(self) -> range:
        return range(self.first, self.first + len(self.arrays))


def _counterparts(args_info: PyTree, out_info: PyTree) -> dict[int, int]:
    """Maps a leaf of the arguments to the leaf of the outputs in its place, for every donated argument that comes back.

    It does if a part of the outputs has its structure; those least far down count. As many parts as arguments are paired in
    order; else each argument takes the first part whose shapes and dtypes fit, or the first. A single array has no structure,
    so its shape and dtype are taken for one.
    """
    positional, keyword = args_info
    groups: dict[Any, list[_Part]] = {}
    start = 0
    for argument in (*positional, *(keyword[name] for name in sorted(keyword))):
        part = next(_parts(argument, start))
        start += len(part.arrays)
        if any(info.donated for info in jax.tree.leaves(argument)):
            groups.setdefault(part.form, []).append(part)
    parts = list(_parts(out_info))
    places: dict[int, int] = {}
    for form, arguments in groups.items():
        free = [p for p in parts if p.form == form and set(p.leaves).isdisjoint(places.values())]
        free = [p for p in free if p.depth == min(q.depth for q in free)]
        in_order = len(free) == len(arguments)
        for argument in arguments:
            if fits := sorted(free, key=lambda p: not in_order and p.arrays != argument.arrays):
                places |= zip(argument.leaves, fits[0].leaves, strict=True)
                free.remove(fits[0])
    return places


def _parts(tree: PyTree, first: int = 0, depth: int = 0) -> Iterator[_Part]:
    """Every part of a tree, the whole first."""
    leaves, structure = jax.tree.flatten(tree)
    yield _Part(first, depth, structure, tuple(map(_array, leaves)))
    for child in jax.tree.leaves(tree, is_leaf=lambda node: node is not tree):
        if child is not tree:
            yield from _parts(child, first, depth + 1)
            first += len(jax.tree.leaves(child))
