"""Errors about memory: what does not fit, the largest arrays, and what to change."""

import contextlib
import math
import os
from collections.abc import Iterator

import jax

from jgraph.errors import ConfigError
from jgraph.step.compiled import CompiledStep
from jgraph.train.config import InputConfig
from jgraph.train.rundir import RunDir

_CAUSES = 3
_PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""XLA reads this variable when it starts a GPU. The default is 64."""


@contextlib.contextmanager
def memory_errors(batch: InputConfig, run_dir: RunDir) -> Iterator[None]:
    """Converts an out-of-memory error of a device into a ConfigError about the batch size."""
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        new_run = ", with `resume` off or another `run_dir`" if run_dir.has_checkpoint() else ""
        must = f"must fit into the memory of a {jax.local_devices()[0].device_kind}"
        raise _too_large(batch, must, f"{new_run} ({str(e).splitlines()[0]})") from e


def check_host(batch: InputConfig, needed: int, name: str) -> None:
    """Checks that arrays that grow with the batch fit into the memory of this machine."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        raise _too_large(batch, f"{name} of {_gib(needed)} must fit into the {_gib(available)} of this machine")


def check_step(batch: InputConfig, step: CompiledStep, local_devices: int) -> None:
    """Checks before the first step that a compiled step fits. `local_devices` are the devices of this process."""
    if step.memory is None:
        return
    if jax.default_backend() == "cpu":
        # Linux lets a CPU device allocate more memory than there is, and kills the process later.
        check_host(batch, step.memory.total * local_devices, "a step")
        return
    device = jax.local_devices()[0]
    memory = step.memory
    _check_pinned(memory.host * local_devices)
    available = (device.memory_stats() or {}).get("bytes_limit", memory.total)
    if memory.total <= available:
        return
    place = f"must fit into the {_gib(available)} that JAX uses of a {device.device_kind}"
    more = "" if "XLA_CLIENT_MEM_FRACTION" in os.environ else "; JAX uses more with XLA_CLIENT_MEM_FRACTION=0.93"
    more += "; python -m jgraph.plan lists the layouts that fit"
    if memory.arguments > available:
        needs = f"the state and batch need {_gib(memory.arguments)} of each device: {place}"
        raise ConfigError(
            f"{needs}; shard them with `fsdp`, offload the optimizer with `offload`, or train adapters with `lora.rank`{more}",
            field="fsdp",
        )
    largest = step.capture.buffers[:_CAUSES] if step.capture else ()
    causes = f"; the largest temporaries are {', '.join(map(str, largest))}" if largest else ""
    parts = f"state and batch {_gib(memory.arguments)}, temporaries {_gib(memory.temporaries)}"
    remedy = "`gather_per` pass" if largest and largest[0].scope == "all-gather" else "`remat` layer"
    raise _too_large(batch, f"a step of {_gib(memory.total)} ({parts}) {place}", f", or {remedy}{more}{causes}")


def _check_pinned(needed: int) -> None:
    """Checks that XLA may allocate the pinned host memory of all devices of this process."""
    limit = float(os.environ.get(_PINNED_LIMIT, 64)) * 2**30
    if needed > limit:
        enough = math.ceil(1.1 * needed / 2**30)
        must = f"must fit into the {_gib(limit)} of pinned memory that JAX uses; set {_PINNED_LIMIT}={enough}"
        raise ConfigError(f"`offload` and `remat` put {_gib(needed)} into host memory: this {must}", field="offload")


def _too_large(batch: InputConfig, must: str, advice: str = "") -> ConfigError:
    sizes = f"`batch_size` is {batch.batch_size} in `num_microbatches` {batch.num_microbatches}"
    return ConfigError(f"{sizes}: {must}; use a smaller batch or more microbatches{advice}", field="batch_size")


def _gib(number: float) -> str:
    return f"{number / 2**30:,.1f} GiB"
