"""Settings of metrics, evaluations, profiles and failures. No JAX."""

import math
from dataclasses import dataclass
from typing import Literal

from jgraph.errors import check_types, require_positive
from jgraph.settings import check_field, may_change

_MONITORING = "monitoring does not change the training"


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Metrics, evaluations, profiles and failures during the run."""

    log_every: int = may_change(10, _MONITORING)
    """Steps between progress lines and entries in metrics.jsonl. The first step is always logged."""
    log: tuple[Literal["tensorboard", "wandb"], ...] = may_change((), _MONITORING)
    """Additional destinations of the metrics: TensorBoard event files in the run directory, or Weights & Biases."""
    eval_every: int = may_change(250, _MONITORING)
    """Steps between evaluations on held-out text. The last step is always evaluated."""
    eval_batches: int = may_change(16, _MONITORING)
    """Maximum number of batches per evaluation."""
    sample_tokens: int = may_change(256, _MONITORING)
    """Tokens of sample text generated at the end of the run; 0 for none."""
    profile: str = may_change("", _MONITORING)
    """FIRST:STOP, the steps to trace, e.g. 10:13 for steps 11 to 13. The same number of steps is then traced without command
    buffers, to record the names of kernels. Writes profile/profile.html and profile/profile.json in the run directory."""
    on_nonfinite: Literal["stop", "skip"] = may_change("stop", "saving and stopping do not change the training")
    """Action if the loss or a gradient is not finite: stop the run, or skip the update and count it."""
    hang_seconds: float = may_change(1800.0, "saving and stopping do not change the training")
    """Exit with code 75 if the run waits this long for one program on the devices; 0 disables the check. Must be longer than
    the slowest step, and longer than one process may wait for another, for example while the other compiles."""

    def __post_init__(self):
        check_types(self)
        require_positive(self, "log_every eval_every eval_batches")
        check_field(self, "sample_tokens", self.sample_tokens >= 0, "0 or positive")
        check_field(self, "hang_seconds", 0 <= self.hang_seconds < math.inf, "0 or positive")
        if self.profile:
            first, stop = self.profile_steps
            check_field(
                self, "profile", self.profile.replace(":", "", 1).isdecimal() and first < stop, "FIRST:STOP with FIRST < STOP"
            )

    @property
    def profile_steps(self) -> tuple[int, int]:
        """(first, stop): steps first + 1 to stop are traced. (0, 0) if `profile` is empty or not FIRST:STOP."""
        first, _, stop = self.profile.partition(":")
        return (int(first), int(stop)) if first.isdecimal() and stop.isdecimal() else (0, 0)
