"""Context parallelism: the order of the tokens of a sequence on the devices of the mesh axis `context`.

Device i of N has the chunks i and 2N - 1 - i of 2N equal chunks ("zigzag"). In causal attention, the queries of every device
then read the same number of keys. Keys and values are all-gathered (Grattafiori et al., "The Llama 3 herd of models",
arXiv:2407.21783, section 3.3.2).
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jgraph.errors import ConfigError
from jgraph.mesh import Axis, is_bound, partitioned, summable

AXIS = Axis.CONTEXT.value


def token_order(length: int) -> np.ndarray | None:
    """Returns the order of tokens that gives each device of `context` consecutive ones, int32 [T]; None without the axis."""
    devices = partitioned(AXIS)
    if devices == 1:
        return None
    if length % (2 * devices):
        must = f"must divide the {length} tokens of a sequence into two equal chunks for each device"
        raise ConfigError(f"`context` is {devices}: {must}", field="context")
    chunks = np.arange(length, dtype=np.int32).reshape(2 * devices, -1)
    return np.concatenate([chunks[[i, 2 * devices - 1 - i]].ravel() for i in range(devices)])


def gathered(x_BS: Array) -> Array:
    """All-gathers tokens over the axis `context`, in the order of the sequence. Called under `jgraph.mesh.per_shard`."""
    # S tokens of a device, T tokens of the sequence
    if not is_bound(AXIS):
        return x_BS
    devices = lax.axis_size(AXIS)
    x_BT = lax.all_gather(summable(x_BS), AXIS, axis=1, tiled=True).astype(x_BS.dtype)
    parts = jnp.split(x_BT, 2 * devices, axis=1)
    return jnp.concatenate(parts[0::2] + parts[1::2][::-1], axis=1)
