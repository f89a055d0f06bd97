"""Tests the loop over microbatches: one body, or pairs if experts are exchanged."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from jgraph.autodiff import replay
from jgraph.layout import named
from jgraph.moe.config import MoEConfig
from jgraph.precision.config import FP8Config
from jgraph.step import train_step
from jgraph.strategies import FullySharded, Replicated
from jgraph.strategies._accumulate import accumulate
from jgraph.strategies.objective import Carry, Loss, Objective
from jgraph.train.config import LoRAConfig, TrainConfig
from jgraph.train.setup import TrainSetup
from jgraph_models.gpt_config import GPTConfig
from tests.own import Settings

PARAMS = {"w": jnp.linspace(-1, 1, 12).reshape(4, 3)}
REDUCTIONS = {kind: kind for kind in ("max", "sum", "last")}


def sums_and_grads(params, x_BD, key):
    def loss(params):
        # Small arguments: the derivative of tanh at large ones is a difference of almost equal numbers.
        total = jnp.sum(jnp.tanh(x_BD / 32 @ params["w"]) * (1 + jax.random.uniform(key)))
        return total, Loss(total, carried=dict.fromkeys(REDUCTIONS, -x_BD[0, 0]))

    (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return sums, grads


def run(count, **choices):
    return accumulate(sums_and_grads, count, dtype=jnp.float32, reductions=REDUCTIONS, **choices)


def batch_of(count):
    return jnp.arange(count * 2 * 4.0).reshape(count, 2, 4)


def matmuls(count, **choices):
    lowered = jax.jit(run(count, **choices)).lower(PARAMS, batch_of(count), jax.random.key(0))
    return lowered.as_text().count("stablehlo.dot_general")


def test_a_program_has_the_matmuls_of_one_microbatch_for_any_number_of_microbatches():
    assert matmuls(1) == matmuls(2) == matmuls(8)


def test_casts_of_parameters_are_outside_the_loop_and_callbacks_inside():
    seen = []

    def loss(params, x_BD, key):
        def of(params):
            w = jnp.tanh(params["w"].T.astype(jnp.bfloat16))  # only the cast is moved
            jax.debug.callback(lambda x: seen.append(float(x)), x_BD[0, 0])
            total = jnp.sum(x_BD @ w.T).astype(jnp.float32) + jnp.sum(params["w"])
            return total, Loss(total, carried=dict.fromkeys(REDUCTIONS, total))

        (_, sums), grads = jax.value_and_grad(of, has_aux=True)(params)
        return sums, grads

    args = PARAMS, batch_of(4).astype(jnp.bfloat16), jax.random.key(0)
    summed = accumulate(loss, 4, dtype=jnp.float32, reductions=REDUCTIONS)
    (loop,) = (eqn for eqn in jax.make_jaxpr(summed)(*args).jaxpr.eqns if eqn.primitive.name == "scan")
    cast_in_loop = [eqn for eqn in replay.body(loop).eqns if eqn.primitive.name == "convert_element_type"]
    assert not [eqn for eqn in cast_in_loop if eqn.invars[0].aval.size == 12 and eqn.outvars[0].aval.dtype == jnp.bfloat16]
    assert replay.runs(loop, ("tanh",))
    sums, grads = jax.jit(summed)(*args)
    total, total_grads = jax.tree.map(jnp.zeros_like, (sums.total, grads))
    for batch in args[1]:
        one, g = jax.jit(loss)(PARAMS, batch, args[2])
        total, total_grads = total + one.total, jax.tree.map(jnp.add, total_grads, g)
    jax.effects_barrier()
    assert sorted(seen) == sorted([0.0, 8.0, 16.0, 24.0] * 2)
    assert float(sums.total) == pytest.approx(float(total), rel=1e-6)
    np.testing.assert_allclose(grads["w"], total_grads["w"], rtol=1e-2)  # sums of bfloat16 gradients in another order


# A tiny GPT with two rows per data rank in a microbatch.
BASE = {
    "steps": 4,
    "seq_len": 16,
    "model": GPTConfig(num_layers=1, d_model=32, num_heads=2, num_kv_heads=2, d_ff=64, vocab_size=64),
}
EXPERTS = dataclasses.replace(BASE["model"], mlp="swiglu", moe=MoEConfig(num_experts=4, experts_per_token=2, d_ff=32))
CASES = {
    "one device": {},
    "data parallel": {"dp": 2},
    "sharded": {"fsdp": 2},
    "tensor parallel": {"tp": 2},
    "fp8": {"precision": "fp8", "fp8": FP8Config(recipe="delayed", emulate=True)},
    "carried state": {"module": "tests.own:Normed", "model": Settings()},
    "exchanged experts": {"fsdp": 2, "ep": 2, "model": EXPERTS},
    "lora": {"lora": LoRAConfig(rank=4)},
}


SLOW = ("exchanged experts", "lora")


@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in CASES])
def test_a_step_with_16_microbatches_has_as_many_operations_as_one_with_few(case):
    def operations(num_microbatches):
        config = TrainConfig.from_fields(**BASE | CASES[case])
        batch_size = 2 * config.parallel.data_ranks * num_microbatches
        setup = TrainSetup.from_config(config.changed(batch_size=batch_size, num_microbatches=num_microbatches))
        return setup.step.jitted().lower(setup.step.state, setup.batch()).as_text().count(" = ")

    assert operations(4 if case == "exchanged experts" else 2) == operations(16)


@pytest.mark.parametrize(("count", "at_once"), [(3, 1), (3, 2), (4, 2)])
def test_microbatches_are_summed_each_with_its_own_key(count, at_once):
    key, batch_M = jax.random.key(3), batch_of(count)
    sums, grads = jax.jit(run(count, at_once=at_once))(PARAMS, batch_M, key)
    found = [sums_and_grads(PARAMS, batch_M[m], jax.random.fold_in(key, m)) for m in range(count)]
    np.testing.assert_allclose(sums.total, sum(each.total for each, _ in found), rtol=1e-5)
    np.testing.assert_allclose(grads["w"], sum(each["w"] for _, each in found), rtol=1e-5)
    firsts = [-8.0 * m for m in range(count)]
    assert sums.carried == {"max": 0, "sum": sum(firsts), "last": firsts[-1]}


def test_random_keys_and_bools_are_carried_over_microbatches_and_devices():
    def loss(params, rows, key, carried):
        row = rows[-1]
        after = {"key": jax.random.fold_in(carried["key"], row), "last": row == 7, "any": row == 3}
        return Loss(jnp.mean(rows * params["w"]), carried=after)

    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    carried = {"key": jax.random.key(5), "last": jnp.zeros((), bool), "any": jnp.zeros((), bool)}
    reductions = {"key": "last", "last": "last", "any": "max"}
    strategy, params = Replicated(mesh, {"w": jnp.ones(())}), {"w": jnp.ones(())}
    step = train_step(loss, optax.sgd(0.1), strategy, num_microbatches=2, carried=carried, reductions=reductions)
    rows = jnp.arange(8.0)
    run, state = step.compile(rows), step.init(params, carried)
    state, _ = run(state, step.place(rows))
    assert state.carried["last"]
    assert state.carried["any"]
    assert state.carried["key"] == jax.random.fold_in(carried["key"], 7)


@pytest.mark.parametrize(("experts", "at_once"), [(1, 1), (2, 2)])
def test_only_microbatches_that_exchange_rows_of_experts_run_in_pairs(experts, at_once):
    shapes = {"mlp": {"up_EDF2": jax.ShapeDtypeStruct((2, 4, 3), jnp.float32)}}

    def loss(params, x_BD, key):
        return jnp.mean(jnp.tanh(x_BD @ params["mlp"]["up_EDF2"][0]))

    strategy = FullySharded(Mesh(np.array(jax.devices()[:2]), ("fsdp",)), shapes, experts=experts)
    bound = strategy.bind(Objective(loss=loss, layout=named(shapes), num_microbatches=6))
    params = jax.eval_shape(bound.layout.pack, shapes)
    traced = str(jax.make_jaxpr(bound.loss_and_grads)(params, batch_of(6), jax.random.key(0), Carry({}, {})))
    assert traced.count("length=6") == traced.count(f"unroll={at_once}") == 1
