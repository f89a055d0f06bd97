"""Pallas kernels that are faster than XLA's code. Each has a reference in plain JAX, which runs on every device."""

from jgraph.kernels._documents import (
    SAVED_ATTENTION as SAVED_ATTENTION,
    document_attention as document_attention,
    document_kernel as document_kernel,
)
from jgraph.kernels.attention import rotary_attention as rotary_attention
from jgraph.kernels.norm import rms_norm as rms_norm
from jgraph.kernels.quantize import (
    Quantized as Quantized,
    amax as amax,
    cast as cast,
    cast_transpose as cast_transpose,
)
