"""Checks the arguments of a training step. Each error names the argument, its value and the allowed values."""

import functools
import inspect
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jgraph.errors import ConfigError, ShapeError, check_choice
from jgraph.precision.config import FP8Config
from jgraph.strategies.objective import Loss, Reduction, check_loss
from jgraph.tree import leaf_names

Tree = Any


# --- Single values ---


def check_count(field: str, value: Any) -> None:
    """Raises ConfigError unless `value` is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"`{field}` is {_told(value)}: must be a positive integer", field=field)


def check_clip_norm(value: Any) -> None:
    """Raises ConfigError unless `value` is a positive number or None."""
    if value is None or (isinstance(value, numbers.Real) and not isinstance(value, bool) and float(value) > 0):
        return
    raise ConfigError(f"`clip_norm` is {_told(value)}: must be a positive number, or None for no clipping", field="clip_norm")


def float_dtype(field: str, value: Any) -> Any:
    """Returns `value` as a dtype. Raises ConfigError unless it is a floating one."""
    try:
        dtype = None if value is None else jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ConfigError(f"`{field}` is {_told(value)}: must be a floating dtype, e.g. jnp.float32", field=field)
    return dtype


def check_fp8(config: Any, batch: Any) -> None:
    """Raises ConfigError unless `config` is None, or a recipe and `batch` is given."""
    if config is None:
        return
    if not isinstance(config, FP8Config):
        raise ConfigError(f"`fp8` is {config!r}: must be a jgraph.FP8Config, or None for no matmuls in FP8", field="fp8")
    if batch is None:
        raise ConfigError("`batch` is None: must be arrays or shapes of a whole batch with `fp8`", field="batch")


def random_key(value: Any) -> Array:
    """Returns a random key from a key or a seed. Raises ConfigError for anything else."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
        return jax.random.key(int(value))
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    is_typed = dtype is not None and shape == () and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_typed and not (dtype == jnp.uint32 and len(shape or ()) == 1):
        raise ConfigError(f"`key` is {_told(value)}: must be an integer seed or one key of jax.random.key", field="key")
    return value  # pyright: ignore[reportReturnType]


def strings(field: str, value: Any, *, example: str) -> tuple[str, ...]:
    """Returns a collection of strings as a tuple. Raises ConfigError for a single string and anything else."""
    found = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else None
    if found is None or not all(isinstance(each, str) for each in found):
        raise ConfigError(f"`{field}` is {_told(value)}: must be a sequence of strings, e.g. ({example!r},)", field=field)
    return found


# --- Trees ---


def check_shapes(strategy: Any) -> None:
    """Raises ConfigError unless `strategy` has parameters, and all are floating arrays or shapes."""
    if not callable(getattr(strategy, "bind", None)) or not hasattr(strategy, "shapes") or isinstance(strategy, type):
        raise ConfigError(
            f"`strategy` is {_told(strategy)}: must be jgraph.Replicated, jgraph.FullySharded or jgraph.Pipelined",
            field="strategy",
        )
    for name, leaf in _named(strategy.shapes):
        if not _is_array(leaf):
            raise ConfigError(
                f"`shapes` of `strategy` has {_told(leaf)}{at(name)}: must have arrays or jax.ShapeDtypeStruct only",
                field="strategy",
            )
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ConfigError(f"`shapes` of `strategy` has {_described(leaf)}{at(name)}: {_NOT_TRAINED}", field="strategy")


_NOT_TRAINED = (
    "parameters must be floating; pass other arrays as `carried` state, and keep floating ones that are not trained by `freeze`"
)


def check_params(tree: Tree, shapes: Tree) -> None:
    """Raises ShapeError unless parameters are floating arrays with the structure and the shapes of the strategy."""
    check_tree("`params`", tree, shapes, like="the `shapes` of the strategy", field="params", dtypes="floating")


def check_carried(tree: Tree, shapes: Tree) -> None:
    """Raises ShapeError unless carried state has the structure, shapes and dtypes that `train_step` was given."""
    if not jax.tree.leaves(tree) and (names := leaf_names(shapes)):
        raise ShapeError(
            f"`carried` is {tree!r}: must be the state to start from, since the step carries {', '.join(names)}",
            field="carried",
        )
    check_tree("`carried`", tree, shapes, like="the `carried` of train_step", field="carried", dtypes="equal")


def reductions_of(carried: Tree, reductions: Tree) -> Tree:
    """Returns one reduction for each leaf of the carried state.

    Args:
        carried: Arrays or shapes.
        reductions: A name for all leaves, or a tree of names like `carried`.

    Raises:
        ConfigError: If `carried` has other leaves, a name is unknown, the trees differ, or a leaf that halts is no integer.
    """
    for name, leaf in _named(carried):
        if not _is_array(leaf):
            raise ConfigError(
                f"`carried` has {_told(leaf)}{at(name)}: must have arrays or jax.ShapeDtypeStruct", field="carried"
            )
    if isinstance(reductions, str):
        check_choice("reductions", reductions, get_args(Reduction))
        reductions = jax.tree.map(lambda _: reductions, carried)
    if (problem := _difference("`reductions`", reductions, carried, like="`carried`")) is not None:
        raise ConfigError(problem, field="reductions")
    for (name, leaf), kind in zip(_named(carried), jax.tree.leaves(reductions), strict=True):
        check_choice("reductions", kind, get_args(Reduction))
        if kind == "halt" and not jnp.issubdtype(leaf.dtype, jnp.integer):
            raise ConfigError(f"`reductions` is halt for {_described(leaf)}{at(name)}: must be integers", field="reductions")
    return reductions


def check_tree(what: str, tree: Tree, expected: Tree, *, like: str, field: str, dtypes: Literal["equal", "floating"]) -> None:
    """Checks a tree of arrays against a tree of shapes.

    Args:
        what: Name of the tree in messages.
        tree: Arrays, shapes or Python numbers.
        expected: Shapes.
        like: Name of `expected` in messages.
        field: The argument at fault.
        dtypes: Whether dtypes must be `equal` to the expected ones or any `floating` ones.

    Raises:
        ShapeError: If the structure, a shape or a dtype differs. The message has the path of the leaf.
    """
    if (problem := _difference(what, tree, expected, like=like)) is not None:
        raise ShapeError(problem, field=field)
    for (name, leaf), must in zip(_named(tree), jax.tree.leaves(expected), strict=True):
        shape, dtype = _shape_and_dtype(leaf)
        if dtype is None:
            raise ShapeError(f"{what} has {_told(leaf)}{at(name)}: must be an array", field=field)
        if dtypes == "floating" and not jnp.issubdtype(dtype, jnp.floating):
            raise ShapeError(f"{what} has {_described(leaf)}{at(name)}: {_NOT_TRAINED}", field=field)
        if shape != tuple(must.shape) or (dtypes == "equal" and dtype != _shape_and_dtype(must)[1]):
            wanted = list(must.shape) if dtypes == "floating" else _described(must)
            raise ShapeError(f"{what} has {_described(leaf)}{at(name)}: must be {wanted}, as in {like}", field=field)


def check_batch(batch: Tree) -> None:
    """Raises ShapeError unless a batch is a tree of arrays or shapes."""
    if batch is None:
        raise ShapeError("`batch` is None: must be a tree of arrays with rows as first axes", field="batch")
    for name, leaf in _named(batch):
        if not _is_array(leaf):
            example = f", e.g. np.full(rows, {leaf!r})" if isinstance(leaf, numbers.Number) else ""
            raise ShapeError(
                f"`batch` has {_told(leaf)}{at(name)}: must have only arrays with rows as first axes{example}", field="batch"
            )
        if not _is_numeric(leaf.dtype):
            raise ShapeError(
                f"`batch` has an array of {leaf.dtype}{at(name)}: must have NumPy or JAX arrays of numbers", field="batch"
            )


# --- The loss ---


def check_function(loss: Any) -> None:
    """Raises ConfigError unless `loss` is a function."""
    if not callable(loss):
        raise ConfigError(f"`loss` is {_told(loss)}: must be a function of params, batch and key", field="loss")


def checked_loss(loss: Any, carried: Tree) -> Any:
    """Adds checks of the result to a loss function. Other objects pass unchanged.

    Args:
        loss: `loss(params, batch, key)`, or `loss(params, batch, key, carried)` if anything is carried.
        carried: Shapes of the carried state.

    Raises:
        ConfigError: If the function does not take these arguments.
        ShapeError: By the returned function, if the loss is no scalar or `Loss`, or its carried state differs from `carried` in
            structure, shapes or dtypes.
    """
    if not callable(loss):
        return loss
    names = ("params", "batch", "key", *["carried"] * bool(jax.tree.leaves(carried)))
    try:
        signature = inspect.signature(loss)
    except ValueError:  # a built-in function
        signature = None
    if signature is not None and not _binds(signature, names):
        hint = "" if len(names) == 4 else "; to carry state, pass `carried` to train_step"
        raise ConfigError(f"`loss` takes {signature}: must take ({', '.join(names)}){hint}", field="loss")

    @functools.wraps(loss)
    def checked(*args: Any) -> Any:
        found = loss(*args)
        check_loss(found)
        after = found.carried if isinstance(found, Loss) else {}
        if not jax.tree.leaves(after) and jax.tree.leaves(carried):
            kept = ", ".join(leaf_names(carried))
            raise ShapeError(
                f"`loss` returns no carried state: must return jgraph.Loss(..., carried=) with {kept}", field="loss"
            )
        check_tree("the carried state that `loss` returns", after, carried, like="`carried`", field="loss", dtypes="equal")
        return replace(found, carried=jax.tree.map(jnp.asarray, after)) if isinstance(found, Loss) else found

    return checked


def _binds(signature: inspect.Signature, names: Sequence[str]) -> bool:
    """True if a function with this signature takes these names as positional arguments."""
    try:
        signature.bind(*names)
    except TypeError:
        return False
    return True


# --- Descriptions ---


def _difference(what: str, tree: Tree, expected: Tree, *, like: str) -> str | None:
    """Returns a message on how the structures of two trees differ; None if they are equal."""
    if jax.tree.structure(tree) == jax.tree.structure(expected):
        return None
    names, wanted = leaf_names(tree), leaf_names(expected)
    for name in wanted:
        if name not in names:
            return f"{what} has no `{name}`: must have the leaves of {like}"
    for name in names:
        if name not in wanted:
            return f"{what} has `{name}`, which is not in {like}: must have the same leaves"
    return f"{what} is {jax.tree.structure(tree)}: must be {jax.tree.structure(expected)}, as in {like}"


def _named(tree: Tree) -> list[tuple[str, Any]]:
    return list(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))


def at(name: str) -> str:
    """Returns the place of a leaf for a message; nothing for a tree that is one leaf."""
    return f" at `{name}`" if name else ""


def _told(value: Any) -> str:
    """Returns a value in one short line."""
    if _is_array(value):
        return _described(value)
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"of type {type(value).__name__}"


def _is_array(leaf: Any) -> bool:
    """True for arrays and shapes."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _is_numeric(dtype: Any) -> bool:
    """True for the dtypes of JAX arrays, random keys included."""
    try:
        return any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_, jax.dtypes.extended))
    except TypeError:  # another library's
        return False


def _shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the shape and the dtype of an array or a number; None as dtype for anything else."""
    if _is_array(leaf):
        return tuple(leaf.shape), jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    return (), jnp.result_type(leaf) if isinstance(leaf, numbers.Number) else None


def _described(leaf: Any) -> str:
    shape, dtype = _shape_and_dtype(leaf)
    return f"{dtype}{list(shape)}"
