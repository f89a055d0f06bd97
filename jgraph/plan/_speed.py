"""Estimates the time of a training step: matmuls at a share of the GPU's peak rate, and the collectives that they do not hide.

These are estimates. A share of the peak rate and of a transfer that is hidden stands for everything that is not counted.
"""

import math
from dataclasses import dataclass

from jgraph.device import DEVICES, Device
from jgraph.pipeline import find_schedule
from jgraph.plan._memory import State, num_layers
from jgraph.schedule import simulate
from jgraph.train.config import TrainConfig

# Share of the peak rate of bfloat16 matmuls in a step with few exposed collectives, and how much faster a step is in FP8. On
# H200s, gpt-1b3 and gpt-7b have 0.54 to 0.56, and llama3-8b has 0.51; 1.33 to 1.38 (notes/develop/measurements).
EFFICIENCY = 0.53
FP8_SPEEDUP = 1.33
# Share of the transfers of an axis beside matmuls: the reductions of `dp` come after the last backward.
HIDDEN = {"dp": 0.0, "fsdp": 0.8, "cp": 0.0, "tp": 0.5, "ep": 0.5, "pp": 1.0}
GPUS_PER_NODE = 8
# Of the network adapter of each GPU, in one direction: 400 Gbit/s, as in NVIDIA's DGX machines.
NETWORK_BYTES_PER_SECOND = 50e9


@dataclass(frozen=True)
class Speed:
    """Estimated times of a step in seconds.

    Attributes:
        compute: Matmuls, with those that are recomputed and the idle time of pipeline ranks.
        collectives: All transfers.
        exposed: Transfers that no matmul hides.
        tokens: Tokens of a step.
    """

    compute: float
    collectives: float
    exposed: float
    tokens: int

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.compute + self.exposed

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all GPUs."""
        return self.tokens / self.step


def estimate(config: TrainConfig, device: Device, state: State, params: int) -> Speed:
    """Estimates the speed of a step of a model with `params` parameters."""
    tokens = config.input.batch_size * config.input.seq_len
    flops = (
        config.hooks.flops(config.model, config.input.batch_size, config.input.seq_len)
        if config.hooks.flops
        else 6.0 * params * tokens
    )
    flops *= 4 / 3 if config.compile.remat == "layer" else 1
    flops *= 2 / 3 if config.lora.rank else 1  # Frozen weights have no gradients.
    rate = device.product_flops_per_second * EFFICIENCY * (FP8_SPEEDUP if config.is_fp8 else 1)
    compute = flops / config.parallel.num_devices / rate
    if config.is_pipeline:
        pipeline = config.pipeline
        microbatches = config.input.num_microbatches
        schedule = find_schedule(pipeline.schedule, pp=config.parallel.pp, chunks=pipeline.chunks, microbatches=microbatches)
        compute /= 1 - simulate(schedule).bubble
    seconds = {axis: nbytes / bandwidth(config, device, axis) for axis, nbytes in traffic(config, state, params).items()}
    # No more is hidden than the matmuls take.
    hidden = min(compute, sum(HIDDEN[axis] * each for axis, each in seconds.items()))
    total = sum(seconds.values())
    return Speed(compute, total, total - hidden, tokens)


def traffic(config: TrainConfig, state: State, params: int) -> dict[str, float]:
    """Returns the bytes that a GPU receives in a step, by axis."""
    parallel, count = config.parallel, config.input.num_microbatches
    share = {axis: (size - 1) / size for axis, size in _axes(config).items()}
    tokens = config.input.microbatch_size * config.input.seq_len // parallel.data_ranks
    width, layers = config.hooks.d_model, num_layers(config) / parallel.pp
    residual = 2 * tokens / parallel.cp * width  # of a layer, in bfloat16
    trained = 0 if config.lora.rank else params / parallel.tp / parallel.pp
    gathers = 2 if parallel.gather_per == "pass" else 1
    once = 1 if config.is_pipeline else count
    weights = params / parallel.tp / parallel.pp
    keys = 2 * tokens * 2 * config.hooks.num_kv_heads * config.hooks.head_size / parallel.tp
    moe = config.hooks.moe
    rows = residual / parallel.tp * (moe.experts_per_token if moe and moe.num_experts else 0)
    return {
        "dp": 2 * state.sums * share["dp"],
        "fsdp": once * (2 * gathers * weights + 4 * trained) * share["fsdp"],
        # Forward: keys and values. Backward: keys and values again, and their gradients in float32.
        "cp": count * layers * 4 * keys * share["cp"],
        # An all-gather and a reduce-scatter around attention and around the MLP, and the same in the backward.
        "tp": count * layers * (12 if config.compile.remat == "layer" else 8) * residual * share["tp"],
        # Rows to the experts and back, and the same in the backward.
        "ep": count * layers * 4 * rows * share["ep"],
        "pp": count * 2 * residual / parallel.tp if parallel.pp > 1 else 0.0,
    }


def bandwidth(config: TrainConfig, device: Device, axis: str) -> float:
    """Returns the bytes per second that a GPU receives from the others of a mesh axis."""
    # The mesh has the order of these sizes, innermost last. Consecutive devices share a node.
    sizes = _axes(config)
    order = list(config.parallel.sizes)
    position = order.index("fsdp" if axis == "ep" else axis)
    stride = math.prod(sizes[name] for name in order[position + 1 :])
    neighbours = max(1, min(sizes[axis], GPUS_PER_NODE // stride))
    link = device.link_bytes_per_second or DEVICES[0].link_bytes_per_second
    assert link is not None, "the first device is measured"
    # Each GPU of a node has an adapter, and a collective uses those of all its GPUs.
    return link if sizes[axis] <= neighbours else min(link, NETWORK_BYTES_PER_SECOND * neighbours)


def _axes(config: TrainConfig) -> dict[str, int]:
    return config.parallel.sizes | {"ep": config.parallel.ep}
