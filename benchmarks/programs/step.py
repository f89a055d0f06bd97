"""A process that is request about a training step of `python -m jgraph.train`: its time, its time by category, a soak."""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.harness import soak
from benchmarks.peers.protocol import answer, read_request, take_turns
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
from jgraph.xla.launches import profiler_options

TRACED = 3  # steps of the trace that categories are read from


@dataclass
class Step:
    """Holds a compiled step with its devices, state and batch; `run` hands over a step, `wait` returns when all are done.

    `batch_of` makes a batch of a seed.
    """

    devices: list[Any]
    compiled: CompiledStep
    state: Any
    batch_of: Callable[[int], Any]
    batch: Any
    metrics: Any = None

    @classmethod
    def of(cls, config: TrainConfig, tell: Callable[..., None] = answer) -> "Step":
        config = profiled(config, jax.default_backend())  # so that launches can be counted
        setup = TrainSetup.of(config)
        devices = first_devices(setup.step.num_devices)
        tell(device=f"{len(devices)} x {devices[0].device_kind}", xla_options=config.compile.xla_options)
        cache.enable()
        init = setup.compile_init()  # beside the step, which takes longer
        start = time.perf_counter()
        with cache.watch() as compiles:
            run = setup.compile_step()
        tell(
            compile_s=time.perf_counter() - start,
            capture=str(run.capture) if run.capture else None,
            compiled=str(compiles),
            **compiled_bytes(run.executable),
        )

        def batch(seed: int) -> Any:
            shape = config.input.batch_size, config.input.seq_len + 1
            rows_BS = np.random.default_rng(seed).integers(0, config.model.vocab_size, shape).astype(np.int32)
            return jax.device_put(setup.step.place(rows_BS))

        step = cls(devices, run, init(), batch, batch(0))
        jax.block_until_ready(step.state)
        # The state is made in a program that may take more than the step does, and a device's peak cannot be set back.
        tell(init_peak_bytes=step.peak_bytes())
        return step

    def run(self) -> None:
        self.state, self.metrics = self.compiled(self.state, self.batch)

    def wait(self) -> None:
        jax.block_until_ready((self.state, self.metrics))

    def peak_bytes(self) -> int:
        return max(peak_memory_bytes(device) for device in self.devices)

    def result(self) -> Row:
        halted = {} if self.metrics.halted is None else {"halted": int(self.metrics.halted)}
        return {"loss": float(self.metrics.loss), "skipped": int(self.state.skipped), **halted}

    def soak(self, **request: Any) -> Iterator[Row]:
        """Runs steps on a new batch each, as `benchmarks.harness.soak`; at the end their losses."""
        losses: list[float] = []

        def run() -> None:
            self.batch = self.batch_of(len(losses))
            self.run()

        def wait() -> None:
            self.wait()
            losses.append(float(self.metrics.loss))

        yield from soak(run, wait, self.devices, self.result, **request)
        yield {"losses": losses}


def first_devices(ranks: int) -> list[Any]:
    """Returns the first devices of the machine. Raises RuntimeError where there are not as many."""
    devices = jax.devices()[:ranks]
    if len(devices) < ranks:
        raise RuntimeError(f"{len(devices)} of {ranks} devices are here; say --ranks")
    return devices


def compiled_bytes(compiled: Any) -> Row:
    memory = compiled.memory_analysis()
    names = ("argument", "temp", "output", "alias") if memory is not None else ()
    return {f"{name}_bytes": getattr(memory, f"{name}_size_in_bytes") for name in names}


def make_stepper(call: Callable[[], Any]) -> tuple[Callable[[], None], Callable[[], None], list[Any]]:
    """Returns how to hand over a step, how to wait for it, and the list that has its result until the next step."""
    latest: list[Any] = [None]

    def run() -> None:
        latest[0] = None
        latest[0] = call()

    return run, lambda: jax.block_until_ready(latest), latest


def count_graph_launches(run: Callable[[], None], wait: Callable[[], None]) -> Row:
    """Counts the CUDA graphs that a step launches, and those updated before."""
    with count_launches() as count:
        run()
        wait()
    return {"launches": count.launches, "updates": count.updates}


def time_step(request: Row) -> None:
    config = TrainConfig.from_dict(request["config"])
    step = Step.of(config)
    step.run()
    step.wait()
    answer(**step.result(), peak_bytes=step.peak_bytes())

    take_turns(
        lambda timer: timer.on_platform(step.run, step.wait, step.devices[0].platform),
        step.soak,
    )
    answer(**count_graph_launches(step.run, step.wait), peak_bytes=step.peak_bytes())
    answer(**{name: value for name, value in step.result().items() if name != "loss"})
    if request["categories"]:
        del step  # the other one has a state of its own
        answer(categories=categories(config))


def categories(config: TrainConfig) -> Row:
    """Returns milliseconds by category, mean of the ranks, of the step without command buffers, whose kernels have names."""
    step = Step.of(config.changed(graph="off"), tell=lambda **row: None)
    step.run()
    step.wait()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=profiler_options()):
            for _ in range(TRACED):
                step.run()
                in_turn(step.metrics)
            step.wait()
        chosen = choose_step(read(Path(folder)), Program.of(step.compiled.as_text()), TRACED)
    ranks = [by_category(rank, one) for rank, one in chosen.items()]
    names = dict.fromkeys(name for rank in ranks for name in rank["categories"])
    found = {name: sum(rank["categories"].get(name, {"ms": 0.0})["ms"] for rank in ranks) for name in names}
    return {name: ms / len(ranks) for name, ms in (found | {"idle": sum(rank["idle_ms"] for rank in ranks)}).items()}


if __name__ == "__main__":
    time_step(read_request())
