"""Setup and timing of the ranks of a PyTorch peer under torchrun."""

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import read_power_and_clock
from benchmarks.peers.protocol import Timer, answer, wait_for_start
from benchmarks.peers.torch_run import Step, capture, device_name, wait, warm_up
from benchmarks.rows import Row
from jgraph.train.config import TrainConfig


@dataclass(frozen=True)
class RankContext:
    """A process that torchrun started.

    Attributes:
        rank: Index of this process.
        ranks: Number of processes.
        device: The GPU of this rank, or the CPU for tests.
        idle: A gloo process group. A rank that waits in it keeps the GPU idle, unlike with NCCL.
    """

    rank: int
    ranks: int
    device: torch.device
    idle: Any

    @classmethod
    def join(cls) -> "RankContext":
        """Initializes torch.distributed, and answers the device. Rank 0 first waits for the start line on stdin."""
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if rank == 0:
            wait_for_start()
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on one machine, and its host name may not resolve
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
        torch.set_float32_matmul_precision("high")
        context = cls(rank, ranks, device, dist.new_group(backend="gloo", timeout=timedelta(hours=1)))
        context.answer(device=f"{ranks} x {device_name()}")
        return context

    @property
    def on_gpu(self) -> bool:
        """True if this rank has a GPU."""
        return self.device.type == "cuda"

    def answer(self, **row: Any) -> None:
        """Prints keys of the row on rank 0."""
        if self.rank == 0:
            answer(**row)

    def turns(self) -> Iterator[Timer]:
        """Yields the durations of each turn on every rank. Rank 0 reads them from stdin and broadcasts them."""
        self.answer(ready=True)
        while True:
            lines = [sys.stdin.readline() if self.rank == 0 else ""]
            dist.broadcast_object_list(lines, group=self.idle)
            if not lines[0]:
                return
            yield Timer(**json.loads(lines[0]))

    def take_turns(self, step: Step, *, each: bool) -> None:
        """Measures once per turn, with the same number of steps on every rank. `each` waits on all ranks after each step."""

        def repeat(seconds: float, ms: float) -> float:
            steps = math.ceil(seconds * 1e3 / ms)
            return statistics.fmean(self.timed(step)[0] for _ in range(steps)) if each else self.timed(step, steps)[0]

        for timer in self.turns():
            ms = repeat(timer.warmup_seconds, repeat(0.01, self.timed(step)[0]))
            times = [repeat(timer.seconds, ms) for _ in range(timer.repeats)]
            with ThreadPoolExecutor(1) as pool:  # reads power and clock under load, outside the timed repeats
                reading = pool.submit(read_power_and_clock)
                repeat(timer.seconds, ms)
            watts, mhz = reading.result() or (None, None)
            self.answer(turn={"ms": statistics.median(times), "power_watts": watts, "sm_clock_mhz": mhz})

    def time_training(self, step: Callable[[], torch.Tensor], *, graph: bool) -> None:
        """Answers the first loss, as a mean over the ranks, measures once per turn, and answers the peak memory. Collective.

        `graph` times the step with its collectives in a CUDA graph.
        """
        if self.on_gpu:  # excludes the memory of the setup, which has unsharded arrays
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = step()
        dist.all_reduce(loss)
        self.answer(compile_s=time.perf_counter() - start, loss=loss.item() / self.ranks)
        captured = None
        if graph and self.on_gpu:
            warm_up(step)
            torch.cuda.synchronize()
            captured = capture(step, capture_error_mode="thread_local")  # the watchdog thread of NCCL queries events
        run = captured.replay if captured else step
        self.timed(run, 2)
        self.take_turns(run, each=False)
        self.answer(peak_bytes=self.peak_bytes())
        if captured:
            captured.reset()  # NCCL cannot shut down while a graph holds its communicators
        dist.all_reduce(loss := step())
        if not loss.isfinite():
            raise FloatingPointError("the loss became non-finite")

    def timed(self, step: Step, steps: int = 1) -> tuple[float, float]:
        """Times steps that start on all ranks together, in milliseconds per step. Collective.

        Returns the time until the slowest rank is done, and until its host has dispatched the steps.
        """
        wait()
        dist.barrier()
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        host = time.perf_counter() - start
        wait()
        ms, host_ms = (self.largest([time.perf_counter() - start, host]) * 1e3 / steps).tolist()
        return ms, host_ms

    def largest(self, values: list[float]) -> torch.Tensor:
        """Returns the elementwise maximum over the ranks. Collective."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def peak_bytes(self) -> int | None:
        """Returns the largest peak memory of all ranks. Collective."""
        peak = torch.cuda.max_memory_allocated() if self.on_gpu else 0
        return int(self.largest([peak]).item()) or None

    def leave(self) -> None:
        """Shuts down torch.distributed and exits the process with code 0."""
        dist.barrier()  # otherwise pending collectives of the other ranks fail
        dist.destroy_process_group()
        sys.stdout.flush()
        # os._exit, because torch 2.13 with gloo sometimes aborts a regular exit over a running thread.
        os._exit(0)


def time_ranks(build: Callable[[RankContext, Row, TrainConfig], Callable[[], torch.Tensor]]) -> None:
    """Times the training step that `build` makes from the request. Entry point of each rank."""
    request = json.loads(sys.argv[1])
    context = RankContext.join()
    step = build(context, request, TrainConfig.from_dict(request["config"]))
    context.time_training(step, graph=request.get("graph", False))
    context.leave()
