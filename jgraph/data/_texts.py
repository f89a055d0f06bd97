"""Named corpora, text files and datasets, and the documents in each, in an order that does not depend on the disk.

python-docs         the language reference as `help()` shows it: the topics of `pydoc_data.topics`, by name
python-source       the standard library's .py files, without tests and installed packages, sorted by path
synthetic           2 MiB of a Markov chain with a known entropy
book.txt            a text file, cut into documents as in `cut`
texts/              all files in the directory and below, without hidden ones
'texts/**/*.md'     the matching files, and the files in matching directories
pages.jsonl         one document per line: the field `text` of a JSON object, or another field
pages.parquet       one document per row: the column `text`, or another column; needs pyarrow
chat.jsonl          with the format chat, one conversation per line (jgraph.data.chat); also .parquet and hf:
hf:owner/name       one document per row of a dataset on the Hugging Face Hub, streamed; needs the datasets library.
                    hf:owner/name/CONFIG@SPLIT selects a configuration, and a split other than `train`.
hf:DIRECTORY        the same for a local directory, including the format of `Dataset.save_to_disk`

The first two differ between Python versions. The fingerprint of the corpus shows it. A named corpus has priority over a file of
that name; write ./NAME for the file.
"""

import contextlib
import glob
import hashlib
import importlib
import json
import math
import os
import re
import shutil
import string
import sysconfig
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from jgraph.errors import ConfigError, DataError, JgraphError, download_hint, os_errors, require

_T = TypeVar("_T")

Documents: TypeAlias = Literal["joined", "separate"]
"""Whether tokens attend to other documents in their row."""

Format: TypeAlias = Literal["text", "chat"]
"""Content of the data: documents of text, or chat records."""

FIELD = "text"
HELDOUT_FRACTION = 0.1
_HUB = "hf:"
_BLOCK_BYTES = 16 * 1024
# At least this many blocks of a short text, so that about a tenth of it can be held out.
_FEWEST_BLOCKS = 8
CHAT_FIELDS = ("messages", "prompt", "completion", "tools")
_USE_CHAT = "set `data_format` to chat"
_BOM = b"\xef\xbb\xbf"
_SEPARATOR = re.compile(rb"(?<![^\r\n])<\|endoftext\|>[ \t]*(?![^\r\n])")


def weighted(data: Sequence[str]) -> list[tuple[str, Fraction | None]]:
    """Splits each entry NAME:WEIGHT into name and weight. All weights are None if no entry has one.

    An entry that exists as a file has no weight. Raises ConfigError if only some have one.
    """
    found = [_weighted(entry) for entry in data]
    if bare := [entry for entry, (_, weight) in zip(data, found, strict=True) if weight is None]:
        require(len(bare) == len(found), "data", bare[0], "NAME:WEIGHT, because other entries have a weight; or give none")
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
    """Returns the files of a name, sorted, or the name of a dataset or corpus as a path. Opens no file. Empty without files."""
    path = Path(name)
    if name in CORPORA or name.startswith(_HUB):
        return [path]
    if path.is_dir():
        below = (found for found in path.rglob("*") if found.is_file())
        return sorted(found for found in below if not any(part.startswith(".") for part in found.relative_to(path).parts))
    if path.exists() or not glob.has_magic(name):
        return [path] if path.is_file() else []
    return sorted({file for found in glob.glob(name, recursive=True) for file in files_of(found)})


def _require_files(name: str) -> list[Path]:
    if paths := files_of(name):
        return paths
    if Path(name).is_dir():
        raise DataError("has no files; name a directory of texts, or make token files with python -m jgraph.data make")
    hint = download_hint(name, kind="dataset")
    raise DataError(f"no such file or directory, and not one of the corpora {', '.join(CORPORA)}{hint}")


@contextlib.contextmanager
def named(argument: Literal["data", "text", "directory"], value: str | Path) -> Iterator[None]:
    """Adds an argument and its value to the message of a DataError of the block. Converts an OSError to a DataError."""
    try:
        yield
    except OSError as e:
        raise DataError(f"`{argument}` is {value}: cannot be read ({e.strerror or e})") from e
    except DataError as e:
        if str(e).startswith(f"`{argument}` is"):
            raise  # an inner block has named the file
        # `make_token_files` calls the argument `field`.
        problem = str(e)
        if argument == "text":
            problem = problem.replace("`data_field`", "`field`").replace(_USE_CHAT, "token files hold text only")
        raise DataError(f"`{argument}` is {value}: {problem}", field=e.field) from e


def read(
    argument: Literal["data", "text"], names: Sequence[str], field: str, documents: Documents = "joined"
) -> Iterator[tuple[Path, Iterator[bytes]]]:
    """Yields each file, dataset or named corpus, with its documents, read lazily. Skips documents of white space.

    Read all documents of a file before you request the next file.
    """
    files = []
    for name in names:
        with named(argument, name):
            files += [(name, path) for path in _require_files(name)]
    empty = set(names)

    def read_one(name: str, path: Path) -> Iterator[bytes]:
        with named(argument, path):
            for document in CORPORA[name]() if name in CORPORA else _documents_of(path, field, len(files), documents):
                if document.strip():
                    empty.discard(name)
                    yield document

    for name, path in files:
        yield path, read_one(name, path)
    for name in sorted(empty):
        raise DataError(f"`{argument}` is {name}: the file is empty; must have text")


def _documents_of(path: Path, field: str, of_files: int, documents: Documents) -> Iterable[bytes]:
    """Returns the documents of a file or dataset. A single short text is cut into smaller blocks than one of many."""
    if str(path).startswith(_HUB):
        return _texts_of_rows(_dataset_rows(str(path).removeprefix(_HUB)), field)
    if path.suffix == ".parquet":
        return _texts_of_rows(_parquet_rows(path, [field]), field)
    if path.suffix == ".jsonl":
        must = f"must be an object with a string in field {field!r}"
        return (_text_of(row, field, place) for place, row in _jsonl_rows(path, must))
    return _cut_file(path, of_files, documents)


Rows: TypeAlias = Iterator[tuple[str, dict[str, Any]]]
"""Records of a file, each with its place in the file."""


def read_records(names: Sequence[str], fields: Sequence[str], convert: Callable[[Rows], Iterator[_T]]) -> Iterator[_T]:
    """Converts the records of JSON Lines files, Parquet files and datasets, file by file, in the order of the names.

    `convert` reads the fields `fields` of the records of a file lazily. A DataError that it raises gets the name of the file.
    """

    def objects(path: Path) -> Rows:
        for place, row in _records_of(path, fields):
            if not isinstance(row, dict):
                kind = _JSON_TYPES.get(type(row), type(row).__name__)
                raise DataError(f"{place} is {kind}: must be an object with chat messages")
            yield place, row

    for name in names:
        with named("data", name):
            paths = _require_files(name)
        for path in paths:
            with named("data", path):
                yield from convert(objects(path))


def has_chats(data: Sequence[str], field: str) -> bool:
    """Returns True if the first record of an entry has the fields of a chat record instead of the field with the text."""
    with contextlib.suppress(JgraphError, OSError):  # whoever reads the data reports it
        for path in (path for name, _ in weighted(data) for path in files_of(name)[:1]):
            if str(path).startswith(_HUB) or path.suffix in (".jsonl", ".parquet"):
                _, row = next(iter(_records_of(path, [field, *CHAT_FIELDS])), ("", None))
                if isinstance(row, dict) and field not in row and _is_chat(row):
                    return True
    return False


def _is_chat(row: dict[str, Any]) -> bool:
    return "messages" in row or {"prompt", "completion"} <= row.keys()


def _records_of(path: Path, fields: Sequence[str]) -> Iterable[tuple[str, Any]]:
    if str(path).startswith(_HUB):
        return _numbered(map(_without_nulls, _dataset_rows(str(path).removeprefix(_HUB))))
    if path.suffix == ".parquet":
        return _numbered(map(_without_nulls, _parquet_rows(path, fields)))
    if path.suffix == ".jsonl":
        return _jsonl_rows(path, "must be an object with chat messages")
    raise DataError("must be a .jsonl or .parquet file or a dataset (hf:owner/name) for `data_format` chat")


def _without_nulls(value: Any) -> Any:
    """Removes the keys with the value None at every depth: Arrow has them for keys that the other rows of a column have."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _numbered(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((f"row {number}", row) for number, row in enumerate(rows, start=1))


def _cut_file(path: Path, of_files: int, documents: Documents) -> list[bytes]:
    text = path.read_bytes().removeprefix(_BOM)
    if text.startswith(b"JGTOKENS"):
        raise DataError(f"a single token file; name its directory, {path.parent}")
    if of_files > 1 and b"\0" in text[:4096]:
        raise DataError(f"not a text (it has a zero byte); name only texts, e.g. '{path.parent}/*.txt'")
    found = cut(text, fewest_blocks=-(-_FEWEST_BLOCKS // of_files))
    if documents == "separate" and len(found) > len(_separate(text)):
        why = "it has no lines that read <|endoftext|>, so document boundaries are unknown"
        raise DataError(f"{why}; leave `data_documents` out", field="data_documents")
    return found


def _jsonl_rows(path: Path, must: str) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise DataError(f"line {number} is not valid JSON ({e}): {must}") from e
            yield f"line {number}", row


def _texts_of_rows(rows: Iterable[dict[str, Any]], field: str) -> Iterator[bytes]:
    for place, row in _numbered(rows):
        if row.get(field, "") is not None:
            yield _text_of(row, field, place)


_JSON_TYPES = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
_JSON_TYPES |= {list: "an array", dict: "an object"}


def _text_of(row: Any, field: str, place: str) -> bytes:
    is_object = isinstance(row, dict)
    if is_object and isinstance(row.get(field), str):
        return row[field].encode(errors="replace")  # JSON can encode an unpaired surrogate, which UTF-8 cannot
    if is_object and field not in row:
        names = f"the fields {', '.join(map(repr, row))}" if row else "no fields"
        if _is_chat(row):
            raise DataError(f"{place} is a chat record with {names}, not {field!r}: {_USE_CHAT}", field="data_format")
        raise DataError(f"{place} has {names}, not {field!r}: set `data_field` to the field with the text")
    what, value = (f": field {field!r}", row[field]) if is_object else ("", row)
    must = "a string, or set `data_field` to another field" if is_object else f"an object with a string in field {field!r}"
    raise DataError(f"{place}{what} is {_JSON_TYPES.get(type(value), type(value).__name__)}: must be {must}")


def _parquet_rows(path: Path, fields: Sequence[str]) -> Iterator[dict[str, Any]]:
    pyarrow = library("pyarrow", extra="parquet")
    parquet = library("pyarrow.parquet", extra="parquet")
    try:
        with parquet.ParquetFile(path) as file:
            columns = [field for field in fields if field in file.schema_arrow.names] or None
            for batch in file.iter_batches(columns=columns):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as e:
        raise DataError(f"damaged, or not a Parquet file ({e})") from e


def _dataset_rows(name: str) -> Iterator[dict[str, Any]]:
    datasets = library("datasets")
    path, _, split = name.partition("@")
    owner, *rest = [path] if Path(path).exists() else path.split("/")
    path = "/".join([owner, *rest[:1]])
    config = "/".join(rest[1:]) or None
    try:
        if Path(path, "state.json").exists():
            yield from datasets.load_from_disk(path)
        else:
            yield from datasets.load_dataset(path, config, split=split or "train", streaming=True)
    except ValueError as e:
        raise DataError(str(e).partition("\n")[0]) from e


def library(name: str, *, extra: str = "") -> Any:
    """Imports an optional library, or raises a DataError with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise DataError(f"needs the {name} library: pip install 'jgraph[{extra or name}]'") from e


def check_links(folder: Path, *files: Path) -> None:
    """Raises DataError if a file is a link out of its folder. The cache of the Hub has links to its `blobs/`."""
    root = folder.resolve()
    caches = [root, *(parent for parent in root.parents if parent.name == "snapshots")]
    places = [root, *(cache.parent / "blobs" for cache in caches)]
    for file in files:
        if not any((target := file.resolve()).is_relative_to(place) for place in places):
            raise DataError(f"{file} is a link to {target}: must lead into the folder; put a copy of the file in its place")


def copy_files(files: Mapping[str, Path], to: Path) -> None:
    """Copies files into a folder, each to its relative path."""
    for name, file in files.items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, to / name)


def check_empty(to: Path, *, field: str) -> None:
    """Raises ConfigError, which names the argument `field`, unless a path does not exist or is an empty directory."""
    with os_errors(field, to):
        is_occupied = to.exists() and not (to.is_dir() and not any(to.iterdir()))
    if is_occupied:
        raise ConfigError(f"`{field}` is {to}: must not exist, or be an empty directory", field=field)


@contextlib.contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """Yields a hidden folder that gets the name `to` when it is complete. If an error is raised, nothing is left."""
    to = to.absolute()
    partial = to.with_name(f".{to.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


# --- Documents ---


def decode_utf8(document: bytes) -> str:
    """Returns a document as text. Raises DataError if it is not UTF-8."""
    try:
        return document.decode()
    except UnicodeDecodeError as e:
        raise DataError(f"not UTF-8 near {document[max(0, e.start - 20) : e.start + 20]!r}; convert it, e.g. with iconv") from e


def without_surrogates(text: str) -> str:
    """Replaces unpaired surrogates by question marks. JSON can encode them, UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def cut(text: bytes, *, fewest_blocks: int = _FEWEST_BLOCKS) -> list[bytes]:
    """Cuts a text into documents between lines that read `<|endoftext|>`, in order. Leaves out documents of white space.

    A text without such lines is cut at line ends into blocks of about 16 KiB, a short text into at least about `fewest_blocks`.
    Line ends around a document are removed. Bytes of any encoding are accepted; UTF-8 characters stay whole.
    """
    documents = _separate(text)
    if len(documents) != 1:
        return documents
    return _trim(_blocks(documents[0], size=min(_BLOCK_BYTES, -(-len(documents[0]) // fewest_blocks))))


def _separate(text: bytes) -> list[bytes]:
    """Returns the documents between lines that read `<|endoftext|>`; without such lines, the whole text."""
    return _trim(_SEPARATOR.split(text))


def _trim(documents: Iterable[bytes]) -> list[bytes]:
    # The line ends around a document belong to the separator: adding text after a document must not change its hash.
    return [document.strip(b"\r\n") for document in documents if document.strip()]


def _blocks(text: bytes, *, size: int) -> Iterator[bytes]:
    start = 0
    while start < len(text):
        end = start + size
        line_end = text.find(b"\n", end, end + size)
        if line_end >= 0:
            end = line_end + 1
        else:
            # No line end near: step over the up to three continuation bytes (0b10xxxxxx) of a UTF-8 character.
            for _ in range(3):
                if end < len(text) and text[end] & 0xC0 == 0x80:
                    end += 1
        yield text[start:end]
        start = end


def digest(document: bytes) -> bytes:
    """Returns the SHA-256 of a document, 32 bytes. The order of documents and the choice of held-out ones depend on it."""
    return hashlib.sha256(document).digest()


def count_heldout(digests: Sequence[bytes], heldout_fraction: float = HELDOUT_FRACTION) -> int:
    """Returns the number k of held-out documents, those with the lowest hashes: 0 < k < len(digests), which ascend.

    If one side would be empty, the document nearest to the threshold changes sides, with all equal documents.
    """
    require(0 < heldout_fraction < 1, "heldout_fraction", heldout_fraction, "in (0, 1)")
    threshold = int(heldout_fraction * 2**64).to_bytes(8, "big")
    equals_of_first = bisect_right(digests, digests[0]) if digests else 0
    if equals_of_first == len(digests):
        raise DataError(
            f"the text has {len(digests)} documents, but no two different ones: must have at least two different documents, "
            "one for training and one to hold out; use a longer text"
        )
    first_equal_of_last = bisect_left(digests, digests[-1])
    return min(max(bisect_left(digests, threshold), equals_of_first), first_equal_of_last)


# --- Named corpora ---

_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

_SEED = 0x6A67726170680000
_SYMBOLS = (string.ascii_letters + string.digits + " .").encode()
_NUM_DOCUMENTS = 512
_DOCUMENT_SYMBOLS = 4096
# Maps three random bits to one of four successors, with probabilities 1/2, 1/4, 1/8 and 1/8.
_SUCCESSOR_OF_BITS = np.array([0, 0, 0, 0, 1, 1, 2, 3])


def _python_docs() -> list[bytes]:
    from pydoc_data.topics import topics

    return [topics[name].encode() for name in sorted(topics)]


def _python_source() -> list[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return [path.read_bytes() for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix())]


def _synthetic() -> list[bytes]:
    """Returns an order-2 Markov chain over 64 letters, digits and signs. The bytes are the same on every machine.

    Each pair of symbols has four successors, drawn once, with probabilities 1/2, 1/4, 1/8 and 1/8. So the entropy rate is 1.75
    bits or 1.2130 nats per symbol. The first two symbols of a document and its newline cannot be predicted: they raise the
    lowest mean loss to about 1.2164 nats.
    """
    # Raw Philox output and a stable sort, not Generator methods: numpy promises to keep the former (NEP 19).
    bits = np.random.Philox(key=_SEED)
    num_symbols = len(_SYMBOLS)
    keys = bits.random_raw(num_symbols**3).reshape(num_symbols, num_symbols, num_symbols)
    successors = np.argsort(keys, axis=-1, kind="stable")[..., :4]
    draws = bits.random_raw(_DOCUMENT_SYMBOLS * _NUM_DOCUMENTS).reshape(_DOCUMENT_SYMBOLS, _NUM_DOCUMENTS)
    chain = np.empty((_DOCUMENT_SYMBOLS, _NUM_DOCUMENTS), np.int64)
    chain[:2] = draws[:2] % num_symbols
    choices = _SUCCESSOR_OF_BITS[draws % 8]
    for t in range(2, _DOCUMENT_SYMBOLS):
        chain[t] = successors[chain[t - 2], chain[t - 1], choices[t]]
    symbols = np.frombuffer(_SYMBOLS, np.uint8)
    return [symbols[document].tobytes() for document in chain.T]


CORPORA: dict[str, Callable[[], list[bytes]]] = {
    "python-docs": _python_docs,
    "python-source": _python_source,
    "synthetic": _synthetic,
}
"""Named corpora: functions that return their documents."""
