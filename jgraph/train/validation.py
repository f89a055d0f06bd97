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
from jgraph.train.config import TrainConfig
from jgraph.train.model import model_errors
from jgraph.train.setup import TrainSetup, batch_shapes
from jgraph.train.watchdog import Watchdog
from jgraph.types import Params, Tree

_PROMPT_TOKENS = 64
_TEMPERATURE = 0.8


def loss(setup: TrainSetup, state: TrainState, batch: Tree) -> Array:
    """Computes the mean next-token loss of a state in evaluation mode: without dropout and with running statistics.

    Can be traced by `jax.jit`. Changes and donates nothing.

    Args:
        setup: The setup of the run.
        state: The state, with parameters in the layout that the training step returns.
        batch: int32 tokens [B, T + 1], with B rows and T predicted tokens per row. With `data_documents` `separate`, a dict
            with the keys "tokens" (the same), "starts" (int32 [B, T]: position in its row of the first token of the same
            document) and "weights" (float32 [B, T]: loss weight of each prediction).

    Returns:
        The loss in nats per token, a floating scalar.
    """
    return setup.model.evaluate("loss", setup.step.bound.layout.unpack(state.params), state.carried, batch)


def logits(setup: TrainSetup, state: TrainState, tokens_BT: Array) -> Array:
    """Computes the logits of a state in evaluation mode: without dropout and with running statistics.

    Can be traced by `jax.jit`. Changes and donates nothing.

    Args:
        setup: The setup of the run. Its model class needs a method `logits(tokens_BT)`.
        state: The state, with parameters in the layout that the training step returns.
        tokens_BT: int32 token ids [B, T], with B rows of T tokens.

    Returns:
        Logits of the token after each position, [B, T, V], exactly as the method `logits` of the model returns them. For the
        models of `jgraph_models`, V is `vocab_size` and the dtype is float32.
    """
    return setup.model.evaluate("logits", setup.step.bound.layout.unpack(state.params), state.carried, tokens_BT)


def flops_per_step(setup: TrainSetup) -> float:
    """Returns the number of floating-point operations of a training step, summed over all devices. Runs nothing on a device.

    Args:
        setup: The setup of the run.

    Returns:
        The result of `flops(batch_size, seq_len)` of the model settings, if they have this method. Otherwise three times the
        FLOPs of the matmuls in the forward loss, which is traced for that.
    """
    batch = setup.config.input
    if (count := setup.config.hooks.flops) is not None:
        return count(setup.config.model, batch.batch_size, batch.seq_len)
    return 3 * product_flops(partial(loss, setup), setup.step.state, batch_shapes(batch, batch.batch_size))


def check_loss(setup: TrainSetup) -> None:
    """Traces the loss of the model in evaluation mode on one microbatch. Runs nothing on a device.

    Args:
        setup: The setup of the run.

    Raises:
        ConfigError: If the model's method `loss` fails, or its result is not a floating scalar.
    """
    batch = setup.config.input
    argument = "tokens_BS" if batch.data_documents == "joined" else "{'tokens', 'starts', 'weights'}"
    _trace(setup, loss, f"have loss({argument}), a floating scalar", batch_shapes(batch, batch.microbatch_size), ())


def sampling_problem(setup: TrainSetup) -> str:
    """Checks that a model can generate text, by tracing its method `logits` in evaluation mode. Runs nothing on a device.

    Args:
        setup: The setup of the run.

    Returns:
        An empty string if `logits` returns floating values [1, T, V] for int32 tokens [1, T], with T = `seq_len` and any V.
        Otherwise the error message.
    """
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
    """Shards the rows of an evaluation batch over the data ranks, the devices that process different rows of a batch.

    Args:
        setup: The setup of the run.
        batch: Tree of numpy arrays [B, ...], with the same B rows on every process.

    Returns:
        A tree like `batch` of JAX arrays [B, ...] with the first axis sharded over `dp` x `fsdp` devices. If the step has no
        mesh, or `dp` x `fsdp` does not divide B, the leaves are the numpy arrays of `batch`. A jitted function then replicates
        them.
    """
    mesh = setup.step.mesh

    def place(leaf: np.ndarray) -> Array | np.ndarray:
        if mesh is None or len(leaf) % setup.config.parallel.data_ranks:
            return leaf
        sharding = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(place, batch)


def heldout(config: TrainConfig, corpus: Corpus) -> list[Batch]:
    """Reads the held-out batches of an evaluation into memory. The same text is selected on every call.

    Args:
        config: The configuration of the run.
        corpus: The data. A held-out text with more tokens than the batches is sampled evenly.

    Returns:
        From 1 to `eval_batches` x `num_microbatches` batches. Each is an int32 numpy array of tokens [B, T + 1] with T =
        `seq_len`. B is the number of rows of a microbatch, or of the whole text if that has fewer. With `data_documents`
        `separate`, each is a dict with the keys "tokens" (the same), "starts" (int32 [B, T]: position in its row of the first
        token of the same document) and "weights" (float32 [B, T]: loss weight of each prediction, with a mean of 1 over all
        batches).

    Raises:
        DataError: If the held-out text is shorter than `seq_len` + 1 tokens, or documents are `separate` and the data has no
            document boundaries.
    """
    return heldout_batches(
        corpus.heldout_sources,
        batch_size=config.input.microbatch_size,
        seq_len=config.input.seq_len,
        limit=config.monitor.eval_batches * config.input.num_microbatches,
        documents=config.input.data_documents,
    )


def evaluator(setup: TrainSetup, batches: list[Batch], watchdog: Watchdog) -> Callable[[TrainState], float]:
    """Returns a function that evaluates a state on the same batches at every call.

    Args:
        setup: The setup of the run.
        batches: The batches, as `heldout` returns them: numpy arrays or dicts of them, the same on every process and all of the
            same shape.
        watchdog: Watches the waits for the devices. Compilation is not watched.

    Returns:
        A function that takes a state, in the layout that the training step returns, and returns the mean loss over all batches
        in nats per token, a float. It waits for the devices and does not donate the state. The first call compiles the program
        for states of this shape. Collective: every process must call the function.
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
    """Returns a decoder that generates text from a training state, on all devices of the step. Compiles nothing.

    Args:
        setup: The setup of the run.

    Returns:
        The `cached_decoder()` of the model, with a KV cache. If the model has none, a decoder that recomputes the logits of the
        whole window for each token. Pass the decoder to `jgraph.generate`, with the `TrainState` in place of the parameters.
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
    """Generates the sample text at the end of a run. Compiles and runs the programs for it. Prints and writes nothing.

    The prompt is the first 64 held-out tokens, or `seq_len` if that is less. For chat data, it is the first held-out
    conversation up to the first turn of the assistant. Samples at temperature 0.8, with the seed of the run. Collective: every
    process must call this function.

    Args:
        setup: The setup of the run. `sample_tokens` of its configuration must be positive.
        state: The final state, in the layout that the training step returns. Not donated.
        corpus: The data, which also converts tokens to text.

    Returns:
        The prompt, and a continuation of `sample_tokens` tokens without the prompt, both as text.
    """
    length = setup.config.input.seq_len
    packed = corpus.heldout_sources[0].packed
    count = min(_PROMPT_TOKENS, length) if packed is None else int(np.argmax(packed.trained))
    prompt = np.asarray(corpus.heldout[:count]).astype(np.int32)
    options = {"max_tokens": setup.config.monitor.sample_tokens, "temperature": _TEMPERATURE, "key": setup.config.seed}
    (tokens,) = generate(decoder(setup), state, [prompt], **options, window=length)
    return corpus.decode(prompt), corpus.decode(tokens)
