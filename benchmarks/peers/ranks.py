"""How a process of a peer becomes one of its ranks, and how ranks time together."""

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

from benchmarks.harness import read_card
from benchmarks.peers.protocol import Timer, answer, begin

Step = Callable[[], object]


@dataclass(frozen=True)
class Ranks:
    """Holds this process's place among those that torchrun started.

    Attributes:
        rank, ranks: its number, and how many there are.
        device: a GPU if there is one; elsewhere the CPU, to try a script out.
        idle: a group that talks without the GPU, where a rank that waits would keep a kernel running.
    """

    rank: int
    ranks: int
    device: torch.device
    idle: Any

    @classmethod
    def join(cls) -> "Ranks":
        """Waits for the others, rank 0 first of all for its word to begin."""
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if rank == 0:
            begin()
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on one machine, whose name may lead nowhere
        dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
        torch.set_float32_matmul_precision("high")
        return cls(rank, ranks, device, dist.new_group(backend="gloo", timeout=timedelta(hours=1)))

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def tell(self, **row: Any) -> None:
        if self.rank == 0:
            answer(**row)

    def turns(self) -> Iterator[Timer]:
        """Yields how to time each turn, on every rank: the first one is told, and passes it on."""
        self.tell(ready=True)
        while True:
            lines = [sys.stdin.readline() if self.rank == 0 else ""]
            dist.broadcast_object_list(lines, group=self.idle)
            if not lines[0]:
                return
            yield Timer(**json.loads(lines[0]))

    def take_turns(self, step: Step, *, each: bool) -> None:
        """Times turns; how often is agreed upon by all ranks, as the times are.

        Args:
            step: hands a step over.
            each: of the steps of a turn each is waited for, by all ranks.
        """

        def repeat(seconds: float, ms: float) -> float:
            steps = math.ceil(seconds * 1e3 / ms)
            return statistics.fmean(self.timed(step)[0] for _ in range(steps)) if each else self.timed(step, steps)[0]

        for clock in self.turns():
            ms = repeat(timer.warmup_seconds, repeat(0.01, self.timed(step)[0]))
            times = [repeat(timer.seconds, ms) for _ in range(timer.repeats)]
            with ThreadPoolExecutor(1) as pool:  # the card is read while it works, but not while it is timed
                reading = pool.submit(read_card)
                repeat(timer.seconds, ms)
            watts, mhz = reading.result() or (None, None)
            self.tell(turn={"ms": statistics.median(times), "power_watts": watts, "sm_clock_mhz": mhz})

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def timed(self, step: Step, steps: int = 1) -> tuple[float, float]:
        """Returns milliseconds a step until the last rank is done, and until all is handed over. All ranks start together."""
        self.wait()
        dist.barrier()
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        host = time.perf_counter() - start
        self.wait()
        ms, host_ms = (self.largest([time.perf_counter() - start, host]) * 1e3 / steps).tolist()
        return ms, host_ms

    def largest(self, values: list[float]) -> torch.Tensor:
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def peak_bytes(self) -> int | None:
        """Returns the peak of the rank that had most."""
        peak = torch.cuda.max_memory_allocated() if self.on_gpu else 0
        return int(self.largest([peak]).item()) or None

    def leave(self) -> None:
        dist.barrier()  # a rank that leaves while others are still talking makes them fail
        dist.destroy_process_group()
        sys.stdout.flush()
        # All is told. Leaving in the usual way, torch 2.13 with gloo now and then aborts over a thread that is still there.
        os._exit(0)
