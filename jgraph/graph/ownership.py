"""Donation, proven: which argument's buffer each output of a compiled program takes.

jax drops a donation whose shape, dtype or layout does not fit, often without a warning, and pairs equal shapes in the order
they come, so the buffer of a leaf that stopped fitting goes to the next that fits. The compiled program says what happened.
"""

import re

import jax

from jgraph.errors import DonationError

_START = "input_output_alias={"
# `{output path}: (parameter, {path in the parameter}, kind)`. A path is empty, or one index a level of tuples.
_ENTRY = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}(?:, (?:may|must)-alias)?\)")


def alias_map(compiled: jax.stages.Compiled) -> dict[int, int]:
    """Which output lies in the buffer of which argument, on any platform.

    Args:
        compiled: a compiled program. Arguments are counted as it takes them: without `keep_unused=True` in `jax.jit`, unused
            ones are not among them.

    Returns:
        Flat index of the output leaf to flat index of the argument leaf; outputs in buffers of their own are absent.
    """
    text = compiled.as_text()
    assert text is not None, "XLA keeps the text of a program it has compiled"
    return _parse_aliases(text.partition("\n")[0])


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
    if not copied and not crossed:
        return
    problems: list[str] = []
    if copied:
        problems.append(
            f"{len(copied)} of {len(names)} leaves of the state are not updated in place: "
            f"{', '.join(names[i] for i in copied)}; "
            "check that shape, dtype and layout are the same in and out and that jax.jit has donate_argnums=0"
        )
    if crossed:
        owners = [names[aliases[i]] if aliases[i] < len(names) else f"argument leaf {aliases[i]}" for i in crossed]
        pairs = ", ".join(f"{names[i]} takes the buffer of {owner}" for i, owner in zip(crossed, owners, strict=True))
        problems.append(
            f"leaves of the state change buffers: {pairs}; check that the state is returned in the order it came in"
        )
    raise DonationError("; ".join(problems), leaves=tuple(names[i] for i in sorted(copied + crossed)))


def _parse_aliases(header: str) -> dict[int, int]:
    start = header.find(_START)
    if start < 0:
        return {}
    depth, end = 1, start + len(_START)
    while depth:  # the entries hold braces of their own
        depth += {"{": 1, "}": -1}.get(header[end], 0)
        end += 1
    aliases: dict[int, int] = {}
    for output, parameter, path in _ENTRY.findall(header, start + len(_START), end - 1):
        # jax hands over flat leaves, so a path has one index at most: none for a single output or a parameter by itself, and
        # one for an output among several or a parameter inside the one tuple that holds them all.
        assert "," not in output + path, f"nested tuples in {header[start:end]}"
        aliases[int(output or 0)] = int(path or parameter)
    return aliases
