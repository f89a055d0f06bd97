"""Memory bandwidth of the kernel that casts, transposes and computes the amax in one pass, for each implementation, on one GPU.

    python -m benchmarks run kernels

One program runs several kernels, because a single one is shorter than its dispatch. Consecutive kernels read different arrays,
so that no input is in the L2 cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from benchmarks import runner
from benchmarks.peers.protocol import answer, read_request, take_turns
from benchmarks.programs.step import make_stepper
from benchmarks.rows import Row, row_name
from benchmarks.runner import Benchmark, Work
from benchmarks.tables import Section, number
from benchmarks.turns import Candidate
from jgraph.device import find
from jgraph.kernels import cast_transpose

SHAPES = {"full": ((16384, 8192), (16384, 2048)), "tiny": ((256, 128),)}
KERNELS, ARRAYS = 16, 4  # number of kernels and of input arrays in the program


@dataclass(frozen=True, kw_only=True)
class Options(runner.Options):
    """Flags of the benchmark."""

    implementations: tuple[str, ...] = ("mosaic", "xla")
    """Implementations to time. A failed compilation gives a row with an error."""


def works(options: Options) -> Iterator[Work]:
    """Yields one work per shape."""
    for shape in SHAPES[options.sizes]:
        request = {"shape": shape, "dtype": "float8_e4m3fn"}
        candidates = [
            Candidate({"system": "jgraph", "variant": name}, "benchmarks.kernels", request | {"implementation": name})
            for name in options.implementations
        ]
        yield Work(f"cast of {shape[0]} x {shape[1]}, both", {"ranks": 1, **request}, [candidates])


def time_kernel(request: Row) -> None:
    """Times one implementation. Entry point of the candidate process."""
    x = jax.random.normal(jax.random.key(0), tuple(request["shape"]), jnp.bfloat16)
    arrays = [x + i for i in range(ARRAYS)]

    @jax.jit
    def program(arrays: list[jax.Array], scale: jax.Array) -> list[object]:
        outs = []
        for i in range(KERNELS):
            # Ordered after the previous kernel. Otherwise XLA merges equal computations on the same array.
            x, scale = jax.lax.optimization_barrier((arrays[i % ARRAYS], scale))
            out = cast_transpose(x, scale, request["dtype"], implementation=request["implementation"])
            outs.append(out)
            # A data dependency that keeps the order. It does not change the scale, because an amax is never negative.
            scale = jnp.where(out.amax >= 0, scale, 0)
        return outs

    run, wait, _ = make_stepper(lambda: program(arrays, jnp.float32(1)))
    run()
    written = 2  # bytes: an FP8 value in the rows, and one in the transpose
    answer(device=jax.devices()[0].device_kind, moved_bytes=KERNELS * x.size * (x.dtype.itemsize + written))
    take_turns(lambda timer: timer.back_to_back(run, wait))


def section(name: str, result: Row) -> Section:
    """Returns the table layout of a work."""

    def share(row: Row) -> str:
        device = find(row["device"].removeprefix("1 x "))
        return f"{row['moved_bytes'] / row['ms'] * 1e3 / device.copy_bytes_per_second:.0%}" if device else ""

    columns = {
        "variant": row_name,
        "time per kernel, ms": lambda row: f"{row['ms'] / KERNELS:.4f}",
        "GB/s": lambda row: f"{row['moved_bytes'] / row['ms'] / 1e6:.0f}",
        "bandwidth / copy bandwidth": share,
    }
    return Section(name, columns | {"power, W": number("power_watts", ".0f")})


BENCHMARK = Benchmark("Memory bandwidth of kernels", __doc__, Options, works, section)

if __name__ == "__main__":
    time_kernel(read_request())
