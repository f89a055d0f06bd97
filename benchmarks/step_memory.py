"""Memory of compiled training steps: the configurations of the benchmark `plans` that this machine has the GPUs for.

python -m benchmarks run step_memory                   # on H100s or H200s; compiles and runs nothing
python -m benchmarks run step_memory --limit 2

Results of these configurations may come from earlier revisions. This benchmark repeats their memory with the present one, and
`python -m benchmarks run plans` then compares plans with it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax

from benchmarks.plans import Measured, describe, measured, newest
from benchmarks.programs.step import compiled_bytes
from benchmarks.rows import Row
from benchmarks.runner import Benchmark, Options, Work
from benchmarks.tables import Section, number
from jgraph.errors import JgraphError
from jgraph.train.setup import TrainSetup


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Options):
    """Flags of the benchmark."""

    only: tuple[str, ...] = ()
    """Names of results files, without .json, to take configurations from. Default: all."""
    limit: int = 0
    """Largest number of configurations. 0 for all."""


def works(options: MemoryOptions) -> Iterator[Work]:
    """Yields one work for each configuration."""
    devices = jax.devices()
    steps = {describe(step.config): step for step in newest(measured(options.only))}
    found = [step for step in steps.values() if step.config.parallel.num_devices <= len(devices)]
    for step in found[: options.limit or None]:
        facts = {"ranks": step.config.parallel.num_devices, "config": step.config.to_dict()}
        yield Work(describe(step.config), facts, rows=map(compiled, [step]))


def compiled(step: Measured) -> Row:
    """Returns the row of a configuration, with the memory of the step that is compiled for the devices of this machine."""
    devices = jax.devices()[: step.config.parallel.num_devices]
    row: Row = {"system": "jgraph", "variant": "", "device": f"{len(devices)} x {devices[0].device_kind}"}
    try:
        run = TrainSetup.from_config(step.config).compile_step()
    except (JgraphError, jax.errors.JaxRuntimeError) as e:
        return row | {"failed": str(e).partition("\n")[0][:200]}
    return row | compiled_bytes(run.executable)


def section(name: str, result: Row) -> Section:
    """Returns the table layout of a configuration."""
    columns = {
        "system": lambda row: row["system"],
        "arguments, GB": number("argument_bytes", scale=1e-9),
        "temporary arrays, GB": number("temp_bytes", scale=1e-9),
    }
    return Section(name, columns, needs="temp_bytes")


BENCHMARK = Benchmark("Memory of compiled steps", __doc__, MemoryOptions, works, section)
