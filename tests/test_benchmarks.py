"""The pipeline's benchmark at tiny sizes on CPU devices: every kind of process runs, and its answers meet in the table."""

import importlib.util
import json
import sys

import numpy as np
import pytest

from benchmarks import harness, pipeline, pipeline_trace
from jgraph.schedule import Costs, generate, simulate
from jgraph.schedule.action import DGRAD, FORWARD, IDLE, WGRAD
from jgraph.schedule.table import tick_table

pytestmark = pytest.mark.once

TINY = ["--work", "mlp-launch-bound", "--sizes", "tiny", "--ranks", "2"]
SHORT = ["--seconds", "0.01", "--repeats", "1", "--warmup-seconds", "0.01"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the benchmark and gives back its exit status; results go to `tmp_path`."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path)

    def run(*flags: str) -> int:
        monkeypatch.setattr(sys, "argv", ["pipeline", *TINY, *SHORT, *flags])
        return pipeline.main()

    return run


def test_a_schedule_is_timed_and_compared_with_its_actions(run, tmp_path, capsys):
    assert run("--schedules", "aligned", "--peers") == 0
    work = json.loads((tmp_path / "pipeline.json").read_text())["works"]["mlp-launch-bound"]
    (row,) = work["rows"]
    assert row["runtime"] == "aligned"
    assert row["ms"] == pytest.approx(row["actions_ms"] + sum(row["rest_ms"].values()))
    assert row["temp_bytes"] > 0
    capsys.readouterr()
    assert run("--table") == 0
    assert "| mlp-launch-bound | 2 | none ran |  | aligned |" in capsys.readouterr().out


def test_a_schedule_that_cannot_be_had_is_a_row_that_says_why(run, tmp_path):
    assert run("--schedules", "1f1b", "--peers", "--xla-option", "xla_gpu_no_such_option=1") == 0
    (row,) = json.loads((tmp_path / "pipeline.json").read_text())["works"]["mlp-launch-bound"]["rows"]
    assert "xla_gpu_no_such_option" in row["failed"]


def test_a_soak_tells_how_many_steps_ran_and_what_memory_grew(run, capsys):
    assert run("--schedules", "aligned", "--soak", "3") == 0
    out = capsys.readouterr().out
    assert "3 of 3 steps" in out
    assert "same loss: True" in out


@pytest.mark.parity
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_a_peer_is_timed_on_the_same_work(run, tmp_path):
    assert run("--schedules", "--peers", "ScheduleDualPipeV") == 0
    (row,) = json.loads((tmp_path / "pipeline.json").read_text())["works"]["mlp-launch-bound"]["rows"]
    assert row["ms"] > 0
    assert row["schedule"] == "ScheduleDualPipeV"


@pytest.mark.parametrize(("P", "M"), [(2, 4), (4, 6)])
def test_a_trace_is_read_back_as_the_schedule_that_ran(P, M):
    schedule = generate("aligned", pp=P, microbatches=M).newest_first()
    planned = simulate(schedule, Costs(forward=2.0, dgrad=3.0, wgrad=1.0), execution="lockstep")
    kinds = tick_table(schedule).kind
    begin = np.full(len(kinds), np.inf)  # of each tick, on whichever rank
    for ticks, starts in zip(schedule.ticks, planned.starts, strict=True):
        np.minimum.at(begin, np.asarray(ticks), starts)
    ranks = []
    for ticks, starts, ends in zip(schedule.ticks, planned.starts, planned.ends, strict=True):
        products = {FORWARD: [], DGRAD: [], WGRAD: []}
        rank = len(ranks)
        for tick, start, end in zip(ticks.tolist(), starts, ends, strict=True):
            middle = (start + end) / 2
            products[int(kinds[tick, rank])] += [(start, middle), (middle, end)]
        for tick in np.flatnonzero(kinds[:, rank] == IDLE):
            # Ranks that have nothing to do in a tick do what the others do, but for a wgrad.
            others = {int(kind) for kind in kinds[tick]} - {IDLE}
            for kind in others - {WGRAD}:
                products[kind] += [(begin[tick], begin[tick] + 0.1), (begin[tick] + 0.1, begin[tick] + 0.2)]
        ranks.append({kind: sorted(times) for kind, times in products.items()})
    ran = pipeline_trace.measured(schedule, ranks)
    for found, expected in ((ran.starts, planned.starts), (ran.ends, planned.ends)):
        for row, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(row, wanted)
    assert pipeline_trace.costs(ran) == {"forward": 2.0, "dgrad": 3.0, "wgrad": 1.0}
