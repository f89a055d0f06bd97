"""Computes logits of texts, and log probabilities of continuations: one sum and one flag per continuation."""

# B rows, T tokens of a row (padded), V vocabulary

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jgraph.errors import require
from jgraph.inference.generate import Prompt, check_ids, padded, rows_of
from jgraph.modules import FunctionalModel
from jgraph.types import Carried, Params

_IGNORED = -1  # label of a position without a prediction to score
_SHORTEST = 64  # rows are padded to a power of two of at least this length, so that few programs are compiled


class Score(NamedTuple):
    """The score of a continuation."""

    log_prob: float  # sum over its tokens, in nats; 0 without tokens
    is_greedy: bool  # greedy decoding of the context produces this continuation


def logits(
    model: FunctionalModel,
    params: Params,
    ids: Prompt | Sequence[Prompt],
    *,
    window: int | None = None,
    carried: Carried = None,
) -> Array:
    """Computes float32 logits [T, V] of one text, or [B, T, V] of several. `Loaded.logits` documents it."""
    is_one = len(ids) > 0 and np.ndim(ids[0]) == 0
    rows = rows_of("ids", [ids] if is_one else ids)
    longest = max(map(len, rows))
    require(longest <= (window or math.inf), "ids", f"{longest} tokens long", f"at most `window` {window} tokens long")
    weights = _weights(model, params, carried, "ids", rows)
    found_BTV = _logits(weights, padded(rows, window), model=model)[:, :longest].astype(jnp.float32)
    return found_BTV[0] if is_one else found_BTV


def scores(
    model: FunctionalModel,
    params: Params,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int = 8,
    window: int | None = None,
    carried: Carried = None,
) -> Iterator[tuple[int, Score]]:
    """Yields the index and the score of each pair of a context and a continuation, the longest pairs first.

    A context loses tokens at its start if the pair does not fit into `window`. The model must be causal: rows are padded.
    """
    for index, (context, continuation) in enumerate(pairs):
        require(len(context) > 0, "pairs", f"a context without tokens at index {index}", "at least one token")
        length = f"a continuation of {len(continuation)} tokens at index {index}"
        require(len(continuation) <= (window or math.inf), "pairs", length, f"at most `window` {window} tokens long")
    first = -(window + 1) if window else 0  # the last token is predicted, but not read
    rows = [np.asarray([*context, *continuation], np.int32)[first:] for context, continuation in pairs]
    weights = _weights(model, params, carried, "pairs", rows)
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        shape = (batch_size, _row_length(len(rows[batch[0]]) - 1, window))
        tokens_BT, labels_BT = np.zeros(shape, np.int32), np.full(shape, _IGNORED, np.int32)
        for number, index in enumerate(batch):
            row, count = rows[index], len(pairs[index][1])
            tokens_BT[number, : len(row) - 1] = row[:-1]
            labels_BT[number, len(row) - 1 - count : len(row) - 1] = row[len(row) - count :]
        log_probs_B, greedy_B = map(np.asarray, _scores(weights, tokens_BT, labels_BT, model=model))
        for number, index in enumerate(batch):
            yield index, Score(float(log_probs_B[number]), bool(greedy_B[number]))


def _weights(
    model: FunctionalModel, params: Params, carried: Carried, name: str, rows: Sequence[np.ndarray]
) -> tuple[Params, Carried]:
    """Returns parameters and mutable state. Raises ConfigError for ids, in the argument `name`, out of the vocabulary."""
    weights = (params, {} if carried is None else carried)
    one_token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    check_ids(name, rows, lambda: _logits.eval_shape(weights, one_token, model=model), "logits(tokens_BT)")
    return weights


def _row_length(length: int, window: int | None) -> int:
    rounded = max(_SHORTEST, 1 << (length - 1).bit_length())
    return rounded if window is None else min(rounded, window)


# Jitted, so that the check of ids and `_scores` share one cached trace.
@functools.partial(jax.jit, static_argnames="model")
def _logits(weights: tuple[Params, Carried], tokens_BT: Array, *, model: FunctionalModel) -> Array:
    return model.evaluate("logits", *weights, tokens_BT)


@functools.partial(jax.jit, static_argnames="model")
def _scores(
    weights: tuple[Params, Carried], tokens_BT: Array, labels_BT: Array, *, model: FunctionalModel
) -> tuple[Array, Array]:
    """Returns the sum of the log probabilities of the labels of each row, and whether all of them have the largest logit."""
    logits_BTV = _logits(weights, tokens_BT, model=model).astype(jnp.float32)
    is_scored_BT = labels_BT != _IGNORED
    label_logits_BT = jnp.take_along_axis(logits_BTV, jnp.maximum(labels_BT, 0)[..., None], axis=-1)[..., 0]
    log_probs_BT = label_logits_BT - jax.nn.logsumexp(logits_BTV, axis=-1)
    is_greedy_BT = jnp.argmax(logits_BTV, axis=-1) == labels_BT
    return jnp.sum(jnp.where(is_scored_BT, log_probs_BT, 0.0), axis=1), jnp.all(is_greedy_BT | ~is_scored_BT, axis=1)
