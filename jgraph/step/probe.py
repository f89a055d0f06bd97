"""Checks with random values that an optax transform is elementwise: that it may see packed, padded and stacked parameters."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jgraph.autodiff.host import evaluate
from jgraph.errors import ConfigError
from jgraph.packing import Packing
from jgraph.step.transform import Elementwise, apply_transform, make_transform
from jgraph.tree import is_matrix, leaf_names, path_name

Tree = Any

_MAX_LEAVES = 8
_MAX_STEPS = 64
_CHANGING_STEPS = 8  # Prodigy keeps its first rate for four
_TOLERANCE = 1e-6  # of the largest update of a leaf: NumPy may round the last elements of an array differently
_MAX_DIFFERING = 0.01  # of a leaf's elements: a bfloat16 state can turn such a difference into a large one


def check_elementwise(declared: Elementwise, shapes: Tree) -> None:
    """Checks that a transform is elementwise.

    Trains a small tree in two layouts: the model's own, and one flat array each for matrices and vectors, with half of the
    elements replaced. The updates of the other half must agree. This detects transforms that depend on shapes, on names, or
    on other elements. Nothing is compiled: the transform is traced, and the trace is evaluated on the host (18 to 43 ms for
    AdamW).

    Args:
        declared: The transform.
        shapes: The model's parameters. The small tree is a sample of them.

    Raises:
        ConfigError: If updates differ, or the transform fails.
    """
    own = _sample(shapes)
    if not jax.tree.leaves(own):
        return
    packing = Packing.of(own, small=2**31)
    matrices = jax.tree_util.tree_map_with_path(lambda path, leaf: is_matrix(path_name(path), leaf), own)
    (params, *grads), (other_params, *other_grads), kept = _random_values(packing.leaves)

    def joined(leaves: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        mixed = [np.where(*each).ravel() for each in zip(kept, leaves, others, strict=True)]
        return {name: np.concatenate([mixed[i] for i in indices]) for name, indices in packing.groups}

    unflatten = packing.treedef.unflatten
    flat_grads = [joined(*each) for each in zip(grads, other_grads, strict=True)]
    try:
        # Updates overflow at huge learning rates, here as in training.
        with jax.default_device(_host()), np.errstate(all="ignore"):
            separate = _updates(make_transform(declared, matrices), unflatten(params), [unflatten(each) for each in grads])
            shared = _updates(make_transform(declared, packing.decay_mask()), joined(params, other_params), flat_grads)
            equal = _agree(separate, shared, kept, packing)
    except ConfigError:
        raise
    except Exception as e:  # the transform's own, of any type
        reason = next(iter(str(e).splitlines()), "") or type(e).__name__
        raise _not_elementwise(f"fails on parameters that share an array ({reason})") from e
    if not equal:
        raise _not_elementwise("gives other updates to parameters that share an array than to separate ones")


def _host() -> Any:
    """Returns the CPU; None, for the default device, if JAX has none (`JAX_PLATFORMS=cuda`)."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _sample(shapes: Tree) -> Tree:
    """Returns the shapes of a few small leaves of different names and ranks, with None in place of the other leaves.

    Two matrices may have 128 rows and columns, because `optax.scale_by_factored_rms` does not factor smaller ones.
    """
    leaves, structure = jax.tree.flatten(shapes)
    kinds = [(name.rpartition("/")[2], leaf.ndim) for name, leaf in zip(leaf_names(shapes), leaves, strict=True)]
    chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:_MAX_LEAVES]
    large = [i for i in chosen if leaves[i].ndim > 1][:2]

    def small(i: int) -> jax.ShapeDtypeStruct:
        shape, longest = leaves[i].shape, 128 if i in large else 8
        return jax.ShapeDtypeStruct((*(min(n, 2) for n in shape[:-2]), *(min(n, longest) for n in shape[-2:])), np.float32)

    return structure.unflatten([small(i) if i in chosen else None for i in range(len(leaves))])


def _random_values(shapes: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[np.ndarray]]:
    """Returns (parameters, gradient, second gradient), three others, and masks that are True for about half the elements."""
    rng = np.random.default_rng(0)

    def normal(scale: float) -> list[np.ndarray]:
        return [scale * rng.standard_normal(shape.shape, np.float32) for shape in shapes]

    def values() -> Sequence[Any]:
        # Large, so that their norm exceeds a clipping threshold, and alike, so that estimates of a rate grow.
        first, noise = normal(10), normal(3)
        return normal(1), first, [a + b for a, b in zip(first, noise, strict=True)]

    return values(), values(), [rng.random(shape.shape) < 0.5 for shape in shapes]


def _updates(transform: Any, params: Tree, grads: Sequence[Tree]) -> Iterator[list[np.ndarray]]:
    """Yields the leaves of the updates, step by step. The gradients alternate."""
    value, (leaves, structure) = np.float32(2.0), jax.tree.flatten(params)
    start, state = jax.make_jaxpr(transform.init, return_shape=True)(params)
    step, (updates, _) = jax.make_jaxpr(
        lambda params, state, grads, value: apply_transform(transform, grads, state, params, value=value), return_shape=True
    )(params, state, grads[0], value)
    if jax.tree.structure(updates) != structure:
        raise ValueError(f"its updates are {jax.tree.structure(updates)}, its parameters {structure}")
    state = evaluate(start, leaves)
    for index in range(_MAX_STEPS):
        outputs = evaluate(step, [*leaves, *state, *jax.tree.leaves(grads[index % 2]), value])
        updates, state = outputs[: len(leaves)], outputs[len(leaves) :]
        leaves = [param + update for param, update in zip(leaves, updates, strict=True)]
        yield updates


def _agree(
    separate: Iterator[list[np.ndarray]], shared: Iterator[list[np.ndarray]], kept: Sequence[np.ndarray], packing: Packing
) -> bool:
    """Compares updates in both layouts until a few of them are not zero: a rate may start at zero, gradients be accumulated."""
    changing = 0
    for own, flat in zip(separate, shared, strict=True):
        for (_, indices), array in zip(sorted(packing.groups), flat, strict=True):  # sorted, as the leaves of a dict are
            ends = np.cumsum([own[i].size for i in indices])[:-1]
            for i, part in zip(indices, np.split(array, ends), strict=True):
                if not _close(own[i].ravel(), part, kept[i].ravel()):
                    return False
        changing += any(np.any(leaf) for leaf in own)
        if changing == _CHANGING_STEPS:
            break
    return True


def _close(a: np.ndarray, b: np.ndarray, kept: np.ndarray) -> bool:
    """True if almost all kept elements of two arrays are equal up to rounding."""
    largest = np.max(np.abs(a), initial=0, where=np.isfinite(a))
    equal = np.isclose(a, b, rtol=0, atol=_TOLERANCE * float(largest), equal_nan=True)
    return bool(np.sum(kept & ~equal) <= _MAX_DIFFERING * a.size)


def _not_elementwise(problem: str) -> ConfigError:
    return ConfigError(
        f"`transform` is declared elementwise but {problem}: must be passed to `train_step` without `elementwise`; use "
        "`clip_norm` to clip by the global norm, and a function of the matrices to mask weight decay",
        field="transform",
    )
