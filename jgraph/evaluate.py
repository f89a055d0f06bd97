"""Evaluate the model of a training run or of a Hugging Face folder on held-out text.

    python -m jgraph.evaluate runs/first
    python -m jgraph.evaluate runs/first --data book.txt --json numbers.json
    python -m jgraph.evaluate folder/ --data tokens/ --fsdp 4

Prints the loss in nats per token, the perplexity, and bits per byte, which compares models with different tokenizers. By
default, a run is evaluated on the same batches as during training. Runs of any parallel layout can be evaluated, also while
they train.
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

from jgraph.cli import Count, File, Module, run_options
from jgraph.errors import os_errors
from jgraph.interop.folder import check_exists

if TYPE_CHECKING:
    from jgraph.train.evaluation import Evaluation

_PROG = "python -m jgraph.evaluate"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command line."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_OR_DIR")]
    """A run directory of `python -m jgraph.train`, or a Hugging Face folder."""
    data: tuple[str, ...] = ()
    """Data to evaluate on, as for `python -m jgraph.train`; uses its held-out part. By default the run's data."""
    step: Count = None
    """Step of the checkpoint to load; by default the newest. Runs only."""
    module: Module = ""
    """Model class of the run, as `package.module:Class`. Only classes in `jgraph_models` are imported without it."""
    batch_size: Count = None
    """Sequences per batch; by default the run's, or 8 for a folder."""
    seq_len: Count = None
    """Predicted tokens per sequence; by default the run's, or a folder's max_position_embeddings, at most 1024."""
    eval_batches: Count = None
    """Maximum number of batches, spread evenly over the text; by default the run's, or 16 for a folder."""
    dp: Count = None
    """Data-parallel replicas; each evaluates a part of the batch."""
    fsdp: Count = None
    """Devices that the parameters are sharded over; each evaluates a part of the batch."""
    json: File = None
    """Also write the results to this file."""


def main(argv: Sequence[str] | None = None, prog: str = _PROG) -> int:
    """Runs the command.

    Args:
        argv: The arguments. Default: those of the process.
        prog: The command as the user starts it, for the usage line and errors.

    Returns:
        The exit code, as in `jgraph.cli.run`.
    """
    return run_options(Options, evaluate_and_print, prog, __doc__, argv, positional="run")


def evaluate_and_print(options: Options) -> None:
    """Evaluates the model, prints the results, and writes them to `options.json` if it is set.

    Raises:
        JgraphError: If the model or the data cannot be used, or an option has a value that is not allowed.
    """
    check_exists(options.run, field="run")
    # Imported here, so that --help and errors in flags do not wait for jax.
    from absl import logging

    from jgraph.dispatch import check_devices
    from jgraph.train.evaluation import evaluate

    logging.set_verbosity(logging.FATAL)  # Orbax also logs the errors that it raises.
    check_devices()
    names = ("data", "batch_size", "seq_len", "eval_batches", "dp", "fsdp")
    asked = {name: value for name in names if (value := getattr(options, name)) not in (None, ())}
    evaluation = evaluate(options.run, options.step, module=options.module, **asked)
    if options.json is not None:
        with os_errors("json", options.json):
            options.json.write_text(json.dumps(_fields(evaluation), indent=2) + "\n")
    _print(evaluation)


def _print(evaluation: "Evaluation") -> None:
    bits = "unknown: the tokens cannot be decoded" if evaluation.bits_per_byte is None else f"{evaluation.bits_per_byte:.4f}"
    rows = {
        "model": evaluation.source,
        "held out": f"{evaluation.batches} x {evaluation.batch_size} x {evaluation.seq_len} tokens of {evaluation.data}",
        "loss": f"{evaluation.loss:.4f} nats/token",
        "perplexity": f"{evaluation.perplexity:.4g}",
        "bits/byte": bits,
    }
    for label, text in rows.items():
        print(f"{label:11}{text}")


def _fields(evaluation: "Evaluation") -> dict[str, Any]:
    fields = dataclasses.asdict(evaluation) | {"perplexity": evaluation.perplexity, "bits_per_byte": evaluation.bits_per_byte}
    # JSON has no infinity or NaN.
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields.items()}


if __name__ == "__main__":
    sys.exit(main())
