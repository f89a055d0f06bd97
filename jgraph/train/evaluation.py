"""Evaluates the model of a run or of a Hugging Face folder on held-out text, on any devices."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jgraph.data import Corpus, has_chats, is_text, load
from jgraph.errors import ConfigError, DataError
from jgraph.processes import devices_of_ranks
from jgraph.train._validation import evaluator, heldout
from jgraph.train._watchdog import Watchdog
from jgraph.train.config import TrainConfig
from jgraph.train.loaded import Source, is_folder, opened
from jgraph.train.setup import TrainSetup

_LONGEST, _ROWS = 1024, 8  # for a folder: maximum tokens per sequence, and sequences per batch
# An evaluation uses these settings of the run. All others have their defaults, so that any number of devices can be used.
_SETTINGS = "module seq_len batch_size num_microbatches eval_batches data data_field data_documents data_format data_truncate"


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation of the held-out part of `data`."""

    # "RUN after STEP steps", or the path of the Hugging Face folder
    source: str
    data: str
    # SHA-256 of the data
    fingerprint: str
    batches: int
    # sequences per batch, over all devices
    batch_size: int
    # predicted tokens per sequence
    seq_len: int
    devices: int
    # predicted tokens of all batches; for chat data only those in the loss
    tokens: int
    # UTF-8 bytes of the predicted tokens without end-of-text tokens; None if the tokenizer is unknown
    bytes: int | None
    # mean over all predicted tokens, in nats per token
    loss: float

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss))

    @property
    def bits_per_byte(self) -> float | None:
        """Loss in bits per byte of text, which is comparable between tokenizers."""
        return self.loss / math.log(2) * self.tokens / self.bytes if self.bytes else None


def evaluate(
    path: str | Path,
    step: int | None = None,
    *,
    module: str = "",
    adapter: str | Path | None = None,
    **overrides: Any,
) -> Evaluation:
    """Evaluates the model of `jgraph.load` on held-out text, on any devices. `overrides` are fields of `TrainConfig`.

    The defaults are those of the run, which select the batches that it evaluates itself, but one device. For a folder, they are
    8 sequences of at most 1024 tokens and 16 batches, and `data` must be given.
    """
    from_folder = is_folder(Path(path))
    if from_folder and "data" not in overrides:
        raise ConfigError("`data` is missing: must be given for a Hugging Face folder", field="data")
    with opened(path, step, module=module, adapter=adapter) as source:
        fields = _settings(source.config)
        if from_folder:
            fields |= {"batch_size": _ROWS, "seq_len": min(_LONGEST, source.window or _LONGEST)}
        return _evaluated(source, fields, overrides)


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings of a run that its evaluation uses. FP8 is not one of them, but a model for FP8 is."""
    fields = config.to_dict()
    model = config.hooks.in_fp8(config.model) if config.is_fp8 else config.model
    return {name: fields[name] for name in _SETTINGS.split()} | {"lora": config.lora, "model": model}


def _evaluated(model: Source, fields: dict[str, Any], overrides: dict[str, Any]) -> Evaluation:
    if "batch_size" in overrides:
        fields["num_microbatches"] = 1
    if "data" in overrides and "data_format" not in overrides and has_chats(overrides["data"], fields["data_field"]):
        overrides = overrides | {"data_format": "chat"}
    # Checked before the batch size: too few devices must be reported first.
    ranks = {name: count for name in ("dp", "fsdp", "tp") if isinstance(count := overrides.get(name), int) and count > 1}
    devices_of_ranks(math.prod(ranks.values()), flags=" ".join(f"`{name}` {count}" for name, count in ranks.items()))
    config = TrainConfig.from_fields(**fields | overrides)
    if model.tokenizer.name == "numbers" and is_text(config.input.data):
        must = f"directories of token files, because {model.about} has no tokenizer for text"
        raise DataError(f"`data` is {' '.join(config.input.data)}: must be {must}")
    corpus = load(config.input.data, tokenizer=model.tokenizer, **config.data_options)
    setup = TrainSetup.from_config(config)
    batches = heldout(config, corpus)
    rows = [batch["tokens"] if isinstance(batch, dict) else batch for batch in batches]
    counted: Sequence[Iterable[np.ndarray]] = rows
    if config.input.data_format == "chat":
        weights = [batch["weights"] for batch in batches if isinstance(batch, dict)]
        counted = [list(map(_trained, *both)) for both in zip(rows, weights, strict=True)]
    shapes = setup.step.canonical.shapes()
    params, carried = model.weights(shapes.params, shapes.carried)
    state = setup.inference_state(params, setup.new_carried() if carried is None else carried)
    loss = evaluator(setup, batches, Watchdog(0, print))(state)
    return Evaluation(
        source=model.about,
        data=corpus.name,
        fingerprint=corpus.fingerprint,
        batches=len(batches),
        batch_size=len(rows[0]),
        seq_len=config.input.seq_len,
        devices=setup.step.num_devices,
        tokens=sum(len(row) - 1 for batch in counted for row in batch),
        bytes=_bytes(corpus, counted),
        loss=loss,
    )


def _trained(row_S: np.ndarray, weights_T: np.ndarray) -> np.ndarray:
    """Returns the first token of a row and its predicted tokens with a weight above 0."""
    return np.append(row_S[:1], row_S[1:][weights_T > 0])


def _bytes(corpus: Corpus, batches: Sequence[Iterable[np.ndarray]]) -> int | None:
    """Returns the bytes of the predicted tokens, which are all tokens of a row except the first; None for ids without text."""
    rows = [row.tolist() for batch in batches for row in batch]
    tokenizer = corpus.tokenizer
    if corpus.train.dtype == np.uint8:
        return sum(len(row) - 1 for row in rows)
    if tokenizer.name == "numbers":
        return None

    def size(ids: list[int]) -> int:
        return len(tokenizer.decode([token for token in ids if token not in (tokenizer.bos, *tokenizer.ends)]).encode())

    # Decoded with the token before them, because a tokenizer may decode the first token of a text differently.
    return sum(size(row) - size(row[:1]) for row in rows)
