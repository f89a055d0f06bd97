"""Builds the functions of a run from its configuration: the model, its strategy and its training step."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, nnx
from jax import Array
from jax.sharding import Mesh

from jgraph.adapters import AdaptedModel, lora
from jgraph.device import find as device_info
from jgraph.dispatch import in_turn
from jgraph.errors import ConfigError, require
from jgraph.layout import named
from jgraph.mesh import Axis
from jgraph.modules import FunctionalModel, functional
from jgraph.pipeline import Pipelined, PipelineModel, choose, find_schedule, measure
from jgraph.precision.config import FP8Config
from jgraph.processes import all_gather_scalar, devices_of_ranks
from jgraph.schedule import Schedule
from jgraph.step import TrainStep, train_step
from jgraph.step.compiled import CompiledStep
from jgraph.step.state import TrainState
from jgraph.strategies import FullySharded, Loss, Replicated, Strategy, TensorParallel
from jgraph.strategies.objective import Objective
from jgraph.train._input_config import InputConfig
from jgraph.train._setup_config import ParallelConfig
from jgraph.train.config import TrainConfig
from jgraph.train.hooks import ModelHooks, model_hooks, set_remat
from jgraph.train.model import find_model, model_errors
from jgraph.train.optimizer import optimizer
from jgraph.types import Tree
from jgraph.xla.options import OptionValue

# Fields of the configuration that set an argument of the step or of the model.
_FIELDS = {"experts": "ep", "engine": "pp_engine", "tensor": "tp", "context": "cp", "targets": "lora.targets"}


# eq=False: setups are compared by identity, because methods of a setup are static arguments of jitted functions.
@dataclass(frozen=True, eq=False)
class TrainSetup:
    """A configuration, its model as pure functions and its training step, without arrays. Made by `TrainSetup.of`."""

    config: TrainConfig
    model: FunctionalModel
    step: TrainStep

    @classmethod
    def of(cls, config: TrainConfig) -> "TrainSetup":
        """Imports the model class, traces its construction and chooses the strategy. Compiles nothing.

        Computes nothing on a device, except with `schedule` auto, which times a layer. All processes must call it together.
        """
        fp8 = fp8_recipe(config)
        batch = batch_shapes(config.input, config.input.batch_size)
        mesh = _mesh(config.parallel, is_pipeline=config.is_pipeline, is_sharded=config.is_sharded)
        with _errors_by_field(config):
            hooks = model_hooks(config.module)
            model = _functional_model(config, hooks)
            loss: PipelineModel | Callable[..., Array | Loss]
            if config.is_pipeline:
                assert mesh is not None, "a pipeline has a mesh"
                loss = _pipeline_model(config, hooks, model)
                strategy: Strategy = _pipelined(config, mesh, model, loss, fp8)
            else:
                loss = _mean_loss(model)
                strategy = _data_parallel(config, mesh, model)
            strategy = _tensor_parallel(config, strategy, model, hooks)
            transform = optimizer(config.optimizer, config.steps, model.shapes, stacked=config.hooks.scan_layers)
            is_adapted = isinstance(model, AdaptedModel)
            step = train_step(
                loss,
                transform,
                strategy,
                num_microbatches=config.input.num_microbatches,
                clip_norm=config.optimizer.clip_norm,
                key=config.seed,
                params_dtype=config.dtypes.main_params_dtype,
                grads_dtype=config.dtypes.main_grads_dtype,
                read_dtype=config.dtypes.read_dtype,
                freeze=(*config.freeze, *model.frozen) if is_adapted else config.freeze,
                frozen_dtype=config.lora.base_dtype if is_adapted else None,
                carried=model.carried,
                reductions=model.reductions,
                fp8=fp8,
                batch=batch,
            )
        return cls(config, model, step)

    def batch(self) -> Tree:
        """Returns the shapes and shardings of a batch: [M, B/M, ...] on a mesh, [B, ...] on one device without a mesh."""
        # B sequences, M microbatches
        return self.step.placed_shapes(batch_shapes(self.config.input, self.config.input.batch_size))

    def compile_step(self) -> CompiledStep:
        """Compiles the step for the batch, with the options of the configuration. Does not run it."""
        with _errors_by_field(self.config):
            compile_config = self.config.compile
            return self.step.compile(self.batch(), graph=compile_config.graph, xla_options=compile_config.xla_options)

    def options(self, platform: str) -> dict[str, OptionValue]:
        """Returns the XLA options of the step for `cpu` or `gpu`. Those of the user override those of the strategy."""
        return self.step.options(platform, graph=self.config.compile.graph, xla_options=self.config.compile.xla_options)

    def compile_init(self) -> Callable[[], TrainState]:
        """Starts to compile the program of the initial state in another thread. The result waits for it and runs it."""
        lowered = self.step.jitted_init(self.model.init).lower()
        # Not optimized, because it runs once: for GPT 1.3B on an H200 it compiles in 27 s, without optimizations in 14 s.
        options: Any = {"xla_backend_optimization_level": 0} if jax.default_backend() == "gpu" else {}
        thread = ThreadPoolExecutor(1)
        compiling = thread.submit(lowered.compile, options)
        thread.shutdown(wait=False)
        return lambda: in_turn(compiling.result()())

    def init(self) -> TrainState:
        """Compiles and runs the program of the initial state."""
        return self.compile_init()()

    def new_carried(self) -> Tree:
        """Computes the model's initial carried state, with the shardings of a checkpoint. Computes no parameters."""
        return self.model.new_state(jax.tree.map(lambda leaf: leaf.sharding, self.step.canonical.shapes().carried))

    def inference_state(self, params: Tree, carried: Tree) -> TrainState:
        """Makes a state for inference from the model's own parameters, of any dtype. The training step cannot run on it.

        `carried` is not copied. There is no optimizer state.
        """
        placed = self.step.shardings
        zero = jnp.zeros((), jnp.int32)
        shardings = None if placed is None else placed.params
        packed = in_turn(jax.jit(self.step.bound.layout.pack, out_shardings=shardings)(params))
        return TrainState(zero, zero, packed, (), carried)


def functional_model(config: TrainConfig) -> FunctionalModel:
    """Imports the model class and returns the configured model as pure functions. Only traces its construction."""
    with _errors_by_field(config):
        return _functional_model(config, model_hooks(config.module))


def _functional_model(config: TrainConfig, hooks: ModelHooks) -> FunctionalModel:
    batch = batch_shapes(config.input, 1)
    settings: Any = config.hooks.in_fp8(config.model) if config.is_fp8 else config.model
    if config.dtypes.precision == "fp8" or config.lora.rank:
        settings = config.hooks.with_visible_matmuls(settings)
    args: list[Any] = [] if config.model is None else [settings]
    found = find_model(config.module)
    call: Callable[..., Any] = found
    is_linen = inspect.isclass(found) and issubclass(found, nn.Module)
    remat = "nothing" if config.is_pipeline else config.compile.remat  # the stages of a pipeline recompute on their own

    def make() -> Any:
        made = call(*args) if is_linen else call(*args, rngs=nnx.Rngs(config.seed))
        set_remat(made, remat, config.module)
        return made

    with model_errors(config.module, f"be called as Class(config.model{'' if is_linen else ', rngs=nnx.Rngs(seed)'})"):
        model = functional(make, batch, key=config.seed)
    if not config.lora.rank:
        return model
    return lora(
        model,
        batch,
        rank=config.lora.rank,
        alpha=config.lora.alpha,
        targets=config.lora.targets,
        rules=hooks.tensor_rules(config.model),
        key=config.seed,
    )


def batch_shapes(batch: InputConfig, *lead: int) -> Tree:
    """Returns the shapes of a batch with the leading dimensions `lead`: the tokens, or with separate documents a dict."""
    T = batch.seq_len  # predicted tokens per row
    tokens = jax.ShapeDtypeStruct((*lead, T + 1), jnp.int32)
    if batch.data_documents == "joined":
        return tokens
    # `starts`: position in its row of the first token of the same document. `weights`: loss weight of each prediction.
    starts = jax.ShapeDtypeStruct((*lead, T), jnp.int32)
    return {"tokens": tokens, "starts": starts, "weights": jax.ShapeDtypeStruct((*lead, T), jnp.float32)}


def fp8_recipe(config: TrainConfig) -> FP8Config | None:
    """Returns the settings of FP8 matmuls, and checks that the GPU has them. None for bf16, which starts no JAX backend."""
    if config.dtypes.precision == "bf16":
        return None
    name = jax.devices()[0].device_kind
    device = device_info(name)
    needs_fp8 = config.is_fp8 and jax.default_backend() == "gpu" and not config.fp8.emulate
    if needs_fp8 and not (device and device.has_fp8):
        raise ConfigError(
            f"`precision` is fp8: must be bf16 on {name}, which is not known to have FP8; `fp8.emulate` gives the same numbers",
            field="precision",
        )
    if needs_fp8 and config.fp8.recipe == "mxfp8" and not (device and device.has_mxfp8):
        must = f"current or delayed on {name}, which is not known to have MXFP8; `fp8.emulate` gives the same numbers"
        raise ConfigError(f"`fp8.recipe` is mxfp8: must be {must}", field="fp8.recipe")
    return config.fp8


@contextlib.contextmanager
def _errors_by_field(config: TrainConfig) -> Iterator[None]:
    """Makes errors about arguments of the step or of the model errors about the fields that set them."""
    try:
        yield
    except ConfigError as e:
        if e.field == "loss" and config.dtypes.precision != "bf16":
            raise ConfigError(f"`precision` is fp8: must be bf16; the loss {e.problem}", field="precision") from None
        if field := _FIELDS.get(e.field):
            raise e.about(field) from None
        raise


def _mesh(parallel: ParallelConfig, *, is_pipeline: bool, is_sharded: bool) -> Mesh | None:
    """Returns the mesh of the run; None on one device without a pipeline or sharding."""
    counts = {"dp": parallel.dp, "pp": parallel.pp, "fsdp": parallel.fsdp, "cp": parallel.cp, "tp": parallel.tp}
    ranks = parallel.num_devices
    needs_mesh = is_pipeline or is_sharded
    # On one device, no backend is started: the step may be compiled for a GPU that is not present.
    if ranks == 1 and not needs_mesh and not jax.distributed.is_initialized():
        return None
    flags = " ".join(f"`{name}` {count}" for name, count in counts.items() if count > 1)
    devices = devices_of_ranks(ranks, flags=flags or "a pipeline")
    if len(devices) == 1 and not needs_mesh:
        return None
    # The last mesh axis has the most traffic, so its devices are neighbors.
    axes = {Axis.DATA.value: parallel.data_ranks // parallel.shards}
    if is_pipeline:
        axes[Axis.PIPE.value] = parallel.pp
    if is_sharded or parallel.shards > 1:
        axes[Axis.FSDP.value] = parallel.shards
    axes |= {axis.value: size for axis, size in ((Axis.CONTEXT, parallel.cp), (Axis.TENSOR, parallel.tp)) if size > 1}
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def _mean_loss(model: FunctionalModel) -> Callable[..., Array | Loss]:
    def loss(params: Tree, batch: Tree, key: Array, carried: Tree = None) -> Array | Loss:
        value, after = model.loss(params, batch, key, carried)
        return Loss(value, carried=after) if after else value

    return loss


def _data_parallel(config: TrainConfig, mesh: Mesh | None, model: FunctionalModel) -> Strategy:
    if not config.is_sharded:
        return Replicated(mesh, model.shapes)
    assert mesh is not None, "a sharded state has a mesh"
    return FullySharded(
        mesh,
        model.shapes,
        compute_dtype=_compute_dtype(config),
        reshard_after_forward=config.parallel.reshard_after_forward,
        **_sharding(config.parallel, model),
    )


def _tensor_parallel(config: TrainConfig, strategy: Strategy, model: FunctionalModel, hooks: ModelHooks) -> Strategy:
    """Returns the strategy with its matrices split over `tp` devices. Checks that the model supports `cp` and `tp`."""
    cp = config.parallel.cp
    tp = config.parallel.tp
    has_axis = cp == 1 or hooks.splits_sequences
    require(has_axis, "cp", cp, f"1 for {config.module}, which has no attribute `splits_sequences`")
    if tp == 1:
        return strategy
    rules = hooks.tensor_rules(config.model)
    if isinstance(model, AdaptedModel):
        rules = model.tensor_rules(rules)
    lacks = f"for {config.module}, which has no tensor_rules(config)"
    require(not config.is_pipeline or len(rules) > 0, "tp", tp, f"1 in a pipeline {lacks}")
    parallel = TensorParallel(strategy, rules, model.annotations)
    require(len(parallel.splits(tp)) > 0, "tp", tp, f"1 {lacks} and no partition name `{Axis.TENSOR}`")
    return parallel


def _sharding(parallel: ParallelConfig, model: FunctionalModel) -> dict[str, Any]:
    """Returns the arguments of a strategy for sharded parameters and experts."""
    shards = "experts" if parallel.ep > parallel.fsdp else "everything"
    rules = {"shard_rules": parallel.shard_rules, "annotations": model.annotations}
    return rules | {"experts": parallel.ep, "shards": shards}


def _compute_dtype(config: TrainConfig) -> np.dtype | None:
    """Returns the compute dtype of the model, or None if its settings define no dtype."""
    dtype = config.hooks.compute_dtype
    with model_errors(config.module, "have the name of a dtype in its settings, compute_dtype"):
        return None if dtype is None else jnp.dtype(dtype)


def _pipeline_model(config: TrainConfig, hooks: ModelHooks, model: FunctionalModel) -> PipelineModel:
    """Returns the functions of the model for a pipeline."""
    pp = config.parallel.pp
    if hooks.pipeline_model is None:
        message = f"must be 1 for {config.module}, which has no pipeline_model(config, ranks)"
        raise ConfigError(f"`pp` is {pp}: {message}", field="pp")
    pipeline = hooks.pipeline_model(config.model, pp)
    if config.input.data_documents == "separate" and pipeline.context is None:
        message = f"must be joined for {config.module}: its pipeline_model passes no context to the layers"
        raise ConfigError(f"`data_documents` is separate: {message}", field="data_documents")
    return model.pipeline(pipeline) if isinstance(model, AdaptedModel) else pipeline


def _pipelined(
    config: TrainConfig, mesh: Mesh, found: FunctionalModel, model: PipelineModel, fp8: FP8Config | None
) -> Pipelined:
    parallel = config.parallel
    chunks = config.pipeline.chunks
    num_layers = len(jax.eval_shape(model.split, found.shapes)[1])
    fitting = f"such that `pp` x `chunks` {chunks} is at most the {num_layers} layers"
    require(parallel.pp * chunks <= num_layers, "pp", parallel.pp, fitting)
    is_auto = config.pipeline.schedule == "auto"
    schedule = find_schedule(
        "gpipe" if is_auto else config.pipeline.schedule,  # gpipe is a placeholder
        pp=parallel.pp,
        chunks=chunks,
        microbatches=config.input.num_microbatches,
    )
    pipelined = Pipelined(
        mesh,
        found.shapes,
        schedule,
        engine=config.pipeline.pp_engine,
        compute_dtype=_compute_dtype(config),
        remat=config.compile.remat,
        **(_sharding(parallel, found) if parallel.shards > 1 else {}),
    )
    return replace(pipelined, schedule=_fastest(config, pipelined, found, model, fp8)) if is_auto else pipelined


def _fastest(
    config: TrainConfig, pipelined: Pipelined, found: FunctionalModel, model: PipelineModel, fp8: FP8Config | None
) -> Schedule:
    """Returns the fastest schedule for the engine of the configuration, predicted from measured times of a layer."""
    batch = config.input
    objective = Objective(
        loss=model,
        layout=named(found.shapes),
        num_microbatches=batch.num_microbatches,
        carried=found.carried,
        reductions=found.reductions,
        fp8=fp8,
        batch=batch_shapes(batch, batch.batch_size),
    )
    pipeline, _ = pipelined.pipeline(objective)
    batch_M = batch_shapes(batch, batch.num_microbatches, batch.microbatch_size)
    engine = config.pipeline.pp_engine
    # Process 0's times count. int32 holds up to 214 s.
    share = lambda seconds: all_gather_scalar(round(seconds * 1e7))[0] / 1e7  # noqa: E731
    parts = measure(pipeline, batch_M, engine=engine, share=share)
    limit = config.pipeline.memory_limit * 2**30 or None
    return choose(pipeline, batch_M, parts=parts, memory_limit=limit, engine=engine).schedule
