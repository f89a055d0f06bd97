"""`jgraph.record` writes a page for loops of plain JAX programs."""

import tempfile

import jax
import jax.numpy as jnp
import pytest

import jgraph
from tests.browser import data_in
from tests.profile.checks import check_time


@pytest.fixture(scope="module")
def programs():
    """Returns a training step of plain JAX, and an evaluation. Both are compiled."""

    def loss(w, x):
        with jax.named_scope("layer"):
            return jnp.sum(jnp.tanh(x @ w))

    step = jax.jit(lambda w, x: w - 1e-3 * jax.grad(loss)(w, x))
    evaluate = jax.jit(loss)
    w, x = jnp.ones((64, 64)), jnp.ones((256, 64))
    jax.block_until_ready((step(w, x), evaluate(w, x)))
    return step, evaluate, w, x


def test_a_loop_of_two_programs_becomes_a_page(programs, tmp_path, monkeypatch):
    step, evaluate, w, x = programs
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    page = tmp_path / "pages" / "page.html"
    with jgraph.record(page):
        for number in range(3):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                w = step(w, x)
                evaluate(w, x)
    found = data_in(page.read_text())
    check_time(found)
    assert list(tmp_path.iterdir()) == [page.parent]
    assert found["about"]["notes"] == ["3 steps, marked by jax.profiler.StepTraceAnnotation."]
    assert len(found["uncaptured"]["steps_ms"]) == 3
    assert {"layer", ""} >= {row["name"] for row in found["scopes"]} >= {"layer"}
    assert any("profile/test_record.py:" in row["name"] for row in found["lines"])
    matmuls = [group for group in found["groups"] if group["label"].startswith("matmul")]
    assert sum(group["count"] for group in matmuls) == 3  # forward and wgrad of the step, forward of the evaluation
    assert {group["category"] for group in matmuls} == {"forward", "wgrad", "other"}


def test_a_loop_that_raises_writes_no_page(programs, tmp_path, monkeypatch):
    step, _, w, _ = programs
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(TypeError), jgraph.record(tmp_path / "page.html"):
        step(w)
    assert list(tmp_path.iterdir()) == []


def test_a_second_recording_inside_is_refused(tmp_path):
    with (
        pytest.raises(jgraph.JgraphError, match="end the other profile first"),
        jgraph.record(tmp_path / "a.html"),
        jgraph.record(tmp_path / "b.html"),
    ):
        pass


@pytest.mark.long
def test_a_directory_is_refused_before_the_loop(tmp_path):
    with pytest.raises(jgraph.ConfigError, match=r"`path` is .*: must be a file"), jgraph.record(tmp_path):
        raise AssertionError("the loop ran")
