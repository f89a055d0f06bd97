"""The `jgraph` command: `jgraph train` runs the same code as `python -m jgraph.train`.

Imports neither jax nor tyro, so that `jgraph --help` takes as long as starting Python.
"""

import difflib
import functools
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from jgraph.exits import end_with

# Module and summary of each command.
_COMMANDS = {
    "train": ("jgraph.train.__main__", "Train a model, or resume a run from its last checkpoint."),
    "sample": ("jgraph.sample", "Generate text with the model of a run or of a Hugging Face folder."),
    "evaluate": ("jgraph.evaluate", "Measure loss, perplexity and bits per byte on held-out text."),
    "export": ("jgraph.export", "Write the model of a run as a Hugging Face folder."),
    "report": ("jgraph.report.__main__", "Compare the curves and settings of runs on one HTML page."),
    "compare": ("jgraph.compare.__main__", "Time two programs in turns, and compare their memory and results."),
    "plan": ("jgraph.plan.__main__", "Predict which layouts of a model fit on a number of GPUs."),
    "inspect": ("jgraph.inspect.__main__", "Show a pipeline schedule, or the command buffers of a compiled step."),
    "profile": ("jgraph.profile.__main__", "Report the time of each kernel in a recorded trace."),
    "data": ("jgraph.data.__main__", "Tokenize text files, and check or describe token files."),
    "aot": ("jgraph.aot", "Install the compiler for NVIDIA GPUs that this machine does not have."),
}


def main(argv: Sequence[str] | None = None, prog: str = "jgraph") -> int:
    """Runs a command by its name, in this process. Imports the module of this command only.

    Args:
        argv: The name of a command and its arguments, without the program. None: `sys.argv[1:]`. An empty list, `-h` and
            `--help` print the list of commands to stdout, and `--version` prints the version.
        prog: The program as the user starts it, `jgraph` or `python -m jgraph`. Shown in help texts.

    Returns:
        The exit code of the command. 0 after a help text or the version. 2 for an unknown command, with an error on stderr.
        141 if the reader of stdout has closed it, as in `| head`.
    """
    name, *args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        return _print(_help(prog))
    if name == "--version":
        import jgraph

        return _print(f"jgraph {jgraph.__version__}")
    if name not in _COMMANDS:
        print(f"jgraph: error: {_unknown(name)}", file=sys.stderr)
        return 2
    return importlib.import_module(_COMMANDS[name][0]).main(args, prog=f"{prog} {name}")


def _help(prog: str) -> str:
    width = len("-h, --help") + 2
    commands = "\n".join(f"  {name:{width}}{summary}" for name, (_, summary) in _COMMANDS.items())
    return (
        f"usage: {prog} COMMAND [OPTIONS]\n\nTrain JAX models on NVIDIA GPUs as one captured program per step.\n\n"
        f"commands:\n{commands}\n\noptions:\n  {'-h, --help':{width}}  Show this text.\n"
        f"  {'--version':{width}}  Show the version.\n\nShow the options of a command: {prog} COMMAND --help"
    )


def _unknown(name: str) -> str:
    if name.startswith("-"):
        return f"{name} is not an option of jgraph: put a command first ({', '.join(_COMMANDS)})"
    close = difflib.get_close_matches(name, _COMMANDS, n=1, cutoff=0.5)
    hint = f" did you mean {close[0]}?" if close else ""
    return f"{name!r} is not a command:{hint} must be one of {', '.join(_COMMANDS)}"


def _print(text: str) -> int:
    """Prints a text and returns the exit code, like `jgraph.cli.run`, which would import tyro."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes stdout at exit and would print a second error about the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return 0


def run() -> None:
    """Runs the installed command `jgraph`."""
    end_with(main)


if __name__ == "__main__":
    end_with(functools.partial(main, prog="python -m jgraph"))
