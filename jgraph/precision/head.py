"""The three FP8 matmuls of an output projection and its loss, with current scaling."""

# C tokens of a chunk, D model, V vocabulary

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jgraph.errors import ShapeError
from jgraph.kernels import cast_transpose
from jgraph.kernels.elementwise import Computed
from jgraph.precision._matmul import MULTIPLE as MULTIPLE, dot, quantize
from jgraph.precision.scaling import FP8Array, scale_for

_ACTIVATION = jnp.float8_e4m3fn
_GRADIENT = jnp.float8_e5m2


class FP8Head(NamedTuple):
    """An output projection [D, V] in FP8. Its operands are E4M3, and the gradient of the logits is E5M2."""

    weight: FP8Array

    @classmethod
    def quantize(cls, head_DV: Array) -> "FP8Head":
        if any(size % MULTIPLE for size in head_DV.shape):
            found = f"`head_DV` is {head_DV.dtype}{list(head_DV.shape)}"
            raise ShapeError(f"{found}: must have two multiples of {MULTIPLE} in FP8", field="head_DV")
        return cls(quantize(head_DV, None, 1, _ACTIVATION, "both"))

    def logits(self, x_CD: Array) -> tuple[Array, FP8Array]:
        """Returns the logits [C, V] in the dtype of `x_CD`, C a multiple of 16, and the quantized `x_CD` for `gradients`."""
        x = quantize(x_CD, None, 0, _ACTIVATION, "both")
        return dot((x.rows, x.scale), (self.weight.columns, self.weight.scale), x_CD.dtype, "fast"), x

    def gradients(self, x: FP8Array, dlogits: Computed, largest: Array, dtype: DTypeLike) -> tuple[Array, Array]:
        """Returns the gradients of the hidden states, [C, D] in `dtype`, and of the projection, float32 [D, V]."""
        # `largest` bounds the magnitudes of `dlogits`, which are computed while they are quantized.
        scale = scale_for(largest, _GRADIENT)
        rows, columns, _ = cast_transpose(dlogits, scale, _GRADIENT)
        assert rows is not None, "cast_transpose computes both"
        assert columns is not None, "cast_transpose computes both"
        dx_CD = dot((rows, scale), (self.weight.rows, self.weight.scale), dtype, "full")
        return dx_CD, dot((x.columns, x.scale), (columns, scale), jnp.float32, "full")
