import sysconfig
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jgraph.xla._capture import thunk_instructions
from jgraph.xla.hlo import HloModule, Op, operations

HERE = Path(__file__)
LIBRARY = sysconfig.get_paths()["purelib"]

# Tables as jax 0.10 and 0.12 write them: parent_frame_id is the parent's id plus one, and the root frame's own id.
TABLES = f"""\
HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/train.py"
2 "{LIBRARY}/flax/linear.py"
3 "{HERE.parents[2]}/jgraph/train/step.py"

FunctionNames
1 "main"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=30 end_line=30 column=4 end_column=9}}
2 {{file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}}
3 {{file_name_id=2 function_name_id=1 line=99 end_line=99 column=4 end_column=9}}
4 {{file_name_id=3 function_name_id=1 line=7 end_line=7 column=4 end_column=9}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=3 parent_frame_id=3}}
4 {{file_location_id=4 parent_frame_id=2}}
5 {{file_location_id=3 parent_frame_id=1}}
6 {{file_location_id=4 parent_frame_id=1}}

"""


def program(metadata, tables=TABLES):
    return tables + f"%f (x: f32[8]) -> f32[8] {{\n  ROOT %fft.0.0 = c64[8]{{0}} fft(%x), fft_length={{8}}{metadata}\n}}\n"


def only(text):
    return operations(HloModule(text), {"fft.0.0"})["fft.0.0"]


@pytest.mark.parametrize(("frame", "line"), [(1, 30), (2, 12), (3, 12), (4, 30)])
def test_the_source_line_is_the_innermost_frame_in_user_code(frame, line):
    assert only(program(f', metadata={{op_name="jit(step)/fft" stack_frame_id={frame}}}')).source == f"/home/me/train.py:{line}"


@pytest.mark.parametrize(("only_frame", "source"), [("2", f"{LIBRARY}/flax/linear.py:99"), ("3", "jgraph/train/step.py:7")])
def test_without_a_user_frame_the_innermost_frame_is_the_source_line(only_frame, source, monkeypatch):
    monkeypatch.chdir(HERE.parents[2])
    tables = TABLES.replace("1 {file_location_id=1", f"1 {{file_location_id={int(only_frame) + 1}")
    assert only(program(', metadata={op_name="jit(step)/fft" stack_frame_id=1}', tables)).source == source


@pytest.mark.parametrize("metadata", ["", ', metadata={scheduling_name="fft.0.0"}', ", metadata={stack_frame_id=77}"])
def test_an_operation_generated_by_xla_has_no_name_and_no_source_line(metadata):
    assert only(program(metadata)) == Op("fft.0.0")
    assert str(only(program(metadata))) == "fft.0.0"


def test_escaped_quotes_in_an_operation_name_are_unescaped():
    assert only(program(r""", metadata={op_name="state[\'w\']" stack_frame_id=1}""")).name == "state['w']"


def test_missing_and_unrequested_instructions_are_omitted():
    assert operations(HloModule(program("")), {"fft.0.0", "fft.1"}) == {"fft.0.0": Op("fft.0.0")}
    assert operations(HloModule(program("")), set()) == {}


def test_source_lines_are_found_in_a_program_of_the_installed_jax(monkeypatch):
    monkeypatch.chdir(HERE.parents[2])

    # The constant makes the program unique to this file: a persistent cache may hold the program of another checkout.
    own = zlib.crc32(f"{HERE}{HERE.read_text()}".encode()) % 1000

    def step(x):
        return jnp.cumsum(x) + own  # the line looked for

    text = jax.jit(step).lower(jnp.ones(8)).compile().as_text()
    names = {line.split(" = ")[0].split("%")[-1] for line in text.splitlines() if " = " in line}
    (line,) = (i for i, code in enumerate(HERE.read_text().splitlines(), 1) if code.endswith("# the line looked for"))
    assert f"tests/xla/test_hlo.py:{line}" in {op.source for op in operations(HloModule(text), names).values()}


def test_thunk_instructions_are_keyed_by_number_and_kind():
    # Two thunks of jax 0.12: ("gemm_fusion_dot_general.7", 1, "kCustomKernel"); a kSequential has no name and no number.
    first = b"\x0a\x1d\x0a\x19gemm_fusion_dot_general.7\x18\x01\x12\x0dkCustomKernel"
    data = b"\x0a" + bytes([len(first)]) + first + b"\x0a\x0f\x0a\x00\x12\x0bkSequential"
    assert thunk_instructions(data) == {(1, "kCustomKernel"): "gemm_fusion_dot_general.7"}
    assert thunk_instructions(b"") == {}
