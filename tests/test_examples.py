"""Every example runs as its docstring says, on faked devices; examples in docstrings give what they show."""

import doctest
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
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
    command = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(command, env=os.environ | {"JAX_NUM_CPU_DEVICES": "4"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert losses == [] or losses[-1] < max(losses), done.stdout
    margins = [float(number) for number in re.findall(r"margin (-?\d+\.\d+)", done.stdout)]
    assert margins == [] or margins[-1] > margins[0] + 1, done.stdout


@pytest.mark.long
@pytest.mark.once
def test_the_example_of_a_model_of_ones_own_trains_as_its_docstring_says(tmp_path):
    text = (ROOT / "examples/own_model.py").read_text()
    command = shlex.split(re.search(r"^python (-m jgraph.train .*) --run-dir", text, re.MULTILINE)[1])
    done = subprocess.run(
        [sys.executable, *command, "--run-dir", str(tmp_path), "--sample-tokens", "8"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    losses = [float(number) for number in re.findall(r"  loss (\d+\.\d+)", done.stdout)]
    assert losses[-1] < losses[0], done.stdout


@pytest.mark.long
@pytest.mark.once
def test_the_notebook_runs_and_its_stored_outputs_are_small(capsys):
    notebook = json.loads((ROOT / "examples/compare.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    stored = ["".join(output["text"]) for cell in cells for output in cell["outputs"]]
    assert 0 < sum(map(len, stored)) < 2000
    space = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), "cell", "exec"), space)
    printed = capsys.readouterr().out
    assert printed.count("\n") == "".join(stored).count("\n")
    for out in (printed, "".join(stored)):
        before, after = map(float, re.search(r"^answer +before (\S+) +after (\S+)", out, re.MULTILINE).groups())
        assert after < before / 2


@pytest.mark.long
@pytest.mark.once
def test_the_loss_of_direct_preference_optimization_and_its_gradient_equal_the_formulas_of_the_paper():
    dpo = importlib.import_module("examples.dpo")
    batch = dpo.pairs_of(np.random.default_rng(0), count=3)
    reference, _ = dpo.MODEL.init()
    params = jax.tree.map(lambda leaf: 1.3 * leaf, reference)

    def log_prob(params, tokens_S, is_answer_S):
        probs_TV = jax.nn.softmax(dpo.MODEL.evaluate("logits", params, {}, tokens_S[None, :-1])[0])
        return sum(jnp.log(probs_TV[t, tokens_S[t + 1]]) for t in np.flatnonzero(is_answer_S[1:]))

    @jax.jit
    def of_pairs(params):
        return jnp.array(
            [[log_prob(params, tokens_S, mask_S) for tokens_S, mask_S in zip(*pair, strict=True)] for pair in pairs]
        )

    pairs = list(zip(batch["tokens"], batch["is_answer"], strict=True))
    batch["reference"] = np.asarray(of_pairs(reference))
    log_probs_BA, gradients = np.asarray(of_pairs(params)), jax.jacobian(of_pairs)(params)
    margins_B = dpo.BETA * ((log_probs_BA - batch["reference"]) @ np.array([1.0, -1.0]))
    assert np.ptp(margins_B) > 1e-3
    found, gradient = jax.value_and_grad(lambda params: dpo.loss(params, batch, None).total)(params)
    np.testing.assert_allclose(found, np.log1p(np.exp(-margins_B)).sum(), rtol=1e-5)
    factors_B = -dpo.BETA / (1 + np.exp(margins_B))  # equation 7, differentiated: -beta sigmoid(-margin) for each pair
    expected = jax.tree.map(lambda leaf: np.tensordot(factors_B, leaf[:, 0] - leaf[:, 1], 1), gradients)
    jax.tree.map(lambda own, hand: np.testing.assert_allclose(own, hand, atol=1e-5, rtol=1e-4), gradient, expected)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 1e-2


MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.glob("jgraph/**/*.py") if ">>> " in path.read_text()
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_give_what_they_show(module):
    found = doctest.testmod(importlib.import_module(module), extraglobs={"jgraph": jgraph, "jax": jax, "jnp": jax.numpy})
    assert found.attempted > 0
    assert found.failed == 0
