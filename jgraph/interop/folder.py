"""Reads a Hugging Face folder: config.json, names and shapes of tensors, and slices of tensors. No jax here."""

import dataclasses
import fnmatch
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, for safetensors
import numpy as np
from safetensors import SafetensorError, safe_open

from jgraph.errors import ConfigError, download_hint, os_errors
from jgraph.interop import fields
from jgraph.interop.names import Box, HuggingFace, Part

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")


class Folder:
    """Reads config.json and slices of tensors in safetensors files. Never opens a pickle, or a file outside the folder.

    A file may be a symbolic link: the cache of `hf download` consists of links.

    Args:
        path: The folder.
        field: Argument that named the folder, for errors.

    Raises:
        ConfigError: From every method, if a file or field is missing, truncated or wrong.
    """

    def __init__(self, path: Path, *, field: str):
        self.path, self._field = Path(path), field
        self._open = functools.cache(lambda file: safe_open(file, "numpy"))
        check_exists(path, field=field)
        if not self.path.is_dir():
            raise self.error("a file; name its folder")

    def error(self, wrong: str) -> ConfigError:
        """Returns the error for a problem in the folder."""
        return ConfigError(f"`{self._field}` is {self.path}: {wrong}", field=self._field)

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return self._json(CONFIG_FILE)

    @property
    def dtype(self) -> str:
        """The compute dtype: bfloat16 if config.json names it, else float32."""
        with self._config_errors():
            dtype = fields.string(self.config, "dtype", fields.string(self.config, "torch_dtype", "float32"))
        return "bfloat16" if dtype == "bfloat16" else "float32"

    @property
    def window(self) -> int | None:
        """The longest sequence, in tokens, that the model was trained on; None if config.json has no such field."""
        with self._config_errors():
            return fields.integer(self.config, "max_position_embeddings", None)

    @property
    def ends(self) -> list[int]:
        """The token ids that end a text."""
        with self._config_errors():
            found = self.config.get("eos_token_id")
            several = found if isinstance(found, list) else [found]
            return [fields.integer({"eos_token_id": one}, "eos_token_id", least=0) for one in several if one is not None]

    def settings(self, names: HuggingFace, base: Any) -> Any:
        """Returns the settings of the model in the folder: those of `base`, updated from config.json."""
        with self._config_errors():
            return replaced(base, names.settings(self.config))

    def check(self, names: HuggingFace, settings: Any) -> None:
        """Checks that the tensors in the folder are those of a model with these settings, and no others.

        Reads the headers of the files only and stops at the first missing tensor, before any model of these settings is built.
        """
        wanted = set()
        for _, part in names.tensors(settings):
            name = part.tensor
            if name not in self._files:
                raise self.error(f"has no tensor {name}, which its {CONFIG_FILE} requires")
            with self._reading(name):
                found = self._open(self._files[name]).get_slice(name)
            shape, dtype = tuple(found.get_shape()), found.get_dtype()
            if shape != part.shape:
                raise self.error(f"{name} has shape {list(shape)}: must be {list(part.shape)} by its {CONFIG_FILE}")
            if dtype not in _DTYPES:
                raise self.error(f"{name} is {dtype}: must be one of {', '.join(_DTYPES)}")
            wanted.add(name)
        ignored = names.ignored(settings)
        more = [name for name in self._files if name not in wanted and not any(fnmatch.fnmatch(name, p) for p in ignored)]
        if more:
            raise self.error(f"has a tensor that the model does not have: {_some(more)}")

    def read(self, name: str, index: Box) -> np.ndarray:
        """Returns a slice of a tensor. Reads only the slice."""
        with self._reading(name):
            return self._open(self._files[name]).get_slice(name)[index]

    @functools.cached_property
    def _files(self) -> dict[str, Path]:
        """The file of every tensor."""
        if (self.path / INDEX_FILE).exists():
            listed = self._json(INDEX_FILE).get("weight_map")
            if not isinstance(listed, dict) or not listed:
                raise self.error(f"{INDEX_FILE} has no `weight_map`")
            for file in listed.values():  # a path may lead out of the folder
                if not isinstance(file, str) or not file or Path(file).name != file:
                    must = "must be the name of a file in the folder, without a path"
                    raise self.error(f"{INDEX_FILE} has the file {file!r}: {must}")
            files = {name: self.path / file for name, file in listed.items()}
        elif (self.path / WEIGHTS_FILE).exists():
            files = dict.fromkeys(self._names(self.path / WEIGHTS_FILE), self.path / WEIGHTS_FILE)
        else:
            pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self.path.glob(pattern))
            why = f"; {pickles[0]} is a pickle, which can run code: save it with safetensors" if pickles else ""
            raise self.error(f"has neither {WEIGHTS_FILE} nor {INDEX_FILE}{why}")
        for file in dict.fromkeys(files.values()):
            there = set(self._names(file))
            if missing := [name for name, own in files.items() if own == file and name not in there]:
                raise self.error(f"{file.name} has no tensor {_some(missing)}, which {INDEX_FILE} lists in it")
        return files

    def _names(self, file: Path) -> list[str]:
        with self._reading(file.name):
            if not file.is_file():  # opening a pipe would block
                raise FileNotFoundError("it is missing, or not a regular file")
            return list(self._open(file).keys())

    @contextmanager
    def _config_errors(self) -> Iterator[None]:
        try:
            yield
        except (ConfigError, ArithmeticError, AttributeError, TypeError, ValueError) as e:
            if isinstance(e, ConfigError) and e.field == self._field:
                raise
            raise self.error(f"{CONFIG_FILE}: {e}") from e

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError, ValueError) as e:
            raise self.error(f"{name} cannot be read: {e}; is it truncated, or not a safetensors file?") from e

    def _json(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise self.error(f"has no {name}") from None
        except (OSError, ValueError, RecursionError) as e:
            raise self.error(f"{name} cannot be read: {e}") from e
        if not isinstance(found, dict):
            raise self.error(f"{name} is not an object")
        return found


def check_exists(path: str | Path, *, field: str) -> None:
    """Checks that a model folder exists. The error for an id on the Hugging Face Hub gives the command to download it.

    Args:
        path: The folder.
        field: The argument that holds the path, for errors.

    Raises:
        ConfigError: If there is nothing at `path`, or the path cannot be read.
    """
    with os_errors(field, path, "read"):
        if not Path(path).exists():
            raise ConfigError(f"`{field}` is {path}: no such folder{download_hint(path)}", field=field)


def replaced(settings: Any, changes: Mapping[str, Any]) -> Any:
    """Returns a dataclass with changed fields. A dict changes fields of the nested dataclass of its name."""
    within = {name: replaced(getattr(settings, name), own) for name, own in changes.items() if isinstance(own, Mapping)}
    return dataclasses.replace(settings, **{**changes, **within})


def read(folder: Folder, parts: Sequence[Part], shape: tuple[int, ...], dtype: Any, index: Box) -> np.ndarray:
    """Assembles a slice of a parameter from slices of tensors.

    Args:
        folder: The folder.
        parts: Parts of the parameter.
        shape: Shape of the parameter.
        dtype: Dtype of the result.
        index: The slice.
    """
    bounds = [own.indices(size)[:2] for own, size in zip(index, shape, strict=True)]
    found = np.empty([stop - start for start, stop in bounds], dtype)
    for part in parts:
        common = [(max(start, box.start), min(stop, box.stop)) for (start, stop), box in zip(bounds, part.box, strict=True)]
        if any(start >= stop for start, stop in common):
            continue
        lead = len(shape) - len(part.shape)
        theirs = [slice(a - s, b - s) for (a, b), s in zip(common, part.start, strict=True)][lead:]
        transposed = part.order == "transposed"
        value = folder.read(part.tensor, tuple(theirs[::-1] if transposed else theirs))
        own = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, bounds, strict=True))
        found[own] = (value.T if transposed else value).reshape(found[own].shape)
    return found


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}, nor {len(names) - 1} others"
