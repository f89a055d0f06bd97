"""Loads the model of a run or of a Hugging Face folder onto one device."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jgraph.adapters import A, AdaptedModel, B, joined, separated
from jgraph.data import Tokenizer, is_text, tokenizer_beside
from jgraph.data.chat import prompt
from jgraph.data.tokenizer import TOKENIZER_FILE, vocabulary
from jgraph.errors import ConfigError, DataError, require
from jgraph.inference.generate import ENDED, Prompt, stream
from jgraph.inference.score import logits
from jgraph.inference.text import TextStream
from jgraph.interop.adapter import AdapterFolder, adapter_parts
from jgraph.interop.folder import Folder, check_exists
from jgraph.interop.load import load_parameters
from jgraph.interop.names import Part
from jgraph.modules import FunctionalModel
from jgraph.train._functional import functional_model
from jgraph.train.config import LoRAConfig, TrainConfig
from jgraph.train.initial import copied_folder, names_of
from jgraph.train.saved import SavedRun
from jgraph.tree import leaf_names
from jgraph.types import Tree

Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model with its parameters and tokenizer on one device. Made by `jgraph.load`.

    Attributes:
        model: The model as pure functions of its parameters.
        params: Parameters in the model's own tree, a nested dict of arrays. The dtype is that of the run's checkpoint. For a
            folder it is bfloat16 if config.json has this dtype, else float32.
        carried: Mutable state of the model, such as running statistics; empty if it has none.
        tokenizer: Its `encode` converts a text to token ids, and its `decode` token ids to a text.
        config: The configuration of the run. For a folder, a default configuration with the settings of its model.
        window: Longest sequence that the model was trained on, in tokens; None if a folder does not state it.
        source: "RUN after STEP steps", or the path of the folder.
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

    def logits(self, ids: Prompt | Sequence[Prompt]) -> Array:
        """Computes the logits of the token after each position, in evaluation mode.

        `loaded.logits(loaded.tokenizer.encode("The with"))[-1].argmax()` is the id of the most likely next token. The first
        call compiles a program. Later calls compile again if the number of texts or their longest length, rounded up
        to a multiple of 64, is new.

        Args:
            ids: Token ids of one text, [T], as from `tokenizer.encode`; or of several texts, [B, T] or a list of 1-D ids. A
                text has from 1 to `window` tokens. Texts of different lengths are padded on the right to the longest, so the
                model must be causal.

        Returns:
            float32 [T, V] for one text, or [B, T, V] for several, for a vocabulary of V tokens, on the device of `params`. The
            logits at position t belong to token t + 1. After the last token of a shorter text, they have no meaning.

        Raises:
            ConfigError: If a text is empty or longer than `window`, a token id is outside the vocabulary, or the model has no
                method `logits`.
        """
        return logits(self.model, self.params, ids, window=self.window, carried=self.carried)

    def generate(self, prompts: str | Sequence[str], **settings: Any) -> Any:
        """Continues one or several texts by sampling tokens.

        Args:
            prompts: A text, or several texts to continue at once. Each must have from 1 to `window` tokens.
            **settings: `stop`: texts that end a continuation, default none. `max_tokens`: largest number of new tokens, default
                128. `temperature`: divides the logits, default 1; 0 selects the most likely token. `top_k`: samples from this
                many of the most likely tokens, default 0 for all. `top_p`: samples from the most likely tokens with this total
                probability, default 1 for all. `key`: seed or random key, default 0. `window`: largest number of tokens that a
                token attends to, default `self.window`; None for no limit.

        Returns:
            The new text (str), or a list of new texts in the order of `prompts` if these are several. A new text has neither
            the prompt nor the `stop` text or end-of-text token that ended it.

        Raises:
            ConfigError: If an argument has a value that is not allowed, or a prompt has no token or more than `window` tokens.
            DataError: If the model has no tokenizer that converts text to token ids.
        """
        batch = [prompts] if isinstance(prompts, str) else list(prompts)
        texts = ["" for _ in batch]
        for number, piece in self.stream(batch, **settings):
            texts[number] += piece
        return texts[0] if isinstance(prompts, str) else texts

    def stream(self, prompts: Sequence[str], *, stop: Sequence[str] = (), **settings: Any) -> Iterator[tuple[int, str]]:
        """Continues several texts at once, and yields their new text in pieces as it is generated.

        The call checks the arguments. The programs are compiled when the iterator is first advanced.

        Args:
            prompts: The texts to continue. Each must have from 1 to `window` tokens.
            stop: Non-empty texts that end a continuation. Neither these texts nor end-of-text tokens are returned.
            **settings: `max_tokens`: largest number of new tokens per text, default 128. `temperature`: divides the logits,
                default 1; 0 selects the most likely token. `top_k`: samples from this many of the most likely tokens, default 0
                for all. `top_p`: samples from the most likely tokens with this total probability, default 1 for all. `key`:
                seed or random key, default 0. `window`: largest number of tokens that a token attends to, default
                `self.window`; None for no limit.

        Yields:
            The index in `prompts` and the next piece of the new text of this prompt. Pieces of different prompts alternate. The
            new text of a prompt is the concatenation of its pieces.

        Raises:
            ConfigError: If an argument has a value that is not allowed, or a prompt has no token or more than `window` tokens.
                The call raises it, not the iterator.
            DataError: If the model has no tokenizer that converts text to token ids. The call raises it, not the iterator.
        """
        require(all(stop), "stop", "an empty text", "a text")
        return self._stream([self.tokenizer.encode(prompt) for prompt in prompts], stop, settings)

    def _stream(self, rows: list[list[int]], stop: Sequence[str], settings: dict[str, Any]) -> Iterator[tuple[int, str]]:
        settings = {"window": self.window, "carried": self.carried} | settings
        steps = stream(self.model, self.params, rows, stop=self.tokenizer.ends, **settings)
        return pieces(steps, [TextStream(self.tokenizer.decode, row, stop) for row in rows])

    def chat(self, messages: Sequence[Message], *, tools: Any = None, **settings: Any) -> str:
        """Generates the assistant's answer to a conversation.

        Args:
            messages: Messages with a `role` and `content`, in the form that the chat template reads. The last one is usually of
                the role `user`.
            tools: Descriptions of tools, in the form that the chat template reads; None for none.
            **settings: `stop`, `max_tokens`, `temperature`, `top_k`, `top_p`, `key` and `window`, as in `generate`.

        Returns:
            The answer, without the token that ends it.

        Raises:
            ConfigError: If a setting has a value that is not allowed, or the rendered messages have no token or more than
                `window` tokens.
            DataError: If the model has no chat template or no tokenizer, or the template refuses the messages.
        """
        return "".join(piece for _, piece in self.chat_stream([messages], tools=tools, **settings))

    def chat_stream(
        self, conversations: Sequence[Sequence[Message]], *, tools: Any = None, stop: Sequence[str] = (), **settings: Any
    ) -> Iterator[tuple[int, str]]:
        """Generates the assistant's answers to several conversations at once, and yields them in pieces.

        An answer ends with the end-of-text token of the tokenizer, an `eos_token_id` of generation_config.json or config.json,
        or the text with which the template ends a turn.

        Args:
            conversations: The messages of each conversation, as in `chat`.
            tools: Descriptions of tools, in the form that the chat template reads; None for none.
            stop: Non-empty texts that also end an answer. They are not returned.
            **settings: As in `stream`.

        Yields:
            The index in `conversations` and the next piece of the answer. Pieces of different answers alternate.

        Raises:
            ConfigError: If an argument has a value that is not allowed. The call raises it, not the iterator.
            DataError: If the model has no chat template or no tokenizer, or the template refuses the messages. The call raises
                it, not the iterator.
        """
        require(all(stop), "stop", "an empty text", "a text")
        if self.tokenizer.chat(tools) is None:
            must = "a run or folder with a chat template, such as a chat_template.jinja beside its tokenizer.json"
            raise DataError(f"`run` is {self.source}: must be {must}", field="run")
        rows, ends = zip(*(prompt(self.tokenizer, messages, tools) for messages in conversations), strict=True)
        return self._stream([*rows], (*stop, *dict.fromkeys(end for own in ends for end in own)), settings)


def pieces(steps: Iterator[np.ndarray], texts: list[TextStream]) -> Iterator[tuple[int, str]]:
    """Yields the pieces of several texts from the tokens of `stream`, each with the number of its text."""
    for tokens_B in steps:
        for number, (text, token) in enumerate(zip(texts, tokens_B.tolist(), strict=True)):
            if piece := text.finish() if token == ENDED else text.push(token):
                yield number, piece
        if all(text.ended for text in texts):
            return
    for number, text in enumerate(texts):
        if piece := text.finish():
            yield number, piece


def load(path: str | Path, step: int | None = None, *, module: str = "", adapter: str | Path | None = None) -> Loaded:
    """Loads the model of a run directory or of a Hugging Face folder onto the first device.

    Args:
        path: A run directory, or a folder with the config.json and safetensors files of a model. The run may use any number of
            devices and may still be training.
        step: Number of steps of the run's checkpoint; None for the newest. Must be None for a folder.
        module: Model class of the run, as `package.module:Class`. Required for a class outside `jgraph_models`: loading imports
            the module and so runs its code. Must be empty for a folder.
        adapter: A PEFT folder with a LoRA adapter for the model, adapter_config.json and adapter_model.safetensors. The `model`
            of the result is then an `AdaptedModel`, and `params` has the adapters in float32.

    Returns:
        The model with its parameters and its tokenizer. If the tokenizer is unknown, token ids are decoded to numbers.

    Raises:
        ConfigError: If there is neither a run nor a folder, `step` or `module` is given for a folder, or `module` is not the
            class of the run. Also if `module` is empty for a class outside `jgraph_models`, or the folder is damaged. If
            `adapter` is given for a run with LoRA, is damaged, does not fit the model, or has features other than plain LoRA.
        CheckpointError: If the run does not have the checkpoint, or the checkpoint is damaged.
        DataError: If the tokenizer is damaged, or the package `transformers` is not installed.
    """
    with opened(path, step, module=module, adapter=adapter) as source:
        model = functional_model(source.config)
        params, carried = source.weights(model.shapes, model.carried)
    carried = model.new_state() if carried is None else carried
    return Loaded(model, params, carried, source.tokenizer, source.config, source.window, source.about)


class Source(NamedTuple):
    """A model that is opened, but not read."""

    about: str
    config: TrainConfig
    tokenizer: Tokenizer
    window: int | None
    # Reads arrays with the shapes and shardings of two trees, parameters and carried state, in the dtypes of the files. The
    # second result is None if the source has no carried state.
    weights: Callable[[Tree, Tree], tuple[Tree, Tree | None]]


@contextlib.contextmanager
def opened(path: str | Path, step: int | None, *, module: str, adapter: str | Path | None) -> Iterator[Source]:
    """Opens the run directory or Hugging Face folder of `load`, with an adapter if one is given, inside a `with` block."""
    check_exists(path, field="run")
    path = Path(path)
    if not (path / "config.json").exists():
        must = "a run directory or a Hugging Face folder, with a config.json"
        raise ConfigError(f"`run` is {path}: must be {must}", field="run")
    with contextlib.ExitStack() as stack:
        if is_folder(path):
            source = _of_folder(path, step, module)
        else:
            source = _of_run(stack.enter_context(contextlib.closing(SavedRun(path, step, module=module))))
        yield source if adapter is None else _with_adapter(source, Path(adapter))


def is_folder(path: Path) -> bool:
    """Returns True for a Hugging Face folder: its config.json has the key "architectures"."""
    try:
        fields = json.loads((path / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return False  # `SavedRun` reports the error
    return isinstance(fields, dict) and "architectures" in fields


def _of_run(saved: SavedRun) -> Source:
    def weights(params: Tree, carried: Tree) -> tuple[Tree, Tree]:
        found = saved.read_tree(params=params, carried=carried)
        return found["params"], found["carried"]

    return Source(
        f"{saved.path} after {saved.step} steps", saved.config, _tokenizer_of(saved), saved.config.input.seq_len, weights
    )


def _tokenizer_of(saved: SavedRun) -> Tokenizer:
    """Returns the tokenizer in the run directory, else that of the token files of the run.

    Without one, text is bytes if the run was trained on text or has a vocabulary of at most 256 tokens. Otherwise ids have
    no text.
    """
    origin = saved.dir.origin
    folder = copied_folder(saved.dir)
    own, beside = vocabulary(origin), tokenizer_beside(saved.config.input.data)
    is_bytes = is_text(saved.config.input.data) or saved.config.hooks.vocab_size <= 256
    if own or beside or is_bytes:
        found = beside if beside and not own else origin if origin.exists() else None
        return Tokenizer.of(found, ends=folder.ends if folder else [])
    return Tokenizer(without=f"{saved.dir.path} has no tokenizer")


def _of_folder(path: Path, step: int | None, module: str) -> Source:
    """Opens the folder of a GPT of `jgraph_models`: reads config.json, and the names and shapes of the tensors."""
    require(step is None, "step", step, "left out for a Hugging Face folder")
    require(not module, "module", module, "left out for a Hugging Face folder")
    config = TrainConfig()
    folder, names = Folder(path, field="run"), names_of(config.module, field="run")
    settings = dataclasses.replace(folder.settings(names, config.model), compute_dtype=folder.dtype)
    folder.check(names, settings)

    def weights(params: Tree, carried: Tree) -> tuple[Tree, None]:
        # In the dtype of the folder: only updates need parameters in float32.
        dtype = jnp.dtype(settings.compute_dtype)
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding), params)
        return load_parameters(folder, names.parts(settings), like), None

    window, ends = folder.window, folder.ends  # read first: a wrong field must not wait for a tokenizer
    tokenizer = Tokenizer.of(path, ends=ends) if vocabulary(path) else Tokenizer(without=f"{path} has no {TOKENIZER_FILE}")
    config = config.changed(model=settings, init_from=str(path), preset="")
    return Source(str(path), config, tokenizer, window, weights)


def _with_adapter(source: Source, path: Path) -> Source:
    folder, config, model = open_adapter(path, source.config)

    def weights(params: Tree, carried: Tree) -> tuple[Tree, Tree | None]:
        base, found = source.weights(separated(params)[0], carried)
        parts = _parts_of_adapters(config, model)
        leaves = dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))
        low: Any = load_parameters(folder, parts, {name: leaves[name] for name in parts})
        return joined(base, {name: (low[name + A], low[name + B]) for name in model.adapters}), found

    return source._replace(about=f"{source.about} with {path}", config=config, weights=weights)


def open_adapter(path: Path, config: TrainConfig) -> tuple[AdapterFolder, TrainConfig, AdaptedModel]:
    """Opens a PEFT folder. Also returns the configuration with the LoRA settings of the adapter, and its model."""
    require(not config.lora.rank, "adapter", path, "left out for a run with LoRA")
    folder = AdapterFolder(path, field="adapter")
    rank, alpha = folder.rank_and_alpha()
    targets = folder.targets(names_of(config.module, field="adapter").parts(config.model))
    config = config.changed(lora=LoRAConfig(rank=rank, alpha=alpha, targets=targets))
    try:
        model = functional_model(config)
        assert isinstance(model, AdaptedModel), "`rank` is positive"
        parts = _parts_of_adapters(config, model)
    except ConfigError as e:  # names the setting `targets`, not the folder
        raise folder.error(f"does not fit the model: {e}") from e
    folder.check_adapters(parts)
    return folder, config, model


def _parts_of_adapters(config: TrainConfig, model: AdaptedModel) -> dict[str, tuple[Part, ...]]:
    return adapter_parts(names_of(config.module, field="adapter").parts(config.model), model.adapters, model.rank)
