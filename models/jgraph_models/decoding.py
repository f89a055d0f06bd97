"""Decodes with a GPT one token at a time, with a cache of keys and values.

Computes the same logits as `GPT.logits` with different layouts. The matmuls of a single token are bound by reading the weights.
The weights are therefore cast once, and the contracted axis of every matrix is the last, so that rows are contiguous.
"""

# B batch, T prompt, C slots of the cache, D model, F output features, H query heads, G key/value heads, R = H / G,
# E = 2G keys and values, K head size, V vocabulary

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import jgraph
from jgraph.errors import ConfigError
from jgraph.kernels.matvec import has_matvec, matvec
from jgraph.modules import Decoder
from jgraph_models.gpt_config import GPTConfig
from jgraph_models.rotary import Rotary, rotate

DecoderTree = Any  # nested dicts of arrays, which the functions below index by name


def decoder(config: GPTConfig, rotary_of: Callable[[GPTConfig, int], Rotary], kernel_of: Callable[[GPTConfig], Any]) -> Decoder:
    """Makes the decoder of a GPT: three pure functions that generate text with a cache of keys and values."""
    functions = _Decoding(config, rotary_of, kernel_of)
    return Decoder(functions.prepare, functions.prefill, functions.decode)


class _Decoding:
    """The functions of a decoder, and the settings that they share."""

    # `rotary_of(config, length)` returns rotary tables [length, 1, K]. `kernel_of(config)` returns the implementation of
    # `jax.nn.dot_product_attention` for the prompt. Both are called when `prefill` is traced.
    def __init__(self, config: GPTConfig, rotary_of: Callable[[GPTConfig, int], Rotary], kernel_of: Callable[[GPTConfig], Any]):
        self.config = config
        self.rotary_of = rotary_of
        self.kernel_of = kernel_of
        self.dtype = jnp.dtype(config.compute_dtype)
        self.mixture = _Mixture(config) if config.moe.num_experts else None

    def prepare(self, params: DecoderTree, carried: DecoderTree) -> DecoderTree:
        def ready(path: Any, leaf: Array) -> Array:
            name = path[-1].key
            if name in ("scale", "router_DE"):
                return leaf
            return (leaf.T if name == "kernel" else leaf).astype(self.dtype)

        config = self.config
        layers = by_layer(config, params)
        weights = {"embedding_VD": params["embedding_VD"].astype(self.dtype), "norm": params["norm"]}
        if config.head == "untied":
            weights["head_VD"] = params["head_DV"].T.astype(self.dtype)
        weights["layers"] = [jax.tree_util.tree_map_with_path(ready, layer) for layer in layers]
        if self.mixture is not None:
            states = [layer["mlp"] for layer in by_layer(config, carried)] if carried else [self.mixture.state()] * len(layers)
            weights["layers"] = [layer | {"state": state} for layer, state in zip(weights["layers"], states, strict=True)]
        return weights

    def prefill(
        self, weights: DecoderTree, tokens_BT: Array, lengths_B: Array, *, slots: int, length: int
    ) -> tuple[Array, DecoderTree]:
        # The cache has an array [B, E, C, K] per layer, first the heads of keys and then of values, and the rotary tables.
        tables = self.rotary_of(self.config, length)
        T = tokens_BT.shape[1]
        rotary_T1K = tables[0][:T], tables[1][:T]
        x_BTD = weights["embedding_VD"][tokens_BT]
        caches = []

        def attend(q_BTHK: Array, k_BTGK: Array, v_BTGK: Array) -> Array:
            k_BTGK = rotate(k_BTGK, rotary_T1K)
            kv_BETK = jnp.concatenate([k_BTGK, v_BTGK], axis=2).swapaxes(1, 2)
            caches.append(jnp.pad(kv_BETK, ((0, 0), (0, 0), (0, slots - T), (0, 0))))
            q_BTHK = rotate(q_BTHK, rotary_T1K)
            with jgraph.scope("attention"):
                kernel = self.kernel_of(self.config)
                return jax.nn.dot_product_attention(q_BTHK, k_BTGK, v_BTGK, is_causal=True, implementation=kernel)

        for layer in weights["layers"]:
            x_BTD = self._block(layer, x_BTD, attend)
        x_BD = jnp.take_along_axis(x_BTD, (lengths_B - 1)[:, None, None], axis=1)[:, 0]
        return self._logits(weights, x_BD), {"layers": caches, "rotary": [jnp.asarray(table) for table in tables]}

    def decode(
        self, weights: DecoderTree, tokens_B: Array, cache: DecoderTree, positions_B: Array
    ) -> tuple[Array, DecoderTree]:
        rotary_B1K: Any = tuple(table[positions_B] for table in cache["rotary"])
        x_BD = weights["embedding_VD"][tokens_B]
        caches = []
        for layer, kv_BECK in zip(weights["layers"], cache["layers"], strict=True):

            def attend(q_BHK: Array, k_BGK: Array, v_BGK: Array, kv_BECK: Array = kv_BECK) -> Array:
                new_BEK = jnp.concatenate([rotate(k_BGK, rotary_B1K), v_BGK], axis=1)
                kv_BECK = _write_to_cache(kv_BECK, new_BEK, positions_B)
                caches.append(kv_BECK)
                with jgraph.scope("attention"):
                    return self._read(rotate(q_BHK, rotary_B1K), kv_BECK, positions_B)

            x_BD = self._block(layer, x_BD, attend)
        return self._logits(weights, x_BD), {"layers": caches, "rotary": cache["rotary"]}

    def _block(self, layer: DecoderTree, x: Array, attend: Callable[[Array, Array, Array], Array]) -> Array:
        """Applies attention and MLP to tokens [..., D]. `attend` takes queries, keys and values [..., heads, K]."""
        config = self.config
        H, G, K = config.num_heads, config.num_kv_heads, config.head_size
        attention = layer["attention"]
        qkv = self._linear(x, **attention["qkv"], normed=layer["attention_norm"]).reshape(*x.shape[:-1], -1, K)
        q, k, v = jnp.split(qkv, [H, H + G], axis=-2)
        if config.qk_norm == "head":
            q, k = self._norm(q, attention["q_norm"]), self._norm(k, attention["k_norm"])
        x = self._linear(attend(q, k, v).reshape(*x.shape[:-1], -1), **attention["out"], bias=x)
        if self.mixture is not None:
            return x + self.mixture(layer["mlp"], layer["state"], self._norm(x, layer["mlp_norm"]))
        mlp = layer["mlp"]
        activation = _gated if config.mlp == "swiglu" else jax.nn.gelu
        hidden = self._linear(x, **mlp["up"], normed=layer["mlp_norm"], activation=activation)
        return self._linear(hidden, **mlp["down"], bias=x)

    def _linear(
        self,
        x: Array,
        kernel: Array,
        bias: Array | None = None,
        *,
        normed: DecoderTree | None = None,
        activation: Any = None,
        dtype: Any = None,
    ) -> Array:
        """Multiplies tokens [..., D] by a matrix [F, D], after an optional norm. Applies the activation, then adds `bias`."""
        dtype = self.dtype if dtype is None else dtype
        parts = 2 if activation is _gated else 1

        def single(x: Array, kernel: Array, bias: Array | None, normed: DecoderTree | None) -> Array:
            scale_D = normed and normed["scale"]
            add_F = None if bias is None else bias.reshape(-1)
            before: Any = {"scale_D": scale_D, "epsilon": self.config.norm_eps}
            y_F = matvec(x.reshape(-1), kernel, **before, activation=activation, parts=parts, add_F=add_F, dtype=dtype)
            return y_F.reshape(*x.shape[:-1], -1)

        def general(x: Array, kernel: Array, bias: Array | None, normed: DecoderTree | None) -> Array:
            x = self._norm(x, normed) if normed else x
            y = jnp.einsum("...d,fd->...f", x, kernel, preferred_element_type=jnp.float32)
            y = (activation(*jnp.split(y, parts, axis=-1)) if activation else y).astype(dtype)
            return y if bias is None else y + bias

        if x.size > x.shape[-1] or not has_matvec(x.reshape(-1), kernel, parts):
            return general(x, kernel, bias, normed)
        return jax.lax.platform_dependent(x, kernel, bias, normed, cuda=single, default=general)

    def _norm(self, x: Array, params: DecoderTree) -> Array:
        scale_D = params["scale"].astype(jnp.float32)
        return jgraph.rms_norm(x, scale_D, epsilon=self.config.norm_eps, implementation="xla")[1]

    def _logits(self, weights: DecoderTree, x_BD: Array) -> Array:
        head_VD = weights["head_VD" if self.config.head == "untied" else "embedding_VD"]
        return self._linear(x_BD, head_VD, normed=weights["norm"], dtype=jnp.float32)

    def _read(self, q_BHK: Array, kv_BECK: Array, positions_B: Array) -> Array:
        """Attends to the slots up to the position of each text, or to all slots if the position is beyond the last slot."""
        H, G, K = self.config.num_heads, self.config.num_kv_heads, self.config.head_size
        q_BGRK = q_BHK.reshape(-1, G, H // G, K)
        k_BGCK, v_BGCK = kv_BECK[:, :G], kv_BECK[:, G:]
        scores_BGRC = K**-0.5 * _contract("bgrk,bgck->bgrc", q_BGRK, k_BGCK)
        seen_BC = jnp.arange(kv_BECK.shape[2]) <= positions_B[:, None]
        shares_BGRC = jax.nn.softmax(jnp.where(seen_BC[:, None, None], scores_BGRC, -jnp.inf)).astype(self.dtype)
        return _contract("bgrc,bgck->bgrk", shares_BGRC, v_BGCK).astype(self.dtype).reshape(q_BHK.shape)


def by_layer(config: GPTConfig, tree: DecoderTree) -> list[DecoderTree]:
    """Splits parameters or mutable state of a GPT by layer, from the first to the last."""
    blocks = tree["blocks"]
    layers = range(config.num_layers)
    if config.scan_layers:
        return [jax.tree.map(lambda leaf, i=i: leaf[i], blocks) for i in layers]
    return [blocks[i] for i in layers]


class _Mixture:
    """`jgraph.MoE` in evaluation mode, as a function of parameters and state."""

    def __init__(self, config: GPTConfig):
        moe = nnx.eval_shape(lambda: jgraph.MoE(config.d_model, config.d_ff, config.moe, rngs=nnx.Rngs(0)))
        moe.eval()
        self._graph, _, self._shapes = nnx.split(moe, nnx.Param, ...)

    def __call__(self, params: DecoderTree, state: DecoderTree, x: Array) -> Array:
        return nnx.merge(self._graph, params, state)(x)

    def state(self) -> DecoderTree:
        """Returns a state of zeros for a router without a bias. Raises ConfigError for a router with a bias."""
        shapes = nnx.to_pure_dict(self._shapes)
        if "bias_E" in shapes:
            message = "`carried` is empty: must be the mutable state of the model, because it has the bias of the router"
            raise ConfigError(message, field="carried")
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _write_to_cache(kv_BECK: Array, new_BEK: Array, positions_B: Array) -> Array:
    """Writes the keys and values of the newest token of each text into the ring buffer, at slot position % C."""
    # In a text of more than C tokens, the slot of the oldest token. Other slots do not change.
    slots_B = positions_B % kv_BECK.shape[2]
    if len(positions_B) == 1:
        return jax.lax.dynamic_update_slice_in_dim(kv_BECK, new_BEK[:, :, None], slots_B[0], axis=2)
    rows_B = jnp.arange(len(positions_B))
    return kv_BECK.at[rows_B, :, slots_B].set(new_BEK, unique_indices=True, indices_are_sorted=True)


def _gated(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def _contract(subscripts: str, x: Array, y: Array) -> Array:
    """Computes an einsum in float32. On NVIDIA GPUs, as a sum of products, which XLA fuses with surrounding operations."""

    def by_sum(x: Array, y: Array) -> Array:
        inputs, out = subscripts.split("->")
        of_x, of_y = inputs.split(",")
        (summed,) = (set(of_x) | set(of_y)) - set(out)
        axes = out + summed if of_y.endswith(summed) else out[:-1] + summed + out[-1]

        def aligned(array: Array, letters: str) -> Array:
            array = jnp.transpose(array.astype(jnp.float32), [letters.index(axis) for axis in axes if axis in letters])
            return jnp.expand_dims(array, [i for i, axis in enumerate(axes) if axis not in letters])

        return jnp.sum(aligned(x, of_x) * aligned(y, of_y), axis=axes.index(summed))

    def by_einsum(x: Array, y: Array) -> Array:
        return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)

    return jax.lax.platform_dependent(x, y, cuda=by_sum, default=by_einsum)
