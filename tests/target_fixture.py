"""The fixture `h200`: devices of an H200 to compile for. Tests that use it are marked `target`."""

import os

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
