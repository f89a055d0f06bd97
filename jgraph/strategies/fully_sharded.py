"""Data parallelism with parameters, gradients and optimizer state sharded over the axis `fsdp`."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from jgraph.mesh import Axis, checked
from jgraph.strategies.base import summary
from jgraph.strategies.data_parallel import DataParallel
from jgraph.strategies.objective import Objective, Tree
from jgraph.strategies.sharding import FSDPChoices, ShardSpec, chosen_axes, shard_specs


@dataclass(frozen=True, eq=False)
class FullySharded(FSDPChoices):
    """Shards every parameter and the batch over the devices, as PyTorch's `fully_shard` does (ZeRO stage 3).

    Attributes:
        mesh: A mesh with the axis `fsdp`; may also have the axis `data`.
        shapes: The parameters, arrays or `jax.ShapeDtypeStruct`s in the model's own tree.
        reshard_after_forward: Whether parameters are gathered a second time for the backward pass, instead of staying
            gathered. Weights in FP8 stay gathered.
        shard_rules: Rules `PATTERN=AXIS`. A parameter with a matching name is sharded along this axis. Other parameters are
            sharded by `annotations`, or else by their shapes.
        annotations: PartitionSpecs by the name of a parameter: Flax's partition names, from `functional(...).annotations`.
        compute_dtype: Matrices other than routers are cast to this dtype before they are gathered. None does not cast.
        experts: Number of devices that the experts of `jgraph.MoE` are sharded over, a divisor of the size of `fsdp`. Tokens
            are sent to the devices of their experts.
        shards: Shard `everything`, or only `experts` and replicate other parameters.

    Examples:
        >>> mesh, shapes = jax.make_mesh((1,), ("fsdp",)), {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
        >>> jgraph.FullySharded(mesh, shapes, shard_rules=("w=1",))
        FullySharded(fsdp=1, 32 parameters)
    """

    mesh: Mesh
    shapes: Tree
    reshard_after_forward: bool = False

    def __repr__(self) -> str:
        options = ", resharded after forward" * self.reshard_after_forward + f", experts={self.experts}" * (self.experts > 1)
        return f"FullySharded({summary(self.mesh, self.shapes)}{options})"

    def __post_init__(self):
        object.__setattr__(self, "mesh", checked(self.mesh, needs=(Axis.FSDP,), allows=(Axis.DATA,)))
        super().__post_init__()

    def bind(self, objective: Objective) -> DataParallel:
        """Chooses the sharded axis of every parameter. Raises ConfigError if a rule does not fit."""
        ranks = self.mesh.shape[Axis.FSDP]
        axes, experts = chosen_axes(self.shapes, ranks, self)

        def shard(arrays: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, ShardSpec]:
            expert_devices = dict.fromkeys(experts, self.experts)
            return shard_specs(arrays, ranks, axes | experts, experts=expert_devices, shards=self.shards)

        return DataParallel.of(
            self.mesh,
            self.shapes,
            objective,
            shard=shard,
            alone={*axes, *experts},
            compute_dtype=self.compute_dtype,
            reshard_after_forward=self.reshard_after_forward,
        )
