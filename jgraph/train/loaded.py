"""Loads the model of a run or of a Hugging Face folder onto one device."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jgraph.data import Tokenizer, is_text, tokenizer_file
from jgraph.data.tokenizer import TOKENIZER_FILE
from jgraph.errors import ConfigError, require
from jgraph.inference.generate import ENDED, stream
from jgraph.inference.text import TextStream
from jgraph.interop.folder import Folder, check_exists
from jgraph.interop.load import load as load_folder
from jgraph.modules import FunctionalModel
from jgraph.train.config import TrainConfig
from jgraph.train.initial import copied_folder, names_of
from jgraph.train.saved import SavedRun
from jgraph.train.setup import functional_model
from jgraph.tree import path_name

Tree = Any


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model with its parameters and tokenizer on one device. Made by `jgraph.load`.

    Attributes:
        model: The model as pure functions.
        params: Parameters in the model's own tree.
        carried: The carried state of the model.
        tokenizer: `encode` and `decode`.
        config: The configuration of the run. For a folder, a default configuration with the settings of its model.
        window: Largest number of tokens that the model was trained on; None if unknown.
        source: The run and step, or the folder.
    """

    model: FunctionalModel = field(repr=False)
    params: Tree = field(repr=False)
    carried: Tree = field(repr=False)
    tokenizer: Tokenizer
    config: TrainConfig = field(repr=False)
    window: int | None
    source: str

    def __repr__(self) -> str:
        size = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        name = self.config.module.rpartition(":")[2]
        return f"{name} of {self.source}: {size:,} parameters, tokenizer {self.tokenizer.name}, window {self.window}"

    def generate(self, prompts: str | Sequence[str], **settings: Any) -> Any:
        """Generates text.

        Args:
            prompts: A text, or several texts to continue at once.
            **settings: Arguments of `stream`.

        Returns:
            The new text, or a list of new texts for a list of prompts.
        """
        batch = [prompts] if isinstance(prompts, str) else list(prompts)
        texts = ["" for _ in batch]
        for number, piece in self.stream(batch, **settings):
            texts[number] += piece
        return texts[0] if isinstance(prompts, str) else texts

    def stream(self, prompts: Sequence[str], *, stop: Sequence[str] = (), **settings: Any) -> Iterator[tuple[int, str]]:
        """Generates text for several prompts at once.

        Args:
            prompts: The texts to continue.
            stop: Texts that end a continuation. They are not returned. End-of-text tokens are not returned either.
            **settings: `max_tokens`, `temperature`, `top_k`, `top_p`, `key`, `window` of `jgraph.generate`.

        Yields:
            The index of a prompt and a piece of its new text.

        Raises:
            ConfigError: If an argument has a value that is not allowed.
            DataError: If there is no tokenizer.
        """
        require(all(stop), "stop", "an empty text", "a text")
        rows = [self.tokenizer.encode(prompt) for prompt in prompts]
        settings = {"window": self.window, "carried": self.carried} | settings
        steps = stream(self.model, self.params, rows, stop=self.tokenizer.ends, **settings)
        return _pieces(steps, [TextStream(self.tokenizer.decode, row, stop) for row in rows])


def _pieces(steps: Iterator[np.ndarray], texts: list[TextStream]) -> Iterator[tuple[int, str]]:
    for tokens_B in steps:
        for number, (text, token) in enumerate(zip(texts, tokens_B.tolist(), strict=True)):
            if token != ENDED and (piece := text.push(token)):
                yield number, piece
        if all(text.ended for text in texts):
            return
    for number, text in enumerate(texts):
        if piece := text.finish():
            yield number, piece


def load(path: str | Path, step: int | None = None, *, module: str = "") -> Loaded:
    """Loads the model of a run directory or of a Hugging Face folder onto the first device.

    Args:
        path: The run directory or folder. The run may use any number of devices and may still be training.
        step: Step of the run's checkpoint; None for the newest.
        module: Model class of the run, as `package.module:Class`. Required for a class outside `jgraph_models`: loading imports
            the module and so runs its code.

    Returns:
        The model with its parameters.

    Raises:
        ConfigError: If there is neither a run nor a folder, or the run's class may not be imported.
        CheckpointError: If there is no such checkpoint, or it is damaged.
    """
    path = checked(path)
    return _of_folder(path, step, module) if is_folder(path) else _of_run(path, step, module)


def checked(path: str | Path) -> Path:
    """Returns the path of a run directory or Hugging Face folder. Raises ConfigError if it is neither."""
    check_exists(path, field="run")
    if not (Path(path) / "config.json").exists():
        must = "a run directory or a Hugging Face folder, with a config.json"
        raise ConfigError(f"`run` is {path}: must be {must}", field="run")
    return Path(path)


def is_folder(path: Path) -> bool:
    """Returns True if the directory is a Hugging Face folder."""
    try:
        fields = json.loads((path / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return False  # `SavedRun` reports the error
    return isinstance(fields, dict) and "architectures" in fields


def _of_run(path: Path, step: int | None, module: str) -> Loaded:
    saved = SavedRun(path, step, module=module)
    model = saved.model
    params = jax.tree_util.tree_map_with_path(lambda key, _: jnp.asarray(saved.read(path_name(key))), model.shapes)
    carried = saved.place(carried=model.carried)["carried"]
    saved.close()
    source = f"{path} after {saved.step} steps"
    return Loaded(model, params, carried, tokenizer_of(saved), saved.config, saved.config.input.seq_len, source)


def tokenizer_kept(saved: SavedRun) -> Path | None:
    """Returns the tokenizer.json in the run directory or beside its token files."""
    files = (saved.dir.origin / TOKENIZER_FILE, tokenizer_file(saved.config.input.data))
    return next((file for file in files if file and file.exists()), None)


def tokenizer_of(saved: SavedRun) -> Tokenizer:
    """Returns the tokenizer of a run. If it is unknown, tokens are printed as numbers."""
    vocab_size = getattr(saved.config.model, "vocab_size", 256)
    if file := tokenizer_kept(saved):
        folder = copied_folder(saved.dir)
        return Tokenizer.of_file(file, ends=folder.ends if folder else [])
    if is_text(saved.config.input.data) or vocab_size <= 256:
        return Tokenizer.of_bytes()
    return Tokenizer.of_numbers(f"{saved.dir.path} has no tokenizer")


def open_folder(path: Path, step: int | None, module: str) -> tuple[Folder, TrainConfig]:
    """Opens a Hugging Face folder.

    Args:
        path: The folder.
        step: Must be None, because a folder has no checkpoints.
        module: Must be empty, because config.json defines the model.

    Returns:
        The folder, and a configuration with its model, which computes in the dtype of the folder.

    Raises:
        ConfigError: If an argument is wrong or the folder cannot be read.
    """
    require(step is None, "step", step, "left out for a Hugging Face folder")
    require(not module, "module", module, "left out for a Hugging Face folder")
    config = TrainConfig()
    folder, names = Folder(path, field="run"), names_of(config.module, field="run")
    settings = dataclasses.replace(folder.settings(names, config.model), compute_dtype=folder.dtype)
    folder.check(names, settings)
    return folder, config.changed(model=settings, init_from=str(path), preset="")


def place_folder(folder: Folder, config: TrainConfig, like: Tree) -> Tree:
    """Loads the parameters of a folder.

    Args:
        folder: The folder, from `open_folder`.
        config: The configuration, from `open_folder`.
        like: Shapes of the parameters with their shardings.

    Returns:
        The parameters, in the dtype of the folder.
    """
    parts = names_of(config.module, field="run").parts(config.model)
    # In the dtype of the folder: only updates need parameters in float32.
    dtype = jnp.dtype(config.model.compute_dtype)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding), like)
    return load_folder(folder, parts, like)


def _of_folder(path: Path, step: int | None, module: str) -> Loaded:
    folder, config = open_folder(path, step, module)
    window, ends = folder.window, folder.ends
    model = functional_model(config)
    params = place_folder(folder, config, model.shapes)
    file = path / TOKENIZER_FILE
    of_file = partial(Tokenizer.of_file, file, ends=ends, add_special_tokens=True)
    tokenizer = of_file() if file.exists() else Tokenizer.of_numbers(f"{path} has no {TOKENIZER_FILE}")
    return Loaded(model, params, model.new_state(), tokenizer, config, window, str(path))
