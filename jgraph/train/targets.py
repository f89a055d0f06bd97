"""The training step of a configuration, compiled for the devices of this machine or for GPUs that are not present."""

import contextlib
import dataclasses
from typing import get_args, get_type_hints

import jax

from jgraph.cli import interruptible
from jgraph.kernels import document_kernel
from jgraph.mesh import with_target
from jgraph.train.config import TrainConfig
from jgraph.train.setup import TrainSetup
from jgraph.xla import aot
from jgraph.xla.explain import Explanation, explain


def explain_step(config: TrainConfig, target: str | None) -> Explanation:
    """Compiles the training step of a configuration and reports on it, as `jgraph.explain` does. Does not run it."""
    if target is not None and config.parallel.num_devices > 1:
        # The mesh of the step needs as many devices as ranks, before it is moved to the target. JAX refuses the setting if its
        # devices are known already; too few devices are then an error of the setup.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", config.parallel.num_devices)
    config, notes = (config, ()) if target is None else _without_cudnn(config, target)
    with interruptible("tracing the model"):
        setup = TrainSetup.from_config(config)
        step = setup.step
        batch = setup.batch()
        if target is not None and step.mesh is not None:
            step = step.on(aot.devices(step.num_devices, gpu=target))
            batch = step.placed_shapes(batch)
    with interruptible("compiling the training step"):
        options = setup.options("gpu" if target is not None else jax.default_backend())
        report = explain(step.jitted(), step.state, batch, target=target, compiler_options=options)
    title = f"training step of {config.preset} ({config.module}), {config.input.batch_size} x {config.input.seq_len} tokens,"
    title += f" on {step.num_devices} devices," if step.num_devices > 1 else ""
    return dataclasses.replace(report, name=title, notes=report.notes + notes)


def _without_cudnn(config: TrainConfig, target: str) -> tuple[TrainConfig, tuple[str, ...]]:
    """Replaces cuDNN's attention, which only its own GPU compiles. Returns the configuration and a note about it."""
    dtype = config.hooks.compute_dtype or "bfloat16"
    # With `cp`, attention is a Pallas kernel. In float32, it is XLA's on each GPU.
    if config.hooks.attention != "auto" or config.parallel.cp > 1 or dtype == "float32":
        return config, ()
    is_offered = "flash" in get_args(get_type_hints(type(config.model)).get("attention"))
    with jax.sharding.use_abstract_mesh(with_target(aot.devices(gpu=target)[0].device_kind)):
        is_flash = is_offered and document_kernel(config.hooks.head_size, dtype) == "mosaic"
    about = "jgraph's, which needs as much memory" if is_flash else "XLA's, and the memory includes its scores"
    note = f"attention is {about}: a run on the GPU uses cuDNN's, which cannot be compiled without a GPU"
    return config.changed(model=dataclasses.replace(config.model, attention="flash" if is_flash else "xla")), (note,)
