"""Plans that are confirmed by the compiler: which layouts are tried, the text, and processes that fail."""

import dataclasses
import json
import re
import subprocess
import sys

import jax
import pytest

import jgraph
from jgraph.device import DEVICES
from jgraph.errors import ConfigError, TargetError
from jgraph.plan import _plan
from jgraph.plan.__main__ import main
from jgraph.plan._compile import Compiled, compile_steps
from jgraph.plan._memory import Predictor
from jgraph.train.presets import preset
from jgraph.xla import aot

TINY = preset("cpu-tiny")
USABLE = _plan.usable_of("h100")
FITS = Compiled(2**30, notes=("matmuls are not autotuned",))
TOO_LARGE = Compiled(round(USABLE) + 2**30, "the largest temporaries are 1 x 2 GiB logits")
FAILS = Compiled(None, "its process was ended by SIGKILL")


@pytest.fixture
def compiler(monkeypatch):
    """Returns a function that sets the results of the compiler, which it gives one after the other, and the list of calls."""

    def answer(*results):
        calls: list[int] = []
        left = iter(results)

        def fake(configs, gpu):
            calls.append(len(configs))
            return [next(left) for _ in configs]

        monkeypatch.setattr(_plan, "compile_steps", fake)
        monkeypatch.setattr(aot, "devices", lambda gpu: ())
        return calls

    return answer


def planned():
    return jgraph.plan("cpu-tiny", gpus=2, seq_len=64, batch_size=2, check="compiler")


def test_the_next_layouts_are_compiled_until_three_fit(compiler):
    calls = compiler(TOO_LARGE, FITS, FAILS, FITS, FITS)
    found = planned()
    assert calls == [3, 2]
    assert found.best == (found.options[1], found.options[3], found.options[4])
    assert [option.compiled for option in found.options] == [TOO_LARGE, FITS, FAILS, FITS, FITS]
    assert all(option.fits for option in found.options)


def test_at_most_six_layouts_are_compiled(compiler, monkeypatch):
    calls = compiler(*[FAILS] * 8)
    monkeypatch.setattr(_plan, "TRIES", 4)
    found = planned()
    assert calls == [3, 1]
    assert found.best == ()
    assert "python -m jgraph.train" not in str(found)


def test_the_text_has_the_compiled_peak_and_why_a_layout_is_not_confirmed(compiler):
    compiler(TOO_LARGE, FITS, FAILS, FITS, FITS)
    found = planned()
    text = str(found)
    layouts = [option.layout for option in found.options]
    rows = [line.split() for line in text.splitlines()]
    at = rows[1].index("compiled") - len(rows[1])
    assert [row[at] for row in rows[2:7]] == [f"{USABLE / 2**30 + 1:.1f}", "1.0", "-", "1.0", "1.0"]
    assert "compiled layouts: 5, the fastest first; 3 fit" in text
    needs = f"{USABLE / 2**30 + 1:.1f} GiB of {USABLE / 2**30:.1f} GiB; {TOO_LARGE.about}"
    assert f"{layouts[0]} does not fit by the compiler, which needs {needs}\n" in text
    assert f"{layouts[2]} cannot be compiled: its process was ended by SIGKILL\n" in text
    assert text.count("note: matmuls are not autotuned\n") == 1
    assert "compiled" not in str(dataclasses.replace(found, check="arithmetic"))


def test_a_missing_compiler_and_an_unknown_check_are_errors_before_the_plan(monkeypatch, capsys):
    monkeypatch.setattr(aot, "find_library", lambda directory: None)
    monkeypatch.setattr(_plan, "layouts", None)
    with pytest.raises(TargetError, match=re.escape("run python -m jgraph.aot install")):
        jgraph.plan("cpu-tiny", check="compiler")
    with pytest.raises(ConfigError, match=r"^`check` is 'xla'"):
        jgraph.plan("cpu-tiny", check="xla")
    assert main(["cpu-tiny", "--compile"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("jgraph.plan: error: no CUDA plugin for jaxlib ")


@pytest.mark.long
def test_a_process_that_fails_is_one_line_and_the_others_go_on():
    killed, refusing = compile_steps([TINY.changed(module=f"tests.faulty:{name}") for name in ("Killed", "Refusing")], "h200")
    assert killed == Compiled(None, "its process was ended by SIGKILL: out of memory")
    assert refusing.peak is None
    assert "no such layer" in refusing.about
    assert "\n" not in refusing.about


@pytest.mark.long
def test_the_process_ends_with_the_one_that_started_it():
    config = TINY.changed(module="tests.faulty:Waiting")
    command = [sys.executable, "-m", "jgraph.plan._compile", "h200"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write(json.dumps(config.to_dict()) + "\n")
        process.stdin.flush()
        assert "waiting\n" in iter(process.stdout.readline, "")
        process.stdin.close()
        assert process.wait(30) == 1


@pytest.mark.long
@pytest.mark.target
def test_the_compiled_peak_of_a_small_model_is_close_to_the_predicted_one(h200):
    sizes = {"num_layers": 4, "d_model": 64, "d_ff": 128, "num_heads": 1, "num_kv_heads": 1}
    half = dataclasses.replace(TINY.model, **sizes, compute_dtype="bfloat16")
    found = jgraph.plan(TINY.changed(model=half), gpu="h200", gpus=1, check="compiler")
    (best,) = found.best
    has_scores = jax.__version_info__ < (0, 11)
    (device,) = (device for device in DEVICES if device.aot == "h200")
    predicted = Predictor(device, "xla" if has_scores else "cudnn").memory(best.config).peak
    assert best.compiled.peak == pytest.approx(predicted, rel=0.2)
    (note,) = (note for note in best.compiled.notes if note.startswith("attention is "))
    assert ("the memory includes its scores" in note) == has_scores
    assert f"\nnote: {note}\n" in str(found)
