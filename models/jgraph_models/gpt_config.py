"""Sizes and numerics of a GPT. No jax here, so that a wrong flag is told in no time."""

from dataclasses import dataclass
from typing import Literal

from jgraph.errors import check_types, require, require_positive


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes and numerics of a decoder."""

    num_layers: int = 4
    """Transformer blocks."""
    d_model: int = 128
    """Width of the residual stream."""
    num_heads: int = 4
    """Query heads; d_model / num_heads is the head size."""
    num_kv_heads: int = 4
    """Key and value heads; must divide num_heads (grouped-query attention when smaller)."""
    d_ff: int = 512
    """Hidden width of the MLP."""
    vocab_size: int = 256
    """Rows of the embedding; token ids must be smaller."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """Non-linearity of the MLP; swiglu has a third matrix."""
    head: Literal["tied", "untied"] = "tied"
    """Whether the output projection is the embedding or a matrix of its own."""
    attention: Literal["auto", "cudnn", "fused", "xla"] = "auto"
    """Attention kernel; auto is cudnn on an NVIDIA GPU in bfloat16 and xla elsewhere. fused is one kernel with the rotary
    embedding, on Hopper in bfloat16 for sequences of 64 or 128 tokens and heads of 64 or 128, and xla elsewhere."""
    norm: Literal["fused", "xla"] = "xla"
    """RMSNorm of the residual stream; fused adds onto the stream in the same kernel, where a GPU has one."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of activations and of the weights' per-step copy; weights themselves are float32."""
    scan_layers: bool = False
    """Compile one block and loop over it: shorter compile time, slower step."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    loss_chunk: int = 0
    """Tokens whose logits are held at once; must divide a microbatch's; 0 takes the most that stay under 2**29 logits."""

    def __post_init__(self):
        check_types(self, prefix="model.")
        names = "num_layers d_model num_heads num_kv_heads d_ff vocab_size rope_theta norm_eps"
        require_positive(self, names, prefix="model.")
        require(self.loss_chunk >= 0, "model.loss_chunk", self.loss_chunk, "0 or positive")
        heads, groups = self.num_heads, self.num_kv_heads
        require(self.d_model % heads == 0, "model.num_heads", heads, f"a divisor of `model.d_model` {self.d_model}")
        require(self.head_size % 2 == 0, "model.num_heads", heads, f"such that the head size {self.head_size} is even")
        require(heads % groups == 0, "model.num_kv_heads", groups, f"a divisor of `model.num_heads` {heads}")
        if self.attention == "cudnn":
            self.check_cudnn()
        if self.attention == "fused":
            require(groups == heads, "model.num_kv_heads", groups, f"`model.num_heads` {heads} for `model.attention` fused")

    @property
    def head_size(self) -> int:
        return self.d_model // self.num_heads

    def chunk_of(self, num_tokens: int) -> int:
        """Returns `loss_chunk`. Raises ConfigError where it does not divide the tokens of a microbatch."""
        allowed = f"a divisor of the {num_tokens} tokens of a microbatch, or 0"
        require(not self.loss_chunk or num_tokens % self.loss_chunk == 0, "model.loss_chunk", self.loss_chunk, allowed)
        return self.loss_chunk

    def check_cudnn(self) -> None:
        """Raises ConfigError where cuDNN's attention refuses these sizes (head size a multiple of 8, at most 128; 16-bit)."""
        require(
            self.head_size % 8 == 0 and self.head_size <= 128,
            "model.num_heads",
            self.num_heads,
            f"such that the head size {self.head_size} is a multiple of 8 and at most 128 for cuDNN attention, "
            "or choose `model.attention` xla",
        )
        require(
            self.compute_dtype == "bfloat16",
            "model.compute_dtype",
            self.compute_dtype,
            "bfloat16 for cuDNN attention, or choose `model.attention` xla",
        )

    def flops(self, sequences: int, length: int) -> float:
        """Returns the FLOPs of loss and gradients of so many tokens: 6·N·tokens + 6·L·d·T·tokens.

        N counts the weights of matrix products (attention, MLP, head; the embedding look-up is none), each used by one
        multiplication and one addition forward and twice that backward. The second term is causal attention, which needs half
        of its T x T scores: L layers, d = num_heads * head_size, T = length. Recomputation and elementwise work do not count.
        """
        width = self.num_heads * self.head_size
        attention = self.d_model * (width + 2 * self.num_kv_heads * self.head_size) + width * self.d_model
        mlp = (3 if self.mlp == "swiglu" else 2) * self.d_model * self.d_ff
        weights = self.num_layers * (attention + mlp) + self.d_model * self.vocab_size
        return 6.0 * sequences * length * (weights + self.num_layers * width * length)
