"""A training step for any loop: gradients of a strategy, clipping, an optax update, a check for finite values.

The step is one jitted function of (state, batch). It donates the state and returns it in the same buffers. The program applies
an update only if the loss and the gradient are finite, so the host may read the metrics several steps later.

Look for: `train_step`, which binds the strategy to the loss; `TrainStep.jitted`, the whole step as one `jax.jit` with
`donate_argnums=0`; `TrainStep.options`, the XLA options that capture it as CUDA graphs; and `TrainStep.compile`, which refuses
a program that does not update every array of the state in its own buffer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jgraph.checkpoint.canonical import CanonicalLayout
from jgraph.dispatch import in_turn, warn_unordered
from jgraph.errors import ConfigError
from jgraph.layout import named
from jgraph.mesh import PARTITIONED_AXES, traced_on
from jgraph.precision.config import FP8Config
from jgraph.scopes import scope
from jgraph.step._bind import bind
from jgraph.step.compiled import CompiledStep
from jgraph.step.state import StepMetrics, TrainState
from jgraph.step.transform import Elementwise, Transform, with_masters
from jgraph.step.update import Update
from jgraph.strategies import checks
from jgraph.strategies.base import BoundStrategy, GradientProgram, Strategy
from jgraph.strategies.objective import LossFunction, LossInParts, Objective, Offload
from jgraph.types import Batch, Carried, JaxDevice, Key, Observed, Params, Reductions, Tree
from jgraph.xla import check_identity, compile_and_report, compiler_options
from jgraph.xla.options import OptionValue, known


def train_step(
    loss: LossFunction | LossInParts,
    transform: Transform | Elementwise,
    strategy: Strategy,
    *,
    num_microbatches: int = 1,
    clip_norm: float | None = None,
    key: Key | int = 0,
    params_dtype: DTypeLike = jnp.float32,
    grads_dtype: DTypeLike = jnp.float32,
    read_dtype: DTypeLike | None = None,
    freeze: Sequence[str] = (),
    frozen_dtype: DTypeLike | None = None,
    carried: Carried = None,
    reductions: Reductions = "mean",
    fp8: FP8Config | None = None,
    batch: Batch = None,
    layout: Literal["auto", "tree"] = "auto",
    offload: Offload = "nothing",
) -> "TrainStep":
    """Makes a training step: gradients of a loss over microbatches, clipping, an optax update, applied only if finite.

    The step is the jitted function that you would write around `jax.value_and_grad` and `optax.apply_updates`. It runs on the
    devices of its strategy, and `compile` proves that it updates the state in place. Does not compile the step.

    Args:
        loss: `loss(params, batch, key)`, with parameters in the model's own tree, a microbatch (leaves [rows, ...]) and a
            random key. Returns a scalar mean, or `jgraph.Loss`. With carried state, it takes the state as a fourth argument and
            returns a `Loss` with the new state. `Pipelined` takes a `jgraph.PipelineModel` instead. Collectives may reduce over
            `jgraph.BATCH_AXES` on every mesh.
        transform: An optax transform. Its `update` gets the clipped gradient and the parameters, in float32 and in the model's
            own tree, or packed (see `layout`). `jgraph.elementwise` declares that it may be packed. As extra arguments, if it
            takes them, it gets the loss as `value` and the clipped gradient as `grad`.
        strategy: `Replicated`, `FullySharded` or `Pipelined`, or `TensorParallel` around one of them.
        num_microbatches: M, the number of microbatches of a batch. Their gradients are summed before the update.
        clip_norm: Largest global L2 norm of the gradient. Larger gradients are scaled down to it. None does not clip.
        key: A random key or an integer seed. Every step, microbatch and data rank gets its own key, folded from this one.
        params_dtype: Floating dtype of the parameters in the state.
        grads_dtype: Floating dtype of the sums of gradients over microbatches and devices.
        read_dtype: Rounds the mean gradient to this floating dtype before the update; None does not round.
        freeze: Shell patterns of the names of parameters that are not trained, e.g. `("embed*",)`. `*` also matches `/`. They
            have no gradient and no optimizer state, unless a pipeline stacks them with trained layers.
        frozen_dtype: Floating dtype of frozen parameters in the state; None for `params_dtype`.
        carried: Arrays or shapes of the mutable state of the model, such as running statistics; None for no state. With
            `Pipelined`, only layers may have such state.
        reductions: How carried state is reduced over microbatches and devices: `mean` (of floating arrays), `sum`, `max`,
            `last` (of the last microbatch and data rank), `halt`, or a tree of these like `carried`. `halt` is `max` for
            integers that stop the training: if one is positive before or after a step, the step changes only these integers,
            which never decrease. `TrainStep.resumed` sets them to zero.
        fp8: Recipe for matmuls with parameters in FP8, forward and backward; None for no matmuls in FP8. With `Pipelined`, only
            the matmuls of layers are in FP8.
        batch: Arrays or shapes of a whole batch, leaves [B, ...], where B is the number of rows. Required with `fp8`, to find
            the matmuls. Not read otherwise.
        layout: What the transform updates. `auto`: packed parameters if the transform is elementwise, which `train_step` finds
            out by traces, else the model's own tree. `tree`: the model's own tree. `print` of the compiled step names the
            choice and its reason.
        offload: `optimizer` keeps the arrays of the optimizer state in pinned host memory, and copies those of two parameters
            at a time to the device. The strategy needs a mesh. If `params_dtype` is not float32, the optimizer state is
            `(params, inner)`: float32 parameters, which the transform updates, and its own state. The parameters of the step
            are then a cast copy. A transform that reads all its state at once, such as `optax.MultiSteps`, needs device memory
            for all of it.

    Returns:
        A `TrainStep`. Its `compile(batch)` returns the function `run(state, batch) -> (state, metrics)`, and its `init(params)`
        returns the initial state.

    Raises:
        ConfigError: If an argument has a value that is not allowed (`field` is its name): for example, a pattern of `freeze`
            that matches no parameter, patterns that match all parameters, a transform that is declared elementwise and is not,
            or a loss with other parameters than `loss(params, batch, key)`.
        ShapeError: If microbatches and devices cannot share the rows of `batch`.
        OrderError: If the layers of a pipeline do not make the stages of its schedule.

    Examples:
        >>> import optax
        >>> def loss(params, batch, key):
        ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> params, batch = {"w": jnp.zeros((8, 1))}, {"x": jnp.ones((4, 8)), "y": jnp.ones((4, 1))}
        >>> step = jgraph.train_step(loss, optax.sgd(0.1), jgraph.Replicated(None, params))
        >>> run, state = step.compile(batch), step.init(params)
        >>> state, metrics = run(state, batch)
        >>> float(metrics.loss)
        1.0
    """
    checks.check_shapes(strategy)
    checks.check_count("num_microbatches", num_microbatches)
    checks.check_clip_norm(clip_norm)
    checks.check_fp8(fp8, batch)
    carried = {} if carried is None else carried
    reductions = checks.reductions_of(carried, reductions)
    loss = checks.checked_loss(loss, carried)
    key = checks.random_key(key)
    grads_dtype = checks.float_dtype("grads_dtype", grads_dtype)
    params_dtype = checks.float_dtype("params_dtype", params_dtype)
    read_dtype = None if read_dtype is None else checks.float_dtype("read_dtype", read_dtype)
    frozen_dtype = params_dtype if frozen_dtype is None else checks.float_dtype("frozen_dtype", frozen_dtype)
    objective = Objective(
        loss=loss,
        layout=named(strategy.shapes, checks.frozen_names(freeze, strategy.shapes)),
        num_microbatches=num_microbatches,
        grads_dtype=grads_dtype,
        carried=carried,
        reductions=reductions,
        fp8=fp8,
        batch=batch,
        offload=offload,
    )
    bound, optimizer = bind(transform, strategy, objective, layout)
    checks.check_offload(offload, bound.batches.mesh)
    if offload == "optimizer" and params_dtype != jnp.float32:
        optimizer = replace(optimizer, transform=with_masters(optimizer.transform))
    update = Update(
        optimizer,
        bound.layout,
        shapes=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), strategy.shapes),
        objective=objective,
        clip_norm=clip_norm,
        params_dtype=params_dtype,
        read_dtype=read_dtype,
        frozen_dtype=frozen_dtype,
        observed=bound.observed,
    )
    return TrainStep(bound, update, key)


@dataclass(frozen=True, eq=False)
class TrainStep:
    """Compiles a training step, makes its state and places its batches. Made by `train_step`. Does not hold the state.

    In the methods, B is the number of rows of the whole batch, and M the number of microbatches.

    Attributes:
        bound: The strategy, bound to the loss: it computes the gradients and stores the parameters as arrays.
        update: The optax transform with clipping and the check for finite values.
        key: The random key of the run.
    """

    bound: BoundStrategy
    update: Update
    key: Key

    def __repr__(self) -> str:
        size = sum(leaf.size for leaf in jax.tree.leaves(self.update.shapes))
        devices = "1 device" if self.num_devices == 1 else f"{self.num_devices} devices"
        return f"TrainStep({size:,} parameters on {devices}, {type(self.bound).__name__})"

    def __call__(self, *args: Tree | TrainState) -> NoReturn:
        """Raises a ConfigError, because only the result of `compile` runs."""
        must = "must be compiled first, as in run = step.compile(batch); state, metrics = run(state, batch)"
        raise ConfigError(f"`step` is called: {must}", field="step")

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the strategy. None if the strategy has no mesh; the step then runs on one device."""
        return self.bound.batches.mesh

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh; 1 without a mesh."""
        return 1 if self.mesh is None else self.mesh.size

    def on(self, devices: Sequence[JaxDevice]) -> "TrainStep":
        """Returns the same step on other devices, for example compile-only devices from `jgraph.xla.aot`. Moves no arrays.

        Args:
            devices: As many devices as the mesh has, in the row-major order of the mesh.

        Returns:
            A new step with a mesh of the same shape and axis names.

        Raises:
            AssertionError: If the step has no mesh.
            ValueError: If the number of devices differs from the size of the mesh.
        """
        assert self.mesh is not None, "a step on one device runs on the device of its arguments"
        return replace(
            self, bound=self.bound.on(Mesh(np.array(devices).reshape(self.mesh.devices.shape), self.mesh.axis_names))
        )

    # --- State ---

    def init(self, params: Params | Callable[[], Params], carried: Carried = None, observed: Observed = None) -> TrainState:
        """Makes the initial state (before the first step) in one compiled program, on the devices of the step.

        Args:
            params: Floating arrays in the model's own tree, which are copied and cast to `params_dtype`; not donated. Or a
                function without arguments that returns them. It is traced into the program, whose results are sharded. A tree
                that is callable, such as an Equinox or NNX module, is not called.
            carried: The carried state to start from, of the shapes and dtypes given to `train_step`; copied. None if the step
                carries no state.
            observed: The observed state to start from (amax histories of FP8), like `TrainState.observed`; copied. None starts
                from zeros.

        Returns:
            The state, with both counters 0 and the optimizer state from the `init` of the transform. It shares no buffer with
            the arguments, because the first step donates it.

        Raises:
            ShapeError: If `params` or `carried` differ from the shapes given to the strategy and to `train_step`. The message
                has the path of the leaf.
        """
        carried = {} if carried is None else carried
        checks.check_carried(carried, self.update.objective.carried)
        # A callable tree, such as an Equinox module, is a tree.
        if callable(params) and jax.tree_util.all_leaves([params]):
            return in_turn(self.jitted_init(lambda *rest: (params(), *rest))(carried, observed))
        checks.check_params(params, self.update.shapes)  # pyright: ignore[reportArgumentType], no function here
        return in_turn(self.jitted_init(lambda *args: args)(params, carried, observed))

    def jitted_init(self, make: Callable[..., tuple[Tree, ...]]) -> jax.stages.Wrapped:
        """Returns the jitted function that makes the initial state. Traces nothing.

        Args:
            make: A function, which is traced. Returns the parameters in the model's own tree, the carried state ({} if there is
                none), and optionally the observed state.

        Returns:
            A function with the arguments of `make` that returns the `TrainState` before the first step.
        """

        def initial(*args: Tree) -> TrainState:
            return self.update.initial(*make(*args))

        return jax.jit(initial, out_shardings=self.shardings)

    @cached_property
    def state(self) -> TrainState:
        """The shapes of the state: a `TrainState` of `jax.ShapeDtypeStruct`s, with shardings if there is a mesh.

        Holds no arrays. Computed once.
        """
        shapes = self.update.state
        if self.mesh is None:
            return shapes
        return jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, self.shardings)

    @cached_property
    def shardings(self) -> TrainState | None:
        """The shardings of the state, a `TrainState` of NamedShardings; None if the mesh is None. Computed once.

        Raises:
            ConfigError: If an elementwise transform has a moment with another shape than its parameter.
        """
        # Explicit, because an update in place requires that results have the shardings of the arguments.
        return None if self.mesh is None else self.update.shardings(self.mesh)

    @property
    def canonical(self) -> CanonicalLayout:
        """An object that converts a `TrainState` to and from the canonical layout.

        In the canonical layout, the parameters and the optimizer state are in the model's own tree, without packing, padding
        and stacking. Checkpoints of every strategy have this layout.
        """
        return CanonicalLayout(self.bound.layout, self.update.optimizer.moments, self.state, self.mesh)

    def resumed(self, state: TrainState) -> TrainState:
        """Sets the carried arrays with the reduction `halt` to zero, in the same buffers, so that training can go on.

        Args:
            state: A state after a halted step: at least one array with the reduction `halt` is positive, so steps change no
                other leaf. The arrays with this reduction are donated: do not use `state` again. The other leaves are not
                copied and become part of the result.

        Returns:
            The state to continue from. The index of the next batch is `state.step`, which does not count halted steps.
        """
        leaves, structure = jax.tree.flatten(state.carried)
        kinds = jax.tree.leaves(self.update.objective.reductions)
        flags = {i: leaves[i] for i, kind in enumerate(kinds) if kind == "halt"}
        shardings = {i: flag.sharding for i, flag in flags.items()}
        zeros = jax.jit(partial(jax.tree.map, jnp.zeros_like), donate_argnums=0, keep_unused=True, out_shardings=shardings)
        leaves = dict(enumerate(leaves)) | in_turn(zeros(flags))
        return replace(state, carried=structure.unflatten(leaves.values()))

    # --- Batches ---

    def batch_rows(self, rows: int) -> np.ndarray:
        """Lists the rows of a batch that this process passes to `place`.

        Microbatch m consists of rows [m * B/M, (m + 1) * B/M) of the batch. Each data rank (device with its own rows) has an
        equal, consecutive part of every microbatch.

        Args:
            rows: B, the number of rows of the whole batch.

        Returns:
            int64 indices in [0, B), ascending. A single process passes all rows.

        Raises:
            ShapeError: If M times the number of data ranks does not divide `rows`.

        Examples:
            >>> import optax
            >>> step = jgraph.train_step(lambda params, x, key: jnp.mean(x), optax.sgd(0.1), jgraph.Replicated(None, {}))
            >>> step.batch_rows(4)
            array([0, 1, 2, 3])
        """
        return self.bound.batches.rows(rows)

    def place(self, batch: Batch) -> Batch:
        """Reshapes a batch to microbatches and copies it to the devices of this process. Sends no row to another process.

        Args:
            batch: Tree of NumPy or JAX arrays [B, ...]. With several processes, only the rows that `batch_rows` lists for this
                process, in that order.

        Returns:
            The batch for a call of the compiled step. On a mesh, JAX arrays [M, B/M, ...] with the second axis sharded over the
            data ranks (devices with their own rows). If the mesh is None, `batch` itself, unchanged and unchecked.

        Raises:
            ShapeError: If there is a mesh, and a leaf is not an array of numbers, or microbatches and data ranks cannot share
                the rows equally.
        """
        return self.bound.batches.place(batch)

    def placed_shapes(self, batch: Batch) -> Batch:
        """Computes the shapes and shardings of a placed batch, to lower programs. Places nothing.

        Args:
            batch: Arrays or shapes of a whole batch, leaves [B, ...], or of a batch from `place`.

        Returns:
            A tree of `jax.ShapeDtypeStruct`. On a mesh, [M, B/M, ...] with shardings. If the mesh is None, the shapes of
            `batch` itself, without shardings.

        Raises:
            ShapeError: If a leaf is not an array of numbers, or microbatches and data ranks cannot share the rows equally.
        """
        return self.bound.batches.placed_shapes(batch)

    # --- The program ---

    def compile(
        self, batch: Batch, *, graph: Literal["auto", "off", "full"] = "auto", xla_options: Sequence[str] = ()
    ) -> CompiledStep:
        """Compiles the step and proves that it updates the state in place. Does not run it.

        Args:
            batch: Arrays or shapes of a whole batch, leaves [B, ...], or of a batch from `place`. Only shapes and dtypes are
                read.
            graph: Command buffers (CUDA graphs): the default of XLA (`auto`), none (`off`), or as many as possible (`full`). No
                effect on a CPU.
            xla_options: XLA options as `name=value`. Names are checked against the installed XLA. They override those of the
                strategy.

        Returns:
            The compiled step, called as `run(state, batch) -> (state, metrics)`.

        Raises:
            ConfigError: If `transform` requires another keyword argument than `value` and `grad`, `graph` is unknown, or
                `xla_options` is a string.
            ShapeError: If a leaf of `batch` is not an array of numbers, microbatches and devices cannot share its rows, or
                `loss` does not return a scalar and the carried state.
            CompilerOptionError: If the installed XLA does not have an option of `xla_options`, or refuses its value.
            DonationError: If the program copies a leaf of the state, or swaps the buffers of two leaves.
        """
        xla_options = checks.strings("xla_options", xla_options, example="name=value")
        if self.mesh is not None and any(self.mesh.shape.get(axis, 1) > 1 for axis in PARTITIONED_AXES):
            warn_unordered()
        options = self.options(jax.default_backend(), graph=graph, xla_options=xla_options)
        shapes = self.placed_shapes(batch)
        gradients = self.bound.compile_gradients(self.state.params, self.state.carry, shapes, self.key, options)
        compiled, report = compile_and_report(self.jitted(gradients).lower(self.state, gradients.inputs), options)
        check_identity(compiled, self.state)
        return CompiledStep(compiled, report, shapes, gradients, self.update.optimizer.about)

    def options(
        self, platform: str, *, graph: Literal["auto", "off", "full"] = "auto", xla_options: Sequence[str] = ()
    ) -> dict[str, OptionValue]:
        """Returns the XLA options of the compiled step on a platform. Compiles nothing.

        Args:
            platform: `cpu`, or `gpu`/`cuda`.
            graph: Command buffers (CUDA graphs): the default of XLA (`auto`), none (`off`), or as many as possible (`full`). No
                effect on a CPU.
            xla_options: More options as `name=value`. They override those of the strategy and of `graph`.

        Returns:
            A dict of option values by name, to be passed to `jax.stages.Lowered.compile`.

        Raises:
            ConfigError: If `graph` is unknown.
            CompilerOptionError: If an option is not `name=value`, or the installed XLA does not have it.
        """
        # Without options of the strategy that the installed XLA does not have.
        chosen = compiler_options("auto", known(self.bound.xla_options, platform), platform=platform)
        return chosen | compiler_options(graph, xla_options, platform=platform, num_devices=self.num_devices)

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """Lowers the step as one program that computes gradients and update. Does not compile or run it.

        Args:
            batch: Arrays or shapes of a whole batch, leaves [B, ...], or of a batch from `place`.

        Returns:
            The lowered program `(state, batch) -> (state, StepMetrics)`, where `batch` is from `place`. It donates the state.

        Raises:
            ShapeError: If a leaf of `batch` is not an array of numbers, or microbatches and data ranks cannot share its rows
                equally.
        """
        return self.jitted().lower(self.state, self.placed_shapes(batch))

    def jitted(self, gradients: GradientProgram | None = None) -> jax.stages.Wrapped:
        """Returns the jitted function `step(state, inputs) -> (state, StepMetrics)`, which donates `state`. Traces nothing.

        Args:
            gradients: Compiled executables of the gradients; `inputs` is then the result of `gradients.run`. If None, the
                function computes the gradients itself, and `inputs` is a batch from `place`.

        Returns:
            The function, from `jax.jit`. On a mesh, its results have the shardings `shardings` (state) and are replicated
            (metrics).
        """
        gradients = gradients or GradientProgram(self.bound, None)

        def step(state: TrainState, inputs: Tree) -> tuple[TrainState, StepMetrics]:
            key = jax.random.fold_in(self.key, state.step)
            sums, grads = gradients.gradients(state.params, state.carry, key, inputs)
            with scope("optimizer"), traced_on(self.mesh):
                return self.update.apply(state, sums, grads)

        placed = None if self.mesh is None else (self.shardings, NamedSharding(self.mesh, PartitionSpec()))
        return jax.jit(step, donate_argnums=0, keep_unused=True, out_shardings=placed)
