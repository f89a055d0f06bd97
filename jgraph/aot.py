"""Install the compiler for NVIDIA GPUs that this machine does not have, for `python -m jgraph.inspect capture --target`.

python -m jgraph.aot install           # 133 MB, once for each jax version
python -m jgraph.aot show --gpu b200
"""

from typing import Literal

from jgraph.cli import Directory, command, phase
from jgraph.exits import end_with


def install(*, directory: Directory = None) -> None:
    """Download XLA's compiler for NVIDIA GPUs with pip, unless it is installed, and print the path of its shared library.

    Args:
        directory: Directory to install to; it must be absent or empty, or have the compiler. By default the cache in
            $XDG_CACHE_HOME/jgraph or ~/.cache/jgraph, and nothing is installed if the Python environment has the compiler.

    Raises:
        TargetError: If the machine does not run Linux on x86-64 or arm64, pip fails, or the directory has other files.
        ConfigError: If the parent of the directory cannot be written.
    """
    from jgraph.xla import aot  # imported here, because importing jax is slow

    library = aot.find_library(directory)
    if library is None:
        with phase("downloading XLA's compiler for NVIDIA GPUs"):
            library = aot.install(directory)
    print(library)


def show(*, gpu: Literal["h200", "h100", "b200"] = "h200", directory: Directory = None) -> None:
    """Print JAX's name of a GPU, the version of jaxlib and the path of XLA's compiler in one line. Compiles nothing.

    Args:
        gpu: Model of GPU. This machine need not have it.
        directory: Directory of the compiler: the value of --directory of the command install. By default the packages of the
            Python environment and then the cache are searched.

    Raises:
        TargetError: If the compiler is not installed, or does not match the installed jaxlib.
    """
    from jgraph.xla import aot

    device = aot.devices(gpu=gpu, directory=directory)[0]
    print(f"{device.device_kind}, compile only; jaxlib {aot.version()}; {aot.find_library(directory)}")


main = command("python -m jgraph.aot", __doc__, install, show)

if __name__ == "__main__":
    end_with(main)
