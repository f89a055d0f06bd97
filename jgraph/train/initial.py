"""Initial weights of a run, from a Hugging Face folder or from another run.

The tokenizer and the small files of the source are copied into `origin/` in the run directory, so that the run can be resumed,
sampled and exported after the source has been removed.
"""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jgraph.adapters import AdaptedModel, joined, separated
from jgraph.checkpoint.canonical import leaves_of
from jgraph.data import Tokenizer, is_text, tokenizer_beside
from jgraph.data._texts import copy_files
from jgraph.data.tokenizer import (
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    declaration,
    tokenizer_files,
    vocabulary,
)
from jgraph.dispatch import in_turn
from jgraph.errors import ConfigError, download_hint, os_errors, require
from jgraph.interop.folder import CONFIG_FILE, Folder
from jgraph.interop.load import load_parameters
from jgraph.interop.names import HuggingFace
from jgraph.step.state import TrainState
from jgraph.train.config import InitialConfig, TrainConfig
from jgraph.train.hooks import model_hooks
from jgraph.train.model import settings_hooks
from jgraph.train.optimizer import restart_schedule
from jgraph.train.rundir import ORIGIN, RunDir, run_of
from jgraph.train.saved import SavedRun
from jgraph.train.setup import TrainSetup

# Settings that may differ from those of the initial weights: dtype and order of matmuls, and the training of routers.
_FREE = ("model.compute_dtype", "model.tensor_overlap", "model.moe.balance_loss", "model.moe.z_loss", "model.moe.bias_rate")


OnRead: TypeAlias = Callable[[dict[str, Array]], object]


def names_of(module: str, *, field: str) -> HuggingFace:
    """Imports a model class and returns its map between parameters and Hugging Face tensors, which `field` requires."""
    if (names := model_hooks(module).hugging_face) is None:
        raise ConfigError(
            f"`module` is {module}: must have the attribute hugging_face, a HuggingFace, for `{field}`", field="module"
        )
    return names


def with_settings_of(
    module: str, model: Any, init_from: str, run_dir: str, *, compute_dtype: Literal["model", "folder"] = "model"
) -> Any:
    """Returns a copy of model settings with the sizes in the config.json of a Hugging Face folder. Reads no tensors.

    If the folder has been removed, reads the copy of its config.json in the run directory.
    """
    copy = RunDir(Path(run_dir)).origin
    path = copy if not Path(init_from).exists() and (copy / CONFIG_FILE).exists() else Path(init_from)
    folder = Folder(path, field="init_from")
    settings = folder.settings(names_of(module, field="init_from"), model)
    if compute_dtype == "model" or settings_hooks(module, settings).compute_dtype is None:
        return settings
    return dataclasses.replace(settings, compute_dtype=folder.dtype)


def dtype_of_source(init_from: str, continue_from: str, run_dir: str) -> str:
    """Returns the dtype of the folder that weights came from, perhaps by way of other runs; float32 if there was none."""
    source = Path(init_from) if init_from and not continue_from else run_of(continue_from)[0] / ORIGIN
    folders = [path for path in (source, RunDir(Path(run_dir)).origin) if (path / CONFIG_FILE).exists()]
    return Folder(folders[0], field="init_from").dtype if folders else "float32"


def config_of_run(continue_from: str, run_dir: str, *, module: str = "") -> TrainConfig:
    """Returns the saved configuration of the other run, or of the run in `run_dir` if the other has been removed."""
    source, target = RunDir(run_of(continue_from)[0]), RunDir(Path(run_dir))
    is_removed = not source.path.exists() and target.config.exists()
    if not is_removed and not source.path.exists() and download_hint(continue_from):
        raise ConfigError(
            f"`continue_from` is {continue_from}: no such run directory; for a model of the Hugging Face Hub, use `init_from`",
            field="continue_from",
        )
    return (target if is_removed else source).saved_config(field="continue_from", module=module)


def check_alike(here: Any, there: Any, as_it: str, prefix: str = "model.") -> None:
    """Checks that the model settings `here` of a run equal those of its initial weights, except for `_FREE`."""
    for field in dataclasses.fields(here) if here is not None else ():
        name = f"{prefix}{field.name}"
        value, expected = (getattr(settings, field.name) for settings in (here, there))
        if dataclasses.is_dataclass(value) and type(value) is type(expected):
            check_alike(value, expected, as_it, f"{name}.")
        elif name not in _FREE:
            require(value == expected, name, value, f"{expected}, {as_it}, or left out")


def tokenizer_of(config: TrainConfig, copies: Path | None = None) -> Tokenizer | None:
    """Returns the tokenizer of the initial weights, which reads the data, with the template of the run; None for bytes.

    `copies` has copies of the files of the weights and of `data_template`, if the run resumes.
    """
    folder = copies or _source(config.initial)
    template = None if copies else config.input.data_template
    if not template and (folder is None or not (_source(config.initial) or config.input.data_template)):
        return None
    return Tokenizer.of(folder if folder and folder.exists() else None, Path(template) if template else None)


def tokenizer_warning(config: TrainConfig) -> str:
    """Warns if the data may have other token ids than the weights were trained on: text read as bytes, other token files."""
    if (source := _source(config.initial)) is None:
        return ""
    name, path = ("init_from", config.initial.init_from) if config.initial.init_from else ("continue_from", source.parent)
    data = config.input.data
    own = vocabulary(source)
    shown = " ".join(data)
    # A run without a tokenizer was trained on bytes if its vocabulary has at most 256 tokens.
    reads_bytes = not config.initial.init_from and config.hooks.vocab_size <= 256
    if own is None and not reads_bytes and is_text(data):
        return f"`{name}` {path} has no {TOKENIZER_FILE}: `data` {shown} is read as bytes"
    if own and (other := vocabulary(tokenizer_beside(data))) and own.read_bytes() != other.read_bytes():
        return f"`data` {shown} was made with another {TOKENIZER_FILE} than `{name}` {path} has"
    return ""


def write_origin(config: TrainConfig, run_dir: RunDir) -> None:
    """Copies config.json and the tokenizer of the initial weights, else of token files, into a new `origin/`.

    The file `data_template` replaces all templates.
    """
    shutil.rmtree(run_dir.origin, ignore_errors=True)
    source = _source(config.initial)
    template = config.input.data_template
    folders = [folder for folder in (source, None if vocabulary(source) else tokenizer_beside(config.input.data)) if folder]
    files = {name: folder / name for folder in folders for name in tokenizer_files(folder)}
    if source and tokenizer_files(source, [CONFIG_FILE]):
        files[CONFIG_FILE] = source / CONFIG_FILE
    if template:
        files = {name: file for name, file in files.items() if not name.startswith("additional_chat_templates/")}
        files[TEMPLATE_FILE] = Path(template)
    with os_errors("run_dir", run_dir.origin):
        copy_files(files, run_dir.origin)
        if TOKENIZER_FILE in files and not source and TOKENIZER_CONFIG_FILE not in files:
            # An exported folder then means the same to `transformers`.
            (run_dir.origin / TOKENIZER_CONFIG_FILE).write_text(declaration(files[TOKENIZER_FILE]))


def copied_folder(run_dir: RunDir) -> Folder | None:
    """Opens `origin/` as a Hugging Face folder without tensors; None if it has no config.json."""
    return Folder(run_dir.origin, field="run") if (run_dir.origin / CONFIG_FILE).exists() else None


def _source(initial: InitialConfig) -> Path | None:
    """Returns the directory with the tokenizer of the initial weights, or None if the weights are random."""
    if initial.continue_from:
        return run_of(initial.continue_from)[0] / ORIGIN
    return Path(initial.init_from) if initial.init_from else None


@dataclass(frozen=True)
class InitialWeights:
    """An opened source of weights for the first state of a run, in the layout and dtypes of the step."""

    # name of the source, for the line that the run prints
    about: str
    # steps of the other run's checkpoint; None for a Hugging Face folder
    step: int | None
    # a second argument is called with the parameters as they are read, by the names of their leaves in a checkpoint
    load: Callable[..., TrainState]
    # absolute path of the folder or of the checkpoint, for `checkpoint_base` reference
    path: Path
    close: Callable[[], None] = lambda: None


def initial_weights(config: TrainConfig) -> InitialWeights | None:
    """Opens the source of the initial weights and checks its model. Loads no weights. None if they are random.

    The caller closes the source.
    """
    initial = config.initial
    if not (initial.init_from or initial.continue_from):
        return None
    if initial.init_from:
        names = names_of(config.module, field="init_from")
        folder = Folder(Path(initial.init_from), field="init_from")
        settings = folder.settings(names, config.model)
        folder.check(names, settings)
        check_alike(config.model, settings, f"as in `init_from` {initial.init_from}")
        return InitialWeights(initial.init_from, None, partial(_of_folder, folder), folder.path.absolute())
    path, step = run_of(initial.continue_from)
    if path.resolve() == Path(config.output.run_dir).resolve():
        raise ConfigError(
            f"`run_dir` is {config.output.run_dir}: must be another directory than `continue_from`", field="run_dir"
        )
    saved = SavedRun(path, step, module=config.module, field="continue_from")
    with contextlib.ExitStack() as on_error:
        on_error.callback(saved.close)
        check_alike(config.model, saved.config.model, f"as in `continue_from` {initial.continue_from}")
        for name in ("name", "args", "groups") if initial.continue_with == "optimizer" else ():
            here, there = getattr(config.optimizer, name), getattr(saved.config.optimizer, name)
            allowed = f"{_shown(there)}, as in `continue_from` {initial.continue_from}, or use `continue_with` weights"
            require(here == there, f"optimizer.{name}", _shown(here), allowed)
        base = config.output.checkpoint_base
        is_merged = saved.config.lora.rank > 0 and saved.config.lora != config.lora
        must = "copy, because the adapters of the run `continue_from` are added to its weights (`lora` differs)"
        require(base == "copy" or not is_merged, "checkpoint_base", base, must)
        on_error.pop_all()
    checkpoint = saved.dir.checkpoints.absolute() / str(saved.step)
    return InitialWeights(f"{path} after {saved.step} steps", saved.step, partial(_of_run, saved), checkpoint, saved.close)


def _shown(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else " ".join(value) or "empty"


def _by_leaf(params: Any) -> dict[str, Array]:
    return dict(zip(leaves_of(params).values(), jax.tree.leaves(params), strict=True))


def _of_folder(folder: Folder, setup: TrainSetup, on_read: OnRead = lambda leaves: None) -> TrainState:
    parts = names_of(setup.config.module, field="init_from").parts(setup.config.model)
    base = load_parameters(folder, parts, separated(setup.step.canonical.shapes().params)[0])
    on_read(_by_leaf(base))
    return setup.step.init(_with_adapters(setup, base), setup.new_carried())


def _with_adapters(setup: TrainSetup, base: Any) -> Any:
    """Adds the adapters of the run, if it has any, to weights on the devices of the step. Donates the weights."""
    if not isinstance(setup.model, AdaptedModel):
        return base
    like = setup.step.canonical.shapes().params
    shardings = None if setup.step.mesh is None else jax.tree.map(lambda leaf: leaf.sharding, like)
    return in_turn(jax.jit(setup.model.with_adapters, out_shardings=shardings, donate_argnums=0)(base))


def _weights_of(saved: SavedRun, setup: TrainSetup, like: Any, on_read: OnRead) -> Any:
    """Reads the weights of another run. Merges its adapters if the run has other ones or none."""
    is_same = setup.config.lora == saved.config.lora
    base = separated(like)[0]
    if is_same or not isinstance(saved.model, AdaptedModel):
        params = saved.place(params=like if is_same else base)["params"]
        on_read(_by_leaf(params))
        return params if is_same else _with_adapters(setup, params)
    mesh = setup.step.mesh
    where = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    low = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), separated(saved.model.shapes)[1]
    )
    found = saved.place(params=joined(base, low))["params"]
    shardings = None if mesh is None else jax.tree.map(lambda leaf: leaf.sharding, base)
    return _with_adapters(setup, in_turn(jax.jit(saved.model.merge, out_shardings=shardings)(found)))


def _of_run(saved: SavedRun, setup: TrainSetup, on_read: OnRead = lambda leaves: None) -> TrainState:
    """Makes the initial state with the weights of another run, and its optimizer state for `continue_with` optimizer.

    Takes over the FP8 amax histories if the recipe is the same except for `compute`. The count for bias correction is taken
    over with the moments. The count of the learning rate starts at 0.
    """
    config = setup.config
    like = setup.step.canonical.shapes()
    alike = config.fp8 == dataclasses.replace(saved.config.fp8, compute=config.fp8.compute)
    same = config.is_delayed and saved.config.is_delayed and alike
    parts = {"carried": like.carried} | ({"observed": like.observed} if same else {})
    if config.initial.continue_with == "weights":
        return setup.step.init(_weights_of(saved, setup, like.params, on_read), **saved.place(**parts))
    if config.lora != saved.config.lora:
        must = "weights, because the other run trained other parameters (`lora`)"
        raise ConfigError(f"`continue_with` is optimizer: must be {must}", field="continue_with")
    found: dict[str, Any] = saved.place(params=like.params, **parts, opt_state=like.opt_state)
    on_read(_by_leaf(found["params"]))

    def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)

    found.setdefault("observed", jax.tree.map(zeros, like.observed))
    found["opt_state"] = restart_schedule(found["opt_state"])
    return setup.step.canonical.back(TrainState(zeros(like.step), zeros(like.skipped), **found))
