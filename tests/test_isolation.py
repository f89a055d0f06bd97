"""Tests see no files of the user, and those that hypothesis draws are the same in every run."""

import os
import subprocess
import sys
from pathlib import Path

import hypothesis

import jgraph

ROOT = Path(__file__).parents[1]


def test_tests_run_in_an_empty_directory_with_a_home_of_their_own():
    assert os.listdir() == []
    assert Path.home().parent == Path(os.environ["XDG_CACHE_HOME"]).parent != Path(os.environ["JGRAPH_TESTS_HOME"]).parent


def test_tests_and_their_processes_import_the_checkout_that_has_the_tests():
    assert Path(jgraph.__file__).parents[1] == ROOT
    code = "import jgraph, jgraph_models; print(jgraph.__file__, jgraph_models.__file__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.split() == [jgraph.__file__, str(ROOT / "models" / "jgraph_models" / "__init__.py")]


def test_hypothesis_replays_nothing_and_draws_the_same_examples_in_every_run():
    assert hypothesis.settings.default.database is None
    assert hypothesis.settings.default.derandomize
