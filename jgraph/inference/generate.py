"""Generates text from token prompts: a prefill program reads the prompts, and a decode program samples one token at a time.

The decode program samples the next token and updates its state in place, so the host only dispatches programs and reads tokens
a few steps later. A model without a KV cache recomputes its window for each token.
"""

# B prompts, T tokens of the longest prompt (padded), C slots of the cache, V vocabulary, S stop tokens, N bins

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jgraph.dispatch import in_turn
from jgraph.errors import ConfigError, require
from jgraph.modules import Decoder, FunctionalModel
from jgraph.types import Carried, Key, Params, Tree

Prompt: TypeAlias = Sequence[int] | np.ndarray | Array

# Settings of `draw` by name; empty for greedy decoding.
Settings: TypeAlias = dict[str, float]

_RADIX_BITS = 8  # per pass of `_keep_likeliest`
# The smallest normal float32, 1.2e-38, and the largest.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

ENDED = -1
"""Placeholder token of a text that has ended while other texts continue."""
# Prompts and caches are padded to multiples of this length, so that similar lengths share a program.
_PAD_MULTIPLE = 64
# Number of decode steps that are dispatched before the oldest token is read, so that the device never waits for the host.
_STEPS_AHEAD = 4


class DecodeState(NamedTuple):
    """The state between two decode steps, for B texts. The decode program donates the old state."""

    tokens: Array  # int32 [B], the last sampled ones; `ENDED` for texts that have ended
    positions: Array  # int32 [B] of these tokens, from 0 at the start of the prompt
    keys: Array  # [B] keys of `jax.random.key`
    cache: Tree  # of the decoder: attention keys and values, or the last tokens for a model without a KV cache


class Choices(TypedDict, total=False):
    """Keyword arguments of `stream`."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stop: Sequence[int]
    key: int | Key
    window: int | None
    carried: Carried


def generate(
    model: FunctionalModel | Decoder, params: Params, prompts: Sequence[Prompt], **settings: Unpack[Choices]
) -> list[np.ndarray]:
    """Continues several texts at once, and returns when all are complete.

    The first call compiles programs. Later calls compile again if the model, the number of texts, their longest length (rounded
    up to a multiple of 64) or the set of sampling filters is new.

    Args:
        model: A model from `jgraph.functional`, or a `Decoder`. A model needs a method `cached_decoder()` or a causal method
            `logits(tokens_BT)`.
        params: Parameters in the model's own tree, on one or several devices. They are not donated.
        prompts: Token ids of each text, at least one per text.
        **settings: Keyword arguments of `stream`, which describes them: `max_tokens` (128), `temperature` (1.0; 0 for greedy
            decoding), `top_k` (0 for all tokens), `top_p` (1.0 for all tokens), `stop` (ids of tokens that end a text; none),
            `key` (seed or random key; 0), `window` (maximum number of tokens that a token attends to; None for no limit) and
            `carried` (mutable state of the model; None).

    Returns:
        A list with the new tokens of each text in the order of `prompts`, int32 arrays of up to `max_tokens` tokens. The prompt
        and the stop token are omitted.

    Raises:
        ConfigError: If an argument has a value that is not allowed, a prompt is empty or longer than `window`, a token id is
            outside the vocabulary, or the model has neither `cached_decoder()` nor `logits`.
    """
    steps = list(stream(model, params, prompts, **settings))
    if not steps:
        return [np.zeros(0, np.int32) for _ in prompts]
    return [row[row != ENDED] for row in np.stack(steps, axis=1)]


def stream(
    model: FunctionalModel | Decoder,
    params: Params,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Sequence[int] = (),
    key: int | Array = 0,
    window: int | None = None,
    carried: Carried = None,
) -> Iterator[np.ndarray]:
    """Continues several texts at once, and yields one token of each text at a time.

    The call checks the arguments. The programs are compiled when the first tokens are requested from the iterator.

    If a text grows longer than `window`, the result depends on the model:

    - A model with a `cached_decoder()` has sliding-window attention with a rolling cache (Mistral 7B, arXiv:2310.06825): in
      each layer, a token attends to itself and the `window - 1` tokens before it. Cached keys and values are not recomputed
      when the window moves, so in the second and later layers they still depend on tokens that have left the window. With L
      layers, logits depend on the last `L * (window - 1) + 1` tokens.
    - A model without a `cached_decoder()` recomputes the last `window` tokens for each new token. Logits depend only on these
      tokens.

    Args:
        model: A model from `jgraph.functional`, or a `Decoder`. A model with a method `cached_decoder()` reads each token once.
            Other models need a causal method `logits(tokens_BT)`, and recompute the whole window for each token.
        params: Parameters in the model's own tree, on one or several devices. They are not donated.
        prompts: Token ids of each text: 1-D sequences or arrays of integers, at least one token per text. The continuation of a
            text does not depend on other texts.
        max_tokens: Maximum number of new tokens of each text; positive.
        temperature: Divides the logits before the softmax; from 0 to 3.4e38. 0, or a value below the smallest normal float32
            (1.2e-38), selects the token with the largest logit (greedy decoding).
        top_k: Samples from the `top_k` most likely tokens, including ties with the last of them; 0 for all tokens.
        top_p: Samples from the fewest most likely tokens with at least this total probability, computed after `top_k`; greater
            than 0 and at most 1. 1 for all tokens.
        stop: Token ids that end a text. They are not returned.
        key: Integer seed, or a random key from `jax.random.key`. The key of text i is folded from `key` and i.
        window: Maximum number of tokens that a token attends to, such as the sequence length in training; None for no limit.
            It must be positive, and prompts must not be longer.
        carried: The model's mutable state, such as running statistics or router biases; None if it has no state.

    Yields:
        The next token of each of the B texts in the order of `prompts`, a NumPy array int32 [B]. A text that has ended has -1
        (`ENDED`), from its stop token on. The iterator ends after `max_tokens` arrays, or when all texts have ended.

    Raises:
        ConfigError: If an argument has a value that is not allowed, a prompt is empty or longer than `window`, a token id is
            outside the vocabulary, or the model has neither `cached_decoder()` nor `logits`. The call raises it, not the
            iterator.

    Examples:
        >>> from flax import nnx
        >>> class Echo(nnx.Module):
        ...     def logits(self, tokens_BT):
        ...         return 100.0 * jax.nn.one_hot(tokens_BT, 10)
        >>> echo = jgraph.functional(Echo)
        >>> jgraph.generate(echo, {}, [[1, 2], [3]], max_tokens=3)
        [array([2, 2, 2], dtype=int32), array([3, 3, 3], dtype=int32)]
    """
    rows = rows_of("prompts", prompts)
    require(isinstance(max_tokens, int) and max_tokens > 0, "max_tokens", max_tokens, "a positive integer")
    require(window is None or window > 0, "window", window, "positive")
    longest = max(map(len, rows))
    length = longest + max_tokens
    slots = min(_rounded(length), window or math.inf)
    fits = f"at most `window` {window} tokens long; shorten it, or increase the window"
    require(longest <= slots, "prompts", f"{longest} tokens long", fits)
    settings = settings_of(temperature, top_k, top_p)
    decoder = _decoder(model)
    weights = (params, {} if carried is None else carried)
    tokens_BT = padded(rows, int(slots))
    key = jax.random.key(key) if isinstance(key, int | np.integer) else key
    lengths_B = np.array([len(row) for row in rows], np.int32)
    stop_S = np.array(stop, np.int32)
    sizes = {"slots": int(slots), "length": _rounded(length)}
    shapes = _prepare.eval_shape(weights, decoder=decoder)
    logits = functools.partial(_read.eval_shape, shapes, tokens_BT, lengths_B, decoder=decoder, **sizes)
    check_ids("prompts", rows, lambda: logits()[0], "logits(tokens_BT) or cached_decoder()")
    where = _replicated(params)

    def steps() -> Iterator[np.ndarray]:
        ready = _prepare(weights, decoder=decoder)
        state = in_turn(_begin(ready, tokens_BT, lengths_B, key, settings, stop_S, decoder=decoder, where=where, **sizes))
        pending: deque[Array] = deque()
        for number in range(max_tokens):
            if number:
                state = in_turn(_next_token(state, ready, settings, stop_S, decoder=decoder, where=where))
            # Copied, because the next step donates the buffer. Copied outside the decode program, so that the program always
            # writes to the same addresses.
            pending.append(jnp.copy(state.tokens))
            pending[-1].copy_to_host_async()
            while len(pending) > (_STEPS_AHEAD if number < max_tokens - 1 else 0):
                tokens_B = np.asarray(pending.popleft())
                if np.all(tokens_B == ENDED):
                    return
                yield tokens_B

    return steps()


@functools.partial(jax.jit, static_argnames="decoder")
def _prepare(weights: tuple[Params, Carried], *, decoder: Decoder) -> Tree:
    return decoder.prepare(*weights)


# Jitted, so that the check of ids and `_begin` share one cached trace. Tracing takes tenths of a second.
@functools.partial(jax.jit, static_argnames=("decoder", "slots", "length"))
def _read(
    weights: Tree, tokens_BT: Array, lengths_B: Array, *, decoder: Decoder, slots: int, length: int
) -> tuple[Array, Tree]:
    return decoder.prefill(weights, tokens_BT, lengths_B, slots=slots, length=length)


@functools.partial(jax.jit, static_argnames=("decoder", "slots", "length", "where"))
def _begin(
    weights: Tree,
    tokens_BT: Array,
    lengths_B: Array,
    key: Key,
    settings: Settings,
    stop_S: Array,
    *,
    decoder: Decoder,
    slots: int,
    length: int,
    where: NamedSharding | None,
) -> DecodeState:
    logits_BV, cache = _read(weights, tokens_BT, lengths_B, decoder=decoder, slots=slots, length=length)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(tokens_BT)))
    tokens_B = draw(logits_BV, settings, jax.vmap(jax.random.fold_in)(keys_B, lengths_B))
    ended_B = jnp.isin(tokens_B, stop_S)
    state = DecodeState(jnp.where(ended_B, ENDED, tokens_B), jnp.asarray(lengths_B), keys_B, cache)
    return state if where is None else jax.lax.with_sharding_constraint(state, where)


@functools.partial(jax.jit, static_argnames=("decoder", "where"), donate_argnums=0, keep_unused=True)
def _next_token(
    state: DecodeState, weights: Tree, settings: Settings, stop_S: Array, *, decoder: Decoder, where: NamedSharding | None
) -> DecodeState:
    """Reads the last token of each text and samples the next one. Donates `state`, and updates it in place."""
    logits_BV, cache = decoder.decode(weights, jnp.maximum(state.tokens, 0), state.cache, state.positions)
    positions_B = state.positions + 1
    tokens_B = draw(logits_BV, settings, jax.vmap(jax.random.fold_in)(state.keys, positions_B))
    ended_B = (state.tokens == ENDED) | jnp.isin(tokens_B, stop_S)
    state = DecodeState(jnp.where(ended_B, ENDED, tokens_B), positions_B, state.keys, cache)
    return state if where is None else jax.lax.with_sharding_constraint(state, where)


def _decoder(model: FunctionalModel | Decoder) -> Decoder:
    if isinstance(model, Decoder):
        return model
    return _windowed(model) if model.decoder is None else model.decoder


# Cached, because the decoder is part of the key of the compiled programs.
@functools.lru_cache(maxsize=8)
def _windowed(model: FunctionalModel) -> Decoder:
    return windowed(lambda weights, tokens_BT: model.evaluate("logits", *weights, tokens_BT))


def windowed(logits_fn: Callable[[tuple[Params, Carried], Array], Array]) -> Decoder[tuple[Params, Carried], Array]:
    """Makes a decoder for a model without a KV cache: its cache is the last C = `slots` tokens of each text, int32 [B, C].

    Logits at a position, [B, C, V] from `logits_fn`, must not depend on later tokens: shorter texts are padded on the right.
    """

    def logits(weights: tuple[Params, Carried], tokens_BT: Array, last_B: Array) -> Array:
        logits_BTV = logits_fn(weights, tokens_BT)
        return jnp.take_along_axis(logits_BTV, last_B[:, None, None], axis=1)[:, 0].astype(jnp.float32)

    def prefill(
        weights: tuple[Params, Carried], tokens_BT: Array, lengths_B: Array, *, slots: int, length: int
    ) -> tuple[Array, Array]:
        cache = jnp.pad(tokens_BT, ((0, 0), (0, slots - tokens_BT.shape[1])))
        return logits(weights, cache, lengths_B - 1), cache

    def decode(weights: tuple[Params, Carried], tokens_B: Array, cache: Array, positions_B: Array) -> tuple[Array, Array]:
        slots = cache.shape[1]
        cache = jnp.where((positions_B < slots)[:, None], cache, jnp.roll(cache, -1, axis=1))
        last_B = jnp.minimum(positions_B, slots - 1)
        cache = jnp.where(jnp.arange(slots) == last_B[:, None], tokens_B[:, None], cache)
        return logits(weights, cache, last_B), cache

    return Decoder(lambda params, carried: (params, carried), prefill, decode)


def rows_of(name: str, texts: Iterable[object]) -> list[np.ndarray]:
    """Returns the token ids of each text. Raises ConfigError, naming the argument `name`."""
    rows = [np.asarray(text) for text in texts]
    require(bool(rows), name, "empty", "at least one text")
    for number, row in enumerate(rows):
        require(row.ndim == 1, name, f"{row.ndim}-D at index {number}", "a list of 1-D token ids, one for each text")
        require(row.size > 0, name, f"empty at index {number}", "at least one token long")
        require(np.issubdtype(row.dtype, np.integer), name, f"{row.dtype} at index {number}", "integers")
    return rows


def padded(rows: Sequence[np.ndarray], window: int | None) -> np.ndarray:
    """Pads texts on the right to a common length, a multiple of 64 or the window, so that few programs are compiled."""
    length = min(_rounded(max(map(len, rows))), window or math.inf)
    tokens_BT = np.zeros((len(rows), int(length)), np.int32)
    for row_T, row in zip(tokens_BT, rows, strict=True):
        row_T[: len(row)] = row
    return tokens_BT


def check_ids(name: str, rows: Sequence[np.ndarray], logits: Callable[[], jax.ShapeDtypeStruct], methods: str) -> None:
    """Raises ConfigError if the model has no logits, or an id in the argument `name` is out of the vocabulary."""
    # For an id that is out of range, JAX would read another row.
    try:
        vocab_size = logits().shape[-1]
    except AttributeError as e:
        raise ConfigError(f"`model` must have a method {methods}: {e}", field="model") from e
    for index, row in enumerate(rows):
        low, high = int(row.min()), int(row.max())
        if low < 0 or high >= vocab_size:
            found = f"id {low if low < 0 else high} at index {index}"
            raise ConfigError(f"`{name}` has {found}: ids must be from 0 to {vocab_size - 1}", field=name)


def _replicated(params: Params) -> NamedSharding | None:
    """Returns the sharding that replicates an array over the devices of the parameters; None for one device."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params))
    found = (s for s in shardings if isinstance(s, NamedSharding) and len(s.device_set) > 1)
    return next((NamedSharding(s.mesh, PartitionSpec()) for s in found), None)


def _rounded(length: int) -> int:
    return -(-length // _PAD_MULTIPLE) * _PAD_MULTIPLE


# --- Drawing tokens ---


def settings_of(temperature: float, top_k: int, top_p: float) -> Settings:
    """Checks the sampling arguments, and omits those without effect; empty for greedy decoding. Raises ConfigError."""
    require(0 <= temperature <= _LARGEST, "temperature", temperature, f"between 0 and {_LARGEST:.1e}")
    require(isinstance(top_k, int) and top_k >= 0, "top_k", top_k, "a positive integer, or 0 for all tokens")
    require(0 < top_p <= 1, "top_p", top_p, "greater than 0 and at most 1")
    # XLA flushes subnormal numbers to zero.
    if temperature < _SMALLEST:
        return {}
    settings: Settings = {"temperature": float(temperature)}
    if top_k:
        settings["top_k"] = float(top_k)
    if top_p < 1:
        settings["top_p"] = max(float(top_p), _SMALLEST)
    return settings


def draw(logits_BV: Array, settings: Settings, keys_B: Array) -> Array:
    """Samples one token for each row from the softmax of its logits. Without settings, takes the first largest logit."""
    if not settings:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = filtered_logits(logits_BV.astype(jnp.float32), settings)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


def filtered_logits(logits_BV: Array, settings: Settings) -> Array:
    """Divides logits by the temperature. Tokens that top-k, and then top-p, exclude become -inf.

    Both keep the fewest most likely tokens, k or at least the probability p in total, and the tokens that tie with the last.
    """
    # Shifted so that the largest of a row is 0, because logits / temperature overflows to inf at low temperatures.
    scaled_BV = (logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)) / settings["temperature"]
    # Tokens are compared by their unscaled logits, because the division can round different logits to the same number.
    if "top_k" in settings:
        kept_BV = _keep_likeliest(logits_BV, jnp.ones_like(logits_BV), settings["top_k"])
        scaled_BV = jnp.where(kept_BV, scaled_BV, -jnp.inf)
    if "top_p" in settings:
        kept_BV = _keep_likeliest(logits_BV, jax.nn.softmax(scaled_BV), settings["top_p"])
        scaled_BV = jnp.where(kept_BV, scaled_BV, -jnp.inf)
    return scaled_BV


def _keep_likeliest(logits_BV: Array, weights_BV: Array, limit: float | Array) -> Array:
    """Returns a mask [B, V]: True if the total weight of all more likely tokens is below `limit`. So it includes all ties.

    A radix search finds the smallest included logit, because sorting the vocabulary takes longer than a transformer layer.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(logits_BV == 0, 0.0, logits_BV), jnp.uint32)  # -0 ties with 0.
    sign = jnp.uint32(1 << 31)
    order_BV = jnp.where(bits < sign, bits | sign, ~bits)  # Unsigned integers in the order of the floats.
    least_B = jnp.zeros(len(logits_BV), jnp.uint32)
    for shift in range(32 - _RADIX_BITS, -1, -_RADIX_BITS):
        starts_BN = least_B[:, None] | (jnp.arange(1 << _RADIX_BITS, dtype=jnp.uint32) << shift)
        ends_BN = starts_BN | jnp.uint32((1 << shift) - 1)
        beyond_BNV = order_BV[:, None] > ends_BN[:, :, None]
        fits_BN = jnp.sum(jnp.where(beyond_BNV, weights_BV[:, None], 0.0), axis=-1) < limit
        least_B = jnp.take_along_axis(starts_BN, jnp.argmax(fits_BN, axis=-1)[:, None], axis=1)[:, 0]
    return order_BV >= least_B[:, None]
