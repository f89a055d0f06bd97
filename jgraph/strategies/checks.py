"""Checks the arguments of a training step. Each error names the argument, its value and the allowed values."""

import functools
import inspect
import numbers
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jgraph.errors import ConfigError, ShapeError, check_choice, shown
from jgraph.layout import Description
from jgraph.mesh import Axis
from jgraph.precision.config import FP8Config
from jgraph.strategies.objective import Loss, LossFunction, LossInParts, Offload
from jgraph.tree import leaf_names, matching
from jgraph.types import Batch, Carried, Key, Leaf, Params, Reduction, Reductions, Tree

_NOT_TRAINED = "parameters must be floating; pass other arrays as `carried` state, and freeze floating arrays with `freeze`"

# --- Single values ---


def check_count(field: str, value: int) -> None:
    """Checks that an argument is a positive integer, and no bool."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"`{field}` is {_shown(value)}: must be a positive integer", field=field)


def check_split(mesh: Mesh | None, params: Description) -> None:
    """Checks that a mesh with the axis `tensor` has parameters that are split over this axis.

    Without that, functions on the shards would read parts of concatenated parameters in a wrong order.
    """
    is_split = any(param.axis_of(Axis.TENSOR) is not None for param in params.values())
    if mesh is not None and mesh.shape.get(Axis.TENSOR, 1) > 1 and not is_split:
        must = "must be wrapped in jgraph.TensorParallel, with a rule for at least one parameter"
        raise ConfigError(f"`strategy` has a mesh with the axis tensor: {must}", field="strategy")


def check_offload(offload: str, mesh: Mesh | None) -> None:
    """Checks that the step has a mesh, because only shardings on a mesh name host memory."""
    check_choice("offload", offload, get_args(Offload))
    if offload == "optimizer" and mesh is None:
        must = "must be nothing without a mesh; on one device, pass jax.make_mesh((1,), ('data',)) to the strategy"
        raise ConfigError(f"`offload` is {offload}: {must}", field="offload")


def check_clip_norm(value: float | None) -> None:
    """Checks the argument `clip_norm` of a step."""
    fits = value is None or (isinstance(value, numbers.Real) and not isinstance(value, bool) and float(value) > 0)
    if not fits:
        must = "must be a positive number, or None to not clip"
        raise ConfigError(f"`clip_norm` is {_shown(value)}: {must}", field="clip_norm")


def float_dtype(field: str, value: DTypeLike | None) -> np.dtype:
    """Converts an argument to a floating dtype of a step, which computes updates in float32. Refuses None."""
    try:
        dtype = None if value is None else jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        found = _shown(value) if dtype is None else dtype
        must = "must be float32, bfloat16 or float16, because a step updates parameters in float32"
        raise ConfigError(f"`{field}` is {found}: {must}", field=field)
    return dtype


def check_fp8(config: FP8Config | None, batch: Batch) -> None:
    """Checks the arguments `fp8` and `batch` of a step."""
    if config is not None and not isinstance(config, FP8Config):
        must = "must be a jgraph.FP8Config, or None for no matmuls in FP8"
        raise ConfigError(f"`fp8` is {_shown(config)}: {must}", field="fp8")
    if config is not None and batch is None:
        raise ConfigError("`batch` is None: must be arrays or shapes of a whole batch with `fp8`", field="batch")


def random_key(value: Key | int) -> Key:
    """Converts a seed to a key. A key of `jax.random.key`, or a uint32 vector of `jax.random.PRNGKey`, is returned itself."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
        return jax.random.key(int(value))
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    is_typed = dtype is not None and shape == () and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_typed and not (dtype == jnp.uint32 and len(shape or ()) == 1):
        raise ConfigError(f"`key` is {_shown(value)}: must be an integer seed or one key of jax.random.key", field="key")
    return value  # pyright: ignore[reportReturnType]


def strings(field: str, value: Iterable[str], *, example: str) -> tuple[str, ...]:
    """Converts a collection of strings to a tuple. `example` is a valid element, for the error."""
    found = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else None
    if found is None or not all(isinstance(each, str) for each in found):
        raise ConfigError(f"`{field}` is {_shown(value)}: must be a sequence of strings, e.g. ({example!r},)", field=field)
    return found


# --- Trees ---


def check_shapes(strategy: Any) -> None:
    """Checks the argument `strategy` of a step by its attributes `bind` and `shapes`. Does not call `bind`."""
    if not callable(getattr(strategy, "bind", None)) or not hasattr(strategy, "shapes") or isinstance(strategy, type):
        must = "must be jgraph.Replicated, jgraph.FullySharded, jgraph.Pipelined or jgraph.TensorParallel"
        raise ConfigError(f"`strategy` is {_shown(strategy)}: {must}", field="strategy")
    for name, leaf in _named(strategy.shapes):
        if not _is_array(leaf) or not jnp.issubdtype(leaf.dtype, jnp.floating):
            must = _NOT_TRAINED if _is_array(leaf) else "must have arrays or jax.ShapeDtypeStruct only"
            raise ConfigError(f"`shapes` of `strategy` has {_shown(leaf)}{at(name)}: {must}", field="strategy")


def frozen_names(patterns: Iterable[str], shapes: Params) -> set[str]:
    """Returns the names of the parameters that match the argument `freeze` of a step."""
    patterns = strings("freeze", patterns, example="embed*")
    names = leaf_names(shapes)
    frozen = {name for pattern in patterns for name in matching(pattern, names, field="freeze")}
    if patterns and len(frozen) == len(names):
        must = f"must leave at least one parameter to train, but matches all {len(names)}"
        raise ConfigError(f"`freeze` is {' '.join(map(repr, patterns))}: {must}", field="freeze")
    return frozen


def check_params(tree: Params, shapes: Params) -> None:
    """Checks that parameters have the structure and shapes of `shapes`. Their dtypes may differ."""
    check_tree("`params`", tree, shapes, like="the `shapes` of the strategy", field="params", dtypes="floating")


def check_carried(tree: Carried, shapes: Carried) -> None:
    """Checks that carried state has the structure, shapes and dtypes of the argument `carried` of `train_step`."""
    if not jax.tree.leaves(tree) and (names := leaf_names(shapes)):
        must = f"must be the initial state, because the step carries {', '.join(names)}"
        raise ShapeError(f"`carried` is {_shown(tree)}: {must}", field="carried")
    check_tree("`carried`", tree, shapes, like="the `carried` of train_step", field="carried")


def reductions_of(carried: Carried, reductions: Reductions) -> Reductions:
    """Returns a tree with the reduction of each leaf of the carried state, from such a tree or one name for all leaves."""
    for name, leaf in _named(carried):
        if not _is_array(leaf):
            must = "must have arrays or jax.ShapeDtypeStruct"
            raise ConfigError(f"`carried` has {_shown(leaf)}{at(name)}: {must}", field="carried")
    if isinstance(reductions, str):
        # The name is checked without carried state, too.
        check_choice("reductions", reductions, get_args(Reduction))
        reductions = jax.tree.map(lambda _: reductions, carried)
    if (problem := _difference("`reductions`", reductions, carried, like="`carried`")) is not None:
        raise ConfigError(problem, field="reductions")
    for (name, leaf), kind in zip(_named(carried), jax.tree.leaves(reductions), strict=True):
        check_choice("reductions", kind, get_args(Reduction))
        allowed = [each for each in get_args(Reduction) if _is_reducible(each, leaf.dtype)]
        if kind not in allowed:
            must = f"must be {' or '.join(allowed)} for this dtype; a tree like `carried` has one name for each array"
            raise ConfigError(f"`reductions` is {kind} for {_shown(leaf)}{at(name)}: {must}", field="reductions")
    return reductions


def _is_reducible(kind: Reduction, dtype: DTypeLike) -> bool:
    """True if the reduction of a dtype has this dtype. `last` accepts every dtype, random keys too."""
    kinds = {
        "mean": (jnp.inexact,),
        "sum": (jnp.number,),
        "max": (jnp.integer, jnp.floating, jnp.bool_),
        "last": (np.generic, jax.dtypes.extended),
        "halt": (jnp.integer,),
    }
    return any(jnp.issubdtype(dtype, each) for each in kinds[kind])


def check_tree(
    label: str, tree: Tree, expected: Tree, *, like: str, field: str, dtypes: Literal["equal", "floating"] = "equal"
) -> None:
    """Checks `tree`, called `label` in messages, against the shapes `expected`, called `like`."""
    if (problem := _difference(label, tree, expected, like=like)) is not None:
        raise ShapeError(problem, field=field)
    for (name, leaf), must in zip(_named(tree), jax.tree.leaves(expected), strict=True):
        shape, dtype = _shape_and_dtype(leaf)
        found = f"{label} has {_shown(leaf)}{at(name)}"
        if dtype is None:
            raise ShapeError(f"{found}: must be an array", field=field)
        if dtypes == "floating" and not jnp.issubdtype(dtype, jnp.floating):
            raise ShapeError(f"{found}: {_NOT_TRAINED}", field=field)
        if shape != tuple(must.shape) or (dtypes == "equal" and dtype != _shape_and_dtype(must)[1]):
            required = list(must.shape) if dtypes == "floating" else _shown(must)
            raise ShapeError(f"{found}: must be {required}, as in {like}", field=field)


def check_batch(batch: Batch) -> None:
    """Checks that each leaf of a batch is an array of numbers. Does not check the numbers of rows."""
    if batch is None:
        raise ShapeError("`batch` is None: must be a tree of arrays with rows as first axes", field="batch")
    for name, leaf in _named(batch):
        if _is_array(leaf) and _is_numeric(leaf.dtype):
            continue
        example = f", e.g. np.full(rows, {leaf!r})" if isinstance(leaf, numbers.Number) else ""
        tensor = ", e.g. tensor.numpy()" if hasattr(leaf, "numpy") else ""
        must = f"NumPy or JAX arrays of numbers{tensor}" if _is_array(leaf) else f"only arrays with rows as first axes{example}"
        raise ShapeError(f"`batch` has {_shown(leaf)}{at(name)}: must have {must}", field="batch")


def has_rows(leaf: Leaf, multiple: int) -> bool:
    """True for an array of numbers with a first axis that `multiple` divides."""
    return _is_array(leaf) and _is_numeric(leaf.dtype) and len(leaf.shape) > 0 and leaf.shape[0] % multiple == 0


# --- The loss ---


def check_function(loss: LossFunction | LossInParts) -> LossFunction:
    """Returns the loss if it is callable. Does not check its parameters."""
    if not callable(loss):
        raise ConfigError(f"`loss` is {_shown(loss)}: must be a function of params, batch and key", field="loss")
    return loss


def checked_loss(loss: LossFunction | LossInParts, carried: Carried) -> LossFunction | LossInParts:
    """Wraps a loss function with checks of its result. Returns an object that is not callable, such as a `PipelineModel`."""
    if not callable(loss):
        return loss
    names = ["params", "batch", "key"]
    if jax.tree.leaves(carried):
        names.append("carried")
    try:
        signature = inspect.signature(loss)
    except ValueError:  # a built-in function
        signature = None
    if signature is not None:
        try:
            signature.bind(*names)
        except TypeError:
            hint = "" if len(names) == 4 else "; to carry state, pass `carried` to train_step"
            raise ConfigError(f"`loss` takes {signature}: must take ({', '.join(names)}){hint}", field="loss") from None

    @functools.wraps(loss)
    def checked(*args: Tree) -> Array | Loss:
        found = loss(*args)
        _check_loss(found)
        after = found.carried if isinstance(found, Loss) else {}
        if not jax.tree.leaves(after) and (missing := leaf_names(carried)):
            must = f"must return jgraph.Loss(..., carried=) with {', '.join(missing)}"
            raise ShapeError(f"`loss` returns no carried state: {must}", field="loss")
        check_tree("the carried state that `loss` returns", after, carried, like="`carried`", field="loss")
        # Python numbers in the carried state become arrays.
        return replace(found, carried=jax.tree.map(jnp.asarray, after)) if isinstance(found, Loss) else found

    return checked


def _check_loss(found: Array | Loss) -> None:
    scalar, weight = (found.total, found.weight) if isinstance(found, Loss) else (found, None)
    shape, dtype = getattr(scalar, "shape", None), getattr(scalar, "dtype", None)
    if shape != () or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        description = type(scalar).__name__ if shape is None else f"{dtype}{list(shape)}"
        must = "must return a floating scalar, the mean, or jgraph.Loss(total, weight)"
        raise ShapeError(f"`loss` returns {description}: {must}", field="loss")
    if weight is not None and (shape := jnp.shape(weight)) != ():
        raise ShapeError(f"`loss` returns a weight of shape {list(shape)}: must be a scalar, the sum of weights", field="loss")


# --- Descriptions ---


def _difference(label: str, tree: Tree | Reductions, expected: Tree, *, like: str) -> str | None:
    """Returns a message about the difference of two tree structures; None if they are equal."""
    found, required = jax.tree.structure(tree), jax.tree.structure(expected)
    if found == required:
        return None
    names, expected_names = leaf_names(tree), leaf_names(expected)
    if missing := [name for name in expected_names if name not in names]:
        return f"{label} has no `{missing[0]}`: must have the leaves of {like}"
    if unknown := [name for name in names if name not in expected_names]:
        return f"{label} has `{unknown[0]}`, which is not in {like}: must have the same leaves"
    return f"{label} is {found}: must be {required}, as in {like}"


def _named(tree: Tree) -> list[tuple[str, Leaf]]:
    return list(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))


def at(name: str) -> str:
    """Returns the location of a leaf for a message, " at `w`". A tree of one leaf has the empty name."""
    return f" at `{name}`" if name else ""


def _shown(value: Any) -> str:
    """Returns one line that describes a value: the dtype and shape of an array, otherwise its `repr` or type."""
    if _is_array(value):
        shape, dtype = _shape_and_dtype(value)
        return f"{dtype}{list(shape)}"
    return shown(value)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_numeric(dtype: DTypeLike) -> bool:
    """True for the dtypes of JAX arrays, including random keys."""
    try:
        return any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_, jax.dtypes.extended))
    except TypeError:  # a dtype of another library
        return False


def _shape_and_dtype(leaf: Leaf) -> tuple[tuple[int, ...], Any]:
    """The dtype is None for objects other than arrays, shapes and numbers."""
    if _is_array(leaf):
        known = _is_numeric(leaf.dtype)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True) if known else leaf.dtype
        return tuple(leaf.shape), dtype
    return (), jnp.result_type(leaf) if isinstance(leaf, numbers.Number) else None
