"""One replica of the pipeline: its schedule as an execution plan of graphed callables, on one device per rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from jgraph.autodiff.flops import product_flops
from jgraph.callables.plan import Call, ExecutionPlan, Loss, make_plan, play
from jgraph.callables.shaped import Shaped
from jgraph.device import peak_flops
from jgraph.pipeline.ends import End
from jgraph.pipeline.program import Pipeline
from jgraph.pipeline.stages import Stage, shard

Tree = Any

# Seconds of a stage's forward from which on the update of its command buffer, after arrays moved, is negligible. Then microbatches
# share executables: a few to compile instead of hundreds.
_LONG = 2e-4


@dataclass(frozen=True, eq=False)
class Replica:
    """Plays the schedule on one device per rank. One thread at a time.

    Attributes:
        devices: By rank.
        shards: By rank, the position of its device in the mesh.
        stages: In the order of the data.
        ends: Embedding and head.
        plan: The schedule, with the calls that gather parameters of the ends and split their gradients.
        batch: By microbatch, arrays of the beginning of a step that the loss reads.
    """

    devices: tuple[Any, ...]
    shards: tuple[int, ...]
    stages: tuple[Stage, ...]
    ends: tuple[End, End]
    plan: ExecutionPlan
    batch: list[list[int]]

    @classmethod
    def of(
        cls,
        pipeline: Pipeline,
        ends: tuple[End, End],
        stages: Sequence[Stage],
        begun: Tree,
        devices: Sequence[Any],
        options: Mapping[str, Any],
    ) -> Self:
        """Compiles everything for these devices.

        Args:
            pipeline: The model with its schedule.
            ends: Embedding and head.
            stages: In the order of the data.
            begun: Shapes of the arrays that a step begins with, over all ranks.
            devices: One for each rank.
            options: XLA's.
        """
        shaped = [replace(stage.shaped, device=devices[stage.rank]) for stage in stages]
        head, (microbatch, *_) = ends[1], begun["batch"]

        def loss(params: Tree, y: Array, batch: Tree) -> Array:
            return head(params, y, batch).astype(jnp.float32)

        homes = (("embedding", 0, 0, len(stages[0].names)), ("head", len(stages) - 1, len(stages), 0))
        calls = [_end_calls(pipeline, number, end, *home) for number, (end, home) in enumerate(zip(ends, homes, strict=True))]
        carrying = stages if jax.tree.leaves(pipeline.carried.layer) else ()
        plan = make_plan(
            shaped,
            pipeline.schedule,
            Loss.of(loss, shaped[-1].y, (jax.tree.map(shard, microbatch),), head.shapes),
            # All sums stay in the buffers of the step before.
            aliased=[(*one.early, *one.late) for one in shaped] + [tuple(range(len(head.reads)))],
            reuse=True,
            options=options,
            copies="shared" if _is_long(shaped[-1]) else "each",
            before=[before for before, _ in calls if before.outs],
            after=[*(after for _, after in calls), *(_reduction(pipeline, i, stage) for i, stage in enumerate(carrying))],
        )
        leaves, structure = jax.tree.flatten(begun)
        batch = [jax.tree.leaves(own) for own in structure.unflatten(range(len(leaves)))["batch"]]
        order = list(pipeline.mesh.devices.flat)
        return cls(tuple(devices), tuple(map(order.index, devices)), tuple(stages), ends, plan, batch)

    def play(self, begun: Sequence[Array | None], outer: Sequence[Array]) -> list[Any]:
        """Plays the schedule and returns its registers. Sums stay in their buffers.

        Args:
            begun: Leaves of the arrays that a step begins with, over all ranks; None for arrays that nothing reads.
            outer: Leaves of the parameters of embedding and head, over all ranks.
        """
        arrays: list[Any] = [*begun, *outer]
        sources = [*(stage.params for stage in self.stages), [len(begun) + i for i in self.ends[1].reads]]
        ranks = [stage.rank for stage in (*self.stages, self.stages[-1])]

        def local(source: int, rank: int) -> Array:
            return arrays[source].addressable_shards[self.shards[rank]].data

        def part(number: int, n: int, rank: int) -> Array:
            end, home = self.ends[number], ranks[-number]
            there = home if end.axes[n] is None else rank
            return jax.device_put(local(len(begun) + end.reads[n], there), self.devices[home])

        registers = self.plan.fill(
            {
                "params": lambda i, place: local(sources[i][place], ranks[i]),
                "extra": lambda i, m, place: local(self.stages[i].extra[m][place], ranks[i]),
                "loss": lambda m, place: local(self.batch[m][place], ranks[-1]),
                "part": part,
            }
        )
        play(self.plan, registers)
        return registers


def _end_calls(pipeline: Pipeline, number: int, end: End, word: str, index: int, i: int, first: int) -> tuple[Call, Call]:
    """Returns the calls that gather the parameters of embedding or head on its rank, and that split its gradients.

    Args:
        pipeline: The model with its schedule.
        number: 0 for the embedding, 1 for the head.
        end: Embedding or head.
        word: Its name.
        index: The stage on whose device it runs.
        i: The callable that reads its parameters: the first stage, or the loss.
        first: The first of these parameters.
    """
    ranks, parts = pipeline.schedule.num_ranks, end.parts(pipeline.schedule.num_ranks)
    structure = jax.tree.structure(parts)
    shapes = {("part", number, n, k): s for n, own in zip(end.made, parts, strict=True) for k, s in enumerate(own)}
    sums = [("sum", i, first + n) for n in range(len(end.reads))]
    losses = [("loss", m) for m in range(pipeline.schedule.num_microbatches)] * number

    def gather(arrays: list[Array]) -> list[Array]:
        return end.make(structure.unflatten(arrays))

    def split(arrays: list[Array]) -> list[Array]:
        dealt = [part for own in end.deal(arrays[: len(sums)], ranks) for part in own]
        return [*dealt, *[jnp.reshape(sum(arrays[len(sums) :]), 1)] * number]

    gather.__name__, split.__name__ = f"{word}_parameters", f"{word}_gradients"
    dealt = [("dealt", number, n, k) for n, axis in enumerate(end.axes) for k in range(1 if axis is None else ranks)]
    made = [("params", i, first + n) for n in end.made]
    return Call(gather, index, list(shapes), made, shapes), Call(
        split, index, [*sums, *losses], [*dealt, *[("total",)] * number]
    )


def _reduction(pipeline: Pipeline, i: int, stage: Stage) -> Call:
    """Returns the call that reduces the carried state of stage `i` over microbatches."""
    aux, count = stage.shaped.aux, pipeline.schedule.num_microbatches

    def reduce(arrays: list[Array]) -> list[Array]:
        trees = [aux.unflatten(arrays[m * len(aux) : (m + 1) * len(aux)]) for m in range(count)]
        return jax.tree.leaves(pipeline.carried.together(trees, pipeline.layout.layers_per_stage))

    reduce.__name__ = f"carried_{i}"
    names = [("aux", i, m, n) for m in range(count) for n in range(len(aux))]
    return Call(reduce, i, names, [("state", i, n) for n in range(len(aux))])


def _is_long(shaped: Shaped) -> bool:
    """True if a stage's forward takes so long that the update of a command buffer is negligible."""
    rate = peak_flops(shaped.device.device_kind)
    inputs = [*shaped.x.avals, *shaped.extra.avals]
    return rate is None or product_flops(shaped.forward, list(shaped.params.avals), inputs) / rate > _LONG
