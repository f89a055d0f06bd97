"""What every test may count on: a CPU backend of eight devices, unless tests for a GPU were asked for; the fixture `h200`."""

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
        # Before jax is imported, and for the processes that tests start.
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = "8"
        old = metadata.version("jaxlib").startswith("0.10.")
        # A fifth less time to compile where cores are few; later ones gain nothing by it.
        fast = ["--xla_cpu_parallel_codegen_split_count=1"] * old
        fast += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]  # a third less
        fast += ["--xla_cpu_use_fusion_emitters=false"] * old  # half of what is left; later ones have nothing else
        os.environ.setdefault("XLA_FLAGS", " ".join(fast))
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        # One for all tests of this run, their processes and workers: never the user's.
        directory = tempfile.mkdtemp(prefix="jgraph-tests-")
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": directory, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        # An entry that another process is writing just now: pyproject.toml says it for pytest, this for the processes of tests.
        os.environ.setdefault("PYTHONWARNINGS", "ignore:Error reading persistent compilation cache entry")
        config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))


def pytest_ignore_collect(collection_path, config):
    # Every process would import PyTorch for tests that are not asked for.
    left_out = [mark for mark in ("gpu", "parity") if f"not {mark}" in config.option.markexpr]
    return True if collection_path.is_dir() and collection_path.name in left_out else None


def pytest_collection_finish():
    # Imported modules live until the end, so exempt them from garbage collection. Tracing allocates many objects that reference
    # counting frees, so collect less often. Together they save about 5% of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


@pytest.fixture(autouse=True, scope="module")
def nothing_compiled_outlives_its_module():
    """A worker would grow to several GB with the programs of all its tests; what a later one needs again is in the cache."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what is freed in pieces
