import dataclasses
import io
import json
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from jgraph.step.state import StepMetrics
from jgraph.train._callbacks import GradientChecks
from jgraph.train._console import Reporter
from jgraph.train.metrics import MetricsLog, StepClock, peak_memory_bytes, read_metrics
from jgraph.train.presets import preset
from jgraph_models.gpt import GPT


@pytest.mark.parametrize("sizes", [{"mlp": "swiglu"}, {"head": "untied"}, {"num_kv_heads": 2}])
def test_flops_are_six_per_matrix_weight_and_token_plus_causal_attention(sizes):
    config = preset("cpu-tiny")
    config = config.changed(model=dataclasses.replace(config.model, **sizes))
    model = nnx.eval_shape(lambda: GPT(config.model, rngs=nnx.Rngs(0)))
    params = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    weights = sum(leaf.size for leaf in params if leaf.ndim > 1)
    if config.model.head == "untied":  # the embedding is then used for lookup only
        weights -= config.model.vocab_size * config.model.d_model
    tokens = config.input.batch_size * config.input.seq_len
    attention = 6 * config.model.num_layers * config.model.d_model * config.input.seq_len * tokens
    assert config.model.flops(config.input.batch_size, config.input.seq_len) == 6 * weights * tokens + attention


def test_the_flops_of_gpt_124m_equal_a_count_by_hand():
    per_token = 6 * (12 * 12 * 768**2 + 768 * 50304) + 6 * 12 * 768 * 1024
    assert preset("gpt-124m").model.flops(16, 1024) == per_token * 16 * 1024


def test_peak_memory_is_read_from_the_device_or_else_from_the_process():
    gpu = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 123})
    assert peak_memory_bytes(gpu) == 123
    assert 2**20 < peak_memory_bytes(jax.local_devices(backend="cpu")[0]) < 2**40


def test_entries_are_flushed_at_once_and_nonfinite_values_are_null(tmp_path):
    log = MetricsLog(tmp_path / "m.jsonl", done=0)
    log.add({"step": 1, "loss": float("nan"), "mfu": None, "skipped": 0})
    assert json.loads((tmp_path / "m.jsonl").read_text()) == {"step": 1, "loss": None, "mfu": None, "skipped": 0}
    log.close()


@pytest.mark.parametrize(
    ("mfu", "expected"), [(0.4321, "8.0 ms/step  MFU 43.2%  1.50 GiB peak"), (None, "8.0 ms/step  1.50 GiB peak")]
)
def test_a_progress_line_has_the_mfu_if_the_rate_of_the_device_is_known(mfu, expected):
    entry = {"step": 3, "loss": 2.0, "tokens_per_second": 1e5, "step_time_ms": 8.0, "skipped": 0}
    entry |= {"mfu": mfu, "peak_memory_bytes": 3 << 29}
    with io.StringIO() as file:
        Reporter(Console(file=file, width=20), steps=9).progress(entry)
        assert file.getvalue() == f"step 3/9  loss 2.0000  100,000 tokens/s  {expected}\n"


@pytest.mark.parametrize(
    ("metrics", "problem"),
    [
        (StepMetrics(1.0, np.inf, [1e38, 3e38]), "the norm of the gradient overflows float32"),
        (StepMetrics(np.inf, np.inf, [1e38, 3e38]), "the loss is inf and the norm of the gradient overflows float32"),
        (StepMetrics(1.0, np.nan, [1.0, np.nan]), "the gradient of b is not finite"),
        (StepMetrics(1.0, 1.0, [1.0, 0.0]), ""),
    ],
)
def test_a_problem_names_the_gradients_that_are_not_finite_or_their_norm(metrics, problem):
    checks = object.__new__(GradientChecks)
    checks._names = ["a", "b"]
    assert checks.problem(metrics) == problem


def test_a_resumed_log_drops_entries_after_the_checkpoint_and_a_partial_line(tmp_path):
    path = tmp_path / "m.jsonl"
    entries = [{"step": step, "learning_rate": 0.1} for step in range(1, 5)]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"step": 5, "lo')
    log = MetricsLog(path, done=2)
    again = {"step": 3, "learning_rate": 0.2}
    log.add(again)
    log.close()
    assert read_metrics(path) == [*entries[:2], again]
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "line",
    [
        '"step"',
        '{"step": "1"}',
        '{"step": 1, "seconds": null}',
        '{"step": 1, "loss": "low"}',
        '{"step": 1, "eval_loss": []}',
        '{"step": ' + 5000 * "1" + "}",
        '{"step": 1, "x": ' + 200_000 * "[",
        "\udcff",
    ],
)
def test_an_invalid_line_is_skipped_by_readers_and_removed_by_writers(tmp_path, line):
    path = tmp_path / "m.jsonl"
    path.write_bytes(f'{{"step": 0}}\n{line}\n{{"step": 2, "own": [1e999]}}\n'.encode(errors="surrogateescape"))
    assert [entry["step"] for entry in read_metrics(path)] == [0, 2]
    MetricsLog(path, done=9).close()
    assert path.read_text() == '{"step": 0}\n{"step": 2, "own": [1e999]}\n'


def test_a_missing_file_has_no_entries(tmp_path):
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_the_clock_counts_only_time_between_start_and_stop(monkeypatch):
    now = iter([0.0, 1.0, 10.0, 12.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = StepClock(seconds=100.0)
    for steps in (2, 1):
        clock.start()
        clock.start()
        clock.stop(steps)
    assert clock.seconds == 103.0
    assert clock.lap() == 1.0


def test_the_clock_counts_only_the_share_of_completed_steps(monkeypatch):
    now = iter([0.0, 6.0, 10.0, 12.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = StepClock()
    for steps in (2, 0):
        clock.start()
        clock.stop(steps, of=3)
    assert clock.seconds == 4.0
    assert clock.lap() == 2.0
