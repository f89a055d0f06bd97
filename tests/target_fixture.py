"""The fixture `h200`: devices of an H200 to compile for. Tests that use it are marked `target`."""

import pytest


@pytest.fixture(scope="session")
def h200():
    """Compile-only devices. Installs NVIDIA's compiler into the cache if it is not there; xdist workers may race for it."""
    from jgraph.xla import aot

    aot.install()
    return aot.devices()
