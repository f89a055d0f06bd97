"""`python -m jgraph.inspect`: its output. Bad input ends with exit code 2 and one line."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jgraph.inspect.__main__ import main
from jgraph.schedule import NAMES, POOLS, Costs, assign, generate, simulate, write
from jgraph.schedule.files import to_json
from jgraph.train.presets import PRESETS
from tests.schedule.strategies import to_csv

ROOT = Path(__file__).parents[2]
PHASES = r"tracing the model: \d+\.\d s\ncompiling the training step: \d+\.\d s\n|compiling \S+: \d+\.\d s\n"
SMALL = ["schedule", "zb-h1", "--pp", "3", "--microbatches", "4"]


@pytest.fixture(autouse=True)
def _pipe(monkeypatch):
    """Makes the command print as to a pipe, on any terminal."""
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "COLORTERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def printed(capsys):
    """Returns a function that runs the command and returns its output."""

    def run(*args: str) -> str:
        assert main(args) == 0
        out, err = capsys.readouterr()
        assert re.fullmatch(PHASES if args[0] == "capture" and "--help" not in args else "", err)
        return out

    return run


@pytest.fixture
def refused(capsys):
    """Returns a function that runs the command with bad input and returns the error line without the program's name."""

    def run(*args: str) -> str:
        assert main(args) == 2
        out, err = capsys.readouterr()
        assert out == ""
        return one_line(re.sub(PHASES, "", err))

    return run


def one_line(stderr: str) -> str:
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("jgraph.inspect: error: ")
    return lines[0].removeprefix("jgraph.inspect: error: ")


def test_the_timeline_a_table_and_a_summary_are_printed(printed):
    out = printed(*SMALL)
    run = simulate(generate("zb-h1", pp=3, microbatches=4))
    slots = assign(run.schedule)
    assert re.search(r"^rank 0 F0 +F1 +F2 +", out, re.M)
    for r in range(3):
        numbers = [f"{run.idle[r]:.4g}", f"{run.idle[r] / run.makespan:.1%}", *(str(slots.counts[pool][r]) for pool in POOLS)]
        assert re.search(rf"^ +{r} +{' +'.join(map(re.escape, numbers))} *$", out, re.M), (r, numbers)
    assert f"makespan {run.makespan:g}, bubble {run.bubble:.1%}, {run.schedule.num_ticks} ticks, dataflow" in out
    assert "residuals of 3 microbatches" in out


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_drawn(printed, name):
    chunks = ("--chunks", "2") if name == "interleaved-1f1b" else ()
    assert "makespan" in printed("schedule", name, "--pp", "2", "--microbatches", "4", *chunks)


@pytest.mark.parametrize("width", [60, 100, 200])
@pytest.mark.parametrize("pp", [4, 64])
def test_no_line_is_wider_than_the_console(printed, monkeypatch, width, pp):
    monkeypatch.setenv("COLUMNS", str(width))
    out = printed("schedule", "zb-v", "--pp", str(pp), "--microbatches", "130", "--costs", "1,1.1,0.8")
    assert max(map(len, out.splitlines())) <= width
    assert len(out.splitlines()) < 60 + 3 * pp
    assert f"\n {pp - 1:>3} " in out  # the last rank's row of the table


def test_output_to_a_pipe_has_letters_and_no_escape_codes(printed):
    out = printed(*SMALL)
    assert "\x1b" not in out
    assert "F0" in out
    assert "·" in out


def test_cells_are_colored_on_a_terminal_with_enough_colors(printed, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    out = printed(*SMALL)
    # #56B4E9 and #E69F00, with black text.
    assert "\x1b[38;2;0;0;0;48;2;86;180;233m" in out
    assert "\x1b[38;2;0;0;0;48;2;230;159;0m" in out
    assert "F0" not in out


@pytest.mark.parametrize("setting", [{"NO_COLOR": "1", "COLORTERM": "truecolor"}, {"TERM": "xterm"}, {"TERM": "dumb"}])
def test_cells_are_letters_on_a_terminal_without_enough_colors(printed, monkeypatch, setting):
    monkeypatch.setenv("FORCE_COLOR", "1")
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    assert "F0" in printed(*SMALL)


@pytest.mark.parametrize(
    ("name", "pp", "microbatches", "chunks", "execution"),
    [
        ("zb-h1", 3, 4, 1, "dataflow"),
        ("aligned", 3, 6, 2, "lockstep"),
        ("gpipe", 2, 3, 2, "dataflow"),
        ("zb-v", 2, 4, 2, "dataflow"),
    ],
)
def test_the_printed_numbers_equal_the_simulation(printed, name, pp, microbatches, chunks, execution):
    flags = ["--pp", str(pp), "--microbatches", str(microbatches), "--chunks", str(chunks), "--latency", "0.25"]
    out = printed("schedule", name, *flags, "--costs", "1,1.5,0.75")
    schedule = generate(name, pp=pp, microbatches=microbatches, chunks=chunks)
    run = simulate(schedule, Costs(1 / chunks, 1.5 / chunks, 0.75 / chunks), latency=0.25, execution=execution)
    assert f"makespan {run.makespan:.6g}, bubble {run.bubble:.1%}, {schedule.num_ticks} ticks, {execution}\n" in out
    for r in range(pp):
        assert re.search(rf"^ +{r} +{re.escape(f'{run.idle[r]:.4g}')} ", out, re.M)


def test_the_execution_can_be_chosen(printed):
    spans = {}
    for execution in ("dataflow", "neighbours", "lockstep"):
        found = re.search(
            rf"^makespan (.+), bubble .*, {execution}$", printed(*SMALL, "--costs", "1,2,3", "--execution", execution), re.M
        )
        assert found
        spans[execution] = float(found[1])
    assert spans["dataflow"] < spans["neighbours"] <= spans["lockstep"]


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_a_schedule_from_a_file_is_printed_like_a_named_schedule(printed, tmp_path, suffix):
    file = tmp_path / f"mine{suffix}"
    file.write_text({".csv": to_csv, ".json": to_json}[suffix](generate("zb-v", pp=3, microbatches=5)))
    assert printed("schedule", str(file)) == printed("schedule", "zb-v", "--pp", "3", "--microbatches", "5")


BAD = [
    (["schedule", "zb-h9", "--pp", "2", "--microbatches", "4"], ["zb-h9", *NAMES]),
    (["schedule"], ["no schedule: pass one of", ".csv or .json file", *NAMES]),
    (["schedule", "dualpipe-v", "--pp", "4", "--microbatches", "4"], ["dualpipe-v", "at least 8 microbatches", "got 4"]),
    (["schedule", "1f1b", "--pp", "4", "--microbatches", "4", "--chunks", "2"], ["1f1b", "chunks=2", "1 chunk per rank"]),
    (["schedule", "interleaved-1f1b", "--pp", "4", "--microbatches", "4"], ["chunks=1", "at least 2", "use 1f1b"]),
    (["schedule", "1f1b", "--microbatches", "4"], ["1f1b", "needs --pp"]),
    (["schedule", "1f1b"], ["needs --pp and --microbatches"]),
    (["schedule", "1f1b", "--pp", "0", "--microbatches", "4"], ["--pp is 0", ">= 1"]),
    (["schedule", "1f1b", "--pp", "2", "--microbatches", "-3"], ["--microbatches is -3", ">= 1"]),
    (["schedule", "1f1b", "--pp", "two", "--microbatches", "4"], ["--pp", "'two'", "INT"]),
    (["schedule", "1f1b", "--pp", "2", "--microbatches", "4.5"], ["--microbatches", "4.5", "INT"]),
    (["schedule", "1f1b", "--pp", "1000", "--microbatches", "9999999"], ["--pp 1000", "--microbatches 9999999", "at most"]),
    ([*SMALL, "--costs", "1,2"], ["--costs", "'1,2'", "forward,dgrad,wgrad"]),
    ([*SMALL, "--costs", "1,x,1"], ["--costs", "'1,x,1'"]),
    ([*SMALL, "--costs", "1,0,1"], ["--costs", "'1,0,1'", "> 0"]),
    ([*SMALL, "--costs", "1,1e308,1"], ["--costs", "1e308", "1e-30 to 1e+30"]),
    ([*SMALL, "--costs", "1,nan,1"], ["--costs", "nan"]),
    ([*SMALL, "--costs", "1,inf,1"], ["--costs", "inf"]),
    ([*SMALL, "--latency", "-1"], ["--latency is -1"]),
    ([*SMALL, "--latency", "nan"], ["--latency is nan"]),
    ([*SMALL, "--execution", "fast"], ["--execution", "fast", "dataflow", "neighbours", "lockstep"]),
    ([*SMALL, "--microbatchs", "3"], ["--microbatchs", "did you mean --microbatches INT"]),
    ([*SMALL, "--latency"], ["--latency", "Expected 1 value"]),
    ([*SMALL, "gpipe"], ["gpipe"]),
    (["schedule", "no.csv"], ["no.csv", "No such file"]),
    (["schedule", "no.txt"], ["no.txt", ".csv", ".json"]),
    (["shedule", "gpipe"], ["shedule"]),
    ([], ["schedule"]),
]


@pytest.mark.parametrize(("args", "parts"), BAD, ids=[" ".join(args) or "nothing" for args, _ in BAD])
def test_bad_input_is_refused_in_one_line_with_its_name(refused, tmp_path, monkeypatch, args, parts):
    monkeypatch.chdir(tmp_path)
    line = refused(*args)
    missing = [part for part in parts if part not in line]
    assert not missing, f"{line!r} lacks {missing}"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a.csv", "0F0,0X0\n", ["a.csv", "rank 0, cell 1", "0X0"]),
        ("a.csv", "", ["a.csv", "empty"]),
        ("a.json", "{", ["a.json", "not JSON"]),
        ("a.json", "[[1, -1], [-1]]", ["a.json", "rank 1"]),
        ("a.json", "[[1, -1, 2, -2]]", ["a.json", "rank 0"]),
        ("a.json", "\udcff", ["a.json", "utf-8"]),
    ],
)
def test_a_broken_file_is_refused_with_the_position_of_the_error(refused, tmp_path, name, text, parts):
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    line = refused("schedule", str(tmp_path / name))
    missing = [part for part in parts if part not in line]
    assert not missing, f"{line!r} lacks {missing}"


@pytest.mark.parametrize("given", [["--pp", "2"], ["--microbatches", "2"], ["--chunks", "1"]])
def test_a_schedule_file_and_a_size_flag_are_refused_together(refused, tmp_path, given):
    file = tmp_path / "a.json"
    write(generate("1f1b", pp=2, microbatches=2), file)
    assert refused("schedule", str(file), *given) == f"{file} has the whole schedule: leave out {given[0]}"


def test_help_explains_the_costs_and_lists_the_schedules(printed):
    words = " ".join(re.sub("[│╭╮╰╯─]", " ", printed("schedule", "--help")).split())
    assert "--costs" in words
    assert "ALL layers of a rank for one microbatch" in words
    for name in NAMES:
        assert name in words


def test_help_lists_the_subcommands_and_has_an_example(printed):
    out = printed("--help")
    assert "• schedule" in out
    assert "• capture" in out
    assert "\n    python -m jgraph.inspect schedule zb-h1 --pp 4 --microbatches 8\n" in out


def test_ctrl_c_ends_without_a_traceback(monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("jgraph.schedule.simulate", interrupt)
    assert main(SMALL) == 130


def test_neither_jax_nor_matplotlib_is_imported():
    code = """if True:
        import sys
        from jgraph.inspect.__main__ import main
        assert main(sys.argv[1:]) == 0
        assert not {'jax', 'jaxlib', 'flax', 'matplotlib'} & set(sys.modules)
    """
    command = [sys.executable, "-c", code, *SMALL]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_process_ends_with_code_2_and_one_line():
    command = [sys.executable, "-m", "jgraph.inspect", *SMALL, "--costs", "1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "--costs" in one_line(result.stderr)
    assert result.stdout == ""


def test_unencodable_characters_are_printed_as_question_marks():
    command = [sys.executable, "-X", "utf8=0", "-m", "jgraph.inspect", *SMALL]
    env = {"PYTHONIOENCODING": "ascii", "PATH": "", "PYTHONPATH": os.environ["PYTHONPATH"]}
    result = subprocess.run(command, capture_output=True, check=False, env=env)
    assert result.returncode == 0, result.stderr
    assert b"rank 1 ???" in result.stdout


# --- capture ---

MINE = """
import jax, jax.numpy as jnp

def in_place():
    return lambda state, x: (state + x, x.sum()), (jnp.ones(3), jnp.ones(3)), 0

def fft():
    return jax.jit(lambda x: jnp.fft.fft(x).real), [jax.ShapeDtypeStruct((64,), jnp.float32)]

def no_pair():
    return 3

def exits():
    raise SystemExit(4)

def raises():
    raise KeyError("first line\\nsecond line")

def shapes_differ():
    return jnp.dot, (jnp.ones(3), jnp.ones(4))

def option():
    return jnp.sin, (1.0,)

number = 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Writes the user module `mine`. Returns its file."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "mine.py"
    sys.modules.pop("mine", None)


def test_a_user_function_is_reported_with_its_donations(printed, mine):
    out = printed("capture", "mine:in_place")
    assert out.startswith("mine:in_place, <lambda> on cpu\n")
    assert "donated: 1 leaf of 12 B: 1 reused" in out
    assert "  state float32[3] -> result[0]\n" in out
    assert "there are no command buffers on a cpu" in out


def test_a_preset_is_compiled_as_its_training_step_with_the_given_sizes(printed, monkeypatch):
    small = {"num_layers": 1, "d_model": 32, "num_heads": 2, "num_kv_heads": 2, "d_ff": 64, "vocab_size": 128}
    config = PRESETS["gpt-124m"]
    monkeypatch.setitem(PRESETS, "gpt-124m", dataclasses.replace(config, model=dataclasses.replace(config.model, **small)))
    out = printed("capture", "gpt-124m", "--batch-size", "2", "--seq-len", "16")
    assert out.startswith("training step of gpt-124m (jgraph_models.gpt:GPT), 2 x 16 tokens, on cpu\n")
    assert re.search(r"donated: \d+ leaves of .*, 0 dropped", out)


@pytest.mark.target
@pytest.mark.long
@pytest.mark.once
def test_a_model_with_a_preset_is_compiled_for_a_gpu_that_is_not_present(printed, h200, tmp_path):
    file = tmp_path / "report.json"
    small = ["--preset", "cpu-tiny", "--batch-size", "2", "--seq-len", "32"]
    out = printed("capture", "jgraph_models.gpt:GPT", *small, "--target", "h200", "--json", str(file))
    found = re.search(r"command buffers: 1, captured (\d+) of (\d+) thunks", out)
    assert found
    assert found[1] == found[2]
    fields = json.loads(file.read_text())
    assert (fields["capture"]["captured"], fields["capture"]["outside"]) == (int(found[1]), [])
    assert len(fields["donations"]) > 5
    assert "H200" in fields["device"]
    # The model is in float32, where attention is XLA's on each GPU.
    assert not any("attention" in note for note in fields["notes"])


@pytest.mark.target
@pytest.mark.long
@pytest.mark.once
def test_the_collectives_of_a_step_for_several_gpus_are_counted(printed, h200, monkeypatch, tmp_path):
    config, file = PRESETS["launch-bound"], tmp_path / "report.json"
    small = dataclasses.replace(config.model, num_layers=1)
    monkeypatch.setitem(PRESETS, "launch-bound", dataclasses.replace(config, model=small))
    layout = ["--fsdp", "2", "--cp", "2", "--tp", "2", "--target", "h200", "--json", str(file)]
    out = printed("capture", "launch-bound", *layout)
    found = re.search(r"collectives: (\d+), (\d+) overlapped by matmuls", out)
    assert found
    counts = json.loads(file.read_text())["collectives"]
    assert (counts["total"], counts["overlapped"]) == (int(found[1]), int(found[2]))
    # Gathered columns, scattered rows, keys and values, and the gradients of fsdp.
    assert counts["total"] >= 8
    assert 0 < counts["overlapped"] <= counts["total"]


@pytest.mark.target
def test_an_uncaptured_operation_is_printed_with_its_line_in_the_user_file(printed, h200, mine):
    out = printed("capture", "mine:fft", "--target", "h200", "--graph", "full")
    (line,) = (i for i, code in enumerate(MINE.splitlines(), 1) if "jnp.fft.fft" in code)
    assert "outside: 1 Fft: XLA has no command for it" in out
    assert re.search(rf"/fft at mine\.py:{line}\n", out)
    off = printed("capture", "mine:fft", "--target", "h200", "--graph", "off")
    assert "captured 0 of" in off
    assert "command buffers are off: --graph auto or full" in off


BAD_CAPTURES = [
    (["mine:no_pair"], ["mine:no_pair() returns int: must return (fn, args)"]),
    (["mine:raises"], ["mine:raises cannot be compiled: KeyError"]),
    (["mine:shapes_differ"], ["mine:shapes_differ cannot be compiled: TypeError", "shape"]),
    (["mine:number"], ["mine", "int", "'number'", "a class or a function"]),
    (["mine:nothing"], ["mine has no 'nothing'"]),
    (["exits:main"], ["exits cannot be imported: SystemExit: 3"]),
    (["mine:exits"], ["mine:exits cannot be compiled: SystemExit: 4"]),
    (["broken:main"], ["broken cannot be imported: ZeroDivisionError"]),
    (["no_such_module:main"], ["no_such_module cannot be imported", "No module named"]),
    (["gpt-9"], ["'gpt-9' is neither MODULE:NAME nor a preset", "gpt-124m"]),
    (["gpt_124m"], ["'gpt_124m' is neither MODULE:NAME nor a preset", "gpt-124m"]),
    (["jgraph_models.gpt:GPT"], ["jgraph_models.gpt:GPT is a class", "--preset", "gpt-124m"]),
    (["jgraph_models.gpt:GPT", "--preset", "gpt-9"], ["--preset is gpt-9", "gpt-124m"]),
    (["gpt-124m", "--preset", "cpu-tiny"], ["gpt-124m is a preset: leave out --preset cpu-tiny"]),
    (["mine:option", "--seq-len", "8"], ["mine:option", "leave out --seq-len"]),
    (["gpt-124m", "--batch-size", "0"], ["--batch-size is 0", "at least 1"]),
    (["mine:option", "--xla-options", "xla_nope=1"], ["xla_nope"]),
    (["mine:option", "--graph", "most"], ["--graph", "most", "auto", "full"]),
    (["mine:option", "--target", "tpu"], ["'tpu'", "h200, h100, b200"]),
    (["mine:option", "--json", "no/such.json"], ["--json is no/such.json: cannot be written"]),
    ([], ["MODULE:NAME"]),
]


@pytest.mark.parametrize(("args", "parts"), BAD_CAPTURES, ids=[" ".join(args) or "nothing" for args, _ in BAD_CAPTURES])
def test_wrong_arguments_of_capture_are_refused_in_one_line(refused, mine, args, parts):
    mine.with_name("broken.py").write_text("1 / 0\n")
    mine.with_name("exits.py").write_text("import sys\nsys.exit(3)\n")
    line = refused("capture", *args)
    missing = [part for part in parts if part not in line]
    assert not missing, f"{line!r} lacks {missing}"


def test_help_of_capture_lists_its_arguments(printed):
    words = " ".join(re.sub("[│╭╮╰╯─]", " ", printed("capture", "--help")).split())
    for part in ("MODULE:CLASS with --preset", "(fn, args, donate_argnums)", "--target", "h200, h100 or b200", "--json"):
        assert part in words


def test_wrong_flags_of_capture_are_refused_before_jax_is_imported():
    code = """if True:
        import sys
        from jgraph.inspect.__main__ import main
        assert main(['capture', 'gpt-124m', '--batch-size', '0']) == 2
        assert not {'jax', 'jaxlib', 'flax'} & set(sys.modules)
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
