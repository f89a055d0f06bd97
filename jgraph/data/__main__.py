"""Makes, checks and describes token files for `python -m jgraph.train --data`.

$ python -m jgraph.data make --text a.txt pages/ 'more/*.jsonl' --tokenizer tokenizer.json --out tokens/
$ python -m jgraph.data verify tokens/
$ python -m jgraph.data show tokens/
"""

import sys
from pathlib import Path

import tyro

from jgraph.cli import command
from jgraph.data import tokenfile
from jgraph.data._corpus import load, side_files
from jgraph.data._make import SHARD_TOKENS, make_token_files
from jgraph.data._texts import FIELD, HELDOUT_FRACTION, named


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
        tokenizer: A tokenizer.json of the `tokenizers` library. It is copied into the directory.
        out: The directory, new or empty. If an error occurs, nothing is left behind.
        field: Field of the text in .jsonl files, .parquet files and datasets.
        heldout_fraction: Fraction of the documents to hold out, in (0, 1): those with the lowest SHA-256.
        shard_tokens: Start a new file after the document that reaches this many tokens.

    Raises:
        ConfigError: If a number is out of range, the tokenizer cannot be read, or `out` cannot be written.
        DataError: If a text is missing, empty, damaged or not UTF-8; if `out` is in use; or if the tokenizer is missing or
            invalid.
    """
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
        header = tokenfile.verify(path)
        print(f"{path.name}: {header.num_tokens:,} {'ends' if path.suffix == '.ends' else 'tokens'}, matches the header")


def show(data: tyro.conf.Positional[tuple[str, ...]], /, *, field: str = FIELD) -> None:
    """Print the name, size, vocabulary and fingerprint of a corpus, and the shares of its sources.

    Args:
        data: Entries of `--data` of `python -m jgraph.train`: text files, directories, globs, datasets (hf:owner/name), named
            corpora and directories of token files, each optionally as NAME:WEIGHT.
        field: Field of the text in .jsonl files, .parquet files and datasets.

    Raises:
        ConfigError: If a weight is not positive, or only some entries have one.
        DataError: If an entry is missing, empty or damaged.
    """
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


main = command("python -m jgraph.data", f"{__doc__}\n{tokenfile.__doc__}", make, verify, show)

if __name__ == "__main__":
    sys.exit(main())
