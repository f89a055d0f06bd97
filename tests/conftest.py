"""What every test may count on: a CPU backend of eight devices, unless tests for a GPU were asked for; the fixture `h200`."""

import os

from tests.target_fixture import h200 as h200


def pytest_configure(config):
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        # Before jax is imported, and for the processes that tests start.
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = "8"
