"""Grouped matmuls (linear layers of a mixture of experts) on one GPU: jgraph, PyTorch, Transformer Engine and kernels of jax.

    python -m benchmarks run grouped

A work is tokens x input width x output width, a number of experts, and the routing. `equal` gives each expert the same number
of tokens. `skewed` draws them from a Zipf distribution over randomly ordered experts, with seed 0. The weight gradient is timed
twice: in bfloat16, and added in place to a float32 array. PyTorch needs a matmul and an addition for the latter. Matmuls are in
bfloat16, except those of Transformer Engine with an FP8 recipe (`benchmarks/peers/te_grouped.py`).
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
from benchmarks.peers.te_variant import is_te
from benchmarks.rows import Row, ratio, row_name
from benchmarks.runner import Benchmark, Work
from benchmarks.tables import Section, number
from benchmarks.turns import Candidate
from jgraph.device import find
from jgraph.kernels import grouped

# M rows, G groups, K and N dimensions of the matrix of a group; `e` in einsums: rows of a group

SHAPES = {"full": ((24576, 2048, 1408, 64), (32768, 4096, 1536, 128)), "tiny": ((64, 32, 16, 4),)}
ENGINE = ("te bf16", "te bf16 + CUDA graph", "te bf16 cutlass", "te bf16 cutlass + CUDA graph", "te current + CUDA graph")
LEGS = ("forward", "dgrad", "wgrad", "onto_float32")
Leg = Callable[..., jax.Array]


@dataclass(frozen=True, kw_only=True)
class Options(runner.Options):
    """Flags of the benchmark."""

    groups: tuple[str, ...] = ("equal", "skewed")
    """Routings: distribution of the rows over the groups."""
    variants: tuple[str, ...] = ("",)
    """jgraph implementations. Empty for the default choice."""
    peers: tuple[str, ...] = ("torch", *ENGINE, "einsum", "ragged_dot_mgpu", "transposed_ragged_dot_mgpu")
    """Peers: PyTorch, Transformer Engine (`te RECIPE`, `benchmarks/peers/te_variant.py`), an einsum (equal groups only), and
    the Hopper kernels of jax for forward and dgrad, and for wgrad."""


def works(options: Options) -> Iterator[Work]:
    """Yields one work per shape and routing."""
    for shape in SHAPES[options.sizes]:
        for groups in options.groups:
            rows, d_in, d_out, experts = shape
            size = {"shape": shape, "groups": group_sizes(rows, experts, groups)}
            ours = [candidate("jgraph", variant, "benchmarks.grouped", size) for variant in options.variants]
            peers = [peer_candidate(peer, size) for peer in options.peers if peer != "einsum" or groups == "equal"]
            yield Work(
                f"{rows:,} x {d_in} x {d_out}, {experts} experts, {groups}", {"ranks": 1, "size": size}, [[*ours, *peers]]
            )


def peer_candidate(peer: str, size: Row) -> Candidate:
    """Returns the candidate of a peer."""
    if peer == "torch":
        return candidate("torch", "", "benchmarks.peers.grouped", size)
    if is_te(peer):
        return candidate("torch", peer, "benchmarks.peers.te_grouped", size)
    return candidate("jax", peer, "benchmarks.grouped", size)


def candidate(system: str, variant: str, module: str, size: Row) -> Candidate:
    """Returns a candidate."""
    labels = {"system": system, "variant": variant}
    return Candidate(labels, module, size | labels)


def group_sizes(rows: int, experts: int, groups: str) -> list[int]:
    """Distributes rows over experts: `equal`, or `skewed`."""
    if groups == "equal":
        return [rows // experts] * experts
    random = np.random.default_rng(0)
    shares = random.permutation(1 / np.arange(1, experts + 1))
    return random.multinomial(rows, shares / shares.sum()).tolist()


def jgraph_legs(implementation: str) -> dict[str, Leg]:
    """Returns the matmuls of jgraph by name."""
    chosen: dict[str, Any] = {"implementation": implementation} if implementation else {}

    def dgrad(dy: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        x = jnp.zeros((dy.shape[0], w.shape[1]), dy.dtype)  # XLA removes the unused forward
        return jax.vjp(lambda x: grouped.grouped_dot(x, w, sizes, **chosen), x)[1](dy)[0]

    return {
        "forward": lambda x, w, sizes: grouped.grouped_dot(x, w, sizes, **chosen),
        "dgrad": dgrad,
        "wgrad": lambda x, dy, sizes: grouped.grouped_wgrad(x, dy, sizes, dtype=jnp.bfloat16, **chosen),
        "onto_float32": lambda x, dy, sizes, main: grouped.grouped_wgrad(
            x, dy, sizes, dtype=jnp.float32, add_GKN=main, **chosen
        ),
    }


def einsum_legs() -> dict[str, Leg]:
    """Returns the matmuls as einsums by name, for groups of equal size."""

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


def pallas_legs(name: str) -> dict[str, Leg]:
    """Returns the matmuls of a Pallas kernel of jax by name."""
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    # Common tile sizes, without tuning.
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


def time_matmuls(request: Row) -> None:
    """Times the matmuls of a system. Entry point of the candidate process."""
    M, K, N, G = request["shape"]
    shapes = {"x": (M, K), "dy": (M, N), "w": (G, K, N)}
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy, w = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes.values(), strict=True))
    sizes, latest = jnp.array(request["groups"], jnp.int32), {}
    variant = request["variant"]
    if request["system"] == "jgraph":
        legs = jgraph_legs(variant)
    else:
        legs = einsum_legs() if variant == "einsum" else pallas_legs(variant)
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
    """Returns the bytes that the in-place weight gradient reads and writes."""
    M, K, N, G = shape
    return 2 * M * (K + N) + 8 * G * K * N


def section(name: str, result: Row) -> Section:
    """Returns the table layout of a work."""
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

    columns: dict[str, Callable[[Row], str]] = {"variant": row_name}
    for leg in LEGS:
        label = "wgrad added to float32" if leg == "onto_float32" else leg
        columns |= {f"{label}: ms, TFLOP/s": rate(f"{leg}_ms"), f"{label}: torch / row": against(f"{leg}_ms")}
    columns |= {"wgrad added to float32: bandwidth / copy bandwidth": of_bandwidth, "power, W": number("power_watts", ".0f")}
    return Section(name, columns)


BENCHMARK = Benchmark("Grouped matmuls", __doc__, Options, works, section)

if __name__ == "__main__":
    time_matmuls(read_request())
