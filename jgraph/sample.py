"""Ask a model for text: that of a run of jgraph.train, or of a Hugging Face folder.

    python -m jgraph.sample runs/first --prompt "The with statement"
    python -m jgraph.sample folder/ --prompt "Once" --prompt "Twice" --temperature 0
    git diff | python -m jgraph.sample folder/ --prompt - --max-tokens 40

The prompt and its continuation are printed as they come. A run may be over any devices, and may be going on.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jgraph.cli import Count, Module, run_options
from jgraph.errors import ConfigError

_PROG = "jgraph.sample"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Command line."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_OR_DIR")]
    """A run directory of `python -m jgraph.train`, or a Hugging Face folder."""
    prompts: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="prompt", metavar="TEXT")] = ()
    """Text to continue, several by several flags; - reads standard input."""
    max_tokens: int = 128
    """Tokens of each continuation at most."""
    temperature: float = 0.8
    """Of the softmax that tokens are drawn from; 0 takes the likeliest."""
    top_k: int = 0
    """Draw from so many of the likeliest tokens; 0 from all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability."""
    stop: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = ()
    """Text that ends a continuation, several by several flags."""
    seed: int = 0
    """Of what is drawn."""
    window: Count = None
    """Tokens that the model sees at most; by default as many as it was trained to see."""
    step: Count = None
    """Steps of the run's checkpoint; by default the newest."""
    module: Module = ""
    """Class of a model of your own, as the run has it. The run's model is imported only if it is built in or named here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code, as `jgraph.cli.run`."""
    return run_options(Options, sample, _PROG, __doc__, argv, positional="run")


def sample(options: Options) -> None:
    """Prints prompts and their continuations, one text after the other. Raises JgraphError."""
    if not options.prompts:
        raise ConfigError("`prompts` is missing: must be a text, or - for standard input", field="prompts")
    # Only now: jax takes its time.
    from absl import logging

    from jgraph.dispatch import check_devices
    from jgraph.training.loaded import load

    logging.set_verbosity(logging.FATAL)  # Orbax logs what it also raises
    check_devices()
    loaded = load(options.run, options.step, module=options.module)
    prompts = [_read() if prompt == "-" else prompt for prompt in options.prompts]
    names = ("max_tokens", "temperature", "top_k", "top_p")
    settings = {name: getattr(options, name) for name in names} | {"key": options.seed}
    if options.window is not None:
        settings["window"] = options.window
    pieces = loaded.stream(prompts, stop=options.stop, **settings)
    # Of several texts, which grow at once, the first is told as it comes, and the others after it.
    later = ["" for _ in prompts]
    _tell(prompts[0])
    for number, piece in pieces:
        if number:
            later[number] += piece
        else:
            _tell(piece)
    for prompt, text in zip(prompts[1:], later[1:], strict=True):
        _tell(f"\n\n{prompt}{text}")
    _tell("\n")


def _read() -> str:
    """Returns standard input, bytes that are no UTF-8 included."""
    return sys.stdin.buffer.read().decode(errors="surrogateescape")


def _tell(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
