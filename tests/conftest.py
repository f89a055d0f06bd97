"""Settings of all tests: a CPU backend with eight devices, unless GPU tests are selected, and the fixture `h200`."""

import ctypes
import gc
import os
import shutil
import sys
import tempfile
from importlib import metadata

import pytest

from tests.target_fixture import h200 as h200


def pytest_configure(config):
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        # Set before jax is imported. Processes that tests start inherit the variables.
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = "8"
        old = metadata.version("jaxlib").startswith("0.10.")
        # Compilation takes a fifth less time on few cores. Newer versions gain nothing.
        fast = ["--xla_cpu_parallel_codegen_split_count=1"] * old
        fast += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]  # a third less
        fast += ["--xla_cpu_use_fusion_emitters=false"] * old  # half of the rest; newer versions have only fusion emitters
        flags = os.environ.setdefault("XLA_FLAGS", " ".join(fast))
        # All devices run collectives in one order (jgraph.dispatch.check_devices).
        if "concurrency_optimized_scheduler" not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_enable_concurrency_optimized_scheduler=false"
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # One cache for all workers and processes of this run, separate from the user's cache.
        directory = tempfile.mkdtemp(prefix="jgraph-tests-")
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": directory, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        # Raised for an entry that another process is writing. pyproject.toml ignores it in pytest, this in processes of tests.
        os.environ.setdefault("PYTHONWARNINGS", "ignore:Error reading persistent compilation cache entry")
        config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))


def pytest_ignore_collect(collection_path, config):
    # Otherwise every worker imports PyTorch for tests that are not selected.
    excluded = [mark for mark in ("finetune", "gpu", "parity") if f"not {mark}" in config.option.markexpr]
    return True if collection_path.is_dir() and collection_path.name in excluded else None


def pytest_collection_finish():
    # Imported modules live until the end, so exempt them from garbage collection. Tracing allocates many objects that reference
    # counting frees, so collect less often. Together they save about 5% of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


@pytest.fixture(autouse=True, scope="module")
def free_compiled_programs():
    """Frees compiled programs after each module, because a worker would grow to several GB. The cache still has them."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # returns the free heap of glibc to the system
