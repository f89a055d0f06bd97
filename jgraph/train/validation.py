"""Evaluation of a training state on held-out text, and text generated from it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jgraph.autodiff import product_flops
from jgraph.data import Batch, Corpus, heldout_batches
from jgraph.dispatch import in_turn
from jgraph.errors import ConfigError, JgraphError
from jgraph.inference.generate import generate, windowed
from jgraph.mesh import batch_axes
from jgraph.modules import Decoder
from jgraph.step.state import TrainState
from jgraph.train.config import TrainConfig
from jgraph.train.model import model_errors
from jgraph.train.setup import TrainSetup, batch_shapes
from jgraph.train.watchdog import Watchdog

Tree: TypeAlias = Any

_PROMPT_TOKENS = 64
_TEMPERATURE = 0.8


def loss(setup: TrainSetup, state: TrainState, batch: Tree) -> Array:
    """Computes the mean next-token loss of a state in evaluation mode.

    Args:
        setup: The setup of the run.
        state: The state, in the layout of the step.
        batch: Rows of tokens, as in `batch_shapes`.

    Returns:
        The loss in nats per token, a scalar.
    """
    return setup.model.evaluate("loss", setup.step.bound.unpack(state.params), state.carried, batch)


def logits(setup: TrainSetup, state: TrainState, tokens_BT: Array) -> Array:
    """Computes the logits of a state in evaluation mode.

    Args:
        setup: The setup of the run.
        state: The state, in the layout of the step.
        tokens_BT: int32 token ids.

    Returns:
        Logits [B, T, V].
    """
    return setup.model.evaluate("logits", setup.step.bound.unpack(state.params), state.carried, tokens_BT)


def flops_per_step(setup: TrainSetup) -> float:
    """Returns the FLOPs of a step: from the `flops` method of the model, or three times the matmul FLOPs of its loss."""
    batch = setup.config.input
    if (count := getattr(setup.config.model, "flops", None)) is not None:
        return count(batch.batch_size, batch.seq_len)
    return 3 * product_flops(partial(loss, setup), setup.step.state, batch_shapes(batch, batch.batch_size))


def check_loss(setup: TrainSetup) -> None:
    """Traces the loss of the model. Raises ConfigError if it fails or is not a scalar."""
    batch = setup.config.input
    argument = "tokens_BS" if batch.data_documents == "joined" else "{'tokens', 'starts', 'weights'}"
    _trace(setup, loss, f"have loss({argument}), a floating scalar", batch_shapes(batch, batch.microbatch_size), ())


def sampling_problem(setup: TrainSetup) -> str:
    """Traces the logits of the model. Returns the reason why it cannot generate text, or an empty string."""
    length = setup.config.input.seq_len
    try:
        tokens_BT = jax.ShapeDtypeStruct((1, length), jnp.int32)
        _trace(setup, logits, "have logits(tokens_BT), floating [B, T, V]", tokens_BT, (1, length, ...))
    except JgraphError as e:
        return str(e)
    return ""


def _trace(setup: TrainSetup, function: Callable[..., Array], must: str, batch: Tree, shape: tuple) -> None:
    """Raises ConfigError if a function fails or returns another shape than `shape`, where `...` is any size."""
    module = setup.config.module
    with model_errors(module, must):
        out = jax.eval_shape(partial(function, setup), setup.step.state, batch)
        found, dtype = tuple(out.shape), out.dtype  # fails if it is not an array
    fits = len(found) == len(shape) and all(expected in (..., size) for expected, size in zip(shape, found, strict=True))
    if not (fits and jnp.issubdtype(dtype, jnp.floating)):
        raise ConfigError(f"`module` is {module}: must {must}; it returns {dtype}{list(found)}", field="module")


def place_whole(setup: TrainSetup, batch: Tree) -> Tree:
    """Shards the rows of an evaluation batch over the data ranks. Replicates them if the ranks do not divide their number.

    Args:
        setup: The setup of the run.
        batch: Leaves [B, ...]. Every process has all rows.

    Returns:
        The batch on the devices of the step.
    """
    mesh = setup.step.mesh

    def place(leaf: np.ndarray) -> Array | np.ndarray:
        if mesh is None or len(leaf) % setup.config.parallel.data_ranks:
            return leaf
        sharding = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(place, batch)


def heldout(config: TrainConfig, corpus: Corpus) -> list[Batch]:
    """Returns the held-out batches of an evaluation.

    Args:
        config: The configuration of the run.
        corpus: The data.

    Returns:
        At most `eval_batches` x `num_microbatches` batches of the size of a microbatch, which limits the memory. As
        `heldout_batches` returns them.
    """
    return heldout_batches(
        corpus.heldout_sources,
        batch_size=config.input.microbatch_size,
        seq_len=config.input.seq_len,
        limit=config.monitor.eval_batches * config.input.num_microbatches,
        documents=config.input.data_documents,
    )


def evaluator(setup: TrainSetup, batches: list[Batch], watchdog: Watchdog) -> Callable[[TrainState], float]:
    """Returns a function from a state to its mean loss over batches of equal size.

    Args:
        setup: The setup of the run.
        batches: The batches.
        watchdog: Watches the devices.

    Returns:
        A function that returns the loss in nats per token. It compiles at the first call.
    """
    jitted, compiled = jax.jit(partial(loss, setup)), None

    def evaluate(state: TrainState) -> float:
        nonlocal compiled
        losses = []
        for batch in batches:
            placed = place_whole(setup, batch)
            # Compiled outside the watchdog, because no device is waited for.
            compiled = compiled or jitted.lower(state, placed).compile()
            with watchdog.over(lambda: "the evaluation", compiled):
                losses.append(in_turn(compiled(state, placed)))
        watchdog.wait(lambda: "the evaluation", losses, compiled)
        # The mean over tokens, because all batches have the same number of tokens or weights that sum to it.
        return float(np.mean(jax.device_get(losses)))

    return evaluate


def decoder(setup: TrainSetup) -> Decoder:
    """Returns the decoder that generates text from a state, on all devices of the step."""
    cached = setup.model.decoder
    if cached is None:
        return windowed(lambda weights, tokens_BT: logits(setup, weights[0], tokens_BT))

    def prepare(state: TrainState) -> Tree:
        return cached.prepare(setup.step.bound.unpack(state.params), state.carried)

    if setup.step.num_devices == 1:
        return replace(cached, prepare=lambda state, _: prepare(state))
    # Sharded parameters are gathered where they are used, so that no device holds all of them.
    return Decoder(
        lambda state, _: state,
        lambda state, *args, **sizes: cached.prefill(prepare(state), *args, **sizes),
        lambda state, *args: cached.decode(prepare(state), *args),
    )


def sample(setup: TrainSetup, state: TrainState, corpus: Corpus) -> tuple[str, str]:
    """Generates the sample text at the end of a run.

    Args:
        setup: The setup of the run.
        state: The final state.
        corpus: The data. The prompt is the first held-out tokens.

    Returns:
        The prompt and a continuation of `sample_tokens` tokens, as text.
    """
    length = setup.config.input.seq_len
    prompt = np.asarray(corpus.heldout[: min(_PROMPT_TOKENS, length)]).astype(np.int32)
    options = {"max_tokens": setup.config.monitor.sample_tokens, "temperature": _TEMPERATURE, "key": setup.config.seed}
    (tokens,) = generate(decoder(setup), state, [prompt], **options, window=length)
    return corpus.decode(prompt), corpus.decode(tokens)
