"""Assembly: from a configuration to the functions of a run: the model found by name, its packed parameters, the step."""

import importlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from jgraph.config import TrainConfig
from jgraph.errors import ConfigError
from jgraph.graph import CaptureReport, check_identity, compile_and_report, compiler_options, option_errors
from jgraph.packing import Packing
from jgraph.step import TrainState, init_state, optimizer, train_step

PyTree = Any


# Compared by identity: two assemblies are different programs, and functions bound to one are static arguments of a jit.
@dataclass(frozen=True, eq=False)
class Assembly:
    """A model and its optimizer, without arrays; made by `Assembly.of`."""

    config: TrainConfig
    model_class: Any
    graphdef: Any
    packing: Packing
    transform: optax.GradientTransformation

    @classmethod
    def of(cls, config: TrainConfig) -> "Assembly":
        """Finds the model and traces its construction; computes nothing. Raises ConfigError as `find_model` does."""
        model_class = find_model(config.model.module)
        model = nnx.eval_shape(lambda: model_class(config.model, rngs=nnx.Rngs(config.seed)))
        graphdef, params = nnx.split(model, nnx.Param)
        packing = Packing.of(nnx.to_pure_dict(params))
        transform = optimizer(config.optimizer, config.steps, decay_mask=packing.decay_mask())
        return cls(config, model_class, graphdef, packing, transform)

    def loss(self, packed: PyTree, tokens_BS: Array) -> Array:
        """Mean next-token loss of packed parameters, nats."""
        return self._model(packed).loss(tokens_BS)

    def logits(self, packed: PyTree, tokens_BT: Array) -> Array:
        """Logits (B, T, V) of packed parameters."""
        return self._model(packed).logits(tokens_BT)

    def init(self) -> TrainState:
        """The state before the first step, made on the default device in one program."""
        return jax.jit(self._init)()

    def state_shapes(self) -> TrainState:
        """The state as `jax.ShapeDtypeStruct`s."""
        return jax.eval_shape(self._init)

    def group_names(self) -> list[str]:
        """Names of the parameter groups in the order of `StepMetrics.grad_square_sums`."""
        return sorted(group.name for group in self.packing.groups)

    def step(self) -> jax.stages.Wrapped:
        """The jitted `(state, tokens_BS) -> (state, StepMetrics)`, with the state donated."""
        config = self.config
        step = train_step(
            self.loss,
            self.transform,
            num_microbatches=config.num_microbatches,
            clip_norm=config.optimizer.clip_norm,
        )
        return jax.jit(step, donate_argnums=0, keep_unused=True)

    def step_shapes(self, num_rows: int) -> tuple[TrainState, jax.ShapeDtypeStruct]:
        """Arguments of `step` as shapes; `num_rows` is the part of the batch that this process feeds."""
        return self.state_shapes(), jax.ShapeDtypeStruct((num_rows, self.config.seq_len + 1), jnp.int32)

    def compile_step(self, num_rows: int) -> tuple[jax.stages.Compiled, CaptureReport | None]:
        """Compiles the step and proves that it updates the state in place.

        Args:
            num_rows: rows of the batch that this process feeds.

        Returns:
            The compiled `step`, and what of it is captured.

        Raises:
            CompilerOptionError: XLA refuses an option.
            DonationError: a leaf of the state is copied.
        """
        state, tokens_BS = self.step_shapes(num_rows)
        options = compiler_options(self.config.graph, self.config.xla_options, platform=jax.default_backend())
        with option_errors():
            compiled, report = compile_and_report(self.step().lower(state, tokens_BS), options)
        check_identity(compiled, state)
        return compiled, report

    def _init(self) -> TrainState:
        model = self.model_class(self.config.model, rngs=nnx.Rngs(self.config.seed))
        _, params = nnx.split(model, nnx.Param)
        return init_state(self.packing.pack(nnx.to_pure_dict(params)), self.transform)

    def _model(self, packed: PyTree) -> Any:
        return nnx.merge(self.graphdef, self.packing.unpack(packed))


def find_model(name: str) -> Any:
    """The class that `package.module:Class` names. Raises ConfigError where there is none."""
    module_name, _, class_name = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, TypeError) as e:
        raise ConfigError(
            f"--model.module is {name}: must be package.module:Class of something that can be imported from here ({e})",
            field="model.module",
        ) from e
