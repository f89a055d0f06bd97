"""A process in which `pp_engine` auto chooses for a run, as the training command would, before it has a state."""

import time
from types import SimpleNamespace
from typing import Any

import jax

from benchmarks.peers.protocol import answer, request
from benchmarks.programs.step import devices_of
from benchmarks.rows import Row
from jgraph.train.config import TrainConfig
from jgraph.train.engine import settle_engine


def choice(config: TrainConfig) -> Row:
    """Returns the choice, the seconds that it took, and the printed lines."""
    devices, start = devices_of(config.parallel.pp), time.perf_counter()
    lines: list[str] = []
    reporter: Any = SimpleNamespace(line=lines.append)
    chosen = settle_engine(config, reporter)
    return {
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "build_s": time.perf_counter() - start,
        "chosen": f"{chosen.pipeline.schedule}:{chosen.pipeline.chunks} engine={chosen.pipeline.pp_engine}",
        "table": lines,
    }


if __name__ == "__main__":
    asked = request()
    jax.config.update("jax_enable_compilation_cache", False)  # as on a machine that has not seen the run
    answer(**choice(TrainConfig.from_dict(asked["config"])))
