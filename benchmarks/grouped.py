"""Grouped products, the linear layers of mixtures of experts: jgraph, PyTorch and jax's own kernels on one GPU, in bfloat16.

    python -m benchmarks run grouped

A work is rows x d_in x d_out with a number of experts, and how many rows each has: `equal`, or `skewed`, drawn with
probabilities in proportion to 1 / rank (Zipf's law), of ranks given to the experts at random, seed 0. The weight gradient is
timed twice: in bfloat16, and added onto a float32 array in place, for which PyTorch has a product and then a sum.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import runner
from benchmarks.peers.protocol import Run, answer, read_request, take_turns
from benchmarks.rows import Row, named, ratio
from benchmarks.runner import Benchmark, Work
from benchmarks.tables import Section, number
from benchmarks.turns import Candidate
from jgraph.device import find
from jgraph.kernels import grouped

# M rows, G groups, K and N a group's matrix; in einsums `e` rows of a group

SHAPES = {"full": ((24576, 2048, 1408, 64), (32768, 4096, 1536, 128)), "tiny": ((64, 32, 16, 4),)}
LEGS = ("forward", "dgrad", "wgrad", "onto_float32")
Leg = Callable[..., jax.Array]


@dataclass(frozen=True, kw_only=True)
class Options(runner.Options):
    """Chooses what is run."""

    groups: tuple[str, ...] = ("equal", "skewed")
    """How many rows each group has."""
    variants: tuple[str, ...] = ("",)
    """Of ours: the implementation; as it is chosen by itself if it is left out."""
    peers: tuple[str, ...] = ("torch", "einsum", "ragged_dot_mgpu", "transposed_ragged_dot_mgpu")
    """PyTorch's, an einsum where groups are equal, and jax's kernels for Hopper: forward and dgrad, and wgrads."""


def works(options: Options) -> Iterator[Work]:
    for shape in SHAPES[options.sizes]:
        for groups in options.groups:
            rows, d_in, d_out, experts = shape
            size = {"shape": shape, "groups": drawn(rows, experts, groups)}
            ours = [("jgraph", variant, "benchmarks.grouped") for variant in options.variants]
            peers = [
                ("torch", "", "benchmarks.peers.grouped") if peer == "torch" else ("jax", peer, "benchmarks.grouped")
                for peer in options.peers
                if peer != "einsum" or groups == "equal"
            ]
            candidates = [
                Candidate({"system": system, "variant": how}, module, size | {"system": system, "variant": how})
                for system, how, module in (*ours, *peers)
            ]
            yield Work(f"{rows:,} x {d_in} x {d_out}, {experts} experts, {groups}", {"ranks": 1, "size": size}, [candidates])


def drawn(rows: int, experts: int, groups: str) -> list[int]:
    if groups == "equal":
        return [rows // experts] * experts
    random = np.random.default_rng(0)
    shares = random.permutation(1 / np.arange(1, experts + 1))
    return random.multinomial(rows, shares / shares.sum()).tolist()


def ours(implementation: str) -> dict[str, Leg]:
    chosen: dict[str, Any] = {"implementation": implementation} if implementation else {}

    def dgrad(dy: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        x = jnp.zeros((dy.shape[0], w.shape[1]), dy.dtype)  # the forward, which nobody reads, is left out of the program
        return jax.vjp(lambda x: grouped.grouped_dot(x, w, sizes, **chosen), x)[1](dy)[0]

    return {
        "forward": lambda x, w, sizes: grouped.grouped_dot(x, w, sizes, **chosen),
        "dgrad": dgrad,
        "wgrad": lambda x, dy, sizes: grouped.grouped_wgrad(x, dy, sizes, dtype=jnp.bfloat16, **chosen),
        "onto_float32": lambda x, dy, sizes, main: grouped.grouped_wgrad(
            x, dy, sizes, dtype=jnp.float32, add_GKN=main, **chosen
        ),
    }


def einsums() -> dict[str, Leg]:
    def rows(x: jax.Array, sizes: jax.Array) -> jax.Array:
        return x.reshape(sizes.size, -1, x.shape[1])

    def product(form: str, a: jax.Array, b: jax.Array, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.einsum(form, a, b, preferred_element_type=dtype)

    def wgrad(x: jax.Array, dy: jax.Array, sizes: jax.Array, dtype: Any = jnp.bfloat16) -> jax.Array:
        return product("gek,gen->gkn", rows(x, sizes), rows(dy, sizes), dtype)

    return {
        "forward": lambda x, w, sizes: product("gek,gkn->gen", rows(x, sizes), w),
        "dgrad": lambda dy, w, sizes: product("gen,gkn->gek", rows(dy, sizes), w),
        "wgrad": wgrad,
        "onto_float32": lambda x, dy, sizes, main: main + wgrad(x, dy, sizes, jnp.float32),
    }


def of_jax(name: str) -> dict[str, Leg]:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    # Of a common size; not searched for.
    tiles = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 8}
    dot = functools.partial(ragged_dot_mgpu.ragged_dot, **tiles)
    wgrad = functools.partial(transposed_ragged_dot_mgpu.transposed_ragged_dot, **tiles)
    if name == "ragged_dot_mgpu":
        return {
            "forward": lambda x, w, sizes: dot(x, w, group_sizes=sizes),
            "dgrad": lambda dy, w, sizes: dot(dy, w, group_sizes=sizes, transpose_rhs=True),
        }
    return {
        "wgrad": lambda x, dy, sizes: wgrad(x, dy, group_sizes=sizes),
        "onto_float32": lambda x, dy, sizes, main: main + wgrad(x, dy, group_sizes=sizes).astype(jnp.float32),
    }


def time_products(request: Row) -> None:
    """Answers with the times of a system's products; runs in a process of its own."""
    M, K, N, G = request["shape"]
    shapes = {"x": (M, K), "dy": (M, N), "w": (G, K, N)}
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy, w = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes.values(), strict=True))
    sizes, latest = jnp.array(request["groups"], jnp.int32), {}
    system, how = request["system"], request["variant"]
    legs = ours(how) if system == "jgraph" else einsums() if how == "einsum" else of_jax(how)
    operands = {"forward": (x, w), "dgrad": (dy, w), "wgrad": (x, dy), "onto_float32": (x, dy)}

    def runs(name: str, leg: Leg) -> Run:
        if name == "onto_float32":
            latest[name], compiled = jnp.zeros((G, K, N)), jax.jit(leg, donate_argnums=3)
            return lambda: latest.update({name: compiled(x, dy, sizes, latest[name])})
        compiled = jax.jit(leg)
        return lambda: latest.update({name: compiled(*operands[name], sizes)})

    own = {name: runs(name, leg) for name, leg in legs.items()}
    for run in own.values():
        run()
    answer(device=jax.devices()[0].device_kind)
    take_turns(lambda timer: timer.each(own, lambda: jax.block_until_ready(latest)))


def bytes_onto_float32(shape: tuple[int, ...]) -> int:
    """Returns the bytes that a weight gradient which is added in place must read and write."""
    M, K, N, G = shape
    return 2 * M * (K + N) + 8 * G * K * N


def section(name: str, result: Row) -> Section:
    shape, rows = result["size"]["shape"], result["rows"]
    flops = 2 * math.prod(shape[:3])
    peer = next((row for row in rows if row["system"] == "torch"), None)

    def rate(key: str) -> Callable[[Row], str]:
        return lambda row: f"{row[key]:.3f}, {flops / row[key] / 1e9:.0f}" if key in row else ""

    def against(key: str) -> Callable[[Row], str]:
        return lambda row: ratio(peer, row, key, digits=2)

    def of_bandwidth(row: Row) -> str:
        device, ms = find(row.get("device", "")), row.get("onto_float32_ms")
        return f"{bytes_onto_float32(shape) / ms * 1e3 / device.copy_bytes_per_second:.0%}" if device and ms else ""

    columns: dict[str, Callable[[Row], str]] = {"variant": named}
    for leg in LEGS:
        told = leg.replace("_", " ")
        columns |= {f"{told}: ms, TFLOP/s": rate(f"{leg}_ms"), f"{told}: torch / this": against(f"{leg}_ms")}
    columns |= {"onto float32: of the bandwidth": of_bandwidth, "W": number("power_watts", ".0f")}
    return Section(name, columns)


BENCHMARK = Benchmark("Grouped products", __doc__, Options, works, section)

if __name__ == "__main__":
    time_products(read_request())
