"""An optax transform that updates small parameters together, for training loops that call optax themselves."""

from collections.abc import Callable
from typing import Any

import optax

from jgraph.layout import Packing
from jgraph.step.probe import check_elementwise
from jgraph.step.transform import Transform, elementwise, make_transform
from jgraph.types import Mask, OptState, Params


def packed(
    transform: Transform | Callable[[Mask], Transform], *, clip_norm: float | None = None
) -> optax.GradientTransformationExtraArgs:
    """Packs small parameters into a few arrays, so that an optax transform runs a few kernels instead of several per parameter.

    The updates are those of `transform`. The optimizer state has one array for all small matrices and one for all small vectors
    of a dtype, instead of one per parameter, so that a jitted step also has fewer arguments. `jgraph.train_step` does not need
    this function: it packs by itself.

    Args:
        transform: An optax transform that updates every element independently, such as Adam or AdamW. Or a function that makes
            one from a tree of bools, True for matrices, as for `jgraph.elementwise`.
        clip_norm: Clips the gradient to this global norm before the transform, as `optax.clip_by_global_norm` does. None does
            not clip.

    Returns:
        An optax transform. Pass `params` to its `update` if gradients and parameters differ in dtype. Arrays that are sharded
        over devices should not be packed.

    Raises:
        ConfigError: If `transform` has no methods `init` and `update` and is not callable. From `init` of the result: if
            `transform` does not update every element independently.

    Examples:
        >>> optimizer = jgraph.packed(lambda matrices: optax.adamw(1e-3, mask=matrices), clip_norm=1.0)
        >>> state = optimizer.init({"w": jnp.ones((4, 4)), "b": jnp.ones(4), "c": jnp.ones(2)})
        >>> [moment.size for moment in jax.tree.leaves(state[1][0].mu)]
        [16, 6]
    """
    declared = elementwise(transform)
    clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)

    def parts(params: Params) -> tuple[Packing, Transform]:
        packing = Packing.of(params)
        transform: Any = make_transform(declared, packing.decay_mask())  # optax.MultiSteps also has the methods of a transform
        return packing, optax.chain(clip, transform)

    def init(params: Params) -> OptState:
        check_elementwise(declared, params)
        packing, inner = parts(params)
        return inner.init(packing.pack(params))

    def update(updates: Params, state: OptState, params: Params = None, **extra: Any) -> tuple[Params, OptState]:
        packing, inner = parts(updates if params is None else params)
        together = None if params is None else packing.pack(params)
        arrays, state = inner.update(packing.pack(updates), state, together, **extra)
        return packing.unpack(arrays), state

    # optax annotates its trees as any iterables, which are no trees of JAX.
    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]
