"""A process in which `pp_engine` auto chooses for a run, as the training command would, before it has a state."""

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from benchmarks.peers.protocol import answer, request
from benchmarks.programs.step import devices_of
from benchmarks.rows import Row
from jgraph.data import Source
from jgraph.train.config import TrainConfig
from jgraph.train.engine import settle_engine
from jgraph.train.rundir import RunDir


def choice(config: TrainConfig) -> Row:
    """Returns what was chosen, how long that took, and the table."""
    devices, start = devices_of(config.parallel.pp), time.perf_counter()
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, config.input.batch_size * (config.input.seq_len + 1))
    silent: Any = SimpleNamespace(line=lambda text: None)
    with tempfile.TemporaryDirectory() as folder:
        chosen, told = settle_engine(config, [Source(tokens)], RunDir(Path(folder)), silent)
    return {
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "build_s": time.perf_counter() - start,
        "chosen": f"{chosen.pipeline.schedule}:{chosen.pipeline.chunks} engine={chosen.pipeline.pp_engine}",
        "table": told.get("table", []),
    }


if __name__ == "__main__":
    asked = request()
    jax.config.update("jax_enable_compilation_cache", False)  # as on a machine that has not seen the run
    answer(**choice(TrainConfig.from_dict(asked["config"])))
