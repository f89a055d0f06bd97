"""What a run begins with that is not its own: weights and tokenizer of a folder or another run; and what it keeps of that."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from jgraph.data import is_text, tokenizer_file
from jgraph.data.tokenizer import TOKENIZER_FILE
from jgraph.errors import ConfigError, download_hint, os_errors, require
from jgraph.interop.folder import CONFIG_FILE, Folder
from jgraph.interop.names import HuggingFace
from jgraph.train.config import TrainConfig
from jgraph.train.model import find_model
from jgraph.train.rundir import RunDir

# What a run may have otherwise than the model whose weights it begins with: in which dtype matrices are multiplied, and how
# routers are trained.
_FREE = ("model.compute_dtype", "model.moe.balance_loss", "model.moe.z_loss", "model.moe.bias_rate")

# What a folder that is written later gets again, as it was.
_KEPT = f"{TOKENIZER_FILE} tokenizer_config.json special_tokens_map.json generation_config.json chat_template.jinja"


def names_of(module: str, *, field: str) -> HuggingFace:
    """Returns what a model's parameters are called in a Hugging Face folder. Raises ConfigError where it does not say."""
    names = getattr(find_model(module), "hugging_face", None)
    if not isinstance(names, HuggingFace):
        raise ConfigError(
            f"`module` is {module}: must have hugging_face, a jgraph.interop.HuggingFace, for `{field}`", field="module"
        )
    return names


def with_settings_of(module: str, model: Any, init_from: str, run_dir: str) -> Any:
    """Returns a model's settings with those that a folder determines, or, where it is gone, those that a run kept of it."""
    kept = RunDir(Path(run_dir)).origin
    path = kept if not Path(init_from).exists() and (kept / CONFIG_FILE).exists() else Path(init_from)
    return Folder(path, field="init_from").settings(names_of(module, field="init_from"), model)


def run_of(continue_from: str) -> tuple[Path, int | None]:
    """Returns the run directory that is meant, and the step: of RUN/checkpoints/STEP; None for the newest of RUN."""
    path = Path(continue_from)
    is_step = path.parent.name == "checkpoints" and path.name.isdecimal()
    return (path.parents[1], int(path.name)) if is_step else (path, None)


def config_of_run(continue_from: str, run_dir: str, *, module: str = "") -> TrainConfig:
    """Returns the saved configuration of the run named by `continue_from`.

    Reads the configuration of the run in `run_dir` instead if the other run has been removed.

    Args:
        continue_from: The other run.
        run_dir: Directory of the run that begins with it.
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


def check_like_run(config: TrainConfig, there: TrainConfig) -> None:
    """Raises ConfigError where a run is of another model than the one that it is to begin with, or is that one itself."""
    path, _ = run_of(config.continue_from)
    as_it = f"as `continue_from` {config.continue_from} has it"
    if path.resolve() == Path(config.run_dir).resolve():
        raise ConfigError(f"`run_dir` is {config.run_dir}: must be another directory than `continue_from`", field="run_dir")
    _check_alike(config.model, there.model, as_it)


def opened(config: TrainConfig, run_dir: RunDir) -> Folder | None:
    """Opens the folder named by `init_from`. Returns None if there is none, or if the run resumes from its own checkpoint.

    Raises:
        ConfigError: If there is no such folder, its tensors are not those of its config.json, or the settings contradict it.
    """
    if not config.init_from or goes_on(config, run_dir):
        return None
    folder, names = Folder(Path(config.init_from), field="init_from"), names_of(config.module, field="init_from")
    there = folder.settings(names, config.model)
    _check_alike(config.model, there, f"as `init_from` {config.init_from} has it")
    folder.check(names, config.model)
    return folder


def _check_alike(here: Any, there: Any, as_it: str, prefix: str = "model.") -> None:
    """Raises ConfigError for the first setting that differs, if it is not free."""
    for field in dataclasses.fields(here) if here is not None else ():
        name, (ours, theirs) = f"{prefix}{field.name}", (getattr(own, field.name) for own in (here, there))
        if dataclasses.is_dataclass(ours) and type(ours) is type(theirs):
            _check_alike(ours, theirs, as_it, f"{name}.")
        elif name not in _FREE:
            require(ours == theirs, name, ours, f"{theirs}, {as_it}, or left out")


def tokenizer_of(config: TrainConfig, run_dir: RunDir) -> Path | None:
    """Returns the tokenizer.json through which text is read; None for bytes."""
    if (source := _source(config)) is None:
        return None
    path = (run_dir.origin if goes_on(config, run_dir) else source) / TOKENIZER_FILE
    return path if path.exists() else None


def doubt(config: TrainConfig) -> str:
    """Returns a line where the data of a run may have other tokens than the weights that it begins with; else nothing."""
    if (source := _source(config)) is None:
        return ""
    name = "init_from" if config.init_from else "continue_from"
    own, of_data, data = source / TOKENIZER_FILE, tokenizer_file(config.data), " ".join(config.data)
    # A run without one has read bytes, if it has no more tokens than these.
    reads_bytes = not config.init_from and getattr(config.model, "vocab_size", 0) <= 256
    if not own.exists() and not reads_bytes and is_text(config.data):
        return f"`{name}` {getattr(config, name)} has no {TOKENIZER_FILE}: `data` {data} is read as bytes"
    if own.exists() and of_data and own.read_bytes() != of_data.read_bytes():
        return f"`data` {data} was made with another {TOKENIZER_FILE} than `{name}` {getattr(config, name)} has"
    return ""


def keep(config: TrainConfig, run_dir: RunDir) -> None:
    """Copies what is small of what a run begins with, and else the tokenizer of token files, into its directory."""
    shutil.rmtree(run_dir.origin, ignore_errors=True)
    folder = _source(config)
    sources = [] if folder is None else [folder / name for name in (CONFIG_FILE, *_KEPT.split())]
    for source in (*sources, tokenizer_file(config.data)):
        if source is None:
            continue
        kept = run_dir.origin / source.name
        if source.exists() and not kept.exists():  # the folder's tokenizer comes before that of the data
            with os_errors("run_dir", kept):
                run_dir.origin.mkdir(exist_ok=True)
                shutil.copyfile(source, kept)


def kept_config(run_dir: RunDir) -> dict[str, Any]:
    """Returns the config.json that came with the weights; empty where none did."""
    return Folder(run_dir.origin, field="run").config if (run_dir.origin / CONFIG_FILE).exists() else {}


def kept_ends(run_dir: RunDir) -> list[int]:
    """Returns the token ids that end a text, from the config.json that came with the weights."""
    return Folder(run_dir.origin, field="run").ends if (run_dir.origin / CONFIG_FILE).exists() else []


def kept(run_dir: RunDir) -> list[Path]:
    """Returns the files that a run kept, besides its config.json."""
    return [path for name in _KEPT.split() if (path := run_dir.origin / name).exists()]


def goes_on(config: TrainConfig, run_dir: RunDir) -> bool:
    """Returns whether a run has begun already."""
    return config.resume and run_dir.has_checkpoint()


def _source(config: TrainConfig) -> Path | None:
    """Returns the directory with the tokenizer that belongs to the weights a run begins with; None where they are its own."""
    if config.continue_from:
        return RunDir(run_of(config.continue_from)[0]).origin
    return Path(config.init_from) if config.init_from else None
