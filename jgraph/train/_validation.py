"""Evaluation of a training state on held-out text, and text generated from it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

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
from jgraph.train._functional import batch_shapes
from jgraph.train._watchdog import Watchdog
from jgraph.train.config import TrainConfig
from jgraph.train.model import model_errors
from jgraph.train.setup import TrainSetup
from jgraph.types import Params, Tree

_PROMPT_TOKENS = 64
_TEMPERATURE = 0.8


def loss(setup: TrainSetup, state: TrainState, batch: Tree) -> Array:
    """Computes the mean next-token loss of a state in evaluation mode: without dropout and with running statistics.

    `batch` is as in `batch_shapes`. The loss is in nats per token.
    """
    return setup.model.evaluate("loss", setup.step.bound.layout.unpack(state.params), state.carried, batch)


def logits(setup: TrainSetup, state: TrainState, tokens_BT: Array) -> Array:
    """Computes the logits [B, T, V] of a state in evaluation mode, as the method `logits` of the model returns them."""
    return setup.model.evaluate("logits", setup.step.bound.layout.unpack(state.params), state.carried, tokens_BT)


def flops_per_step(setup: TrainSetup) -> float:
    """Returns the FLOPs of a step over all devices: by the model settings, or three times those of the matmuls in the loss."""
    batch = setup.config.input
    if (count := setup.config.hooks.flops) is not None:
        return count(setup.config.model, batch.batch_size, batch.seq_len)
    return 3 * product_flops(partial(loss, setup), setup.step.state, batch_shapes(batch, batch.batch_size))


def check_loss(setup: TrainSetup) -> None:
    """Traces the loss of the model in evaluation mode on one microbatch. Runs nothing on a device."""
    batch = setup.config.input
    argument = "tokens_BS" if batch.data_documents == "joined" else "{'tokens', 'starts', 'weights'}"
    _trace(setup, loss, f"have loss({argument}), a floating scalar", batch_shapes(batch, batch.microbatch_size), ())


def sampling_problem(setup: TrainSetup) -> str:
    """Traces the method `logits` of the model. Returns why it cannot generate text, or an empty string."""
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
    try:
        with model_errors(module, must):
            out = jax.eval_shape(partial(function, setup), setup.step.state, batch)
            found, dtype = tuple(out.shape), out.dtype  # fails if it is not an array
    except ConfigError as e:
        if e.field != "make":  # the argument of `functional`
            raise
        raise ConfigError(f"`module` is {module}: must {must} ({e})", field="module") from e
    fits = len(found) == len(shape) and all(expected in (..., size) for expected, size in zip(shape, found, strict=True))
    if not (fits and jnp.issubdtype(dtype, jnp.floating)):
        raise ConfigError(f"`module` is {module}: must {must}; it returns {dtype}{list(found)}", field="module")


def place_whole(setup: TrainSetup, batch: Tree) -> Tree:
    """Shards the rows of an evaluation batch, the same on every process, over the data ranks.

    Rows that the data ranks cannot share stay numpy arrays, which a jitted function replicates.
    """
    mesh = setup.step.mesh

    def place(leaf: np.ndarray) -> Array | np.ndarray:
        if mesh is None or len(leaf) % setup.config.parallel.data_ranks:
            return leaf
        sharding = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(place, batch)


def heldout(config: TrainConfig, corpus: Corpus) -> list[Batch]:
    """Reads the held-out batches of an evaluation into memory. A long held-out text is sampled evenly, always alike."""
    return heldout_batches(
        corpus.heldout_sources,
        batch_size=config.input.microbatch_size,
        seq_len=config.input.seq_len,
        limit=config.monitor.eval_batches * config.input.num_microbatches,
        documents=config.input.data_documents,
    )


def evaluator(setup: TrainSetup, batches: list[Batch], watchdog: Watchdog) -> Callable[[TrainState], float]:
    """Returns a function that computes the mean loss of a state over all batches, in nats per token. Collective.

    All batches have the same shape. The first call compiles the program. The state is not donated.
    """
    jitted = jax.jit(partial(loss, setup))
    compiled = None

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
    """Returns a decoder that reads a `TrainState` in place of the parameters, on all devices of the step.

    Without a `cached_decoder()` of the model, the logits of the whole window are computed again for each token.
    """
    cached = setup.model.decoder
    if cached is None:
        return windowed(lambda weights, tokens_BT: logits(setup, _state(weights[0]), tokens_BT))

    def prepare(given: Params) -> Tree:
        state = _state(given)
        return cached.prepare(setup.step.bound.layout.unpack(state.params), state.carried)

    if setup.step.num_devices == 1:
        return replace(cached, prepare=lambda state, _: prepare(state))
    # Sharded parameters are gathered where they are used, so that no device holds all of them.
    return Decoder(
        lambda state, _: state,
        lambda state, *args, **sizes: cached.prefill(prepare(state), *args, **sizes),
        lambda state, *args: cached.decode(prepare(state), *args),
    )


def _state(params: Params) -> TrainState:
    assert isinstance(params, TrainState), "the decoder of a setup reads states"
    return params


def sample(setup: TrainSetup, state: TrainState, corpus: Corpus) -> tuple[str, str]:
    """Generates the sample text at the end of a run. Returns the prompt and its continuation, as texts. Collective.

    The prompt is the first held-out tokens, or for chat data the first conversation up to the first turn of the assistant.
    """
    length = setup.config.input.seq_len
    packed = corpus.heldout_sources[0].packed
    count = min(_PROMPT_TOKENS, length) if packed is None else int(np.argmax(packed.trained))
    prompt = np.asarray(corpus.heldout[:count]).astype(np.int32)
    options = {"max_tokens": setup.config.monitor.sample_tokens, "temperature": _TEMPERATURE, "key": setup.config.seed}
    (tokens,) = generate(decoder(setup), state, [prompt], **options, window=length)
    return corpus.decode(prompt), corpus.decode(tokens)
