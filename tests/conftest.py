"""What every test may count on: a CPU backend of eight devices, unless tests for a GPU were asked for; the fixture `h200`."""

import os
import tempfile

from tests.target_fixture import h200 as h200


def pytest_configure(config):
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        # Before jax is imported, and for the processes that tests start.
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    # One for all tests of this run, their processes and workers: never the user's.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="jgraph-tests-"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
