import contextlib
import io
import json
import math
import re
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jgraph.data import heldout_batches, load
from jgraph.strategies.base import Reports
from jgraph.train._trainer import _Run
from jgraph.train.config import TrainConfig
from jgraph.train.rundir import RunDir
from jgraph.xla import CaptureReport, compiler_options
from tests import tiny

FLAGS = ("--steps", "60", "--eval-every", "25", "--checkpoint-every", "20", "--log-every", "10", "--sample-tokens", "8")
KEYS = [
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "step_time_ms",
    "mfu",
    "peak_memory_bytes",
    "skipped",
]
KEYS += ["seconds", "zero_gradients"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the directory and the output of a finished run. Tests must leave the run finished."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert tiny.train(run_dir, *FLAGS) == 0
    return run_dir, out.getvalue()


def test_a_run_learns_and_writes_metrics_and_checkpoints(run):
    run_dir, _ = run
    entries = tiny.entries(run_dir)
    assert [entry["step"] for entry in entries] == [1, 10, 20, 25, 30, 40, 50, 60]
    assert [entry["step"] for entry in entries if "eval_loss" in entry] == [25, 50, 60]
    assert all(list(entry)[: len(KEYS)] == KEYS for entry in entries)
    assert entries[0]["loss"] > 5.4
    assert entries[-1]["loss"] < 3.6
    assert entries[-1]["eval_loss"] < 3.6
    assert all(entry["tokens_per_second"] > 0 and entry["step_time_ms"] > 0 for entry in entries)
    assert all(entry["mfu"] is None and entry["peak_memory_bytes"] > 1e6 for entry in entries)
    # Six steps of warm-up, then the cosine down to a tenth of the peak.
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * (entry["step"] - 7) / 54)) / 2 for entry in entries[1:]]
    assert [entry["learning_rate"] for entry in entries] == pytest.approx([0.01 / 6, *(0.01 * share for share in cosine)])
    assert {"40", "60"} <= {path.name for path in (run_dir / "checkpoints").iterdir()}


def test_the_config_file_has_the_whole_config_the_corpus_and_the_versions(run):
    run_dir, _ = run
    saved = json.loads((run_dir / "config.json").read_text())
    corpus, versions = saved.pop("corpus"), saved.pop("versions")
    config = TrainConfig.from_dict(saved)
    assert (config.steps, config.model.d_model, config.output.run_dir) == (60, 32, str(run_dir))
    assert set(corpus) == {"name", "fingerprint", "train_tokens", "heldout_tokens"}
    assert len(corpus["fingerprint"]) == 64
    assert {"jax", "jaxlib", "flax", "optax", "python", "device"} == set(versions)
    assert config.optimizer.learning_rate == 0.01


def test_a_run_prints_its_config_progress_summary_and_a_sample(run):
    run_dir, out = run
    for text in (
        "settings   preset cpu-tiny, changed: steps=60 ",
        "optimizer  AdamW, learning rate 0.01 after 6 warmup steps, then cosine decay to 0.001 at step 60",
        "d_model=32",
        "s after the start: imports and data ",
        "loaded from the compile cache), initial state ",
        "step 1/60  loss 5.",
        "tokens/s",
        "ms/step",
        "GiB",
        "held-out loss",
        "finished at step 60/60",
        "zlib -9 compresses the same text to 1.",
        str(run_dir),
        "sample text for the held-out prompt",
        f"python -m jgraph.sample {run_dir} --prompt",
    ):
        assert text in out
    assert "optimizer.warmup_steps=" not in out  # not set by a flag
    (sample,) = RunDir(run_dir).read_samples()
    assert sample["step"] == 60
    assert f"sample text for the held-out prompt {sample['prompt']!r}:\n{sample['text']}\n" in out


def test_a_run_prints_the_options_of_its_strategy_that_no_flag_overrides_and_its_capture(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    own = ("xla_gpu_enable_latency_hiding_scheduler=true", "xla_gpu_graph_min_graph_size=1")
    step = SimpleNamespace(memory=None, capture=CaptureReport(1, 2, 3), gradients=None, executables=[])
    setup: Any = SimpleNamespace(
        config=TrainConfig(),
        step=SimpleNamespace(num_devices=1, bound=SimpleNamespace(xla_options=own, reports=Reports())),
        compile_step=lambda: step,
        options=lambda platform: compiler_options("auto", (*own, "xla_gpu_graph_min_graph_size=5"), platform=platform),
    )
    lines: list[str] = []
    run: Any = SimpleNamespace(reporter=SimpleNamespace(line=lines.append))
    assert _Run.compile(run, setup) is step
    assert lines == ["XLA options chosen for this step: xla_gpu_enable_latency_hiding_scheduler=true", str(step.capture)]


def test_a_log_names_each_phase_of_a_run_once(run):
    _, out = run
    start = ["reading the data", "tracing the model", "compiling the training step", "making the initial state"]
    phases = [*start, "generating a sample text"]
    assert [line for line in out.splitlines() if line in phases] == phases


@pytest.mark.long
def test_a_run_compiles_as_many_programs_before_its_first_step_with_16_microbatches_as_with_2(tmp_path):
    def programs(num_microbatches):
        flags = "--steps", "1", "--batch-size", "16", "--num-microbatches", str(num_microbatches)
        code, out, _ = tiny.finish(tiny.start(tmp_path / str(num_microbatches), *flags), seconds=120)
        assert code == 0
        counts = re.search(r"first step finished .* XLA \S+ \((\d+) compiled, (\d+) loaded", out)
        assert counts
        return sum(map(int, counts.groups()))

    assert programs(2) == programs(16)


def test_a_rerun_of_a_finished_run_prints_its_summary_and_trains_no_step(run, capsys):
    run_dir, out = run
    before = (run_dir / "metrics.jsonl").read_bytes()
    assert tiny.train(run_dir, *FLAGS) == 0
    again = capsys.readouterr().out
    assert "this run is finished" in again
    assert "step 1/60" not in again
    assert out[out.index("\nheld out") :] == again[again.index("\nheld out") :]
    assert (run_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.long
@pytest.mark.once
def test_an_extended_run_has_the_losses_of_a_run_with_the_same_decay_steps(tmp_path):
    flags = ("--checkpoint-every", "100", "--eval-every", "100", "--sample-tokens", "0")
    assert tiny.train(tmp_path / "run", *flags, "--steps", "20") == 0
    assert tiny.train(tmp_path / "run", *flags, "--steps", "30", "--optimizer.extend", "constant") == 0
    one = ("--steps", "30", "--optimizer.decay-steps", "20", "--optimizer.warmup-steps", "2")
    assert tiny.train(tmp_path / "whole", *flags, *one) == 0
    ours, theirs = ([(e["step"], e["loss"]) for e in tiny.entries(tmp_path / name)] for name in ("run", "whole"))
    assert ours == theirs
    assert len(ours) == 30


@pytest.mark.long
def test_a_run_resumes_from_entries_without_seconds(tmp_path):
    flags = ("--steps", "4", "--checkpoint-every", "2")
    assert tiny.train(tmp_path / "run", *flags) == 0
    (tmp_path / "run" / "checkpoints" / "4").rename(tmp_path / "aside")
    without = [{name: value for name, value in entry.items() if name != "seconds"} for entry in tiny.entries(tmp_path / "run")]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in without))
    assert tiny.train(tmp_path / "run", *flags) == 0
    assert [entry["step"] for entry in tiny.entries(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.long
@pytest.mark.once
def test_a_run_on_a_data_mixture_resumes_with_the_same_batches(tmp_path):
    flags = ("--steps", "4", "--checkpoint-every", "2", "--sample-tokens", "0", "--data.shuffle", "documents")
    mixture = ("--data", "python-docs:0.7", "synthetic:0.3")
    assert tiny.train(tmp_path / "run", *flags, *mixture) == 0
    before = tiny.losses(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "4").rename(tmp_path / "aside")
    assert tiny.train(tmp_path / "run", *flags, *mixture) == 0
    assert tiny.losses(tmp_path / "run") == before


@pytest.mark.long
def test_no_resume_replaces_the_run_and_has_the_same_losses(run):
    run_dir, _ = run
    (run_dir / "mine.txt").write_text("mine")
    RunDir(run_dir).add_sample(61, "of a longer run", "text")
    (run_dir / "wandb.json").write_text('{"id": "before"}')
    (run_dir / "tensorboard").mkdir()
    before = tiny.losses(run_dir)
    assert tiny.train(run_dir, *FLAGS, "--no-resume") == 0
    assert tiny.losses(run_dir) == before
    assert [sample["step"] for sample in RunDir(run_dir).read_samples()] == [60]
    left = {path.name for path in run_dir.iterdir()}
    assert left == {"mine.txt", "config.json", "metrics.jsonl", "samples.jsonl", "checkpoints"}


def test_the_held_out_loss_is_the_mean_over_all_batches_of_an_evaluation(tmp_path):
    # The loss of this model is the mean of a batch's tokens.
    text = tmp_path / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(chr(65 + i % 50) * 90 for i in range(400)))
    flags = (
        "--data",
        str(text),
        "--model.module",
        "tests.odd:WithoutLogits",
        "--optimizer.learning-rate",
        "1e-9",
        "--sample-tokens",
        "0",
    )
    sizes = ("--steps", "2", "--eval-batches", "3", "--num-microbatches", "2")
    assert tiny.train(tmp_path / "run", *flags, *sizes) == 0
    heldout = load(str(text), seq_len=32, vocab_size=256).heldout
    means = [np.mean(tokens) for tokens in heldout_batches(heldout, batch_size=4, seq_len=32, limit=3)]
    assert np.ptp(means) > 0.1, "the test needs batches that differ"
    assert tiny.entries(tmp_path / "run")[-1]["eval_loss"] == pytest.approx(np.mean(means), rel=1e-6)


@pytest.mark.parametrize(("name", "reason"), [("WithoutLogits", "no attribute 'logits'"), ("BadLogits", "float32[1, 32]")])
def test_a_model_that_cannot_be_sampled_is_trained_after_a_warning(tmp_path, capsys, name, reason):
    assert tiny.train(tmp_path / "run", "--steps", "2", "--sample-tokens", "8", "--model.module", f"tests.odd:{name}") == 0
    before, _, after = capsys.readouterr().out.partition("step 1/2")
    assert "warning: no sample at the end: " in before
    assert reason in before
    assert "finished at step 2/2" in after
    assert "sample" not in after


@pytest.mark.long
@pytest.mark.once
def test_microbatches_change_only_rounding_and_another_seed_changes_the_losses(run, tmp_path):
    run_dir, _ = run
    assert tiny.train(tmp_path / "micro", *FLAGS, "--num-microbatches", "2") == 0
    assert tiny.train(tmp_path / "seed", *FLAGS, "--seed", "1") == 0
    losses = [[entry["loss"] for entry in tiny.entries(path)] for path in (run_dir, tmp_path / "micro", tmp_path / "seed")]
    # Another order of summation changes the last bits, and training amplifies the difference.
    assert losses[0][:2] == pytest.approx(losses[1][:2], rel=1e-5)
    assert losses[0][0] != pytest.approx(losses[2][0], rel=1e-5)
