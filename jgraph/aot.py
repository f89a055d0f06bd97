"""Install the compiler for NVIDIA GPUs that this machine does not have, for `python -m jgraph.inspect capture --target`.

python -m jgraph.aot install           # 133 MB, once for each jax version
python -m jgraph.aot show --gpu b200
"""

import sys
from typing import Literal

from jgraph.cli import Directory, command


def install(*, directory: Directory = None) -> None:
    """Download the compiler, unless it is installed.

    Args:
        directory: Directory to install to; by default a cache under ~/.cache/jgraph.
    """
    from jgraph.xla import aot  # imported here, because importing jax is slow

    print(aot.install(directory))


def show(*, gpu: Literal["h200", "h100", "b200"] = "h200", directory: Directory = None) -> None:
    """Print the GPU to compile for, the version of jaxlib and the path of the compiler.

    Args:
        gpu: The GPU to compile for.
        directory: Directory of the compiler; by default the environment and then the cache are searched.
    """
    from jgraph.xla import aot

    device = aot.devices(gpu=gpu, directory=directory)[0]
    print(f"{device.device_kind}, compile only; jaxlib {aot.version()}; {aot.find_library(directory)}")


main = command("python -m jgraph.aot", __doc__, install, show)

if __name__ == "__main__":
    sys.exit(main())
