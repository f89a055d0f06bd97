"""Data parallelism with all parameters on every device."""

from dataclasses import dataclass

from jax.sharding import Mesh

from jgraph.mesh import Axis, checked
from jgraph.strategies.base import summary
from jgraph.strategies.data_parallel import DataParallel
from jgraph.strategies.objective import Objective, Tree


@dataclass(frozen=True, eq=False)
class Replicated:
    """Replicates all parameters and shards the batch over the devices, as PyTorch's DDP does. A `strategy` of `train_step`.

    Attributes:
        mesh: A mesh with the axis `data`; None for one device.
        shapes: The parameters, arrays or `jax.ShapeDtypeStruct`s in the model's own tree.
    """

    mesh: Mesh | None
    shapes: Tree

    def __repr__(self) -> str:
        return f"Replicated({summary(self.mesh, self.shapes)})"

    def __post_init__(self):
        if self.mesh is not None:
            object.__setattr__(self, "mesh", checked(self.mesh, needs=(Axis.DATA,), allows=()))

    def bind(self, objective: Objective) -> DataParallel:
        """Binds the strategy without sharding any parameter."""
        return DataParallel.of(self.mesh, self.shapes, objective)
