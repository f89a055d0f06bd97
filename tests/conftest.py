"""Settings of all tests: a CPU backend with eight devices, unless GPU tests are selected, and the fixture `h200`."""

import ctypes
import gc
import os
import shutil
import signal
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest

from jgraph.device import cpu_threads, ordered
from tests.target_fixture import h200 as h200

ROOT = Path(__file__).parents[1]
NUM_DEVICES = 8
TIERS = ("finetune", "gpu", "parity")
# Files with the longest tests. They run first, because a worker with one of them at the end would keep the others waiting.
LONGEST = ("test_benchmarks.py", "test_default_step.py", "test_distributed.py", "test_examples.py", "test_target.py")


def isolate(directory: Path):
    """Hides the user's files from tests and from the processes that they start, which still find this checkout."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    (directory / "cache" / "jgraph").mkdir(parents=True)
    (directory / "home").mkdir()
    # NVIDIA's compiler is 133 MB to download, so runs share it (`h200`).
    (directory / "cache" / "jgraph" / "target").symlink_to(cache / "jgraph" / "target")
    os.environ |= {
        "HOME": str(directory / "home"),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(directory / "hypothesis"),
        "JGRAPH_TESTS_HOME": str(Path.home()),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "models"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "XDG_CACHE_HOME": str(directory / "cache"),
    }


def pytest_configure(config):
    # A shell lets background processes ignore it, and so the processes that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        # Set before jax is imported. Processes that tests start inherit the variables.
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = str(NUM_DEVICES)
        # Threads of PyTorch wait for each other by spinning: 20 steps of a tiny GPT took 16 CPU seconds with two, 1.3 with one.
        os.environ["OMP_NUM_THREADS"] = "1"
        # For tests that do not call `jgraph.dispatch.check_devices`.
        os.environ.setdefault("NPROC", cpu_threads(NUM_DEVICES))
        old = metadata.version("jaxlib").startswith("0.10.")
        # Compilation takes a fifth less time on few cores. Newer versions gain nothing.
        fast = ["--xla_cpu_parallel_codegen_split_count=1"] * old
        fast += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]  # a third less
        fast += ["--xla_cpu_use_fusion_emitters=false"] * old  # half of the rest; newer versions have only fusion emitters
        os.environ["XLA_FLAGS"] = ordered(os.environ.get("XLA_FLAGS", " ".join(fast)))
    if not hasattr(config, "workerinput"):  # workers inherit the environment
        directory = Path(tempfile.mkdtemp(prefix="jgraph-tests-"))
        config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
        isolate(directory)
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            # One cache for all workers and processes of this run, separate from the user's cache.
            os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory / "compiled")
            os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
            # Raised for an entry that another process writes. pyproject.toml ignores it in pytest, this in processes of tests.
            os.environ.setdefault("PYTHONWARNINGS", "ignore:Error reading persistent compilation cache entry")


def pytest_ignore_collect(collection_path, config):
    """Ignores modules without a selected test, because every worker would import them: 16 CPU seconds, and PyTorch."""
    terms, name = config.option.markexpr.split(" and "), collection_path.name
    if name in TIERS:
        return True if f"not {name}" in terms else None
    required = [f"mark.{tier}" for tier in TIERS if tier in terms and name.startswith("test_")]
    return True if required and not all(mark in collection_path.read_text() for mark in required) else None


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish():
    # Imported modules live until the end, so exempt them from garbage collection. Tracing allocates many objects that reference
    # counting frees, so collect less often. Together they save about 5% of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


@pytest.fixture(autouse=True, scope="session")
def elsewhere(tmp_path_factory):
    """Runs tests and fixtures in a directory without files of the user. Returns it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        yield Path.cwd()


@pytest.fixture(autouse=True)
def empty_elsewhere(elsewhere):
    yield
    for left in os.scandir(elsewhere):
        shutil.rmtree(left) if left.is_dir(follow_symlinks=False) else os.unlink(left)


def is_large() -> bool:
    """Returns whether this process holds more than 1.5 GB; True if that is not known."""
    if sys.platform != "linux":
        return True
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") > 1.5e9


@pytest.fixture(autouse=True, scope="module")
def free_compiled_programs():
    """Frees compiled programs when a worker is large, because it would grow to several GB. The cache still has them.

    Not after every module, because the next one would trace and load common operations again: 187 tests took 49.4 CPU seconds
    with it, and 45.6 without.
    """
    yield
    if "jax" in sys.modules and is_large():
        sys.modules["jax"].clear_caches()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # returns the free heap of glibc to the system
