"""Times a training step of `python -m jgraph.train`, measures its time by category, or runs a soak."""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.harness import soak
from benchmarks.peers.protocol import Timer, answer, read_request, take_turns
from benchmarks.rows import Row
from jgraph.dispatch import in_turn
from jgraph.profile.attribution import by_category, choose_step
from jgraph.profile.program import Program
from jgraph.profile.trace import read
from jgraph.step.compiled import CompiledStep
from jgraph.train.config import TrainConfig
from jgraph.train.metrics import peak_memory_bytes
from jgraph.train.profiling import profiled
from jgraph.train.setup import TrainSetup
from jgraph.xla import cache, count_launches
from jgraph.xla.hlo import HloModule
from jgraph.xla.launches import profiler_options
from jgraph.xla.startup import watch

TRACED = 3  # number of profiled steps
NO_KERNELS = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")  # HLO that runs nothing


@dataclass
class Step:
    """A compiled training step with its state, which each step donates. `batch_of` creates a batch from a seed."""

    devices: list[Any]
    compiled: CompiledStep
    state: Any
    batch_of: Callable[[int], Any]
    batch: Any
    metrics: Any = None

    @classmethod
    def of(cls, config: TrainConfig, report: Callable[..., None] = answer) -> "Step":
        """Compiles the step and initializes the state. Calls `report` with keys of the row."""
        config = profiled(config, jax.default_backend())  # allows the profiler to count launches
        setup = TrainSetup.from_config(config)
        devices = first_devices(setup.step.num_devices)
        report(device=f"{len(devices)} x {devices[0].device_kind}", xla_options=config.compile.xla_options)
        cache.enable()
        init = setup.compile_init()  # compiles in the background, while the step compiles
        start = time.perf_counter()
        with watch() as compiles:
            run = setup.compile_step()
        report(
            compile_s=time.perf_counter() - start,
            capture=str(run.capture) if run.capture else None,
            compiled=str(compiles),
            **compiled_bytes(run.executable),
            **step_size(run.executable, setup.step.state),
        )

        def batch(seed: int) -> Any:
            return jax.device_put(setup.step.place(tokens_of(config, seed)))

        step = cls(devices, run, init(), batch, batch(0))
        jax.block_until_ready(step.state)
        # The initialization may need more memory than the step, and the peak of a device cannot be reset.
        report(init_peak_bytes=step.peak_bytes())
        return step

    def run(self) -> None:
        """Dispatches a step."""
        self.state, self.metrics = self.compiled(self.state, self.batch)

    def wait(self) -> None:
        """Blocks until all steps are done."""
        jax.block_until_ready((self.state, self.metrics))

    def peak_bytes(self) -> int:
        """Returns the peak memory of the fullest device."""
        return max(peak_memory_bytes(device) for device in self.devices)

    def result(self) -> Row:
        """Returns the loss, the number of skipped steps and the required expert capacity."""
        halted = {} if self.metrics.halted is None else {"halted": int(self.metrics.halted)}
        return {"loss": float(self.metrics.loss), "skipped": int(self.state.skipped), **halted}

    def soak(self, **request: Any) -> Iterator[Row]:
        """Runs `benchmarks.harness.soak` with a new batch per step. The last report has all losses."""
        losses: list[float] = []

        def run() -> None:
            self.batch = self.batch_of(len(losses))
            self.run()

        def wait() -> None:
            self.wait()
            losses.append(float(self.metrics.loss))

        yield from soak(run, wait, self.devices, self.result, **request)
        yield {"losses": losses}


def tokens_of(config: TrainConfig, seed: int = 0) -> np.ndarray:
    """Returns random int32 token ids [B, S] of a batch."""
    shape = config.input.batch_size, config.input.seq_len + 1
    return np.random.default_rng(seed).integers(0, config.model.vocab_size, shape).astype(np.int32)


def first_devices(ranks: int) -> list[Any]:
    """Returns the first `ranks` devices."""
    devices = jax.devices()[:ranks]
    if len(devices) < ranks:
        raise RuntimeError(f"needs {ranks} devices, found {len(devices)}; set --ranks")
    return devices


def compiled_bytes(compiled: Any) -> Row:
    """Returns the memory analysis of an executable."""
    memory = compiled.memory_analysis()
    names = ("argument", "temp", "output", "alias") if memory is not None else ()
    return {f"{name}_bytes": getattr(memory, f"{name}_size_in_bytes") for name in names}


def step_size(compiled: Any, state: Any) -> Row:
    """Counts the arrays of the state and the kernels of the entry computation."""
    module = HloModule.parse(compiled.as_text())
    opcodes = [instruction.opcode for instruction in module.computations[module.entry].instructions.values()]
    return {"arrays": len(jax.tree.leaves(state)), "kernels": sum(opcode not in NO_KERNELS for opcode in opcodes)}


def measure(run: Callable[[], None], wait: Callable[[], None], platform: str, timer: Timer) -> Row:
    """Measures one turn. `host_ms` is the host time of a dispatch to an idle device."""
    return timer.on_platform(run, wait, platform) | {"host_ms": timer.dispatch_seconds(run, wait) * 1e3}


def make_stepper(call: Callable[[], Any]) -> tuple[Callable[[], None], Callable[[], None], list[Any]]:
    """Returns functions that dispatch a call and wait for it, and a list with its result, which the next call frees first."""
    latest: list[Any] = [None]

    def run() -> None:
        latest[0] = None
        latest[0] = call()

    return run, lambda: jax.block_until_ready(latest), latest


def count_graph_launches(run: Callable[[], None], wait: Callable[[], None]) -> Row:
    """Counts the CUDA graphs that a step launches and updates."""
    with count_launches() as count:
        run()
        wait()
    return {"launches": count.launches, "updates": count.updates}


def time_step(request: Row) -> None:
    """Entry point of the candidate process."""
    config = TrainConfig.from_dict(request["config"])
    step = Step.of(config)
    step.run()
    step.wait()
    answer(**step.result(), peak_bytes=step.peak_bytes())

    take_turns(
        partial(measure, step.run, step.wait, step.devices[0].platform),
        step.soak,
    )
    answer(**count_graph_launches(step.run, step.wait), peak_bytes=step.peak_bytes())
    answer(**{name: value for name, value in step.result().items() if name != "loss"})
    if request["categories"]:
        del step  # frees its state before the profiled step allocates another
        answer(categories=categories(config))


def categories(config: TrainConfig) -> Row:
    """Profiles the step without CUDA graphs, because kernels in graphs have no names. Returns mean milliseconds by category."""
    step = Step.of(config.changed(graph="off"), report=lambda **row: None)
    step.run()
    step.wait()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=profiler_options()):
            for _ in range(TRACED):
                step.run()
                in_turn(step.metrics)
            step.wait()
        chosen = choose_step(read(Path(folder)), Program.parse(step.compiled.as_text()), TRACED)
    ranks = [by_category(rank, one) for rank, one in chosen.items()]
    names = dict.fromkeys(name for rank in ranks for name in rank["categories"])
    found = {name: sum(rank["categories"].get(name, {"ms": 0.0})["ms"] for rank in ranks) for name in names}
    return {name: ms / len(ranks) for name, ms in (found | {"idle": sum(rank["idle_ms"] for rank in ranks)}).items()}


if __name__ == "__main__":
    time_step(read_request())
