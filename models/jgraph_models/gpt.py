"""A decoder-only transformer in Flax NNX: pre-norm, RMSNorm, rotary embeddings, grouped-query attention.

The settings select a GPT, Llama 3, Qwen2, Qwen3 or Mixtral. SwiGLU: Shazeer, "GLU variants improve transformer"
(arXiv:2002.05202). Grouped-query attention: Ainslie et al., "GQA" (arXiv:2305.13245).
"""

# B batch, T sequence, S = T + 1 (inputs and labels), D model, F hidden, V vocabulary,
# H query heads, G key/value heads, K head size
# x_BTD and add_BTD: the residual stream and a term for it, in `compute_dtype`
# starts_BT: int32, index in the sequence of the first token of each token's document, or None for one document per sequence.
# Tokens attend only within their document.
# rotary_T1K: `rotary_of(config, T)`

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

import jgraph
from jgraph.autodiff.host import offload_residuals
from jgraph.context import gathered, token_order
from jgraph.errors import ConfigError
from jgraph.kernels import document_attention
from jgraph.kernels.attention import choose, rotary_attention
from jgraph.kernels.rotary import rotated_heads
from jgraph.mesh import constrain, is_whole, on_cpu, partitioned, per_shard, summable, token_axes
from jgraph.modules import Decoder
from jgraph.pipeline import PipelineModel, split_embedding
from jgraph.strategies.tensor_parallel import in_turns, specs_of
from jgraph_models.decoding import by_layer, decoder
from jgraph_models.gpt_config import GPTConfig as GPTConfig
from jgraph_models.hugging_face import HUGGING_FACE
from jgraph_models.rotary import Rotary, Scaling, halves, pairs, rotary, rotate

Norm: TypeAlias = Literal["fused", "backward", "xla"]

# Mesh axes of the axes of an activation [B, T, D]: the hidden states of the head, and the hidden activations of attention and
# MLP. The residual stream and the norms have those of `token_axes`.
_TOKENS = PartitionSpec(None, "context")
_HIDDEN = PartitionSpec(None, "context", "tensor")

# Results of a matmul that keep all multiprocessors busy: four tiles of 128 x 256 on each of 132 (H200) are 2**24.
_LARGE = 2**24

_INIT_SCALE = 0.02
_GELU_SCALE = math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715


class GPT(nnx.Module):
    """A GPT. `loss(batch)` trains it, `logits(tokens_BT)` evaluates it. Weights are float32, activations `compute_dtype`.

    `jgraph.train.hooks.Model` describes `hugging_face`, `splits_sequences`, `remat`, `tensor_rules` and `pipeline_model`.

    Args:
        config: Settings of the model, stored as the attribute `config`.
        rngs: Random streams of Flax for the initial weights; the stream `params` is used.
    """

    hugging_face = HUGGING_FACE
    splits_sequences = True  # Each device of the axis `context` computes its own tokens.

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.remat: Literal["nothing", "layer", "offload"] = "nothing"  # Set by the trainer.
        self.blocks: Any  # A list of blocks, or one block with stacked layers.
        init = nnx.initializers.normal(_INIT_SCALE)
        self.embedding_VD = nnx.Param(init(rngs.params(), (config.vocab_size, config.d_model), jnp.float32))
        if config.scan_layers:
            self.blocks = nnx.vmap(lambda rngs: Block(config, rngs=rngs), in_axes=0)(rngs.split(config.num_layers))
        else:
            self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = _norm(config, rngs)
        if config.head == "untied":
            self.head_DV = nnx.Param(init(rngs.params(), (config.d_model, config.vocab_size), jnp.float32))

    @staticmethod
    def tensor_rules(config: GPTConfig) -> Mapping[str, jgraph.Split]:
        """Splits heads of attention, hidden units of the MLP, and the vocabulary, by the shell pattern of names."""
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        up = (config.d_ff, config.d_ff) if config.mlp == "swiglu" else (config.d_ff,)
        return {
            "*embedding_VD": jgraph.Split(axis=-2, uneven="replicate"),
            "*head_DV": jgraph.Split(axis=-1, uneven="replicate"),
            "*attention/qkv/*": jgraph.Split(axis=-1, parts=heads),
            "*attention/out/kernel": jgraph.Split(axis=-2, parts=(config.num_heads,)),
            "*mlp/up/kernel": jgraph.Split(axis=-1, parts=up),
            "*mlp/down/kernel": jgraph.Split(axis=-2),
        }

    @staticmethod
    def pipeline_model(config: GPTConfig, ranks: int) -> PipelineModel:
        return pipeline_model(config, ranks)

    def cached_decoder(self) -> Decoder:
        """The functions take the parameters as an argument, so the weights of this object are not part of the result."""
        return decoder(self.config, rotary_of, _library_attention)

    def loss(self, batch: Any) -> Array:
        """Computes the mean next-token loss in nats, a float32 scalar, of token ids [B, S] or of the arrays of `jgraph.data`.

        With `weights`, each of the B * (S - 1) losses is multiplied by its factor before the mean.
        """
        tokens_BT, labels_BT, starts_BT, weights_BT = _sequences(batch)
        return _mean_loss(self.config, self.hidden(tokens_BT, starts_BT), self.output(), labels_BT, weights_BT)

    def logits(self, tokens_BT: Array) -> Array:
        """Computes the float32 logits [B, T, V] of the token after each position. A sequence is one document."""
        return jnp.matmul(self.hidden(tokens_BT), self.output(), preferred_element_type=jnp.float32)

    def hidden(self, tokens_BT: Array, starts_BT: Array | None = None) -> Array:
        """Computes the hidden states after the last norm, for tokens in the order of `jgraph.context.token_order`."""
        # Gathered in float32 and then cast, so that the gradients of repeated tokens are summed in float32.
        x_BTD = _shared(self.embedding_VD[...].astype(jnp.float32)[tokens_BT].astype(self.config.compute_dtype))
        rotary_T1K = rotary_of(self.config, tokens_BT.shape[1])
        if self.config.scan_layers:

            def apply(x_BTD: Array, block: Block) -> Array:
                return block(x_BTD, rotary_T1K, starts_BT)

            # prevent_cse is not needed, because XLA cannot merge the recomputation with the forward pass across a loop.
            apply = self._remat(apply, prevent_cse=False)
            return self.norm(nnx.scan(apply, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x_BTD, self.blocks))
        kernel = norm_kernel(self.config)
        if _takes_turns(self.config, *x_BTD.shape[:2]):
            x_BTD, add_BTD = self._in_turns(x_BTD, rotary_T1K, starts_BT, kernel)
        else:
            x_BTD, add_BTD = self._apply(self.blocks, x_BTD, rotary_T1K, starts_BT, kernel)
        return _add_and_norm(self.norm, x_BTD, add_BTD, kernel)[1]

    def _apply(
        self, blocks: Iterable["Block"], x_BTD: Array, rotary_T1K: Rotary, starts_BT: Array | None, kernel: Norm
    ) -> tuple[Array, Array | None]:
        """Applies blocks. Returns the stream and the pending term, like `Block.parts`."""

        def parts(block: Block, x_BTD: Array, add_BTD: Array | None) -> tuple[Array, Array]:
            return block.parts(x_BTD, add_BTD, rotary_T1K, starts_BT, kernel)

        parts = self._remat(parts)
        add_BTD = None
        for block in blocks:
            x_BTD, add_BTD = parts(block, x_BTD, add_BTD)
        return x_BTD, add_BTD

    def _remat(self, apply: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        policy = offload_residuals if self.remat == "offload" else None
        return apply if self.remat == "nothing" else nnx.remat(apply, policy=policy, **options)

    def _in_turns(self, x_BTD: Array, rotary_T1K: Rotary, starts_BT: Array | None, kernel: Norm) -> tuple[Array, Array]:
        """Applies all blocks on the shards of the axis `tensor`."""
        split = [nnx.split(block) for block in self.blocks]
        params = [nnx.to_pure_dict(state) for _, state in split]

        def run(params: Any, x_BTD: Array, starts_BT: Array | None) -> Any:
            blocks = (nnx.merge(graph, of_block) for (graph, _), of_block in zip(split, params, strict=True))
            return self._apply(blocks, x_BTD, rotary_T1K, starts_BT, kernel)

        specs = specs_of(self.tensor_rules(self.config), params)
        rows = token_axes(x_BTD.shape)
        return per_shard(run, (specs, rows, PartitionSpec()), (rows, rows))(params, x_BTD, starts_BT)

    def output(self) -> Array:
        weights_DV = self.embedding_VD[...].T if self.config.head == "tied" else self.head_DV[...]
        return weights_DV.astype(self.config.compute_dtype)


def pipeline_model(config: GPTConfig, ranks: int) -> PipelineModel:
    """Makes a GPT for a pipeline, with the trees and batches of `GPT`. Its functions need the mesh axis `pipe`."""
    block, _, state = nnx.split(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))), nnx.Param, ...)
    norm, _ = nnx.split(nnx.eval_shape(lambda: _norm(config, nnx.Rngs(0))), nnx.Param)
    # Embedding and head are sharded over the ranks along the vocabulary, padded with zeros if it does not divide.
    padding = -config.vocab_size % ranks

    def embed(outer: Any, batch: Any) -> Array:
        return _shared(split_embedding(outer["embedding_VD"], _sequences(batch)[0], config.compute_dtype))

    def layer(params: Any, x_BTD: Array, starts_BT: Array | None = None, *carried: Any) -> Any:
        module = nnx.merge(block, params, *carried or [state])
        x_BTD = module(x_BTD, rotary_of(config, x_BTD.shape[1]), starts_BT)
        return (x_BTD, nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))) if carried else x_BTD

    def head(outer: Any, x_BTD: Array, batch: Any) -> Array:
        _, labels_BT, _, weights_BT = _sequences(batch)
        x_BTD = nnx.merge(norm, outer["norm"])(jax.lax.psum(summable(x_BTD), "pipe").astype(x_BTD.dtype))
        head_DV = outer["embedding_VD"].T if config.head == "tied" else outer["head_DV"]
        given = x_BTD, head_DV.astype(config.compute_dtype), labels_BT, weights_BT
        return _mean_loss(config, *given, axes=("pipe",), vocab_size=config.vocab_size if padding else 0)

    def split(params: Any) -> tuple[Any, list[Any]]:
        outer = {name: leaf for name, leaf in params.items() if name != "blocks"}
        for name, axis in axes.items():
            outer[name] = jnp.pad(outer[name], [(0, padding) if i == axis else (0, 0) for i in range(2)])
        return outer, by_layer(config, params)

    def join(outer: Any, layers: list[Any]) -> Any:
        whole = {name: jax.lax.slice_in_dim(outer[name], 0, config.vocab_size, axis=axis) for name, axis in axes.items()}
        return outer | whole | join_layers(layers)

    def join_layers(layers: list[Any]) -> Any:
        stacked = config.scan_layers
        return {"blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers) if stacked else dict(enumerate(layers))}

    axes = {"embedding_VD": 0} | ({"head_DV": 1} if config.head == "untied" else {})
    return PipelineModel(
        embed,
        layer,
        head,
        sharded=axes,
        split=split,
        join=join,
        context=lambda batch: _sequences(batch)[2],
        split_carried=lambda carried: by_layer(config, carried),
        join_carried=join_layers,
    )


class Block(nnx.Module):
    """A transformer block: attention and MLP (or `jgraph.MoE`) of a norm of the residual stream, each added to the stream."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = _norm(config, rngs)
        if config.moe.num_experts:
            inits = {"kernel_init": _init(config), "down_init": _init(config, residual=True)}
            self.mlp = jgraph.MoE(config.d_model, config.d_ff, config.moe, rngs=rngs, **inits)
        else:
            self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x_BTD: Array, rotary_T1K: Rotary, starts_BT: Array | None = None) -> Array:
        x_BTD, add_BTD = self.parts(x_BTD, None, rotary_T1K, starts_BT, norm_kernel(self.config))
        return x_BTD + add_BTD

    def parts(
        self, x_BTD: Array, add_BTD: Array | None, rotary_T1K: Rotary, starts_BT: Array | None, norm: Norm
    ) -> tuple[Array, Array]:
        """Applies the block to a residual stream with a pending term, so that a kernel can fuse the sum and the next norm."""
        x_BTD, normed_BTD = _add_and_norm(self.attention_norm, x_BTD, add_BTD, norm)
        attended_BTD = self.attention(normed_BTD, rotary_T1K, starts_BT)
        x_BTD, normed_BTD = _add_and_norm(self.mlp_norm, x_BTD, attended_BTD, norm)
        # The result of the MLP is the new pending term.
        return _shared(x_BTD), _shared(self.mlp(normed_BTD))


def _takes_turns(config: GPTConfig, sequences: int, length: int) -> bool:
    """True if the blocks compute the sequences of one device of the axis `tensor` after the other."""
    devices = partitioned("tensor")
    if devices == 1 or partitioned("context") > 1 or sequences % devices or config.moe.num_experts:
        return False
    columns = (config.num_heads + 2 * config.num_kv_heads) * config.head_size // devices
    is_large = sequences // devices * length * columns >= _LARGE
    return config.tensor_overlap == "turns" or (config.tensor_overlap == "auto" and is_large)


def _shared(x_BTD: Array) -> Array:
    """Shares the tokens of the residual stream, or of a term for it, between devices."""
    return constrain(x_BTD, token_axes(x_BTD.shape))


class Attention(nnx.Module):
    """Causal grouped-query attention with one fused projection to H query, G key and G value heads, in this order."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        K = config.head_size
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = _linear(config, config.d_model, heads * K, rngs, use_bias=config.attention_bias == "qkv")
        if config.qk_norm == "head":
            self.q_norm, self.k_norm = _norm(config, rngs, K), _norm(config, rngs, K)
        self.out = _linear(config, config.num_heads * K, config.d_model, rngs, residual=True)

    def __call__(self, x_BTD: Array, rotary_T1K: Rotary, starts_BT: Array | None = None) -> Array:
        """Computes the term for the residual stream from the normalized stream."""

        def rest(qkv_BTC: Array, device: Array | int) -> Array:
            # On the shards of the axis `tensor`, `starts_BT` has the sequences of all devices.
            rows = qkv_BTC.shape[0]
            starts = starts_BT
            if starts is not None and starts.shape[0] > rows:
                starts = jax.lax.dynamic_slice_in_dim(starts, device * rows, rows)
            return self.out(self._heads(qkv_BTC, rotary_T1K, starts))

        return in_turns(x_BTD, self.qkv, rest)

    def _heads(self, qkv_BTC: Array, rotary_T1K: Rotary, starts_BT: Array | None) -> Array:
        """Computes the attention of all heads, the input of the output projection [B, T, H * K]."""
        places = None
        order_T = token_order(qkv_BTC.shape[1])
        if order_T is not None:
            # Arguments, because each device of the axis `context` has other positions.
            places = tuple(jnp.asarray(table)[order_T] for table in rotary_T1K), order_T
            starts_BT = jnp.zeros(qkv_BTC.shape[:2], jnp.int32) if starts_BT is None else starts_BT
        norms = nnx.split((self.q_norm, self.k_norm)) if self.config.qk_norm == "head" else None
        in_specs = _HIDDEN, _TOKENS, PartitionSpec(), PartitionSpec("context")
        attend = per_shard(partial(self._attended, rotary_T1K), in_specs, _HIDDEN)
        return attend(qkv_BTC, starts_BT, norms, places)

    def _attended(
        self,
        rotary_T1K: Rotary,  # of the whole sequence
        qkv_BTC: Array,
        starts_BT: Array | None,
        norms: Any,  # of queries and keys, a pair from `nnx.split`
        places: tuple[Rotary, Array] | None,  # rotary tables and positions of this device's tokens; None if it has all tokens
    ) -> Array:
        """Computes attention on a device's heads and tokens [B, T, H * K], before the output projection."""
        config = self.config
        (B, T, _), K = qkv_BTC.shape, config.head_size
        qkv_BTHK = qkv_BTC.reshape(B, T, -1, K)
        G = config.num_kv_heads * qkv_BTHK.shape[2] // (config.num_heads + 2 * config.num_kv_heads)
        H = qkv_BTHK.shape[2] - 2 * G
        kernel: Any = attention_kernel(config, T) if starts_BT is None else _document_kernel(config)
        if kernel == "flash":
            kernel, starts_BT = "auto", jnp.zeros((B, T), jnp.int32)  # one document per sequence
        if kernel == "fused":
            with jgraph.scope("attention"):
                return rotary_attention(qkv_BTHK, *_pairs_of(config, T)).reshape(B, T, -1)
        rotary_T1K, positions_T = places or (rotary_T1K, None)
        # The rotary embedding encodes distances, so positions need not restart at each document.
        if config.qk_norm == "head":
            q_BTHK, k_BTGK, v_BTGK = jnp.split(qkv_BTHK, [H, H + G], axis=2)
            q_norm, k_norm = nnx.merge(*norms)
            q_BTHK, k_BTGK = rotate(q_norm(q_BTHK), rotary_T1K), rotate(k_norm(k_BTGK), rotary_T1K)
        else:
            pairs_TP = halves(rotary_T1K) if places else _pairs_of(config, T)
            q_BTHK, k_BTGK, v_BTGK = rotated_heads(qkv_BTHK, *pairs_TP, num_heads=H, num_kv_heads=G)
        with jgraph.scope("attention"):
            if starts_BT is None:
                y_BTHK = jax.nn.dot_product_attention(q_BTHK, k_BTGK, v_BTGK, is_causal=True, implementation=kernel)
            else:
                given = q_BTHK, gathered(k_BTGK), gathered(v_BTGK), starts_BT
                y_BTHK = document_attention(*given, positions_T, implementation=kernel)
        return y_BTHK.reshape(B, T, -1)


class MLP(nnx.Module):
    """An MLP with GELU (tanh form) or SwiGLU, as `config.mlp` selects."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.config = config
        width = 2 * config.d_ff if config.mlp == "swiglu" else config.d_ff
        self.up = _linear(config, config.d_model, width, rngs)
        self.down = _linear(config, config.d_ff, config.d_model, rngs, residual=True)

    def __call__(self, x_BTD: Array) -> Array:
        """Computes the term for the residual stream from the normalized stream."""
        # For the weight gradient of `up`, XLA's CPU backend transposes a gradient [B, T, F], in a loop that also computes it
        # and takes a quarter of a step of cpu-tiny. It does not transpose a matrix.
        x = x_BTD.reshape(-1, x_BTD.shape[-1]) if on_cpu() and is_whole() else x_BTD
        return in_turns(x, self._hidden, lambda hidden, device: self.down(hidden)).reshape(x_BTD.shape)

    def _hidden(self, x_BTD: Array) -> Array:
        if self.config.mlp == "gelu":
            return gelu(constrain(self.up(x_BTD), _HIDDEN))
        return per_shard(_swiglu, (_HIDDEN,), _HIDDEN)(self.up(x_BTD))


def _swiglu(hidden_BTF2: Array) -> Array:
    gate_BTF, up_BTF = jnp.split(hidden_BTF2, 2, axis=-1)
    return jax.nn.silu(gate_BTF) * up_BTF


def _add_and_norm(norm: nnx.RMSNorm, x_BTD: Array, add_BTD: Array | None, kernel: Norm) -> tuple[Array, Array]:
    """Adds a term to the residual stream. Returns the sum and its norm."""
    if kernel != "xla":
        assert norm.scale is not None
        scale_D = norm.scale[...].astype(x_BTD.dtype)  # Like RMSNorm. On several devices, it is gathered in this dtype.
        implementation = "backward" if kernel == "backward" else "auto"
        axes = token_axes(x_BTD.shape)

        def run(x_BTD: Array, scale_D: Array, add_BTD: Array | None) -> tuple[Array, Array]:
            return jgraph.rms_norm(x_BTD, scale_D, add=add_BTD, epsilon=norm.epsilon, implementation=implementation)

        return per_shard(run, (axes, PartitionSpec(), axes), (axes, axes))(x_BTD, scale_D, add_BTD)
    x_BTD = x_BTD if add_BTD is None else x_BTD + add_BTD
    return x_BTD, norm(x_BTD)


def norm_kernel(config: GPTConfig) -> Norm:
    """Returns `config.norm`, or `fused` for auto. `fused` and `backward` are XLA on devices without the kernel."""
    return "fused" if config.norm == "auto" else config.norm


def attention_kernel(config: GPTConfig, length: int) -> Literal["cudnn", "flash", "fused", "xla"]:
    """Selects `document_attention` (flash), `rotary_attention` (fused), or `jax.nn.dot_product_attention`'s implementation."""
    # The request, else fused on devices and for sizes with this kernel, cudnn on a GPU in bfloat16, and xla.
    if config.attention in ("flash", "fused"):
        return config.attention
    if config.attention == "auto" and config.can_fuse_attention:
        heads = config.num_heads + 2 * config.num_kv_heads
        if choose((1, length, heads, config.head_size), jnp.dtype(config.compute_dtype)) == "mosaic":
            return "fused"
    return _library_attention(config)


def _document_kernel(config: GPTConfig) -> Literal["auto", "xla"]:
    """Returns the implementation of `document_attention`. Raises ConfigError if `attention` is cudnn or fused."""
    if config.attention in ("cudnn", "fused"):
        message = f"`model.attention` is {config.attention}: must be auto or xla for separate documents"
        raise ConfigError(message, field="model.attention")
    return "xla" if config.attention == "xla" else "auto"


def _library_attention(config: GPTConfig) -> Literal["cudnn", "xla"]:
    """Returns the implementation of `jax.nn.dot_product_attention`. Raises ConfigError if cuDNN is not supported."""
    if config.attention in ("fused", "xla"):
        return "xla"
    is_gpu = jax.default_backend() == "gpu"
    if config.attention == "cudnn" and not is_gpu:
        kind = jax.devices()[0].device_kind
        raise ConfigError(f"`model.attention` is cudnn: must be auto or xla on a {kind} device", field="model.attention")
    if not is_gpu or config.compute_dtype != "bfloat16":
        return "xla"
    config.check_cudnn()
    return "cudnn"


def rotary_of(config: GPTConfig, length: int) -> Rotary:
    """Computes the rotary tables of positions 0 to `length` - 1."""
    return rotary(length, config.head_size, config.rope_theta, _scaling_of(config))


def _pairs_of(config: GPTConfig, length: int) -> Rotary:
    """Computes the cosines and sines of the pairs of a head, of positions 0 to `length` - 1."""
    return pairs(length, config.head_size, config.rope_theta, _scaling_of(config))


def _scaling_of(config: GPTConfig) -> Scaling | None:
    if config.rope_scaling != "llama3":
        return None
    factors = config.rope_factor, config.rope_low_freq_factor, config.rope_high_freq_factor
    return Scaling(*factors, config.rope_original_length)


def _sequences(batch: Any) -> tuple[Array, Array, Array | None, Array | None]:
    """Returns inputs, labels, document starts and weights [B, T], in the order of `token_order`. The last two may be None."""
    if isinstance(batch, dict):
        tokens_BS, starts_BT, weights_BT = batch["tokens"], batch["starts"], batch["weights"]
    else:
        tokens_BS, starts_BT, weights_BT = batch, None, None
    found = tokens_BS[:, :-1], tokens_BS[:, 1:], starts_BT, weights_BT
    order_T = token_order(tokens_BS.shape[1] - 1)
    return found if order_T is None else jax.tree.map(lambda leaf: leaf[:, order_T], found)


def _mean_loss(
    config: GPTConfig,
    x_BTD: Array,
    head_DV: Array,
    labels_BT: Array,
    weights_BT: Array | None,
    *,
    axes: tuple[str, ...] = (),  # mesh axes of ranks that shard the vocabulary
    vocab_size: int = 0,  # number of token ids if the vocabulary is padded, else 0
) -> Array:
    """Computes the mean loss, the same on all devices. Each device has its part of the vocabulary and of the tokens."""
    devices = partitioned("context")
    is_split = head_DV.shape[1] % partitioned("tensor") == 0
    axes = (*axes, "tensor") if partitioned("tensor") > 1 and is_split else axes
    options: Any = {
        "axis": axes[0] if len(axes) == 1 else axes or None,
        "vocab_size": vocab_size,
        "chunk": config.chunk_of(labels_BT.size // devices),
        "precision": config.head_precision,
    }

    def loss(x_BTD: Array, head_DV: Array, labels_BT: Array, weights_BT: Array | None) -> Array:
        mean = jgraph.cross_entropy(x_BTD, head_DV, labels_BT, weights_BT=weights_BT, **options)
        return mean if devices == 1 else jax.lax.pmean(mean, "context")

    columns = PartitionSpec(None, "tensor" if "tensor" in axes else None)
    return per_shard(loss, (_TOKENS, columns, _TOKENS, _TOKENS), PartitionSpec())(x_BTD, head_DV, labels_BT, weights_BT)


@jax.custom_vjp
def gelu(x: Array) -> Array:
    """Computes GELU in its tanh form (Hendrycks & Gimpel, arXiv:1606.08415). Differentiable in reverse mode only."""
    # XLA recognizes this order of operations after a matmul, and fuses them into an epilogue that stores both x and gelu(x).
    # The gradient reads only x.
    return x * (0.5 * (1 + jnp.tanh(_GELU_SCALE * (x + _GELU_CUBIC * (x * (x * x))))))


def _gelu_backward(x: Array, dy: Array) -> tuple[Array]:
    x32 = x.astype(jnp.float32)
    square = x32 * x32
    # 0.5 * (1 + tanh(z)) is sigmoid(2z). A division would make this kernel compute-bound. The squared reciprocal square root
    # needs a fraction of the instructions (90 -> 82 us per layer of GPT 124M on an H200).
    root = jax.lax.rsqrt(1 + jnp.exp(-2 * _GELU_SCALE * x32 * (1 + _GELU_CUBIC * square)))
    sigmoid = root * root
    slope = sigmoid * (1 + (1 - sigmoid) * (2 * _GELU_SCALE) * x32 * (1 + 3 * _GELU_CUBIC * square))
    return ((dy.astype(jnp.float32) * slope).astype(x.dtype),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)


def _norm(config: GPTConfig, rngs: nnx.Rngs, width: int = 0) -> nnx.RMSNorm:
    dtype = jnp.dtype(config.compute_dtype)
    return nnx.RMSNorm(width or config.d_model, epsilon=config.norm_eps, dtype=dtype, rngs=rngs)


def _linear(
    config: GPTConfig, d_in: int, d_out: int, rngs: nnx.Rngs, *, residual: bool = False, use_bias: bool = False
) -> nnx.Linear:
    return nnx.Linear(
        d_in,
        d_out,
        use_bias=use_bias,
        dtype=jnp.dtype(config.compute_dtype),
        kernel_init=_init(config, residual=residual),
        rngs=rngs,
    )


def _init(config: GPTConfig, *, residual: bool = False) -> nnx.Initializer:
    # Projections into the residual stream have smaller initial weights, so that its variance does not grow with depth (GPT-2).
    return nnx.initializers.normal(_INIT_SCALE / (2 * config.num_layers) ** 0.5 if residual else _INIT_SCALE)
