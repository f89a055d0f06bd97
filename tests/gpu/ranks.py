"""Trains tiny models with several layouts in turn. As a program, a process of a run, which prints their losses as JSON."""

import json
from dataclasses import replace

import jax
import numpy as np

from jgraph.dispatch import check_devices
from jgraph.exits import end_with
from jgraph.moe.config import MoEConfig
from jgraph.processes import connect
from jgraph.step.compiled import CompiledStep
from jgraph.train.config import OptimizerConfig, TrainConfig
from jgraph.train.setup import TrainSetup
from jgraph_models.gpt import GPTConfig

MODEL = GPTConfig(
    num_layers=2, d_model=64, num_heads=4, num_kv_heads=4, d_ff=128, vocab_size=256, attention="xla", compute_dtype="float32"
)
EXPERTS = replace(MODEL, mlp="swiglu", moe=MoEConfig(num_experts=4, experts_per_token=2, capacity=2))
CONFIG = TrainConfig.from_fields(
    steps=5,
    batch_size=16,
    num_microbatches=4,
    seq_len=32,
    model=MODEL,
    optimizer=OptimizerConfig(eps=1e-3, warmup_steps=1, learning_rate=1e-3),
)


def layouts(count: int) -> dict[str, TrainConfig]:
    """Returns a configuration for `count` devices for each parallelism. A model has one layer per device."""
    dense, experts = (CONFIG.changed(model=replace(model, num_layers=count)) for model in (MODEL, EXPERTS))
    found = {name: dense.changed(**{name: count}) for name in ("dp", "fsdp", "tp", "pp")}
    return found | {"ep": experts.changed(dp=count, ep=count)}


def losses(config: TrainConfig) -> list[float]:
    """Returns the losses of the steps of a run."""
    return trained(config)[0]


def trained(config: TrainConfig) -> tuple[list[float], CompiledStep]:
    """Returns the losses of the steps of a run, and its step."""
    setup = TrainSetup.from_config(config)
    with jax.default_matmul_precision("highest"):
        step = setup.compile_step()
    state, values = setup.init(), []
    rng = np.random.default_rng(0)
    shape = config.input.batch_size, config.input.seq_len + 1
    for _ in range(config.steps):
        tokens_BS = rng.geometric(0.05, shape).astype(np.int32) % config.model.vocab_size
        state, metrics = step(state, setup.step.place(tokens_BS[setup.step.batch_rows(shape[0])]))
        values.append(float(metrics.loss))
    return values, step


def main() -> int:
    """Prints the losses of each layout."""
    connect()
    check_devices()
    print(json.dumps({name: losses(config) for name, config in layouts(jax.device_count()).items()}))
    return 0


if __name__ == "__main__":
    end_with(main)
