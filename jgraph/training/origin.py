"""What a run begins with that is not its own: weights and tokenizer of a Hugging Face folder; and what it keeps of that."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from jgraph.data import is_text, tokenizer_file
from jgraph.data.tokenizer import TOKENIZER_FILE
from jgraph.errors import ConfigError
from jgraph.interop.folder import CONFIG_FILE, Folder
from jgraph.interop.names import HuggingFace
from jgraph.training.config import TrainConfig
from jgraph.training.model import find_model
from jgraph.training.rundir import RunDir

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


def opened(config: TrainConfig, run_dir: RunDir) -> Folder | None:
    """Returns the folder that a run is to begin with; None where it goes on, or begins with none.

    Raises:
        ConfigError: there is none, it is of another model, or the settings contradict it.
    """
    if not config.init_from or _goes_on(config, run_dir):
        return None
    folder = Folder(Path(config.init_from), field="init_from")
    there = folder.settings(names_of(config.module, field="init_from"), config.model)
    for name in (field.name for field in dataclasses.fields(there)):
        if (here := getattr(config.model, name)) != (value := getattr(there, name)):
            raise ConfigError(
                f"`model.{name}` is {here}: must be {value}, as `init_from` {config.init_from} has it, or left out",
                field=f"model.{name}",
            )
    return folder


def tokenizer_of(config: TrainConfig, run_dir: RunDir) -> Path | None:
    """Returns the tokenizer.json through which text is read; None for bytes."""
    if not config.init_from:
        return None
    path = (run_dir.origin if _goes_on(config, run_dir) else Path(config.init_from)) / TOKENIZER_FILE
    return path if path.exists() else None


def doubt(config: TrainConfig) -> str:
    """Returns a line where the data of a run that begins with a folder may have other tokens than its weights; else nothing."""
    own, of_data, data = Path(config.init_from, TOKENIZER_FILE), tokenizer_file(config.data), " ".join(config.data)
    if not own.exists() and is_text(config.data):
        return f"`init_from` {config.init_from} has no {TOKENIZER_FILE}: `data` {data} is read as bytes"
    if own.exists() and of_data and own.read_bytes() != of_data.read_bytes():
        return f"`data` {data} was made with another {TOKENIZER_FILE} than `init_from` {config.init_from} has"
    return ""


def keep(config: TrainConfig, run_dir: RunDir) -> None:
    """Copies what is small of the folder, and else the tokenizer of token files, into the directory of a run that begins."""
    shutil.rmtree(run_dir.origin, ignore_errors=True)
    folder = Path(config.init_from)
    sources = [folder / name for name in (CONFIG_FILE, *_KEPT.split())] if config.init_from else []
    for source in (*sources, tokenizer_file(config.data)):
        if source is None:
            continue
        kept = run_dir.origin / source.name
        if source.exists() and not kept.exists():  # the folder's tokenizer comes before that of the data
            run_dir.origin.mkdir(exist_ok=True)
            shutil.copyfile(source, kept)


def kept_config(run_dir: RunDir) -> dict[str, Any]:
    """Returns the config.json that came with the weights; empty where none did."""
    return Folder(run_dir.origin, field="run").config if (run_dir.origin / CONFIG_FILE).exists() else {}


def kept(run_dir: RunDir) -> list[Path]:
    """Returns the files that a run kept, besides its config.json."""
    return [path for name in _KEPT.split() if (path := run_dir.origin / name).exists()]


def _goes_on(config: TrainConfig, run_dir: RunDir) -> bool:
    return config.resume and run_dir.has_checkpoint()
