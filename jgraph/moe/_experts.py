"""Applies the experts to their tokens, on one device or over the devices of a group.

The experts are SwiGLU MLPs. The devices of the axis `fsdp` are divided into groups, and the devices of a group together hold
all experts. All shapes are static: a device sends the same number of rows to each device of its group, and unused rows are
zeros. Rows beyond the capacity are not sent, but counted. Rows are gathered on each device and never scattered, also in the
gradient.
"""

# N tokens, K experts per token, R = N * K rows, G devices per group, C rows per pair of devices, S = G * C rows per device,
# E experts, L = E / G experts per device, D model, F hidden of an expert. 2F: the F columns of gate, then the F columns of up

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from jgraph.kernels.grouped import grouped_dot
from jgraph.kernels.swiglu import weighted_swiglu
from jgraph.mesh import Axis
from jgraph.moe import _dispatch
from jgraph.moe._dispatch import RowOrder, combined, dispatched, moved
from jgraph.moe._router import Routing
from jgraph.moe.config import MoEConfig, rows_per_pair
from jgraph.scopes import scope


class Overflow(NamedTuple):
    """The rows of a device beyond its capacity. A row is one token for one of its experts."""

    dropped: Array  # int32 scalar, rows of this device that were not sent
    needed: Array  # int32 scalar, most rows that this device had for another device; 0 if no row was dropped


def experts(x_RD: Array, weights_R: Array, up_EDF2: Array, down_EFD: Array, sizes_E: Array) -> Array:
    """Applies each expert to its rows, and multiplies the results by the weights of the rows. Rows without an expert give 0."""
    # The weights multiply the hidden rows, so that the gradient of the weights does not need the results of the experts.
    return grouped_dot(weighted_swiglu(grouped_dot(x_RD, up_EDF2, sizes_E), weights_R), down_EFD, sizes_E)


def mixture(x_ND: Array, found: Routing, up_EDF2: Array, down_EFD: Array) -> Array:
    """Returns the weighted sum of the experts of each token, added in float32, on a device with all experts."""
    copies = found.experts.shape[1]
    with scope("dispatch"):
        order = _dispatch.order_of(found.experts, found.counts)
        x_RD = dispatched(x_ND, order, copies)
        weights_R = dispatched(found.weights.reshape(-1), order, 1)
    with scope("experts"):
        y_RD = experts(x_RD, weights_R, up_EDF2, down_EFD, found.counts)
    with scope("combine"):
        return combined(y_RD, order, copies)


def sharded_mixture(x_ND: Array, found: Routing, up_LDF2: Array, down_LFD: Array, config: MoEConfig) -> tuple[Array, Overflow]:
    """Returns the weighted sum of the experts of each token, with experts that are sharded over the devices of a group.

    Collective over `fsdp`: all devices call it under `jax.shard_map` with the same N. A row beyond the capacity counts as 0.
    """
    (N, K), (E, L) = found.experts.shape, (found.counts.size, len(up_LDF2))
    G, C = E // L, rows_per_pair(config.capacity, N * K, E // L)
    with scope("dispatch"):
        by_expert = _dispatch.order_of(found.experts, found.counts)
        counts_GL = found.counts.reshape(G, L)
        sums_G = jnp.sum(counts_GL, 1)
        ends_GL = jnp.minimum(jnp.cumsum(counts_GL, 1), C)
        sent_GL = jnp.diff(ends_GL, axis=1, prepend=0)
        out = _order_by_device(by_expert, sums_G, C)
        x_SD = dispatched(x_ND, out, K, "zeros")
        weights_S = dispatched(found.weights.reshape(-1), out, 1, "zeros")
        # Weights and counts are exchanged together. Counts are exact in float32 up to 2**24.
        sent = jnp.concatenate([weights_S.reshape(G, C), sent_GL.astype(jnp.float32)], 1)
    x_SD = _exchanged(x_SD, G)
    received = _exchanged(sent, G)
    with scope("dispatch"):
        counts_GL = lax.stop_gradient(received[:, C:]).astype(jnp.int32)
        order = _order_by_expert(counts_GL, C)
        x_SD = dispatched(x_SD, order, 1, "zeros")
        weights_S = dispatched(received[:, :C].reshape(-1), order, 1, "zeros")
    with scope("experts"):
        y_SD = experts(x_SD, weights_S, up_LDF2, down_LFD, jnp.sum(counts_GL, 0))
    with scope("combine"):
        y_SD = combined(y_SD, order, 1, "zeros")
    y_SD = _exchanged(y_SD, G)
    with scope("combine"):
        y_ND = combined(y_SD, out, K, "zeros")
    fullest = jnp.max(sums_G)
    return y_ND, Overflow(jnp.sum(jnp.maximum(sums_G - C, 0)), jnp.where(fullest > C, fullest, 0))


def _exchanged(parts: Array, devices: int) -> Array:
    """Sends part i to device i of the group. Returns the received parts in the order of the devices."""
    # Device d of the axis belongs to group d % num_groups: four devices have the groups (0, 2) and (1, 3). Device i of a group
    # holds the experts from i * L to (i + 1) * L - 1.
    num_groups = lax.axis_size(Axis.FSDP) // devices
    groups = [list(range(first, num_groups * devices, num_groups)) for first in range(num_groups)] if num_groups > 1 else None
    with scope("exchange"):
        return lax.all_to_all(parts, Axis.FSDP, 0, 0, tiled=True, axis_index_groups=groups)


def _order_by_device(by_expert: RowOrder, rows_G: Array, capacity: int) -> RowOrder:
    """Returns the order of copies in the send buffers for the devices of the group."""
    devices, copies = len(rows_G), by_expert.source.size
    size = devices * capacity
    firsts_G = jnp.arange(devices, dtype=jnp.int32) * capacity
    begins_G, lengths_G = jnp.cumsum(rows_G) - rows_G, jnp.minimum(rows_G, capacity)
    rows_S = moved(jnp.arange(size, dtype=jnp.int32), firsts_G, begins_G, lengths_G, copies)
    source_S = by_expert.source.at[rows_S].get(mode="fill", fill_value=copies)
    return RowOrder(source_S, moved(by_expert.inverse, begins_G, firsts_G, lengths_G, size))


def _order_by_expert(counts_GL: Array, capacity: int) -> RowOrder:
    """Returns the order by expert of the received rows, which are ordered by device and then by expert."""
    size = len(counts_GL) * capacity
    firsts_GL = jnp.arange(len(counts_GL), dtype=jnp.int32)[:, None] * capacity + jnp.cumsum(counts_GL, 1) - counts_GL
    by_expert_LG = counts_GL.T
    begins_GL = (jnp.cumsum(by_expert_LG) - by_expert_LG.reshape(-1)).reshape(by_expert_LG.shape).T
    firsts_I, begins_I, lengths_I = (leaf.reshape(-1) for leaf in (firsts_GL, begins_GL, counts_GL))
    all_S = jnp.arange(size, dtype=jnp.int32)
    return RowOrder(moved(all_S, begins_I, firsts_I, lengths_I, size), moved(all_S, firsts_I, begins_I, lengths_I, size))
