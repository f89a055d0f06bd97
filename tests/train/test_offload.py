"""Tests runs with the optimizer state or the activations in host memory."""

import jax
import pytest

from jgraph.errors import ConfigError
from jgraph.train.__main__ import parse
from jgraph.train.config import TrainConfig
from jgraph.train.setup import TrainSetup
from jgraph.tree import is_on_host, shard_nbytes
from jgraph.xla import aot
from jgraph.xla.explain import Memory
from jgraph.xla.hlo import HloModule
from jgraph_models.gpt import GPTConfig
from tests import tiny
from tests.target_fixture import reused_kernels
from tests.train.test_pipeline_training import trained

RUN = ("--data", "synthetic", "--batch-size", "8", "--steps", "4", "--checkpoint-every", "2")
BFLOAT16 = ("--main-params-dtype", "bfloat16", "--main-grads-dtype", "bfloat16")


def losses_of(*flags):
    return trained(parse([*tiny.FLAGS, *RUN, "--model.num-layers", "3", *flags])).losses


@pytest.mark.long
def test_a_run_resumes_with_and_without_offload(tmp_path):
    constant = ("--optimizer.schedule", "constant", "--optimizer.warmup-steps", "0")
    assert tiny.train(tmp_path / "whole", *RUN, *constant) == 0
    for steps, offload in ((1, "nothing"), (2, "optimizer"), (4, "nothing")):
        flags = (*RUN, *constant, "--optimizer.extend", "schedule", "--steps", str(steps), "--offload", offload)
        assert tiny.train(tmp_path / "parts", *flags) == 0
    whole, parts = ([loss for _, loss, _ in tiny.losses(tmp_path / name)] for name in ("whole", "parts"))
    assert parts == pytest.approx(whole, rel=1e-6)


@pytest.mark.long
def test_a_run_with_bfloat16_parameters_may_not_change_offload(tmp_path, capsys):
    assert tiny.train(tmp_path, *RUN, *BFLOAT16, "--offload", "optimizer") == 0
    assert tiny.train(tmp_path, *RUN, *BFLOAT16) == 2
    assert "--offload is nothing and was optimizer" in capsys.readouterr().err


def test_a_run_on_one_device_counts_device_memory_without_the_moments():
    setup = TrainSetup.from_config(parse([*tiny.FLAGS, *RUN, "--offload", "optimizer"]))
    state = setup.step.state
    assert shard_nbytes(state.opt_state) < 16
    assert any(map(is_on_host, jax.tree.leaves(state.opt_state)))


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [(), ("--fsdp", "2"), ("--model.scan-layers",), ("--precision", "fp8", "--fp8.emulate"), ("--num-microbatches", "2")],
)
def test_residuals_in_host_memory_give_the_same_losses_as_recomputed_layers(flags):
    assert losses_of("--remat", "offload", *flags) == losses_of("--remat", "layer", *flags)


def test_a_pipeline_refuses_residuals_in_host_memory():
    with pytest.raises(ConfigError, match="`remat` is offload: must be nothing, layer or wide in a pipeline"):
        TrainConfig.from_fields(steps=1, pp=2, num_microbatches=2, remat="offload")


TOKENS, WIDTH = 4 * 512, 256


def compiled_for_target(remat, num_layers, **fields):
    model = GPTConfig(
        num_layers=num_layers, d_model=WIDTH, num_heads=2, num_kv_heads=2, d_ff=4 * WIDTH, vocab_size=256, attention="xla"
    )
    setup = TrainSetup.from_config(
        TrainConfig.from_fields(model=model, steps=4, batch_size=4, seq_len=512, remat=remat, **fields)
    )
    step = setup.step
    options = setup.options("gpu") | reused_kernels()
    return aot.compile_for(step.jitted(), step.state, setup.batch(), compiler_options=options)


@pytest.mark.long
@pytest.mark.target
def test_residuals_of_matmuls_are_in_host_memory_and_of_two_layers_on_the_device(h200):
    layers = 6
    again = Memory.read(compiled_for_target("layer", layers)[0])
    compiled, report = compiled_for_target("offload", layers)
    kept = Memory.read(compiled)
    # In bfloat16: queries, keys and values, and the projection of attention.
    residuals = 2 * TOKENS * (3 * WIDTH + WIDTH)
    assert kept.host == layers * residuals
    assert kept.temporaries < again.temporaries + 2 * residuals
    assert sum(group.count * group.nbytes for group in report.buffers) <= kept.temporaries


@pytest.mark.target
def test_residuals_of_a_layer_are_fetched_beside_the_backward_pass_of_the_layer_before(h200):
    module = HloModule(compiled_for_target("offload", 6)[0].as_text())
    products = {name for name, part in module.computations.items() if any(i.is_matmul for i in part.instructions.values())}
    running, hidden = {}, 0
    for instruction in module.computations[module.entry].instructions.values():
        if instruction.opcode == "copy-start":
            running[instruction.name] = False
        elif instruction.opcode == "copy-done":
            hidden += running.pop(instruction.operands[0])
        elif instruction.is_matmul or products & set(instruction.called):
            running = dict.fromkeys(running, True)
    # Two copies each of six layers: at least one per layer and direction runs beside a matmul.
    assert hidden >= 2 * (6 - 2)
