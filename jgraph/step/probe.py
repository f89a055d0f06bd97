"""Finds out whether an optax transform is elementwise, so that it may update packed, padded and stacked parameters.

Traces the transform without running it. It is elementwise if it updates each element by one rule, from the values at the same
place, for all names and shapes of the parameters.
"""

import inspect
import math
import operator
from collections.abc import Callable, Iterable
from functools import cached_property
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.extend import core
from jax.tree_util import DictKey

from jgraph.errors import ConfigError
from jgraph.layout import Description, Layout, Packing, packed
from jgraph.step._elements import Elements, Found, Value
from jgraph.step.transform import Elementwise, Transform, apply_transform, make_transform
from jgraph.tree import is_matrix, leaf_names, path_name
from jgraph.types import Avals, Mask, Params, Tree, TreeDef

Rule: TypeAlias = dict[str, str]
"""The forms of updates, moments and counters, by name."""

_DECLARED = 8
_TRACED = 16  # more than a layer of a transformer has, so that a list with a rate for each leaf is found out


class _NotElementwiseError(Exception):
    """The proof failed. Its text is the reason."""


# --- Proofs of any transform ---


def why_not_elementwise(transform: Transform, own: Layout[Params], bound: Layout[Params] | None = None) -> str:
    """Returns the reason why a transform may not update packed parameters. Empty if it is proven that it may.

    Traces the transform on parameters of the model's shapes and on packed ones. With a bound layout, on its arrays, if their
    shapes are others.
    """
    arrays = _one_of_each_shape(own.then(packed()).trained.params)
    try:
        if bound is None:
            _prove(transform, own, arrays)
        elif new := _one_of_each_shape(bound.trained.params, {aval.shape for aval in arrays.values()}):
            _rule(transform, arrays | new)
    except _NotElementwiseError as e:
        return f"the transform {e}"
    except Exception as e:  # a transform may raise any exception
        return f"the transform cannot be traced on packed parameters ({_first_line(e)})"
    return ""


def _prove(transform: Transform, own: Layout[Params], arrays: Avals) -> None:
    trained = [_float32(param.shape) for param in own.params.values() if param.is_trained]
    nameless = _Nameless(_some(trained))
    separate = _rule(transform, nameless)
    if nameless.watch.was_read:
        raise _NotElementwiseError("reads the names of parameters")
    if separate != _rule(transform, arrays):
        raise _NotElementwiseError("updates packed parameters differently")


def _one_of_each_shape(params: Description, known: Iterable[tuple[int, ...]] = ()) -> Avals:
    first = {param.shape: name for name, param in reversed([*params.items()]) if param.shape not in known}
    return {name: _float32(shape) for shape, name in first.items()}


def _some(leaves: list[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
    """Returns a leaf of each shape, and others, because all leaves of a large model would take seconds."""
    of_shapes = {leaf.shape: i for i, leaf in reversed([*enumerate(leaves)])}.values()
    distance = math.ceil(len(leaves) / max(1, _TRACED - len(of_shapes)))
    return leaves if len(leaves) <= _TRACED else [leaves[i] for i in sorted({*of_shapes, *range(0, len(leaves), distance)})]


class _Watch:
    was_read = False


@jax.tree_util.register_pytree_with_keys_class
class _Nameless(dict[str, jax.ShapeDtypeStruct]):
    """Parameters whose names a transform cannot read without being noticed. A dict, for functions that ask for the type."""

    def __init__(self, leaves: Iterable[Any], watch: _Watch | None = None):
        self.leaves, self.watch = tuple(leaves), watch or _Watch()

    def tree_flatten(self) -> tuple[tuple[Any, ...], _Watch]:
        return self.leaves, self.watch

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], _Watch]:
        self.watch.was_read |= not _is_read_by_jax(inspect.currentframe())
        return [(DictKey(str(i)), leaf) for i, leaf in enumerate(self.leaves)], self.watch

    @classmethod
    def tree_unflatten(cls, watch: _Watch, leaves: Iterable[Any]) -> "_Nameless":
        return cls(leaves, watch)

    def _refuse(self, *args: Any) -> Any:
        self.watch.was_read = True
        raise _NotElementwiseError("reads the names of parameters")

    # Methods of dict that read names.
    __iter__ = __len__ = __getitem__ = __contains__ = get = keys = values = items = _refuse  # pyright: ignore


_BETWEEN = {__file__} | {
    inspect.getfile(function) for function in (cached_property, jax.tree.map_with_path, jax.tree_util.tree_map_with_path)
}
"""Files of functions that read names for others."""


def _is_read_by_jax(frame: FrameType | None) -> bool:
    """True if JAX itself reads names: those of the arguments and results of a jitted function, for its error messages."""
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "jax"


# --- Checks of declared transforms ---


def check_elementwise(declared: Elementwise, shapes: Params) -> None:
    """Checks by traces that a transform computes the same updates for packed parameters as for separate ones."""
    sample = _sample(shapes)
    if not jax.tree.leaves(sample):
        return
    packing = Packing.of(sample, small=2**62)
    matrices = jax.tree_util.tree_map_with_path(lambda path, leaf: is_matrix(path_name(path), leaf), sample)
    mask = packing.decay_mask()
    try:
        separate = _rule(make_transform(declared, matrices), sample, matrices)
        if separate == _rule(make_transform(declared, mask), jax.eval_shape(packing.pack, sample), mask):
            return
    except ConfigError:
        raise
    except _NotElementwiseError:
        pass
    except Exception as e:  # a transform may raise any exception
        raise _not_elementwise(f"fails on parameters that share an array ({_first_line(e)})") from e
    raise _not_elementwise("computes other updates for parameters that share an array than for separate ones")


def _sample(shapes: Params) -> Params:
    """Returns the shapes of a few leaves of different names and ranks, with None in place of the other leaves."""
    leaves, structure = jax.tree.flatten(shapes)
    kinds = [(name.rpartition("/")[2], leaf.ndim) for name, leaf in zip(leaf_names(shapes), leaves, strict=True)]
    chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:_DECLARED]
    return structure.unflatten([_float32(leaf.shape) if i in chosen else None for i, leaf in enumerate(leaves)])


def _not_elementwise(problem: str) -> ConfigError:
    return ConfigError(
        f"`transform` must update each element independently, but {problem}: leave out `elementwise` or `packed`; to clip by "
        "the global norm, use `clip_norm`; to mask weight decay, pass a function of the matrices",
        field="transform",
    )


# --- The rule of a transform ---


class _Slot(NamedTuple):
    """A leaf of the optimizer state."""

    name: str  # the path of the tree that it is in
    leaf: int | None  # the parameter that it belongs to; None for a counter
    is_moment: bool


def _rule(transform: Transform, params: Params, matrices: Mask = None) -> Rule:
    """Returns the one rule by which all elements are updated; with `matrices`, one for matrices and one for vectors.

    Without `matrices`, the transform is not declared: its state may have nothing but moments and counters.
    """
    leaves, is_declared = jax.tree.leaves(params), matrices is not None
    elements = Elements(len(leaves))
    start, state = _trace(transform.init, params)
    slots = _slots(state, params)
    if not is_declared:
        _check_state(transform, state, params, slots)
    own = [frozenset({i}) for i in range(len(leaves))]
    gradients, parameters = ([Value(name, "own", leaf) for leaf in own] for name in ("gradient", "parameter"))
    initial = elements.outputs(start.jaxpr, start.consts, parameters)

    def before(slot: _Slot, value: Found) -> Found:
        if slot.is_moment and slot.leaf is not None:
            return Value(slot.name, "own", own[slot.leaf])
        return value if is_declared else Value(slot.name)

    step, (updates, after) = _trace(
        lambda grads, params, state, value: apply_transform(transform, grads, state, params, value=value),
        *(params, params, state, _float32(())),
    )
    for what, found, expected in (("updates", updates, params), ("state", after, state)):
        if jax.tree.structure(found) != jax.tree.structure(expected):
            raise ValueError(f"its {what} have the structure {jax.tree.structure(found)}, not {jax.tree.structure(expected)}")
    if not is_declared and (start.effects or step.effects):
        raise _NotElementwiseError("has side effects")
    inputs = [*gradients, *parameters, *map(before, slots, initial), Value("loss")]
    outputs = elements.outputs(step.jaxpr, step.consts, inputs)
    first = [slot._replace(name=f"initial {slot.name}") for slot in slots]
    updated = [_Slot("update", i, is_moment=False) for i in range(len(leaves))]
    return _one_rule(zip([*updated, *slots, *first], [*outputs, *initial], strict=True), jax.tree.leaves(matrices))


def _one_rule(found: Iterable[tuple[_Slot, Found]], matrices: list[bool]) -> Rule:
    """Returns the form of each name, if it is the same for all parameters."""
    rule: Rule = {}
    for slot, value in found:
        if value is None:
            raise _NotElementwiseError("mixes elements")
        if slot.leaf is None and matrices:
            continue  # the state of a declared transform may have arrays of any kind
        if value.kind not in ("uniform", "own") or value.leaves - {slot.leaf}:
            raise _NotElementwiseError("mixes elements")
        name = f"{slot.name} of a matrix" if slot.leaf is not None and matrices and matrices[slot.leaf] else slot.name
        if rule.setdefault(name, value.form) != value.form:
            raise _NotElementwiseError("updates parameters of other names or shapes differently")
    return rule


def _slots(state: Tree, params: Params) -> list[_Slot]:
    """Describes the leaves of a state. A tree of moments has the structure of the parameters."""
    leaves, structure = jax.tree.flatten(params)
    slots: list[_Slot] = []
    for path, part in jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda part: jax.tree.structure(part) == structure):
        name = jax.tree_util.keystr(path)
        if jax.tree.structure(part) == structure:
            pairs = enumerate(zip(jax.tree.leaves(part), leaves, strict=True))
            slots += [_Slot(name, i, is_moment=found.shape == leaf.shape) for i, (found, leaf) in pairs]
        else:
            slots.append(_Slot(name, None, is_moment=False))
    return slots


def _check_state(transform: Transform, state: Any, params: Params, slots: list[_Slot]) -> None:
    """Checks that a state has only moments and counters, and that optax finds the moments, to place them on devices."""
    parts = jax.tree.leaves(state, is_leaf=lambda part: isinstance(part, _Nameless))
    has_partial = any(isinstance(part, _Nameless) and jax.tree.structure(part) != jax.tree.structure(params) for part in parts)
    is_counter = [slot.leaf is None and leaf.size == 1 for slot, leaf in zip(slots, jax.tree.leaves(state), strict=True)]
    by_optax = optax.tree_map_params(transform.init, lambda leaf: True, state, transform_non_params=lambda leaf: False)
    is_moment = [slot.is_moment for slot in slots]
    if has_partial or jax.tree.leaves(by_optax) != is_moment or not all(map(operator.or_, is_moment, is_counter)):
        raise _NotElementwiseError("has state other than moments and counters")


def _trace(function: Callable[..., Tree], *args: Tree) -> tuple[core.ClosedJaxpr, Any]:
    """Returns the jaxpr and the shapes of the results. Passes leaves to JAX, which would read the names of a tree."""
    leaves, structure = jax.tree.flatten(args)
    result: list[TreeDef] = []

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        flat, found = jax.tree.flatten(function(*structure.unflatten(leaves)))
        result.append(found)
        return flat

    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    return closed, result[-1].unflatten(shapes)


def _float32(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
