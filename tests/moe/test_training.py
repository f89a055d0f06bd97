"""Tests MoE training runs: logs, warnings, several devices, FP8 and checkpoints."""

import re
import shutil
from functools import cache

import jax
import numpy as np
import pytest

from jgraph.checkpoint.store import Checkpoints
from jgraph.data import Batches
from jgraph.evaluate import main as evaluate
from jgraph.moe import MoEConfig
from jgraph.moe.statistics import summary
from jgraph.train.__main__ import main
from jgraph.train.config import OptimizerConfig, TrainConfig
from jgraph.train.setup import TrainSetup
from jgraph_models.gpt import GPTConfig
from tests import tiny
from tests.train.test_pipeline_training import initial_state
from tests.train.test_resharding import assert_same_bits, restored

# More experts than tokens in 100 steps, so some experts have no token.
FLAGS = """
    --preset gpt-moe-tiny --steps 101 --batch-size 1 --seq-len 4 --log-every 101 --eval-every 101 --eval-batches 1
    --checkpoint-every 101 --sample-tokens 0 --data synthetic --model.num-layers 1 --model.d-model 8 --model.num-heads 2
    --model.num-kv-heads 2 --model.moe.num-experts 512 --model.moe.experts-per-token 1 --model.moe.d-ff 4
"""


@pytest.mark.long
def test_routers_are_logged_and_dead_experts_are_warned_about_once(tmp_path, capsys):
    assert main([*FLAGS.split(), "--run-dir", str(tmp_path)]) == 0
    output = "".join(capsys.readouterr())
    assert output.count("of blocks/0/mlp got no token for 100 steps") == 1
    for entry in tiny.entries(tmp_path):
        assert len(entry["moe_load"]) == 512
        assert sum(entry["moe_load"]) == 512
        assert entry["moe_max_load"] == max(entry["moe_load"]) >= 128
        assert entry["moe_dropped"] == 0
        assert min(entry[name] for name in ("moe_entropy", "moe_balance_loss", "moe_z_loss")) > 0


TINY = """
    --model.vocab-size 256 --model.compute-dtype float32 --model.mlp swiglu --model.moe.num-experts 4 --model.moe.d-ff 16
    --model.moe.balance-loss 1 --data synthetic --sample-tokens 0
"""


@pytest.mark.long
@pytest.mark.once
def test_a_nan_router_is_reported_in_one_line(tmp_path, capsys):
    assert tiny.train(tmp_path, *TINY.split(), "--model.module", "tests.faulty:NaNRouter", "--steps", "1") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "step 1: the loss is nan and the gradient of" in line
    assert "small matrices of routers (float32)" in line


# --- Over several devices ---

ROWS, MICROBATCHES, VOCAB = 8, 2, 61
ONE, SHARDED, REPLICATED, PIPES = "one device", "fsdp 4, ep 2, remat", "dp 4, ep 2", "pp 2, fsdp 2, ep 2"
REPLICATED_PIPES = "pp 2, dp 2, ep 2"
SPREAD = {
    SHARDED: {"fsdp": 4, "ep": 2, "remat": "layer"},
    REPLICATED: {"dp": 4, "ep": 2},
    PIPES: {"pp": 2, "fsdp": 2, "ep": 2, "schedule": "aligned"},  # idle ranks compute too
    REPLICATED_PIPES: {"pp": 2, "dp": 2, "ep": 2, "schedule": "zb-h1"},
}


def layers_of(layout):
    """Returns three layers for pipelines, so that the second stage is padded. Compilation takes most of the time."""
    return 3 if "pp" in layout else 1


@cache
def compiled(layout, num_layers):
    config = TrainConfig.from_fields(
        steps=3,
        batch_size=ROWS,
        num_microbatches=MICROBATCHES,
        seq_len=16,
        model=GPTConfig(
            num_layers=num_layers,
            d_model=16,
            num_heads=2,
            num_kv_heads=2,
            vocab_size=VOCAB,
            mlp="swiglu",
            compute_dtype="float32",
            # The next step reads the bias, so a lost state would change the losses.
            moe=MoEConfig(num_experts=4, d_ff=8, router="sigmoid", balance_loss=0.5, z_loss=0.1, bias_rate=0.1, capacity=4.0),
        ),
        optimizer=OptimizerConfig(eps=1e-3, warmup_steps=1, learning_rate=1e-2),
        **({ONE: {}} | SPREAD)[layout],
    )
    setup = TrainSetup.from_config(config)
    return setup, setup.compile_step()


def started(layout, num_layers):
    """Returns the initial state, whose weights are made once for all layouts."""
    return initial_state(compiled(layout, num_layers)[0])


def trained(layout, num_layers, state, steps):
    """Returns the state after `steps`, and their losses and gradient norms. Donates `state`."""
    setup, step = compiled(layout, num_layers)
    tokens = (np.random.default_rng(0).geometric(0.1, 4000) % VOCAB).astype(np.uint8)
    batches, metrics_by_step = Batches(tokens, batch_size=ROWS, seq_len=16, seed=0), []
    for i in steps:
        state, metrics = step(state, setup.step.place(batches[i]))
        metrics_by_step.append((float(metrics.loss), float(metrics.grad_norm)))
    return state, metrics_by_step


def canonical(layout, num_layers, state):
    return jax.device_get(compiled(layout, num_layers)[0].step.canonical.of(state))


@cache
def on_one_device(num_layers, steps):
    """Returns the canonical state of one device after `steps`, and their losses and gradient norms."""
    state, found = trained(ONE, num_layers, started(ONE, num_layers), range(steps))
    return canonical(ONE, num_layers, state), found


@pytest.mark.long
@pytest.mark.parametrize("layout", [pytest.param(name, marks=[] if name == SHARDED else [pytest.mark.once]) for name in SPREAD])
def test_twenty_steps_on_several_devices_equal_one_device(layout):
    layers = layers_of(layout)
    one, expected = on_one_device(layers, 20)
    state, found = trained(layout, layers, started(layout, layers), range(20))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    ours, theirs = summary(canonical(layout, layers, state).carried), summary(one.carried)
    assert ours["moe_dropped"] == 0
    for name in ("moe_balance_loss", "moe_z_loss", "moe_entropy"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4)


@pytest.mark.long
@pytest.mark.once
def test_a_step_exchanges_rows_without_host_callbacks():
    text = compiled(REPLICATED, 1)[1].as_text()
    assert "callback" not in text
    # Three all-to-alls (rows out, rows back, weights with counts), forward and backward, in one layer.
    assert len(re.findall(r" all-to-all(-start)?\(", text)) == 3 * 2 * MICROBATCHES


@pytest.mark.long
@pytest.mark.once
@pytest.mark.parametrize("layouts", [(REPLICATED, ONE, SHARDED), (REPLICATED_PIPES, ONE, PIPES)], ids=["layer", "stages"])
def test_a_checkpoint_moves_to_other_devices_bit_for_bit(tmp_path, layouts):
    layers = layers_of(layouts[0])
    one, expected = on_one_device(layers, 3)
    state, found, saved = started(layouts[0], layers), [], None
    for i, layout in enumerate(layouts):
        if i:
            state = restored(tmp_path / str(i), compiled(layout, layers)[0])
            assert_same_bits(canonical(layout, layers, state), saved)
        state, more = trained(layout, layers, state, [i])
        found, saved = found + more, canonical(layout, layers, state)
        checkpoints = Checkpoints(tmp_path / str(i + 1), 1)
        checkpoints.save(i + 1, compiled(layout, layers)[0].step.canonical.of(state))
        checkpoints.close()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for (path, a), b in zip(
        jax.tree.leaves_with_path((saved.params, saved.carried)), jax.tree.leaves((one.params, one.carried)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.long
@pytest.mark.once
def test_a_run_logs_dropped_rows_and_can_be_evaluated(tmp_path, capsys):
    flags = [*TINY.split(), "--steps", "2", "--model.moe.overflow", "drop", "--model.moe.capacity"]
    assert tiny.train(tmp_path, *flags, "0.1", "--dp", "2", "--ep", "2", "--sample-tokens", "4") == 0
    last = tiny.entries(tmp_path)[-1]
    # Each device has 64 tokens with two experts each and sends 8 rows to each device.
    assert last["moe_dropped"] == 2 * (2 * 64 - 2 * 8)
    capsys.readouterr()
    assert evaluate([str(tmp_path)]) == 0
    assert f"{last['eval_loss']:.4f} nats/token" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.once
def test_a_mixture_in_fp8_resumes_from_a_pipeline_on_one_device_and_is_evaluated(tmp_path, capsys):
    steps = "--num-microbatches 2 --steps 4 --eval-every 4 --checkpoint-every 2 --checkpoint-keep 2"
    recipe = "--precision fp8 --fp8.format e4m3 --fp8.recipe delayed --fp8.history 4"
    flags = f"{TINY} {steps} {recipe} --model.num-layers 2".split()
    assert tiny.train(tmp_path / "pipe", *flags, "--pp", "2", "--schedule", "1f1b") == 0
    assert "fp8 (delayed scaling): 8 of 8 matmuls with parameters; emulated" in " ".join(capsys.readouterr().out.split())
    shutil.copytree(tmp_path / "pipe", tmp_path / "one")
    shutil.rmtree(tmp_path / "one" / "checkpoints" / "4")
    assert tiny.train(tmp_path / "one", *flags) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "8 of 8 matmuls with parameters; emulated" in out
    assert "resumed from step 2" in out
    names = ("loss", "moe_balance_loss", "moe_entropy", "moe_max_load")
    pipe, one = ([[e[name] for name in names] for e in tiny.entries(tmp_path / run)] for run in ("pipe", "one"))
    np.testing.assert_allclose(one, pipe, rtol=1e-4)
    assert evaluate([str(tmp_path / "one"), "--fsdp", "2"]) == 0
    assert f"{tiny.entries(tmp_path / 'one')[-1]['eval_loss']:.4f} nats/token" in capsys.readouterr().out
