"""Settings of the data and of the batch of a step. No JAX."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from jgraph.errors import check_types, require, require_positive
from jgraph.settings import check_field


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """Training data and the batch of a step."""

    batch_size: int = 32
    """Sequences per step, summed over microbatches and devices."""
    seq_len: int = 256
    """Predicted tokens per sequence."""
    num_microbatches: int = 1
    """Microbatches per step. Their gradients are accumulated before the update. Must divide batch_size."""
    data: tuple[str, ...] = ("python-docs",)
    """Training data: `python-docs`, `python-source`, `synthetic`; files, directories and globs of text, JSON Lines or Parquet;
    Hugging Face datasets, e.g. hf:owner/name; directories of token files (see `python -m jgraph.data`). NAME:WEIGHT sets
    mixture weights, e.g. code:0.7 prose:0.3."""
    data_field: Annotated[str, arg(name="data.field")] = "text"
    """Field of a JSON line, or column of a Parquet file or dataset, with the text."""
    data_format: Annotated[Literal["text", "chat"], arg(name="data.format")] = "text"
    """`chat`: `data` has records with `messages`, or with `prompt` and `completion`, and no text. The loss counts the tokens of
    the assistant. Conversations are packed into rows and stay separate. The default is read from the first record."""
    data_template: Annotated[str, arg(name="data.template")] = ""
    """With the format chat: file of the chat template, in Jinja. Empty means the template of the Hugging Face folder."""
    data_truncate: Annotated[Literal["end", "start", "drop", "error"], arg(name="data.truncate")] = "end"
    """With the format chat: action for a conversation that is longer than a row. `end` and `start` remove its last or first
    tokens. `drop` leaves it out."""
    data_shuffle: Annotated[Literal["windows", "documents"], arg(name="data.shuffle")] = "windows"
    """Unit of shuffling in each epoch. `windows` shuffles windows of the text in its stored order. `documents` shuffles the
    documents first, and then the windows."""
    data_documents: Annotated[Literal["joined", "separate"], arg(name="data.documents")] = "joined"
    """`joined`: tokens attend to earlier documents in their row. `separate`: attention stays within a document, and its last
    token, the end of text, has no target. Always `separate` with the format chat."""

    def __post_init__(self):
        if isinstance(self.data, str):
            object.__setattr__(self, "data", (self.data,))
        check_types(self)
        require_positive(self, "batch_size seq_len num_microbatches")
        require(all(self.data) and bool(self.data), "data", "''", "a corpus name, a text file or a directory of token files")
        if self.data_format == "chat":
            object.__setattr__(self, "data_documents", "separate")
            allowed = "windows if `data_format` is chat, which shuffles rows"
            check_field(self, "data_shuffle", self.data_shuffle == "windows", allowed)
        for name, default in (("data_template", ""), ("data_truncate", "end")):
            allowed = f"{default or 'empty'} unless `data_format` is chat"
            check_field(self, name, self.data_format == "chat" or getattr(self, name) == default, allowed)
        check_field(
            self,
            "num_microbatches",
            self.batch_size % self.num_microbatches == 0,
            f"a divisor of `batch_size` {self.batch_size}",
        )

    @property
    def tokens_per_step(self) -> int:
        """Predicted tokens per step, over all devices."""
        return self.batch_size * self.seq_len

    @property
    def microbatch_size(self) -> int:
        """Sequences per microbatch, over all devices."""
        return self.batch_size // self.num_microbatches
