"""Continue texts with the model of a training run or of a Hugging Face folder.

    python -m jgraph.sample runs/first --prompt "The with statement"
    python -m jgraph.sample folder/ --prompt "Once" --prompt "Twice" --temperature 0
    git diff | python -m jgraph.sample folder/ --prompt - --max-tokens 40

Prints each prompt and its continuation to stdout as tokens arrive, and the compilation time to stderr. Runs of any parallel
layout can be sampled, also while they train.
"""

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jgraph.cli import Count, Module, run_options
from jgraph.errors import ConfigError
from jgraph.interop.folder import check_exists

_PROG = "python -m jgraph.sample"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the command line."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_OR_DIR")]
    """A run directory of `python -m jgraph.train`, or a Hugging Face folder."""
    prompts: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="prompt", metavar="TEXT")] = ()
    """Text to continue; - reads standard input. Repeat the flag for several texts."""
    max_tokens: int = 128
    """Maximum number of new tokens of each text."""
    temperature: float = 0.8
    """Divides the logits before the softmax; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw from the TOP_K likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Draw from the likeliest tokens with this total probability; 1 for all."""
    stop: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = ()
    """Text that ends a continuation. Repeat the flag for several."""
    seed: int = 0
    """Seed of the draws."""
    window: Count = None
    """Maximum number of tokens that a token attends to; by default the longest sequence in training."""
    step: Count = None
    """Step of the checkpoint to load; by default the newest. Runs only."""
    module: Module = ""
    """Model class of the run, as `package.module:Class`. Only classes in `jgraph_models` are imported without it."""


def main(argv: Sequence[str] | None = None, prog: str = _PROG) -> int:
    """Runs the command.

    Args:
        argv: The arguments. Default: those of the process.
        prog: The command as the user starts it, for the usage line and errors.

    Returns:
        The exit code, as in `jgraph.cli.run`.
    """
    return run_options(Options, sample, prog, __doc__, argv, positional="run")


def sample(options: Options) -> None:
    """Prints the prompts and their continuations, one text after the other.

    Raises:
        JgraphError: If the model cannot be loaded, or an option has a value that is not allowed.
    """
    if not options.prompts:
        raise ConfigError("`prompts` is missing: pass a text, or - to read standard input", field="prompts")
    check_exists(options.run, field="run")
    # Imported here, so that --help and errors in flags do not wait for jax.
    from absl import logging

    from jgraph.dispatch import check_devices
    from jgraph.train.loaded import load

    logging.set_verbosity(logging.FATAL)  # Orbax also logs the errors that it raises.
    check_devices()
    loaded = load(options.run, options.step, module=options.module)
    prompts = [_read_stdin() if prompt == "-" else prompt for prompt in options.prompts]
    names = ("max_tokens", "temperature", "top_k", "top_p")
    settings = {name: getattr(options, name) for name in names} | {"key": options.seed}
    if options.window is not None:
        settings["window"] = options.window
    pieces = loaded.stream(prompts, stop=options.stop, **settings)
    print("compiling the prompt and token programs", file=sys.stderr, flush=True)
    start = time.perf_counter()
    first = list(itertools.islice(pieces, 1))
    print(f"first text after {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    # All texts grow at the same time. The first is printed as it grows, the others when it is complete.
    later = ["" for _ in prompts]
    _write(prompts[0])
    for number, piece in itertools.chain(first, pieces):
        if number:
            later[number] += piece
        else:
            _write(piece)
    for prompt, text in zip(prompts[1:], later[1:], strict=True):
        _write(f"\n\n{prompt}{text}")
    _write("\n")


def _read_stdin() -> str:
    # Bytes that are not UTF-8 are kept as surrogates.
    return sys.stdin.buffer.read().decode(errors="surrogateescape")


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
