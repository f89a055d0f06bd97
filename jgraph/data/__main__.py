"""Makes, checks and describes token files for `python -m jgraph.train --data`.

$ python -m jgraph.data make --text a.txt pages/ 'more/*.jsonl' --tokenizer tokenizer.json --out tokens/
$ python -m jgraph.data verify tokens/
$ python -m jgraph.data show tokens/
$ python -m jgraph.data show chat.jsonl --format chat --tokenizer folder/
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
import tyro
from rich.text import Text

from jgraph.cli import File, FlagConsole, command, phase
from jgraph.data import _tokenfile
from jgraph.data._corpus import load, side_files
from jgraph.data._make import SHARD_TOKENS, make_token_files
from jgraph.data._texts import FIELD, HELDOUT_FRACTION, Format, has_chats, named, weighted
from jgraph.data.chat import ChatReader
from jgraph.data.tokenizer import Tokenizer
from jgraph.errors import DataError, os_errors, require
from jgraph.exits import end_with


def make(
    *,
    text: tuple[str, ...],
    tokenizer: Path,
    out: Path,
    field: str = FIELD,
    heldout_fraction: float = HELDOUT_FRACTION,
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Tokenize files into a directory of token files, and print its size and vocabulary.

    Args:
        text: UTF-8 files, directories, globs, Hugging Face datasets (hf:owner/name, streamed) and named corpora (python-docs,
            python-source, synthetic), without weights. Each line of a .jsonl file is a document, and each row of a .parquet
            file or a dataset. In other files, lines that read <|endoftext|> separate documents; without such lines, a file is
            cut into blocks of about 16 KiB.
        tokenizer: A Hugging Face folder, or a tokenizer.json. The files of the tokenizer are copied into the directory.
        out: The directory, new or empty. If an error occurs, nothing is left behind.
        field: Field of the text in .jsonl files, .parquet files and datasets.
        heldout_fraction: Fraction of the documents to hold out, in (0, 1): those with the lowest SHA-256.
        shard_tokens: Start a new file after the document that reaches this many tokens.

    Raises:
        ConfigError: If a number is out of range, the tokenizer cannot be read, or `out` cannot be written.
        DataError: If a text is missing, empty, damaged or not UTF-8; if `out` is in use; or if the tokenizer is missing or
            invalid.
    """
    with phase("tokenizing the text"):
        make_token_files(text, tokenizer, out, field=field, heldout_fraction=heldout_fraction, shard_tokens=shard_tokens)
    show((str(out),))


def verify(directory: tyro.conf.Positional[Path], /) -> None:
    """Read every token file of a directory and check it against its header. Print a line for each correct file.

    Args:
        directory: A directory with train-*.bin and heldout-*.bin.

    Raises:
        DataError: At the first file that is damaged, or if the directory lacks token files.
    """
    with named("directory", directory):
        sides = side_files(directory)
    for path in (*sides["train"], *sides["heldout"], *sorted(directory.glob("*.ends"))):
        header = _tokenfile.verify(path)
        print(f"{path.name}: {header.num_tokens:,} {'ends' if path.suffix == '.ends' else 'tokens'}, matches the header")


def show(
    data: tyro.conf.Positional[tuple[str, ...]],
    /,
    *,
    field: str = FIELD,
    format: Format | None = None,
    tokenizer: File = None,
    template: File = None,
    record: int = 0,
) -> None:
    """Print the name, size, vocabulary and fingerprint of a corpus, and the shares of its sources.

    With the format chat, print a rendered record with the trained tokens marked, and the numbers of conversations and tokens.

    Args:
        data: Entries of `--data` of `python -m jgraph.train`: text files, directories, globs, datasets (hf:owner/name), named
            corpora and directories of token files, each optionally as NAME:WEIGHT.
        field: Field of the text in .jsonl files, .parquet files and datasets.
        format: `chat` for records with `messages`, or with `prompt` and `completion`. By default as the first record.
        tokenizer: With the format chat: a Hugging Face folder, or a tokenizer.json. By default, and for a folder without
            a tokenizer, text is read as bytes.
        template: With the format chat: a Jinja file. By default the chat template of the folder.
        record: With the format chat: the number of the record to print, from 0.

    Raises:
        ConfigError: If a weight is not positive, or only some entries have one, there is no such record, or a flag of chat
            records is set for text.
        DataError: If an entry is missing, empty or damaged.
    """
    if format == "chat" or (format is None and has_chats(data, field)):
        try:
            _show_chat([name for name, _ in weighted(data)], tokenizer, template, record)
        except DataError as e:  # this command has other flags than `python -m jgraph.train`
            raise DataError(str(e).replace("`data_template`", "`template`"), field=e.field) from e
        return
    for name, value in (("tokenizer", tokenizer), ("template", template)):
        require(value is None, name, value, "left out unless `format` is chat")
    corpus = load(data, seq_len=1, vocab_size=None, field=field)
    rows = {
        "name": corpus.name,
        "train": f"{len(corpus.train):,} tokens, {corpus.train_documents:,} documents",
        "held out": f"{len(corpus.heldout):,} tokens, {corpus.heldout_documents:,} documents",
        "vocabulary": f"{corpus.vocab_size:,} ids, {corpus.train.dtype.itemsize} bytes per token",
        "fingerprint": corpus.fingerprint,
    }
    total = sum(source.weight for source in corpus.sources)
    for source in corpus.sources if len(corpus.sources) > 1 else ():
        rows[source.name] = f"{float(source.weight / total):.1%} of the rows, {len(source.tokens):,} tokens to train on"
    if corpus.zlib_nats_per_token is not None:
        rows["zlib -9"] = f"{corpus.zlib_nats_per_token:.3f} nats per token"
    for label, value in rows.items():
        print(f"{label:12} {value}")


def _show_chat(names: list[str], tokenizer: Path | None, template: Path | None, record: int) -> None:
    with os_errors("tokenizer", tokenizer, "read"):
        reader = ChatReader(Tokenizer.of(tokenizer, template))
    shown = None
    conversations = tokens = trained = 0
    for one in reader.read(names):
        shown = one if conversations == record else shown
        conversations += 1
        tokens += len(one.ids)
        trained += int(one.trained.sum())
    require(shown is not None, "record", record, f"a number below {conversations}, the number of records")
    assert shown is not None
    console = FlagConsole(highlight=False, soft_wrap=True)
    edges = [0, *(np.flatnonzero(np.diff(shown.trained)) + 1), len(shown.ids)]
    for start, stop in pairwise(edges):
        text = reader.tokenizer.decode(shown.ids[start:stop].tolist())
        if not shown.trained[start]:
            console.print(Text(text), end="")
        else:
            console.print(Text(text, "bold green") if console.is_terminal else Text(f"[[{text}]]"), end="")
    print(f"\n\nrecord {record}: {len(shown.ids):,} tokens, {int(shown.trained.sum()):,} trained")
    print(f"total: {conversations:,} conversations, {tokens:,} tokens, {trained:,} trained")


main = command("python -m jgraph.data", f"{__doc__}\n{_tokenfile.__doc__}", make, verify, show)

if __name__ == "__main__":
    end_with(main)
