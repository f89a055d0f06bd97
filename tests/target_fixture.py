"""The fixture `h200`: devices of an H200 to compile for. Tests that use it are marked `target`."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def h200():
    """Compile-only devices. Installs NVIDIA's compiler into the cache if it is not there; xdist workers may race for it."""
    from jgraph.xla import aot

    if not aot.find_library():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", os.environ["JGRAPH_TESTS_HOME"])  # has the settings of pip
            aot.install(aot.cache_directory().resolve())
    return aot.devices()


def reused_kernels() -> dict[str, str | bool]:
    """XLA options that take the kernels of an H200 from earlier programs of this process: half the time for a similar program.

    One file per process, because XLA refuses a file that another process has changed. Not for two programs at once.
    """
    import jax

    options: dict[str, str | bool] = {
        "xla_gpu_kernel_cache_file": str(Path(os.environ["XDG_CACHE_HOME"]) / f"kernels-{os.getpid()}")
    }
    # Newer versions do it without an option.
    return options | ({"xla_gpu_enable_llvm_module_compilation_parallelism": True} if jax.__version_info__ < (0, 11) else {})
