"""Text files and datasets by name, in an order that does not depend on the disk, and the documents in each.

book.txt            a text file, cut into documents as in `_documents.cut`
texts/              all files in the directory and below, without hidden ones
'texts/**/*.md'     the matching files, and the files in matching directories
pages.jsonl         one document per line: the field `text` of a JSON object, or another field
pages.parquet       one document per row: the column `text`, or another column; needs pyarrow
hf:owner/name       one document per row of a dataset on the Hugging Face Hub, streamed; needs the datasets library.
                    hf:owner/name/CONFIG@SPLIT selects a configuration, and a split other than `train`.
hf:DIRECTORY        the same for a local directory, including the format of `Dataset.save_to_disk`
"""

import contextlib
import glob
import importlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from jgraph.data._documents import FEWEST_BLOCKS, Documents, cut, separate
from jgraph.errors import DataError, require

FIELD = "text"
_HUB = "hf:"


def weighted(data: Sequence[str]) -> list[tuple[str, Fraction | None]]:
    """Splits each NAME:WEIGHT into its name and weight. An entry that exists as a file has no weight.

    Args:
        data: Names with or without weights.

    Returns:
        Each name and its weight, None if no entry has a weight.

    Raises:
        ConfigError: If a weight is not positive and finite, or only some entries have one.
    """
    found = [_weighted(entry) for entry in data]
    if bare := [entry for entry, (_, weight) in zip(data, found, strict=True) if weight is None]:
        require(len(bare) == len(found), "data", bare[0], "NAME:WEIGHT where others have a weight; give all one, or none")
    return found


def _weighted(entry: str) -> tuple[str, Fraction | None]:
    name, _, weight = entry.rpartition(":")
    try:
        value = float(weight)
    except ValueError:
        return entry, None
    if not name or Path(entry).exists():
        return entry, None
    require(0 < value < math.inf, "data", entry, "NAME:WEIGHT with a positive, finite weight")
    return name, Fraction(weight)


def files_of(name: str) -> list[Path]:
    """Returns the files that a path, a directory or a glob names, sorted, or the dataset. Empty if nothing has the name.

    Raises:
        OSError: If a directory cannot be read.
    """
    path = Path(name)
    if name.startswith(_HUB):
        return [path]
    if path.is_dir():
        below = (found for found in path.rglob("*") if found.is_file())
        return sorted(found for found in below if not any(part.startswith(".") for part in found.relative_to(path).parts))
    if path.exists() or not glob.has_magic(name):
        return [path] if path.is_file() else []
    return sorted({file for found in glob.glob(name, recursive=True) for file in files_of(found)})


@contextlib.contextmanager
def named(argument: Literal["data", "text"], path: Path) -> Iterator[None]:
    """Adds the argument and the path to the message of a DataError."""
    try:
        yield
    except DataError as e:
        # `make_token_files` calls the argument `field`.
        problem = str(e) if argument == "data" else str(e).replace("`data_field`", "`field`")
        raise DataError(f"`{argument}` is {path}: {problem}", field=e.field) from e


def documents_of(path: Path, field: str, *, of_files: int = 1, documents: Documents = "joined") -> Iterator[bytes]:
    """Yields the documents of a file or dataset. Skips documents of white space.

    Args:
        path: A path from `files_of`. The suffixes .jsonl and .parquet select the format; all other files are text.
        field: Field of a JSON object, or column, that has the text.
        of_files: Number of files that are read together. A single short text is cut into smaller blocks than one of many.
        documents: `separate` refuses a text without lines that separate documents.

    Raises:
        DataError: If the file cannot be read, is damaged, is not text or lacks the field, or a library is missing.
    """
    if str(path).startswith(_HUB):
        found: Iterable[bytes] = _of_rows(_dataset_rows(str(path).removeprefix(_HUB)), field)
    elif path.suffix == ".parquet":
        found = _of_rows(_parquet_rows(path, field), field)
    elif path.suffix == ".jsonl":
        found = _of_jsonl(path, field)
    else:
        found = _of_text(path, of_files, documents)
    try:
        yield from (document for document in found if document.strip())
    except OSError as e:
        raise DataError(f"cannot be read ({e.strerror or e})") from e


def _of_text(path: Path, of_files: int, documents: Documents) -> Iterator[bytes]:
    text = path.read_bytes()
    if text.startswith(b"JGTOKENS"):
        raise DataError(f"a single token file; name its directory, {path.parent}")
    if of_files > 1 and b"\0" in text[:4096]:
        raise DataError(f"not a text (it has a zero byte); name only the texts, e.g. '{path.parent}/*.txt'")
    found = cut(text, fewest_blocks=-(-FEWEST_BLOCKS // of_files))
    if documents == "separate" and len(found) > len(separate(text)):
        why = "it has no lines that read <|endoftext|>, so document boundaries are unknown"
        raise DataError(f"{why}; leave `data_documents` out", field="data_documents")
    yield from found


def _of_jsonl(path: Path, field: str) -> Iterator[bytes]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                must = f"must be an object with a string in field {field!r}"
                raise DataError(f"line {number} is not valid JSON ({e}): {must}") from e
            yield _text_of(row, field, f"line {number}")


def _of_rows(rows: Iterable[dict[str, Any]], field: str) -> Iterator[bytes]:
    for number, row in enumerate(rows, start=1):
        if row.get(field, "") is not None:
            yield _text_of(row, field, f"row {number}")


_JSON_TYPES = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
_JSON_TYPES |= {list: "an array", dict: "an object"}


def _text_of(row: Any, field: str, place: str) -> bytes:
    """Returns the string in `field` of a JSON value. Raises DataError if there is none."""
    is_object = isinstance(row, dict)
    if is_object and isinstance(row.get(field), str):
        return row[field].encode(errors="replace")  # JSON can encode an unpaired surrogate, which UTF-8 cannot
    if is_object and field not in row:
        names = f"the fields {', '.join(map(repr, row))}" if row else "no fields"
        raise DataError(f"{place} has {names}, not {field!r}: set `data_field` to the field with the text")
    what, value = (f": field {field!r}", row[field]) if is_object else ("", row)
    must = "a string, or set `data_field` to another field" if is_object else f"an object with a string in field {field!r}"
    raise DataError(f"{place}{what} is {_JSON_TYPES.get(type(value), type(value).__name__)}: must be {must}")


def _parquet_rows(path: Path, field: str) -> Iterator[dict[str, Any]]:
    pyarrow, parquet = library("pyarrow", extra="parquet"), library("pyarrow.parquet", extra="parquet")
    try:
        with parquet.ParquetFile(path) as file:
            columns = [field] if field in file.schema_arrow.names else None
            for batch in file.iter_batches(columns=columns):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as e:
        raise DataError(f"damaged, or not a Parquet file ({e})") from e


def _dataset_rows(name: str) -> Iterator[dict[str, Any]]:
    datasets = library("datasets")
    path, _, split = name.partition("@")
    owner, *rest = [path] if Path(path).exists() else path.split("/")
    path, config = "/".join([owner, *rest[:1]]), "/".join(rest[1:]) or None
    try:
        if Path(path, "state.json").exists():
            yield from datasets.load_from_disk(path)
        else:
            yield from datasets.load_dataset(path, config, split=split or "train", streaming=True)
    except ValueError as e:
        raise DataError(str(e).partition("\n")[0]) from e


def library(name: str, *, extra: str = "") -> Any:
    """Imports an optional library. Raises DataError with the install command if it is missing; `extra` defaults to `name`."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise DataError(f"needs the {name} library: pip install 'jgraph[{extra or name}]'") from e
