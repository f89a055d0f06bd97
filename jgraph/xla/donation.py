"""Donation, proven: which argument's buffer each output of a compiled program takes.

jax drops a donation whose shape, dtype or layout does not fit, often without a warning, and pairs equal shapes in the order
they come, so the buffer of a leaf that stopped fitting goes to the next that fits. The compiled program says what happened.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from jgraph.errors import DonationError
from jgraph.xla.hlo import HloModule


@dataclass(frozen=True)
class Donation:
    """What became of a donated leaf.

    Attributes:
        leaf, array, nbytes: its path, e.g. `state['w']`, its dtype and shape, e.g. `float32[8,8]`, and its size.
        output: path of the output that lies in its buffer; empty if none does, and the donation was for nothing.
        counterpart: path of the output in its place; empty where none has its path.
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
        problem = f"{len(copied)} of {len(names)} leaves of the state are not updated in place"
        remedy = "check that shape, dtype and layout are the same in and out and that jax.jit has donate_argnums=0"
        problems.append(f"{problem}: {', '.join(names[i] for i in copied)}; {remedy}")
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
    leaves = jax.tree_util.tree_flatten_with_path(lowered.args_info)[0]
    outputs = jax.tree_util.tree_flatten_with_path(lowered.out_info)[0]
    infos, results = [info for _, info in leaves], [result for _, result in outputs]
    # An argument that the program does not use is left out of it, and has no sharding.
    used = jax.tree.leaves(jax.tree.map(lambda _, sharding: sharding is not None, lowered.args_info, compiled.input_shardings))
    positions = [i for i, is_used in enumerate(used) if is_used]
    taken = {positions[argument]: output for output, argument in alias_map(compiled).items()}
    named = ["result" + jax.tree_util.keystr(path) for path, _ in outputs]
    places = _counterparts(leaves, outputs)
    found: list[Donation] = []
    for i, (name, info) in enumerate(zip(names, infos, strict=True)):
        if not info.donated:
            continue
        place = places.get(i)
        reason = "" if i in taken else _why_dropped(i, infos, used, results, taken)
        if reason and used[i] and place is not None and _array(results[place]) != _array(info):
            reason = f"{named[place]} in its place is {_array(results[place])}"
        output, counterpart = named[taken[i]] if i in taken else "", "" if place is None else named[place]
        found.append(Donation(name, _array(info), prod(info.shape) * info.dtype.itemsize, output, counterpart, reason))
    return tuple(found)


def _counterparts(leaves: Sequence[tuple[Any, Any]], outputs: Sequence[tuple[Any, Any]]) -> dict[int, int]:
    """Maps donated leaves to the outputs in their place: of the same path in the result, or in one of the results, as in their
    argument.

    Arguments that share a path are paired with as many outputs in order; one by itself, rather with one of its shape and dtype.
    """
    places: dict[Any, list[int]] = defaultdict(list)
    for k, (path, _) in enumerate(outputs):
        for place in dict.fromkeys((path, path[1:])):
            places[place].append(k)
    donated: dict[Any, list[int]] = defaultdict(list)
    for i, (path, info) in enumerate(leaves):
        if info.donated and len(path) > 2:  # positional or keyword, which argument, and then its own path
            donated[path[2:]].append(i)
    found: dict[int, int] = {}
    for path, same in donated.items():
        if len(same) == 1:
            array = _array(leaves[same[0]][1])
            places[path].sort(key=lambda k: _array(outputs[k][1]) != array)
        if len(same) <= len(places[path]):
            found |= zip(same, places[path], strict=False)
    return found


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
