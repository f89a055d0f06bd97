"""Train a GPT on one device or several, or go on with a run that was interrupted.

    python -m jgraph.train
    python -m jgraph.train --preset gpt-124m --data tokens/ --run-dir runs/first
    srun --ntasks-per-node 8 python -m jgraph.train --preset gpt-1b3 --dp 16

The presets are {presets}; every flag overrides a field of the one chosen, and the defaults below are those of {preset}.
Everything is written to the run directory: config.json, metrics.jsonl (one JSON object a logged step) and checkpoints/.
The same command again goes on from the last checkpoint.
"""

import itertools
import signal
import sys
from collections.abc import Sequence

import tyro

from jgraph.cli.parse import PipeConsole, exit_code, one_line
from jgraph.training.config import TrainConfig
from jgraph.training.presets import PRESETS, preset

_PROG = "jgraph.train"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments; those of the process by default.

    Returns:
        Exit code: 0 when finished or asked for help; 1 for a loss or gradient that is not finite; 2 for input that cannot
        work; 130 after Ctrl-C and 143 after SIGTERM, when all is saved; 130 after a second Ctrl-C, at once; 141 where nobody
        reads stdout any more. An error is one line on stderr.
    """
    return exit_code(_PROG, lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    config = parse(argv)
    if config is None:
        return 0
    # After the flags were checked: jax takes its time.
    from absl import logging

    from jgraph.training.trainer import train

    # Orbax logs tracebacks of errors that it also raises, and those are told in one line.
    logging.set_verbosity(logging.FATAL)
    summary = train(config, console=PipeConsole())
    # As of a process that the signal ended, so that a shell does not go on as after a finished run.
    return 128 + signal.Signals[summary.stopped_by] if summary.stopped_by else 0


def parse(args: Sequence[str]) -> TrainConfig | None:
    """The configuration that the arguments ask for, or None after --help, which is printed. Raises ConfigError."""
    args = list(args)
    base = preset(_preset_name(args))
    return one_line(
        lambda: tyro.cli(
            TrainConfig,
            default=base,
            args=args,
            prog=f"python -m {_PROG}",
            description=(__doc__ or "").format(presets=", ".join(PRESETS), preset=base.preset),
        )
    )


def _preset_name(args: list[str]) -> str:
    """The last --preset among the arguments. One without a value is left to tyro, as everything else that is wrong."""
    name = TrainConfig.preset
    for flag, value in itertools.zip_longest(args, args[1:], fillvalue=""):
        if flag == "--preset" and value:
            name = value
        elif flag.startswith("--preset="):
            name = flag.removeprefix("--preset=")
    return name
