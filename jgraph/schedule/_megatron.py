"""Generates the order that Megatron-LM passes to Transformer Engine's `make_graphed_callables`, entry for entry.

Follows Megatron-LM d98e8a64, `transformer/cuda_graphs.py` and `pipeline_parallel/schedules.py`. The tests compare the orders
with the output of Megatron-LM (tests/schedule/goldens/orders.json).
"""

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from jgraph.errors import OrderError
from jgraph.schedule._generate import alternate, forward_sequence
from jgraph.schedule.action import check_integer
from jgraph.schedule.order import Order


def megatron_order(
    pp_size: int,
    pp_rank: int,
    num_microbatches: int,
    *,
    # Number of chunks per rank. With 1, the warm-up is that of interleaved 1F1B; with None, that of 1F1B.
    vpp: int | None = None,
    # Number of microbatches that pass through a chunk before the next chunk starts; None for `pp_size`. Smaller groups can
    # deadlock, including a smaller last group: `Schedule` checks the orders of all ranks, this function does not.
    microbatch_group_size: int | None = None,
    num_layers_per_chunk: Sequence[int] | None = None,  # None for one layer each
    # Makes every layer a chunk, and alternates the layers of a forward and of a backward. Megatron-LM then overlaps the
    # expert-parallel communication of one with the other.
    overlap_moe_ep: bool = False,
    delay_wgrad: bool = False,  # wgrads are separate entries
) -> Order:
    """Returns Megatron-LM's order of one pipeline rank: 1F1B, or interleaved 1F1B if `vpp` is given."""
    chunks = 1 if vpp is None else vpp
    group = pp_size if microbatch_group_size is None else microbatch_group_size
    sizes = {"pp_size": pp_size, "num_microbatches": num_microbatches, "vpp": chunks, "microbatch_group_size": group}
    for name, size in sizes.items():
        check_integer(name, size)
    check_integer("pp_rank", pp_rank, 0)
    given = (1,) * chunks if num_layers_per_chunk is None else num_layers_per_chunk
    layers = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else ()
    for number in layers:
        check_integer("num_layers_per_chunk", number, 0)
    needs = "needs overlap_moe_ep=True: Megatron-LM splits the backward only with it"
    for name, is_wrong, problem in (
        ("pp_rank", pp_rank >= pp_size, f"is {pp_rank}: with pp_size={pp_size} it must be 0 to {pp_size - 1}"),
        ("vpp", pp_size == 1 and chunks > 1, f"is {vpp}: with pp_size=1 a rank has one chunk; omit it"),
        ("num_layers_per_chunk", len(layers) != chunks, f"is {given!r}: must be one integer for each of {chunks} chunks"),
        ("delay_wgrad", delay_wgrad and not overlap_moe_ep, needs),
        ("num_layers_per_chunk", overlap_moe_ep and not any(layers), f"is {given!r}: overlap_moe_ep needs at least one layer"),
    ):
        if is_wrong:
            raise OrderError(f"`{name}` {problem}", field=name)

    if pp_size == 1 and not overlap_moe_ep:
        num_microbatches = 1  # there is nothing to interleave

    ahead = pp_size - pp_rank - 1
    warmup = ahead if vpp is None or pp_size == 1 else 2 * ahead + (chunks - 1) * group
    forwards = forward_sequence([*range(0, num_microbatches, group), num_microbatches], chunks)[0]
    warmup = min(warmup, len(forwards))
    kinds, entry_chunks = alternate(forwards, chunks, warmup)
    if not overlap_moe_ep:
        return Order(kinds, entry_chunks, layers if all(layers) else ())
    by_chunk = Order(kinds, entry_chunks).to_list()
    return Order.parse(_by_layer(by_chunk, layers, warmup, delay_wgrad), delay_wgrad=delay_wgrad)


def _by_layer(order: Sequence[int | float], layers: tuple[int, ...], warmup: int, delay_wgrad: bool) -> list[int | float]:
    """Expands the signed numbers of chunks into numbers of layers, as if each layer were a chunk."""
    first = np.concatenate([[0], np.cumsum(layers)]).tolist()

    def layers_of(entry: int | float | None) -> list[int]:
        if entry is None:
            return []
        chunk = int(abs(entry)) - 1
        numbers = list(range(first[chunk] + 1, first[chunk + 1] + 1))
        return numbers if entry > 0 else numbers[::-1]

    # After `warmup` + 1 forwards, each backward is paired with the next forward, and their layers alternate. The remaining
    # backwards are not paired.
    forwards = [entry for entry in order if entry > 0]
    backwards = [entry for entry in order if entry < 0]
    ahead = min(warmup + 1, len(forwards))
    entries: list[int | float] = [layer for entry in forwards[:ahead] for layer in layers_of(entry)]
    for forward, backward in zip_longest(forwards[ahead:], backwards):
        down = layers_of(backward)
        for i, (up, layer) in enumerate(zip_longest(layers_of(forward), down)):
            if up is not None:
                entries.append(up)
            if layer is not None:
                entries.append(-layer)
                # The last wgrad of a pair comes after its last forward.
                if delay_wgrad and i < len(down) - 1:
                    entries.append(-layer - 0.5)
        if delay_wgrad and down:
            entries.append(-down[-1] - 0.5)
    return entries
