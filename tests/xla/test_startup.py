"""Tests the division of the time of a start into phases, and the record of compiled programs."""

import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from jgraph.xla.startup import Compiles, Startup, divide, watch


def test_a_moment_counts_once_for_the_first_of_its_phases():
    traces = [(0.0, 3.0), (1.0, 2.0), (2.5, 4.0), (6.0, 7.0)]  # nested, overlapping, later
    compiles = [(3.0, 5.0), (4.5, 6.5)]
    found = divide({"tracing": traces, "XLA": compiles, "imports and data": [(-1.0, 8.0)]})
    assert found == {"tracing": 5.0, "XLA": 2.0, "imports and data": 2.0}


def test_a_section_has_the_time_without_traces_and_compilations(monkeypatch):
    now = iter([4.0, 7.0, 9.0])
    monkeypatch.setattr("jgraph.xla.startup.time", SimpleNamespace(monotonic=lambda: next(now)))
    startup = Startup(1.0, Compiles(programs=3, hits=1, tracing=[(2.0, 3.0)], compiling=[(2.5, 4.5)]))
    startup.enter("initial state")
    startup.enter("first step")
    assert str(startup) == (
        "first step finished 8.0 s after the start: imports and data 1.0, tracing 1.0, "
        "XLA 1.5 (2 compiled, 1 loaded from the compile cache), initial state 2.5, first step 2.0"
    )


def test_a_watch_records_traces_and_compilations_inside_its_block():
    began = time.monotonic()
    with watch() as compiles:
        jax.jit(lambda x: jnp.sin(x) * 3).lower(jnp.ones(3)).compile()
    ended = time.monotonic()
    jax.jit(lambda x: jnp.cos(x) * 5)(jnp.ones(5))
    assert compiles.programs == len(compiles.compiling) >= 1
    assert compiles.tracing
    for start, end in (*compiles.tracing, *compiles.compiling):
        assert began - 0.01 <= start <= end <= ended
