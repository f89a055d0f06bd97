"""Measure how well a model predicts held-out text: that of a run of jgraph.train, or of a Hugging Face folder.

    python -m jgraph.evaluate runs/first
    python -m jgraph.evaluate runs/first --data book.txt --json numbers.json
    python -m jgraph.evaluate folder/ --data tokens/ --fsdp 4

Prints the loss in nats a token, the perplexity and the bits a byte, which compare models with other tokens. Without flags, the
text and the batches are those of the run's own evaluations. The run may have been over any devices, and may be going on.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jgraph.cli import Count, File, Module, run_options, write_file

if TYPE_CHECKING:
    from jgraph.training.evaluation import Evaluation

_PROG = "jgraph.evaluate"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_OR_DIR")]
    """A run directory of `python -m jgraph.train`, or a Hugging Face folder."""
    data: tuple[str, ...] = ()
    """As that of `python -m jgraph.train`, whose held-out part is predicted; by default the run's."""
    step: Count = None
    """Steps of the run's checkpoint; by default the newest."""
    module: Module = ""
    """Class of a model of your own, as the run has it. The run's model is imported only if it is built in or named here."""
    batch_size: Count = None
    """Sequences at a time; by default as the run has it, or 8."""
    seq_len: Count = None
    """Tokens of a sequence that are predicted; by default as the run has it, or those that the folder names, at most 1024."""
    eval_batches: Count = None
    """Largest number of batches, spread over the text; by default as the run has it, or 16."""
    dp: Count = None
    """Replicas of the model, each with its part of a batch."""
    fsdp: Count = None
    """Devices that share the parameters, each with its part of a batch too."""
    json: File = None
    """Write the numbers here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code, as `jgraph.cli.run`."""
    return run_options(Options, tell, _PROG, __doc__, argv, positional="run")


def tell(options: Options) -> None:
    """Evaluates, writes the file that was asked for, and prints. Raises JgraphError, OSError."""
    # Only now: jax takes its time.
    from absl import logging

    from jgraph.dispatch import check_devices
    from jgraph.training.evaluation import evaluate

    logging.set_verbosity(logging.FATAL)  # Orbax logs what it also raises
    check_devices()
    names = ("data", "batch_size", "seq_len", "eval_batches", "dp", "fsdp")
    asked = {name: value for name in names if (value := getattr(options, name)) not in (None, ())}
    found = evaluate(options.run, options.step, module=options.module, **asked)
    if options.json is not None:
        write_file("json", options.json, lambda path: path.write_text(json.dumps(_fields(found), indent=2) + "\n"))
    show(found)


def show(found: "Evaluation") -> None:
    """Prints an evaluation."""
    bits = "?, nobody knows the bytes" if found.bits_per_byte is None else f"{found.bits_per_byte:.4f}"
    rows = {
        "model": found.source,
        "held out": f"{found.batches} x {found.batch_size} x {found.seq_len} tokens of {found.data}",
        "loss": f"{found.loss:.4f} nats/token",
        "perplexity": f"{found.perplexity:.4g}",
        "bits/byte": bits,
    }
    for label, text in rows.items():
        print(f"{label:11}{text}")


def _fields(found: "Evaluation") -> dict[str, Any]:
    fields = dataclasses.asdict(found) | {"perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}
    # JSON has no others.
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields.items()}


if __name__ == "__main__":
    sys.exit(main())
