"""Training data: `load` opens a corpus, `Batches` and `heldout_batches` sample it. No jax here."""

from jgraph.data._batches import Ahead as Ahead
from jgraph.data._batches import Batch as Batch
from jgraph.data._batches import Batches as Batches
from jgraph.data._batches import Index as Index
from jgraph.data._batches import Source as Source
from jgraph.data._batches import apart as apart
from jgraph.data._batches import heldout_batches as heldout_batches
from jgraph.data._corpus import Corpus as Corpus
from jgraph.data._corpus import is_text as is_text
from jgraph.data._corpus import load as load
from jgraph.data._corpus import tokenizer_file as tokenizer_file
from jgraph.data._make import make_token_files as make_token_files
from jgraph.data._texts import CORPORA as CORPORA
from jgraph.data.tokenfile import Concatenated as Concatenated
from jgraph.data.tokenfile import TokenFile as TokenFile
from jgraph.data.tokenfile import Tokens as Tokens
from jgraph.data.tokenfile import write_tokens as write_tokens
from jgraph.data.tokenizer import Tokenizer as Tokenizer
