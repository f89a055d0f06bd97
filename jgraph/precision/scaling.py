"""Power-of-two scales of FP8 arrays, from the largest magnitude (amax) of the array or from a history of it.

An array x is stored as q = x * scale in FP8, and its value is q / scale. If the scale is a power of two, only the rounding of q
loses precision. Delayed scaling follows Transformer Engine (docs/features/low_precision_training/fp8_delayed_scaling): it uses
the maximum or the most recent entry of an amax history, and a margin.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jgraph.precision.config import FP8Config

# S matmuls, H steps of history; 3 = x, w, dy

# The amax of x, w and dy of a matmul, three float32 scalars.
Amax: TypeAlias = tuple[Array, Array, Array]

_EXPONENT = 0x7F800000
_LARGEST_SCALE = 2.0**126  # Its inverse is a normal number.


class FP8Array(NamedTuple):
    """A quantized matrix, with its transpose.

    For a weight in `jax.lax.scan`, all arrays have one leading axis per enclosing scan. The recipe `mxfp8` has a `Blocks` in
    `rows` and in `columns`, the `scale` 1 and the `amax` 0.

    Attributes:
        rows: FP8 [M, N]; None if the quantization computed only the transpose.
        columns: FP8 [N, M], the transpose; None if the quantization computed only `rows`.
        scale: float32 scalar, the power of two that the matrix was multiplied by.
        amax: float32 scalar, largest magnitude before scaling, of the matrix or of the whole parameter that it is part of.
    """

    rows: Array
    columns: Array
    scale: Array
    amax: Array


class AmaxHistory(NamedTuple):
    """The state of delayed scaling for all matmuls of a function: the amax (largest magnitude) of their arrays.

    S is the number of matmuls, and a matmul in a scan counts once per iteration. H is the length of the history. The axis of
    length 3 is x (the data), w (the weight) and dy (the gradient of the result). The amax of dy refers to the gradient of the
    batch's mean loss. `observe` converts it, so a history does not depend on the number of devices and microbatches that share
    a batch.

    Attributes:
        window: float32 [H, S, 3], amax in the previous H steps, the latest first; 0 for steps that have not happened.
        used: float32 [S, 3], amax that the scales of the last step were computed from; 0 before the first step.
    """

    window: Array
    used: Array

    @classmethod
    def zeros(cls, num_matmuls: int, num_steps: int) -> "AmaxHistory":
        """Returns the state before the first step.

        Args:
            num_matmuls: S, the number of matmuls. A matmul in a scan counts once per iteration.
            num_steps: H, the number of steps that the history holds.

        Returns:
            A history of zeros, with a window [H, S, 3].
        """
        return cls(jnp.zeros((num_steps, num_matmuls, 3)), jnp.zeros((num_matmuls, 3)))

    def amax(self, config: FP8Config) -> Array:
        """Reduces the history to the amax for the next scales.

        Args:
            config: The recipe. Its field `amax` selects the reduction over the steps of the window: `max` for the maximum,
                `most_recent` for the latest step.

        Returns:
            float32 [S, 3], for S matmuls and their x, w and dy. An entry that is zero or not finite is replaced by the entry of
            the field `used` (the amax of the last scales), as in Transformer Engine.
        """
        reduced = self.window[0] if config.amax == "most_recent" else jnp.max(self.window, axis=0)
        return jnp.where((reduced > 0) & jnp.isfinite(reduced), reduced, self.used)

    def updated(self, amax_S3: Array, config: FP8Config) -> "AmaxHistory":
        """Returns the history after a step. Does not change this history.

        Args:
            amax_S3: float32 [S, 3], amax of x, w and dy of each of the S matmuls in the step.
            config: The recipe; must be the one that computed the scales of the step. Its field `amax` (`max` or `most_recent`)
                is read.

        Returns:
            A history with the same shapes. `amax_S3` is the first entry of its field `window`, and the oldest entry is dropped.
            Its field `used` is `self.amax(config)`, from which the scales of the step were computed.
        """
        return AmaxHistory(jnp.concatenate([amax_S3[None], self.window[:-1]]), self.amax(config))


def scale_for(amax: Array, dtype: DTypeLike, margin: int = 0) -> Array:
    """Computes the scale for quantizing an array with the largest magnitude `amax` to FP8.

    The scale is the largest power of two for which `amax` times the scale is in the range of `dtype`, divided by 2**margin.

    Args:
        amax: float32, largest magnitudes, any shape.
        dtype: The FP8 dtype, float8_e4m3fn or float8_e5m2.
        margin: Nonnegative integer. The scale is divided by 2**margin.

    Returns:
        The scales, float32 in the shape of `amax`: at most 2**126 before the division by 2**margin, and 1 where `amax` is zero
        or not finite. Quantization multiplies an array by its scale.
    """
    ratio = jnp.minimum(float(jnp.finfo(dtype).max) / amax.astype(jnp.float32), _LARGEST_SCALE)
    power = lax.bitcast_convert_type(lax.bitcast_convert_type(ratio, jnp.uint32) & _EXPONENT, jnp.float32)
    return jnp.where((amax > 0) & jnp.isfinite(amax), power * 2.0**-margin, 1.0)


def observe(
    history: AmaxHistory, config: FP8Config, dtypes: Sequence[DTypeLike], num_losses: int = 1
) -> tuple[list[Array], list[Amax]]:
    """Computes the scales of every matmul from a history, and returns taps that collect the amax of the matmul's arrays.

    A tap is an argument of a matmul that its result does not depend on. In the backward pass, the matmul returns the amax of
    its arrays as the cotangent of the tap. The custom backward rule of this function reads these cotangents. The cotangent of
    `history` is therefore not a derivative: it is the history after the step.

    Args:
        history: The history of S matmuls at the beginning of the step.
        config: The recipe. Reads `amax`, the reduction of the history, and `margin`; scales are divided by 2**margin.
        dtypes: FP8 dtypes of x (data), w (weight) and dy (gradient of the result), in this order.
        num_losses: Number of losses that are averaged into the batch's loss, such as one per microbatch and device. Each is
            differentiated separately, so its dy is `num_losses` times as large as the dy of the batch's loss. The scale of dy
            is divided by `num_losses`, rounded up to a power of two. The amax of dy is divided by `num_losses`.

    Returns:
        A pair of lists with S entries each, in the order of the history. The first list has the scales of x, w and dy of each
        matmul, float32 [3]. The second list has the tap of each matmul, three float32 zeros. The cotangent of a tap must be the
        amax of x, w and dy of its matmul, three float32 scalars.
    """
    num_matmuls = history.used.shape[0]
    # The power of two is rounded up, so that no dy overflows.
    factors = (1.0, 1.0, 2.0 ** -(num_losses - 1).bit_length())

    @jax.custom_vjp
    def run(history: AmaxHistory) -> tuple[list[Array], list[Amax]]:
        columns, zero = zip(history.amax(config).T, dtypes, factors, strict=True), jnp.zeros(())
        scales_S3 = jnp.stack([scale_for(amax_S, dtype, config.margin) * factor for amax_S, dtype, factor in columns], axis=1)
        return list(scales_S3), [(zero, zero, zero)] * num_matmuls

    def backward(history: AmaxHistory, cotangents: tuple[list[Array], list[Amax]]) -> tuple[AmaxHistory]:
        # One concatenation of scalars, for which XLA merges the reductions that compute them.
        amax_S3 = jnp.stack([amax for amaxes in cotangents[1] for amax in amaxes]).reshape(-1, 3)
        return (history.updated(amax_S3 / jnp.array([1, 1, num_losses], jnp.float32), config),)

    run.defvjp(lambda history: (run(history), history), backward)
    return run(history)
