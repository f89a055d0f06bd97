"""Bad input ends with exit code 2 and one line with the flag, the value and the allowed values. No traceback is printed."""

import dataclasses
import importlib
import re
import resource
import shlex
import shutil
import string
import subprocess
import sys
from collections import namedtuple
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tyro
from tokenizers import Tokenizer, models

from jgraph import cli
from jgraph.data import write_tokens
from jgraph.errors import ConfigError
from jgraph.train.__main__ import ELSEWHERE, main, parse
from jgraph.train._memory import check_step, memory_errors
from jgraph.train.config import FIELDS, InputConfig, TrainConfig
from jgraph.train.presets import PRESETS
from jgraph.train.rundir import RunDir
from jgraph.train.setup import TrainSetup
from jgraph.xla import CaptureReport
from jgraph.xla._buffers import Buffers
from jgraph.xla.explain import Memory
from tests import tiny


@pytest.fixture
def refused(capsys, tmp_path):
    """Returns a function that runs tiny flags and more, and returns the one line on stderr without the program's name."""

    def run(*flags: str) -> str:
        assert tiny.train(tmp_path / "run", *flags) == 2
        return one_line(capsys.readouterr().err)

    return run


def one_line(stderr: str) -> str:
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("jgraph.train: error: ")
    return lines[0].removeprefix("jgraph.train: error: ")


def assert_names(line: str, *parts: str):
    missing = [part for part in parts if part not in line]
    assert not missing, f"{line!r} lacks {missing}"


def test_an_unknown_preset_is_refused_with_the_list_of_presets(refused):
    assert_names(refused("--preset", "gpt-9"), "--preset", "gpt-9", *PRESETS)


def test_an_unknown_flag_is_refused_with_the_closest_one(refused):
    assert_names(refused("--stepps", "3"), "--stepps", "3", "did you mean --steps INT?")


@pytest.mark.parametrize(
    ("flag", "suggestion"),
    [
        ("--lr=1", "--optimizer.learning-rate"),
        ("--max_steps", "--steps"),
        ("--fp8", "--precision fp8"),
        ("--output-dir", "--run-dir"),
    ],
)
def test_a_flag_of_another_trainer_is_refused_with_the_corresponding_flag(refused, flag, suggestion):
    assert_names(refused(flag), flag.partition("=")[0], f"use {suggestion}")


def test_every_suggestion_for_a_flag_of_another_trainer_exists(capsys):
    assert parse(["--help"]) is None
    flags = set(re.findall(r"--[a-z0-9.-]+", capsys.readouterr().out))
    assert {re.split(r"[ ,]", suggestion)[0] for suggestion in ELSEWHERE.values()} <= flags
    assert not flags & set(ELSEWHERE)


def test_a_bad_choice_is_refused_with_the_choices(refused):
    assert_names(refused("--graph", "half"), "--graph", "half", "auto", "off", "full")


@pytest.mark.parametrize(("flag", "kind"), [("--steps", "INT"), ("--fsdp", "INT|{auto}")])
def test_a_value_of_the_wrong_type_is_refused_with_the_type(refused, flag, kind):
    line = refused(flag, "many")
    assert_names(line, flag, "'many'")
    assert line.endswith(f"; takes {flag} {kind}")


def test_a_flag_without_a_value_is_refused(refused):
    assert_names(refused("--preset"), "--preset", "Expected 1 value")


@pytest.mark.parametrize("flag", ["--steps", "--batch-size", "--checkpoint-keep", "--optimizer.learning-rate"])
def test_a_size_of_zero_is_refused(refused, flag):
    assert_names(refused(flag, "0"), flag, "is 0", "positive")


def test_a_missing_data_file_is_refused_with_the_corpora(refused):
    assert_names(refused("--data", "no/such.txt"), "--data", "no/such.txt", "no such file", "python-docs")


@pytest.fixture
def token_directory(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 200, 20_000)
    (tmp_path / "tokens").mkdir()
    for side in ("train", "heldout"):
        write_tokens(tmp_path / "tokens" / f"{side}-0.bin", [tokens], vocab_size=256)
    return tmp_path / "tokens"


@pytest.mark.long
@pytest.mark.parametrize("side", ["train", "heldout"])
def test_a_token_file_with_ids_beyond_its_vocabulary_is_refused_with_the_first_bad_id(refused, token_directory, side):
    path = token_directory / f"{side}-0.bin"
    contents = bytearray(path.read_bytes())
    contents[128:] = b"\xff\xff" * 20_000
    path.write_bytes(contents)
    line = refused("--data", str(token_directory), "--steps", "3")
    assert re.search(rf"{side}-0.bin: token \d+ is 65535: must be in \[0, 256\)", line)


def test_an_empty_data_file_is_refused(refused, tmp_path):
    (tmp_path / "empty.txt").touch()
    assert_names(refused("--data", str(tmp_path / "empty.txt")), "--data", "empty.txt", "empty")


def test_data_shorter_than_a_sequence_is_refused_with_the_needed_length(refused, tmp_path):
    (tmp_path / "short.txt").write_text("one line\nand another\n" * 3)
    assert_names(refused("--data", str(tmp_path / "short.txt")), "--data", "short.txt", "--seq-len 32", "at least 33")


@pytest.mark.parametrize(
    ("line", "found"), [('{"text": 5}', "a number"), ('{"text": null}', "null"), ('{"text": ["a"]}', "an array")]
)
def test_a_json_field_of_another_type_is_refused_with_file_line_field_and_type(refused, tmp_path, line, found):
    path = tmp_path / "pages.jsonl"
    path.write_text(f'{{"text": "first"}}\n{line}\n')
    allowed = "must be a string, or set --data.field to another field"
    assert refused("--data", str(path)) == f"--data is {path}: line 2: field 'text' is {found}: {allowed}"


@pytest.mark.parametrize("flag", ["--run-dir", "--compile-cache"])
def test_a_directory_that_cannot_be_created_is_refused_with_its_flag(refused, tmp_path, flag):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "inside"
    assert refused(flag, str(path)) == f"{flag} is {path}: cannot be written (Not a directory)"


@pytest.mark.parametrize("patterns", [("*",), ("blocks/*", "[!b]*")])
def test_freezing_every_parameter_is_refused(refused, tmp_path, patterns):
    assert_names(refused("--steps", "2", "--freeze", *patterns), "--freeze is", *patterns, "must leave at least one parameter")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "need"),
    [
        (("--fsdp", "16"), "--fsdp 16 needs 16"),
        (("--dp", "16"), "--dp 16 needs 16"),
        (("--ep", "16"), "--ep 16 needs 16"),
        (("--dp", "4", "--fsdp", "4"), "--dp 4 --fsdp 4 needs 16"),
        (("--pp", "4", "--fsdp", "8"), "--pp 4 --fsdp 8 needs 32"),
        (("--pp", "16", "--num-microbatches", "16"), "--pp 16 needs 16"),
    ],
)
def test_too_few_devices_are_reported_before_an_indivisible_batch(refused, flags, need):
    assert refused(*flags) == f"{need} devices, but only {jax.device_count()} are available"


def test_an_axis_that_is_auto_counts_as_one_device_until_the_devices_are_known(refused):
    assert_names(refused("--fsdp", "auto", "--num-microbatches", "3"), "--num-microbatches is 3", "--batch-size 4")
    assert refused("--fsdp", "auto", "--dp", "16") == f"--dp 16 needs 16 devices, but only {jax.device_count()} are available"


def test_an_indivisible_batch_is_refused_if_there_are_enough_devices(refused):
    assert_names(refused("--fsdp", "8"), "--fsdp is 8", "--batch-size 4")


def test_the_number_of_devices_is_not_checked_before_processes_connect(refused):
    processes = ("--distributed.coordinator", "host:1", "--distributed.num-processes", "2", "--distributed.process-id", "0")
    assert_names(refused("--fsdp", "16", *processes), "--fsdp is 16", "--batch-size 4")


def test_a_number_of_microbatches_that_does_not_divide_the_batch_is_refused(refused):
    assert_names(refused("--num-microbatches", "3"), "--num-microbatches", "is 3", "divisor of --batch-size 4")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--batch-size 100000000", "with --seq-len 32 it has 3200000000"),
        ("--batch-size 1000000000000 --num-microbatches 1000000000", "its tokens of"),
        ("--batch-size 60000 --seq-len 32000 --model.module tests.faulty:Bigram", " GiB of this machine"),
    ],
)
def test_a_batch_too_large_for_any_machine_is_refused_with_its_flag(refused, tmp_path, flags, message):
    line = refused(*flags.split())
    assert line.startswith("--batch-size is ")
    assert message in line
    assert not (tmp_path / "run").exists()


WRITING = {
    "train": ("jgraph.train.__main__", "--run-dir", "--run-dir /proc/none/x"),
    "the cache": ("jgraph.train.__main__", "--compile-cache", "--compile-cache /proc/none/x --run-dir {tmp_path}/run"),
    "report": ("jgraph.report.__main__", "--to", "{tmp_path} --to /proc/none/x"),
    "data": (
        "jgraph.data.__main__",
        "--out",
        "make --text {tmp_path}/text.txt --tokenizer {tmp_path}/bpe --out /proc/none/x",
    ),
}


@pytest.mark.parametrize("name", WRITING)
def test_an_output_that_cannot_be_written_is_refused_with_its_flag(tmp_path, capsys, name):
    module, flag, args = WRITING[name]
    RunDir(tmp_path).write(TrainConfig(), {}, {})
    (tmp_path / "text.txt").write_text("some text, and more of it\n" * 9)
    Tokenizer(models.BPE({character: i for i, character in enumerate(string.printable)}, [])).save(f"{tmp_path}/bpe")
    assert importlib.import_module(module).main(shlex.split(args.format(tmp_path=tmp_path))) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.match(rf"jgraph\.\w+: error: {flag}(:| is) /proc/none.* cannot be written.*No such file or directory", err)


def test_a_full_disk_is_reported_with_the_file_and_its_flag(tmp_path, capsys):
    RunDir(tmp_path).write(TrainConfig(), {}, {})
    (tmp_path / "text.txt").write_text("some text, and more of it\n" * 99)
    Tokenizer(models.BPE({character: i for i, character in enumerate(string.printable)}, [])).save(f"{tmp_path}/bpe")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, flag in (("report", "--to"), ("data", "--out")):
        module, _, args = WRITING[name]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            args = args.replace("/proc/none/x", f"{tmp_path}/{name}").format(tmp_path=tmp_path)
            assert importlib.import_module(module).main(shlex.split(args)) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        error = f"jgraph.{name}: error: {flag} is {tmp_path}/{name}: cannot be written (File too large"
        assert capsys.readouterr().err.startswith(error)


def test_a_full_disk_behind_standard_output_is_reported_in_one_line():
    command = [sys.executable, "-m", "jgraph.inspect", "schedule", "1f1b", "--pp", "2", "--microbatches", "2"]
    with open("/dev/full", "w") as full:
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    line = "standard output or a temporary file cannot be written: No space left on device"
    assert (process.returncode, process.stderr) == (2, f"jgraph.inspect: error: {line}\n")


def test_a_vocabulary_smaller_than_a_token_id_is_refused(refused):
    assert_names(refused("--model.vocab-size", "64"), "--model.vocab-size", "64", "--data python-docs", "at least")


def test_a_head_size_without_cudnn_support_is_refused(refused):
    line = refused("--model.attention", "cudnn", "--model.d-model", "40")
    assert_names(line, "--model.num-heads", "head size 20", "multiple of 8", "--model.attention xla")


def test_cudnn_attention_without_an_nvidia_gpu_is_refused(refused):
    assert_names(
        refused("--model.attention", "cudnn", "--model.compute-dtype", "bfloat16"), "--model.attention", "cudnn", "auto or xla"
    )


def test_an_unknown_xla_option_is_refused_with_the_closest_one(refused):
    line = refused("--xla-options", "xla_gpu_graph_min_graph_sise=1")
    assert_names(line, "--xla-options", "xla_gpu_graph_min_graph_sise", "did you mean xla_gpu_graph_min_graph_size?")


@pytest.mark.parametrize("module", ["no.such.module:GPT", "jgraph_models.gpt:NoSuchClass", "models.gpt"])
def test_a_model_that_cannot_be_imported_is_refused(refused, module):
    assert_names(refused("--model.module", module), "--model.module", module, "package.module:Class")


def test_a_run_directory_of_another_configuration_is_refused_with_every_difference(refused, tmp_path):
    assert tiny.train(tmp_path / "run", "--steps", "2") == 0
    line = refused("--steps", "3", "--model.d-ff", "128", "--log-every", "7")
    assert_names(line, "--run-dir", "--steps is 3 and was 2", "--model.d-ff is 128 and was 64", "--no-resume")
    assert "log-every" not in line


@pytest.mark.long
def test_a_run_directory_of_another_text_is_refused(refused, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"line {i}" for i in range(200)))
    assert tiny.train(tmp_path / "run", "--steps", "2", "--data", str(text)) == 0
    text.write_text("\n".join(f"line {i}" for i in range(201)))
    assert_names(refused("--steps", "2", "--data", str(text)), "--run-dir", "--data", "fingerprint")


@pytest.mark.parametrize("flag", ["--resume", "--no-resume"])
def test_a_directory_with_other_files_is_refused_and_not_changed(refused, tmp_path, flag):
    mine = tmp_path / "run" / "checkpoints" / "thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert_names(refused(flag), "--run-dir", str(tmp_path / "run"), "must be a new or empty directory", "no config.json")
    assert mine.read_text() == "mine"


def test_a_damaged_config_file_is_refused(refused, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{")
    assert_names(refused(), "--run-dir", "config.json", "damaged")


def test_too_little_space_is_refused_with_both_sizes_before_anything_is_written(refused, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 0, 1000))
    assert_names(refused(), "--run-dir", str(tmp_path / "run"), "bytes", "1,000 are free", "--checkpoint-keep")
    assert not (tmp_path / "run").exists()


def test_a_file_in_place_of_the_run_directory_is_refused(refused, tmp_path):
    (tmp_path / "file").touch()
    assert_names(refused("--run-dir", str(tmp_path / "file")), "--run-dir", "a file")


def test_a_path_with_a_glob_is_refused_before_anything_is_written(refused, tmp_path):
    assert_names(refused("--run-dir", str(tmp_path / "run[1]")), "--run-dir: checkpoints in ", "run[1]", "its path has [")
    assert not (tmp_path / "run[1]").exists()


def test_a_process_ends_with_code_2_and_one_line(tmp_path):
    process = tiny.start(tmp_path / "run", "--data", "no/such.txt")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert_names(one_line(err), "--data", "no/such.txt")
    assert "Traceback" not in out


@pytest.mark.parametrize("name", ["OtherArguments", "NoModule", "WithoutLoss", "VectorLoss", "BadLoss"])
def test_a_model_that_cannot_be_trained_is_refused(refused, tmp_path, name):
    assert_names(refused("--model.module", f"tests.odd:{name}"), "--model.module", f"tests.odd:{name}: must ")
    assert not (tmp_path / "run").exists()


def test_an_error_in_model_code_is_reported_with_its_file(refused):
    assert_names(refused("--model.module", "tests.odd:BadLoss"), "TypeError", "tests/odd.py:")
    assert_names(refused("--model.module", "tests.unimportable:GPT"), "ZeroDivisionError: no such luck", "unimportable.py:3")


@pytest.mark.parametrize("pipeline", [(), ("--schedule", "1f1b")])
def test_a_loss_chunk_that_does_not_divide_the_tokens_is_refused_with_its_flag(refused, pipeline):
    assert_names(refused("--model.loss-chunk", "7", *pipeline), "--model.loss-chunk is 7: must be a divisor of the ")


@pytest.mark.long
@pytest.mark.parametrize("platform", ["cuda", pytest.param("abacus", marks=pytest.mark.long)])
def test_a_missing_platform_is_refused_in_one_line(tmp_path, monkeypatch, platform):
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, _, err = tiny.finish(tiny.start(tmp_path / "run"), seconds=120)
    assert code == 2
    assert_names(one_line(err), f"JAX_PLATFORMS is {platform}")


@pytest.mark.parametrize(
    "module", [pytest.param("jgraph.train", marks=pytest.mark.long), "jgraph.inspect", "jgraph.aot", "jgraph"]
)
def test_a_closed_output_pipe_ends_a_command_silently(tmp_path, module):
    command = {
        "jgraph.train": [*tiny.FLAGS, "--run-dir", str(tmp_path / "run"), "--steps", "3", "--data", "synthetic"],
        "jgraph.inspect": ["schedule", "1f1b", "--pp", "4", "--microbatches", "8"],
        "jgraph.aot": ["--help"],
        "jgraph": ["--help"],
    }[module]
    process = subprocess.Popen(
        [sys.executable, "-m", module, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (141, "")


def test_help_is_grouped_names_the_presets_and_does_not_import_jax():
    code = (
        "import sys\nfrom jgraph.train.__main__ import main\ncode = main(['--help'])\nsys.exit(code or ('jax' in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for text in ("model options", "optimizer options", "gpt-1b3", "--graph {auto,off,full}", "--resume, --no-resume"):
        assert text in result.stdout


def test_every_preset_parses_to_itself_with_a_run_directory_named_after_it():
    for number, (name, config) in enumerate(PRESETS.items()):
        assert parse([f"--preset={name}"] if number % 2 else ["--preset", name]) == config
        assert config.output.run_dir == f"runs/{name}"


def test_a_flag_overrides_the_preset_in_any_order():
    config = parse(["--steps", "7", "--preset", "gpt-124m", "--model.num-layers", "2", "--run-dir", "elsewhere"])
    assert config is not None
    assert (config.steps, config.model.num_layers, config.model.d_model, config.output.run_dir) == (7, 2, 768, "elsewhere")


def test_the_warmup_of_a_preset_shrinks_with_the_run_and_a_given_warmup_does_not():
    shrunk, given = parse(["--steps", "7"]), parse(["--steps", "60", "--optimizer.warmup-steps", "60"])
    assert shrunk is not None
    assert given is not None
    assert (shrunk.optimizer.warmup_steps, given.optimizer.warmup_steps) == (0, 60)
    with pytest.raises(ConfigError) as error:
        parse(["--steps", "7", "--optimizer.warmup-steps", "8"])
    assert error.value.field == "optimizer.warmup_steps"


@pytest.mark.parametrize("flag", ["--optimizer.beta1=0.9", "--optimizer.beta1 0.9"])
def test_a_flag_with_the_default_value_does_not_follow_the_optimizer(flag):
    config = parse(["--optimizer.name", "adan", *flag.split()])
    assert config is not None
    assert (config.optimizer.beta1, config.optimizer.beta2) == (0.9, 0.92)


def test_a_parser_message_without_a_box_is_printed_in_one_line(monkeypatch, capsys):
    def refuse(*args, **kwargs):
        print("plain\nwords", file=sys.stderr)
        raise SystemExit(2)

    monkeypatch.setattr(tyro, "cli", refuse)
    assert main([]) == 2
    assert one_line(capsys.readouterr().err) == "plain words"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            3,
            (
                "--batch-size is 4",
                "12.0 GiB",
                "state and batch 3.0 GiB, temporaries 9.0 GiB",
                "8.0 GiB",
                "--remat layer",
                "python -m jgraph.plan lists the layouts that fit",
                "2 x 3 GiB",
            ),
        ),
        (9, ("--fsdp", "the state and batch need 9.0 GiB of each device", "8.0 GiB", "--lora.rank", "jgraph.plan")),
    ],
)
def test_a_step_that_does_not_fit_names_what_needs_the_memory(arguments, words, monkeypatch):
    memory = Memory(arguments=arguments << 30, outputs=0, aliased=0, temporaries=9 << 30)
    buffers = (Buffers(2, 3 << 30, "f32[9]", "mul at model.py:1"),)
    step = SimpleNamespace(memory=memory, capture=CaptureReport(1, 1, 1, buffers=buffers))
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 8 << 30}, device_kind="GPU")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with pytest.raises(ConfigError) as error:
        check_step(InputConfig(batch_size=4), step, 1)
    assert_names(cli.as_flags(str(error.value), FIELDS), *words)
    if arguments < 8:
        step.capture = CaptureReport(1, 1, 1, buffers=(dataclasses.replace(buffers[0], scope="all-gather"),))
        with pytest.raises(ConfigError, match=r"or `gather_per` pass; .* are 2 x 3 GiB f32\[9\] all-gather: mul at model.py:1"):
            check_step(InputConfig(batch_size=4), step, 1)
    memory = Memory(arguments=1, outputs=0, aliased=0, temporaries=2)
    check_step(InputConfig(batch_size=4), SimpleNamespace(memory=memory, capture=None), 1)


def test_a_step_with_more_pinned_memory_than_xla_allocates_names_the_variable(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=dict, device_kind="GPU")])
    step = SimpleNamespace(memory=Memory(1, 0, 0, 1, host=40 << 30), capture=None)
    check_step(InputConfig(batch_size=4), step, 1)
    must = r"put 80.0 GiB into host memory: .* 64.0 GiB .* set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=88"
    with pytest.raises(ConfigError, match=must):
        check_step(InputConfig(batch_size=4), step, 2)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "88")
    check_step(InputConfig(batch_size=4), step, 2)


def test_another_error_of_a_device_is_not_reported_as_too_little_memory(tmp_path):
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match=r"^INTERNAL: ") as error,
        memory_errors(InputConfig(), RunDir(tmp_path)),
    ):
        raise jax.errors.JaxRuntimeError("INTERNAL: an illegal memory access")
    assert error.value.__cause__ is None


@pytest.mark.long
def test_too_little_device_memory_is_reported_in_one_line(refused, monkeypatch):
    def exhausted(setup):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.")

    monkeypatch.setattr(TrainSetup, "compile_step", exhausted)
    assert_names(refused(), "--batch-size is 4", "--num-microbatches", "99 bytes")
