"""The compiler for NVIDIA GPUs that are not here, which `python -m jgraph.inspect capture` needs for a target.

python -m jgraph.aot install           # 133 MB, once for each jax version
python -m jgraph.aot show --gpu b200
"""

import functools
import sys
from collections.abc import Sequence
from typing import Literal

from jgraph.cli import Directory, fields_of, run, run_command

_PROG = "python -m jgraph.aot"


def install(*, directory: Directory = None) -> None:
    """Download the compiler, unless it is there.

    Args:
        directory: Where to; a cache under ~/.cache/jgraph by default.
    """
    from jgraph.xla import aot  # only now: jax takes its time

    print(aot.install(directory))


def show(*, gpu: Literal["h200", "h100", "b200"] = "h200", directory: Directory = None) -> None:
    """Say where the compiler is and which GPU it compiles for.

    Args:
        gpu: The GPU.
        directory: Where the compiler was installed; by default the environment and then the cache are searched.
    """
    from jgraph.xla import aot

    device = aot.devices(gpu=gpu, directory=directory)[0]
    print(f"{device.device_kind}, compile only; jaxlib {aot.version()}; {aot.find_library(directory)}")


def main(argv: Sequence[str] | None = None, prog: str = _PROG) -> int:
    """Runs the command.

    Args:
        argv: The arguments. Default: those of the process.
        prog: The command as the user starts it, for the usage line and errors.

    Returns:
        The exit code, as in `jgraph.cli.run`.
    """
    return run(prog, functools.partial(run_command, (install, show), prog, __doc__ or ""), argv, fields_of(show))


if __name__ == "__main__":
    sys.exit(main())
