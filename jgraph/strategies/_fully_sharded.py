"""Data parallelism with parameters, gradients and optimizer state sharded over the axis `fsdp`."""

from dataclasses import dataclass
from typing import get_args

from jax.sharding import Mesh

from jgraph.errors import check_choice
from jgraph.mesh import Axis, checked
from jgraph.strategies._data_parallel import DataParallel
from jgraph.strategies.base import summary
from jgraph.strategies.objective import Objective
from jgraph.strategies.sharding import FSDPChoices, GatherPer
from jgraph.types import Params


@dataclass(frozen=True, eq=False)
class FullySharded(FSDPChoices):
    """Shards every parameter and the batch over the devices, as PyTorch's `fully_shard` does (ZeRO stage 3).

    A `strategy` of `train_step`.

    Attributes:
        mesh: A mesh with the axis `fsdp`; may also have the axes `data` and `context`, over which parameters are replicated,
            and `tensor`. With several devices on `tensor`, wrap the strategy in `TensorParallel`.
        shapes: The parameters, floating arrays or `jax.ShapeDtypeStruct`s in the model's own tree. Only shapes and dtypes are
            read.
        gather_per: How often parameters are gathered. Once per `step`, they stay gathered for all microbatches. Once per
            `pass`, every microbatch gathers them for its forward pass and again for its backward pass, which needs less memory;
            weights in FP8 stay gathered. Gradients are summed over the devices in every microbatch.
        shard_rules: Rules `PATTERN=AXIS`, with a shell pattern of parameter names and the index of an axis. A matching
            parameter is sharded along this axis. Other parameters are sharded by `annotations`, or else along their first axis
            that the number of devices divides, or else along their longest axis, padded with zeros.
        annotations: PartitionSpecs by the name of a parameter, None for no annotation: Flax's partition names, from
            `functional(...).annotations`. The axis with the name `fsdp` is sharded. `TensorParallel` reads the name `tensor`.
        compute_dtype: Matrices other than those of routers are cast to this floating dtype before they are gathered. None does
            not cast.
        experts: Number of devices that the experts of `jgraph.MoE` are sharded over for the computation, a divisor of the size
            of `fsdp`. Tokens are sent to the devices of their experts. 1 computes all experts on every device.
        shards: Shard `everything`, or only `experts` and replicate other parameters.

    Raises:
        ConfigError: If `mesh` lacks the axis `fsdp` or has other axes, `experts` is not a positive integer, `compute_dtype` is
            not floating, or `gather_per` or `shards` is unknown.

    Examples:
        >>> mesh, shapes = jax.make_mesh((1,), ("fsdp",)), {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
        >>> jgraph.FullySharded(mesh, shapes, shard_rules=("w=1",))
        FullySharded(fsdp=1, 32 parameters)
    """

    mesh: Mesh
    shapes: Params
    gather_per: GatherPer = "step"

    def __repr__(self) -> str:
        gathered = "" if self.gather_per == "step" else f", gathered per {self.gather_per}"
        experts = f", experts={self.experts}" if self.experts > 1 else ""
        return f"FullySharded({summary(self.mesh, self.shapes)}{gathered}{experts})"

    def __post_init__(self):
        object.__setattr__(self, "mesh", checked(self.mesh, needs=(Axis.FSDP,), allows=(Axis.DATA, Axis.CONTEXT, Axis.TENSOR)))
        check_choice("gather_per", self.gather_per, get_args(GatherPer))
        super().__post_init__()

    def bind(self, objective: Objective) -> DataParallel:
        """Binds the strategy to a loss, and chooses the sharded axis of every parameter.

        Raises:
            ConfigError: If a rule or an annotation does not fit the parameters, the devices cannot share the experts, the loss
                is not a function, the mesh has several devices on `tensor` and no parameter is split over them, or `fp8` is set
                and the loss has no matmul that can be in FP8.
            ShapeError: If `fp8` is set, and microbatches and data ranks cannot share the rows of `batch` in the objective.
        """
        return DataParallel.bind(self.mesh, objective, self, gather_per=self.gather_per)
