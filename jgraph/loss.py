"""Next-token cross-entropy that computes its gradient chunk by chunk, so that logits are never stored for the backward pass.

The loss is a mean, so the gradient of a chunk's logits is known as soon as its losses are: softmax minus one-hot, divided by
the number of tokens. The forward pass therefore also computes the two matmuls of the backward pass, and saves the gradients
instead of logits (the idea of Liger Kernel's fused linear cross-entropy, arXiv:2410.10989).
"""

# N tokens (B*T), D model, V vocabulary (of this device, if it is sharded), C tokens of a chunk

import functools
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import CustomVJPPrimal

from jgraph.errors import ShapeError, check_choice
from jgraph.kernels.elementwise import Computed, Elementwise
from jgraph.precision.head import MULTIPLE, FP8Head
from jgraph.scopes import scope

Precision: TypeAlias = Literal["full", "fp8"]

# Default limit of the logits that are held at once: 1 GiB in bfloat16, 2 GiB in float32.
_AUTO_CHUNK_ELEMENTS = 2**29

# exp() of a float32 overflows at 88.7. Larger margins over the label's logit are clipped: such a token has a loss of at least
# 70 nats, and its gradient still increases the label's logit and decreases the others.
_LARGEST_MARGIN = 70.0


def _auto_chunk(num_tokens: int, vocab_size: int, dtype: jnp.dtype) -> int:
    """Returns the largest divisor of `num_tokens` with at most 2**29 logits; in float32 also at most half of the tokens."""
    most = max(1, num_tokens // 2) if dtype == jnp.float32 else num_tokens
    limit = min(max(1, _AUTO_CHUNK_ELEMENTS // vocab_size), most)
    return next(chunk for chunk in range(limit, 0, -1) if num_tokens % chunk == 0)


def cross_entropy(
    x_BTD: Array,
    head_DV: Array,
    labels_BT: Array,
    *,
    chunk: int = 0,
    axis: str | tuple[str, ...] | None = None,
    vocab_size: int = 0,
    weights_BT: Array | None = None,
    precision: Precision = "full",
) -> Array:
    """Computes the mean next-token loss in nats from hidden states.

    Equals the mean of `optax.softmax_cross_entropy_with_integer_labels(x @ head, labels)`, without storing float32 logits.
    B batch, T tokens of a sequence, D width of the model, V columns of `head_DV`.

    With `axis`, under `jax.shard_map`, each device of that axis has a shard of the vocabulary and computes its part of the loss
    (Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3). The gradient of x is partial: sum it over the axis yourself.

    Args:
        x_BTD: Final hidden states, of any floating dtype.
        head_DV: Output projection, same dtype as `x_BTD`. With `axis`, the columns of this device: device i of the axis has the
            token ids from i*V to (i+1)*V - 1.
        labels_BT: Token ids of any integer dtype: indices of columns, counted over all devices of `axis`. A negative id, or
            one past the last column, makes the loss NaN, even where its weight is 0. Ids of padding columns are invalid, too:
            with `axis` they make the loss NaN, without `axis` the loss is finite but meaningless.
        chunk: Tokens per chunk; must divide B*T. The logits of one chunk are held at once, in the dtype of `x_BTD`. 0 chooses
            the largest divisor of B*T with at most 2**29 logits per chunk. In float32 the divisor is also at most B*T/2.
        axis: Name of the mesh axis, or names of the mesh axes, over which the vocabulary is sharded; None if it is not sharded.
            `x_BTD`, `labels_BT` and `weights_BT` must be the same on all devices of the axis.
        vocab_size: Number of token ids. The columns of all devices from this number on are padding and are ignored. 0 if there
            is no padding.
        weights_BT: Factor of the loss of each token, of any dtype. The weighted losses are summed and divided by B*T, not by
            the sum of the weights. Gradients with respect to the weights are zero. None for ones.
        precision: Operands of the three matmuls: `full` for the dtype of `x_BTD`, or `fp8`. FP8 rounds the hidden states and
            the head to E4M3 and the gradient of the logits to E5M2, with current scaling. It needs multiples of 16: `chunk`, D
            and V. A device without FP8 emulates it.

    Returns:
        The loss, a float32 scalar, the same on all devices of `axis`. Its gradients have the dtypes of `x_BTD` and `head_DV`.
        Matmuls accumulate in float32.

    Raises:
        ShapeError: If an argument is not an array, shapes or dtypes disagree, there are no tokens or columns, `chunk` does not
            divide B*T, `vocab_size` is not an integer of at least 0, or `precision` is fp8 and a size is not a multiple of 16.
        ConfigError: If `precision` is not full or fp8.

    Examples:
        >>> print(jgraph.cross_entropy(jnp.ones((2, 3, 4)), jnp.zeros((4, 8)), jnp.zeros((2, 3), int)))  # log(8)
        2.0794415
    """
    for name, array in (("x_BTD", x_BTD), ("head_DV", head_DV), ("labels_BT", labels_BT)):
        if not hasattr(array, "dtype"):
            raise ShapeError(f"`{name}` is {type(array).__name__}: must be an array", field=name)
    fits = head_DV.ndim == 2 and x_BTD.shape == (*labels_BT.shape, head_DV.shape[0]) and x_BTD.dtype == head_DV.dtype
    if not fits or not jnp.issubdtype(x_BTD.dtype, jnp.floating) or not jnp.issubdtype(labels_BT.dtype, jnp.integer):
        raise ShapeError(
            f"cross_entropy got x {x_BTD.dtype}{x_BTD.shape}, head {head_DV.dtype}{head_DV.shape}, labels {labels_BT.shape} of "
            f"{labels_BT.dtype}: x must have the shape of labels plus the first of the head's two axes, and the floating dtype "
            "of the head; labels must be integers"
        )
    d_model, width = head_DV.shape
    num_tokens = labels_BT.size
    if not num_tokens or not width:
        raise ShapeError(f"cross_entropy got {num_tokens} tokens and {width} columns of the head: pass at least one of each")
    if weights_BT is not None and weights_BT.shape != labels_BT.shape:
        message = f"`weights_BT` has shape {weights_BT.shape}: must be that of `labels_BT`, {labels_BT.shape}"
        raise ShapeError(message, field="weights_BT")
    if not isinstance(vocab_size, Integral) or vocab_size < 0:
        raise ShapeError(f"`vocab_size` is {vocab_size!r}: must be a whole number, 0 or more", field="vocab_size")
    chunk = chunk or _auto_chunk(num_tokens, width, x_BTD.dtype)
    if not isinstance(chunk, Integral) or chunk < 1 or num_tokens % chunk:
        raise ShapeError(f"`chunk` is {chunk!r}: must divide the {num_tokens} tokens of a microbatch", field="chunk")
    check_choice("precision", precision, ("full", "fp8"))
    if precision == "fp8" and chunk % MULTIPLE:
        message = f"`chunk` is {chunk} for {num_tokens} tokens of a microbatch: must be a multiple of {MULTIPLE} in FP8"
        raise ShapeError(message, field="chunk")
    vocabulary = _Vocabulary(axis, vocab_size)
    with scope("loss"):
        # int32 holds all columns, which the gradient compares with the labels.
        labels_N = jnp.asarray(labels_BT, jnp.int32).reshape(num_tokens)
        weights_N = None if weights_BT is None else jnp.asarray(weights_BT, jnp.float32).reshape(num_tokens)
        return _mean_loss(x_BTD.reshape(num_tokens, d_model), head_DV, labels_N, weights_N, chunk, vocabulary, precision)


@dataclass(frozen=True)
class _Vocabulary:
    """The mesh axis that shards the vocabulary, or None; and the size of a padded vocabulary, or 0."""

    axis: str | tuple[str, ...] | None
    size: int

    def sum(self, x: Array) -> Array:
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def own(self, labels_C: Array, width: int) -> Array:
        """Returns labels as columns of this device, outside [0, width) for columns of other devices."""
        return labels_C if self.axis is None else labels_C - jax.lax.axis_index(self.axis) * width

    def is_token(self, width: int) -> Array:
        """Returns bool [width]: False for this device's columns that are padding."""
        return jnp.arange(width) - self.own(jnp.zeros((), jnp.int32), width) < self.size


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _mean_loss(
    x_ND: Array,
    head_DV: Array,
    labels_N: Array,
    weights_N: Array | None,
    chunk: int,
    vocabulary: _Vocabulary,
    precision: Precision,
) -> Array:
    head = FP8Head.quantize(head_DV) if precision == "fp8" else None
    losses = []
    for x_CD, labels_C, weights_C in _chunks(x_ND, labels_N, weights_N, chunk):
        logits_CV = x_CD @ head_DV if head is None else head.logits(x_CD)[0]
        losses.append(jnp.sum(_weighted(_losses(_margins(logits_CV, labels_C, vocabulary), vocabulary), weights_C)))
    return _sum(losses) / labels_N.size


def _mean_loss_forward(
    x: CustomVJPPrimal,
    head_matrix: CustomVJPPrimal,
    labels: CustomVJPPrimal,
    weights: CustomVJPPrimal | None,
    chunk: int,
    vocabulary: _Vocabulary,
    precision: Precision,
):
    x_ND, head_DV, labels_N = x.value, head_matrix.value, labels.value
    weights_N = None if weights is None else weights.value
    head = FP8Head.quantize(head_DV) if precision == "fp8" else None
    losses, dx = [], []
    total_DV = None  # stays None if the head is frozen
    for x_CD, labels_C, weights_C in _chunks(x_ND, labels_N, weights_N, chunk):
        if dx:
            # One chunk after the other. XLA would compute the chunks of a loop body or of sharded state at once, and hold all
            # logits. The barrier includes the sum of the head's gradients, because XLA would otherwise hold one for each chunk.
            x_CD, dx[-1], total_DV = jax.lax.optimization_barrier((x_CD, dx[-1], total_DV))
        if head is None:
            chunk_loss, dx_CD, dhead_DV = _chunk(x_CD, head_DV, labels_C, weights_C, vocabulary, labels_N.size)
        else:
            chunk_loss, dx_CD, dhead_DV = _fp8_chunk(x_CD, head, labels_C, weights_C, vocabulary)
        losses.append(chunk_loss)
        dx.append(dx_CD)
        if head_matrix.perturbed:
            total_DV = dhead_DV if total_DV is None else total_DV + dhead_DV
    total_DV = None if total_DV is None else total_DV.astype(head_DV.dtype)
    return _sum(losses) / labels_N.size, (jnp.concatenate(dx), total_DV)


def _mean_loss_backward(
    chunk: int, vocabulary: _Vocabulary, precision: Precision, gradients: tuple[Array, Array | None], dloss: Array
):
    dx_ND, dhead_DV = gradients
    dloss = vocabulary.sum(dloss)  # each device may use the loss, or only one of them
    if precision == "fp8":
        dloss = dloss / len(dx_ND)  # a scale in FP8 is a power of two, so `_fp8_chunk` does not divide
    dhead_DV = None if dhead_DV is None else (dhead_DV * dloss).astype(dhead_DV.dtype)
    return (dx_ND * dloss).astype(dx_ND.dtype), dhead_DV, None, None


_mean_loss.defvjp(_mean_loss_forward, _mean_loss_backward, symbolic_zeros=True)


def _chunk(
    x_CD: Array, head_DV: Array, labels_C: Array, weights_C: Array | None, vocabulary: _Vocabulary, num_tokens: int
) -> tuple[Array, Array, Array]:
    """Returns the sum of the losses of a chunk, and the gradients of the mean loss: of x, and of the head in float32."""
    logits_CV = x_CD @ head_DV
    margins_CV = _margins(logits_CV, labels_C, vocabulary)
    losses_C = _losses(margins_CV, vocabulary)
    own_C = vocabulary.own(labels_C, head_DV.shape[1])
    one_hot_CV = own_C[:, None] == jnp.arange(head_DV.shape[1], dtype=labels_C.dtype)
    softmax_CV = jnp.exp(margins_CV - losses_C[:, None])
    weights_C1 = None if weights_C is None else weights_C[:, None]
    dlogits_CV = _weighted((softmax_CV - one_hot_CV) / num_tokens, weights_C1).astype(logits_CV.dtype)
    dhead_DV = jnp.matmul(x_CD.T, dlogits_CV, preferred_element_type=jnp.float32)
    return jnp.sum(_weighted(losses_C, weights_C)), dlogits_CV @ head_DV.T, dhead_DV


def _fp8_chunk(
    x_CD: Array, head: FP8Head, labels_C: Array, weights_C: Array | None, vocabulary: _Vocabulary
) -> tuple[Array, Array, Array]:
    """Returns the sum of the losses of a chunk, and the gradients of the sum: of x, and of the head in float32."""
    logits_CV, x = head.logits(x_CD)
    width = logits_CV.shape[1]
    label_logits_C1 = _label_logits(logits_CV, labels_C, vocabulary)
    losses_C = _losses(_margins(logits_CV, labels_C, vocabulary), vocabulary)
    own_C1 = vocabulary.own(labels_C, width)[:, None].astype(jnp.float32)
    columns_1V = jnp.arange(width, dtype=jnp.float32)[None]
    inputs = [logits_CV, label_logits_C1, losses_C[:, None], own_C1, columns_1V]
    if weights_C is not None:
        inputs.append(weights_C[:, None])
    if vocabulary.size:
        inputs.append(jnp.where(vocabulary.is_token(width), 0.0, -jnp.inf)[None])
    steps = _dlogits_steps(weights_C is not None, bool(vocabulary.size))
    largest = jnp.float32(1) if weights_C is None else jnp.max(jnp.abs(weights_C))
    dlogits = Computed(Elementwise(len(inputs), steps), tuple(inputs))
    dx_CD, dhead_DV = head.gradients(x, dlogits, largest, x_CD.dtype)
    return jnp.sum(_weighted(losses_C, weights_C)), dx_CD, dhead_DV


def _dlogits_steps(is_weighted: bool, is_padded: bool) -> tuple[tuple[str, tuple[int | float, ...]], ...]:
    """Returns the steps of an `Elementwise` that computes softmax minus one-hot from the inputs of `_fp8_chunk`."""
    logits, label_logits, losses, labels, columns = range(5)
    count = 5 + is_weighted + is_padded
    steps: list[tuple[str, tuple[int | float, ...]]] = []

    def step(name: str, *operands: int | float) -> int:
        steps.append((name, operands))
        return count + len(steps) - 1

    margin = step("min", step("sub", logits, label_logits), _LARGEST_MARGIN)
    exponent = step("sub", margin, losses)
    softmax = step("exp", step("add", exponent, count - 1) if is_padded else exponent)
    one_hot = step("max", step("sub", 1.0, step("abs", step("sub", columns, labels))), 0.0)
    difference = step("sub", softmax, one_hot)
    if is_weighted:
        step("mul", difference, 5)
    return tuple(steps)


def _chunks(x_ND: Array, labels_N: Array, weights_N: Array | None, chunk: int) -> list[tuple[Array, Array, Array | None]]:
    parts = [slice(i, i + chunk) for i in range(0, len(labels_N), chunk)]
    return [(x_ND[part], labels_N[part], None if weights_N is None else weights_N[part]) for part in parts]


def _weighted(x: Array, weights: Array | None) -> Array:
    return x if weights is None else x * weights


def _sum(parts: list[Array]) -> Array:
    return functools.reduce(jnp.add, parts)


def _label_logits(logits_CV: Array, labels_C: Array, vocabulary: _Vocabulary) -> Array:
    """Returns the logit of each label, float32 [C, 1]; NaN for an invalid label."""
    width = logits_CV.shape[1]
    if vocabulary.axis is None:
        # -1 would select the last column. Without its sign it is out of bounds, which gives NaN.
        columns_C = labels_C & jnp.iinfo(jnp.int32).max
        return jnp.take_along_axis(logits_CV, columns_C[:, None], axis=-1).astype(jnp.float32)
    own_C = vocabulary.own(labels_C, width)
    found_C1 = jnp.take_along_axis(logits_CV, jnp.clip(own_C, 0, width - 1)[:, None], axis=-1).astype(jnp.float32)
    label_logits_C1 = vocabulary.sum(jnp.where(((own_C >= 0) & (own_C < width))[:, None], found_C1, 0))
    total = vocabulary.size or width * jax.lax.axis_size(vocabulary.axis)
    return jnp.where(((labels_C >= 0) & (labels_C < total))[:, None], label_logits_C1, jnp.nan)


def _margins(logits_CV: Array, labels_C: Array, vocabulary: _Vocabulary) -> Array:
    """Returns each logit minus the label's, in float32, at most `_LARGEST_MARGIN`; -inf for padding."""
    margins_CV = logits_CV.astype(jnp.float32) - _label_logits(logits_CV, labels_C, vocabulary)
    margins_CV = jnp.minimum(margins_CV, _LARGEST_MARGIN)
    return jnp.where(vocabulary.is_token(logits_CV.shape[1]), margins_CV, -jnp.inf) if vocabulary.size else margins_CV


def _losses(margins_CV: Array, vocabulary: _Vocabulary) -> Array:
    """Returns the loss of each token: log(sum(exp(margins)))."""
    # Log-sum-exp usually subtracts the largest logit, which needs another pass over the logits. Subtracting the label's logit
    # cannot underflow either, because the term of the label is exp(0) = 1.
    return jnp.log(vocabulary.sum(jnp.sum(jnp.exp(margins_CV), axis=-1)))
