"""Tests that a second process reuses the compiled program and the capture report of JAX's persistent cache."""

import json
import os
import subprocess
import sys

import pytest

from jgraph.errors import ConfigError
from jgraph.xla import CaptureReport, Op, Outside, cache
from jgraph.xla._buffers import Usage

OUTSIDE = Outside("Fft", 2, "no command", "rewrite it", (Op("fft.0", "jit(step)/fft", "a.py:3"),))
REPORT = CaptureReport(1, 7, 9, (OUTSIDE,), usage=Usage((0, 3), {"forward": (8, 2)}))

# Runs in a new process. XLA dumps thunks only when it compiles for a GPU, so `_read_dump` is replaced.
START = f"""
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jgraph.xla import CaptureReport, Op, Outside, alias_map, cache, _capture, compile_and_report
from jgraph.xla._buffers import Usage
from jgraph.xla.explain import Memory
from jgraph.xla.startup import watch

_capture._read_dump = lambda *_: {REPORT!r} if sys.argv[2] == "compiles" else None
cache.enable(Path(sys.argv[1]))
x, y = jnp.ones(8), jnp.ones((8, 8))
lowered = jax.jit(lambda x, y: (x + 1, y @ y), donate_argnums=0).lower(x, y)
with watch() as compiles:
    compiled, found = compile_and_report(lowered, {{"xla_cpu_enable_fast_math": False}}, platform="gpu")
results = [repr(found), alias_map(compiled), str(Memory.read(compiled)), str(compiled(x, y))]
print(json.dumps([compiles.programs, compiles.hits, results]))
"""


def start(directory, argument, code):
    command = [sys.executable, "-W", "error", "-c", code, str(directory), argument]
    done = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.long
def test_a_second_process_hits_the_cache_and_gets_the_same_report_aliases_and_memory(tmp_path):
    *first, results = start(tmp_path, "compiles", START)
    assert first == [1, 0]
    assert results[0] == repr(REPORT)
    *second, repeated = start(tmp_path, "hits", START)
    assert second == [1, 1]
    assert repeated == results
    (report,) = (tmp_path / "capture").iterdir()
    report.write_text('{"outside": [{"ops": 3}]}')
    assert start(tmp_path, "hits", START)[2][0] == "None"


# Compiles a program with three settings, each with its own report, then reads all three from the cache.
SETTINGS = f"""
import json, os, sys
from dataclasses import replace
from pathlib import Path
import jax
from jgraph.xla import CaptureReport, Op, Outside, cache, _capture, compile_and_report
from jgraph.xla._buffers import Usage

cache.enable(Path(sys.argv[1]))
lowered = jax.jit(lambda x: x + 1).lower(1.0)
default_flags = os.environ.get("XLA_FLAGS", "")

def buffers(number, fast_math, flags):
    os.environ["XLA_FLAGS"] = flags
    _capture._read_dump = lambda *_: number and replace({REPORT!r}, command_buffers=number)
    return compile_and_report(lowered, {{"xla_cpu_enable_fast_math": fast_math}}, platform="gpu")[1].command_buffers

settings = (False, default_flags), (True, default_flags), (False, default_flags + " --xla_cpu_enable_fast_min_max=false")
first = [buffers(number, *each) for number, each in enumerate(settings, 1)]
print(json.dumps([first, [buffers(None, *each) for each in settings]]))
"""


@pytest.mark.long
def test_cached_reports_are_keyed_by_compiler_options_and_xla_flags(tmp_path):
    assert start(tmp_path, "", SETTINGS) == [[1, 2, 3], [1, 2, 3]]


AOT_START = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jgraph.xla import aot, cache
cache.enable(Path(sys.argv[1]))
_, report = aot.compile_for(jax.jit(lambda x: jnp.fft.fft(x @ x).real), jnp.zeros((64, 64)))
print(json.dumps([str(report)]))
"""


@pytest.mark.long
@pytest.mark.target
def test_a_target_program_is_recompiled_without_warnings_and_has_one_cached_report(h200, tmp_path):
    first = start(tmp_path, "", AOT_START)
    assert "Fft" in first[0]
    assert start(tmp_path, "", AOT_START) == first
    assert len(list((tmp_path / "capture").iterdir())) == 1


def test_an_unwritable_cache_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as error:
        cache.enable(tmp_path / "file" / "inside")
    assert error.value.field == "directory"
