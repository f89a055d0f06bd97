"""Tests options of `split_backward` and errors of invalid arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jgraph
from jgraph.errors import JgraphError, SplitError
from tests.autodiff.stages import STAGES, D, hidden, mlp, mlp_params, normal


def names(tree):
    return sorted(name for name, leaf in tree.items() if leaf is not None)


def run(split, params, x, *extra):
    y, residuals = split.forward(params, x, *extra)
    dx, early, stash = split.dgrad(params, residuals, y)
    return residuals, stash, early, split.wgrad(params, residuals, stash), dx


def test_patterns_select_the_delayed_parameters():
    for delay, late in ((None, ["down", "up"]), (("up",), ["up"]), ("*", None), ((), [])):
        split = jgraph.split_backward(mlp, delay=delay)
        if late is None:
            with pytest.raises(SplitError):
                split.forward(mlp_params(), hidden())
            continue
        _, _, early, gradients, _ = run(split, mlp_params(), hidden())
        assert names(gradients) == late
        assert names(early) == sorted({"bias", "down", "up"} - set(late))


@pytest.mark.parametrize(
    ("name", "path", "by"),
    [
        ("mlp", "bias", "add"),
        ("tied embedding", "table", "gather"),
        ("cond", "w", "cond"),
        ("gpt block", "mlp_norm/scale/value", "mul"),
    ],
)
def test_a_parameter_that_cannot_be_delayed_is_named_with_the_primitive_that_reads_it(name, path, by):
    stage = STAGES[name]()
    split = jgraph.split_backward(stage.run, delay=(path,))
    with pytest.raises(SplitError, match=f"parameter {path} reaches the output through {by}.* remove it from") as caught:
        split.forward(stage.params, stage.x, *stage.extra)
    assert caught.value.path == path


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(SplitError, match=r"`delay` has 'kernel', which matches no parameter: must match one of bias, down, up"):
        jgraph.split_backward(mlp, delay="kernel").forward(mlp_params(), hidden())


def test_wide_recomputes_matmuls_that_widen_by_four():
    params, x = {"up": normal(2, D, 4 * D, scale=0.2), "down": normal(3, 4 * D, D, scale=0.1)}, hidden()
    stage = lambda p, x: x + jax.nn.gelu(x @ p["up"]) @ p["down"]  # noqa: E731
    saved, recomputed = (jgraph.split_backward(stage, recompute=which) for which in ("elementwise", "wide"))
    wide = (*x.shape[:-1], 4 * D)
    for split, count in ((saved, 1), (recomputed, 0)):
        residuals = split.spec(params, x).residuals
        assert [leaf.shape for leaf in (*residuals.dgrad, *residuals.wgrad)].count(wide) == count
    found, expected = (run(split, params, x)[2:] for split in (recomputed, saved))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.max(np.abs(b))), found, expected)


CHOICES = [{"recompute": "all"}, {"recompute": ["all"]}, {"delay": 3}, {"delay": [3]}]


@pytest.mark.parametrize("asked", CHOICES, ids=str)
def test_an_unknown_option_is_refused_before_the_stage_is_traced(asked):
    with pytest.raises(JgraphError) as error:
        jgraph.split_backward(mlp, **asked)
    assert error.value.field == next(iter(asked))


def test_a_stage_must_be_a_function():
    with pytest.raises(SplitError) as error:
        jgraph.split_backward(mlp_params())
    assert error.value.field == "stage_fn"


def test_integer_inputs_are_refused_by_path():
    split = jgraph.split_backward(lambda p, x: x["h"] @ p["w"])
    with pytest.raises(SplitError, match=r"x/tokens is int32: must be floating; pass it as an extra argument") as caught:
        split.forward({"w": normal(1, 32, 8)}, {"h": hidden(), "tokens": jnp.zeros(3, jnp.int32)})
    assert caught.value.path == "tokens"


def test_dy_must_have_the_structure_and_shapes_of_y():
    split = jgraph.split_backward(mlp)
    y, residuals = split.forward(mlp_params(), hidden())
    with pytest.raises(SplitError, match="dy has the structure"):
        split.dgrad(mlp_params(), residuals, (y, y))
    with pytest.raises(SplitError, match=r"dy has a leaf of shape \(2, 15, 32\), but y has \(2, 16, 32\)"):
        split.dgrad(mlp_params(), residuals, y[:, :15])


def test_parts_of_different_splits_do_not_mix():
    one, other = jgraph.split_backward(mlp), jgraph.split_backward(mlp)
    residuals, stash, *_ = run(one, mlp_params(), hidden())
    with pytest.raises(SplitError, match="`residuals` comes from another split_backward"):
        other.wgrad(mlp_params(), residuals, stash)
    theirs = run(other, mlp_params(), hidden())[1]
    with pytest.raises(SplitError, match="`stash` comes from another split_backward"):
        one.wgrad(mlp_params(), residuals, theirs)


def test_parts_of_different_shapes_do_not_mix():
    split = jgraph.split_backward(mlp)
    residuals, *_ = run(split, mlp_params(), hidden())
    stash = run(split, mlp_params(), hidden()[:1])[1]
    with pytest.raises(SplitError, match="`stash` belongs to residuals of other shapes"):
        split.wgrad(mlp_params(), residuals, stash)


def test_a_donated_stash_is_refused():
    split = jgraph.split_backward(mlp)
    residuals, stash, *_ = run(split, mlp_params(), hidden())
    for leaf in stash.arrays:
        leaf.delete()
    with pytest.raises(SplitError, match="`stash` is deleted, because an earlier call donated it"):
        split.wgrad(mlp_params(), residuals, stash)
