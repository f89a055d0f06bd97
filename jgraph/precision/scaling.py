"""Power-of-two scales of FP8 arrays, from the largest magnitude (amax) of the array or from a history of it.

An array x is stored as q = x * scale in FP8, and its value is q / scale. If the scale is a power of two, only the rounding of q
loses precision. Delayed scaling follows Transformer Engine (docs/features/low_precision_training/fp8_delayed_scaling): it uses
the maximum or the most recent entry of an amax history, and a margin.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jgraph.precision.config import FP8Config

# S matmuls (one in a scan counts once per iteration), H steps of history; 3 = x (data), w (weight), dy (gradient of the result)

# The amax of x, w and dy of a matmul, three float32 scalars.
Amax: TypeAlias = tuple[Array, Array, Array]

_EXPONENT = 0x7F800000
_LARGEST_SCALE = 2.0**126  # Its inverse is a normal number.


class FP8Array(NamedTuple):
    """A quantized matrix, with its transpose. For a weight in `jax.lax.scan`, arrays have a leading axis per enclosing scan.

    The recipe `mxfp8` has a `Blocks` in `rows` and in `columns`, the `scale` 1 and the `amax` 0.
    """

    rows: Array  # FP8 [M, N]; None if the quantization computed only the transpose
    columns: Array  # FP8 [N, M]; None if the quantization computed only `rows`
    scale: Array  # float32 scalar, the power of two that the matrix was multiplied by
    amax: Array  # float32 scalar, before scaling, of the matrix or of the whole parameter that it is part of


class AmaxHistory(NamedTuple):
    """The state of delayed scaling for all matmuls of a function: the amax (largest magnitude) of their arrays.

    The amax of dy is that of the batch's mean loss. So a history does not depend on the number of devices and microbatches.
    """

    window: Array  # float32 [H, S, 3], the latest step first; 0 for steps that have not happened
    used: Array  # float32 [S, 3], amax that the scales of the last step were computed from; 0 before the first step

    @classmethod
    def zeros(cls, num_matmuls: int, num_steps: int) -> "AmaxHistory":
        return cls(jnp.zeros((num_steps, num_matmuls, 3)), jnp.zeros((num_matmuls, 3)))

    def amax(self, config: FP8Config) -> Array:
        """Reduces the history to the amax for the next scales, float32 [S, 3]."""
        reduced = self.window[0] if config.amax == "most_recent" else jnp.max(self.window, axis=0)
        # As in Transformer Engine.
        return jnp.where((reduced > 0) & jnp.isfinite(reduced), reduced, self.used)

    def updated(self, amax_S3: Array, config: FP8Config) -> "AmaxHistory":
        """Returns the history after a step. `config` must be the recipe that computed the scales of the step."""
        return AmaxHistory(jnp.concatenate([amax_S3[None], self.window[:-1]]), self.amax(config))


@partial(jax.jit, static_argnums=(1, 2))  # one equation for each array that is quantized
def scale_for(amax: Array, dtype: DTypeLike, margin: int = 0) -> Array:
    """Returns the largest power of two that maps `amax` into the range of `dtype`, divided by 2**margin.

    At most 2**126 before the division, and 1 where `amax` is zero or not finite.
    """
    ratio = jnp.minimum(float(jnp.finfo(dtype).max) / amax.astype(jnp.float32), _LARGEST_SCALE)
    power = lax.bitcast_convert_type(lax.bitcast_convert_type(ratio, jnp.uint32) & _EXPONENT, jnp.float32)
    return jnp.where((amax > 0) & jnp.isfinite(amax), power * 2.0**-margin, 1.0)


def observe(
    history: AmaxHistory, config: FP8Config, dtypes: Sequence[DTypeLike], num_losses: int = 1
) -> tuple[list[Array], list[Amax]]:
    """Computes the scales of every matmul from a history, and returns taps that collect the amax of the matmul's arrays.

    The cotangent of `history` is no derivative, but the history after the step. Taps and scales have the order of the history.
    """
    # A tap is an argument of a matmul that its result does not depend on. In the backward pass, the matmul returns the amax of
    # x, w and dy as the cotangents of its tap, which the custom backward rule below reads.
    num_matmuls = history.used.shape[0]
    # Each of the losses that are averaged into the batch's loss, such as one per microbatch and device, is differentiated
    # separately: its dy is `num_losses` times as large as the dy of the batch's loss. The power of two is rounded up, so that
    # no dy overflows.
    factors = (1.0, 1.0, 2.0 ** -(num_losses - 1).bit_length())

    @jax.custom_vjp
    def run(history: AmaxHistory) -> tuple[list[Array], list[Amax]]:
        columns = zip(history.amax(config).T, dtypes, factors, strict=True)
        scales_S3 = jnp.stack([scale_for(amax_S, dtype, config.margin) * factor for amax_S, dtype, factor in columns], axis=1)
        zero = jnp.zeros(())
        return list(scales_S3), [(zero, zero, zero)] * num_matmuls

    def backward(history: AmaxHistory, cotangents: tuple[list[Array], list[Amax]]) -> tuple[AmaxHistory]:
        # One concatenation of scalars, for which XLA merges the reductions that compute them.
        amax_S3 = jnp.stack([amax for amaxes in cotangents[1] for amax in amaxes]).reshape(-1, 3)
        return (history.updated(amax_S3 / jnp.array([1, 1, num_losses], jnp.float32), config),)

    run.defvjp(lambda history: (run(history), history), backward)
    return run(history)
