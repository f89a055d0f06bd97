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

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"
_DTYPES = ("F32", "BF16", "F16")
_ROWS = 4096  # of a tensor, compared at once


class Folder:
    """Reads config.json and slices of tensors from a Hugging Face folder with safetensors files. Writes nothing.

    Never opens a pickle, or a file outside the folder. A file may be a symbolic link into the folder or into the `blobs/` of
    its Hub cache. Methods raise ConfigError for a file that is missing, truncated or invalid.
    """

    config_file: ClassVar[str] = CONFIG_FILE

    def __init__(self, path: Path, *, field: str):  # `field` is the caller's argument for the folder, for errors
        self.path = Path(path)
        self._field = field
        self._open = functools.cache(lambda file: safe_open(file, "numpy"))
        check_exists(path, field=field)
        if not self.path.is_dir():
            raise self.error("must be a folder, not a file")

    def error(self, wrong: str) -> ConfigError:
        """Returns an error about the folder. Does not raise it."""
        return ConfigError(f"`{self._field}` is {self.path}: {wrong}", field=self._field)

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        return self._json(self.config_file)

    @property
    def dtype(self) -> str:
        """The dtype to compute in."""
        with self._config_errors():
            dtype = fields.string(self.config, "dtype", fields.string(self.config, "torch_dtype", "float32"))
        return "bfloat16" if dtype == "bfloat16" else "float32"

    @property
    def window(self) -> int | None:
        """The length of the longest sequence that the model was trained on, in tokens. None if unknown."""
        with self._config_errors():
            return fields.integer(self.config, "max_position_embeddings", None)

    @property
    def ends(self) -> list[int]:
        """The token ids that end a generated text."""
        # As in `transformers`, generation_config.json has priority, also if it lacks the field.
        with self._config_errors():
            has_own = (self.path / GENERATION_FILE).exists()
            found = (self._json(GENERATION_FILE) if has_own else self.config).get("eos_token_id")
            several = found if isinstance(found, list) else [found]
            return [fields.integer({"eos_token_id": id_}, "eos_token_id", least=0) for id_ in several if id_ is not None]

    def settings(self, names: HuggingFace, base: Any) -> Any:
        """Returns a copy of `base`, the settings of the model class, with the fields that config.json determines."""
        with self._config_errors():
            return replaced(base, names.settings(self.config))

    def check(self, names: HuggingFace, settings: Any) -> None:
        """Checks that the folder has exactly the tensors of a model with these settings.

        Reads only the headers of the files, except for copies. Stops at the first missing tensor, and builds no model.
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
        """Checks that the folder has a tensor, with its shape and an allowed dtype. Reads only the header of the file."""
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
        """Reads a slice of a tensor in the dtype of the file (bfloat16 is that of `ml_dtypes`). Call `check` first."""
        with self._reading(name):
            return self._open(self._files[name]).get_slice(name)[index]

    def _equal(self, name: str, other: str) -> bool:
        shapes = [self._open(self._files[each]).get_slice(each).get_shape() for each in (name, other)]
        rows = [slice(start, min(start + _ROWS, shapes[0][0])) for start in range(0, shapes[0][0], _ROWS)]
        pairs = ([self.read(each, (part,)).astype(np.float32) for each in (name, other)] for part in rows)
        return shapes[0] == shapes[1] and all(np.array_equal(one, two) for one, two in pairs)

    @functools.cached_property
    def _files(self) -> dict[str, Path]:
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
    """Checks that there is something at a path. The error for an id on the Hub has the command that downloads it."""
    with os_errors(field, path, "read"):
        if not Path(path).exists():
            raise ConfigError(f"`{field}` is {path}: no such folder{download_hint(path)}", field=field)


def replaced(settings: Any, changes: Mapping[str, Any]) -> Any:
    """Returns a copy of a dataclass with changed fields. A mapping changes fields of a nested dataclass.

    The constructor validates the fields again, and may raise its errors.
    """
    nested = {name: replaced(getattr(settings, name), value) for name, value in changes.items() if isinstance(value, Mapping)}
    return dataclasses.replace(settings, **{**changes, **nested})


def read(folder: Folder, parts: Sequence[Part], shape: tuple[int, ...], dtype: Any, index: Box) -> np.ndarray:
    """Assembles a slice of a parameter from slices of tensors, cast to `dtype`. Reads only the parts of the files that overlap.

    The parts must fill the parameter, which is not checked. Call `Folder.check` first.
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
