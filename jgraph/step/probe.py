"""Checks that an optax transform is elementwise, so that it may update packed, padded and stacked parameters.

The check traces the transform without running it. An expression describes how an output is computed from gradient,
parameter and state, without shapes. A transform is elementwise if its update has the same expression for a parameter of the
model as for a packed array with this parameter, and no output mixes the elements of an array.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend import core
from jax.typing import ArrayLike

from jgraph.autodiff import replay
from jgraph.errors import ConfigError
from jgraph.layout import Packing
from jgraph.step.transform import Elementwise, Transform, apply_transform, make_transform
from jgraph.tree import is_matrix, leaf_names, path_name
from jgraph.types import Params

Expression: TypeAlias = str | tuple[str, ...]

_MAX_LEAVES = 8
_MIXED = "mixed"  # the expression of values that depend on the layout of an array
_SAME = ("broadcast_in_dim", "copy", "copy_p", "optimization_barrier", "reshape", "squeeze", "stop_gradient")
_SETS = ("and", "concatenate", "or", "reduce_and", "reduce_or")  # combine conditions on several arrays
_MIXING = ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "iota", "rev", "scan", "sort", "while")


def check_elementwise(declared: Elementwise, shapes: Params) -> None:
    """Checks by traces that a transform computes the same updates for packed parameters as for separate ones."""
    sample = _sample(shapes)
    if not jax.tree.leaves(sample):
        return
    packing = Packing.of(sample, small=2**62)
    matrices = jax.tree_util.tree_map_with_path(lambda path, leaf: is_matrix(path_name(path), leaf), sample)
    try:
        separate = _updates(make_transform(declared, matrices), sample)
        packed = _updates(make_transform(declared, packing.decay_mask()), jax.eval_shape(packing.pack, sample))
    except ConfigError:
        raise
    except Exception as e:  # a transform may raise any exception
        reason = next(iter(str(e).splitlines()), "") or type(e).__name__
        raise _not_elementwise(f"fails on parameters that share an array ({reason})") from e
    together = dict(zip(sorted(name for name, _ in packing.groups), packed, strict=True))  # JAX sorts the keys of a dict
    group_of = {i: name for name, indices in packing.groups for i in indices}
    if _MIXED in packed or any(separate[i] != together[name] for i, name in group_of.items()):
        raise _not_elementwise("computes other updates for parameters that share an array than for separate ones")


def _sample(shapes: Params) -> Params:
    """Returns the shapes of a few leaves of different names and ranks, with None in place of the other leaves."""
    leaves, structure = jax.tree.flatten(shapes)
    kinds = [(name.rpartition("/")[2], leaf.ndim) for name, leaf in zip(leaf_names(shapes), leaves, strict=True)]
    chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:_MAX_LEAVES]
    return structure.unflatten(
        [jax.ShapeDtypeStruct(leaf.shape, jnp.float32) if i in chosen else None for i, leaf in enumerate(leaves)]
    )


def _updates(transform: Transform, params: Params) -> list[Expression]:
    """Returns the expressions of the updates, in the order of the leaves. All are `_MIXED` if an update or new state is."""
    start, state = jax.make_jaxpr(transform.init, return_shape=True)(params)
    value = jax.ShapeDtypeStruct((), jnp.float32)
    step, (updates, _) = jax.make_jaxpr(
        lambda grads, params, state, value: apply_transform(transform, grads, state, params, value=value), return_shape=True
    )(params, params, state, value)
    if (found := jax.tree.structure(updates)) != (expected := jax.tree.structure(params)):
        raise ValueError(f"its updates have the structure {found}, its parameters {expected}")
    count = expected.num_leaves
    state_inputs = _expressions(start.jaxpr, start.consts, ["parameter"] * count)
    outputs = _expressions(step.jaxpr, step.consts, [*["gradient"] * count, *["parameter"] * count, *state_inputs, "loss"])
    return [_MIXED] * count if _MIXED in outputs else outputs[:count]


def _expressions(jaxpr: core.Jaxpr, consts: Sequence[Array], inputs: Sequence[Expression]) -> list[Expression]:
    known: dict[core.Var, Expression] = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= {var: _constant(value) for var, value in zip(jaxpr.constvars, consts, strict=True)}

    def read(atom: core.Var | core.Literal) -> Expression:
        return _constant(atom.val) if isinstance(atom, core.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _of_equation(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _of_equation(eqn: core.JaxprEqn, inputs: list[Expression]) -> Sequence[Expression]:
    """Returns the expression of every result of an equation."""
    name = eqn.primitive.name
    if name == "cond":
        index, *operands = inputs
        branches = [_expressions(branch.jaxpr, branch.consts, operands) for branch in eqn.params["branches"]]
        return [_MIXED if _MIXED in (index, *each) else _digest(name, index, each) for each in zip(*branches, strict=True)]
    if name in (*replay.JITS, *replay.CHECKPOINTS, *replay.CUSTOM):
        return _expressions(replay.body(eqn), replay.body_consts(eqn), inputs)
    if _MIXED in inputs:
        return [_MIXED] * len(eqn.outvars)
    if name in _SAME and len(inputs) == 1:
        return inputs
    if name in _SETS:
        # Sorted and without duplicates: packed parameters have fewer arrays, in another order.
        return [tuple(sorted({part for each in inputs for part in ((each,) if isinstance(each, str) else each)}))]
    shapes = {atom.aval.shape for atom in eqn.invars if atom.aval.size != 1}  # pyright: ignore[reportAttributeAccessIssue]
    results = {var.aval.shape for var in eqn.outvars}  # pyright: ignore[reportAttributeAccessIssue]
    if name in _MIXING or len(shapes) > 1 or (shapes and results != shapes):
        return [_MIXED] * len(eqn.outvars)
    # Parameters of other types describe shapes.
    choices = sorted((key, repr(v)) for key, v in eqn.params.items() if isinstance(v, bool | int | float | str | np.dtype))
    return [_digest(name, choices, inputs, i) for i in range(len(eqn.outvars))]


def _digest(*parts: Any) -> str:
    """Returns a short expression made of others. Nested expressions would grow exponentially."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _constant(value: ArrayLike) -> Expression:
    array = np.asarray(value)
    is_uniform = array.size == 1 or len({*array.ravel().tolist()}) == 1
    return f"{array.dtype} {array.ravel()[0].item()}" if is_uniform else _MIXED


def _not_elementwise(problem: str) -> ConfigError:
    return ConfigError(
        f"`transform` must update each element independently, but {problem}: leave out `elementwise` or `packed`; to clip by "
        "the global norm, use `clip_norm`; to mask weight decay, pass a function of the matrices",
        field="transform",
    )
