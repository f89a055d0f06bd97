"""Time two programs in turns, and compare their host time, memory, capture and results.

    python -m jgraph.compare my_steps:plain my_steps:ours
    python -m jgraph.compare my_steps.py:plain my_steps.py:ours --html compared.html

Each name is a function without arguments that returns a `jgraph.Program`, (fn, args) or (fn, args, donate_argnums).
"""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import tyro

from jgraph.cli import File, command, example, find, reason
from jgraph.errors import ConfigError, JgraphError, os_errors
from jgraph.exits import end_with

if TYPE_CHECKING:
    from jgraph.compare._program import Program

_Name = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODULE:FUNCTION", help_behavior_hint="")]


def compare(f: _Name, g: _Name, /, *, rounds: int = 5, seconds: float = 0.3, html: File = None, json: File = None) -> None:
    """Compiles both programs, runs them in turns, and prints a table.

    Args:
        f: The first program: MODULE:FUNCTION or FILE.py:FUNCTION. A step that donates its state continues from its own result.
        g: The second program. The results of the first calls are compared.
        rounds: Turns of each program, at least 1. The table has medians over rounds.
        seconds: Seconds of a repeat; a turn takes 6 times as long.
        html: File for the comparison as a page, replaced if it exists.
        json: File for the comparison as a JSON object, replaced if it exists.

    Raises:
        JgraphError: If a program does not exist, cannot be compiled or run, or a file cannot be written.
    """
    from jgraph.compare import _compare  # imported here, because importing jax is slow
    from jgraph.dispatch import check_devices

    check_devices()
    try:
        compared = _compare.compare(_program(f), _program(g), rounds=rounds, seconds=seconds)
    except (JgraphError, OSError):
        raise
    except (Exception, SystemExit) as e:  # user code and jax may raise any exception
        raise ConfigError(f"{f} and {g} cannot be compared: {reason(e)}", field="f") from e
    for field, file, text in (("html", html, compared.to_html), ("json", json, compared.to_json)):
        if file:
            with os_errors(field, file):
                file.write_text(text() + "\n", encoding="utf-8")
    print(compared)


def _program(name: str) -> "Program":
    from jgraph.compare._program import Program

    made = find(name)()
    program = made if isinstance(made, Program) else Program(*example(name, made, also="a jgraph.Program, "))
    return dataclasses.replace(program, name=program.name or name.rpartition(":")[2])


main = command("python -m jgraph.compare", __doc__, compare)

if __name__ == "__main__":
    end_with(main)
