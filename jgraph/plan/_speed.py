"""Estimates the time of a training step: work at one rate for each kind of it, and the collectives that it does not hide.

These are estimates. A rate and a share of a transfer that is hidden stand for everything that is not counted. They were chosen
with the measured steps of `benchmarks/results/plans.json`, which has the estimates beside them.
"""

import math
from dataclasses import dataclass

from jgraph.device import DEVICES, Device
from jgraph.pipeline import find_schedule
from jgraph.plan._memory import State, num_layers
from jgraph.schedule import simulate
from jgraph.train.config import TrainConfig

# Shares of the peak rate of bfloat16 matmuls. In FP8, with the kernels that quantize: layers only, the head stays in bfloat16.
MATMULS = 0.65
FP8_MATMULS = 1.13
ATTENTION = 0.36
# Memory of elementwise kernels, such as norms and activations, for each number that a matmul of a layer reads or writes.
BYTES_PER_NUMBER = 13
# Logits are written, read by the loss, and read for their gradient in bfloat16.
_BYTES_PER_LOGIT = 6
# Parameters and two moments are read and written, and gradients are read for their norm and for the update.
_OPTIMIZER_PASSES = 8
# Starting the kernels of a layer, forward and backward, in a CUDA graph. FP8 has about twice as many.
SECONDS_PER_LAYER = 72e-6
# Share of the transfers of an axis beside matmuls: the reductions of `dp` come after the last backward.
HIDDEN = {"dp": 0.0, "fsdp": 0.8, "cp": 0.0, "tp": 0.5, "ep": 0.5, "pp": 1.0}
GPUS_PER_NODE = 8
# Of the network adapter of each GPU, in one direction: 400 Gbit/s, as in NVIDIA's DGX machines.
NETWORK_BYTES_PER_SECOND = 50e9


@dataclass(frozen=True)
class Speed:
    """Estimated times of a step in seconds.

    Attributes:
        compute: All work of a GPU, with what is recomputed, and the idle time of pipeline ranks.
        collectives: All transfers.
        exposed: Transfers that no work hides.
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
    compute = work(config, device, state, params)
    if config.is_pipeline:
        pipeline = config.pipeline
        microbatches = config.input.num_microbatches
        schedule = find_schedule(pipeline.schedule, pp=config.parallel.pp, chunks=pipeline.chunks, microbatches=microbatches)
        compute /= 1 - simulate(schedule).bubble
    seconds = {axis: nbytes / bandwidth(config, device, axis) for axis, nbytes in traffic(config, state, params).items()}
    # No more is hidden than the work takes.
    hidden = min(compute, sum(HIDDEN[axis] * each for axis, each in seconds.items()))
    total = sum(seconds.values())
    return Speed(compute, total, total - hidden, config.input.batch_size * config.input.seq_len)


def work(config: TrainConfig, device: Device, state: State, params: int) -> float:
    """Returns the seconds of a step on a GPU without transfers: matmuls, attention, passes over memory, starts of kernels."""
    count, gpus = config.input.num_microbatches, config.parallel.num_devices
    tokens = config.input.batch_size * config.input.seq_len / gpus
    width, vocab_size = config.hooks.d_model, config.hooks.vocab_size
    dense, attention = _flops(config, params)
    head = min(dense, 6.0 * tokens * width * vocab_size)
    layers = dense - head
    # Frozen weights have no gradients. Recomputed layers run forward again, without their attention.
    trained = 2 / 3 if config.lora.rank else 1.0
    again = 1 / 3 if config.compile.remat == "layer" else 0.0
    rate = device.product_flops_per_second
    seconds = layers * (trained + again) / (rate * (FP8_MATMULS if config.is_fp8 else MATMULS))
    seconds += head * trained / (rate * MATMULS) + attention / (rate * ATTENTION)
    # A weight of a layer has 6 FLOPs per token. Each `width` weights read or write one number per token.
    nbytes = _BYTES_PER_LOGIT * tokens * vocab_size
    nbytes += BYTES_PER_NUMBER * layers / 6 / width * (1 + again) if width else 0
    nbytes += state.sums * (_OPTIMIZER_PASSES + (2 * count if count > 1 else 0))
    seconds += nbytes / device.copy_bytes_per_second
    starts = SECONDS_PER_LAYER * (2 if config.is_fp8 else 1)
    return seconds + starts * count * num_layers(config) / config.parallel.pp


def _flops(config: TrainConfig, params: int) -> tuple[float, float]:
    """Returns the FLOPs of a GPU in matmuls and in attention."""
    sequences, length, gpus = config.input.batch_size, config.input.seq_len, config.parallel.num_devices
    flops = config.hooks.flops
    if flops is None:
        return 6.0 * params * sequences * length / gpus, 0.0
    dense = flops(config.model, sequences * length, 1)  # Sequences of one token have almost no attention.
    return dense / gpus, (flops(config.model, sequences, length) - dense) / gpus


def traffic(config: TrainConfig, state: State, params: int) -> dict[str, float]:
    """Returns the bytes that a GPU receives in a step, by axis."""
    parallel, count = config.parallel, config.input.num_microbatches
    share = {axis: (size - 1) / size for axis, size in _axes(config).items()}
    tokens = config.input.microbatch_size * config.input.seq_len // parallel.data_ranks
    width, layers = config.hooks.d_model, num_layers(config) / parallel.pp
    residual = 2 * tokens / parallel.cp * width  # of a layer, in bfloat16
    trained = 0 if config.lora.rank else params / parallel.tp / parallel.pp
    sums = 1 if config.is_pipeline else count
    gathers = 2 * count if parallel.gather_per == "pass" else 1
    weights = params / parallel.tp / parallel.pp
    keys = 2 * tokens * 2 * config.hooks.num_kv_heads * config.hooks.head_size / parallel.tp
    moe = config.hooks.moe
    # A device sends as many rows as the capacity allows, or zeros.
    sent = moe.experts_per_token * (moe.capacity or 1) if moe and moe.num_experts else 0
    rows = residual / parallel.tp * sent
    return {
        "dp": 2 * state.sums * share["dp"],
        "fsdp": (gathers * 2 * weights + sums * 4 * trained) * share["fsdp"],
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
