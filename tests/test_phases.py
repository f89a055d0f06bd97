"""The status line of commands: the elapsed time of a phase on a terminal, and one line in a log."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console

from jgraph import aot
from jgraph.cli import interruptible, phase
from jgraph.train._console import Reporter


@pytest.fixture
def terminal(monkeypatch):
    """A file that is a terminal, and a function that reads the bytes printed to it so far."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = pty.openpty()
    os.set_blocking(reader, False)
    with os.fdopen(reader, "rb", buffering=0) as shown, os.fdopen(writer, "w", encoding="utf-8") as file:
        yield file, lambda: (shown.read() or b"").decode()


def screen(text: str) -> list[str]:
    """The lines that a terminal shows after it has received a text. Lines are replaced as a whole."""
    rows, row = [""], 0
    for part in re.findall(r"\x1b\[[?0-9;]*[a-zA-Z]|[\r\n]|[^\x1b\r\n]+", text):
        if part == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif part == "\x1b[1A":
            row -= 1
        elif part == "\x1b[2K":
            rows[row] = ""
        elif part[0] not in "\x1b\r":
            rows[row] += part
    return [line for line in rows if line]


def test_a_terminal_shows_the_elapsed_time_and_at_the_end_the_final_time(terminal):
    file, shown = terminal
    console = Console(file=file)
    with phase("compiling [a] step", console):
        console.print("a note")
        during = shown()
    assert re.fullmatch(r". compiling \[a\] step 0:00:\d\d", screen(during)[-1])
    note, final = screen(during + shown())
    assert note == "a note"
    assert re.fullmatch(r"compiling \[a\] step: \d+\.\d s", final)


def test_a_terminal_is_restored_after_an_error(terminal):
    file, shown = terminal
    with pytest.raises(ValueError, match="no"), phase("compiling the step", Console(file=file)):
        raise ValueError("no")
    text = shown()
    assert screen(text) == []
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")  # the cursor is visible


def test_a_log_on_stdout_has_one_line_at_the_start():
    log = io.StringIO()
    with phase("compiling [a] step", Console(file=log, width=10)):
        assert log.getvalue() == "compiling [a] step\n"
    assert log.getvalue() == "compiling [a] step\n"


def test_a_log_on_stderr_has_one_line_with_the_final_time(capsys):
    with phase("compiling [a] step"):
        assert capsys.readouterr() == ("", "")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"compiling \[a\] step: \d+\.\d s\n", err)


def test_a_failed_phase_leaves_the_error_as_the_only_line_on_stderr(capsys):
    with pytest.raises(ValueError, match="no"), phase("compiling the step"):
        raise ValueError("no")
    assert capsys.readouterr() == ("", "")


def test_a_terminal_without_cursor_movements_is_a_log(terminal, monkeypatch):
    file, shown = terminal
    monkeypatch.setenv("TERM", "dumb")
    with phase("compiling the step", Console(file=file)):
        assert shown() == "compiling the step\r\n"
    assert shown() == ""


def test_the_result_on_stdout_has_no_phases(capsys, monkeypatch):
    for directory, phases in ((None, r"downloading XLA's compiler for NVIDIA GPUs: \d+\.\d s\n"), ("found", "")):
        monkeypatch.setattr("jgraph.xla.aot.find_library", lambda _, found=directory: found)
        monkeypatch.setattr("jgraph.xla.aot.install", lambda _: "library.so")
        assert aot.main(["install"]) == 0
        out, err = capsys.readouterr()
        assert out == f"{directory or 'library.so'}\n"
        assert re.fullmatch(phases, err)


def test_only_process_0_shows_phases(terminal, capsys):
    file, shown = terminal
    with Reporter(Console(file=file, quiet=True), steps=1).phase("compiling the step"):
        print("by a model", file=sys.stdout)
    assert shown() == ""
    assert capsys.readouterr() == ("by a model\n", "")


def test_a_phase_in_another_thread_runs_without_handlers_of_signals(capsys):
    def run() -> str:
        with interruptible("reading a file"):  # Python refuses a wakeup descriptor of another thread than the main one
            return "read"

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(run).result() == "read"
    assert re.fullmatch(r"reading a file: \d+\.\d s\n", capsys.readouterr().err)


def test_a_run_that_hangs_in_a_phase_restores_the_terminal(terminal):
    file, shown = terminal
    reporter = Reporter(Console(file=file), steps=1)
    with reporter.phase("compiling the step"):
        assert "\x1b[?25h" not in shown()
        reporter.__exit__()  # as the watchdog does
        assert "\x1b[?25h" in shown()


STOPPED = """
import ctypes, signal, sys
from jgraph.cli import interruptible

signal.signal(getattr(signal, sys.argv[1]), lambda *_: None)
library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_lock(mutex)
with interruptible("compiling the step"):
    print("begun", flush=True)
    library.pthread_mutex_lock(mutex)  # never returns, also after a signal, like a long compilation
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_a_phase_at_once_while_the_main_thread_is_in_a_library(terminal, name):
    file, shown = terminal
    process = subprocess.Popen([sys.executable, "-c", STOPPED, name], stdout=subprocess.PIPE, stderr=file, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline() == "begun\n"
        process.send_signal(getattr(signal, name))
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + getattr(signal, name)
    text = shown()
    assert screen(text) == [f"stopped by {name} while compiling the step"]
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")  # the cursor is visible


def test_a_finished_phase_restores_the_handling_of_signals(capsys):
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    with interruptible("compiling the step"):
        pass
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.set_wakeup_fd(before) == before
