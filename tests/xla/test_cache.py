"""Second starts: jax's persistent compilation cache, and the capture report beside it."""

import json
import os
import subprocess
import sys

import pytest

from jgraph.errors import ConfigError
from jgraph.xla import CaptureReport, Op, Outside, cache

REPORT = CaptureReport(1, 7, 9, (Outside("Fft", 2, "no command", "rewrite it", (Op("fft.0", "jit(step)/fft", "a.py:3"),)),))

# One start of a process. XLA tells of thunks only on a GPU, and only where it compiles; here a stand-in does.
START = f"""
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jgraph.xla import CaptureReport, Op, Outside, alias_map, cache, capture, compile_and_report
from jgraph.xla.explain import Memory

capture._read_dump = lambda *_: {REPORT!r} if sys.argv[2] == "compiles" else None
cache.enable(Path(sys.argv[1]))
x, y = jnp.ones(8), jnp.ones((8, 8))
lowered = jax.jit(lambda x, y: (x + 1, y @ y), donate_argnums=0).lower(x, y)
with cache.watch() as compiles:
    compiled, found = compile_and_report(lowered, {{"xla_cpu_enable_fast_math": False}}, platform="gpu")
told = [repr(found), alias_map(compiled), str(Memory.of(compiled)), str(compiled(x, y))]
print(json.dumps([compiles.programs, compiles.hits, compiles.seconds > 0, told]))
"""


def start(directory, argument, code):
    command = [sys.executable, "-W", "error", "-c", code, str(directory), argument]
    done = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_second_start_hits_and_has_the_report_aliases_and_memory_of_the_first(tmp_path):
    *first, told = start(tmp_path, "compiles", START)
    assert first == [1, 0, True]
    assert told[0] == repr(REPORT)
    *second, again = start(tmp_path, "hits", START)
    assert second == [1, 1, True]
    assert again == told
    (report,) = (tmp_path / "capture").iterdir()
    report.write_text('{"outside": [{"ops": 3}]}')
    assert start(tmp_path, "hits", START)[3][0] == "None"


# Compiles a program three times with different settings, each with a report of its own, then all three again from the cache.
SETTINGS = f"""
import json, os, sys
from dataclasses import replace
from pathlib import Path
import jax
from jgraph.xla import CaptureReport, Op, Outside, cache, capture, compile_and_report

cache.enable(Path(sys.argv[1]))
lowered = jax.jit(lambda x: x + 1).lower(1.0)
default_flags = os.environ.get("XLA_FLAGS", "")

def buffers(number, fast_math, flags):
    os.environ["XLA_FLAGS"] = flags
    capture._read_dump = lambda *_: number and replace({REPORT!r}, command_buffers=number)
    return compile_and_report(lowered, {{"xla_cpu_enable_fast_math": fast_math}}, platform="gpu")[1].command_buffers

settings = (False, default_flags), (True, default_flags), (False, default_flags + " --xla_cpu_enable_fast_min_max=false")
first = [buffers(number, *each) for number, each in enumerate(settings, 1)]
print(json.dumps([first, [buffers(None, *each) for each in settings]]))
"""


def test_a_second_start_has_the_report_of_its_own_compiler_options_and_xla_flags(tmp_path):
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


@pytest.mark.target
def test_what_is_compiled_for_a_gpu_that_is_not_here_is_compiled_again_in_silence(h200, tmp_path):
    first = start(tmp_path, "", AOT_START)
    assert "Fft" in first[0]
    assert start(tmp_path, "", AOT_START) == first
    assert len(list((tmp_path / "capture").iterdir())) == 1


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as error:
        cache.enable(tmp_path / "file" / "inside")
    assert error.value.field == "directory"
