"""Every example runs as its docstring says, on faked devices; examples in docstrings give what they show."""

import doctest
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jgraph

ROOT = Path(__file__).parents[1]
# A command line of the training, and a program for a GPU that is not here (tests/xla has those).
ELSEWHERE = {"own_model.py", "explain_for_h200.py"}
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py") if path.name not in ELSEWHERE)


@pytest.mark.long
@pytest.mark.once
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_is_short(name):
    text = (ROOT / "examples" / name).read_text()
    assert f"python examples/{name}" in text
    assert text.count("\n") < 80
    env = os.environ | {"JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, f"examples/{name}"], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert losses == [] or losses[-1] < max(losses), done.stdout


@pytest.mark.long
@pytest.mark.once
def test_the_example_of_a_model_of_ones_own_trains_as_its_docstring_says(tmp_path):
    text = (ROOT / "examples/own_model.py").read_text()
    command = shlex.split(re.search(r"^python (-m jgraph.train .*) --run-dir", text, re.MULTILINE)[1])
    done = subprocess.run(
        [sys.executable, *command, "--run-dir", str(tmp_path), "--sample-tokens", "8"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in re.findall(r"  loss (\d+\.\d+)", done.stdout)]
    assert losses[-1] < losses[0], done.stdout


MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.glob("jgraph/**/*.py") if ">>> " in path.read_text()
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_give_what_they_show(module):
    found = doctest.testmod(importlib.import_module(module), extraglobs={"jgraph": jgraph, "jax": jax, "jnp": jax.numpy})
    assert found.attempted > 0
    assert found.failed == 0
