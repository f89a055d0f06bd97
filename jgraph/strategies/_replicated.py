"""Data parallelism with all parameters on every device."""

from dataclasses import dataclass

from jax.sharding import Mesh

from jgraph.mesh import Axis, checked
from jgraph.strategies._data_parallel import DataParallel
from jgraph.strategies.base import summary
from jgraph.strategies.objective import Objective
from jgraph.types import Params


@dataclass(frozen=True, eq=False)
class Replicated:
    """Replicates all parameters and shards the batch over the devices, as PyTorch's DDP does. A `strategy` of `train_step`.

    Attributes:
        mesh: A mesh with the axis `data`; may also have the axes `context` and `tensor`. None for one device. With several
            devices on `tensor`, wrap the strategy in `TensorParallel`.
        shapes: The parameters, floating arrays or `jax.ShapeDtypeStruct`s in the model's own tree. Only shapes and dtypes are
            read.

    Raises:
        ConfigError: If `mesh` is not a mesh, or has other axes.
    """

    mesh: Mesh | None
    shapes: Params

    def __repr__(self) -> str:
        return f"Replicated({summary(self.mesh, self.shapes)})"

    def __post_init__(self):
        if self.mesh is not None:
            object.__setattr__(self, "mesh", checked(self.mesh, needs=(Axis.DATA,), allows=(Axis.CONTEXT, Axis.TENSOR)))

    def bind(self, objective: Objective) -> DataParallel:
        """Binds the strategy to a loss without sharding any parameter.

        Raises:
            ConfigError: If the loss is not a function, the mesh has several devices on `tensor` and no parameter is split over
                them, or `fp8` is set and the loss has no matmul that can be in FP8.
            ShapeError: If `fp8` is set, and microbatches and data ranks cannot share the rows of `batch` in the objective.
        """
        return DataParallel.bind(self.mesh, objective)
