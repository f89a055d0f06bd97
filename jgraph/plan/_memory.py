"""Predicts the memory of a GPU in a training step, from the shapes of its state and the traces of a few layers."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from jgraph.device import Device
from jgraph.errors import require
from jgraph.mesh import with_target
from jgraph.modules import FunctionalModel
from jgraph.pipeline import find_schedule
from jgraph.plan._lifetimes import KINDS, Attention, Lifetimes, Sizes, Stored
from jgraph.precision.config import FP8Config
from jgraph.schedule import simulate
from jgraph.train.config import TrainConfig
from jgraph.train.setup import TrainSetup
from jgraph.tree import shard_nbytes, shard_shape

# Combined collectives in flight: XLA joins them up to 128 MiB (`strategies/sharding.py`). Measured steps on several GPUs
# need 0 to 1.2 GiB more than their traces say (notes/develop/measurements/sharding.md).
_IN_FLIGHT = 4 * 2**27
# Layers of the two traces. All others are like those between them.
_TRACED = 2, 4


@dataclass(frozen=True)
class Memory:
    """Predicted bytes of a GPU at the peak of a step.

    Attributes:
        state: Parameters and optimizer state, as they are placed: exact.
        gradients: Sums over microbatches, and gradients that wait for a collective or the update.
        gathered: Copies of parameters: cast, and gathered over `fsdp`.
        activations: All other temporary arrays: those kept for the backward, logits, and those of one layer.
        buffers: Collectives in flight.
    """

    state: float
    gradients: float
    gathered: float
    activations: float
    buffers: float

    @property
    def peak(self) -> float:
        """The sum."""
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class State:
    """Bytes of the state of a step on a device, and of the sums of its gradients."""

    total: int
    sums: int


@dataclass(eq=False)
class Predictor:
    """Predicts the memory of steps of one model that differ in their layout. Layouts share traces."""

    device: Device
    attention: Attention = "cudnn"
    params: int = 0  # of the model, after its first state
    _functions: dict[tuple[Any, ...], FunctionalModel] = field(default_factory=dict)
    _sharded: list[tuple[int, State]] = field(default_factory=list)
    _states: dict[tuple[int, ...], State] = field(default_factory=dict)
    _traces: dict[tuple[Any, ...], Lifetimes] = field(default_factory=dict)

    def memory(self, config: TrainConfig) -> Memory:
        """Predicts the memory of a step. Raises ConfigError if the model or the strategy refuses the configuration."""
        state = self.state(config)
        is_summed = config.input.num_microbatches > 1 or config.is_pipeline
        sizes = self._temporaries(config)
        return Memory(
            state=state.total,
            gradients=sizes["gradient"] + (state.sums if is_summed else 0),
            gathered=sizes["weight"],
            activations=sizes["activation"],
            buffers=_in_flight(config, sum(sizes.values())),
        )

    def at_least(self, config: TrainConfig) -> float:
        """Returns a lower bound of the state, from the states of layouts with more shards."""
        wholes = [state.total * shards for shards, state in self._sharded if shards > _shards(config)]
        return 0.98 * min(wholes, default=0.0) / _shards(config)

    def state(self, config: TrainConfig) -> State:
        """Computes the bytes of the state on a device, as `TrainStep` places it. FP8's amax histories are not counted."""
        parallel = config.parallel
        key = (parallel.sizes["fsdp"], parallel.ep, parallel.tp, parallel.pp)
        if key not in self._states:
            # Replicas of data and context parallelism have the same state.
            chosen = config.changed(precision="bf16", fp8=FP8Config(), remat="nothing", cp=1, **_one_row(config))
            setup = self._setup(chosen)
            trained = setup.step.bound.layout.trained.params
            sums = [leaf for name, leaf in setup.step.state.params.items() if name in trained]
            itemsize = jax.numpy.dtype(config.dtypes.main_grads_dtype).itemsize
            self._states[key] = State(shard_nbytes(setup.step.state), shard_nbytes(sums, itemsize))
            self._sharded.append((_shards(config), self._states[key]))
            self.params = sum(leaf.size for leaf in jax.tree.leaves(setup.model.shapes))
        return self._states[key]

    def _setup(self, config: TrainConfig) -> TrainSetup:
        """Returns the setup of a step on one device in all places of the mesh, because it is never compiled."""
        key = (num_layers(config), config.compile.remat, config.dtypes.precision)
        devices = jax.devices()[:1] * config.parallel.num_devices
        setup = TrainSetup.from_config(config, devices=devices, functions=self._functions.get(key))
        self._functions[key] = setup.model
        return setup

    def _temporaries(self, config: TrainConfig) -> Sizes:
        """Predicts the bytes of temporary arrays at the peak, by kind."""
        layers = num_layers(config)
        if config.is_pipeline:  # A rank gathers its weights once per step, so a microbatch is that of a replica.
            config = config.changed(dp=config.parallel.data_ranks, fsdp=1, ep=1)
        counts = _TRACED if layers > _TRACED[1] else (layers,)
        tokens = _rows(config) * config.input.seq_len
        traces = [self._trace(config, count) for count in counts]
        # The trace gathers all parameters at the start of the backward. XLA gathers those of a layer before they are read.
        gathers: Literal["early", "late"] = "late" if config.parallel.gather_per == "pass" else "early"
        peaks = [trace.peaks(_sizes(config, trace, tokens), gathers=gathers) for trace in traces]
        # Each of them is linear in the number of layers.
        share = (layers - counts[0]) / (counts[-1] - counts[0]) if len(counts) > 1 else 0.0
        slopes = [{kind: high[kind] - low[kind] for kind in KINDS} for low, high in zip(peaks[0], peaks[-1], strict=True)]
        if config.is_pipeline:
            return _of_rank(config, peaks[0][0], slopes[0], counts, 2.0 * self.params)
        grown = [
            {kind: max(0.0, first[kind] + share * slope[kind]) for kind in KINDS}
            for first, slope in zip(peaks[0], slopes, strict=True)
        ]
        return max(grown, key=lambda sizes: sum(sizes.values()))

    def _trace(self, config: TrainConfig, layers: int) -> Lifetimes:
        parallel = config.parallel
        precision = config.dtypes.precision
        key = (
            layers,
            parallel.sizes["fsdp"],
            parallel.ep,
            _rows(config),
            config.compile.remat,
            precision,
            config.input.seq_len,
        )
        if key not in self._traces:
            few = with_layers(config, layers).changed(cp=1, tp=1, pp=1, **_one_row(config, _rows(config)))
            self._traces[key] = self._lifetimes(few)
        return self._traces[key]

    def _lifetimes(self, config: TrainConfig) -> Lifetimes:
        """Traces the gradients of a step for a GPU that is not present, and reads the lifetimes of their arrays."""
        with jax.sharding.use_abstract_mesh(with_target(self.device.name)):
            setup = self._setup(config)
            step, batch = setup.step, setup.batch()
            if step.mesh is None:
                batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), batch)
            args = step.state.params, step.state.carry, step.key, batch
            run = step.bound.loss_and_grads
            closed = jax.make_jaxpr(lambda params, carry, key, batch: run(params, batch, key, carry))(*args)
        varying = [False] * len(jax.tree.leaves(args[:3])) + [True] * len(jax.tree.leaves(batch))
        shapes = [leaf.shape for leaf in jax.tree.leaves(setup.model.shapes)]
        shapes += [shard_shape(leaf) for leaf in step.state.params.values()]
        params = frozenset(tuple(shape) for shape in shapes if len(shape) > 1)
        return Lifetimes.of(closed, varying, params=params, length=config.input.seq_len, attention=self.attention)


def num_layers(config: TrainConfig) -> int:
    """Returns the number of layers in the settings of the model; 0 if they do not say, and the whole model is traced."""
    return config.hooks.num_layers


def with_layers(config: TrainConfig, count: int) -> TrainConfig:
    """Returns the configuration of a model with fewer layers."""
    return config.changed(model=dataclasses.replace(config.model, num_layers=count)) if count else config


def _in_flight(config: TrainConfig, temporaries: float) -> float:
    """Returns the bytes of collectives in flight: no more than there is to transfer. Small pipelines were not measured."""
    parallel = config.parallel
    if parallel.num_devices == parallel.sizes["dp"]:
        return 0.0
    return _IN_FLIGHT if config.is_pipeline else min(_IN_FLIGHT, temporaries)


def _shards(config: TrainConfig) -> int:
    parallel = config.parallel
    return parallel.shards * parallel.tp * parallel.pp


def _one_row(config: TrainConfig, rows: int = 1) -> dict[str, int]:
    """Returns the fields of a step of one microbatch with `rows` sequences on each device, and as few replicas as possible."""
    parallel = config.parallel
    dp = parallel.ep if parallel.fsdp == 1 else 1
    return {"dp": dp, "batch_size": rows * dp * parallel.sizes["fsdp"], "num_microbatches": 1}


def _rows(config: TrainConfig) -> int:
    """Returns the sequences of a microbatch on a device."""
    return config.input.microbatch_size // config.parallel.data_ranks


def _sizes(config: TrainConfig, trace: Lifetimes, tokens: int) -> Callable[[Stored], float]:
    """Returns a function that computes the bytes of an array of the trace on a device with the axes `tensor` and `context`."""
    tp, cp = config.parallel.tp, config.parallel.cp
    vocab_size = config.hooks.vocab_size

    def size(array: Stored) -> float:
        if array.kind in ("gradient", "weight"):
            return array.nbytes / tp
        if len(array.shape) == 2 and array.shape[1] == vocab_size:
            # The loss computes as many logits at once as without these axes, or all.
            return array.nbytes * min(1.0, tokens / array.shape[0] / (tp * cp))
        if array.use == "key":  # Keys and values are gathered over `context`.
            return array.nbytes / tp
        if array.use == "operand" and array.shape[-1:] == (trace.width,) and tp > 1:
            # The norm is kept on its own device and gathered over `tensor`.
            return array.nbytes / cp * (1 + 1 / tp)
        return array.nbytes / (tp * cp)

    return size


def _of_rank(config: TrainConfig, few: Sizes, slope: Sizes, counts: tuple[int, ...], weights: float) -> Sizes:
    """Scales the peak of a few layers, and its growth over `counts`, to a pipeline rank with its microbatches in flight."""
    pp, pipeline = config.parallel.pp, config.pipeline
    # With recomputed experts, a trace of more layers can have fewer activations at its peak, so they are not extrapolated.
    moe = config.hooks.moe
    is_linear = slope["activation"] >= 0 and not (moe and moe.num_experts)
    require(is_linear, "pp", pp, "1 in a plan of this model: the memory of its pipelines is not predicted")
    schedule = find_schedule(pipeline.schedule, pp=pp, chunks=pipeline.chunks, microbatches=config.input.num_microbatches)
    in_flight = float(simulate(schedule).peak({"forward_wgrad": 1 / schedule.num_chunks}).max())
    per_layer = slope["activation"] / max(1, counts[-1] - counts[0])
    outer = {kind: max(0.0, few[kind] - counts[0] * slope[kind] / max(1, counts[-1] - counts[0])) / pp for kind in KINDS}
    activations = outer["activation"] + in_flight * math.ceil(num_layers(config) / pp) * per_layer
    # A rank casts and gathers its weights once per step, and main_grad has the gradients of its layers.
    return {"weight": weights / (pp * config.parallel.tp), "gradient": outer["gradient"], "activation": activations}
