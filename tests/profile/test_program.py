"""The text of a compiled program: FLOPs, bytes, categories, and arrays that depend on the batch."""

import gzip

import jax
import jax.numpy as jnp
import pytest

from jgraph.profile._categories import purpose_of, purpose_of_hidden, scope_of
from jgraph.profile.program import Program

TEXT = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, entry_computation_layout={}

%body (p: f32[8,256], i: s32[]) -> f32[1,256] {
  %p = f32[8,256]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %part = f32[1,256]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,256}
}

%update (q: f32[8,256], v: f32[1,256], j: s32[]) -> f32[8,256] {
  %q = f32[8,256]{1,0} parameter(0)
  %v = f32[1,256]{1,0} parameter(1)
  %j = s32[] parameter(2)
  %null = s32[] constant(0)
  ROOT %written = f32[8,256]{1,0} dynamic-update-slice(%q, %v, %j, %null)
}

%work (a: f32[1,256], b: f32[256,64]) -> (f32[1,64], f32[1,256]) {
  %a = f32[1,256]{1,0} parameter(0)
  %b = f32[256,64]{1,0} parameter(1)
  %tanh = f32[1,256]{1,0} tanh(%a), metadata={op_name="jit(step)/jvp(jgraph.attention)/tanh"}
  %dot = f32[1,64]{1,0} dot(%tanh, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="f/jvp()/dot"}
  ROOT %both = (f32[1,64]{1,0}, f32[1,256]{1,0}) tuple(%dot, %tanh)
}

ENTRY %main (state: f32[8,256], w: f32[256,64], n: s32[]) -> (f32[8,256], f32[1,64]) {
  %state = f32[8,256]{1,0} parameter(0)
  %w = f32[256,64]{1,0} parameter(1)
  %n = s32[] parameter(2)
  %sliced = f32[1,256]{1,0} fusion(%state, %n), kind=kLoop, calls=%body
  %made = (f32[1,64]{1,0}, f32[1,256]{1,0}) fusion(%sliced, %w), kind=kLoop, calls=%work
  %y = f32[1,64]{1,0} get-tuple-element(%made), index=0
  %x = f32[1,256]{1,0} get-tuple-element(%made), index=1
  %all = f32[1,64]{1,0} all-reduce-start(%y), to_apply=%body
  %new = f32[8,256]{1,0} fusion(%state, %x, %n), kind=kLoop, calls=%update
  ROOT %out = (f32[8,256]{1,0}, f32[1,64]{1,0}) tuple(%new, %y)
}
"""


@pytest.fixture(scope="module")
def program():
    return Program.parse(TEXT)


def compiled(fn, *args, donate):
    text = jax.jit(fn, donate_argnums=donate, keep_unused=True).lower(*args).compile().as_text()
    assert text
    return Program.parse(text)


def matmuls(program):
    """Returns the number of matmuls per category. A fusion and its matmul count once."""
    found = [purpose_of(program, i).category for i in program.instructions.values() if i.is_matmul]
    return {category: found.count(category) for category in sorted(set(found))}


def test_the_entry_and_all_instructions_are_found(program):
    assert (program.name, program.entry) == ("jit_step", "main")
    assert list(program.computations["main"].instructions)[-1] == "out"
    assert program.instructions["made"].operands == ("sliced", "w")
    assert [str(shape) for shape in program.instructions["made"].shapes] == ["f32[1,64]", "f32[1,256]"]


def test_a_slice_in_a_fusion_reads_only_the_bytes_of_the_slice(program):
    row, index = 256 * 4, 4
    assert program.nbytes(program.instructions["sliced"]) == row + index + row


def test_an_update_in_a_fusion_writes_only_the_bytes_of_the_update(program):
    row, index = 256 * 4, 4
    assert program.nbytes(program.instructions["new"]) == row + index + row


def test_a_fusion_has_the_flops_of_its_matmuls(program):
    assert program.flops(program.instructions["made"]) == 2 * 256 * 64
    assert program.label(program.instructions["made"]) == "matmul f32[1,256] x f32[256,64] -> f32[1,64]"


def test_data_movement_and_matmuls_have_different_categories(program):
    categories = {name: purpose_of(program, program.instructions[name]).category for name in ("sliced", "made", "new", "all")}
    assert categories == {"sliced": "copies", "made": "forward", "new": "copies", "all": "all-reduce"}


def test_an_array_that_is_updated_in_place_does_not_depend_on_the_batch(program):
    assert {"w", "n", "sliced"} <= program.batch_dependent  # sliced depends on the index n
    assert "state" not in program.batch_dependent


@pytest.mark.parametrize(("unroll", "donate"), [(1, 0), (4, 0), (1, ())])
def test_dgrad_and_wgrad_are_distinguished_in_a_joint_backward(unroll, donate):
    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(weights, xs):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, x)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), xs, unroll=unroll)
        return jax.tree.map(lambda w, g: w - g, weights, total)

    weights = [jnp.ones((128, 128))] * 3
    xs = jnp.ones((4, 64, 128))
    # The gradient of the first layer's input is not computed.
    expected = {"dgrad": 2 * unroll, "forward": 3 * unroll, "wgrad": 3 * unroll}
    assert matmuls(compiled(step, weights, xs, donate=donate)) == expected


def test_the_flops_of_an_h200_step_equal_the_flops_of_its_model(recorded):
    with gzip.open(recorded("one") / "program.txt.gz", "rt") as file:
        program = Program.parse(file.read())
    layers, width, ff, vocabulary, tokens, length, heads = 2, 256, 1024, 8192, 256, 128, 4
    by_layer = 2 * tokens * (3 * width * width + width * width + 2 * width * ff)
    head = 2 * tokens * width * vocabulary
    # Every matmul has forward, dgrad and wgrad. Attention has two matmuls forward and five backward, halved by the causal mask.
    attention = (2 + 5) * 2 * (tokens // length) * heads * length * length * (width // heads) // 2
    entry = program.computations[program.entry].instructions.values()
    assert sum(map(program.flops, entry)) == 3 * (layers * by_layer + head) + layers * attention


@pytest.mark.parametrize(
    ("op", "category"),
    [
        ("psum.649.1", "all-reduce"),
        ("psum.652.0-fusion.1", "all-reduce"),
        ("ppermute.59.1", "transfer"),
        ("all-gather-start.3", "all-gather"),
        ("all_gather.12", "all-gather"),
        ("reduce_scatter.7.1", "reduce-scatter"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce-scatter"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "transfer"),
        ("MemcpyD2D", "copies"),
        ("loop_add_fusion", "other"),
    ],
)
def test_a_collective_missing_from_the_text_is_recognized_by_its_instruction(op, category):
    assert purpose_of_hidden(op).category == category


@pytest.mark.parametrize("part", ["dispatch", "combine"])
def test_a_gather_of_expert_rows_is_dispatch_or_combine_and_not_a_copy(part):
    text = f"""HloModule jit_step

ENTRY %main (x: bf16[8,256], places: s32[16]) -> bf16[16,256] {{
  %x = bf16[8,256]{{1,0}} parameter(0)
  %places = s32[16]{{0}} parameter(1)
  ROOT %rows = bf16[16,256]{{1,0}} gather(%x, %places), metadata={{op_name="jit(step)/jvp(jgraph.{part})/gather"}}
}}
"""
    program = Program.parse(text)
    assert purpose_of(program, program.instructions["rows"]).category == part


def test_an_instruction_without_metadata_has_the_category_of_its_operands():
    text = """HloModule jit_step

ENTRY %main (x: f32[8,256]) -> f32[8] {
  %x = f32[8,256]{1,0} parameter(0)
  %tanh = f32[8,256]{1,0} tanh(%x), metadata={op_name="jit(step)/jgraph.optimizer/tanh"}
  %ones = f32[256]{0} constant({...})
  ROOT %dot = f32[8]{0} dot(%tanh, %ones), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    program = Program.parse(text)
    assert purpose_of(program, program.instructions["dot"]).category == "optimizer"


@pytest.mark.parametrize(
    ("call", "operands", "result"),
    [
        ("dot", "s32[8] bf16[96,64] bf16[8,64,256]", "bf16[96,256]"),
        ("dgrad", "s32[8] bf16[96,256] bf16[8,64,256]", "bf16[96,64]"),
        ("wgrad", "s32[8] bf16[96,64] bf16[96,256]", "bf16[8,64,256]"),
        ("dot_fp8", "s32[8] f32[1] f8e4m3fn[96,64] f8e4m3fn[256,8,64]", "bf16[96,256]"),
    ],
)
def test_a_grouped_matmul_kernel_has_the_flops_of_all_its_rows(call, operands, result):
    given = [f"  %a{i} = {shape} parameter({i})" for i, shape in enumerate(operands.split())]
    names = ", ".join(f"%a{i}" for i in range(len(given)))
    made = f'  ROOT %y = {result} custom-call({names}), custom_call_target="mosaic_gpu_v2"'
    named = f'metadata={{op_name="jit(step)/jvp(jgraph.experts)/jit(_jgraph_grouped_{call})/grouped/mpmd_map"}}'
    program = Program.parse("\n".join(["HloModule step", "", "ENTRY %main () -> f32[] {", *given, f"{made}, {named}", "}", ""]))
    y = program.computations[program.entry].instructions["y"]
    assert program.flops(y) == 2 * 96 * 64 * 256
    assert program.label(y).startswith("grouped matmul ")


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("jit(step)/jvp(decoder)/layer/jit(relu)/max", "decoder/layer"),
        ("jit(step)/transpose(jvp(decoder))/layer/jvp(decoder)/layer/checkpoint/inner/dot_general", "decoder/layer/inner"),
        ("jit(<lambda>)/jvp(decoder)/while/body/closed_call/layer/vmap()/exp", "decoder/layer"),
        ("jit(step)/cond/branch_1_fun/update/mul", "update"),
        ("jit(step)/transpose(jvp())/dot_general", ""),
        ("params['layer']", ""),
    ],
)
def test_a_scope_has_no_transforms_control_flow_and_primitives(name, scope):
    assert scope_of(name) == scope
