"""Builds the functions of a run from its configuration: the model, its strategy and its training step."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
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
from jgraph.strategies import FullySharded, Loss, Replicated, Split, Strategy, TensorParallel
from jgraph.strategies.objective import Objective
from jgraph.train.config import InputConfig, ParallelConfig, TrainConfig
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
    """A model and its training step, without arrays. Made by `TrainSetup.of`.

    Attributes:
        config: The configuration of the run.
        model: The model as pure functions of its parameters.
        step: Compiles the training step, makes its state and places its batches.
    """

    config: TrainConfig
    model: FunctionalModel
    step: TrainStep

    @classmethod
    def of(cls, config: TrainConfig) -> "TrainSetup":
        """Imports the model class, traces its construction and chooses the strategy. Compiles nothing.

        Computes nothing on a device, except with `schedule` auto, which compiles and times a layer of the model. All processes
        of a distributed run must call this method with the same configuration.

        Args:
            config: The configuration of the run.

        Returns:
            The setup.

        Raises:
            ConfigError: If the model class cannot be imported or built, or there are too few devices.
                Also if the model does not support a setting: a pipeline, `remat`, FP8, `ep`, `tp`, `cp` or separate documents.
            OrderError: If no valid pipeline schedule of the name `schedule` exists for this number of ranks, chunks and
                microbatches, or the schedule in the file cannot run.
        """
        model, hooks = functional_model(config), model_hooks(config.module)
        mesh = _mesh(config.parallel, is_pipeline=config.is_pipeline, is_sharded=config.is_sharded)
        with _errors_by_flag(config):
            fp8, batch = fp8_recipe(config), batch_shapes(config.input, config.input.batch_size)
            if config.is_pipeline:
                assert mesh is not None, "a pipeline has a mesh"
                loss = _pipeline_model(config, hooks)
                if isinstance(model, AdaptedModel):
                    loss = model.pipeline(loss)
                strategy: Strategy = _pipelined(config, mesh, model, loss)
            else:
                loss, strategy = _mean_loss(model), _data_parallel(config, mesh, model)
            strategy = _tensor_parallel(config, strategy, model, hooks)
            frozen, frozen_dtype = config.freeze, None
            if isinstance(model, AdaptedModel):
                frozen, frozen_dtype = (*frozen, *model.frozen), config.lora.base_dtype
            transform = optimizer(config.optimizer, config.steps, model.shapes, stacked=config.hooks.scan_layers)
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
                freeze=frozen,
                frozen_dtype=frozen_dtype,
                carried=model.carried,
                reductions=model.reductions,
                fp8=fp8,
                batch=batch,
            )
        return cls(config, model, step)

    def batch(self) -> Tree:
        """Returns the shapes and shardings of a batch on the devices of the step.

        With B sequences, M microbatches and T predicted tokens per sequence, the leading axes are [M, B/M] on a mesh and [B] on
        one device without a mesh.

        Returns:
            A `jax.ShapeDtypeStruct` of int32 tokens [..., T + 1]. With `data_documents` `separate`, a dict with the keys
            "tokens", "starts" (int32 [..., T]: position in its row of the first token of the same document) and "weights"
            (float32 [..., T]: loss weight of each prediction).
        """
        return self.step.placed_shapes(batch_shapes(self.config.input, self.config.input.batch_size))

    def compile_step(self) -> CompiledStep:
        """Compiles the step for the batch and with the compile options of the configuration. Does not run it.

        Returns:
            The compiled step, called as `run(state, batch) -> (state, metrics)`. A call donates the state.

        Raises:
            ConfigError: If the step does not support a setting of the configuration.
            ShapeError: If microbatches and devices cannot share the rows of the batch, or the loss is not a scalar.
            CompilerOptionError: If XLA refuses an option of `xla_options`.
            DonationError: If the program does not update the state in place.
        """
        with _errors_by_flag(self.config):
            compile_config = self.config.compile
            return self.step.compile(self.batch(), graph=compile_config.graph, xla_options=compile_config.xla_options)

    def options(self, platform: str) -> dict[str, OptionValue]:
        """Returns the XLA options that the step is compiled with. Compiles nothing.

        Args:
            platform: `cpu` or `gpu`.

        Returns:
            Values by name of the XLA option: the options for the setting `graph`, those of the strategy of the step, and those
            in the setting `xla_options`, which override the others.

        Raises:
            CompilerOptionError: If the installed XLA does not have an option.
        """
        return self.step.options(platform, graph=self.config.compile.graph, xla_options=self.config.compile.xla_options)

    def compile_init(self) -> Callable[[], TrainState]:
        """Starts to compile the program that makes the initial state, in another thread. Returns without waiting for it.

        Returns:
            A function without arguments that waits for the program, runs it and returns the state before the first step. If
            the compilation fails, this function raises the error.
        """
        lowered = self.step.jitted_init(self.model.init).lower()
        # Not optimized, because it runs once: for GPT 1.3B on an H200 it compiles in 27 s, without optimizations in 14 s.
        options: Any = {"xla_backend_optimization_level": 0} if jax.default_backend() == "gpu" else {}
        thread = ThreadPoolExecutor(1)
        compiling = thread.submit(lowered.compile, options)
        thread.shutdown(wait=False)
        return lambda: in_turn(compiling.result()())

    def init(self) -> TrainState:
        """Compiles and runs the program that makes the state before the first step.

        Returns:
            The state with randomly initialized parameters, in the layout of the step and on its devices.
        """
        return self.compile_init()()

    def new_carried(self) -> Tree:
        """Computes the model's initial carried state, such as running statistics. Computes no parameters.

        Returns:
            A tree like `model.carried`, with the shardings that its leaves have in a checkpoint. Empty if the model has no
            carried state.
        """
        return self.model.new_state(jax.tree.map(lambda leaf: leaf.sharding, self.step.canonical.shapes().carried))

    def inference_state(self, params: Tree, carried: Tree) -> TrainState:
        """Makes a state for inference, without optimizer state. The training step cannot run on it.

        Args:
            params: Parameters in the model's own tree, of any dtype. Not donated.
            carried: The model's carried state, like `model.carried`. Not copied.

        Returns:
            The state. Its parameters have the layout of the step and the dtypes of `params`. `carried` is the argument,
            `opt_state` is (), `observed` is {}, and the counters `step` and `skipped` are 0.
        """
        placed, zero = self.step.shardings, jnp.zeros((), jnp.int32)
        shardings = None if placed is None else placed.params
        return TrainState(
            zero, zero, in_turn(jax.jit(self.step.bound.layout.pack, out_shardings=shardings)(params)), (), carried
        )


def functional_model(config: TrainConfig) -> FunctionalModel:
    """Imports the model class and returns the configured model as pure functions. Only traces its construction.

    Args:
        config: The configuration of the run. `module`, `model`, `seed` and the sizes of the batch are used. The settings become
            the result of two of their methods, if they have them: of `in_fp8` with `precision` fp8 and without calibration, and
            of `with_visible_matmuls` with `precision` fp8 or LoRA. Without a pipeline, `remat` is set as an attribute of the
            model.

    Returns:
        The model. Its functions take parameters in the model's own tree.

    Raises:
        ConfigError: If the class cannot be imported or built, or `remat` is set and the model has no attribute `remat`.
    """
    found = find_model(config.module)
    call: Callable[..., Any] = found
    hooks = model_hooks(config.module)
    model_config: Any = config.hooks.in_fp8(config.model) if config.is_fp8 else config.model
    if config.dtypes.precision == "fp8" or config.lora.rank:
        model_config = config.hooks.with_visible_matmuls(model_config)
    settings: list[Any] = [] if config.model is None else [model_config]
    is_linen = inspect.isclass(found) and issubclass(found, nn.Module)
    remat = "nothing" if config.is_pipeline else config.compile.remat  # the stages of a pipeline recompute on their own

    def make() -> Any:
        made = call(*settings) if is_linen else call(*settings, rngs=nnx.Rngs(config.seed))
        set_remat(made, remat, config.module)
        return made

    with model_errors(config.module, f"be called as Class(config.model{'' if is_linen else ', rngs=nnx.Rngs(seed)'})"):
        model = functional(make, batch_shapes(config.input, 1), key=config.seed)
    return _adapted(config, model, hooks.tensor_rules(config.model)) if config.lora.rank else model


def _adapted(config: TrainConfig, model: FunctionalModel, rules: Mapping[str, Split | None]) -> AdaptedModel:
    """Adds the adapters of a configuration to a model."""
    choices = config.lora
    with _errors_by_flag(config):
        return lora(
            model,
            batch_shapes(config.input, 1),
            rank=choices.rank,
            alpha=choices.alpha,
            targets=choices.targets,
            rules=rules,
            key=config.seed,
        )


def batch_shapes(batch: InputConfig, *lead: int) -> Tree:
    """Returns the shapes of a batch.

    Args:
        batch: The configuration of the batch. Its `seq_len` is T, the number of predicted tokens per row.
        *lead: Leading dimensions, for example B rows, or M microbatches of B/M rows.

    Returns:
        A `jax.ShapeDtypeStruct` of int32 tokens [*lead, T + 1]. With `data_documents` `separate`, a dict with the keys "tokens"
        (the same), "starts" (int32 [*lead, T]: position in its row of the first token of the same document) and "weights"
        (float32 [*lead, T]: loss weight of each prediction).
    """
    T = batch.seq_len
    kinds = {"tokens": (T + 1, jnp.int32), "starts": (T, jnp.int32), "weights": (T, jnp.float32)}
    shapes = {name: jax.ShapeDtypeStruct((*lead, n), dtype) for name, (n, dtype) in kinds.items()}
    return shapes if batch.data_documents == "separate" else shapes["tokens"]


def fp8_recipe(config: TrainConfig) -> FP8Config | None:
    """Returns the settings of FP8 matmuls, and checks that the GPU has them.

    Args:
        config: The configuration of the run.

    Returns:
        `config.fp8`, or None if `precision` is bf16. Starts the JAX backend only if `precision` is fp8.

    Raises:
        ConfigError: If matmuls run in FP8, `fp8.emulate` is False, and the first device is a GPU that is not known to have FP8
            matmuls, or MXFP8 matmuls for the recipe `mxfp8`.
    """
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
def _errors_by_flag(config: TrainConfig) -> Iterator[None]:
    """Replaces arguments of the step (`loss`, `experts`, `engine`) in errors by the fields that set them."""
    try:
        yield
    except ConfigError as e:
        if e.field == "loss" and config.dtypes.precision != "bf16":
            message = str(e).replace("`loss`", "the loss")
            raise ConfigError(f"`precision` is fp8: must be bf16; {message}", field="precision") from None
        if field := _FIELDS.get(e.field):
            raise ConfigError(str(e).replace(f"`{e.field}`", f"`{field}`"), field=field) from None
        raise


def _mesh(parallel: ParallelConfig, *, is_pipeline: bool, is_sharded: bool) -> Mesh | None:
    """Returns the mesh of the run; None on one device without a pipeline or sharding."""
    counts = {"dp": parallel.dp, "pp": parallel.pp, "fsdp": parallel.fsdp, "cp": parallel.cp, "tp": parallel.tp}
    ranks, needs_mesh = parallel.num_devices, is_pipeline or is_sharded
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
    """Returns the strategy without a pipeline."""
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
    """Returns the strategy with its matrices split over `tp` devices. Raises ConfigError if the model does not support it."""
    cp, tp = config.parallel.cp, config.parallel.tp
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


def _pipeline_model(config: TrainConfig, hooks: ModelHooks) -> PipelineModel:
    """Returns the functions of the model for a pipeline. Raises ConfigError if it has none."""
    pp = config.parallel.pp
    if hooks.pipeline_model is None:
        message = f"must be 1 for {config.module}, which has no pipeline_model(config, ranks)"
        raise ConfigError(f"`pp` is {pp}: {message}", field="pp")
    pipeline = hooks.pipeline_model(config.model, pp)
    if config.input.data_documents == "separate" and pipeline.context is None:
        message = f"must be joined for {config.module}: its pipeline_model passes no context to the layers"
        raise ConfigError(f"`data_documents` is separate: {message}", field="data_documents")
    return pipeline


def _pipelined(config: TrainConfig, mesh: Mesh, found: FunctionalModel, model: PipelineModel) -> Pipelined:
    """Returns the strategy of a pipeline. Raises ConfigError if there are too few layers."""
    parallel, chunks = config.parallel, config.pipeline.chunks
    num_layers = len(jax.eval_shape(model.split, found.shapes)[1])
    fitting = f"such that `pp` x `chunks` {chunks} is at most the {num_layers} layers"
    require(parallel.pp * chunks <= num_layers, "pp", parallel.pp, fitting)
    choices = {"compute_dtype": _compute_dtype(config), "remat": config.compile.remat}
    choices |= _sharding(parallel, found) if parallel.shards > 1 else {}
    is_auto = config.pipeline.schedule == "auto"
    schedule = find_schedule(
        "gpipe" if is_auto else config.pipeline.schedule,  # gpipe is a placeholder
        pp=parallel.pp,
        chunks=chunks,
        microbatches=config.input.num_microbatches,
    )
    pipelined = Pipelined(mesh, found.shapes, schedule, engine=config.pipeline.pp_engine, **choices)
    return replace(pipelined, schedule=_fastest(config, pipelined, found, model)) if is_auto else pipelined


def _fastest(config: TrainConfig, pipelined: Pipelined, found: FunctionalModel, model: PipelineModel) -> Schedule:
    """Returns the fastest schedule for the engine of the configuration, predicted from measured times of a layer."""
    num_microbatches = config.input.num_microbatches
    objective = Objective(
        loss=model,
        layout=named(found.shapes),
        num_microbatches=num_microbatches,
        carried=found.carried,
        reductions=found.reductions,
        fp8=fp8_recipe(config),
        batch=batch_shapes(config.input, config.input.batch_size),
    )
    pipeline, _ = pipelined.pipeline(objective)
    batch_M = batch_shapes(config.input, num_microbatches, config.input.microbatch_size)
    args = pipeline, batch_M
    parts = measure(
        *args,
        engine=config.pipeline.pp_engine,
        share=lambda seconds: all_gather_scalar(round(seconds * 1e7))[0] / 1e7,  # int32 holds up to 214 s
    )
    limit = config.pipeline.memory_limit * 2**30 or None
    return choose(*args, parts=parts, memory_limit=limit, engine=config.pipeline.pp_engine).schedule
