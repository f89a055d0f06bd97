"""From a configuration to the functions of a run: the model found by name, its optimizer, its strategy and its step."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jgraph.autodiff import product_flops
from jgraph.dispatch import in_turn
from jgraph.errors import ConfigError, JgraphError
from jgraph.inference.generate import windowed
from jgraph.interop.folder import Folder
from jgraph.interop.load import load
from jgraph.mesh import batch_axes
from jgraph.modules import Decoder, FunctionalModel
from jgraph.pipeline import Pipeline
from jgraph.step import TrainStep, elementwise, train_step
from jgraph.step.compiled import CompiledStep
from jgraph.step.state import TrainState
from jgraph.train.config import TrainConfig
from jgraph.train.functional import batch_shapes, functional_model
from jgraph.train.model import model_errors
from jgraph.train.optimizer import adamw
from jgraph.train.origin import names_of
from jgraph.train.strategy import loss_and_strategy, named_by_fields, recipe_of
from jgraph.tree import leaf_names
from jgraph.xla.options import OptionValue

Tree = Any


# Compared by identity: two setups are different programs, and functions bound to one are static arguments of a jit.
@dataclass(frozen=True, eq=False)
class TrainSetup:
    """A model, its optimizer and its step, without arrays; made by `TrainSetup.of`.

    Attributes:
        config: the whole run.
        model: as pure functions.
        step: the training step.
    """

    config: TrainConfig
    model: FunctionalModel
    step: TrainStep

    @classmethod
    def of(cls, config: TrainConfig, *, layers: int | None = None) -> "TrainSetup":
        """Finds the model and traces its construction; computes nothing.

        `layers`: of a pipeline, only so many from the first on: it is quicker to compile, to be timed.

        Raises:
            ConfigError: as `find_model` does; there are more ranks than devices; the model cannot be a pipeline; the schedule
                is for another one.
            OrderError: there is no such schedule.
        """
        model = functional_model(config)
        loss, strategy = loss_and_strategy(config, model, layers=layers)
        with named_by_fields(config):
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
                carried=model.carried,
                reductions=model.reductions,
                fp8=recipe_of(config),
                batch=batch_shapes(config, config.batch_size),
            )
        return cls(config, model, step)

    @property
    def num_devices(self) -> int:
        return self.step.num_devices

    def place_whole(self, batch: Tree) -> Tree:
        """Shards the rows of an evaluation batch over the data ranks. Replicates them if the ranks do not divide their number.

        Args:
            batch: Leaves [B, ...]. Every process has all rows.
        """
        mesh = self.step.mesh

        def place(leaf: np.ndarray) -> Array | np.ndarray:
            if mesh is None or len(leaf) % (self.config.dp * self.config.fsdp):
                return leaf
            sharding = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
            return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

        return jax.tree.map(place, batch)

    def loss(self, state: TrainState, batch: Tree) -> Array:
        """Returns the mean next-token loss of a state in evaluation, in nats."""
        return self.model.evaluate("loss", self.step.bound.unpack(state.params), state.carried, batch)

    def logits(self, state: TrainState, tokens_BT: Array) -> Array:
        """Returns the logits (B, T, V) of a state in evaluation."""
        return self.model.evaluate("logits", self.step.bound.unpack(state.params), state.carried, tokens_BT)

    @cached_property
    def decoder(self) -> Decoder:
        """Draws text from a state, over all devices."""
        own = self.model.decoder
        if own is None:
            return windowed(lambda weights, tokens_BT: self.logits(weights[0], tokens_BT))

        def prepare(state: TrainState) -> Tree:
            return own.prepare(self.step.bound.unpack(state.params), state.carried)

        if self.num_devices == 1:
            return replace(own, prepare=lambda state, _: prepare(state))
        # Whole on no device: what is sharded is gathered where it is used.
        return Decoder(
            lambda state, _: state,
            lambda state, *args, **sizes: own.prefill(prepare(state), *args, **sizes),
            lambda state, *args: own.decode(prepare(state), *args),
        )

    @cached_property
    def flops_per_step(self) -> float:
        """FLOPs of a step by the model's own count, or those of its loss's products and twice as many for their gradients."""
        rows, length = self.config.batch_size, self.config.seq_len
        if (count := getattr(self.config.model, "flops", None)) is not None:
            return count(rows, length)
        return 3 * product_flops(self.loss, self.step.state, batch_shapes(self.config, rows))

    def check_loss(self) -> None:
        """Traces the model's loss. Raises ConfigError where it fails, or is not a scalar."""
        rows = self.config.batch_size // self.config.num_microbatches
        taken = "tokens_BS" if self.config.data_documents == "joined" else "{'tokens', 'starts', 'weights'}"
        self._traced(self.loss, f"have loss({taken}), a scalar of floats", batch_shapes(self.config, rows), ())

    def sampling_problem(self) -> str:
        """Traces the model's logits. Returns why a sample cannot be drawn from them; empty if it can."""
        length = self.config.seq_len
        try:
            tokens_BT = jax.ShapeDtypeStruct((1, length), jnp.int32)
            self._traced(self.logits, "have logits(tokens_BT), floats (B, T, V)", tokens_BT, (1, length, ...))
        except JgraphError as e:
            return str(e)
        return ""

    def _traced(self, function: Callable[[TrainState, Tree], Array], must: str, given: Tree, shape: tuple) -> None:
        """Raises ConfigError where a function of the parameters and tokens fails or gives another shape; `...` is any size."""
        name = self.config.module
        with model_errors(name, must):
            out = jax.eval_shape(function, self.step.state, given)
            found, dtype = tuple(out.shape), out.dtype  # of one array; of anything else this fails
        fits = len(found) == len(shape) and all(size in (..., own) for size, own in zip(shape, found, strict=True))
        if not (fits and jnp.issubdtype(dtype, jnp.floating)):
            raise ConfigError(f"`module` is {name}: must {must}; it gives {dtype}{list(found)}", field="module")

    def compile_init(self) -> Callable[[], TrainState]:
        """Compiles, in a thread of its own, the program that makes the state before the first step where it belongs.

        Returns:
            A function that waits for it and runs it.
        """
        lowered = self.step.lower_init(self.model.init)
        # It runs once, and random numbers make much code: 27 s to compile for GPT 1.3B on an H200, 14 s unoptimized.
        options: Any = {"xla_backend_optimization_level": 0} if jax.default_backend() == "gpu" else {}
        thread = ThreadPoolExecutor(1)
        compiling = thread.submit(lowered.compile, options)
        thread.shutdown(wait=False)
        return lambda: in_turn(compiling.result()())

    def init(self) -> TrainState:
        """Returns the state before the first step."""
        return self.compile_init()()

    def load(self, folder: Folder) -> TrainState:
        """Returns the state before the first step, with the weights of a folder that was checked.

        Each is read where checkpoints are read, sharded as evenly as can be, and goes from there where the strategy has it.
        A folder has parameters only: the carried state is as the model makes it.
        """
        parts = names_of(self.config.module, field="init_from").parts(self.config.model)
        return self.step.init(load(folder, parts, self.step.canonical.shapes().params), self.new_state())

    def new_state(self) -> Tree:
        """Returns the model's carried state as the model makes it, where checkpoints have it."""
        return self.model.new_state(jax.tree.map(lambda leaf: leaf.sharding, self.step.canonical.shapes().carried))

    def weights(self, params: Tree, carried: Tree) -> TrainState:
        """Returns a state to evaluate, without the optimizer's, from parameters in the model's own tree."""
        where, zero = None if self.step.mesh is None else self.step.shardings.params, jnp.zeros((), jnp.int32)
        return TrainState(zero, zero, in_turn(jax.jit(self.step.bound.pack, out_shardings=where)(params)), (), carried)

    def group_names(self) -> list[str]:
        """Returns the names of the arrays of parameters, in the order of `StepMetrics.grad_square_sums`."""
        return leaf_names(self.step.state.params)

    def trained_groups(self) -> set[str]:
        """Returns the names of the arrays that have a parameter which is not frozen."""
        if not self.config.freeze:
            return set(self.group_names())
        some = jax.jit(lambda: [jnp.any(mask) for mask in jax.tree.leaves(self.step.trained())])()
        return {name for name, is_trained in zip(self.group_names(), some, strict=True) if is_trained}

    def batch(self) -> Tree:
        """Returns the shapes of a batch from `TrainStep.place`: int32 tokens, or a dict as `jgraph.data.apart` returns it."""
        return self.step.placed_shapes(batch_shapes(self.config, self.config.batch_size))

    def compile_step(self) -> CompiledStep:
        """Compiles the step. Raises as `TrainStep.compile`."""
        with named_by_fields(self.config):
            return self.step.compile(self.batch(), graph=self.config.graph, xla_options=self.config.xla_options)

    def options(self, platform: str) -> dict[str, OptionValue]:
        """Returns all options with which the step is compiled on a platform."""
        return self.step.options(platform, graph=self.config.graph, xla_options=self.config.xla_options)

    @cached_property
    def pipeline(self) -> Pipeline | None:
        """The program that plays the schedule, if one is played."""
        return getattr(self.step.bound, "pipeline", None)

    def memory(self, compiled: CompiledStep) -> dict[str, Any]:
        """Returns bytes of a device: `pools` by what they hold; `predicted_peak`, of a pipeline, and `compiled_peak`, or None.

        The pool `temporaries` is what the compiled step takes besides those that are predicted.
        """
        state = self.step.state

        def own(tree: Tree) -> int:
            def shape(leaf: Any) -> tuple[int, ...]:
                return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)

            return sum(math.prod(shape(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

        held = {"parameters": own(state.params), "optimizer": own(state.opt_state)}
        found = self.step.bound.predict_memory(batch_shapes(self.config, self.config.batch_size))
        pools = {name.replace("forward_", "residuals to "): size for name, size in found.sizes.items()}
        predicted = sum((*held.values(), *pools.values())) if found.covers == "whole" else None
        if (memory := compiled.memory) is not None:
            pools["temporaries"] = max(0, memory.temporaries - sum(pools.values()))
        pools = {name: size for name, size in (held | pools).items() if size}
        return {"pools": pools, "predicted_peak": predicted, "compiled_peak": memory.total if memory else None}

    def describe(self, compiled: CompiledStep) -> list[str]:
        """Returns lines for the log about a compiled step."""
        batch = batch_shapes(self.config, self.config.batch_size)
        return self.step.bound.describe(batch, compiled.gradients, compiled.executables, compiled.memory)
