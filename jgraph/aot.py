"""The compiler for NVIDIA GPUs that are not here, which `python -m jgraph.inspect capture` needs for a target.

python -m jgraph.aot install           # 125 MB, once for each jax version
python -m jgraph.aot show --gpu b200
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jgraph.cli import Directory, parse, run

_PROG = "jgraph.aot"


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
    """Runs the command line; returns the exit code, as `jgraph.cli.run`."""
    return run(_PROG, _run, argv)


def _run(args: list[str]) -> None:
    asked = parse({"install": Install, "show": Show}, _PROG, __doc__, args)
    # Only now: jax takes its time.
    from jgraph.xla import aot

    if isinstance(asked, Install):
        print(aot.install(asked.directory))
    elif isinstance(asked, Show):
        device = aot.devices(gpu=asked.gpu, directory=asked.directory)[0]
        print(f"{device.device_kind}, compile only; jaxlib {aot.version()}; {aot.find_library(asked.directory)}")


if __name__ == "__main__":
    sys.exit(main())
