"""What a profile records about the memory of a step."""

from types import SimpleNamespace

import pytest

from jgraph.train.presets import preset
from jgraph.train.profiling import _memory
from jgraph.train.setup import TrainSetup
from jgraph.train.targets import explain_step

TINY = preset("cpu-tiny")


@pytest.mark.long
@pytest.mark.target
def test_the_peak_over_a_step_is_that_of_its_temporaries(h200):
    report = explain_step(TINY, "h200")
    setup = TrainSetup.from_config(TINY)
    found = _memory(setup, SimpleNamespace(memory=report.memory, capture=report.capture))
    sums = [sum(sizes) for sizes in zip(*found["usage"]["scopes"].values(), strict=True)]
    # Between buffers are gaps.
    assert max(sums) == pytest.approx(report.memory.temporaries, rel=0.05)
    at_peak = {scope: sizes[sums.index(max(sums))] for scope, sizes in found["usage"]["scopes"].items()}
    assert min(at_peak["loss"], at_peak["forward"]) > 0
    assert at_peak["other"] < 0.1 * max(sums)
    assert found["buffers"][0]["nbytes"] * found["buffers"][0]["count"] <= max(sums)
    without = _memory(setup, SimpleNamespace(memory=report.memory, capture=None))
    assert without == {name: value for name, value in found.items() if name not in ("usage", "buffers")}
