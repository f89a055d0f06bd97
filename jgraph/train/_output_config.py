"""Settings of the run directory and its checkpoints. No JAX."""

from dataclasses import dataclass
from typing import Literal

from jgraph.errors import check_types, require_positive
from jgraph.settings import may_change


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """The run directory and its checkpoints."""

    run_dir: str = may_change("", "they select the run to resume")
    """Output directory. Empty means runs/PRESET. Must be on a disk that all processes share."""
    resume: bool = may_change(True, "they select the run to resume")
    """Resume from the last checkpoint in the run directory. Off: start over and replace the run in this directory."""
    checkpoint_every: int = may_change(250, "saving and stopping do not change the training")
    """Steps between checkpoints. The last step is always saved."""
    checkpoint_keep: int = may_change(2, "saving and stopping do not change the training")
    """Number of checkpoints to keep."""
    checkpoint_base: Literal["copy", "reference"] = "copy"
    """Frozen weights of a run with `lora.rank` or `freeze`: `copy` stores them once per run. `reference` stores the path of
    `init_from` or `continue_from` and checksums: the run cannot be resumed or read without these files."""

    def __post_init__(self):
        check_types(self)
        require_positive(self, "checkpoint_every checkpoint_keep")
