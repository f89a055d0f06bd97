import jax
import jax.numpy as jnp
import pytest

from jgraph.xla import CaptureReport, Outside, aot, compile_and_report, compiler_options
from jgraph.xla._capture import report_of
from jgraph.xla.hlo import Op

DEFAULT = """
  xla_gpu_enable_command_buffer: CONDITIONAL
  xla_gpu_enable_command_buffer: CUSTOM_CALL
  xla_gpu_enable_command_buffer: DYNAMIC_SLICE_FUSION
  xla_gpu_enable_command_buffer: FUSION
  xla_gpu_graph_min_graph_size: 5
  xla_gpu_command_buffer_unroll_loops: false
"""
FULL = DEFAULT.replace("size: 5", "size: 1") + "  xla_gpu_enable_command_buffer: WHILE\n"

# Excerpts of real dumps without shared memory sizes; jax 0.10 and 0.12 agree. A scan followed by a matmul:
LOOP_OUTSIDE = """\
001: kCopy          [source       | next=003 (2)] kCopy
002: kCopy          [source       | next=003 (1)] kCopy
003: kWhile         [prev=002 (1) | next=000 (1)]   
condition:
    004: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    005: kCustomKernel [source       | sink        ] loop_add_fusion grid: [1, 1, 1] threads: [1, 1, 1]
    006: kCustomKernel [source       | next=007 (1)] gemm_fusion_dot grid: [2048, 1, 1] threads: [64, 1, 1]
    007: kCustomKernel [prev=006 (1) | sink        ] loop_reduce_fusion grid: [256, 1, 1] threads: [128, 1, 1]
000: kCommandBuffer [prev=003 (1) | sink        ] 
    008: kCustomKernel [source       | next=009 (1)] gemm_fusion_dot grid: [2048, 1, 1] threads: [64, 1, 1]
    009: kCustomKernel [prev=008 (1) | sink        ] loop_reduce_fusion_3 grid: [256, 1, 1] threads: [128, 1, 1]
"""  # noqa: W291

# The same loop with --graph full. `condition:` is never indented.
LOOP_INSIDE = """\
000: kCommandBuffer [source | sink] 
    001: kCopy         [source       | next=003 (2)] kCopy
    003: kWhile        [prev=002 (1) | next=008 (1)]       
condition:
        004: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
      body:
        005: kCustomKernel [source       | sink        ] loop_add_fusion grid: [1, 1, 1] threads: [1, 1, 1]
    008: kCustomKernel [prev=003 (1) | next=009 (1)] gemm_fusion_dot grid: [2048, 1, 1] threads: [64, 1, 1]
"""  # noqa: W291

# jax 0.12: a scan over stacked weights copies its slices asynchronously.
SLICING_LOOP = """\
006: kWhile         [prev=000 (1) | sink        ]   
condition:
    007: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink] 
        008: kAsyncStart   [source       | next=012 (2)] stream=computation_stream[0], async_id=8
            010: kDynamicSliceFusion [source | sink] params=1, results=1
                009: kCopy [source | sink] kCopy
        011: kAsyncDone    [source       | sink        ] async_id=8
        012: kCustomKernel [prev=008 (2) | next=013 (1)] gemm_fusion_dot grid: [2048, 1, 1] threads: [64, 1, 1]
"""  # noqa: W291

# Both versions print the first thunk of a kSequential on the same line.
SOLVE = """\
003: kCustomKernel [prev=002 (1) | next=006 (1)] input_transpose_fusion_1 grid: [64, 1, 1] threads: [128, 1, 1]
006: kSequential   [prev=003 (1) | next=007 (1)]   004: kCopy            [source       | next=005 (1)] kCopy
  005: kTriangularSolve [prev=004 (1) | sink        ] (no description)
007: kCustomKernel [prev=006 (1) | sink        ] input_transpose_fusion grid: [32, 1, 1] threads: [128, 1, 1]
"""

FFT = """\
001: kCustomKernel [source       | next=002 (1)] loop_convert_fusion grid: [256, 1, 1] threads: [128, 1, 1]
009: kFft           [prev=000 (1) | next=000 (1)] (no description)
"""

FFT_IN_LOOP = """\
002: kWhile         [prev=001 (1) | sink        ]   
condition:
    005: kCustomKernel [prev=004 (1) | sink        ] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    007: kFft           [prev=000 (1) | next=000 (1)] (no description)
"""  # noqa: W291


def counts(report):
    return {o.kind: o.count for o in report.outside}


def test_an_uncaptured_loop_is_counted_and_its_remedy_names_the_flag():
    report = report_of(LOOP_OUTSIDE, DEFAULT, {})
    assert (report.command_buffers, report.captured, report.total) == (1, 2, 8)
    assert Outside("While", 4, "WHILE is off by default", "`graph` full") in report.outside
    (copies,) = (o for o in report.outside if o.kind == "Copy")
    assert (copies.count, copies.reason) == (2, "fewer than 5 in a row")
    assert "xla_gpu_graph_min_graph_size=1" in copies.remedy


def test_a_captured_loop_leaves_no_thunk_outside():
    assert report_of(LOOP_INSIDE, FULL, {}) == CaptureReport(command_buffers=1, captured=4, total=4)


def test_a_loop_that_slices_by_its_counter_suggests_unrolling():
    report = report_of(SLICING_LOOP, FULL, {})
    assert (report.command_buffers, report.captured, report.total) == (1, 2, 3)
    assert "xla_gpu_command_buffer_unroll_loops=true" in report.outside[0].remedy


def test_a_loop_names_the_unrecordable_thunk_in_its_body():
    report = report_of(FFT_IN_LOOP, FULL, {})
    assert counts(report) == {"While": 1, "Fft": 1}
    assert "holds Fft" in next(o.reason for o in report.outside if o.kind == "While")


def test_thunks_on_one_line_are_all_counted():
    report = report_of(SOLVE, DEFAULT, {})
    assert (report.captured, report.total) == (0, 4)
    assert counts(report) == {"CustomKernel": 2, "Sequential": 1, "TriangularSolve": 1}


def test_a_thunk_without_a_command_reports_that_reason():
    assert "XLA has no command for it" in next(o.reason for o in report_of(FFT, FULL, {}).outside if o.kind == "Fft")


def test_disabled_command_buffers_are_reported_as_the_reason():
    assert {o.reason for o in report_of(FFT, "", {}).outside} == {"command buffers are off"}


def test_a_recordable_thunk_outside_for_an_unknown_reason_suggests_xla_logging():
    assert "makes XLA log one" in report_of("001: kCopy [source | sink] kCopy\n", FULL, {}).outside[0].remedy


def test_a_report_prints_a_summary_and_lists_each_outside_thunk_with_its_operations():
    ops = (Op("copy.1"), Op("fft.0", "jit(f)/fft", "model.py:7"))
    report = CaptureReport(1, 248, 250, (Outside("Copy", 1, "no"), Outside("Fft", 1, "no", "yes", ops)))
    assert str(report).splitlines() == [
        "command buffers: 1, captured 248 of 250 thunks",
        "  outside: 1 Copy: no",
        "  outside: 1 Fft: no: yes",
        "      jit(f)/fft at model.py:7",
        "      copy.1",
    ]


def test_a_long_operation_list_prints_the_first_three_and_counts_the_rest():
    ops = tuple(Op(f"fft.{i}", "jit(f)/fft", f"model.py:{i}") for i in range(9))
    lines = str(Outside("Fft", 9, "no", "", ops)).splitlines()
    assert lines[1:] == [
        "  jit(f)/fft at model.py:0",
        "  jit(f)/fft at model.py:1",
        "  jit(f)/fft at model.py:2",
        "  and 6 more",
    ]


def test_outside_thunks_map_to_operations_by_number_and_kind_and_a_loop_covers_its_body():
    loop, fft = Op("while.8", "jit(f)/while", "model.py:3"), Op("fft.0", "jit(f)/fft", "model.py:4")
    ops = {(2, "kWhile"): loop, (7, "kFft"): fft, (5, "kCopy"): Op("not this one")}
    report = report_of(FFT_IN_LOOP, FULL, ops)
    assert {o.kind: o.ops for o in report.outside} == {"While": (loop,), "Fft": (fft,)}


# Written by hand: on an H200, jax 0.11 reported both as kCustomCall and neither as recordable.
CALLS = """\
001: kCustomCall    [source       | next=002 (1)] xla_ffi_python_gpu_callback
002: kCustomCall    [prev=001 (1) | sink        ] cusolver_geqrf_ffi
"""


def test_python_callbacks_and_solver_calls_have_different_remedies():
    ops = {
        (1, "kCustomCall"): Op("custom-call.1", "jit(f)/debug_callback"),
        (2, "kCustomCall"): Op("custom-call.2", "jit(f)/geqrf"),
    }
    remedies = {o.ops[0].name: o.remedy for o in report_of(CALLS, FULL, ops).outside}
    assert remedies["jit(f)/debug_callback"] == "return the values instead of calling Python with them"
    assert "in a program of its own" in remedies["jit(f)/geqrf"]
    assert "COMMAND_BUFFER_COMPATIBLE" in remedies["jit(f)/geqrf"]


# A Pallas Mosaic kernel on jax 0.12: in a program of two kernels, and in a loop that slices an array by its counter.
MOSAIC = """\
001: kCustomCall   [source       | next=002 (1)] kCustomCall
002: kCustomKernel [prev=001 (1) | sink        ] input_reduce_fusion grid: [1, 1, 1] threads: [32, 1, 1]
"""
MOSAIC_IN_LOOP = """\
004: kWhile         [prev=000 (1) | sink        ]   
condition:
    005: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink] 
        006: kDynamicSliceFusion [source       | next=009 (2)] params=2, results=3
            007: kCustomCall [source | sink] kCustomCall
        009: kCustomKernel       [prev=006 (2) | next=010 (1)] input_reduce_fusion grid: [1, 1, 1] threads: [16, 1, 1]
"""  # noqa: W291


def test_a_mosaic_kernel_stays_outside_only_if_its_sequence_is_too_short():
    ops = {(1, "kCustomCall"): Op("cast_transpose.1", "jit(f)/cast_transpose", target="mosaic_gpu_v2")}
    assert {o.reason for o in report_of(MOSAIC, DEFAULT, ops).outside} == {"fewer than 5 in a row"}


def test_an_unknown_custom_call_may_also_be_in_a_sequence_that_is_too_short():
    (call,) = (o for o in report_of(MOSAIC, DEFAULT, {}).outside if o.kind == "CustomCall")
    assert "handler" in call.reason
    assert "fewer than 5 in a row" in call.reason
    (call,) = (o for o in report_of(CALLS, FULL, {}).outside if o.kind == "CustomCall")
    assert "in a row" not in call.reason


def test_a_captured_call_in_its_body_is_not_a_reason_for_a_loop_to_stay_outside():
    (loop,) = report_of(MOSAIC_IN_LOOP, FULL, {}).outside
    assert loop.reason == "the loop slices an array by its counter"


def test_every_reason_for_an_uncaptured_loop_is_reported_with_its_remedy():
    report = report_of(SLICING_LOOP, DEFAULT, {})
    (loop,) = (o for o in report.outside if o.kind == "While")
    assert loop.reason == "WHILE is off by default and the loop slices an array by its counter"
    assert "`graph` full" in loop.remedy
    assert "xla_gpu_command_buffer_unroll_loops=true" in loop.remedy


def test_a_cpu_program_compiles_without_a_report_or_a_dump(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    compiled, report = compile_and_report(jax.jit(lambda x: x * 2).lower(jnp.ones(3)), {})
    assert report is None
    assert compiled(jnp.ones(3)).tolist() == [2, 2, 2]
    assert list(tmp_path.iterdir()) == []


# --- On a compile-only target: XLA writes the dump. ---


def compile_step(step, *args, graph="auto", extra=(), **jit_kwargs):
    options = compiler_options(graph, extra, platform="gpu")
    return aot.compile_for(jax.jit(step, **jit_kwargs), *args, compiler_options=options)


def mlp(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


WEIGHTS = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6
X = jax.ShapeDtypeStruct((32, 64), jnp.float32)


@pytest.mark.target
def test_a_fully_captured_step_has_no_outside_thunks(h200):
    _, report = compile_step(mlp, WEIGHTS, X)
    assert report.command_buffers == 1
    assert report.captured == report.total >= 4
    assert report.outside == ()


@pytest.mark.target
def test_graph_off_captures_nothing_and_reports_the_reason(h200):
    _, report = compile_step(mlp, WEIGHTS, X, graph="off")
    assert (report.command_buffers, report.captured) == (0, 0)
    assert sum(o.count for o in report.outside) == report.total >= 4
    assert {(o.reason, o.remedy) for o in report.outside} == {("command buffers are off", "`graph` auto or full")}


@pytest.mark.target
def test_the_temporary_dump_is_removed(h200, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    compile_step(mlp, WEIGHTS, X)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.target
def test_a_dump_requested_by_the_user_is_kept(h200, tmp_path):
    _, report = compile_step(mlp, WEIGHTS, X, extra=[f"xla_dump_to={tmp_path}"])
    assert report.captured == report.total
    assert list(tmp_path.glob("*jit_mlp.thunk_sequence.txt"))
    # Two programs have the same name: the report describes the newer one.
    _, report = compile_step(mlp, WEIGHTS, X, graph="off", extra=[f"xla_dump_to={tmp_path}"])
    assert report.captured == 0
