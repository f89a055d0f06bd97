"""From a configuration to the functions of a run: the model found by name, its optimizer, its strategy and its step."""

import contextlib
import importlib
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jgraph.errors import ConfigError, JgraphError
from jgraph.mesh import Axis
from jgraph.packing import leaf_names
from jgraph.parallel import (
    FullySharded,
    Pipelined,
    PipelineModel,
    Replicated,
    Strategy,
    TrainStep,
    elementwise,
    fsdp,
    train_step,
)
from jgraph.parallel.pipeline import Pipeline, choose, find_schedule
from jgraph.parallel.pipelined import BoundPipeline
from jgraph.parallel.step import CompiledStep, TrainState
from jgraph.processes import all_gather_scalar, devices_of_ranks
from jgraph.schedule import Costs, Schedule, generate, simulate
from jgraph.training.config import TrainConfig
from jgraph.training.optimizer import adamw
from jgraph.xla import compiler_options
from jgraph.xla.options import OptionValue, installed_options

Tree = Any


# Compared by identity: two setups are different programs, and functions bound to one are static arguments of a jit.
@dataclass(frozen=True, eq=False)
class TrainSetup:
    """A model, its optimizer and its step, without arrays; made by `TrainSetup.of`.

    Attributes:
        config: the whole run.
        graphdef: of the model, as `nnx.split` gives it.
        step: the training step.
    """

    config: TrainConfig
    model_class: Any
    graphdef: Any
    step: TrainStep

    @classmethod
    def of(cls, config: TrainConfig) -> "TrainSetup":
        """Finds the model and traces its construction; computes nothing.

        Raises:
            ConfigError: as `find_model` does; there are more ranks than devices; the model cannot be a pipeline; the schedule
                is for another one.
            OrderError: there is no such schedule.
        """
        model_class = find_model(config.model.module)
        with _model_errors(config.model.module, "be called as Class(config.model, rngs=nnx.Rngs(seed))"):
            model = nnx.eval_shape(lambda: model_class(config.model, rngs=nnx.Rngs(config.seed)))
            graphdef, params = nnx.split(model, nnx.Param)
        mesh, shapes = _mesh(config), nnx.to_pure_dict(params)

        def mean_loss(tree: Tree, tokens_BS: Array, key: Array) -> Array:
            return nnx.merge(graphdef, tree).loss(tokens_BS)

        loss: Any
        strategy: Strategy
        if config.is_pipeline:
            assert mesh is not None
            model = _pipeline_model(config)
            loss, strategy = model, _pipelined(config, mesh, params, model)
        elif config.is_sharded:
            assert mesh is not None
            loss, strategy = (
                mean_loss,
                FullySharded(
                    mesh,
                    shapes,
                    rules=config.shard_rules,
                    annotations=_annotations(params),
                    compute_dtype=jnp.dtype(config.model.compute_dtype),
                    reshard_after_forward=config.reshard_after_forward,
                ),
            )
        else:
            loss, strategy = mean_loss, Replicated(mesh, shapes)
        step = train_step(
            loss,
            elementwise(lambda is_matrix: adamw(config.optimizer, config.steps, decay_mask=is_matrix)),
            strategy,
            num_microbatches=config.num_microbatches,
            clip_norm=config.optimizer.clip_norm,
            key=config.seed,
            params_dtype=config.main_params_dtype,
            grads_dtype=config.main_grads_dtype,
            read_dtype=config.read_dtype,
            freeze=config.freeze,
        )
        return cls(config, model_class, graphdef, step)

    @property
    def num_devices(self) -> int:
        return self.step.num_devices

    def on(self, devices: Sequence[Any]) -> "TrainSetup":
        """Returns the same run over as many other devices, for example some that are described and not here."""
        return replace(self, step=self.step.on(devices))

    def place_whole(self, tokens_BS: np.ndarray) -> Array | np.ndarray:
        """Returns a batch of which every process has all rows; those that the ranks cannot share evenly go to each."""
        sharding = self.step.batch_sharding
        if sharding is None or len(tokens_BS) % (self.config.dp * self.config.fsdp):
            return tokens_BS
        return jax.make_array_from_callback(tokens_BS.shape, sharding, lambda index: tokens_BS[index])

    def loss(self, params: Tree, tokens_BS: Array) -> Array:
        """Returns the mean next-token loss of a state's parameters, in nats."""
        return self._model(params).loss(tokens_BS)

    def logits(self, params: Tree, tokens_BT: Array) -> Array:
        """Returns the logits (B, T, V) of a state's parameters."""
        return self._model(params).logits(tokens_BT)

    def check_loss(self) -> None:
        """Traces the model's loss. Raises ConfigError where it fails, or is not a scalar."""
        rows = self.config.batch_size // self.config.num_microbatches
        self._traced(self.loss, "have loss(tokens_BS), a scalar of floats", (rows, self.config.seq_len + 1), ())

    def sampling_problem(self) -> str:
        """Traces the model's logits. Returns why a sample cannot be drawn from them; empty if it can."""
        length = self.config.seq_len
        try:
            self._traced(self.logits, "have logits(tokens_BT), floats (B, T, V)", (1, length), (1, length, ...))
        except JgraphError as e:
            return str(e)
        return ""

    def _traced(self, function: Callable[[Tree, Array], Array], must: str, tokens: tuple[int, ...], shape: tuple) -> None:
        """Raises ConfigError where a function of the parameters and tokens fails or gives another shape; `...` is any size."""
        name = self.config.model.module
        with _model_errors(name, must):
            out = jax.eval_shape(function, self.step.state.params, jax.ShapeDtypeStruct(tokens, jnp.int32))
            given, dtype = tuple(out.shape), out.dtype  # of one array; of anything else this fails
        fits = len(given) == len(shape) and all(size in (..., own) for size, own in zip(shape, given, strict=True))
        if not (fits and jnp.issubdtype(dtype, jnp.floating)):
            raise ConfigError(f"--model.module is {name}: must {must}; it gives {dtype}{list(given)}", field="model.module")

    def init(self) -> TrainState:
        """Returns the state before the first step, made in one program where it belongs."""

        def params() -> Tree:
            _, params = nnx.split(self.model_class(self.config.model, rngs=nnx.Rngs(self.config.seed)), nnx.Param)
            return nnx.to_pure_dict(params)

        return self.step.init(params)

    def group_names(self) -> list[str]:
        """Returns the names of the arrays of parameters, in the order of `StepMetrics.grad_square_sums`."""
        return leaf_names(self.step.state.params)

    def trained_groups(self) -> set[str]:
        """Returns the names of the arrays that have a parameter which is not frozen."""
        if not self.config.freeze:
            return set(self.group_names())
        some = jax.jit(lambda: [jnp.any(mask) for mask in jax.tree.leaves(self.step.trained())])()
        return {name for name, is_trained in zip(self.group_names(), some, strict=True) if is_trained}

    def tokens(self) -> jax.ShapeDtypeStruct:
        """Returns a batch over all processes, int32 [B, S], as a shape."""
        shape = (self.config.batch_size, self.config.seq_len + 1)
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.step.batch_sharding)

    def compile_step(self) -> CompiledStep:
        """Compiles the step. Raises as `TrainStep.compile`."""
        return self.step.compile(self.tokens(), graph=self.config.graph, xla_options=self.xla_options(jax.default_backend()))

    def options(self, platform: str) -> dict[str, OptionValue]:
        """Returns all options with which the step is compiled on a platform."""
        return compiler_options(self.config.graph, self.xla_options(platform), platform=platform, num_devices=self.num_devices)

    def xla_options(self, platform: str) -> tuple[str, ...]:
        """Returns the step's XLA options on a platform: those that are chosen, then those asked for, which win."""
        return (*self.chosen_options(platform), *self.config.xla_options)

    def chosen_options(self, platform: str) -> tuple[str, ...]:
        """Returns, on GPUs and with sharded parameters, the options that were fastest, as far as the installed XLA has them."""
        if self.config.fsdp == 1 or platform not in ("gpu", "cuda"):
            return ()
        known = installed_options() or {}
        return tuple(option for option in fsdp.XLA_OPTIONS if option.partition("=")[0] in known)

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """The program that plays the schedule, if one is played."""
        return self.step.bound.pipeline if isinstance(self.step.bound, BoundPipeline) else None

    def memory(self, compiled: CompiledStep) -> dict[str, Any]:
        """Returns bytes of a device: `pools` by what they hold; `predicted_peak`, of a pipeline, and `compiled_peak`, or None.

        The pool `temporaries` is what the compiled step takes besides those that are predicted.
        """
        state = self.step.state

        def own(tree: Tree) -> int:
            leaves = jax.tree.leaves(tree)
            shapes = [(leaf, leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves]
            return sum(math.prod(shape) * leaf.dtype.itemsize for leaf, shape in shapes)

        held = {"parameters": own(state.params), "optimizer": own(state.opt_state)}
        if self.pipeline is not None:
            pools = {name.replace("forward_", "residuals to "): size for name, size in self._pipeline_bytes().items()}
        else:
            itemsize = jnp.dtype(self.config.main_params_dtype).itemsize
            pools = {"main_grad": held["parameters"] // itemsize * jnp.dtype(self.config.main_grads_dtype).itemsize}
        predicted = sum((*held.values(), *pools.values())) if self.pipeline else None
        if (memory := compiled.memory) is not None:
            pools["temporaries"] = max(0, memory.temporaries - sum(pools.values()))
        pools = {name: size for name, size in (held | pools).items() if size}
        return {"pools": pools, "predicted_peak": predicted, "compiled_peak": memory.total if memory else None}

    def about_pipeline(self, compiled: CompiledStep) -> str:
        """Returns a line on the schedule and on the memory of a step, predicted and taken; empty without a pipeline."""
        if self.pipeline is None:
            return ""
        schedule, chunks = self.pipeline.schedule, self.pipeline.layout.num_chunks
        idle = simulate(schedule, Costs(), execution="lockstep").bubble
        text = (
            f"pipeline: {schedule.name} ({self.pipeline.runtime} runtime), {schedule.num_ranks} ranks x "
            f"{chunks} chunks, {schedule.num_ticks} ticks, {idle:.1%} idle if all actions take the same"
        )
        if compiled.memory is None:
            return text
        predicted = sum(self._pipeline_bytes().values())
        return f"{text}; a step takes {predicted / 2**30:.2f} GiB predicted, {compiled.memory.temporaries / 2**30:.2f} compiled"

    def _pipeline_bytes(self) -> dict[str, int]:
        assert isinstance(self.step.bound, BoundPipeline)
        return self.step.bound.pipeline.bytes_per_rank(self.step.bound.shapes, _tokens_by_microbatch(self.config))

    def _model(self, params: Tree) -> Any:
        return nnx.merge(self.graphdef, self.step.bound.unpack(params))


def _annotations(params: nnx.State) -> dict[str, PartitionSpec | None]:
    """Returns Flax's partition names, by the name of a parameter."""
    specs = jax.tree.leaves(nnx.to_pure_dict(nnx.get_partition_spec(params)), is_leaf=lambda s: isinstance(s, PartitionSpec))
    return dict(zip(leaf_names(nnx.to_pure_dict(params)), specs, strict=True))


def _mesh(config: TrainConfig) -> Mesh | None:
    counts = {"dp": config.dp, "pp": config.pp, "fsdp": config.fsdp}
    ranks, needs_mesh = math.prod(counts.values()), config.is_pipeline or config.is_sharded
    # Asked in this order: alone and on one device, nothing here starts a backend, which may be for a target that is not here.
    if ranks == 1 and not needs_mesh and not jax.distributed.is_initialized():
        return None
    fields = " ".join(f"--{name} {count}" for name, count in counts.items() if count > 1)
    devices = devices_of_ranks(ranks, flags=fields or "a pipeline")
    if len(devices) == 1 and not needs_mesh:
        return None
    # Neighbours share parameters: that is the most traffic.
    axes = {Axis.DATA.value: config.dp}
    if config.is_pipeline:
        axes[Axis.PIPE.value] = config.pp
    if config.is_sharded or config.fsdp > 1:
        axes[Axis.FSDP.value] = config.fsdp
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def _pipeline_model(config: TrainConfig) -> PipelineModel:
    """Returns the model in the pieces of a pipeline. Raises ConfigError where its module has none."""
    module = config.model.module.partition(":")[0]
    make = getattr(importlib.import_module(module), "pipeline_parts", None)
    if make is None:
        raise ConfigError(
            f"--pp is {config.pp}: must be 1 for {config.model.module}, because {module} has no pipeline_parts(config, ranks)",
            field="pp",
        )
    return make(config.model, config.pp)


def _pipelined(config: TrainConfig, mesh: Mesh, params: nnx.State, model: PipelineModel) -> Pipelined:
    """Returns the strategy with the schedule that is asked for; `auto` measures."""
    shapes = nnx.to_pure_dict(params)
    choices: dict[str, Any] = {"compute_dtype": jnp.dtype(config.model.compute_dtype), "remat": config.remat}
    if config.fsdp > 1:
        choices |= {"rules": config.shard_rules, "annotations": _annotations(params)}

    def under(schedule: Schedule) -> Pipelined:
        return Pipelined(mesh, shapes, schedule, **choices)

    sizes = {"pp": config.pp, "microbatches": config.num_microbatches}
    if config.schedule != "auto":
        return under(find_schedule(config.schedule, chunks=config.chunks, **sizes))
    pipeline = under(generate("gpipe", **sizes)).pipeline(model)
    params = jax.eval_shape(lambda tree: pipeline.stack(*model.split(tree)), shapes)
    choice = choose(
        pipeline,
        params,
        _tokens_by_microbatch(config),
        memory_limit=config.memory_limit * 2**30 or None,
        share=lambda seconds: all_gather_scalar(round(seconds * 1e7))[0] / 1e7,  # an int32 is 214 s of these
    )
    return under(choice.schedule)


def _tokens_by_microbatch(config: TrainConfig) -> jax.ShapeDtypeStruct:
    rows = config.batch_size // config.num_microbatches
    return jax.ShapeDtypeStruct((config.num_microbatches, rows, config.seq_len + 1), jnp.int32)


def find_model(name: str) -> Any:
    """The class that `package.module:Class` names. Raises ConfigError where there is none."""
    module_name, _, class_name = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except Exception as e:  # whatever the module does when it is imported
        raise ConfigError(
            f"--model.module is {name}: must be package.module:Class of something that can be imported from here ({_told(e)})",
            field="model.module",
        ) from e


@contextlib.contextmanager
def _model_errors(name: str, must: str) -> Iterator[None]:
    """What a user's model raises is told in one line, with its place in the user's code."""
    try:
        yield
    except JgraphError:
        raise
    except Exception as e:
        raise ConfigError(f"--model.module is {name}: must {must} ({_told(e)})", field="model.module") from e


def _told(error: Exception) -> str:
    """The error in one line; of its traceback, the last place that is neither ours nor an installed package's."""
    ours = str(Path(__file__).parent)
    places = [
        f" at {frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((ours, "<")) and not {"site-packages", "importlib"} & set(Path(frame.filename).parts)
    ]
    line = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {line}{places[-1] if places else ''}"
