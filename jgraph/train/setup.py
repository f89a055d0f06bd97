"""Builds the functions of a run from its configuration: the model, its strategy and its training step."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jgraph.device import find as device_info
from jgraph.dispatch import in_turn
from jgraph.errors import ConfigError
from jgraph.modules import FunctionalModel
from jgraph.precision.config import FP8Config
from jgraph.step import TrainStep, train_step
from jgraph.step.compiled import CompiledStep
from jgraph.step.state import TrainState
from jgraph.train._functional import batch_shapes, build_model, errors_by_field
from jgraph.train._strategy import data_parallel, make_mesh, pipelined, tensor_parallel
from jgraph.train.config import TrainConfig
from jgraph.train.optimizer import optimizer
from jgraph.types import JaxDevice, Tree
from jgraph.xla.options import OptionValue


# eq=False: setups are compared by identity, because methods of a setup are static arguments of jitted functions.
@dataclass(frozen=True, eq=False)
class TrainSetup:
    """A configuration, its model as pure functions and its training step, without arrays. Made by `TrainSetup.from_config`."""

    config: TrainConfig
    model: FunctionalModel
    step: TrainStep

    @classmethod
    def from_config(
        cls, config: TrainConfig, *, devices: Sequence[JaxDevice] | None = None, functions: FunctionalModel | None = None
    ) -> "TrainSetup":
        """Imports the model class, traces its construction and chooses the strategy. Compiles nothing.

        Computes nothing on a device, except with `schedule` auto, which times a layer. All processes must call it together.
        `devices` are those of the mesh, by default all devices of all processes. `functions` are those of a setup with the
        same model, which is then not traced again.
        """
        parallel = config.parallel
        fp8 = fp8_recipe(config)
        is_offloaded = config.compile.offload == "optimizer"
        mesh = make_mesh(
            parallel, is_pipeline=config.is_pipeline, is_sharded=config.is_sharded, is_offloaded=is_offloaded, devices=devices
        )
        batch = batch_shapes(config.input, config.input.batch_size)
        with errors_by_field(config):
            model = build_model(config, functions)
            remat = config.compile.remat
            if config.is_pipeline:
                assert remat != "offload", "checked by the configuration"
                strategy = pipelined(
                    parallel,
                    config.pipeline,
                    mesh,
                    model,
                    batch=batch,
                    num_microbatches=config.input.num_microbatches,
                    remat=remat,
                    fp8=fp8,
                )
            else:
                strategy = data_parallel(parallel, mesh, model, is_sharded=config.is_sharded)
            strategy = tensor_parallel(parallel, strategy, model)
            functions = model.functions
            transform = optimizer(
                config.optimizer,
                config.steps,
                functions.shapes,
                stacked=config.hooks.scan_layers,
                compute_dtype=config.hooks.compute_dtype or "float32",
            )
            step = train_step(
                model.loss,
                transform,
                strategy,
                num_microbatches=config.input.num_microbatches,
                clip_norm=config.optimizer.clip_norm,
                key=config.seed,
                params_dtype=config.dtypes.main_params_dtype,
                grads_dtype=config.dtypes.main_grads_dtype,
                read_dtype=config.dtypes.read_dtype,
                freeze=(*config.freeze, *model.frozen),
                frozen_dtype=config.lora.base_dtype if config.lora.rank else None,
                carried=functions.carried,
                reductions=functions.reductions,
                fp8=fp8,
                batch=batch,
                offload=config.compile.offload,
            )
        return cls(config, functions, step)

    def batch(self) -> Tree:
        """Returns the shapes and shardings of a batch: [M, B/M, ...] on a mesh, [B, ...] on one device without a mesh."""
        # B sequences, M microbatches
        return self.step.placed_shapes(batch_shapes(self.config.input, self.config.input.batch_size))

    def compile_step(self) -> CompiledStep:
        """Compiles the step for the batch, with the options of the configuration. Does not run it."""
        with errors_by_field(self.config):
            return self.step.compile(self.batch(), graph=self.config.compile.graph, xla_options=self.config.compile.xla_options)

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
        pack = jax.jit(self.step.bound.layout.pack, out_shardings=None if placed is None else placed.params)
        return TrainState(zero, zero, in_turn(pack(params)), (), carried)


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
