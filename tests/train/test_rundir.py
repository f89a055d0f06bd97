"""Whose a run directory is: which configuration may go on there, and which process may write."""

import dataclasses
import fcntl
import json
import os
import socket
import subprocess
import sys

import pytest

from jgraph.cli import flag
from jgraph.errors import ConfigError
from jgraph.moe.config import MoEConfig
from jgraph.train.config import COMPONENTS, FIELDS, OptimizerConfig, TrainConfig
from jgraph.train.lock import locked
from jgraph.train.optimizer import learning_rate
from jgraph.train.rundir import RULES, RunDir, flatten, rule_of
from tests import tiny

FINGERPRINT = "0" * 64
CORPUS = {"name": "text", "fingerprint": FINGERPRINT, "train_tokens": 9, "heldout_tokens": 1}
FREE = {
    *("run_dir", "resume", "log_every", "checkpoint_every", "checkpoint_keep", "compile_cache", "on_nonfinite", "dp"),
    *(
        "fsdp",
        "ep",
        "reshard_after_forward",
        "shard_rules",
        "pp",
        "pp_engine",
        "chunks",
        "schedule",
        "memory_limit",
        "remat",
        "graph",
        "xla_options",
    ),
    *("ep", "model.moe.capacity"),
    *("profile", "sample_tokens", "eval_every", "eval_batches", "distributed.setup", "distributed.coordinator"),
    *("distributed.num_processes", "distributed.process_id", "hang_seconds", "log"),
}
FIXED = {
    *("preset", "steps", "batch_size", "seq_len", "num_microbatches", "freeze", "main_params_dtype", "main_grads_dtype"),
    *(
        "decoupled_grad",
        "on_dtype_mismatch",
        "data",
        "data_field",
        "data_shuffle",
        "seed",
        "module",
        "model.num_layers",
        "model.d_model",
    ),
    *("model.num_heads", "model.num_kv_heads", "model.d_ff", "model.vocab_size", "model.mlp", "model.head", "model.attention"),
    "model.norm",
    *("model.compute_dtype", "model.scan_layers", "model.rope_theta", "model.norm_eps", "model.loss_chunk"),
    *("model.head_dim", "model.attention_bias", "model.qk_norm", "model.rope_scaling", "model.rope_factor"),
    *("model.rope_low_freq_factor", "model.rope_high_freq_factor", "model.rope_original_length", "init_from"),
    *("optimizer.extend", "optimizer.decay_steps", "continue_from", "continue_with"),
    *("optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.final_learning_rate", "optimizer.beta1"),
    *("optimizer.beta2", "optimizer.eps", "optimizer.weight_decay", "optimizer.clip_norm", "optimizer.first_moment_dtype"),
    *(
        "optimizer.second_moment_dtype",
        "data_documents",
        "precision",
        "fp8.recipe",
        "fp8.format",
        "fp8.wgrad",
        "fp8.keep",
        "fp8.blocks",
    ),
    *(f"model.moe.{field.name}" for field in dataclasses.fields(MoEConfig) if field.name != "capacity"),
    *("fp8.history", "fp8.amax", "fp8.margin", "fp8.emulate"),
}


def config_with(name: str, base: TrainConfig) -> TrainConfig:
    """Another value of one field, whether or not it could be trained with."""

    def changed(config, path: list[str]):
        value = getattr(config, path[0])
        if path[1:]:
            other = changed(value, path[1:])
        elif isinstance(value, bool):
            other = not value
        else:
            others = {int: 7, float: 0.123, str: "other", tuple: ("other",), type(None): 1}
            other = next(other for kind, other in others.items() if isinstance(value, kind))
        copy = object.__new__(type(config))
        copy.__dict__.update(config.__dict__ | {path[0]: other})
        return copy

    path = name.split(".")
    component = next((part for part in COMPONENTS if hasattr(getattr(base, part), path[0])), None)
    return changed(base, [component, *path] if component else path)


@pytest.fixture
def run_dir(tmp_path):
    """Of a run with a checkpoint."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.write(TrainConfig(), CORPUS, {})
    (run_dir.checkpoints / "4").mkdir(parents=True)
    return run_dir


def test_every_field_either_may_change_when_a_run_goes_on_or_may_not():
    names = set(flatten(TrainConfig().to_dict()))
    assert names == FREE | FIXED
    assert not FREE & FIXED
    assert {name for name in names if rule_of(name).may == "yes"} == FREE
    ruled = " ".join(rule.fields for rule in RULES).split()
    assert len(set(ruled)) == len(ruled)
    assert {name.partition(".")[0] for name in ruled} == FIELDS


def test_the_guide_has_the_table():
    page = (tiny.ROOT / "notes" / "guide" / "runs.md").read_text()
    rows = [f"| {', '.join(f'`{flag(name)}`' for name in rule.fields.split())} | {rule.may} | {rule.why} |" for rule in RULES]
    assert "\n".join(rows) in page


@pytest.mark.parametrize("name", sorted(FREE - {"resume"}))
def test_a_field_that_leaves_the_numbers_as_they_are_may_change(run_dir, name):
    run_dir.check(config_with(name, TrainConfig()), FINGERPRINT)


@pytest.mark.parametrize("name", sorted(FIXED))
def test_a_field_that_the_numbers_depend_on_may_not_change(run_dir, name):
    with pytest.raises(ConfigError, match=f"`{name}` is ") as error:
        run_dir.check(config_with(name, TrainConfig()), FINGERPRINT)
    assert error.value.field == "run_dir"


@pytest.mark.parametrize("name", ["seed", "optimizer.learning_rate", "preset"])
def test_a_directory_without_a_checkpoint_is_free_for_another_configuration(run_dir, name):
    (run_dir.checkpoints / "4").rename(run_dir.checkpoints / "4.orbax-checkpoint-tmp")
    run_dir.check(config_with(name, TrainConfig()), FINGERPRINT)


# --- Other steps ---


@pytest.fixture
def begun(run_dir):
    """Goes on in the directory of a run of 200 steps, 4 of which are done; returns the rate by step."""

    def go_on(steps: int, **fields):
        config = run_dir.resumed(TrainConfig.of(steps=steps, optimizer=OptimizerConfig(**fields)))
        run_dir.check(config, FINGERPRINT)
        run_dir.write(config, CORPUS, {})
        return learning_rate(config.optimizer, config.steps)

    run_dir.write(TrainConfig.of(steps=200), CORPUS, {})
    return go_on


RATE = learning_rate(TrainConfig.of(steps=200).optimizer, 200)


def assert_rate(rate, expected, steps=(0, 19, 20, 150, 200, 300, 390, 400)):
    assert [float(rate(step)) for step in steps] == [float(expected(step)) for step in steps]


def test_more_steps_at_a_constant_rate_follow_the_old_cosine_to_its_end(begun):
    for fields in ({"extend": "constant"}, {"extend": "constant"}, {}):  # the same command again, and without the flag
        assert_rate(begun(400, **fields), RATE)
    assert_rate(begun(600, extend="constant"), RATE)
    assert float(RATE(400)) == pytest.approx(3e-5)


def test_more_steps_along_a_cosine_follow_that_of_them_all_with_the_old_warm_up(begun):
    long = learning_rate(OptimizerConfig(warmup_steps=20), 400)
    for fields in ({"extend": "cosine"}, {"extend": "cosine"}, {}):
        assert_rate(begun(400, **fields), long)
    assert_rate(begun(600, extend="constant"), long)


def test_where_the_steps_are_those_of_before_there_is_nothing_to_extend(begun):
    assert_rate(begun(200, extend="constant"), RATE)
    assert_rate(begun(200, extend="cosine"), RATE)
    with pytest.raises(ConfigError, match=r"`optimizer\.warmup_steps` is 10 and was 20"):
        begun(200, extend="cosine", warmup_steps=10)


@pytest.mark.parametrize("steps", [400, 100])
def test_other_steps_need_a_word_on_the_rate(begun, steps):
    with pytest.raises(ConfigError, match=f"`steps` is {steps} and was 200 .*`optimizer.extend` to cosine or constant"):
        begun(steps)


@pytest.mark.parametrize(
    ("steps", "extend", "reason"),
    [
        (10, "no", "the warmup takes 20"),
        (10, "constant", "the warmup takes 20"),
        (10, "cosine", "the warmup takes 20"),
        (2, "no", "4 are done"),
    ],
)
def test_fewer_steps_than_the_saved_warmup_are_refused_without_blaming_the_warmup(begun, steps, extend, reason):
    with pytest.raises(ConfigError) as error:
        begun(steps, extend=extend)
    assert f": `steps` is {steps} and was 200 ({reason}); use another" in str(error.value)


def test_fewer_steps_than_before_are_a_run_cut_short_but_not_below_those_done(begun):
    assert_rate(begun(50, extend="constant"), RATE, range(50))
    with pytest.raises(ConfigError, match=r"`steps` is 3 and was 50 \(4 are done"):
        begun(3, extend="constant", warmup_steps=0)


@pytest.mark.parametrize(
    ("steps", "fields", "named"),
    [
        (400, {"extend": "cosine"}, "optimizer.extend"),
        (400, {"decay_steps": 300}, "optimizer.decay_steps"),
        (600, {"extend": "constant", "decay_steps": 300}, "optimizer.decay_steps"),
        (400, {"warmup_steps": 10}, "optimizer.warmup_steps"),
        (600, {"extend": "constant", "learning_rate": 1e-4}, "optimizer.learning_rate"),
    ],
)
def test_a_run_of_more_steps_stays_what_it_became(begun, steps, fields, named):
    begun(400, extend="constant")
    with pytest.raises(ConfigError, match=f"`{named}` is "):
        begun(steps, **fields)


def test_a_run_that_an_earlier_version_began_goes_on(run_dir):
    saved = json.loads(run_dir.config.read_text())
    del (
        saved["model"]["qk_norm"],
        saved["model"]["moe"],
        saved["precision"],
        saved["optimizer"]["extend"],
        saved["data_shuffle"],
    )  # which it did not have
    run_dir.config.write_text(json.dumps(saved))
    run_dir.check(TrainConfig(), FINGERPRINT)


def test_a_directory_with_a_config_file_of_something_else_is_not(run_dir):
    (run_dir.checkpoints / "4").rmdir()
    run_dir.config.write_text('{"architectures": ["GPT"]}')
    with pytest.raises(ConfigError) as error:
        run_dir.check(TrainConfig(), FINGERPRINT)
    assert error.value.field == "run_dir"


@pytest.mark.parametrize("text", ["{", "[]", "\xff", '{"a":' * 100_000, '{"a":' * 900 + "1" + "}" * 900, "[" * 100_000])
def test_a_damaged_config_file_is_refused(run_dir, text):
    run_dir.config.write_bytes(text.encode("latin1"))
    with pytest.raises(ConfigError, match="damaged") as error:
        run_dir.check(TrainConfig(), FINGERPRINT)
    assert error.value.field == "run_dir"


# --- The lock ---


@pytest.fixture
def told() -> list[str]:
    return []


def test_a_second_process_is_refused_and_told_of_the_first(tmp_path, told):
    with locked(RunDir(tmp_path / "run"), told.append):
        code = f"""if True:
            from pathlib import Path
            from jgraph.train.lock import locked
            from jgraph.train.rundir import RunDir
            try:
                with locked(RunDir(Path({str(tmp_path / "run")!r})), print):
                    pass
            except ValueError as e:
                print(e)
        """
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tiny.ROOT).stdout
    assert f"process {os.getpid()} on {socket.gethostname()} is writing there" in said
    assert len(said.splitlines()) == 1
    assert told == []


def test_who_ends_leaves_nothing_behind(tmp_path, told):
    for _ in range(2):
        with locked(RunDir(tmp_path / "run"), told.append):
            assert (tmp_path / "run").is_dir()
    assert not (tmp_path / "run").exists()
    with pytest.raises(ZeroDivisionError), locked(RunDir(tmp_path / "run"), told.append):
        raise ZeroDivisionError
    assert not (tmp_path / "run").exists()
    assert told == []


@pytest.fixture
def left(tmp_path):
    """Leaves a lock as a killed process does."""

    def leave(pid: int, host: str) -> RunDir:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "lock").write_text(json.dumps({"pid": pid, "host": host}) + "\n")
        return RunDir(tmp_path / "run")

    return leave


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_lock_of_a_process_that_was_killed_is_taken(left, told):
    run_dir = left(dead_pid(), socket.gethostname())
    run_dir.check(TrainConfig(), FINGERPRINT)
    with locked(run_dir, told.append):
        assert json.loads(run_dir.lock_file.read_text())["pid"] == os.getpid()
    assert told == []


def test_a_lock_left_on_another_machine_is_taken_and_told_of(left, told):
    with locked(left(1, "elsewhere"), told.append):
        pass
    assert len(told) == 1
    assert "process 1 on elsewhere" in told[0]


@pytest.mark.parametrize("then", ["removed", "replaced"])
def test_a_lock_file_that_its_owner_removes_at_the_same_time_is_made_again(tmp_path, told, monkeypatch, then):
    run_dir, flock, calls = RunDir(tmp_path / "run"), fcntl.flock, []

    def while_the_owner_ends(file, operation):
        calls.append(file)
        if len(calls) == 1:
            run_dir.lock_file.unlink()
            if then == "replaced":
                run_dir.lock_file.touch()
        flock(file, operation)

    monkeypatch.setattr("fcntl.flock", while_the_owner_ends)
    with locked(run_dir, told.append):
        assert json.loads(run_dir.lock_file.read_text())["pid"] == os.getpid()
        with pytest.raises(ConfigError, match="is writing there"), locked(RunDir(tmp_path / "run"), told.append):
            pass
    assert told == []


@pytest.fixture
def without_locks(monkeypatch):
    """As a disk is that knows no locks."""

    def flock(file, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)


@pytest.mark.parametrize("holder", [(os.getpid(), socket.gethostname()), (1, "elsewhere")])
def test_where_the_disk_knows_no_locks_the_lock_s_text_refuses(without_locks, left, told, holder):
    run_dir = left(*holder)
    with (
        pytest.raises(ConfigError, match=f"process {holder[0]} on {holder[1]} .* remove ") as error,
        locked(run_dir, told.append),
    ):
        pass
    assert error.value.field == "run_dir"
    assert run_dir.lock_file.exists()


def test_where_the_disk_knows_no_locks_a_dead_process_s_is_taken(without_locks, left, told):
    with locked(left(dead_pid(), socket.gethostname()), told.append):
        pass
    assert told == []
