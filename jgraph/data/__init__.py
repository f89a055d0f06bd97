"""Text and token files as batches: `load` opens what `--data` names, `Batches` and `heldout_batches` sample it. No jax here."""

from jgraph.data.batches import Batches, heldout_batches
from jgraph.data.corpus import Corpus, load
from jgraph.data.make import make_token_files
from jgraph.data.sources import CORPORA
from jgraph.data.tokenfile import Header, read_header, read_tokens, verify, write_tokens
from jgraph.data.tokens import Concatenated, Tokens

__all__ = [
    "CORPORA",
    "Batches",
    "Concatenated",
    "Corpus",
    "Header",
    "Tokens",
    "heldout_batches",
    "load",
    "make_token_files",
    "read_header",
    "read_tokens",
    "verify",
    "write_tokens",
]
