"""Every example runs as its docstring says, on faked devices; examples in docstrings give what they show."""

import doctest
import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgraph

ROOT = Path(__file__).parents[1]
# A command line of the training, and a program for a GPU that is not here (tests/xla has those).
ELSEWHERE = {"own_model.py", "explain_for_h200.py"}
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py") if path.name not in ELSEWHERE)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_says_how_to_run_it(name):
    text = (ROOT / "examples" / name).read_text()
    assert f"python examples/{name}" in text
    assert text.count("\n") < 80


# The start of a process takes half of the time of an example.
IN_TURN = """if True:
    import runpy, sys

    for path in sys.argv[1:]:
        print("\\nexample", path)
        runpy.run_path(path, run_name="__main__")
"""


@pytest.mark.long
@pytest.mark.once
@pytest.mark.parametrize("names", [EXAMPLES[::2], EXAMPLES[1::2]], ids=" ".join)
def test_examples_run_and_train(names):
    command = [sys.executable, "-c", IN_TURN, *(str(ROOT / "examples" / name) for name in names)]
    done = subprocess.run(command, env=os.environ | {"JAX_NUM_CPU_DEVICES": "4"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    _, *outputs = done.stdout.split("\nexample ")
    for name, out in zip(names, outputs, strict=True):
        assert out.partition("\n")[0].endswith(name)
        losses = [float(number) for number in re.findall(r"loss (\d+\.\d+)", out)]
        assert losses == [] or losses[-1] < max(losses), out
        margins = [float(number) for number in re.findall(r"margin (-?\d+\.\d+)", out)]
        assert margins == [] or margins[-1] > margins[0] + 1, out


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
        # A quarter of the steps of the first run has the same effect.
        source = "".join(cell["source"]).replace("--steps 200", "--steps 50").replace("--steps 120", "--steps 80")
        exec(compile(source, "cell", "exec"), space)
    printed = capsys.readouterr().out
    assert printed.count("\n") == "".join(stored).count("\n")
    for out in (printed, "".join(stored)):
        before, after = map(float, re.search(r"^answer +before (\S+) +after (\S+)", out, re.MULTILINE).groups())
        assert after < before / 2


@pytest.mark.long
@pytest.mark.once
def test_the_loss_of_direct_preference_optimization_and_its_gradient_equal_the_formulas_of_the_paper():
    dpo = importlib.import_module("examples.dpo")
    batch = dpo.pairs_of(np.random.default_rng(0), count=2)
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
    log_probs_BA, gradients = np.asarray(of_pairs(params)), jax.jit(jax.jacobian(of_pairs))(params)
    margins_B = dpo.BETA * ((log_probs_BA - batch["reference"]) @ np.array([1.0, -1.0]))
    assert np.ptp(margins_B) > 1e-3
    found, gradient = jax.jit(jax.value_and_grad(lambda params: dpo.loss(params, batch, None).total))(params)
    np.testing.assert_allclose(found, np.log1p(np.exp(-margins_B)).sum(), rtol=1e-5)
    factors_B = -dpo.BETA / (1 + np.exp(margins_B))  # equation 7, differentiated: -beta sigmoid(-margin) for each pair
    expected = jax.tree.map(lambda leaf: np.tensordot(factors_B, leaf[:, 0] - leaf[:, 1], 1), gradients)
    jax.tree.map(lambda own, hand: np.testing.assert_allclose(own, hand, atol=1e-5, rtol=1e-4), gradient, expected)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 1e-2


@pytest.fixture
def strategy_of():
    """Makes a strategy for the examples that must compute what a plain loop does: state sharded over four devices."""
    return partial(jgraph.FullySharded, jax.make_mesh((4,), ("fsdp",), devices=jax.devices()[:4]))


def assert_close(own, plain):
    assert jax.tree.structure(own) == jax.tree.structure(plain)
    jax.tree.map(lambda own, plain: np.testing.assert_allclose(own, plain, rtol=1e-3, atol=1e-4), own, plain)


@pytest.mark.long
@pytest.mark.once
def test_the_losses_of_the_gan_alternate_as_in_a_plain_loop(strategy_of):
    gan = importlib.import_module("examples.gan")
    losses = {"discriminator": gan.discriminator_loss, "generator": gan.generator_loss}

    @partial(jax.jit, static_argnums=0)
    def update(name, params, moments, batch):
        gradient = jax.grad(lambda part: losses[name](params | {name: part}, batch, None))(params[name])
        updates, own = gan.OPTIMIZER.update(gradient, moments[name])
        return params | {name: optax.apply_updates(params[name], updates)}, moments | {name: own}

    start = params = gan.make_params()
    moments = jax.tree.map(gan.OPTIMIZER.init, params, is_leaf=lambda tree: "up" in tree)
    for batch in itertools.islice(gan.batches(), 1, 6):  # the first batch is compiled for
        for name in losses:
            params, moments = update(name, params, moments, batch)
    assert_close(gan.train(5, strategy_of(start)), params)


@pytest.mark.long
@pytest.mark.once
def test_the_average_of_parameters_equals_that_of_a_plain_loop(strategy_of):
    ema = importlib.import_module("examples.ema")
    optimizer = optax.adam(3e-2)

    @jax.jit
    def update(params, average, moments, batch):
        updates, moments = optimizer.update(jax.grad(ema.loss)(params, batch, None), moments)
        params = optax.apply_updates(params, updates)
        return params, jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, average, params), moments

    params = average = ema.make_params()
    moments, rng = optimizer.init(params), np.random.default_rng(0)
    ema.batch_of(rng)  # the first batch is compiled for
    for _ in range(5):
        params, average, moments = update(params, average, moments, ema.batch_of(rng))
    assert_close(ema.train(5, strategy_of(params), decay=0.9), (params, average))


@pytest.mark.long
@pytest.mark.once
def test_an_equinox_model_is_trained_as_in_a_plain_loop(strategy_of):
    example = importlib.import_module("examples.equinox_loop")
    optimizer = optax.adamw(3e-3)

    @eqx.filter_jit
    def update(model, moments, batch):
        gradient = eqx.filter_grad(example.mean_loss)(model, batch, jax.random.key(0))
        updates, moments = optimizer.update(gradient, moments, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), moments

    start = model = example.Model(0.0, jax.random.key(0))  # dropout would have other keys
    moments = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for batch in itertools.islice(example.batches(), 1, 6):
        model, moments = update(model, moments, batch)
    assert_close(*(eqx.filter(own, eqx.is_array) for own in (example.train(start, 5, strategy_of), model)))


@pytest.mark.long
@pytest.mark.once
def test_a_pipeline_of_nnx_layers_computes_what_the_whole_model_does():
    example = importlib.import_module("examples.nnx_pipeline")
    optimizer, batch = optax.adam(1e-3), example.batch_of(np.random.default_rng(0))

    @jax.jit
    def update(params, moments):
        gradient = jax.grad(lambda params: example.MODEL.loss(params, batch, jax.random.key(0))[0])(params)
        updates, moments = optimizer.update(gradient, moments)
        return optax.apply_updates(params, updates), moments

    params, _ = example.MODEL.init()
    moments = optimizer.init(params)
    for _ in range(5):
        params, moments = update(params, moments)
    assert_close(example.train(5, ranks=2), params)


MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in ROOT.glob("jgraph/**/*.py") if ">>> " in path.read_text()
]


# These compile several programs.
LONG = ("jgraph.kernels._documents", "jgraph.moe._layer", "jgraph.precision.transform")


@pytest.mark.parametrize("module", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in MODULES])
def test_examples_in_docstrings_give_what_they_show(module):
    found = doctest.testmod(importlib.import_module(module), extraglobs={"jgraph": jgraph, "jax": jax, "jnp": jax.numpy})
    assert found.attempted > 0
    assert found.failed == 0
