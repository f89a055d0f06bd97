"""Tests of the end of a command's process."""

import subprocess
import sys

import pytest

# A thread of a C++ library that aborts the process in Python's finalization, but not before.
_PROGRAM = """
import atexit, os, sys
from jgraph.exits import end_with

class Library:
    def __del__(self):
        os.abort()

sys.modules["library"] = Library()

def main():
    atexit.register(print, "handler of a library")
    print("output of the command")
    {}

end_with(main)
"""


def ended(statement: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", _PROGRAM.format(statement)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("statement", "code"),
    [("return 0", 0), ("return 75", 75), ("sys.exit(2)", 2), ("sys.exit()", 0), ("sys.exit('why')", 1), ("raise OSError", 1)],
)
def test_a_command_ends_with_its_code_and_all_exit_handlers_before_the_finalization_of_python(statement, code):
    assert ended(statement) == (code, "output of the command\nhandler of a library\n")
