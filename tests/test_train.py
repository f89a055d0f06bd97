import json

import pytest

from jgraph.config import TrainConfig
from jgraph.rundir import RunDir
from tests import tiny

FLAGS = ("--steps", "60", "--eval-every", "25", "--checkpoint-every", "20", "--log-every", "10")
KEYS = ["step", "loss", "grad_norm", "tokens_per_second", "step_time_ms", "mfu", "peak_memory_bytes", "skipped", "seconds"]
KEYS += ["zero_gradients"]


@pytest.fixture
def run(tmp_path, capsys):
    """A finished run and what it printed."""
    assert tiny.train(tmp_path / "run", *FLAGS) == 0
    return tmp_path / "run", capsys.readouterr().out


def test_a_run_learns_and_writes_what_it_promises(run):
    run_dir, _ = run
    entries = tiny.entries(run_dir)
    # The evaluations' steps are 25, 50 and the last, 59.
    assert [entry["step"] for entry in entries] == [0, 10, 20, 25, 30, 40, 50, 59]
    assert [entry["step"] for entry in entries if "eval_loss" in entry] == [25, 50, 59]
    assert all(list(entry)[: len(KEYS)] == KEYS for entry in entries)
    assert entries[0]["loss"] > 5.4
    assert entries[-1]["loss"] < 3.6
    assert entries[-1]["eval_loss"] < 3.6
    assert all(entry["tokens_per_second"] > 0 and entry["step_time_ms"] > 0 for entry in entries)
    assert all(entry["mfu"] is None and entry["peak_memory_bytes"] > 1e6 for entry in entries)
    assert {"40", "60"} <= {path.name for path in (run_dir / "checkpoints").iterdir()}


def test_the_config_file_holds_the_whole_config_the_corpus_and_the_versions(run):
    run_dir, _ = run
    config, corpus, versions = RunDir(run_dir).read()
    assert isinstance(config, TrainConfig)
    assert (config.steps, config.model.d_model, config.run_dir) == (60, 32, str(run_dir))
    assert set(corpus) == {"name", "fingerprint", "train_tokens", "heldout_tokens"}
    assert len(corpus["fingerprint"]) == 64
    assert {"jax", "jaxlib", "flax", "optax", "python", "device"} == set(versions)
    assert json.loads((run_dir / "config.json").read_text())["optimizer"]["learning_rate"] == 0.01


def test_a_run_shows_its_config_progress_summary_and_a_sample(run):
    run_dir, out = run
    for text in (
        "steps=60",
        "d_model=32",
        "step 1/60  loss 5.",
        "tokens/s",
        "ms/step",
        "GiB",
        "held-out loss",
        "finished at step 60/60",
        "zlib -9 needs 1.",
        str(run_dir),
        "sample, from the held-out prompt",
    ):
        assert text in out


def test_a_rerun_of_a_finished_run_says_so_and_trains_nothing(run, capsys):
    run_dir, out = run
    before = (run_dir / "metrics.jsonl").read_bytes()
    assert tiny.train(run_dir, *FLAGS) == 0
    again = capsys.readouterr().out
    assert "this run is finished" in again
    assert "step 1/60" not in again
    assert out[out.index("held out") :] == again[again.index("held out") :]
    assert (run_dir / "metrics.jsonl").read_bytes() == before


def test_starting_over_replaces_the_run_with_the_same_losses(run):
    run_dir, _ = run
    (run_dir / "mine.txt").write_text("mine")
    before = tiny.losses(run_dir)
    assert tiny.train(run_dir, *FLAGS, "--no-resume") == 0
    assert tiny.losses(run_dir) == before
    assert (run_dir / "mine.txt").exists()


def test_microbatches_and_the_other_seed_make_the_difference_they_should(run, tmp_path):
    run_dir, _ = run
    assert tiny.train(tmp_path / "micro", *FLAGS, "--num-microbatches", "2") == 0
    assert tiny.train(tmp_path / "seed", *FLAGS, "--seed", "1") == 0
    losses = [[entry["loss"] for entry in tiny.entries(path)] for path in (run_dir, tmp_path / "micro", tmp_path / "seed")]
    # Sums in another order differ in the last bits, and training pulls them apart.
    assert losses[0][:2] == pytest.approx(losses[1][:2], rel=1e-5)
    assert losses[0][0] != pytest.approx(losses[2][0], rel=1e-5)
