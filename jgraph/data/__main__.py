"""Makes, checks and shows the token files for `python -m jgraph.train --data`.

$ python -m jgraph.data make --text a.txt b.txt --tokenizer tokenizer.json --out tokens/
$ python -m jgraph.data verify tokens/
$ python -m jgraph.data show tokens/
"""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from jgraph.cli import fields_of, run, run_command
from jgraph.data import tokenfile
from jgraph.data.corpus import load, side_files
from jgraph.data.documents import HELDOUT_FRACTION
from jgraph.data.make import SHARD_TOKENS, make_token_files


def make(
    *,
    text: tuple[Path, ...],
    tokenizer: Path,
    out: Path,
    heldout_fraction: float = HELDOUT_FRACTION,
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Tokenize text files into a directory of token files.

    Args:
        text: UTF-8 text files. Lines that read <|endoftext|> separate documents; without them, blocks of about 16 KiB do.
        tokenizer: tokenizer.json of the `tokenizers` library; copied into the directory.
        out: the directory, new or empty.
        heldout_fraction: documents whose SHA-256 is in this lowest part are held out.
        shard_tokens: a file is closed with the document that reaches this many tokens.
    """
    make_token_files(text, tokenizer, out, heldout_fraction=heldout_fraction, shard_tokens=shard_tokens)
    show(str(out))


def verify(directory: tyro.conf.Positional[Path], /) -> None:
    """Read every token file of a directory and check it against its header.

    Args:
        directory: with train-*.bin and heldout-*.bin.
    """
    for files in side_files(directory).values():
        for path in files:
            header = tokenfile.verify(path)
            print(f"{path.name}: {header.num_tokens:,} tokens, as the header says")


def show(data: tyro.conf.Positional[str], /) -> None:
    """Print the sizes of a corpus.

    Args:
        data: python-docs, python-source, synthetic, a text file, or a directory of token files.
    """
    corpus = load(data, seq_len=1, vocab_size=None)
    rows = {
        "name": corpus.name,
        "train": f"{len(corpus.train):,} tokens, {corpus.train_documents:,} documents",
        "held out": f"{len(corpus.heldout):,} tokens, {corpus.heldout_documents:,} documents",
        "vocabulary": f"{corpus.vocab_size:,} ids, {corpus.train.dtype.itemsize} bytes per token",
        "fingerprint": corpus.fingerprint,
    }
    if corpus.zlib_nats_per_token is not None:
        rows["zlib -9"] = f"{corpus.zlib_nats_per_token:.3f} nats per token"
    if corpus.entropy_nats_per_token is not None:
        rows["entropy"] = f"{corpus.entropy_nats_per_token:.3f} nats per token"
    for label, value in rows.items():
        print(f"{label:12} {value}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code, as `jgraph.cli.run`."""
    act = functools.partial(run_command, (make, verify, show), "jgraph.data", f"{__doc__}\n{tokenfile.__doc__}")
    return run("jgraph.data", act, argv, fields_of(make))


if __name__ == "__main__":
    sys.exit(main())
