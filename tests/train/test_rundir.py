"""Run directories: which configurations can resume in them, and which process can write to them."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import socket
import subprocess
import sys

import pytest

from jgraph.cli import flag
from jgraph.errors import ConfigError
from jgraph.moe.config import MoEConfig
from jgraph.settings import flatten, may_change, resume_rules
from jgraph.train import _lock
from jgraph.train._lock import locked
from jgraph.train._resume import rules_of
from jgraph.train.config import COMPONENTS, OptimizerConfig, TrainConfig
from jgraph.train.optimizer import learning_rate
from jgraph.train.rundir import RunDir
from tests import tiny

FINGERPRINT = "0" * 64
CORPUS = {"name": "text", "fingerprint": FINGERPRINT, "train_tokens": 9, "heldout_tokens": 1}
FREE = {
    *("run_dir", "resume", "log_every", "checkpoint_every", "checkpoint_keep", "compile_cache", "on_nonfinite", "dp"),
    *("cp", "tp", "model.tensor_overlap"),
    *(
        "fsdp",
        "ep",
        "gather_per",
        "shard_rules",
        "pp",
        "pp_engine",
        "chunks",
        "schedule",
        "memory_limit",
        "remat",
        "offload",
        "graph",
        "xla_options",
    ),
    *("ep", "model.moe.capacity", "fp8.compute"),
    *("profile", "sample_tokens", "eval_every", "eval_batches", "distributed.setup", "distributed.coordinator"),
    *(
        "distributed.num_processes",
        "distributed.process_id",
        "distributed.local_devices",
        "distributed.timeout",
        "hang_seconds",
        "log",
    ),
}
FIXED = {
    *("preset", "steps", "batch_size", "seq_len", "num_microbatches", "freeze", "main_params_dtype", "main_grads_dtype"),
    *(
        "decoupled_grad",
        "on_dtype_mismatch",
        "data",
        "data_field",
        "data_format",
        "data_template",
        "data_truncate",
        "data_shuffle",
        "seed",
        "module",
        "model.num_layers",
        "model.d_model",
    ),
    *("model.num_heads", "model.num_kv_heads", "model.d_ff", "model.vocab_size", "model.mlp", "model.head", "model.attention"),
    *("model.norm", "model.head_precision"),
    *("model.compute_dtype", "model.scan_layers", "model.rope_theta", "model.norm_eps", "model.loss_chunk"),
    *("model.head_dim", "model.attention_bias", "model.qk_norm", "model.rope_scaling", "model.rope_factor"),
    *("model.rope_low_freq_factor", "model.rope_high_freq_factor", "model.rope_original_length", "init_from"),
    *("optimizer.extend", "optimizer.decay_steps", "continue_from", "continue_with"),
    *("optimizer.name", "optimizer.args", "optimizer.groups", "optimizer.schedule", "optimizer.decay_fraction"),
    *("optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.final_learning_rate", "optimizer.beta1"),
    *("optimizer.beta2", "optimizer.eps", "optimizer.weight_decay", "optimizer.clip_norm", "optimizer.first_moment_dtype"),
    *(
        "optimizer.matrix_dtype",
        "optimizer.second_moment_dtype",
        "data_documents",
        "precision",
        "fp8.recipe",
        "fp8.format",
        "fp8.wgrad",
        "fp8.accumulation",
        "fp8.keep",
        "fp8.blocks",
    ),
    *(f"model.moe.{field.name}" for field in dataclasses.fields(MoEConfig) if field.name != "capacity"),
    *("lora.rank", "lora.alpha", "lora.targets", "lora.base_dtype", "checkpoint_base"),
    *("fp8.first", "fp8.last", "fp8.history", "fp8.amax", "fp8.margin", "fp8.emulate"),
}


def config_with(name: str, base: TrainConfig) -> TrainConfig:
    """Returns `base` with another value of one field, valid or not."""

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
    """Returns the directory of a run with a checkpoint."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.write(TrainConfig(), CORPUS, {})
    (run_dir.checkpoints / "4").mkdir(parents=True)
    return run_dir


def test_every_field_is_either_free_or_fixed_when_a_run_resumes():
    names = set(flatten(TrainConfig().to_dict()))
    assert names == FREE | FIXED
    assert not FREE & FIXED
    rules = rules_of(TrainConfig())
    assert rules.keys() - names == {"optimizer.unset"}
    assert {name for name in names if rules[name].may == "yes"} == FREE
    by_extend = {"steps", "optimizer.extend", "optimizer.decay_steps"}
    assert {name for name in names if rules[name].may == "by extend"} == by_extend


def test_the_guide_has_the_rule_of_every_setting():
    page = (tiny.ROOT / "notes" / "guide" / "runs.md").read_text()
    documented = {}
    for flags, may, why in re.findall(r"^\| (`--.*`) \| (yes|no|by extend) \| (.*) \|$", page, re.MULTILINE):
        for each in re.findall(r"`(--[\w.-]+)`", flags):
            assert each not in documented
            documented[each] = may, why
    rules = rules_of(TrainConfig())
    named = set()
    for name in flatten(TrainConfig().to_dict()):
        # A flag such as --optimizer stands for those of its fields that have no row.
        row = flag(name) if flag(name) in documented else flag(name.partition(".")[0])
        named.add(row)
        may, why = documented[row]
        assert (may, why) == (rules[name].may, rules[name].why or why), name
    assert named == documented.keys()


def test_a_setting_may_not_change_unless_its_field_is_marked():
    @dataclasses.dataclass
    class Inner:
        free: int = may_change(1, "of a reason")
        fixed: int = 2

    @dataclasses.dataclass
    class Outer:
        inner: Inner = dataclasses.field(default_factory=Inner)
        steps: int = may_change(3, "of another", by_extend=True)

    expected = {"free": "yes", "fixed": "no", "steps": "by extend"}
    assert {name: rule.may for name, rule in resume_rules(Outer(), inline=["inner"]).items()} == expected
    assert resume_rules(Outer()).keys() == {"inner.free", "inner.fixed", "steps"}


@pytest.mark.parametrize("name", sorted(FREE - {"resume"}))
def test_a_free_field_may_change(run_dir, name):
    changed = config_with(name, TrainConfig())
    assert changed.to_dict() != TrainConfig().to_dict()
    run_dir.check(changed, FINGERPRINT)


@pytest.mark.parametrize("name", sorted(FIXED))
def test_a_fixed_field_may_not_change(run_dir, name):
    with pytest.raises(ConfigError, match=f"`{name}` is ") as error:
        run_dir.check(config_with(name, TrainConfig()), FINGERPRINT)
    assert error.value.field == "run_dir"


@pytest.mark.parametrize("name", ["seed", "optimizer.learning_rate", "preset"])
def test_a_directory_without_a_checkpoint_accepts_another_configuration(run_dir, name):
    changed = config_with(name, TrainConfig())
    with pytest.raises(ConfigError, match=f"`{name}` is "):
        run_dir.check(changed, FINGERPRINT)
    (run_dir.checkpoints / "4").rename(run_dir.checkpoints / "4.orbax-checkpoint-tmp")
    run_dir.check(changed, FINGERPRINT)


@pytest.mark.parametrize("name", ["04", "4.orbax-checkpoint-tmp", "damaged-4", "\u0664"])
def test_only_names_that_checkpoints_get_count_as_checkpoints(run_dir, name):
    assert run_dir.last_checkpoint() == 4
    (run_dir.checkpoints / "4").rename(run_dir.checkpoints / name)
    assert run_dir.last_checkpoint() is None


def test_a_reset_removes_what_a_run_wrote_and_keeps_its_configuration_and_lock(run_dir):
    kept = {run_dir.config, run_dir.origin, run_dir.lock_file}
    removed = {run_dir.checkpoints, run_dir.tensorboard, run_dir.metrics, run_dir.samples, run_dir.wandb}
    for directory in (run_dir.origin, run_dir.tensorboard, run_dir.path / "checkpoints.removed" / "3"):
        directory.mkdir(parents=True)
    for file in (run_dir.lock_file, run_dir.metrics, run_dir.samples, run_dir.wandb, run_dir.tensorboard / "events"):
        file.touch()
    assert {*run_dir.path.iterdir()} == kept | removed | {run_dir.path / "checkpoints.removed"}
    for _ in range(2):  # missing files are ignored
        run_dir.reset()
        assert {*run_dir.path.iterdir()} == kept


def test_a_sample_replaces_those_of_its_step_and_of_later_steps(run_dir):
    for step, text in ((2, "a"), (4, "b"), (6, "c"), (4, "d")):
        run_dir.add_sample(step, "prompt", text)
    assert run_dir.read_samples() == [{"step": step, "prompt": "prompt", "text": text} for step, text in ((2, "a"), (4, "d"))]


# --- Changed number of steps ---


@pytest.fixture
def resumed_rate(run_dir):
    """Returns a function that resumes a run of 200 steps after step 4. It returns the learning rate by step."""

    def resume(steps: int, **fields):
        config = run_dir.resumed(TrainConfig.from_fields(steps=steps, optimizer=OptimizerConfig(**fields)))
        run_dir.check(config, FINGERPRINT)
        run_dir.write(config, CORPUS, {})
        return learning_rate(config.optimizer, config.steps)

    run_dir.write(TrainConfig.from_fields(steps=200), CORPUS, {})
    return resume


RATE = learning_rate(TrainConfig.from_fields(steps=200).optimizer, 200)


def assert_rate(rate, expected, steps=(0, 19, 20, 150, 200, 300, 390, 400)):
    assert [float(rate(step)) for step in steps] == [float(expected(step)) for step in steps]


def test_extension_at_a_constant_rate_keeps_the_old_cosine(resumed_rate):
    for fields in ({"extend": "constant"}, {"extend": "constant"}, {}):  # twice with the flag, then without it
        assert_rate(resumed_rate(400, **fields), RATE)
    assert_rate(resumed_rate(600, extend="constant"), RATE)
    assert float(RATE(400)) == pytest.approx(3e-5)


def test_extension_along_a_cosine_spans_all_steps_and_keeps_the_old_warmup(resumed_rate):
    long = learning_rate(OptimizerConfig(warmup_steps=20), 400)
    for fields in ({"extend": "cosine"}, {"extend": "cosine"}, {}):
        assert_rate(resumed_rate(400, **fields), long)
    assert_rate(resumed_rate(600, extend="constant"), long)


def test_extend_has_no_effect_on_the_same_number_of_steps(resumed_rate):
    assert_rate(resumed_rate(200, extend="constant"), RATE)
    assert_rate(resumed_rate(200, extend="cosine"), RATE)
    with pytest.raises(ConfigError, match=r"`optimizer\.warmup_steps` is 10 and was 20"):
        resumed_rate(200, extend="cosine", warmup_steps=10)


@pytest.mark.parametrize("steps", [400, 100])
def test_another_number_of_steps_needs_extend(resumed_rate, steps):
    with pytest.raises(ConfigError, match=f"`steps` is {steps} and was 200 .*`optimizer.extend` to schedule or constant"):
        resumed_rate(steps)


@pytest.mark.parametrize(
    ("steps", "extend", "reason"),
    [
        (10, "no", "the warmup takes 20"),
        (10, "constant", "the warmup takes 20"),
        (10, "cosine", "the warmup takes 20"),
        (2, "no", "4 are done"),
    ],
)
def test_fewer_steps_than_the_saved_warmup_are_refused_as_a_wrong_number_of_steps(resumed_rate, steps, extend, reason):
    with pytest.raises(ConfigError) as error:
        resumed_rate(steps, extend=extend)
    assert f": `steps` is {steps} and was 200 ({reason}); use another" in str(error.value)


def test_a_run_can_be_shortened_but_not_below_its_completed_steps(resumed_rate):
    assert_rate(resumed_rate(50, extend="constant"), RATE, range(50))
    with pytest.raises(ConfigError, match=r"`steps` is 3 and was 50 \(4 are done"):
        resumed_rate(3, extend="constant", warmup_steps=0)


@pytest.mark.parametrize(("warmup", "fewest"), [(20, 20), (0, 4)], ids=["warmup", "done"])
def test_a_run_can_be_shortened_to_its_warmup_and_its_completed_steps(run_dir, resumed_rate, warmup, fewest):
    saved = TrainConfig.from_fields(steps=200, optimizer=OptimizerConfig(warmup_steps=warmup))
    run_dir.write(saved, CORPUS, {})
    with pytest.raises(ConfigError, match=f"`steps` is {fewest - 1} and was 200"):
        resumed_rate(fewest - 1, extend="constant")
    assert_rate(resumed_rate(fewest, extend="constant"), learning_rate(saved.optimizer, 200), range(fewest))


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
def test_settings_of_an_extended_run_are_fixed(resumed_rate, steps, fields, named):
    resumed_rate(400, extend="constant")
    with pytest.raises(ConfigError, match=f"`{named}` is "):
        resumed_rate(steps, **fields)


def test_a_run_of_an_earlier_version_resumes(run_dir):
    saved = json.loads(run_dir.config.read_text())
    del (
        saved["model"]["qk_norm"],
        saved["model"]["moe"],
        saved["precision"],
        saved["optimizer"]["extend"],
        saved["data_shuffle"],
        saved["freeze"],
    )  # fields that the earlier version lacks
    for name in ("name", "args", "groups", "schedule", "decay_fraction"):
        del saved["optimizer"][name]
    run_dir.config.write_text(json.dumps(saved))
    run_dir.check(TrainConfig(), FINGERPRINT)
    with pytest.raises(ConfigError, match="`precision` is "):  # the missing fields have the values of that version
        run_dir.check(TrainConfig.from_fields(precision="fp8"), FINGERPRINT)


def test_a_directory_with_the_config_file_of_another_program_is_refused(run_dir):
    (run_dir.checkpoints / "4").rmdir()
    run_dir.config.write_text('{"architectures": ["GPT"]}')
    with pytest.raises(ConfigError) as error:
        run_dir.check(TrainConfig(), FINGERPRINT)
    assert error.value.field == "run_dir"


def test_a_config_file_of_another_program_beside_checkpoints_leaves_the_schedule_alone_and_is_refused(run_dir):
    run_dir.config.write_text('{"architectures": ["GPT"]}')
    assert run_dir.resumed(TrainConfig()) == TrainConfig()
    with pytest.raises(ConfigError, match="holds a run of another configuration") as error:
        run_dir.check(TrainConfig(), FINGERPRINT)
    assert error.value.field == "run_dir"


@pytest.mark.parametrize("text", ["{", "[]", "\xff", '{"a":' * 100_000, '{"a":' * 1_200 + "1" + "}" * 1_200, "[" * 100_000])
def test_a_damaged_config_file_is_refused(run_dir, text):
    run_dir.config.write_bytes(text.encode("latin1"))
    with pytest.raises(ConfigError, match=r"its config\.json is damaged \(.*\); name another `run_dir`$") as error:
        run_dir.check(TrainConfig(), FINGERPRINT)
    assert error.value.field == "run_dir"


# --- The lock ---


@pytest.fixture
def warnings() -> list[str]:
    return []


def test_a_second_process_is_refused_with_the_id_and_host_of_the_first(tmp_path, warnings):
    with locked(RunDir(tmp_path / "run"), warnings.append):
        code = f"""if True:
            from pathlib import Path
            from jgraph.train._lock import locked
            from jgraph.train.rundir import RunDir
            try:
                with locked(RunDir(Path({str(tmp_path / "run")!r})), print):
                    pass
            except ValueError as e:
                print(e)
        """
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert f"process {os.getpid()} on {socket.gethostname()} is writing there" in output
    assert len(output.splitlines()) == 1
    assert warnings == []


def test_the_lock_and_an_empty_run_directory_are_removed_at_the_end(tmp_path, warnings):
    for _ in range(2):
        with locked(RunDir(tmp_path / "run"), warnings.append):
            assert (tmp_path / "run").is_dir()
    assert not (tmp_path / "run").exists()
    with pytest.raises(ZeroDivisionError), locked(RunDir(tmp_path / "run"), warnings.append):
        raise ZeroDivisionError
    assert not (tmp_path / "run").exists()
    assert warnings == []


@pytest.fixture
def stale_lock(tmp_path):
    """Returns a function that writes the lock file of a killed process."""

    def leave(pid: int, host: str) -> RunDir:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "lock").write_text(json.dumps({"pid": pid, "host": host}) + "\n")
        return RunDir(tmp_path / "run")

    return leave


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_lock_of_a_killed_process_is_taken_over(stale_lock, warnings):
    run_dir = stale_lock(dead_pid(), socket.gethostname())
    run_dir.check(TrainConfig(), FINGERPRINT)
    with locked(run_dir, warnings.append):
        assert json.loads(run_dir.lock_file.read_text())["pid"] == os.getpid()
    assert warnings == []


def test_a_lock_of_another_machine_is_taken_over_with_a_warning(stale_lock, warnings):
    with locked(stale_lock(1, "elsewhere"), warnings.append):
        pass
    assert len(warnings) == 1
    assert "process 1 on elsewhere" in warnings[0]


@pytest.mark.parametrize("then", ["removed", "replaced"])
def test_a_lock_file_removed_by_its_owner_at_the_same_time_is_created_again(tmp_path, warnings, monkeypatch, then):
    run_dir, flock, calls = RunDir(tmp_path / "run"), fcntl.flock, []

    def while_the_owner_ends(file, operation):
        calls.append(file)
        if len(calls) == 1:
            run_dir.lock_file.unlink()
            if then == "replaced":
                run_dir.lock_file.touch()
        flock(file, operation)

    monkeypatch.setattr("fcntl.flock", while_the_owner_ends)
    with locked(run_dir, warnings.append):
        assert json.loads(run_dir.lock_file.read_text())["pid"] == os.getpid()
        with pytest.raises(ConfigError, match="is writing there"), locked(RunDir(tmp_path / "run"), warnings.append):
            pass
    assert warnings == []


@pytest.fixture
def without_locks(monkeypatch):
    """Simulates a file system without locks."""
    monkeypatch.setattr("fcntl.flock", no_flock)


def no_flock(file, operation):
    raise OSError(38, "Function not implemented")


@pytest.mark.parametrize("holder", [(os.getpid(), socket.gethostname()), (1, "elsewhere")])
def test_without_file_locks_the_owner_in_the_lock_file_is_respected(without_locks, stale_lock, warnings, holder):
    run_dir = stale_lock(*holder)
    with (
        pytest.raises(ConfigError, match=f"process {holder[0]} on {holder[1]} .* remove ") as error,
        locked(run_dir, warnings.append),
    ):
        pass
    assert error.value.field == "run_dir"
    assert run_dir.lock_file.exists()


def test_without_file_locks_a_process_of_another_user_holds_its_lock_file(without_locks, stale_lock, monkeypatch):
    def kill(pid, signal):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "kill", kill)
    with (
        pytest.raises(ConfigError, match=f"process 1 on {socket.gethostname()} is writing there"),
        locked(stale_lock(1, socket.gethostname()), print),
    ):
        pass


def test_an_error_of_the_disk_while_it_locks_is_reported_with_the_lock_file(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("fcntl.flock", flock)
    with (
        pytest.raises(ConfigError, match=r"^`run_dir` is \S+/lock: cannot be written \(Input/output error\)$"),
        locked(RunDir(tmp_path / "run"), print),
    ):
        pass


def test_without_file_locks_the_lock_file_of_a_dead_process_is_taken_over(without_locks, stale_lock, warnings):
    with locked(stale_lock(dead_pid(), socket.gethostname()), warnings.append):
        pass
    assert warnings == []


@pytest.mark.parametrize("is_stale", [False, True], ids=["new", "after a crash"])
@pytest.mark.parametrize("locks", ["flock", "none"])
def test_of_two_starts_at_the_same_time_one_gets_the_directory(tmp_path, monkeypatch, warnings, locks, is_stale):
    """The second start happens before each line of the first one in turn."""
    if locks == "none":
        monkeypatch.setattr("fcntl.flock", no_flock)
    stale, tracer, line = json.dumps({"pid": dead_pid(), "host": socket.gethostname()}), sys.gettrace(), 0
    run_dir, held, entered, seen = RunDir(tmp_path / "run"), contextlib.ExitStack(), [], 0

    def start():
        with contextlib.suppress(ConfigError):
            entered.append(held.enter_context(locked(run_dir, warnings.append)))

    def trace(frame, event, arg):
        nonlocal seen
        if frame.f_code.co_filename != _lock.__file__:
            return None
        seen += event == "line"
        if event == "line" and seen == line:
            start()
        return trace

    while line <= seen:
        line, seen = line + 1, 0
        entered.clear()
        run_dir.path.mkdir()
        if is_stale:
            run_dir.lock_file.write_text(stale)
        sys.settrace(trace)
        try:
            start()
        finally:
            sys.settrace(tracer)
            held.close()
        assert len(entered) == 1, f"before line {line}"
        assert not run_dir.path.exists()
    assert line > 10
    assert warnings == []


def test_without_file_locks_a_process_that_was_killed_while_it_started_is_named(without_locks, tmp_path, warnings):
    run_dir = RunDir(tmp_path)
    (tmp_path / "lock.tmp").touch()
    run_dir.check(TrainConfig(), FINGERPRINT)
    with (
        pytest.raises(ConfigError, match=r"another process is .*; if it has ended, remove .*lock\.tmp"),
        locked(run_dir, print),
    ):
        pass
    (tmp_path / "lock.tmp").unlink()
    with locked(run_dir, warnings.append):
        pass
    assert warnings == []


def test_the_lock_of_another_process_is_not_removed_at_the_end(tmp_path, warnings):
    run_dir = RunDir(tmp_path)
    with locked(run_dir, warnings.append):
        run_dir.lock_file.unlink()  # by the user
        run_dir.lock_file.write_text("another process")
    assert run_dir.lock_file.read_text() == "another process"
