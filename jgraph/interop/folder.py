"""Reads a Hugging Face folder: config.json, names and shapes of tensors, and slices of tensors. No jax here."""

import dataclasses
import fnmatch
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, for safetensors
import numpy as np
from safetensors import SafetensorError, safe_open

from jgraph.data._texts import check_links
from jgraph.errors import ConfigError, DataError, download_hint, os_errors
from jgraph.interop import fields
from jgraph.interop.names import Box, HuggingFace, Part

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"
_DTYPES = ("F32", "BF16", "F16")
_ROWS = 4096  # of a tensor, compared at once


class Folder:
    """Reads config.json and slices of tensors from a Hugging Face folder with safetensors files.

    The tensors are in model.safetensors, or in the files that model.safetensors.index.json lists. Never opens a pickle, or a
    file outside the folder. A file may be a symbolic link into the folder or into the `blobs/` of its Hub cache. Writes
    nothing.

    Attributes:
        config_file: Name of the file with the fields of `config`.
        path: The folder.

    Args:
        path: The folder.
        field: Name of the caller's argument for the folder. Errors name it.

    Raises:
        ConfigError: If `path` is missing or not a folder. From the other methods and properties: if a file that they read is
            missing, truncated or invalid, or a field of config.json has a wrong type or value.
    """

    config_file: ClassVar[str] = CONFIG_FILE

    def __init__(self, path: Path, *, field: str):
        self.path, self._field = Path(path), field
        self._open = functools.cache(lambda file: safe_open(file, "numpy"))
        check_exists(path, field=field)
        if not self.path.is_dir():
            raise self.error("must be a folder, not a file")

    def error(self, wrong: str) -> ConfigError:
        """Creates a ConfigError about the folder. Does not raise it.

        Args:
            wrong: The problem, such as `has no config.json`.

        Returns:
            An error with the message `FIELD` is PATH: WRONG, where FIELD is the argument `field` of the constructor.
        """
        return ConfigError(f"`{self._field}` is {self.path}: {wrong}", field=self._field)

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json as a dict by field name. A property. The file is read at the first use only."""
        return self._json(self.config_file)

    @property
    def dtype(self) -> str:
        """The dtype to compute in: `bfloat16` if config.json has this value in `dtype` or `torch_dtype`, else `float32`.

        If config.json has both fields, `dtype` counts.
        """
        with self._config_errors():
            dtype = fields.string(self.config, "dtype", fields.string(self.config, "torch_dtype", "float32"))
        return "bfloat16" if dtype == "bfloat16" else "float32"

    @property
    def window(self) -> int | None:
        """The length of the longest sequence that the model was trained on, in tokens. None if unknown.

        The value of the field `max_position_embeddings` of config.json. None if the field is missing or null.
        """
        with self._config_errors():
            return fields.integer(self.config, "max_position_embeddings", None)

    @property
    def ends(self) -> list[int]:
        """The token ids that end a generated text, a list of ints.

        As in `transformers`, the field `eos_token_id` of generation_config.json if the folder has this file, else that of
        config.json: an id or a list of ids. Empty if the field is missing or null.
        """
        with self._config_errors():
            has_own = (self.path / GENERATION_FILE).exists()
            found = (self._json(GENERATION_FILE) if has_own else self.config).get("eos_token_id")
            several = found if isinstance(found, list) else [found]
            return [fields.integer({"eos_token_id": id_}, "eos_token_id", least=0) for id_ in several if id_ is not None]

    def settings(self, names: HuggingFace, base: Any) -> Any:
        """Returns the settings of the model in the folder. Reads config.json only.

        Settings are the dataclass that the model class is built from.

        Args:
            names: The attribute `hugging_face` of the model class, which converts config.json to settings.
            base: Settings of the model class. They have the values of the fields that config.json does not determine. Not
                changed.

        Returns:
            A copy of `base` with the fields that config.json determines.

        Raises:
            ConfigError: If config.json cannot be read, has an invalid field, or describes a model that the class does not
                support.
        """
        with self._config_errors():
            return replaced(base, names.settings(self.config))

    def check(self, names: HuggingFace, settings: Any) -> None:
        """Checks that the folder has exactly the tensors of a model with these settings.

        Reads only the headers of the files, and stops at the first missing tensor. Builds no model.

        Args:
            names: The attribute `hugging_face` of the model class, which lists the tensors of a model.
            settings: Settings of the model, as `Folder.settings` returns them.

        Raises:
            ConfigError: If a tensor is missing, has another shape, or has a dtype other than float32, bfloat16 or float16. If
                there is a tensor that the model lacks and that matches no pattern of `names.ignored`. If a tensor in
                `names.copies` differs from its original. If a file is missing or truncated.
        """
        expected = set()
        for _, part in names.tensors(settings):
            self.check_tensor(part)
            expected.add(part.tensor)
        for name, original in names.copies(settings).items():
            if name in self._files and not self._equal(name, original):
                must = "must be equal; to use both, set the field that ties them to false, such as tie_word_embeddings"
                raise self.error(f"{name} differs from {original}, and its {self.config_file} says that they are one: {must}")
            expected.add(name)
        ignored = names.ignored(settings)
        unknown = [name for name in self._files if name not in expected and not any(fnmatch.fnmatch(name, p) for p in ignored)]
        if unknown:
            raise self.error(f"has a tensor that the model does not have: {_some(unknown)}")

    def check_tensor(self, part: Part) -> None:
        """Checks that the folder has a tensor, with its shape and an allowed dtype. Reads only the header of the file.

        Args:
            part: The tensor.

        Raises:
            ConfigError: If the tensor is missing, has another shape, or has a dtype other than float32, bfloat16 or float16. If
                the file is missing or truncated.
        """
        name = part.tensor
        if name not in self._files:
            raise self.error(f"has no tensor {name}, which its {self.config_file} requires")
        with self._reading(name):
            found = self._open(self._files[name]).get_slice(name)
        shape, dtype = tuple(found.get_shape()), found.get_dtype()
        if shape != part.shape:
            raise self.error(f"{name} has shape {list(shape)}: must be {list(part.shape)} by its {self.config_file}")
        if dtype not in _DTYPES:
            raise self.error(f"{name} is {dtype}: must be one of {', '.join(_DTYPES)}")

    def read(self, name: str, index: Box) -> np.ndarray:
        """Reads a slice of a tensor. The rest of the tensor is not read.

        Args:
            name: Name of a tensor in the folder.
            index: A tuple of one slice per axis of the tensor, with step 1.

        Returns:
            The slice, in the dtype of the file: float32, float16 or bfloat16 of `ml_dtypes`.

        Raises:
            ConfigError: If the file cannot be read.
            KeyError: If the folder has no such tensor. Call `check` first.
        """
        with self._reading(name):
            return self._open(self._files[name]).get_slice(name)[index]

    def _equal(self, name: str, other: str) -> bool:
        shapes = [self._open(self._files[each]).get_slice(each).get_shape() for each in (name, other)]
        rows = [slice(start, min(start + _ROWS, shapes[0][0])) for start in range(0, shapes[0][0], _ROWS)]
        pairs = ([self.read(each, (part,)).astype(np.float32) for each in (name, other)] for part in rows)
        return shapes[0] == shapes[1] and all(np.array_equal(one, two) for one, two in pairs)

    @functools.cached_property
    def _files(self) -> dict[str, Path]:
        """The file of every tensor."""
        if (self.path / INDEX_FILE).exists():
            weight_map = self._json(INDEX_FILE).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise self.error(f"{INDEX_FILE} has no `weight_map`")
            for file in weight_map.values():  # a path may lead out of the folder
                if not isinstance(file, str) or not file or Path(file).name != file:
                    must = "must be the name of a file in the folder, without a path"
                    raise self.error(f"{INDEX_FILE} has the file {file!r}: {must}")
            files = {name: self.path / file for name, file in weight_map.items()}
        elif (self.path / WEIGHTS_FILE).exists():
            files = dict.fromkeys(self._names(self.path / WEIGHTS_FILE), self.path / WEIGHTS_FILE)
        else:
            pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in self.path.glob(pattern))
            why = f"; {pickles[0]} is a pickle, which can run code: save it with safetensors" if pickles else ""
            raise self.error(f"has neither {WEIGHTS_FILE} nor {INDEX_FILE}{why}")
        for file in dict.fromkeys(files.values()):
            present = set(self._names(file))
            if missing := [name for name, listed in files.items() if listed == file and name not in present]:
                raise self.error(f"{file.name} has no tensor {_some(missing)}, which {INDEX_FILE} lists in it")
        return files

    def _names(self, file: Path) -> list[str]:
        with self._reading(file.name):
            if not self._inside(file).is_file():  # opening a pipe would block
                raise FileNotFoundError("it is missing, or not a regular file")
            return list(self._open(file).keys())

    @contextmanager
    def _config_errors(self) -> Iterator[None]:
        try:
            yield
        except (ConfigError, ArithmeticError, AttributeError, TypeError, ValueError) as e:
            if isinstance(e, ConfigError) and e.field == self._field:
                raise
            raise self.error(f"{self.config_file}: {e}") from e

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError, ValueError) as e:
            raise self.error(f"{name} cannot be read: {e}; is it truncated, or not a safetensors file?") from e

    def _inside(self, file: Path) -> Path:
        try:
            check_links(self.path, file)
        except DataError as e:
            raise self.error(str(e)) from e
        return file

    def _json(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads(self._inside(self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise self.error(f"has no {name}") from None
        except (OSError, ValueError, RecursionError) as e:
            raise self.error(f"{name} cannot be read: {e}") from e
        if not isinstance(found, dict):
            raise self.error(f"{name} is not an object")
        return found


def check_exists(path: str | Path, *, field: str) -> None:
    """Checks that there is a file or folder at a path.

    The error for an id on the Hugging Face Hub, such as `Qwen/Qwen3-0.6B`, has the command that downloads it.

    Args:
        path: Path of a model folder.
        field: Name of the caller's argument for the path. The error names it.

    Raises:
        ConfigError: If there is nothing at `path`, or the path cannot be read.
    """
    with os_errors(field, path, "read"):
        if not Path(path).exists():
            raise ConfigError(f"`{field}` is {path}: no such folder{download_hint(path)}", field=field)


def replaced(settings: Any, changes: Mapping[str, Any]) -> Any:
    """Returns a copy of a dataclass with changed fields. The constructor validates the fields again, and may raise its errors.

    Args:
        settings: The dataclass. Not changed.
        changes: New values by field name. If the new value is a mapping, the old value of the field must be a dataclass. The
            new value is then a copy of the old one, with the changes in the mapping.

    Returns:
        A new dataclass of the type of `settings`.

    Raises:
        TypeError: If a name in `changes` is not a field of the dataclass, or has a mapping but its old value is no dataclass.
        AttributeError: If a name in `changes` is not a field of the dataclass, and its value is a mapping.
    """
    nested = {name: replaced(getattr(settings, name), value) for name, value in changes.items() if isinstance(value, Mapping)}
    return dataclasses.replace(settings, **{**changes, **nested})


def read(folder: Folder, parts: Sequence[Part], shape: tuple[int, ...], dtype: Any, index: Box) -> np.ndarray:
    """Assembles a slice of a parameter from slices of tensors. Reads only the parts of the files that overlap with the slice.

    Args:
        folder: The folder with the tensors.
        parts: The tensors of the parameter and their positions in it. Together they must fill the parameter. Not checked.
        shape: Shape of the whole parameter.
        dtype: numpy dtype of the result, to which the tensors are cast.
        index: A tuple of one slice per axis of the parameter, with step 1.

    Returns:
        A new array with the shape of the slice and the dtype `dtype`.

    Raises:
        ConfigError: If a file cannot be read.
        KeyError: If the folder has no tensor of a part. Call `Folder.check` first.
    """
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    found = np.empty([stop - start for start, stop in bounds], dtype)
    for part in parts:
        common = [(max(start, box.start), min(stop, box.stop)) for (start, stop), box in zip(bounds, part.box, strict=True)]
        if any(start >= stop for start, stop in common):
            continue
        lead = len(shape) - len(part.shape)
        source = [slice(a - s, b - s) for (a, b), s in zip(common, part.start, strict=True)][lead:]
        transposed = part.order == "transposed"
        value = folder.read(part.tensor, tuple(source[::-1] if transposed else source))
        target = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, bounds, strict=True))
        found[target] = (value.T if transposed else value).reshape(found[target].shape)
    return found


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}, nor {len(names) - 1} others"
