"""The layout of a batch: rows are grouped by microbatch, and each microbatch is sharded over the data ranks."""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from jgraph.errors import ShapeError
from jgraph.mesh import batch_axes, num_data_ranks
from jgraph.strategies import checks
from jgraph.tree import path_name
from jgraph.types import Batch, Leaf


@dataclass(frozen=True)
class BatchLayout:
    """Places the rows of a batch: microbatch m of M has the rows [m * B/M, (m + 1) * B/M) of B.

    Each data rank (device with its own rows) has an equal, consecutive part of every microbatch.
    """

    mesh: Mesh | None  # None for one device
    num_microbatches: int

    @property
    def sharding(self) -> NamedSharding | None:
        """Sharding of the leaves [M, B/M, ...] of a placed batch. None without a mesh, where a batch is not placed."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec(None, batch_axes(self.mesh)))

    def rows(self, count: int) -> np.ndarray:
        """Returns the ascending indices of the rows that this process must read, for a batch of `count` rows."""
        self.microbatch(jax.ShapeDtypeStruct((count,), jnp.int32))  # raises ShapeError
        index_MB = np.arange(count).reshape(self.num_microbatches, -1)
        if self.sharding is None:
            return index_MB.ravel()
        parts = self.sharding.addressable_devices_indices_map(index_MB.shape).values()
        return np.unique(np.concatenate([index_MB[part].ravel() for part in parts if part is not None]))

    def place(self, batch: Batch) -> Batch:
        """Documented at `TrainStep.place`."""
        sharding = self.sharding
        if sharding is None:
            return batch
        local, total = self._data_ranks
        leaves = jax.tree.leaves(batch)
        multiple = self.num_microbatches * local
        # `_share` raises the error. It is not called in every step, because it describes each leaf by its path.
        fits = leaves and all(checks.has_rows(leaf, multiple) for leaf in leaves)
        if not fits or (multiple > 1 and len({leaf.shape[0] for leaf in leaves}) > 1):
            self._share(batch, local, "data ranks of this process")

        def place(leaf: Array | np.ndarray) -> Array:
            rows = np.asarray(leaf)  # of this process, in the order of `BatchLayout.rows`
            shape = (self.num_microbatches, len(rows) // self.num_microbatches, *rows.shape[1:])
            whole = (shape[0], shape[1] * total // local, *shape[2:])  # of all processes
            return jax.make_array_from_process_local_data(sharding, rows.reshape(shape), whole)

        return jax.tree.map(place, batch)

    def placed_shapes(self, batch: Batch) -> Batch:
        """Documented at `TrainStep.placed_shapes`."""
        sharding = self.sharding
        num_microbatches = self.num_microbatches

        def is_placed(leaf: Leaf) -> bool:
            where = getattr(leaf, "sharding", None)
            if sharding is None or not isinstance(where, NamedSharding):
                return False
            # Devices are not compared, because a batch placed on one mesh also describes the batch on another mesh (`on`).
            is_same = (where.spec, where.mesh.shape) == (sharding.spec, sharding.mesh.shape)
            return is_same and leaf.shape[0] == num_microbatches

        def shape(leaf: Leaf) -> jax.ShapeDtypeStruct:
            lead = (num_microbatches, leaf.shape[0] // num_microbatches)
            placed = leaf.shape if sharding is None or is_placed(leaf) else (*lead, *leaf.shape[1:])
            return jax.ShapeDtypeStruct(placed, leaf.dtype, sharding=sharding)

        checks.check_batch(batch)
        if not all(map(is_placed, jax.tree.leaves(batch))):
            self.microbatch(batch)  # raises ShapeError
        return jax.tree.map(shape, batch)

    def microbatch(self, batch: Batch) -> Batch:
        """Returns the shapes of a microbatch on one data rank, [B / (M * number of data ranks), ...]."""
        return self._share(batch, num_data_ranks(self.mesh), "data ranks")

    def _share(self, batch: Batch, ranks: int, what: str) -> Batch:
        """Returns the shapes of the rows of a microbatch on one of `ranks` ranks. `what` describes the ranks in the error."""
        checks.check_batch(batch)
        parts = self.num_microbatches * ranks
        rows = next((leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.ndim), 0)

        def share(path: KeyPath, leaf: Leaf) -> jax.ShapeDtypeStruct:
            if leaf.ndim == 0 or leaf.shape[0] % parts:
                raise ShapeError(
                    f"`batch` has an array of shape {list(leaf.shape)}{checks.at(path_name(path))}: its first axis must be "
                    f"divisible by num_microbatches {self.num_microbatches} x {ranks} {what}",
                    field="batch",
                )
            # A batch that is not divided may have arrays with other first axes, such as the nodes and edges of a graph.
            if parts > 1 and leaf.shape[0] != rows:
                raise ShapeError(
                    f"`batch` has {leaf.shape[0]} rows{checks.at(path_name(path))} and {rows} in its first array: all arrays "
                    "must have the same number of rows, because microbatches and devices share them",
                    field="batch",
                )
            return jax.ShapeDtypeStruct((leaf.shape[0] // parts, *leaf.shape[1:]), leaf.dtype)

        return jax.tree_util.tree_map_with_path(share, batch)

    def by_microbatch(self, placed: Batch) -> Batch:
        """Converts a placed batch to leaves [M, B/M, ...], which it has already on a mesh. Can be traced."""
        if self.mesh is not None:
            return placed
        return by_microbatch(placed, self.num_microbatches)

    @cached_property
    def _data_ranks(self) -> tuple[int, int]:
        """The number of data ranks of this process, and the number of all data ranks."""
        total = num_data_ranks(self.mesh)
        return len(self.rows(self.num_microbatches * total)) // self.num_microbatches, total


def by_microbatch(batch: Batch, num_microbatches: int) -> Batch:
    """Reshapes leaves [B, ...] to [M, B/M, ...]. If M does not divide B, JAX raises an error."""
    return jax.tree.map(lambda leaf: jnp.reshape(leaf, (num_microbatches, -1, *leaf.shape[1:])), batch)
