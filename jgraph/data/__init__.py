"""Text and token files as batches: `load` opens a corpus, `Batches` and `heldout_batches` sample it. No jax here."""

from jgraph.data.batches import Ahead as Ahead
from jgraph.data.batches import Batch as Batch
from jgraph.data.batches import Batches as Batches
from jgraph.data.batches import apart as apart
from jgraph.data.batches import heldout_batches as heldout_batches
from jgraph.data.corpus import Corpus as Corpus
from jgraph.data.corpus import is_text as is_text
from jgraph.data.corpus import load as load
from jgraph.data.corpus import tokenizer_file as tokenizer_file
from jgraph.data.make import make_token_files as make_token_files
from jgraph.data.mixture import Source as Source
from jgraph.data.orders import Index as Index
from jgraph.data.sources import CORPORA as CORPORA
from jgraph.data.tokenfile import Concatenated as Concatenated
from jgraph.data.tokenfile import Header as Header
from jgraph.data.tokenfile import TokenFile as TokenFile
from jgraph.data.tokenfile import Tokens as Tokens
from jgraph.data.tokenfile import read_header as read_header
from jgraph.data.tokenfile import read_tokens as read_tokens
from jgraph.data.tokenfile import verify as verify
from jgraph.data.tokenfile import write_tokens as write_tokens
from jgraph.data.tokenizer import Tokenizer as Tokenizer
from jgraph.data.verification import verify_in_background as verify_in_background
