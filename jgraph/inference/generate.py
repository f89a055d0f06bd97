"""Text from a model: one program reads the prompts, another one is each token more.

A token's program updates its carry in place and draws the token too, so the host only hands programs over; it reads tokens some
steps behind. A model without a decoder of its own sees its last tokens anew each time.
"""

# B prompts, T tokens of the longest (padded), V vocabulary, S stop tokens, N bins

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jgraph.dispatch import in_turn
from jgraph.errors import ConfigError, require
from jgraph.inference.sampling import draw, settings_of
from jgraph.modules import Decoder, FunctionalModel

Tree = Any

ENDED = -1
"""Stands for the tokens of a text that has ended, while others go on."""
# Prompts and caches of about the same length share a program.
_MULTIPLE = 64
# Steps that are handed over before the tokens of the first are read: the device never waits for the host.
_AHEAD = 4


class Carry(NamedTuple):
    """Holds what a token's program donates and gives back.

    Attributes:
        tokens: [B], drawn last, `ENDED` in rows that have ended.
        positions: [B], of these tokens.
        keys: of each row.
        cache: the decoder's.
    """

    tokens: Array
    positions: Array
    keys: Array
    cache: Tree


def generate(model: FunctionalModel | Decoder, params: Tree, prompts: Sequence[Any], **settings: Any) -> list[np.ndarray]:
    """Continues several texts at once; returns the new tokens of each, int32. Takes what `stream` takes."""
    steps = list(stream(model, params, prompts, **settings))
    if not steps:
        return [np.zeros(0, np.int32) for _ in prompts]
    return [row[row != ENDED] for row in np.stack(steps, axis=1)]


def stream(
    model: FunctionalModel | Decoder,
    params: Tree,
    prompts: Sequence[Any],
    *,
    max_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: Sequence[int] = (),
    key: int | Array = 0,
    window: int | None = None,
    carried: Tree = None,
) -> Iterator[np.ndarray]:
    """Continues several texts at once; yields the next token of each as they are drawn, int32 [B], `ENDED` where one has ended.

    >>> from flax import nnx
    >>> class Echo(nnx.Module):
    ...     def logits(self, tokens_BT):
    ...         return 100.0 * jax.nn.one_hot(tokens_BT, 10)
    >>> echo = jgraph.functional(Echo)
    >>> jgraph.generate(echo, {}, [[1, 2], [3]], max_tokens=3)
    [array([2, 2, 2], dtype=int32), array([3, 3, 3], dtype=int32)]

    Args:
        model: of `jgraph.functional`. With a `cached_decoder()` of its own, it reads each token once; else it needs
            `logits(tokens_BT)`, causal, and reads the whole window for every token.
        params: the model's own tree, on one device or several.
        prompts: ids of each text, at least one; a text's continuation does not depend on the others' prompts.
        max_tokens: of each continuation.
        temperature: of the softmax that tokens are drawn from; 0 takes the likeliest.
        top_k: draws from so many of the likeliest tokens, and those as likely as the last of them; 0 from all.
        top_p: draws from the likeliest tokens that together have this probability, after `top_k`; 1 from all.
        stop: tokens that end a text; they are not part of it.
        key: seed or jax key; row i draws with a key folded from it and i.
        window: tokens that the model sees at most, such as the length it was trained on; None for all of them.
        carried: the model's other state, for one without a decoder of its own.

    Raises:
        ConfigError: an argument has a value that cannot work; at once, before the first token is asked for.
    """
    rows = _rows(prompts)
    require(isinstance(max_tokens, int) and max_tokens > 0, "max_tokens", max_tokens, "a positive integer")
    require(window is None or window > 0, "window", window, "positive")
    longest = max(map(len, rows))
    length = longest + max_tokens
    slots = min(_rounded(length), window or math.inf)
    require(longest <= slots, "prompts", f"of {longest} tokens", f"of at most `window` {window}; cut it, or widen the window")
    sampling = settings_of(temperature, top_k, top_p)
    decoder, weights = _decoder(model), (params, {} if carried is None else carried)
    where = _everywhere(params)
    weights = _prepare(weights, decoder=decoder)
    tokens_BT = np.zeros((len(rows), min(_rounded(longest), int(slots))), np.int32)
    for row_T, row in zip(tokens_BT, rows, strict=True):
        row_T[: len(row)] = row
    key = jax.random.key(key) if isinstance(key, int | np.integer) else key
    lengths_B, stop_S = np.array([len(row) for row in rows], np.int32), np.array(stop, np.int32)
    sizes = {"slots": int(slots), "length": _rounded(length), "where": where}
    _check_ids(decoder, weights, rows, tokens_BT, lengths_B, sizes)
    carry = in_turn(_begin(weights, tokens_BT, lengths_B, key, sampling, stop_S, decoder=decoder, **sizes))
    return _steps(carry, weights, sampling, stop_S, max_tokens, decoder, where)


def _steps(
    carry: Carry, weights: Tree, settings: Tree, stop_S: np.ndarray, count: int, decoder: Decoder, where: NamedSharding | None
) -> Iterator[np.ndarray]:
    pending: deque[Array] = deque()
    for number in range(count):
        if number:
            carry = in_turn(next_token(carry, weights, settings, stop_S, decoder=decoder, where=where))
        # A copy: the next step takes the buffer. By itself, so that a step writes to the same addresses each time.
        pending.append(jnp.copy(carry.tokens))
        pending[-1].copy_to_host_async()
        while len(pending) > (_AHEAD if number < count - 1 else 0):
            tokens_B = np.asarray(pending.popleft())
            if np.all(tokens_B == ENDED):
                return
            yield tokens_B


@functools.partial(jax.jit, static_argnames="decoder")
def _prepare(weights: tuple[Tree, Tree], *, decoder: Decoder) -> Tree:
    return decoder.prepare(*weights)


# A jitted function keeps what it has traced: a call like one before takes no tenths of a second to be checked.
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
    key: Array,
    settings: Tree,
    stop_S: Array,
    *,
    decoder: Decoder,
    slots: int,
    length: int,
    where: NamedSharding | None,
) -> Carry:
    """Reads the prompts and draws the first token of each."""
    logits_BV, cache = _read(weights, tokens_BT, lengths_B, decoder=decoder, slots=slots, length=length)
    keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(tokens_BT)))
    tokens_B = draw(logits_BV, settings, jax.vmap(jax.random.fold_in)(keys_B, lengths_B))
    ended_B = jnp.isin(tokens_B, stop_S)
    carry = Carry(jnp.where(ended_B, ENDED, tokens_B), jnp.asarray(lengths_B), keys_B, cache)
    return carry if where is None else jax.lax.with_sharding_constraint(carry, where)


@functools.partial(jax.jit, static_argnames=("decoder", "where"), donate_argnums=0, keep_unused=True)
def next_token(
    carry: Carry, weights: Tree, settings: Tree, stop_S: Array, *, decoder: Decoder, where: NamedSharding | None = None
) -> Carry:
    """Reads the token drawn last and draws the next one, of every row. The carry is updated in place."""
    logits_BV, cache = decoder.decode(weights, jnp.maximum(carry.tokens, 0), carry.cache, carry.positions)
    positions_B = carry.positions + 1
    tokens_B = draw(logits_BV, settings, jax.vmap(jax.random.fold_in)(carry.keys, positions_B))
    ended_B = (carry.tokens == ENDED) | jnp.isin(tokens_B, stop_S)
    carry = Carry(jnp.where(ended_B, ENDED, tokens_B), positions_B, carry.keys, cache)
    return carry if where is None else jax.lax.with_sharding_constraint(carry, where)


def _decoder(model: FunctionalModel | Decoder) -> Decoder:
    if isinstance(model, Decoder):
        return model
    return _windowed(model) if model.decoder is None else model.decoder


# The same for the same model, so that its programs are found again.
@functools.lru_cache(maxsize=8)
def _windowed(model: FunctionalModel) -> Decoder:
    return windowed(lambda weights, tokens_BT: model.evaluate("logits", *weights, tokens_BT))


def windowed(logits_fn: Callable[[tuple[Tree, Tree], Array], Array]) -> Decoder:
    """Returns the decoder of a model that has only logits: its cache holds the last tokens, all read each time.

    Args:
        logits_fn: `logits_fn((params, carried), tokens_BC)` returns the logits after each position, (B, C, V); causal.
    """

    def logits(weights: Tree, tokens_BT: Array, last_B: Array) -> Array:
        logits_BTV = logits_fn(weights, tokens_BT)
        return jnp.take_along_axis(logits_BTV, last_B[:, None, None], axis=1)[:, 0].astype(jnp.float32)

    def prefill(weights: Tree, tokens_BT: Array, lengths_B: Array, *, slots: int, length: int) -> tuple[Array, Array]:
        cache = jnp.pad(tokens_BT, ((0, 0), (0, slots - tokens_BT.shape[1])))
        return logits(weights, cache, lengths_B - 1), cache

    def decode(weights: Tree, tokens_B: Array, cache: Array, positions_B: Array) -> tuple[Array, Array]:
        slots = cache.shape[1]
        cache = jnp.where((positions_B < slots)[:, None], cache, jnp.roll(cache, -1, axis=1))
        last_B = jnp.minimum(positions_B, slots - 1)
        cache = jnp.where(jnp.arange(slots) == last_B[:, None], tokens_B[:, None], cache)
        return logits(weights, cache, last_B), cache

    return Decoder(lambda params, carried: (params, carried), prefill, decode)


def _rows(prompts: Sequence[Any]) -> list[np.ndarray]:
    """Returns the ids of every prompt. Raises ConfigError where there are none, or they are no rows of integers."""
    rows = [np.asarray(prompt) for prompt in prompts]
    require(bool(rows), "prompts", "empty", "one or more")
    for number, row in enumerate(rows):
        require(row.ndim == 1, "prompts", f"{row.ndim}-D at {number}", "a list of 1-D ids, also for a single prompt")
        require(row.size > 0, "prompts", f"empty at {number}", "at least one token long")
        require(np.issubdtype(row.dtype, np.integer), "prompts", f"{row.dtype} at {number}", "integers")
    return rows


def _check_ids(
    decoder: Decoder, weights: Tree, rows: list[np.ndarray], tokens: Tree, lengths: Tree, sizes: dict[str, Any]
) -> None:
    """Raises ConfigError for a model without logits, and for an id that it does not have: jax would take another one."""
    try:
        logits, _ = _read.eval_shape(weights, tokens, lengths, decoder=decoder, slots=sizes["slots"], length=sizes["length"])
        vocab_size = logits.shape[1]
    except AttributeError as e:
        raise ConfigError(f"`model` must have logits(tokens_BT), or a `cached_decoder()` ({e})", field="model") from e
    for number, row in enumerate(rows):
        low, high = int(row.min()), int(row.max())
        wrong = low if low < 0 else high
        allowed = f"ids from 0 to {vocab_size - 1}"
        if low < 0 or high >= vocab_size:
            raise ConfigError(f"`prompts` has id {wrong} at {number}: must be {allowed}", field="prompts")


def _everywhere(params: Tree) -> NamedSharding | None:
    """Returns the sharding of what every device has whole; None where the parameters are on one."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params))
    found = (s for s in shardings if isinstance(s, NamedSharding) and len(s.device_set) > 1)
    return next((NamedSharding(s.mesh, PartitionSpec()) for s in found), None)


def _rounded(length: int) -> int:
    return -(-length // _MULTIPLE) * _MULTIPLE
