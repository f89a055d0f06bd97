"""Tests forward, dgrad and wgrad compiled for an H200 target."""

import re

import jax
import jax.numpy as jnp
import pytest

import jgraph
from jgraph.kernels.grouped import grouped_dot
from jgraph.xla.aot import compile_for, lowering_for
from jgraph.xla.donation import alias_map
from jgraph_models.gpt import gelu
from tests.autodiff.stages import mlp

pytestmark = pytest.mark.target

N, D, F = 512, 1024, 4096


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def stage(p, x):
    return mlp(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), p), x)


def experts(p, x, sizes):
    up, down = (p[name].astype(jnp.bfloat16) for name in ("up", "down"))
    gate, up = jnp.split(grouped_dot(x, up, sizes), 2, axis=-1)
    return grouped_dot(jax.nn.silu(gate) * up, down, sizes)


PARAMS = {"up": shape(D, F), "down": shape(F, D), "bias": shape(D)}
SPLIT = jgraph.split_backward(stage)
SPEC = SPLIT.spec(PARAMS, shape(1, N, D, dtype=jnp.bfloat16))


def test_wgrad_adds_to_main_grad_inside_the_matmul(h200):
    run = jax.jit(SPLIT.accumulate, donate_argnums=0)
    # Triton matmuls do the same in their epilogue, but the compiled text does not show it.
    options = {"xla_gpu_enable_triton_gemm": False}
    compiled, _ = compile_for(run, PARAMS, PARAMS, SPEC.residuals, SPEC.stash, compiler_options=options)
    products = re.findall(r"f32\[\d+,\d+\].*custom_call_target=\"__cublas[^\"]*\".*", compiled.as_text())
    assert len(products) == 2
    for product in products:
        assert '"beta":1' in product
        assert "output_to_operand_aliasing" in product


def test_a_gelu_is_the_epilogue_of_a_matmul_with_a_saved_output(h200):
    split = jgraph.split_backward(lambda p, x: x + gelu(x @ p["up"]) @ p["down"])
    args = {name: shape(*PARAMS[name].shape, dtype=jnp.bfloat16) for name in ("up", "down")}, SPEC.y
    compiled, _ = compile_for(jax.jit(split.forward), *args, compiler_options={"xla_gpu_enable_triton_gemm": False})
    assert '"epilogue":"GELU_AUX"' in compiled.as_text()


def test_each_part_is_fully_captured(h200):
    options = {"xla_gpu_graph_min_graph_size": 1}
    for run, *args in (
        (jax.jit(SPLIT.forward), PARAMS, shape(1, N, D, dtype=jnp.bfloat16)),
        (jax.jit(SPLIT.dgrad), PARAMS, SPEC.residuals, SPEC.y),
        (jax.jit(SPLIT.accumulate, donate_argnums=0), PARAMS, PARAMS, SPEC.residuals, SPEC.stash),
    ):
        _, report = compile_for(run, *args, compiler_options=options)
        assert report.captured == report.total


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic kernels need jax 0.11")
def test_each_part_of_experts_has_two_kernels_and_adds_in_place(h200):
    split, rows = jgraph.split_backward(experts), shape(N, D, dtype=jnp.bfloat16)
    params = {"up": shape(4, D, 2 * F), "down": shape(4, F, D)}
    with lowering_for("h200"):
        spec = split.spec(params, rows, shape(4, dtype=jnp.int32))
    for run, *args in (
        (jax.jit(split.forward), params, rows, shape(4, dtype=jnp.int32)),
        (jax.jit(split.dgrad), params, spec.residuals, spec.y),
        (jax.jit(split.accumulate, donate_argnums=0), params, params, spec.residuals, spec.stash),
    ):
        compiled, report = compile_for(run, *args, compiler_options={"xla_gpu_graph_min_graph_size": 1})
        assert report.captured == report.total
        kernels = [line for line in compiled.as_text().splitlines() if "mosaic_gpu" in line and "custom-call(" in line]
        assert len(kernels) == 2
    assert alias_map(compiled) == {0: 0, 1: 1}
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 4 * D * F  # no copy of a sum
