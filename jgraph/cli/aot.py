"""The compiler for NVIDIA GPUs that are not here, which `python -m jgraph.inspect capture` needs for a target.

python -m jgraph.aot install           # 133 MB, once for each jax version
python -m jgraph.aot show --gpu b200
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jgraph.cli.flags import optional
from jgraph.cli.parse import exit_code, one_line

_PROG = "jgraph.aot"
Directory = Annotated[Path | None, optional(Path, "DIRECTORY"), tyro.conf.arg(help_behavior_hint="")]


@dataclass(frozen=True, kw_only=True)
class Install:
    """Download the compiler, unless it is there."""

    directory: Directory = None
    """Where to; a cache under ~/.cache/jgraph by default."""


@dataclass(frozen=True, kw_only=True)
class Show:
    """Say where the compiler is and which GPU it compiles for."""

    gpu: Literal["h200", "h100", "b200"] = "h200"
    """The GPU."""
    directory: Directory = None
    """Where the compiler was installed; by default the environment and then the cache are searched."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code, 2 after an error, which is told in one line."""
    return exit_code(_PROG, lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(args: list[str]) -> None:
    commands = {"install": Install, "show": Show}
    asked = one_line(
        lambda: tyro.extras.subcommand_cli_from_dict(commands, prog=f"python -m {_PROG}", description=__doc__, args=args)
    )
    # Only now: jax takes its time.
    from jgraph.xla import aot

    if isinstance(asked, Install):
        print(aot.install(asked.directory))
    elif isinstance(asked, Show):
        device = aot.devices(gpu=asked.gpu, directory=asked.directory)[0]
        print(f"{device.device_kind}, compile only; jaxlib {aot.version()}; {aot.find_library(asked.directory)}")
