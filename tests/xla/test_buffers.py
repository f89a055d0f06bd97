"""Tests of the largest temporary buffers of a program."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jgraph
from jgraph.xla import _buffers
from jgraph.xla.hlo import HloModule, operations

HERE = Path(__file__)
WIDE = 4096


def loss(w, x):
    hidden = jnp.tanh(x @ w)  # kept for the backward
    return (hidden * hidden).sum()


def line_of(marker):
    (line,) = (i for i, code in enumerate(HERE.read_text().splitlines(), 1) if code.endswith(f"# {marker}"))
    return f"test_buffers.py:{line}"


ARGUMENTS = jax.ShapeDtypeStruct((64, WIDE), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32)


@pytest.mark.target
def test_the_largest_temporary_is_named_with_its_size_shape_and_line(h200):
    report = jgraph.explain(jax.value_and_grad(loss), *ARGUMENTS, target="h200")
    first = report.buffers[0]
    assert first.nbytes == 256 * WIDE * 4
    assert first.shape == f"f32[256,{WIDE}]"
    assert line_of("kept for the backward") in first.op
    assert first.scope == "forward"
    assert f" {first.shape} forward: {first.op}" in str(first)
    total = sum(group.count * group.nbytes for group in report.buffers)
    assert 0.9 * report.memory.temporaries <= total <= report.memory.temporaries
    # The peak has few buffers, and all of them are listed.
    assert report.capture.usage.peak == total
    assert f"largest temporaries at the peak:\n  {first}" in str(report)


@pytest.mark.target
def test_layers_are_one_entry_with_their_number(h200):
    def layers(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x.sum()

    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 5
    report = jgraph.explain(jax.grad(layers), weights, jax.ShapeDtypeStruct((512, 256), jnp.float32), target="h200")
    groups = {group.shape: group for group in report.buffers if group.shape == "f32[512,256]"}
    assert groups["f32[512,256]"].count >= 4


def event(kind, number, name="", shared=0):
    fields = [(1, kind), (2, number), (4, name.encode()), (5, shared)]
    return [field for field in fields if field[1]]


def test_the_peak_is_the_moment_of_the_largest_sum_and_shared_memory_counts_once():
    # 1 and 2 are in use at once; 3 takes the memory of 2, and 4 comes when 1 is free.
    events = [event(0, 1, "a"), event(0, 2, "b"), event(2, 3, "c", shared=2), event(1, 1), event(1, 2), event(0, 4, "d")]
    sizes = {1: 5, 2: 10, 3: 10, 4: 4}
    assert _buffers._at_peak(_buffers._changes(events, sizes)) == {1: "a", 2: "b"}
    # 3 still uses the memory of 2.
    assert _buffers._at_peak(_buffers._changes(events, sizes | {4: 6})) == {2: "b", 4: "d"}


PROGRAM = """HloModule jit_step, is_scheduled=true

%inside (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0), metadata={op_name="x"}
  ROOT %t = f32[4]{0} tanh(%p), metadata={op_name="jit(step)/jvp()/tanh"}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %a = f32[4]{0} fusion(%x), kind=kLoop, calls=%inside
  %b = f32[4]{0} multiply(%a, %a), metadata={op_name="jit(step)/transpose(jvp())/mul"}
  ROOT %c = f32[4]{0} all-gather(%b), replica_groups={{0}}
}
"""


def test_memory_over_a_program_is_by_the_part_that_computes_it_and_fusions_are_named_after_their_root():
    program = HloModule(PROGRAM)
    events = [event(0, 1, "a"), event(0, 2, "b"), event(1, 1), event(0, 3, "c"), event(0, 4, "unknown"), event(1, 2)]
    usage = _buffers._usage(list(_buffers._changes(events, {1: 5, 2: 10, 3: 7, 4: 2})), program)
    assert usage.allocations == (0, 1, 2, 3)
    assert usage.scopes == {
        "forward": (5, 5, 0, 0),
        "dgrad": (0, 10, 10, 10),
        "all-gather": (0, 0, 7, 7),
        "other": (0, 0, 0, 2),
    }
    assert usage.peak == 19
    assert operations(program, {"a"})["a"].name == "jit(step)/jvp()/tanh"


def test_samples_of_a_long_program_keep_the_peak():
    changes = [change for i in range(999) for change in ((i, "a", 3), (i, "a", -3))]
    changes[1000:1000] = [(2000, "a", 4), (2001, "b", 5), (2000, "a", -4), (2001, "b", -5)]
    usage = _buffers._usage(changes, HloModule(PROGRAM))
    assert len(usage.allocations) <= _buffers._SAMPLES
    assert usage.peak == 9
    assert usage.allocations[list(usage.scopes["dgrad"]).index(5)] == 501


def test_a_program_without_a_report_has_no_buffers():
    assert _buffers.read(b"", HloModule(""), {}) == ((), None)
