"""Compares `TensorParallel` on fake devices of one process with PyTorch's `parallelize_module` in two processes."""

import dataclasses
import functools
import itertools
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

torch = pytest.importorskip("torch")

from flax import nnx  # noqa: E402

import jgraph  # noqa: E402
from jgraph.tree import leaf_names  # noqa: E402
from jgraph_models.gpt import GPT  # noqa: E402
from tests.parity import processes, test_gpt, torch_partitioned, weights  # noqa: E402
from tests.parity.test_gpt import BATCH, LENGTH, Arrays, tokens  # noqa: E402

pytestmark = pytest.mark.parity

# Devices share the vocabulary. XLA gathers such small matrices unless the model constrains its hidden activations. Together,
# the cases have every parameter of a GPT without experts. The documents of `separate` differ from sequence to sequence, and
# their tokens have different weights.
_SIZES = {"vocab_size": 72, "d_ff": 48}
CASES = {
    "gelu, tied, MHA, bias": dataclasses.replace(test_gpt.CASES[test_gpt.GELU], **_SIZES, attention_bias="qkv"),
    "swiglu, untied, GQA, head norms, separate": dataclasses.replace(test_gpt.CASES[test_gpt.SWIGLU], **_SIZES, qk_norm="head"),
}
GELU, SWIGLU = CASES
RTOL = 1e-5
# A wrong split must exceed the tolerance by this factor.
CAUGHT = 100


def batch(case: str) -> Arrays:
    """Returns the batch of a case, as `GPT.loss` takes it for separate documents."""
    sizes = BATCH, LENGTH
    starts, factors = np.zeros(sizes, np.int32), np.ones(sizes, np.float32)
    if case.endswith("separate"):
        rng = np.random.default_rng(2)
        first_B1, second_B1 = np.sort(rng.choice(np.arange(1, LENGTH), (BATCH, 2)), axis=1).T[..., None]
        places_T = np.arange(LENGTH, dtype=np.int32)
        starts = np.where(places_T >= second_B1, second_B1, np.where(places_T >= first_B1, first_B1, 0)).astype(np.int32)
        factors = rng.random(sizes, np.float32)
    return {"tokens": tokens()[0], "starts": starts, "weights": factors}


# --- PyTorch ---


@functools.cache
def references() -> dict[tuple[str, str], Arrays]:
    """Returns the results of PyTorch by kind and case. Starts the processes once, because the start is slow."""
    with tempfile.TemporaryDirectory() as folder:
        runs = itertools.product(("tensor", "context"), CASES)
        paths = {run: Path(folder) / f"{number}.npz" for number, run in enumerate(runs)}
        for (kind, case), path in paths.items():
            torch_partitioned.write(path, kind, CASES[case], batch(case) | weights.draw(CASES[case]))
        processes.run("tests.parity.torch_partitioned", Path(folder), *map(str, paths.values()))
        return {run: dict(np.load(path)) for run, path in paths.items()}


# --- jgraph ---


class Pass(NamedTuple):
    """The loss and the gradients of a step, the placed parameters by name, and the compiled program."""

    arrays: Arrays
    params: dict[str, jax.Array]
    program: str


def our_pass(case: str, rules: Mapping[str, jgraph.Split] | None = None, **axes: int) -> Pass:
    """Runs a step.

    Args:
        case: Name of the case.
        rules: How matrices are split, with a mesh axis `tensor`; None for the rules of the model.
        axes: Sizes of the mesh axes by name.
    """
    config, given, arrays = CASES[case], weights.draw(CASES[case]), batch(case)
    graphdef = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))), nnx.Param)[0]
    axes = axes if "fsdp" in axes else {"data": 1} | axes
    mesh, shapes = jax.make_mesh(tuple(axes.values()), tuple(axes)), weights.shapes(config)
    strategy: Any = (jgraph.FullySharded if "fsdp" in axes else jgraph.Replicated)(mesh, shapes)
    if "tensor" in axes:
        strategy = jgraph.TensorParallel(strategy, GPT.tensor_rules(config) if rules is None else rules)

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params).loss(batch)

    # This transform stores the gradient as its state.
    step = jgraph.train_step(loss, jgraph.elementwise(optax.trace(0.0)), strategy)
    placed = step.place(arrays if case.endswith("separate") else arrays["tokens"])
    run, state = step.compile(placed), step.init(weights.tree(config, given))
    state, metrics = run(state, placed)
    gradients = weights.named(step.bound.layout.unpack(state.opt_state.trace))
    found = {f"gradient of {name}": gradient for name, gradient in gradients.items()}
    return Pass({"loss": np.asarray(metrics.loss)} | found, state.params, run.as_text())


# --- Comparison ---


def errors(ours: Arrays, theirs: Arrays) -> dict[str, float]:
    """Returns the largest error of each array, relative to its largest element."""
    assert {name for name in theirs if name == "loss" or name.startswith("gradient")} == ours.keys()
    found = {}
    for name, array in ours.items():
        assert array.shape == theirs[name].shape
        assert array.dtype == theirs[name].dtype == np.float32
        found[name] = float(np.abs(array - theirs[name]).max() / np.abs(theirs[name]).max())
    return found


def assert_agrees(ours: Arrays, theirs: Arrays) -> None:
    found = errors(ours, theirs)
    print(f"largest error: {max(found.values()):.3g}")
    wrong = {name: error for name, error in found.items() if not error <= RTOL}
    assert not wrong, f"errors beyond {RTOL}: {wrong}"


def assert_caught(ours: Arrays, theirs: Arrays) -> None:
    """Checks that the comparison fails by more than the factor `CAUGHT`."""
    with pytest.raises(AssertionError, match="errors beyond"):
        assert_agrees(ours, theirs)
    assert max(errors(ours, theirs).values()) > CAUGHT * RTOL


def gathered_shapes(program: str) -> list[tuple[int, ...]]:
    """Returns the shapes of the results of all all-gathers."""
    return [tuple(map(int, shape.split(","))) for shape in re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", program)]


LAYOUTS = {"tensor": {"tensor": 2}, "fsdp, context, tensor": {"fsdp": 2, "context": 2, "tensor": 2}}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_every_gradient_equal_parallelize_module(layout, case):
    assert_agrees(our_pass(case, **LAYOUTS[layout]).arrays, references()["tensor", case])


@pytest.mark.parametrize("case", CASES)
def test_pytorch_splits_the_logits_and_every_parameter_except_norms(case):
    axes = json.loads(str(references()["tensor", case]["split axes"]))
    assert axes.pop("logits") == [2]
    for name, found in axes.items():
        by_inputs = name.endswith((".out.weight", ".down.weight"))
        assert found == ([] if "norm" in name else [1] if by_inputs else [0]), name


@pytest.mark.parametrize("case", CASES)
def test_each_device_has_half_of_every_matrix_and_gathers_only_the_residual_stream(case):
    ours, shapes = our_pass(case, tensor=2), weights.shapes(CASES[case])
    leaves = zip(leaf_names(shapes), jax.tree.leaves(shapes), strict=True)
    assert ours.params.keys() >= {name for name, leaf in leaves if leaf.ndim > 1}
    for name, array in ours.params.items():
        found = torch_partitioned.split_axes(array.addressable_shards[0].data.shape, array.shape)
        by_inputs = name.endswith(("out/kernel", "down/kernel", "embedding_VD", "bias"))
        assert found == ([] if name.startswith("small vectors") else [0] if by_inputs else [1]), name
    # Each device gathers residual streams in front of column-parallel layers, and no weights and no logits.
    assert set(gathered_shapes(ours.program)) == {(BATCH, LENGTH, CASES[case].d_model)}


WRONG_RULES = {
    "heads": (GELU, "*attention/qkv/*"),
    "grouped heads": (SWIGLU, "*attention/qkv/*"),
    "gate and up": (SWIGLU, "*mlp/up/kernel"),
}


@pytest.mark.parametrize("mutation", WRONG_RULES)
def test_a_split_across_concatenated_parts_is_detected(mutation):
    case, pattern = WRONG_RULES[mutation]
    rules = {**GPT.tensor_rules(CASES[case]), pattern: jgraph.Split(axis=-1)}
    assert_caught(our_pass(case, rules, tensor=2).arrays, references()["tensor", case])
