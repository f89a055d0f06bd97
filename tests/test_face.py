"""The public face: every name is there, is told to completion, and is had without waiting for jax."""

import subprocess
import sys

import jgraph


def test_every_public_name_is_there_and_listed():
    for name in jgraph.__all__:
        found = getattr(jgraph, name)
        assert name.isupper() or found.__module__.startswith("jgraph."), name  # a constant has no module
    assert {*jgraph.__all__, "__version__"} == set(dir(jgraph))


def test_the_version_is_the_installed_one():
    assert jgraph.__version__.count(".") == 2


def test_importing_the_library_does_not_import_jax():
    code = "import sys, jgraph; jgraph.ConfigError, jgraph.TrainConfig; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
