"""Training data: `load` opens a corpus, and `Batches` and `heldout_batches` return batches of it. No jax here."""

from jgraph.data._batches import (
    Ahead as Ahead,
    Batch as Batch,
    Batches as Batches,
    Source as Source,
    apart as apart,
    heldout_batches as heldout_batches,
)
from jgraph.data._corpus import Corpus as Corpus, is_text as is_text, load as load, tokenizer_beside as tokenizer_beside
from jgraph.data._make import make_token_files as make_token_files
from jgraph.data._orders import Index as Index
from jgraph.data._texts import CORPORA as CORPORA, has_chats as has_chats, library as library
from jgraph.data._tokenfile import Concatenated as Concatenated, TokenFile as TokenFile, write_tokens as write_tokens
from jgraph.data.tokenizer import Tokenizer as Tokenizer
