"""Collectives of a compiled program, and those that a matmul overlaps."""

from dataclasses import dataclass

import pytest

from jgraph.xla.explain import Collectives

PROGRAM = """\
HloModule jit_step, is_scheduled=true

%fused_dot (p0: f32[8,8], p1: f32[8,8]) -> f32[8,8] {
  %p0 = f32[8,8]{1,0} parameter(0)
  %p1 = f32[8,8]{1,0} parameter(1)
  ROOT %dot.1 = f32[8,8]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_add (p2: f32[8,8], p3: f32[8,8]) -> f32[8,8] {
  %p2 = f32[8,8]{1,0} parameter(0)
  %p3 = f32[8,8]{1,0} parameter(1)
  ROOT %add.1 = f32[8,8]{1,0} add(%p2, %p3)
}

ENTRY %main (x: f32[8,8], w: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %w = f32[8,8]{1,0} parameter(1)
  %start = (f32[8,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%x), dimensions={0}
LINES
  %done = f32[8,8]{1,0} all-gather-done(%start)
  ROOT %root = f32[8,8]{1,0} add(%done, %done)
}
"""
MATMULS = {
    "a dot": "%y = f32[8,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    "a fusion": "%y = f32[8,8]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused_dot",
    "cuBLAS": '%y = f32[8,8]{1,0} custom-call(%x, %w), custom_call_target="__cublas$gemm"',
    "cuDNN attention": '%y = f32[8,8]{1,0} custom-call(%x, %w), custom_call_target="__cudnn$fmhaSoftmax"',
    "a Pallas kernel": '%y = f32[8,8]{1,0} custom-call(%x, %w), custom_call_target="mosaic_gpu_v2"',
}
OTHERS = {
    "nothing": "",
    "an elementwise fusion": "%y = f32[8,8]{1,0} fusion(%x, %w), kind=kLoop, calls=%fused_add",
    "a copy": "%y = f32[8,8]{1,0} copy(%x)",
}


@dataclass(frozen=True)
class Program:
    """A compiled program that has only a text."""

    text: str

    def as_text(self) -> str:
        return self.text


def counts(*lines: str, program: str = PROGRAM) -> tuple[int, int]:
    found = Collectives.count(Program(program.replace("LINES", "\n".join(f"  {line}" for line in lines))))
    return found.total, found.overlapped


@pytest.mark.parametrize("kind", MATMULS)
def test_a_collective_overlaps_with_a_matmul_between_its_start_and_its_end(kind):
    assert counts(MATMULS[kind]) == (1, 1)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_collective_does_not_overlap_with_other_operations(kind):
    assert counts(OTHERS[kind]) == (1, 0)


def test_matmuls_before_the_start_and_after_the_end_do_not_overlap():
    dot = MATMULS["a dot"]
    before = PROGRAM.replace("  %start", f"  {dot}\n  %start")
    after = PROGRAM.replace("  ROOT %root", f"  {dot}\n  ROOT %root")
    assert counts(program=before) == counts(program=after) == (1, 0)


def test_every_running_collective_overlaps_with_a_matmul():
    more = [
        "%second = (f32[8,8]{1,0}, f32[8,8]{1,0}) collective-permute-start(%w), source_target_pairs={{0,1}}",
        MATMULS["cuBLAS"],
        "%end = f32[8,8]{1,0} collective-permute-done(%second)",
        "%third = (f32[8,8]{1,0}, f32[8,8]{1,0}) all-reduce-start(%y), to_apply=%fused_add",
        "%last = f32[8,8]{1,0} all-reduce-done(%third)",
    ]
    assert counts(*more) == (3, 2)


def test_a_collective_without_start_and_end_does_not_overlap():
    lines = ["%s = f32[4,8]{1,0} reduce-scatter(%w), dimensions={0}, to_apply=%fused_add", MATMULS["a dot"]]
    assert counts(*lines) == (2, 1)


def test_the_report_has_both_counts_in_one_line():
    assert str(Collectives(7, 3)) == "collectives: 7, 3 overlapped by matmuls"


def test_a_program_of_one_device_has_no_collectives():
    lines = PROGRAM.splitlines()
    text = "\n".join(line for line in lines if "all-gather" not in line).replace("%done, %done", "%x, %w")
    assert counts(MATMULS["a dot"], program=text) == (0, 0)
