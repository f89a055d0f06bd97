"""Tests of the processes that run PyTorch."""

import pytest

from tests.parity import processes

pytestmark = pytest.mark.parity


def test_an_abort_at_the_exit_of_a_finished_script_does_not_fail(tmp_path, monkeypatch):
    (tmp_path / "aborts_at_exit.py").write_text("import atexit, os\natexit.register(os.abort)\nprint('done')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    processes.run("aborts_at_exit", tmp_path)
    assert [(tmp_path / f"{rank}.log").read_text() for rank in range(processes.RANKS)] == ["done\n"] * processes.RANKS


def test_an_error_of_a_script_fails_with_its_log(tmp_path, monkeypatch):
    (tmp_path / "raises.py").write_text("raise ValueError('the reason')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with pytest.raises(AssertionError, match="the reason"):
        processes.run("raises", tmp_path)
