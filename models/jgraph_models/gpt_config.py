"""Sizes and numerics of a GPT. Does not import JAX, so that `--help` and wrong flags need no JAX."""

from dataclasses import dataclass, replace
from typing import Literal

from jgraph.errors import check_types, require, require_positive
from jgraph.moe.config import MoEConfig
from jgraph.settings import OTHER_PROGRAM, may_change

_SCALING_FIELDS = "rope_factor rope_low_freq_factor rope_high_freq_factor rope_original_length"
_DENSE = MoEConfig()


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Sizes and numerics of a GPT.

    Raises:
        ConfigError: If a setting has another type or an unsupported value, or two settings contradict each other.
    """

    num_layers: int = 4
    """Number of transformer blocks."""
    d_model: int = 128
    """Width of the residual stream."""
    num_heads: int = 4
    """Number of query heads."""
    num_kv_heads: int = 4
    """Number of key and value heads; must divide num_heads. A smaller number is grouped-query attention."""
    head_dim: int = 0
    """Width of a head; 0 for d_model / num_heads."""
    d_ff: int = 512
    """Hidden width of the MLP."""
    vocab_size: int = 256
    """Number of token ids."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """Activation of the MLP; swiglu has a third matrix."""
    moe: MoEConfig = _DENSE
    """Settings of the mixtures of experts that replace every MLP; experts are swiglu."""
    head: Literal["tied", "untied"] = "tied"
    """Output projection: the embedding (tied) or a separate matrix (untied)."""
    head_precision: Literal["full", "fp8"] = "full"
    """Operands of the matmuls of the output projection and its gradients: compute_dtype (full), or FP8 with current scaling
    (fp8), which needs a d_model, vocab_size and loss_chunk that are multiples of 16."""
    attention_bias: Literal["none", "qkv"] = "none"
    """Bias of attention: none, or a bias of queries, keys and values (qkv), as in Qwen2."""
    qk_norm: Literal["none", "head"] = "none"
    """Norm of queries and keys: none, or a norm of each head before the rotary embedding (head), as in Qwen3."""
    attention: Literal["auto", "cudnn", "flash", "fused", "xla"] = "auto"
    """Attention kernel. fused is one kernel with the rotary embedding, on Hopper in bfloat16 for sequences of 64 or 128 tokens
    and heads of 64 or 128, and xla elsewhere. flash is the kernel of separate documents, on Hopper in bfloat16, and xla
    elsewhere. Unlike cudnn, it can be compiled for an absent GPU. auto is fused where that kernel runs, cudnn on an NVIDIA GPU
    in bfloat16, and xla elsewhere."""
    norm: Literal["auto", "fused", "backward", "xla"] = "auto"
    """RMSNorm of the residual stream. fused adds to the stream in the same kernel on GPUs with this kernel, and backward uses
    the kernel for gradients only. auto is fused, or backward in FP8, where the quantization kernels compute the norms."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of activations and of the copy of the weights in each step; the weights are float32."""
    tensor_overlap: Literal["auto", "turns", "none"] = may_change("auto", OTHER_PROGRAM)
    """With `--tp`: turns computes the sequences of one device after the other, so that matmuls hide the exchange of
    activations. It needs equal numbers of sequences per device, no `--cp` and no pipeline. none lets XLA insert collectives.
    auto is turns for large matmuls (at least 2**24 queries, keys and values per device and turn), and none in FP8, with LoRA,
    experts or `scan_layers`."""
    scan_layers: bool = False
    """Compile one block and scan over it: shorter compile time, slower step."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: Literal["none", "llama3"] = "none"
    """Scaling of the rotary frequencies for sequences longer than in pretraining: none, or as in Llama 3.1 (llama3)."""
    rope_factor: float = 8.0
    """With llama3: divisor of low frequencies."""
    rope_low_freq_factor: float = 1.0
    """With llama3: frequencies with at most this number of turns over the original length are low."""
    rope_high_freq_factor: float = 4.0
    """With llama3: frequencies with at least this number of turns are unchanged; in between, the divisor changes gradually."""
    rope_original_length: int = 8192
    """With llama3: sequence length of pretraining, in tokens."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    loss_chunk: int = 0
    """Tokens per chunk of the loss; must divide the tokens of a microbatch. 0 for the largest chunk below 2**29 logits."""

    def __post_init__(self):
        check_types(self, prefix="model.")
        names = "num_layers d_model num_heads num_kv_heads d_ff vocab_size rope_theta norm_eps"
        require_positive(self, f"{names} {_SCALING_FIELDS}", prefix="model.")
        require(self.loss_chunk >= 0, "model.loss_chunk", self.loss_chunk, "0 or positive")
        if self.moe.num_experts:
            require(self.mlp == "swiglu", "model.mlp", self.mlp, "swiglu with `model.moe.num_experts`")
        if self.moe.num_experts or self.scan_layers:
            self._check_overlap("with `model.moe.num_experts` or `model.scan_layers`")
        heads, groups, size = self.num_heads, self.num_kv_heads, self.head_dim
        require(size >= 0 and size % 2 == 0, "model.head_dim", size, "even, or 0")
        require(size > 0 or self.d_model % heads == 0, "model.num_heads", heads, f"a divisor of `model.d_model` {self.d_model}")
        require(self.head_size % 2 == 0, "model.num_heads", heads, f"such that the head size {self.head_size} is even")
        require(heads % groups == 0, "model.num_kv_heads", groups, f"a divisor of `model.num_heads` {heads}")
        low, high = self.rope_low_freq_factor, self.rope_high_freq_factor
        require(low < high, "model.rope_low_freq_factor", low, f"below `model.rope_high_freq_factor` {high}")
        if self.rope_scaling == "none":
            for name in _SCALING_FIELDS.split():
                value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
                require(value == default, f"model.{name}", value, f"{default} where `model.rope_scaling` is none")
        if self.head_precision == "fp8":
            for name in ("d_model", "vocab_size", "loss_chunk"):
                value = getattr(self, name)
                require(value % 16 == 0, f"model.{name}", value, "a multiple of 16 for `model.head_precision` fp8")
        if self.attention == "cudnn":
            self.check_cudnn()
        if self.attention == "fused":
            require(groups == heads, "model.num_kv_heads", groups, f"`model.num_heads` {heads} for `model.attention` fused")
            require(self.qk_norm == "none", "model.qk_norm", self.qk_norm, "none for `model.attention` fused")

    @property
    def head_size(self) -> int:
        return self.head_dim or self.d_model // self.num_heads

    @property
    def can_fuse_attention(self) -> bool:
        """True if the fused attention kernel supports the settings. Device, dtype and lengths are not checked."""
        return self.num_heads == self.num_kv_heads and self.qk_norm == "none"

    def in_fp8(self) -> "GPTConfig":
        """Returns settings for FP8, where the quantization kernels compute the norms."""
        return replace(self, norm="backward") if self.norm == "auto" else self

    def with_visible_matmuls(self) -> "GPTConfig":
        """Returns settings for FP8 and LoRA, which do not find matmuls inside `jax.shard_map`."""
        self._check_overlap("in FP8 and with LoRA")
        return replace(self, tensor_overlap="none")

    def _check_overlap(self, where: str) -> None:
        require(self.tensor_overlap != "turns", "model.tensor_overlap", self.tensor_overlap, f"auto or none {where}")

    def chunk_of(self, num_tokens: int) -> int:
        """Returns `loss_chunk`, the tokens per chunk of the loss; 0 leaves the choice to `jgraph.cross_entropy`."""
        # The tokens are the predictions of a microbatch on one device.
        allowed = f"a divisor of the {num_tokens} tokens of a microbatch, or 0"
        require(not self.loss_chunk or num_tokens % self.loss_chunk == 0, "model.loss_chunk", self.loss_chunk, allowed)
        return self.loss_chunk

    def check_cudnn(self) -> None:
        """Raises ConfigError if cuDNN attention does not support head size or dtype. Does not check the device."""
        require(
            self.head_size % 8 == 0 and self.head_size <= 128,
            "model.head_dim" if self.head_dim else "model.num_heads",
            self.head_dim or self.num_heads,
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
        """Computes the FLOPs of loss and gradients: 6·N·tokens + 6·L·d·T·tokens, with T = `length`."""
        # N is the number of matmul weights per token (attention, MLP or experts and router, head; not the embedding look-up).
        # Each has one multiply-add forward and two backward. Causal attention needs half of the T x T scores, in L layers of
        # width d. Recomputation and elementwise operations do not count.
        width = self.num_heads * self.head_size
        attention = self.d_model * (width + 2 * self.num_kv_heads * self.head_size) + width * self.d_model
        mlp = (3 if self.mlp == "swiglu" else 2) * self.d_model * self.d_ff
        if (moe := self.moe).num_experts:
            experts = moe.experts_per_token + moe.shared_experts
            mlp = self.d_model * (moe.num_experts + 3 * experts * (moe.d_ff or self.d_ff))
        weights = self.num_layers * (attention + mlp) + self.d_model * self.vocab_size
        return 6.0 * sequences * length * (weights + self.num_layers * width * length)
