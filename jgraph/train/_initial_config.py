"""Settings of the initial weights. No JAX."""

from dataclasses import dataclass
from typing import Literal

from jgraph.errors import check_types
from jgraph.settings import check_field


@dataclass(frozen=True, kw_only=True)
class InitialConfig:
    """Initial weights of a new run. By default they are random."""

    init_from: str = ""
    """Local Hugging Face folder with the initial weights. Its config.json sets the sizes of the model, and its tokenizer.json
    tokenizes text in `data`. Not needed to resume."""
    continue_from: str = ""
    """Start a new run at step 0 with the latest weights of another run directory, or with RUN/checkpoints/STEP. The settings of
    the model, the tokenizer and the default preset are those of the other run. Not needed to resume."""
    continue_with: Literal["weights", "optimizer"] = "weights"
    """With `continue_from`: `weights` loads the weights and the other state of the model. `optimizer` also loads the moments
    and the step count of the same optimizer."""

    def __post_init__(self):
        check_types(self)
        check_field(self, "continue_from", not (self.continue_from and self.init_from), "empty if `init_from` is set")
        is_default = self.continue_with == "weights"
        check_field(self, "continue_with", bool(self.continue_from) or is_default, "weights unless `continue_from` is set")
