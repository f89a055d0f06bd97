"""Experts over devices: rows go to the devices that have their experts, in buffers of one size, and their results come back.

The devices of the axis `fsdp` are divided into groups, of which each has all experts. A device sends each of its group as many
rows as there are places, whatever the router says: so all shapes are static. Rows for which there is no place are not sent, and
are counted. All moves on a device are gathers, in the gradient too.
"""

# N tokens, K experts of a token, R = N * K rows, G devices of a group, C places of a pair, S = G * C places of a device,
# E experts, L = E / G experts of a device, D model, F hidden of an expert

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jgraph.mesh import Axis
from jgraph.moe import dispatch
from jgraph.moe.config import MoEConfig, places
from jgraph.moe.dispatch import Order, moved
from jgraph.moe.experts import experts
from jgraph.moe.router import Routing
from jgraph.scopes import scope


class Overflow(NamedTuple):
    """Says what found no place.

    Attributes:
        dropped: int32 scalar, rows of this device.
        needed: int32 scalar, the places that this device's fullest pair needed if it had fewer, else 0.
    """

    dropped: Array
    needed: Array


def through(x_ND: Array, found: Routing, up_LDF2: Array, down_LFD: Array, config: MoEConfig) -> tuple[Array, Overflow]:
    """Returns what the experts make of each token by a routing, as a weighted sum, in x's dtype; and what found no place.

    To be called on one device, under `jax.shard_map` with the axis `fsdp`.

    Args:
        x_ND: this device's tokens; as many on every device.
        found: this device's, of all experts.
        up_LDF2, down_LFD: matrices of this device's experts, of x's dtype. Device i of a group has the ith part of all experts,
            and groups are of devices as far apart as there are groups: of four devices with two groups 0 and 2, 1 and 3.
        config: of the layer.
    """
    (N, K), (E, L) = found.experts.shape, (found.counts.size, len(up_LDF2))
    G, C = E // L, places(config.capacity, N * K, E // L)
    with scope("dispatch"):
        by_expert = dispatch.order_of(found.experts, found.counts)
        counts_GL = found.counts.reshape(G, L)
        sums_G = jnp.sum(counts_GL, 1)
        ends_GL = jnp.minimum(jnp.cumsum(counts_GL, 1), C)
        sent_GL = jnp.diff(ends_GL, axis=1, prepend=0)
        out = _to_places(by_expert, sums_G, C)
        x_SD: Any = dispatch.dispatched(x_ND, out, K, "zeros")
        weights_S: Any = dispatch.dispatched(found.weights.reshape(-1), out, 1, "zeros")
        # Counts are exact in float32 up to 2**24, and one exchange is enough.
        told = jnp.concatenate([weights_S.reshape(G, C), sent_GL.astype(jnp.float32)], 1)
    x_SD = _exchanged(x_SD, G)
    told = _exchanged(told, G)
    with scope("dispatch"):
        came_GL = lax.stop_gradient(told[:, C:]).astype(jnp.int32)
        order = _by_expert(came_GL, C)
        x_SD = dispatch.dispatched(x_SD, order, 1, "zeros")
        weights_S = dispatch.dispatched(told[:, :C].reshape(-1), order, 1, "zeros")
    with scope("experts"):
        y_SD: Any = experts(x_SD, weights_S, up_LDF2, down_LFD, jnp.sum(came_GL, 0))
    with scope("combine"):
        y_SD = dispatch.combined(y_SD, order, 1, "zeros")
    y_SD = _exchanged(y_SD, G)
    with scope("combine"):
        y_ND: Any = dispatch.combined(y_SD, out, K, "zeros")
    fullest = jnp.max(sums_G)
    return y_ND, Overflow(jnp.sum(jnp.maximum(sums_G - C, 0)), jnp.where(fullest > C, fullest, 0))


def _exchanged(parts: Array, devices: int) -> Array:
    """Returns the ith of as many equal parts from each device of the group, on its ith device, in the order of devices."""
    apart = lax.axis_size(Axis.FSDP) // devices
    groups = [list(range(first, apart * devices, apart)) for first in range(apart)] if apart > 1 else None
    with scope("exchange"):
        return lax.all_to_all(parts, Axis.FSDP, 0, 0, tiled=True, axis_index_groups=groups)


def _to_places(by_expert: Order, rows_G: Array, places: int) -> Order:
    """Returns the order in which copies lie in the places for each device of the group, from that by expert."""
    devices, copies = len(rows_G), by_expert.source.size
    size = devices * places
    firsts_G = jnp.arange(devices, dtype=jnp.int32) * places
    begins_G, lengths_G = jnp.cumsum(rows_G) - rows_G, jnp.minimum(rows_G, places)
    rows_S = moved(jnp.arange(size, dtype=jnp.int32), firsts_G, begins_G, lengths_G, copies)
    source_S = by_expert.source.at[rows_S].get(mode="fill", fill_value=copies)
    return Order(source_S, moved(by_expert.inverse, begins_G, firsts_G, lengths_G, size))


def _by_expert(came_GL: Array, places: int) -> Order:
    """Returns the order by expert of rows that lie by device and within one by expert."""
    size = len(came_GL) * places
    firsts_GL = jnp.arange(len(came_GL), dtype=jnp.int32)[:, None] * places + jnp.cumsum(came_GL, 1) - came_GL
    by_expert_LG = came_GL.T
    begins_GL = (jnp.cumsum(by_expert_LG) - by_expert_LG.reshape(-1)).reshape(by_expert_LG.shape).T
    firsts_I, begins_I, lengths_I = (leaf.reshape(-1) for leaf in (firsts_GL, begins_GL, came_GL))
    all_S = jnp.arange(size, dtype=jnp.int32)
    return Order(moved(all_S, begins_I, firsts_I, lengths_I, size), moved(all_S, firsts_I, begins_I, lengths_I, size))
