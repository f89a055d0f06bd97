"""Files: what `data` names, as paths in an order that does not depend on the disk, and the documents in each.

book.txt            a text file, cut as `documents.cut` says
texts/              all files in it and below, without hidden ones
'texts/**/*.md'     the files that match, and those in directories that do
pages.jsonl         a document a line: the field `text` of a JSON object, or another one
pages.parquet       a document a row, of a column by that name; needs pyarrow
"""

import glob
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from jgraph.data.documents import FEWEST_BLOCKS, Documents, cut, separate
from jgraph.errors import DataError, require

FIELD = "text"


def weighted(data: Sequence[str]) -> list[tuple[str, Fraction | None]]:
    """Splits each NAME:WEIGHT; the weight is None where none has one. What exists by its whole name has no weight.

    Raises:
        ConfigError: a weight is not positive and finite, or only some have one.
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


def is_token_directory(path: Path) -> bool:
    """Returns whether a path is a directory of token files, as `python -m jgraph.data make` writes it."""
    return path.is_dir() and any(path.glob("*.bin"))


def files_of(name: str) -> list[Path]:
    """Returns the files that a path, a directory or a glob names, sorted; none where there is no such thing.

    Raises:
        OSError: a directory cannot be read.
    """
    path = Path(name)
    if path.is_dir():
        below = (found for found in path.rglob("*") if found.is_file())
        return sorted(found for found in below if not any(part.startswith(".") for part in found.relative_to(path).parts))
    if path.exists() or not glob.has_magic(name):
        return [path] if path.is_file() else []
    return sorted({file for found in glob.glob(name, recursive=True) for file in files_of(found)})


def documents_of(path: Path, field: str = FIELD, *, of_files: int = 1, documents: Documents = "joined") -> Iterator[bytes]:
    """Yields the documents of a file that are not only white space.

    Args:
        path: a name that ends in .jsonl or .parquet says what it is; all else is text.
        field: of a JSON object, or the column of a Parquet file.
        of_files: of how many files it is one. A short text is cut finer when it is alone; among many, each is one document.
        documents: `separate` refuses a text that would be cut where nothing separates documents.

    Raises:
        DataError: the file is damaged, no text, or lacks the field; or pyarrow is missing.
        OSError: it cannot be read.
    """
    if path.suffix == ".jsonl":
        found: Iterable[bytes] = _of_jsonl(path, field)
    elif path.suffix == ".parquet":
        found = _of_parquet(path, field)
    else:
        text = path.read_bytes()
        if text.startswith(b"JGTOKENS"):
            raise DataError(f"a single token file; name the directory that it is in, {path.parent}")
        if of_files > 1 and b"\0" in text[:4096]:
            raise DataError(f"no text (it has a byte of zero); name only the texts, e.g. '{path.parent}/*.txt'")
        found = cut(text, fewest_blocks=-(-FEWEST_BLOCKS // of_files))
        if documents == "separate" and len(found) > len(separate(text)):
            why = "it has no lines that read <|endoftext|>, so nothing says where a document ends"
            raise DataError(f"{why}; leave `data_documents` out", field="data_documents")
    yield from (document for document in found if document.strip())


def _of_jsonl(path: Path, field: str) -> Iterator[bytes]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise DataError(
                    f"line {number} is not valid JSON ({e}): must be an object with a string in field {field!r}"
                ) from e
            # JSON can encode an unpaired surrogate, which UTF-8 cannot.
            yield _text_of(row, field, number).encode(errors="replace")


_JSON_TYPES = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", list: "an array", dict: "an object"}


def _text_of(row: Any, field: str, number: int) -> str:
    """Returns the text in one line of JSON Lines. Raises DataError if the line does not have a string in `field`."""
    if isinstance(row, dict) and isinstance(row.get(field), str):
        return row[field]
    if not isinstance(row, dict):
        found = _JSON_TYPES.get(type(row), "a string")
        raise DataError(f"line {number} is {found}: must be an object with a string in field {field!r}")
    if field not in row:
        names = f"the fields {', '.join(map(repr, row))}" if row else "no fields"
        raise DataError(f"line {number} has {names}, not {field!r}: set `data_field` to the field with the text")
    found = _JSON_TYPES[type(row[field])]
    raise DataError(f"line {number}: field {field!r} is {found}: must be a string, or set `data_field` to another field")


def _of_parquet(path: Path, field: str) -> Iterator[bytes]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as e:
        raise DataError("needs the pyarrow library: pip install 'jgraph[parquet]'") from e
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                there = ", ".join(map(repr, file.schema_arrow.names))
                raise DataError(f"has the columns {there}, not {field!r}: set `data_field` to the column with the text")
            for batch in file.iter_batches(columns=[field]):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str | None):
                        found = batch.schema.types[0]
                        raise DataError(
                            f"column {field!r} has type {found}: must be of strings, or set `data_field` to another column"
                        )
                    yield (text or "").encode()
    except pyarrow.ArrowException as e:
        raise DataError(f"damaged, or no Parquet file ({e})") from e
