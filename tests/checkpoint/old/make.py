"""The models, layouts and values of the stored checkpoints, and the script that made them. `MODEL.tar.xz` has all layouts.

Revision a67d4ea5 wrote the checkpoints, before parameters were laid out by `jgraph.layout`. To make them again:

    git worktree add OLD a67d4ea5
    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 PYTHONPATH=OLD:OLD/models python tests/checkpoint/old/make.py

No step is run. The canonical state has numbers that are chosen by hand, goes through `canonical.back` to the layout, and is
saved from there. All layouts of a model therefore save the same bits. `digests.json` has a digest of every leaf.
"""

# V vocabulary, D width, F hidden, E experts, B batch, T sequence

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

import jgraph
from jgraph import schedule

Tree: TypeAlias = Any

FOLDER = Path(__file__).parent
STEP = 7
B, T, V = 16, 4, 7
NUM_MICROBATCHES = 2
TOKENS = jax.ShapeDtypeStruct((B, T), jnp.int32)


@dataclass(frozen=True)
class Sizes:
    num_layers: int = 3
    D: int = 8
    F: int = 8
    E: int = 0


class Block(nnx.Module):
    """A layer. Two devices cannot share `mix` along an axis without padding. The columns of `up` are three parts."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        D, F = sizes.D, sizes.F
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.mix = nnx.Param(jnp.zeros((3, 5)))
        if sizes.E:
            self.mlp = jgraph.MoE(D, F, jgraph.MoEConfig(num_experts=sizes.E, router="sigmoid"), rngs=rngs)
        else:
            self.up = nnx.Linear(D, F, rngs=rngs)
            self.down = nnx.Linear(F, D, use_bias=False, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        h = self.norm(x) * (1 + jnp.sum(self.mix[...]))
        return x + (self.mlp(h) if hasattr(self, "mlp") else self.down(nnx.gelu(self.up(h))))


class Model(nnx.Module):
    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.embedding_VD = nnx.Param(jnp.zeros((V, sizes.D)))
        self.blocks = nnx.List([Block(sizes, rngs) for _ in range(sizes.num_layers)])
        self.norm = nnx.RMSNorm(sizes.D, rngs=rngs)
        self.head_DV = nnx.Param(jnp.zeros((sizes.D, V)))

    def loss(self, tokens: Array) -> Array:
        x = self.embedding_VD[...][tokens]
        for block in self.blocks:
            x = block(x)
        return mean_loss(self.norm(x) @ self.head_DV[...], tokens)


def mean_loss(logits: Array, tokens: Array) -> Array:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens))


def pipeline_model(sizes: Sizes, ranks: int) -> jgraph.PipelineModel:
    """Describes `Model` as a pipeline. The ranks share the embedding, whose odd number of rows is padded."""
    graph, _, state = nnx.split(nnx.eval_shape(lambda: Block(sizes, nnx.Rngs(0))), nnx.Param, ...)
    norm, _ = nnx.split(nnx.eval_shape(lambda: nnx.RMSNorm(sizes.D, rngs=nnx.Rngs(0))), nnx.Param)

    def layer(params: Tree, x: Array, *carried: Tree) -> Any:
        block = nnx.merge(graph, params, *carried or [state])
        x = block(x)
        return (x, nnx.to_pure_dict(nnx.state(block, nnx.Not(nnx.Param)))) if carried else x

    def split(params: Tree) -> tuple[Tree, list[Tree]]:
        outer = {name: leaf for name, leaf in params.items() if name != "blocks"}
        outer["embedding_VD"] = jnp.pad(outer["embedding_VD"], [(0, -V % ranks), (0, 0)])
        return outer, list(params["blocks"].values())

    def join(outer: Tree, layers: list[Tree]) -> Tree:
        return outer | {"embedding_VD": outer["embedding_VD"][:V], "blocks": dict(enumerate(layers))}

    return jgraph.PipelineModel(
        embed=lambda outer, tokens: jgraph.split_embedding(outer["embedding_VD"], tokens, jnp.float32),
        layer=layer,
        head=lambda outer, x, tokens: mean_loss(nnx.merge(norm, outer["norm"])(x) @ outer["head_DV"], tokens),
        sharded={"embedding_VD": 0},
        split=split,
        join=join,
        split_carried=lambda carried: list(carried["blocks"].values()),
        join_carried=lambda layers: {"blocks": dict(enumerate(layers))},
    )


RULES = {
    "*embedding_VD": jgraph.Split(axis=-2, uneven="replicate"),
    "*/up/*": jgraph.Split(axis=-1, parts=(4, 2, 2)),
    "*/down/kernel": jgraph.Split(axis=-2),
}


@dataclass(frozen=True)
class Layout:
    """Devices and choices of a step.

    Attributes:
        axes: Sizes of the mesh axes by name; empty for one device.
        choices: Arguments of the strategy.
        schedule: Name and chunks of a pipeline's schedule.
    """

    axes: Mapping[str, int] = field(default_factory=dict)
    choices: Mapping[str, Any] = field(default_factory=dict)
    schedule: tuple[str, int] = ("1f1b", 1)

    def strategy(self, shapes: Tree, rules: Mapping[str, Any]) -> Any:
        if not self.axes:
            return jgraph.Replicated(None, shapes)
        num_devices = int(np.prod(list(self.axes.values())))
        devices = np.array(jax.devices()[:num_devices]).reshape(tuple(self.axes.values()))
        mesh = jax.sharding.Mesh(devices, tuple(self.axes))
        if ranks := self.axes.get("pipe"):
            name, chunks = self.schedule
            order = schedule.generate(name, pp=ranks, microbatches=NUM_MICROBATCHES, chunks=chunks)
            strategy: Any = jgraph.Pipelined(mesh, shapes, order, **self.choices)
        elif "fsdp" in self.axes:
            strategy = jgraph.FullySharded(mesh, shapes, **self.choices)
        else:
            strategy = jgraph.Replicated(mesh, shapes)
        return jgraph.TensorParallel(strategy, rules) if "tensor" in self.axes else strategy


LAYOUTS = {
    "one": Layout(),
    "dp": Layout({"data": 2}),
    "fsdp": Layout({"fsdp": 2}),
    # Two devices cannot share 7 rows or 5 columns without padding.
    "fsdp_rules": Layout({"fsdp": 2}, {"shard_rules": ("embedding_VD=0", "*mix=1")}),
    "tp": Layout({"data": 1, "tensor": 2}),
    "fsdp_tp": Layout({"fsdp": 2, "tensor": 2}),
    "cp": Layout({"data": 1, "context": 2}),
    "pp": Layout({"pipe": 2}),
    "pp_chunks": Layout({"pipe": 2}, schedule=("zb-v", 2)),
    "pp_fsdp": Layout({"pipe": 2, "fsdp": 2}),
    "pp_tp": Layout({"pipe": 2, "tensor": 2}),
    "ep": Layout({"fsdp": 2}, {"experts": 2}),
    "ep_fsdp": Layout({"fsdp": 4}, {"experts": 2}),
    "ep_only": Layout({"fsdp": 2}, {"experts": 2, "shards": "experts"}),
    "pp_ep": Layout({"pipe": 2, "fsdp": 2}, {"experts": 2}),
}


@dataclass(frozen=True, eq=False)
class Case:
    """A model with its optimizer, and the layouts that save it.

    `moments` has the fields of the optimizer's first state that are laid out like the parameters.
    """

    layouts: tuple[str, ...]
    transform: Any
    sizes: Sizes = Sizes()
    moments: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    rank: int = 0
    fp8: jgraph.FP8Config | None = None

    @cached_property
    def model(self) -> Any:
        """The model as pure functions, with adapters if there is a rank."""
        model = jgraph.functional(lambda: Model(self.sizes, nnx.Rngs(0)))
        return jgraph.lora(model, TOKENS, rank=self.rank, rules=RULES) if self.rank else model

    def step(self, layout: str) -> Any:
        """Returns the training step of a layout."""
        model, is_adapted = self.model, self.rank > 0
        loss: Any = mean_loss_of(model)
        if ranks := LAYOUTS[layout].axes.get("pipe"):
            loss = pipeline_model(self.sizes, ranks)
            loss = model.pipeline(loss) if is_adapted else loss
        rules = model.tensor_rules(RULES) if is_adapted else RULES
        frozen = {"freeze": model.frozen, "frozen_dtype": jnp.bfloat16} if is_adapted else {"freeze": self.freeze}
        carried = {"carried": model.carried, "reductions": model.reductions} if model.carried else {}
        return jgraph.train_step(
            loss,
            self.transform,
            LAYOUTS[layout].strategy(model.shapes, rules),
            num_microbatches=NUM_MICROBATCHES,
            fp8=self.fp8,
            batch=TOKENS,
            **frozen,
            **carried,
        )


def mean_loss_of(model: Any) -> Callable[..., Any]:
    def loss(params: Tree, tokens: Array, key: Array, carried: Tree = None) -> Any:
        value, after = model.loss(params, tokens, key, carried)
        return jgraph.Loss(value, carried=after) if after else value

    return loss


def elementwise(make: Callable[..., Any]) -> Any:
    return jgraph.elementwise(lambda matrices: make(1e-3, mask=matrices))


ADAMW, LION, SGD = elementwise(optax.adamw), elementwise(optax.lion), jgraph.elementwise(optax.sgd(0.1))
CASES = {
    "dense": Case(("one", "dp", "fsdp", "fsdp_rules", "tp", "fsdp_tp", "cp", "pp", "pp_fsdp", "pp_tp"), LION, moments=("mu",)),
    # Four stages of five layers.
    "chunks": Case(("one", "pp", "pp_chunks"), SGD, Sizes(num_layers=5)),
    # A pipeline of two ranks stacks the frozen layer 0 and the trained layer 2.
    "frozen": Case(
        ("one", "fsdp", "tp", "pp", "pp_fsdp", "pp_tp"),
        ADAMW,
        moments=("mu", "nu"),
        freeze=("embedding_VD", "blocks/0/*", "*/mix"),
    ),
    "lora": Case(("one", "fsdp", "tp", "pp", "pp_tp"), ADAMW, moments=("mu", "nu"), rank=2),
    "fp8": Case(("one", "fsdp", "tp", "pp"), SGD, Sizes(D=16, F=16), fp8=jgraph.FP8Config(recipe="delayed", history=2)),
    "experts": Case(
        ("one", "tp", "pp", "ep", "ep_fsdp", "ep_only", "pp_ep"),
        LION,
        Sizes(num_layers=2, F=4, E=4),
        moments=("mu",),
    ),
    "adafactor": Case(("one", "fsdp_rules", "tp", "pp"), optax.adafactor(1e-3, min_dim_size_to_factor=4)),
    "muon": Case(("one", "fsdp", "tp", "pp_fsdp"), optax.contrib.muon(1e-3), freeze=("blocks/0/*",)),
}


def values(shapes: Tree) -> Tree:
    """Returns arrays for a canonical state. The elements count through the state, so a test detects any exchange of elements.

    The numbers are normal and not negative zeros: a pipeline adds zeros to some arrays when it unpacks them on several devices.
    """
    start = 0

    def of(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        nonlocal start
        count = start + 1 + np.arange(leaf.size).reshape(leaf.shape)
        start += leaf.size
        if leaf.dtype == jnp.bfloat16:
            smallest, infinity = 0x80, 0x7F80  # as bits
            return (smallest + count % (infinity - smallest)).astype(np.uint16).view(leaf.dtype)
        return count.astype(leaf.dtype)

    return jax.tree.map(of, shapes)


def digests(state: Tree) -> dict[str, str]:
    """Returns the dtype, the shape and a digest of the bytes of each leaf, by its path."""

    def of(leaf: Any) -> str:
        array = np.asarray(leaf)
        return f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"

    return {jax.tree_util.keystr(path): of(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def save(case: Case, layout: str, directory: Path) -> dict[str, str]:
    """Saves the checkpoint of a case on a layout. Returns the digests of its leaves."""
    canonical = case.step(layout).canonical
    state = canonical.of(canonical.back(values(canonical.shapes())))
    checkpoints = jgraph.Checkpoints(directory, keep=1)
    checkpoints.save(STEP, state)
    checkpoints.close()
    # Orbax copies the arrays from this database to that of all processes, and does not read it again.
    shutil.rmtree(directory / str(STEP) / "state" / "ocdbt.process_0")
    return digests(state)


def main() -> None:
    found: dict[str, dict[str, str]] = {}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            for layout in case.layouts:
                saved = save(case, layout, Path(directory) / layout)
                if found.setdefault(name, saved) != saved:
                    differing = [leaf for leaf in saved if saved[leaf] != found[name].get(leaf)]
                    raise AssertionError(f"{name} on {layout} saves another state: {differing}")
            # One archive for all layouts of a model, because most of their bytes are the same.
            archive = shutil.make_archive(str(FOLDER / name), "xztar", directory)
        print(name, *case.layouts, Path(archive).stat().st_size, "bytes")
    (FOLDER / "digests.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
