"""Writes the parameters of a model to a Hugging Face folder. Leaves no files behind if it fails. No jax here."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jgraph.data._texts import copy_files, new_folder
from jgraph.interop.folder import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from jgraph.interop.names import Part

_FILE_BYTES = 5_000_000_000
_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def write(
    to: Path,
    config: Mapping[str, Any],
    parts: Mapping[str, Sequence[Part]],
    parameter: Callable[[str], np.ndarray],  # called once for each name, in order, so that one is in memory at a time
    *,
    dtype: str,  # of `_DTYPES`
    beside: Mapping[str, Path] = MappingProxyType({}),
    file_bytes: int = _FILE_BYTES,
) -> list[Path]:
    """Writes a Hugging Face folder: config.json with `dtype`, the files `beside`, and tensors. Returns its files."""
    with new_folder(to) as folder:
        copy_files(beside, folder)
        write_json(folder / CONFIG_FILE, dict(config) | {"dtype": dtype, "torch_dtype": dtype})
        files = _tensors_by_file(parts, _DTYPES[dtype].itemsize, file_bytes)
        tensors = tensors_of(parts, parameter, dtype)
        index: dict[str, str] = {}
        total = 0
        for number, names in enumerate(files, start=1):
            file = WEIGHTS_FILE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            arrays = dict(next(tensors) for _ in names)
            write_tensors(folder / file, arrays)
            index |= dict.fromkeys(arrays, file)
            total += sum(array.nbytes for array in arrays.values())
        if len(files) > 1:
            write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": index})
    return sorted(to.absolute().iterdir())


def write_tensors(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes contiguous arrays to a safetensors file. Raises OSError if it cannot be written."""
    file.touch()
    mode = file.stat().st_mode  # by the umask; the library makes files that only their owner can read
    try:
        save_file(dict(arrays), file, metadata={"format": "pt"})  # required by transformers
        file.chmod(mode)
    except SafetensorError as e:
        raise OSError(str(e)) from e


def _tensors_by_file(parts: Mapping[str, Sequence[Part]], itemsize: int, file_bytes: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    size = 0
    for part in (part for of_parameter in parts.values() for part in of_parameter):
        nbytes = itemsize * int(np.prod(part.shape))
        if files[-1] and size + nbytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(part.tensor)
        size += nbytes
    return files


def tensors_of(
    parts: Mapping[str, Sequence[Part]], parameter: Callable[[str], np.ndarray], dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of parameters as contiguous arrays, one parameter at a time."""
    for name, of_parameter in parts.items():
        whole = parameter(name)
        for part in of_parameter:
            array = whole[part.box].reshape(part.own_shape)
            yield part.tensor, np.ascontiguousarray(array.T if part.order == "transposed" else array, dtype=_DTYPES[dtype])


def write_json(path: Path, fields: Mapping[str, Any]) -> None:
    """Writes an indented JSON object."""
    path.write_text(json.dumps(fields, indent=2) + "\n")
