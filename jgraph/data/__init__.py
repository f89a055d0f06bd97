"""Text and token files as batches: `load` opens what `--data` names, `Batches` and `heldout_batches` sample it. No jax here."""

from jgraph.data.batches import Batches, heldout_batches
from jgraph.data.corpus import Corpus, load
from jgraph.data.make import make_token_files
from jgraph.data.sources import CORPORA
from jgraph.data.tokenfile import Header, TokenFile, read_header, read_tokens, verify, write_tokens
from jgraph.data.tokens import Concatenated, Tokens
from jgraph.data.verification import verify_in_background

__all__ = [
    "CORPORA",
    "Batches",
    "Concatenated",
    "Corpus",
    "Header",
    "TokenFile",
    "Tokens",
    "heldout_batches",
    "load",
    "make_token_files",
    "read_header",
    "read_tokens",
    "verify",
    "verify_in_background",
    "write_tokens",
]
