"""Each implementation of a kernel on one GPU, in one process: milliseconds, bytes, share of the device's bandwidth.

    python -m benchmarks.kernels [--sizes tiny] [--out FILE.json]

A kernel is too short for the host's clock, so a program has `steps` of it, and a turn is several programs back to back. Each
step reads another array than the one before, which is not in the cache. In turns, the median of `rounds`.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import tyro

from benchmarks.rows import Row
from jgraph import device
from jgraph.kernels import cast_transpose
from jgraph.kernels.quantize import bytes_moved

SIZES = {"full": ((16384, 8192), (16384, 2048), (8192, 2048)), "tiny": ((256, 128),)}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What to run."""

    implementations: tuple[str, ...] = ("mosaic", "triton", "xla")
    """Which take part; one that cannot be compiled is told as failed."""
    want: Literal["both", "rows", "columns"] = "both"
    """What is written."""
    sizes: Literal["full", "tiny"] = "full"
    """tiny is for a machine without a GPU."""
    rounds: int = 9
    """How often each has its turn."""
    steps: int = 16
    """Kernels in a program."""
    calls: int = 3
    """Programs in a turn."""
    out: str = ""
    """File for the rows, as JSON."""


def compiled(flags: Flags, implementation: str, dtype: str, x: jax.Array) -> Callable[[], object]:
    """Returns a program of several kernels, one after the other since each takes its scale of the amax of the last."""
    slots = [x + i for i in range(4)]

    @jax.jit
    def steps(slots: list[jax.Array], scale: jax.Array) -> list[object]:
        outs = []
        for i in range(flags.steps):
            out = cast_transpose(slots[i % len(slots)], scale, dtype, want=flags.want, implementation=implementation)
            outs.append(out)
            # Keeps the order and nothing else: an amax is never negative.
            scale = jnp.where(out.amax >= 0, scale, 0)
        return outs

    run = partial(steps.lower(slots, jnp.float32(1)).compile(), slots, jnp.float32(1))
    jax.block_until_ready(run())
    return run


def rows(flags: Flags) -> Iterator[Row]:
    kind = jax.devices()[0].device_kind
    known = device.find(kind)
    for shape in SIZES[flags.sizes]:
        x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
        for dtype in ("float8_e4m3fn", "float8_e5m2"):
            runs, times = {}, {}
            for name in flags.implementations:
                variant = f"{name} {shape[0]} x {shape[1]} {dtype} {flags.want}"
                try:
                    runs[variant] = compiled(flags, name, dtype, x)
                except Exception as e:  # of jax, of XLA, of Pallas: the others go on
                    yield {"system": "jgraph", "variant": variant, "failed": f"{type(e).__name__}: {e}".partition("\n")[0]}
            for _ in range(flags.rounds):
                for variant, run in runs.items():
                    start = time.perf_counter()
                    jax.block_until_ready([run() for _ in range(flags.calls)][-1])
                    times.setdefault(variant, []).append((time.perf_counter() - start) * 1e3 / (flags.steps * flags.calls))
            moved = bytes_moved(x, flags.want)
            for variant, repeats in times.items():
                ms = statistics.median(repeats)
                share = {"bandwidth_share": moved / ms * 1e3 / known.copy_bytes_per_second} if known else {}
                row = {"system": "jgraph", "variant": variant, "device": kind, "ms": ms, "repeats_ms": repeats}
                yield row | {"moved_bytes": moved} | share


def main(flags: Flags) -> None:
    found = []
    for row in rows(flags):
        found.append(row)
        share = f", {row['bandwidth_share']:.0%} of the bandwidth" if "bandwidth_share" in row else ""
        told = row.get("failed") or f"{row['ms']:.4f} ms, {row['moved_bytes'] / 1e6:.1f} MB{share}"
        print(f"{row['variant']}: {told}", flush=True)
    if flags.out:
        Path(flags.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Flags, description=__doc__))
