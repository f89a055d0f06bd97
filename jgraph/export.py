"""Write the model of a run as a Hugging Face folder, which transformers loads.

    python -m jgraph.export runs/first --to folder/
    python -m jgraph.export runs/first --to folder/ --step 500 --dtype float32

The folder gets config.json, model.safetensors (several from 5 GB on) and, if the run has one, tokenizer.json. The run may be
over any devices, and may be going on.
"""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jgraph.cli import Count, Module, run_options
from jgraph.errors import os_errors

_PROG = "python -m jgraph.export"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """A run directory of `python -m jgraph.train`."""
    to: Path
    """The folder to write: new, or empty."""
    step: Count = None
    """Steps of the checkpoint; by default the newest."""
    module: Module = ""
    """Model class of the run, as `package.module:Class`. Only classes in `jgraph_models` are imported without it."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the tensors."""


def main(argv: Sequence[str] | None = None, prog: str = _PROG) -> int:
    """Runs the command.

    Args:
        argv: The arguments. Default: those of the process.
        prog: The command as the user starts it, for the usage line and errors.

    Returns:
        The exit code, as in `jgraph.cli.run`.
    """
    return run_options(Options, export, prog, __doc__, argv, positional="run")


def export(options: Options) -> None:
    """Writes the folder. Raises JgraphError if it cannot; nothing is left then."""
    # Only now: jax takes its time.
    from absl import logging

    from jgraph.interop.write import check_empty, write
    from jgraph.train import origin
    from jgraph.train.saved import SavedRun

    logging.set_verbosity(logging.FATAL)  # Orbax logs what it also raises
    check_empty(options.to, field="to")
    with contextlib.closing(SavedRun(options.run, options.step, module=options.module)) as saved:
        names, model = origin.names_of(saved.config.module, field="to"), saved.config.model
        kept = origin.kept_folder(saved.dir)
        config = names.config(model, kept.config if kept else {"max_position_embeddings": saved.config.input.seq_len})
        beside = origin.kept(saved.dir)
        with os_errors("to", options.to):
            files = write(options.to, config, names.parts(model), saved.read, dtype=options.dtype, beside=beside)
    print(f"step {saved.step} of {options.run} is in {options.to}: {', '.join(file.name for file in files)}")


if __name__ == "__main__":
    sys.exit(main())
