"""The `jgraph` command, and errors of all commands except `train`."""

import importlib
import re
import string
import subprocess
import sys
import tomllib

import pytest
from tokenizers import Tokenizer, models

from jgraph import __main__ as command, aot, evaluate, sample
from jgraph.data.__main__ import main as data
from jgraph.data._texts import check_empty
from jgraph.errors import ConfigError, download_hint, os_errors
from jgraph.inspect.__main__ import main as inspect_main
from jgraph.interop.write import write
from jgraph.profile.__main__ import main as profile
from jgraph.train.__main__ import main as train
from tests import tiny

NAMES = ("train", "sample", "evaluate", "export", "report", "compare", "inspect", "profile", "data", "aot")


def main_of(name: str):
    package = importlib.import_module(f"jgraph.{name}")
    return package.main if hasattr(package, "main") else importlib.import_module(f"jgraph.{name}.__main__").main


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(capsys, args):
    assert command.main(args) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [words[0] for words in lines if words[:1] and words[0] in NAMES and words[-1].endswith(".")] == list(NAMES)


def test_help_imports_no_heavy_package():
    heavy = ("jax", "numpy", "tyro", "rich")
    code = f"import sys\nfrom jgraph.__main__ import main\nmain(['--help'])\nprint([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def test_the_printed_version_is_the_package_version(capsys):
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"jgraph {importlib.import_module('jgraph').__version__}\n"


def test_the_installed_script_is_the_command(monkeypatch):
    ran = []
    monkeypatch.setattr(command, "end_with", ran.append)
    scripts = tomllib.loads((tiny.ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["jgraph"].partition(":")
    getattr(importlib.import_module(module), name)()
    assert ran == [command.main]


@pytest.mark.parametrize(
    ("args", "hint"),
    [(["trian"], "did you mean train?"), (["eval"], "did you mean evaluate?"), (["--preset", "x"], "--preset")],
)
def test_an_unknown_command_is_refused_in_one_line_with_the_nearest_name(capsys, args, hint):
    assert command.main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jgraph: error: ")
    assert hint in line
    assert all(name in line for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_command_has_the_help_of_its_module_with_its_own_usage_line(capsys, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "400")
    assert main_of(name)(["--help"]) == 0
    of_module = capsys.readouterr().out
    assert f"usage: python -m jgraph.{name} " in of_module
    assert command.main([name, "--help"]) == 0
    of_command = capsys.readouterr().out
    assert f"usage: jgraph {name} " in of_command
    assert f"\n    python -m jgraph.{name} " not in of_command
    # The help of an option may refer to another command by its module.
    as_command, as_module = (re.sub(r"python -m jgraph\.", "jgraph ", text).split() for text in (of_command, of_module))
    assert as_command == as_module


@pytest.mark.parametrize("name", NAMES)
def test_a_command_fails_like_its_module(capsys, name):
    codes, lines = set(), set()
    for start, prefix in ((main_of(name), f"jgraph.{name}"), (lambda args: command.main([name, *args]), f"jgraph {name}")):
        codes.add(start(["--no-such-flag"]))
        (line,) = capsys.readouterr().err.splitlines()
        lines.add(line.removeprefix(f"{prefix}: error: "))
    assert codes == {2}
    assert len(lines) == 1


def test_the_usage_line_of_the_module_names_the_module():
    result = subprocess.run([sys.executable, "-m", "jgraph", "aot", "--help"], capture_output=True, text=True, check=True)
    assert "usage: python -m jgraph aot " in result.stdout
    assert "python -m jgraph aot install" in result.stdout


# --- Paths ---


def refused(capsys, main, *args: object) -> str:
    assert main([str(arg) for arg in args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.partition(": error: ")[2]


@pytest.fixture
def tokenizer_file(tmp_path):
    """Writes a tokenizer.json with one token per ASCII character. Returns its path."""
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE({character: i for i, character in enumerate(string.printable)}, [])).save(str(path))
    return path


@pytest.fixture
def blocked(tmp_path):
    """Returns a path that cannot be created because its parent is a file."""
    (tmp_path / "file").write_text("a text\n" * 100)
    return tmp_path / "file" / "inside"


@pytest.mark.long
def test_an_output_path_that_cannot_be_created_is_refused_with_its_flag(capsys, blocked, tokenizer_file):
    commands = [
        (data, ("make", "--text", blocked.parent, "--tokenizer", tokenizer_file), "--out"),
        (aot.main, ("install",), "--directory"),
    ]
    for main, args, flag in commands:
        line = refused(capsys, main, *args, flag, blocked)
        assert re.fullmatch(rf"{flag} is {blocked}: cannot be written \((Not a directory|File exists)\)", line)


def test_a_profile_directory_that_cannot_be_created_is_refused_with_its_flag(capsys, blocked, monkeypatch):
    monkeypatch.setattr("jgraph.profile.report.of_trace", lambda *args, **choices: {})
    line = refused(capsys, profile, blocked.parent, "--program", "step.txt", "--steps", "2", "--out", blocked)
    assert line == f"--out is {blocked}: cannot be written (Not a directory)"


def test_an_input_path_that_cannot_be_read_is_refused_with_its_flag(capsys, tmp_path, tokenizer_file):
    unreadable = "/proc/self/mem"
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("a text")
    for flag, args in {
        "--text": ("--text", unreadable, "--tokenizer", tokenizer_file),
        "--tokenizer": ("--text", text, "--tokenizer", unreadable),
    }.items():
        line = refused(capsys, data, "make", *args, "--out", out)
        assert line == f"{flag} is {unreadable}: cannot be read (Input/output error)"
    assert not out.exists()


@pytest.mark.parametrize("name", ["no/such.csv", "no/such.txt"])
def test_a_schedule_file_that_cannot_be_read_is_refused_with_its_path(capsys, name):
    assert refused(capsys, inspect_main, "schedule", name).startswith(f"{name}: ")


def test_a_model_folder_that_cannot_be_created_is_refused_with_its_argument(blocked):
    check_empty(blocked, field="to")
    with (
        pytest.raises(ConfigError, match=r"`to` is .*inside: cannot be written \(Not a directory\)") as error,
        os_errors("to", blocked),
    ):
        write(blocked, {}, {}, lambda name: None, dtype="float32")
    assert error.value.field == "to"


def test_a_json_field_that_is_missing_is_refused_with_the_flag_of_the_command(capsys, tmp_path, tokenizer_file):
    (tmp_path / "a.jsonl").write_text('{"body": "one", "id": 1}\n')
    args = ("--text", tmp_path / "a.jsonl", "--tokenizer", tokenizer_file, "--out", tmp_path / "out")
    line = refused(capsys, data, "make", *args)
    assert line.endswith("line 1 has the fields 'body', 'id', not 'text': set --field to the field with the text")


# --- Ids of the Hugging Face Hub ---

MODEL = "meta-llama/Llama-3.2-1B"
DOWNLOAD = f"hf download {MODEL} --local-dir Llama-3.2-1B"


@pytest.mark.parametrize(
    ("main", "args"),
    [
        (train, ("--init-from", MODEL)),
        (sample.main, (MODEL, "--prompt", "a")),
        (evaluate.main, (MODEL, "--data", "python-docs")),
        (sample.main, (f"https://huggingface.co/{MODEL}", "--prompt", "a")),
    ],
)
def test_a_model_id_is_refused_with_the_command_that_downloads_it(capsys, main, args):
    line = refused(capsys, main, *args)
    assert "no such folder" in line
    assert line.endswith(DOWNLOAD)


def test_a_dataset_id_and_a_tokenizer_id_are_refused_with_the_command_that_downloads_them(capsys, tmp_path):
    (tmp_path / "text.txt").write_text("a text")
    line = refused(capsys, train, "--data", "roneneldan/TinyStories")
    assert line.endswith("hf download roneneldan/TinyStories --repo-type dataset --local-dir TinyStories")
    args = ("--text", tmp_path / "text.txt", "--tokenizer", MODEL, "--out", tmp_path / "out")
    assert refused(capsys, data, "make", *args).endswith(DOWNLOAD)


def test_a_model_id_as_a_run_is_refused_with_the_flag_for_models(capsys):
    assert refused(capsys, train, "--continue-from", MODEL).endswith("for a model of the Hugging Face Hub, use --init-from")


@pytest.mark.parametrize("path", ["tests/missing", "no/such.txt", "one", "a/b/c", "./runs/first", "/runs/first", "~/a"])
def test_a_path_that_is_not_an_id_has_no_download_hint(path, tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    assert download_hint(path) == ""
