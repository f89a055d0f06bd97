"""A model on held-out text: that of a run or of a Hugging Face folder, over any devices, whatever it was trained on."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.data import Corpus, Tokenizer, is_text, load, tokenizer_file
from jgraph.data.tokenizer import TOKENIZER_FILE
from jgraph.errors import ConfigError, DataError
from jgraph.interop.folder import Folder
from jgraph.processes import devices_of_ranks
from jgraph.step.state import TrainState
from jgraph.train.config import TrainConfig
from jgraph.train.loaded import checked, is_folder, open_folder, place_folder, tokenizer_kept, tokenizer_of
from jgraph.train.saved import SavedRun
from jgraph.train.setup import TrainSetup
from jgraph.train.trainer import evaluator, heldout
from jgraph.train.watchdog import Watchdog

_LONGEST, _ROWS = 1024, 8  # of a folder, where nobody says more
# Of a run, what its evaluations depend on. All else is as usual: they are the same over any devices.
_KEPT = "module seq_len batch_size num_microbatches eval_batches data data_field data_documents"


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts text.

    Attributes:
        source: the model.
        data, fingerprint: the text, whose held-out part was predicted.
        batches, batch_size, seq_len: how many, of so many sequences, with so many tokens to predict.
        devices: how many.
        tokens: that were predicted.
        bytes: of text in these tokens, those that end a text left out; None where nobody knows.
        loss: nats a token.
    """

    source: str
    data: str
    fingerprint: str
    batches: int
    batch_size: int
    seq_len: int
    devices: int
    tokens: int
    bytes: int | None
    loss: float

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return float(np.exp(self.loss))

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits, by bytes instead of tokens, so that models with other tokens compare."""
        return self.loss / math.log(2) * self.tokens / self.bytes if self.bytes else None


class _Model(NamedTuple):
    """A model that is not read yet: how it is evaluated, its tokenizer if it has one, whether that reads text, its weights."""

    source: str
    config: TrainConfig
    tokenizer: Path | None
    reads_text: bool
    state: Callable[[TrainSetup], TrainState]


def evaluate(path: str | Path, step: int | None = None, *, module: str = "", **asked: Any) -> Evaluation:
    """Evaluates the model of a run directory or of a Hugging Face folder, as a run does while it trains.

    Args:
        path: The run directory or folder. The run may use any number of devices and may still be training.
        step: Step of the run's checkpoint; None for the newest.
        module: Model class of the run; required for a class outside `jgraph_models`, as in `load`.
        asked: `data`, `batch_size`, `seq_len`, `eval_batches`, `dp`, `fsdp` of `TrainConfig`; defaults to those of the run.

    Returns:
        The loss and the evaluated text.

    Raises:
        ConfigError: If an argument has a wrong value, or the run's class may not be imported.
        DataError: If the text cannot be read.
        CheckpointError: If there is no such checkpoint, or it is damaged.
    """
    path = checked(path)
    if not is_folder(path):
        saved = SavedRun(path, step, module=module)
        try:
            return _evaluated(_of_run(saved), asked)
        finally:
            saved.close()
    if "data" not in asked:
        raise ConfigError("`data` is missing: must be given for a Hugging Face folder", field="data")
    return _evaluated(_of_folder(*open_folder(path, step, module)), asked)


def _of_run(saved: SavedRun) -> _Model:
    def state(setup: TrainSetup) -> TrainState:
        like, dtype = setup.step.canonical.shapes(), jnp.dtype(saved.config.main_params_dtype)
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding), like.params)
        return setup.weights(**saved.place(params=params, carried=like.carried))

    model, kept = saved.config.model, _kept(saved.config)
    if saved.config.precision == "fp8" and (in_fp8 := getattr(model, "in_fp8", None)):
        model = in_fp8()
    reads_text = tokenizer_of(saved).name != "numbers"
    source = f"{saved.path} after {saved.step} steps"
    return _Model(source, TrainConfig(**kept, model=model), tokenizer_kept(saved), reads_text, state)


def _of_folder(folder: Folder, config: TrainConfig) -> _Model:
    def state(setup: TrainSetup) -> TrainState:
        return setup.weights(place_folder(folder, config, setup.step.canonical.shapes().params), setup.new_state())

    longest = min(_LONGEST, folder.window or _LONGEST)
    sizes = TrainConfig(module=config.module, model=config.model, batch_size=_ROWS, seq_len=longest)
    file = folder.path / TOKENIZER_FILE
    return _Model(str(folder.path), sizes, file if file.exists() else None, file.exists(), state)


def _evaluated(model: _Model, asked: dict[str, Any]) -> Evaluation:
    fields = _kept(model.config) | {"model": model.config.model}
    if "batch_size" in asked:
        fields["num_microbatches"] = 1
    # Checked before the batch: too few devices is the cause to report first.
    ranks = {name: count for name in ("dp", "fsdp") if isinstance(count := asked.get(name), int) and count > 1}
    devices_of_ranks(math.prod(ranks.values()), flags=" ".join(f"`{name}` {count}" for name, count in ranks.items()))
    config = TrainConfig(**fields | asked)
    if not model.reads_text and is_text(config.data):
        data, must = " ".join(config.data), f"directories of token files, as {model.source} has no tokenizer that reads text"
        raise DataError(f"`data` is {data}: must be {must}")
    how: dict[str, Any] = {"field": config.data_field, "documents": config.data_documents}
    vocab_size = getattr(config.model, "vocab_size", None)
    corpus = load(config.data, seq_len=config.seq_len, vocab_size=vocab_size, tokenizer=model.tokenizer, **how)
    setup, batches = TrainSetup.of(config), heldout(config, corpus)
    rows = [batch["tokens"] if isinstance(batch, dict) else batch for batch in batches]
    loss = evaluator(setup, batches, Watchdog(0, print))(model.state(setup))
    return Evaluation(
        source=model.source,
        data=corpus.name,
        fingerprint=corpus.fingerprint,
        batches=len(batches),
        batch_size=len(rows[0]),
        seq_len=config.seq_len,
        devices=setup.num_devices,
        tokens=sum(map(len, rows)) * config.seq_len,
        bytes=_bytes(corpus, rows, tokenizer_file(config.data) or model.tokenizer),
        loss=loss,
    )


def _kept(config: TrainConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in _KEPT.split()}


def _bytes(corpus: Corpus, batches: list[np.ndarray], file: Path | None) -> int | None:
    """Returns the bytes of the tokens that are predicted, which are all of a row but its first."""
    rows = [row.tolist() for batch in batches for row in batch]
    if corpus.train.dtype == np.uint8:
        return sum(len(row) - 1 for row in rows)
    try:
        own = Tokenizer.of_file(file) if file else None
    except DataError:  # the library is not here
        own = None
    if own is None:
        return None

    def size(ids: list[int]) -> int:
        return len(own.decode([token for token in ids if token not in own.ends]).encode())

    # With the token before them, because a tokenizer may treat the first of a text as no other.
    return sum(size(row) - size(row[:1]) for row in rows)
