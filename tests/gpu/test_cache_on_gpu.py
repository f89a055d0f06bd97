"""A second start on a GPU: the program comes out of the cache, with the same report, aliases and memory."""

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

cache.enable(Path(sys.argv[1]))
x, y = jnp.ones(8), jnp.ones((64, 64))
lowered = jax.jit(lambda x, y: (x + 1, jnp.fft.fft(y @ y).real @ y), donate_argnums=0).lower(x, y)
with cache.watch(all_threads=False) as compiles:
    compiled, report = compile_and_report(lowered, compiler_options("full", platform="gpu"))
print(json.dumps([compiles.hits, [repr(report), alias_map(compiled), str(Memory.of(compiled))]]))
"""


def test_a_second_start_hits_and_has_the_report_aliases_and_memory_of_the_first(tmp_path):
    def start():
        done = subprocess.run([sys.executable, "-c", START, str(tmp_path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    (first, told), (second, again) = start(), start()
    assert (first, second) == (0, 1)
    assert again == told
    assert "Fft" in told[0]
