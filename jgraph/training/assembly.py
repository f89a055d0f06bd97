"""Assembly: from a configuration to the functions of a run: the model found by name, its packed parameters, the step."""

import contextlib
import importlib
import math
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jgraph.dispatch import in_turn
from jgraph.errors import ConfigError, JgraphError
from jgraph.mesh import batch_axes
from jgraph.packing import Packing, leaf_names
from jgraph.parallel import fsdp
from jgraph.parallel.pipeline import Pipeline, choose, find_schedule
from jgraph.processes import all_gather_scalar, devices_of_ranks
from jgraph.schedule import Costs, Schedule, generate, simulate
from jgraph.training.config import TrainConfig
from jgraph.training.forms import Form, Sharded, Staged, Whole
from jgraph.training.portable import Portable
from jgraph.training.step import TrainState, init_state, optimizer, train_step
from jgraph.xla import CaptureReport, check_identity, compile_and_report, compiler_options, option_errors
from jgraph.xla.explain import Memory
from jgraph.xla.options import OptionValue, installed_options

PyTree = Any


# Compared by identity: two assemblies are different programs, and functions bound to one are static arguments of a jit.
@dataclass(frozen=True, eq=False)
class Assembly:
    """A model and its optimizer, without arrays; made by `Assembly.of`."""

    config: TrainConfig
    model_class: Any
    graphdef: Any
    form: Form
    transform: optax.GradientTransformation
    mesh: Mesh | None
    """The ranks' devices over "data", "pipe" and "fsdp", as far as there are any, of all processes; None on one device."""

    @classmethod
    def of(cls, config: TrainConfig) -> "Assembly":
        """Finds the model and traces its construction; computes nothing.

        Raises:
            ConfigError: as `find_model` does; the model cannot be made, or be a pipeline; there are more ranks than devices;
                the schedule is for another one.
            OrderError: there is no such schedule.
        """
        model_class = find_model(config.model.module)
        with _model_errors(config.model.module, "be called as Class(config.model, rngs=nnx.Rngs(seed))"):
            model = nnx.eval_shape(lambda: model_class(config.model, rngs=nnx.Rngs(config.seed)))
            graphdef, params = nnx.split(model, nnx.Param)
        mesh, tree = _mesh(config), nnx.to_pure_dict(params)
        form: Form
        if config.is_pipeline:
            assert mesh is not None
            form = Staged.of(_pipeline(config, mesh, params), tree)
        else:

            def loss(tree: PyTree, tokens_BS: Array) -> Array:
                return nnx.merge(graphdef, tree).loss(tokens_BS)

            if config.is_sharded:
                assert mesh is not None
                form = _sharded(config, mesh, params, loss)
            else:
                form = Whole(Packing.of(tree), loss, config.num_microbatches, mesh)
        _frozen(config, tree)  # what matches nothing is refused here
        transform = optimizer(config.optimizer, config.steps, decay_mask=form.decay_mask)
        return cls(config, model_class, graphdef, form, transform, mesh)

    @property
    def num_devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    def batch_sharding(self) -> NamedSharding | None:
        """Where int32 tokens (rows, seq_len + 1) lie: rows over the data ranks. None on one device."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec(batch_axes(self.mesh)))

    def batch_part(self) -> tuple[int, int]:
        """Which part of the batch this process feeds, and of how many: 0 of 1 where it feeds all."""
        sharding, rows = self.batch_sharding(), self.config.batch_size
        if sharding is None:
            return 0, 1
        parts = [index[0].indices(rows) for index in sharding.addressable_devices_indices_map((rows,)).values() if index]
        start, stop = min(start for start, _, _ in parts), max(stop for _, stop, _ in parts)
        return start // (stop - start), rows // (stop - start)

    def place(self, tokens_BS: np.ndarray) -> Array | np.ndarray:
        """The batch of a step as one array over all processes, from the rows that this one feeds."""
        sharding = self.batch_sharding()
        if sharding is None:
            return tokens_BS
        return jax.make_array_from_process_local_data(sharding, tokens_BS, (self.config.batch_size, *tokens_BS.shape[1:]))

    def place_whole(self, tokens_BS: np.ndarray) -> Array | np.ndarray:
        """As `place`, from rows that every process has all of; those that the ranks cannot share evenly go to each."""
        sharding = self.batch_sharding()
        if sharding is None or len(tokens_BS) % (self.config.dp * self.config.fsdp):
            return tokens_BS
        return jax.make_array_from_callback(tokens_BS.shape, sharding, lambda index: tokens_BS[index])

    def loss(self, packed: PyTree, tokens_BS: Array) -> Array:
        """Mean next-token loss of packed parameters, nats."""
        return self._model(packed).loss(tokens_BS)

    def logits(self, packed: PyTree, tokens_BT: Array) -> Array:
        """Logits (B, T, V) of packed parameters."""
        return self._model(packed).logits(tokens_BT)

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

    def _traced(self, function: Callable[[PyTree, Array], Array], must: str, tokens: tuple[int, ...], shape: tuple) -> None:
        """Raises ConfigError where a function of the parameters and tokens fails or gives another shape; `...` is any size."""
        name = self.config.model.module
        with _model_errors(name, must):
            out = jax.eval_shape(function, jax.eval_shape(self._init).params, jax.ShapeDtypeStruct(tokens, jnp.int32))
            given, dtype = tuple(out.shape), out.dtype  # of one array; of anything else this fails
        fits = len(given) == len(shape) and all(size in (..., own) for size, own in zip(shape, given, strict=True))
        if not (fits and jnp.issubdtype(dtype, jnp.floating)):
            raise ConfigError(f"--model.module is {name}: must {must}; it gives {dtype}{list(given)}", field="model.module")

    def init(self) -> TrainState:
        """The state before the first step, made in one program where it belongs."""
        return in_turn(jax.jit(self._init, out_shardings=None if self.mesh is None else self._shardings())())

    def state_shapes(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct`s, with shardings if it is on several devices."""
        shapes = jax.eval_shape(self._init)
        if self.mesh is None:
            return shapes
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, self._shardings()
        )

    @cached_property
    def portable(self) -> Portable:
        """Between the state and what checkpoints hold of it."""
        return Portable(self.form, self.state_shapes(), self.mesh)

    def group_names(self) -> list[str]:
        """Names of the parameter groups in the order of `StepMetrics.grad_square_sums`."""
        return leaf_names(jax.eval_shape(self._init).params)

    def step(self) -> jax.stages.Wrapped:
        """The jitted `(state, tokens_BS) -> (state, StepMetrics)`, with the state donated."""
        config = self.config
        step = train_step(
            self.form.loss_and_grads,
            self.transform,
            clip_norm=config.optimizer.clip_norm,
            read_dtype=config.read_dtype,
            trained=self.trained if config.freeze else None,
        )
        results: dict[str, Any] = {} if self.mesh is None else {"out_shardings": (self._shardings(), self._replicated())}
        return jax.jit(step, donate_argnums=0, keep_unused=True, **results)

    def trained_groups(self) -> set[str]:
        """Names of the groups that have a parameter that is not frozen."""
        if not self.config.freeze:
            return set(self.group_names())
        some = jax.jit(lambda: [jnp.any(mask) for mask in jax.tree.leaves(self.trained())])()
        return {name for name, is_trained in zip(self.group_names(), some, strict=True) if is_trained}

    def trained(self) -> PyTree:
        """Bool arrays as the parameters, False where one is frozen; constants of the program that makes them."""
        tree = jax.eval_shape(lambda: self.form.unpack(self._init().params))
        frozen, (leaves, structure) = _frozen(self.config, tree), jax.tree.flatten(tree)
        masks = [jnp.full(leaf.shape, name not in frozen) for name, leaf in zip(leaf_names(tree), leaves, strict=True)]
        return self.form.pack(structure.unflatten(masks))

    def step_shapes(self, num_rows: int) -> tuple[TrainState, jax.ShapeDtypeStruct]:
        """Arguments of `step` as shapes; `num_rows` is the batch's, over all processes."""
        tokens_BS = jax.ShapeDtypeStruct((num_rows, self.config.seq_len + 1), jnp.int32, sharding=self.batch_sharding())
        return self.state_shapes(), tokens_BS

    def compile_step(self, num_rows: int) -> tuple[jax.stages.Compiled, CaptureReport | None]:
        """Compiles the step and proves that it updates the state in place.

        Args:
            num_rows: rows of the batch, over all processes.

        Returns:
            The compiled `step`, and what of it is captured.

        Raises:
            CompilerOptionError: XLA refuses an option.
            DonationError: a leaf of the state is copied.
        """
        state, tokens_BS = self.step_shapes(num_rows)
        with option_errors():
            compiled, report = compile_and_report(self.step().lower(state, tokens_BS), self.options(jax.default_backend()))
        check_identity(compiled, state)
        return compiled, report

    def options(self, platform: str) -> dict[str, OptionValue]:
        """The step's XLA options on a platform: of --graph, of what is chosen, of --xla-options; what comes later wins."""
        extra = (*self.chosen_options(platform), *self.config.xla_options)
        return compiler_options(self.config.graph, extra, platform=platform, num_devices=self.num_devices)

    def chosen_options(self, platform: str) -> tuple[str, ...]:
        """As name=value, on GPUs and with cut parameters: what was fastest, as far as the installed XLA has it."""
        if self.config.fsdp == 1 or platform not in ("gpu", "cuda"):
            return ()
        known = installed_options() or {}
        return tuple(option for option in fsdp.XLA_OPTIONS if option.partition("=")[0] in known)

    @property
    def pipeline(self) -> Pipeline | None:
        """What plays the schedule, if one is played."""
        return self.form.pipeline if isinstance(self.form, Staged) else None

    def memory(self, compiled: jax.stages.Compiled) -> dict[str, Any]:
        """Bytes of a device: `pools`, what is held for what; `predicted_peak`, of a pipeline, and `compiled_peak`, or None.

        The pool `temporaries` is what the compiled step takes besides those that are predicted.
        """
        state = self.state_shapes()

        def own(tree: PyTree) -> int:
            shapes = [(leaf, leaf.shape if self.mesh is None else leaf.sharding.shard_shape(leaf.shape)) for leaf in tree]
            return sum(math.prod(shape) * leaf.dtype.itemsize for leaf, shape in shapes)

        held = {"parameters": own(jax.tree.leaves(state.params)), "optimizer": own(jax.tree.leaves(state.opt_state))}
        if isinstance(self.form, Staged):
            pools = self.form.pipeline.bytes_per_rank(self.form.shapes, _tokens_by_microbatch(self.config))
            pools = {name.replace("forward_", "residuals to "): size for name, size in pools.items()}
        else:
            itemsize = jnp.dtype(self.config.main_params_dtype).itemsize
            pools = {"main_grad": held["parameters"] // itemsize * jnp.dtype(self.config.main_grads_dtype).itemsize}
        predicted = sum((*held.values(), *pools.values())) if self.pipeline else None
        if (memory := Memory.of(compiled)) is not None:
            pools["temporaries"] = max(0, memory.temporaries - sum(pools.values()))
        pools = {name: size for name, size in (held | pools).items() if size}
        return {"pools": pools, "predicted_peak": predicted, "compiled_peak": memory.total if memory else None}

    def about_pipeline(self, compiled: jax.stages.Compiled) -> str:
        """One line on the schedule, and on the memory that it was predicted to take and takes; empty without a pipeline."""
        if not isinstance(self.form, Staged):
            return ""
        pipeline = self.form.pipeline
        schedule = pipeline.schedule
        predicted = sum(pipeline.bytes_per_rank(self.form.shapes, _tokens_by_microbatch(self.config)).values())
        memory = compiled.memory_analysis()
        idle = simulate(schedule, Costs(), execution="lockstep").bubble
        text = (
            f"pipeline: {schedule.name} ({pipeline.runtime} runtime), {schedule.num_ranks} ranks x "
            f"{pipeline.layout.num_chunks} chunks, {schedule.num_ticks} ticks, {idle:.1%} idle if all actions take the same"
        )
        if memory is None:
            return text
        return f"{text}; a step takes {predicted / 2**30:.2f} GiB predicted, {memory.temp_size_in_bytes / 2**30:.2f} compiled"

    def _init(self) -> TrainState:
        model = self.model_class(self.config.model, rngs=nnx.Rngs(self.config.seed))
        _, params = nnx.split(model, nnx.Param)
        packed = self.form.pack(nnx.to_pure_dict(params))
        return init_state(optax.tree.cast(packed, self.config.main_params_dtype), self.transform)

    def _replicated(self) -> NamedSharding | None:
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def _shardings(self) -> Any:
        """Of the state. Said, not left to the compiler: an update in place needs results that lie as the arguments do."""
        state, replicated = jax.eval_shape(self._init), self._replicated()
        params = self.form.shardings(state.params)
        moments = fsdp.state_shardings(self.transform, state.opt_state, state.params, params, replicated)
        return jax.tree.unflatten(jax.tree.structure(state), [replicated, replicated, *jax.tree.leaves((params, moments))])

    def _model(self, packed: PyTree) -> Any:
        return nnx.merge(self.graphdef, self.form.unpack(packed))


def _frozen(config: TrainConfig, tree: PyTree) -> set[str]:
    """Names of the parameters that are not trained. Raises ConfigError where a pattern matches none."""
    return {name for pattern in config.freeze for name in fsdp.matching(pattern, leaf_names(tree), field="freeze")}


def _mesh(config: TrainConfig) -> Mesh | None:
    counts = {"dp": config.dp, "pp": config.pp, "fsdp": config.fsdp}
    ranks, needs_mesh = math.prod(counts.values()), config.is_pipeline or config.is_sharded
    # Asked in this order: alone and on one device, nothing here starts a backend, which may be for a target that is not here.
    if ranks == 1 and not needs_mesh and not jax.distributed.is_initialized():
        return None
    flags = " ".join(f"--{name} {count}" for name, count in counts.items() if count > 1)
    devices = devices_of_ranks(ranks, flags=flags or "a pipeline")
    if len(devices) == 1 and not needs_mesh:
        return None
    # Neighbours share parameters: that is the most traffic.
    axes = {"data": config.dp, "pipe": config.pp, fsdp.AXIS: config.fsdp}
    if not config.is_sharded and config.fsdp == 1:
        del axes[fsdp.AXIS]
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def _sharded(config: TrainConfig, mesh: Mesh, params: nnx.State, loss: Callable[[PyTree, Array], Array]) -> Sharded:
    """The model with its parameters cut as the flags, else the model's partition names, else their shapes say."""
    tree, axes = nnx.to_pure_dict(params), _asked_axes(config, params)
    packing = Packing.of(tree, alone=axes)
    return Sharded(
        packing,
        fsdp.shard_specs(jax.eval_shape(packing.pack, tree), config.fsdp, axes),
        loss,
        config.num_microbatches,
        mesh,
        grads_dtype=jnp.dtype(config.main_grads_dtype),
        compute_dtype=jnp.dtype(config.model.compute_dtype),
        backward="again" if config.reshard_after_forward else "kept",
    )


def _asked_axes(config: TrainConfig, params: nnx.State) -> dict[str, int]:
    """Along which axis parameters are to be cut, as far as flags or the model's partition names say so."""
    names = leaf_names(nnx.to_pure_dict(params))
    specs = jax.tree.leaves(nnx.to_pure_dict(nnx.get_partition_spec(params)), is_leaf=_is_spec)
    return fsdp.asked_axes(names, config.shard_rules, dict(zip(names, specs, strict=True)))


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def _pipeline(config: TrainConfig, mesh: Mesh, params: nnx.State) -> Pipeline:
    """The model as a pipeline, with the schedule that the flags ask for."""
    module = config.model.module.partition(":")[0]
    make = getattr(importlib.import_module(module), "pipeline_parts", None)
    if make is None:
        raise ConfigError(
            f"--pp is {config.pp}: must be 1 for {config.model.module}, because {module} has no pipeline_parts(config, ranks)",
            field="pp",
        )
    parts = make(config.model, config.pp)
    choices = {"compute_dtype": jnp.dtype(config.model.compute_dtype), "remat": config.remat}
    tree, axes = nnx.to_pure_dict(params), _asked_axes(config, params) if config.fsdp > 1 else {}

    def under(schedule: Schedule) -> Pipeline:
        return Pipeline.of(parts, schedule, mesh, num_layers=config.model.num_layers, **choices).shard_as(tree, axes)

    sizes = {"pp": config.pp, "microbatches": config.num_microbatches}
    if config.schedule != "auto":
        return under(find_schedule(config.schedule, chunks=config.chunks, **sizes))
    pipeline = under(generate("gpipe", **sizes))
    choice = choose(
        pipeline,
        jax.eval_shape(lambda tree: pipeline.stack(*parts.split(tree)), tree),
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
