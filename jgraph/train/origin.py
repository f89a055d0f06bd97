"""Settings, tokenizer and small files of the folder or run that a run starts from, and their copies in its directory."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from jgraph.data import is_text, tokenizer_file
from jgraph.data.tokenizer import TOKENIZER_FILE
from jgraph.errors import ConfigError, download_hint, os_errors, require
from jgraph.interop.folder import CONFIG_FILE, Folder
from jgraph.interop.names import HuggingFace
from jgraph.train.config import InitialConfig, TrainConfig
from jgraph.train.model import find_model
from jgraph.train.rundir import RunDir

# Settings that may differ from those of the initial weights: the matmul dtype, and the training of routers.
_FREE = ("model.compute_dtype", "model.moe.balance_loss", "model.moe.z_loss", "model.moe.bias_rate")

# Files that are copied unchanged into an exported folder.
_KEPT = f"{TOKENIZER_FILE} tokenizer_config.json special_tokens_map.json generation_config.json chat_template.jinja"


def names_of(module: str, *, field: str) -> HuggingFace:
    """Returns the map from parameters to Hugging Face tensors. Raises ConfigError if the model class has none."""
    names = getattr(find_model(module), "hugging_face", None)
    if not isinstance(names, HuggingFace):
        raise ConfigError(
            f"`module` is {module}: must have hugging_face, a jgraph.interop.HuggingFace, for `{field}`", field="module"
        )
    return names


def with_settings_of(module: str, model: Any, init_from: str, run_dir: str) -> Any:
    """Returns model settings with the sizes of a folder. If it has been removed, reads the copy in the run directory."""
    copy = RunDir(Path(run_dir)).origin
    path = copy if not Path(init_from).exists() and (copy / CONFIG_FILE).exists() else Path(init_from)
    return Folder(path, field="init_from").settings(names_of(module, field="init_from"), model)


def run_of(continue_from: str) -> tuple[Path, int | None]:
    """Splits RUN/checkpoints/STEP into the run directory and the step. The step is None for RUN alone."""
    path = Path(continue_from)
    is_step = path.parent.name == "checkpoints" and path.name.isdecimal()
    return (path.parents[1], int(path.name)) if is_step else (path, None)


def config_of_run(continue_from: str, run_dir: str, *, module: str = "") -> TrainConfig:
    """Returns the saved configuration of the run named by `continue_from`.

    Reads the configuration of the run in `run_dir` instead if the other run has been removed.

    Args:
        continue_from: The other run.
        run_dir: Directory of the run that starts from it.
        module: Model class that the caller named; empty if the caller named none.

    Raises:
        ConfigError: As `RunDir.saved_config`.
    """
    there, here = RunDir(run_of(continue_from)[0]), RunDir(Path(run_dir))
    is_gone = not there.path.exists() and here.config.exists()
    if not is_gone and not there.path.exists() and download_hint(continue_from):
        raise ConfigError(
            f"`continue_from` is {continue_from}: no such run directory; for a model of the Hugging Face Hub, use `init_from`",
            field="continue_from",
        )
    return (here if is_gone else there).saved_config(field="continue_from", module=module)


def check_alike(here: Any, there: Any, as_it: str, prefix: str = "model.") -> None:
    """Checks that model settings are those of the initial weights, except for a few that may differ.

    Args:
        here: Settings of the run.
        there: Settings of the initial weights.
        as_it: Names the source in the error.
        prefix: Prefix of the field names.

    Raises:
        ConfigError: For the first setting that differs.
    """
    for field in dataclasses.fields(here) if here is not None else ():
        name, (ours, theirs) = f"{prefix}{field.name}", (getattr(settings, field.name) for settings in (here, there))
        if dataclasses.is_dataclass(ours) and type(ours) is type(theirs):
            check_alike(ours, theirs, as_it, f"{name}.")
        elif name not in _FREE:
            require(ours == theirs, name, ours, f"{theirs}, {as_it}, or left out")


def tokenizer_of(config: TrainConfig, run_dir: RunDir) -> Path | None:
    """Returns the tokenizer.json for text in `data`. None means bytes."""
    if (source := _source(config.initial)) is None:
        return None
    path = (run_dir.origin if run_dir.resumes(config.output) else source) / TOKENIZER_FILE
    return path if path.exists() else None


def tokenizer_warning(config: TrainConfig) -> str:
    """Returns a warning if the data may have other tokens than the initial weights, or an empty string."""
    if (source := _source(config.initial)) is None:
        return ""
    name, path = ("init_from", config.initial.init_from) if config.initial.init_from else ("continue_from", source.parent)
    data = config.input.data
    own, of_data, shown = source / TOKENIZER_FILE, tokenizer_file(data), " ".join(data)
    # A run without a tokenizer has read bytes if its vocabulary has no more than 256 tokens.
    reads_bytes = not config.initial.init_from and getattr(config.model, "vocab_size", 0) <= 256
    if not own.exists() and not reads_bytes and is_text(data):
        return f"`{name}` {path} has no {TOKENIZER_FILE}: `data` {shown} is read as bytes"
    if own.exists() and of_data and own.read_bytes() != of_data.read_bytes():
        return f"`data` {shown} was made with another {TOKENIZER_FILE} than `{name}` {path} has"
    return ""


def keep(config: TrainConfig, run_dir: RunDir) -> None:
    """Copies the small files of the initial weights, and the tokenizer of token files, into the run directory."""
    shutil.rmtree(run_dir.origin, ignore_errors=True)
    folder = _source(config.initial)
    sources = [] if folder is None else [folder / name for name in (CONFIG_FILE, *_KEPT.split())]
    for source in (*sources, tokenizer_file(config.input.data)):
        if source is None:
            continue
        kept = run_dir.origin / source.name
        if source.exists() and not kept.exists():  # the folder's tokenizer precedes that of the data
            with os_errors("run_dir", kept):
                run_dir.origin.mkdir(exist_ok=True)
                shutil.copyfile(source, kept)


def kept_folder(run_dir: RunDir) -> Folder | None:
    """Returns the copied files with the config.json of the initial weights, or None if there is no config.json."""
    return Folder(run_dir.origin, field="run") if (run_dir.origin / CONFIG_FILE).exists() else None


def kept(run_dir: RunDir) -> list[Path]:
    """Returns the copied files except config.json."""
    return [path for name in _KEPT.split() if (path := run_dir.origin / name).exists()]


def _source(initial: InitialConfig) -> Path | None:
    """Returns the directory with the tokenizer of the initial weights, or None if the weights are random."""
    if initial.continue_from:
        return RunDir(run_of(initial.continue_from)[0]).origin
    return Path(initial.init_from) if initial.init_from else None
