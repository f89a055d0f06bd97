"""Proves donation: finds the output of a compiled program in the buffer of each donated argument.

JAX drops a donation if shape, dtype or layout do not match, often without a warning. It pairs equal shapes in order, so the
buffer of a leaf that no longer matches goes to the next output that does. The compiled program records the pairs.
"""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import jax

from jgraph.errors import DonationError
from jgraph.xla.hlo import HloModule

UNUSABLE = "Some donated buffers were not usable"
"""JAX's warning about dropped donations, which `donations` lists."""

_Leaf: TypeAlias = jax.ShapeDtypeStruct  # or jax.stages.ArgInfo, which also has shape and dtype


@dataclass(frozen=True)
class Donation:
    """A donated argument leaf and the output of the program that reuses its buffer. `str` formats both in one line."""

    leaf: str  # path of the argument leaf, e.g. `state['w']`
    array: str  # e.g. `float32[8,8]`
    nbytes: int  # of the whole array, counted once if it is replicated
    output: str = ""  # path of the output in the buffer, e.g. `result[0]['w']`; empty if the donation was dropped
    reason: str = ""  # why the donation was dropped

    def __str__(self) -> str:
        return f"{self.leaf} {self.array}" + (f" -> {self.output}" if self.output else f": dropped, {self.reason}")


@contextlib.contextmanager
def without_warning(message: str) -> Iterator[None]:
    """Suppresses warnings that begin with a message, inside a `with` block."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=message)
        yield


def alias_map(compiled: jax.stages.Compiled) -> dict[int, int]:
    """Maps output leaves in donated buffers to their argument leaves, as indices in the order of `jax.tree.leaves`."""
    # JAX removes unused arguments, unless `jax.jit` has `keep_unused=True`, so they are not counted.
    text = compiled.as_text()
    assert text is not None, "XLA keeps the text of compiled programs"
    return HloModule(text).aliases


def check_identity(compiled: jax.stages.Compiled, state: Any) -> None:
    """Checks that a program of `jax.jit(f, donate_argnums=0, keep_unused=True)` updates every leaf of a state in place.

    `f` returns the new state first. Only the structure of `state` is used. Raises DonationError with the paths of other leaves.
    """
    if jax.config.jax_debug_nans:  # pyright: ignore[reportAttributeAccessIssue]
        # JAX then donates nothing, so that it can run an operation again to find the NaN.
        warnings.warn("`jax_debug_nans` is set: JAX does not donate the state, and each step copies it", stacklevel=3)
        return
    names = [jax.tree_util.keystr(path) or "the state" for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    aliases = alias_map(compiled)
    copied = [i for i in range(len(names)) if i not in aliases]
    # Each call swaps these buffers.
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
            f"leaves of the state change buffers: {pairs}; check that the state is returned in the order of the input"
        )
    if problems:
        raise DonationError("; ".join(problems), leaves=tuple(names[i] for i in sorted(copied + crossed)))


def donations(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, names: Sequence[str]) -> tuple[Donation, ...]:
    """Lists the donated leaves of a program and the outputs in their buffers. `names` has all argument leaves."""
    infos = jax.tree.leaves(lowered.args_info)
    outputs = jax.tree_util.tree_flatten_with_path(lowered.out_info)[0]
    # JAX removes unused arguments from the program. They have no sharding.
    used = jax.tree.leaves(jax.tree.map(lambda _, sharding: sharding is not None, lowered.args_info, compiled.input_shardings))
    positions = [i for i, is_used in enumerate(used) if is_used]
    output_of = {positions[argument]: output for output, argument in alias_map(compiled).items()}
    found: list[Donation] = []
    for i, (name, info) in enumerate(zip(names, infos, strict=True)):
        if info.donated:
            is_reused = i in output_of
            output = "result" + jax.tree_util.keystr(outputs[output_of[i]][0]) if is_reused else ""
            reason = "" if is_reused else _why_dropped(i, infos, used, [result for _, result in outputs], output_of)
            found.append(Donation(name, _array(info), prod(info.shape) * info.dtype.itemsize, output, reason))
    return tuple(found)


def _why_dropped(
    i: int, infos: Sequence[_Leaf], used: Sequence[bool], outputs: Sequence[_Leaf], output_of: dict[int, int]
) -> str:
    if not used[i]:
        return "the program does not use it"
    array = _array(infos[i])
    fitting = [k for k, output in enumerate(outputs) if _array(output) == array]
    if not fitting:
        return f"no output is {array}"
    if set(fitting) <= set(output_of.values()):
        return f"every output that is {array} uses another donated buffer"
    return "XLA did not reuse it: check that sharding and layout are the same in and out"


def _array(leaf: _Leaf) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
