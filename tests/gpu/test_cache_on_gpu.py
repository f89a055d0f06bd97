"""A second process on a GPU loads the program from the cache, with the same capture report, aliases and memory."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

START = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jgraph.xla import alias_map, cache, compile_and_report, compiler_options
from jgraph.xla.explain import Memory
from jgraph.xla.startup import watch

cache.enable(Path(sys.argv[1]))
x, y = jnp.ones(8), jnp.ones((64, 64))
lowered = jax.jit(lambda x, y: (x + 1, jnp.fft.fft(y @ y).real @ y), donate_argnums=0).lower(x, y)
with watch() as compiles:
    compiled, report = compile_and_report(lowered, compiler_options("full", platform="gpu"))
print(json.dumps([compiles.hits, [repr(report), alias_map(compiled), str(Memory.read(compiled))]]))
"""


def test_a_second_process_loads_the_program_with_its_report_aliases_and_memory(tmp_path):
    def start():
        done = subprocess.run([sys.executable, "-c", START, str(tmp_path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    (first_hits, expected), (second_hits, found) = start(), start()
    assert (first_hits, second_hits) == (0, 1)
    assert found == expected
    assert "Fft" in expected[0]
