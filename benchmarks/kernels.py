"""Memory bandwidth of the kernel that casts, transposes and computes the amax in one pass, for each implementation, on one GPU.

    python -m benchmarks run kernels

One program runs several kernels, because a single one is shorter than its dispatch. Consecutive kernels read different arrays,
so that no input is in the L2 cache.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from benchmarks import runner
from benchmarks.peers.protocol import answer, read_request, take_turns
from benchmarks.rows import Row, row_name
from benchmarks.runner import Benchmark, Work
from benchmarks.tables import Section, number
from benchmarks.turns import Candidate
from jgraph.device import find
from jgraph.kernels import cast_transpose
from jgraph.kernels.elementwise import IDENTITY, Computed, Elementwise

SHAPES = {"full": ((16384, 8192), (16384, 2048)), "tiny": ((256, 128),)}
GELU = (("mul", (0, 0)), ("mul", (1, 0.044715)), ("add", (2, 1.0)), ("mul", (3, 0)), ("mul", (4, 0.797885)), ("tanh", (5,)))
FUNCTIONS = {"": IDENTITY, "gelu": Elementwise(1, (*GELU, ("add", (6, 1.0)), ("mul", (7, 0)), ("mul", (8, 0.5))))}
KERNELS, ARRAYS = 16, 4  # number of kernels and of input arrays in the program


@dataclass(frozen=True, kw_only=True)
class Options(runner.Options):
    """Flags of the benchmark."""

    implementations: tuple[str, ...] = ("mosaic", "xla")
    """Implementations to time. A failed compilation gives a row with an error."""
    functions: tuple[str, ...] = ("", "gelu")
    """Functions to apply before quantization. An empty name quantizes the array itself. Each function is timed fused into the
    kernel, and as a separate operation (`apart`)."""
    want: Literal["both", "rows", "columns"] = "both"
    """Outputs: rows, the transpose, or both."""


def works(options: Options) -> Iterator[Work]:
    """Yields one work per shape and function."""
    for shape, function in itertools.product(SHAPES[options.sizes], options.functions):
        request = {"shape": shape, "dtype": "float8_e4m3fn", "want": options.want, "function": function}
        variants = [{"implementation": name, "apart": apart} for name in options.implementations for apart in (False, True)]
        candidates = [
            Candidate(
                {"system": "jgraph", "variant": variant["implementation"] + variant["apart"] * ", apart"},
                "benchmarks.kernels",
                request | variant,
            )
            for variant in variants
            if function or not variant["apart"]
        ]
        name = f"{function or 'cast'} of {shape[0]} x {shape[1]}, {options.want}"
        yield Work(name, {"ranks": 1, **request}, [candidates])


def time_kernel(request: Row) -> None:
    """Times one implementation. Entry point of the candidate process."""
    x = jax.random.normal(jax.random.key(0), tuple(request["shape"]), jnp.bfloat16)
    arrays, latest, kind = [x + i for i in range(ARRAYS)], [None], jax.devices()[0].device_kind
    fn, options = FUNCTIONS[request["function"]], {"want": request["want"], "implementation": request["implementation"]}

    @jax.jit
    def program(arrays: list[jax.Array], scale: jax.Array) -> list[object]:
        outs = []
        for i in range(KERNELS):
            # Ordered after the previous kernel. Otherwise XLA merges equal computations on the same array.
            x, scale = jax.lax.optimization_barrier((arrays[i % ARRAYS], scale))
            if request["apart"]:
                y = jax.lax.optimization_barrier(fn(x).astype(jnp.bfloat16))
                out = cast_transpose(y, scale, request["dtype"], **options)
            else:
                out = cast_transpose(Computed(fn, (x,)), scale, request["dtype"], **options)
            outs.append(out)
            # A data dependency that keeps the order. It does not change the scale, because an amax is never negative.
            scale = jnp.where(out.amax >= 0, scale, 0)
        return outs

    def run() -> None:
        latest[0] = None
        latest[0] = program(arrays, jnp.float32(1))

    run()
    written = {"both": 2, "rows": 1, "columns": 1, "amax": 0}[request["want"]]
    answer(device=kind, moved_bytes=KERNELS * x.size * (x.dtype.itemsize + written))
    take_turns(lambda timer: timer.back_to_back(run, lambda: jax.block_until_ready(latest)))


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
