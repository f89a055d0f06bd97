"""What pipelines train: layers x + gelu(x @ a) @ b, and GPT. `peers/pipelining.py` has both in torch, and `torchs` asks it."""

# L layers, M microbatches, B batch, S sequence and one more, N tokens, D model, F hidden

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.runner import Options, missing
from benchmarks.turns import Entrant
from jgraph.parallel.pipeline import PipelineModel
from jgraph.schedule import Schedule, generate
from jgraph.training.config import ModelConfig, TrainConfig
from jgraph.training.metrics import flops_per_step
from jgraph.training.presets import preset
from models.gpt import GPT, pipeline_parts


@dataclass(frozen=True)
class MLPSize:
    d_model: int
    d_ff: int
    tokens: int
    layers: int
    microbatches: int

    @property
    def flops(self) -> float:
        """Of a step: two products a layer, each with two more in the backward; 2 FLOPs a multiplication."""
        return 12.0 * self.tokens * self.d_model * self.d_ff * self.layers * self.microbatches


@dataclass(frozen=True)
class GPTSize:
    """`batch` sequences of `length` a microbatch."""

    model: ModelConfig
    batch: int
    length: int
    microbatches: int

    @property
    def layers(self) -> int:
        return self.model.num_layers

    @property
    def flops(self) -> float:
        """Of a step."""
        sequences = self.batch * self.microbatches
        return flops_per_step(TrainConfig(model=self.model, batch_size=sequences, seq_len=self.length))


Size: TypeAlias = MLPSize | GPTSize


def size_from(fields: dict[str, Any]) -> Size:
    """Inverse of `dataclasses.asdict`, through JSON."""
    if "model" not in fields:
        return MLPSize(**fields)
    rest = {name: value for name, value in fields.items() if name != "model"}
    return GPTSize(ModelConfig(**fields["model"]), **rest)


def sizes_of(name: str, ranks: int) -> dict[str, Size]:
    """The works of a name in `SIZES`, for so many ranks."""
    return {
        work: replace(size, layers=size.layers * ranks) if isinstance(size, MLPSize) else size
        for work, size in SIZES[name].items()
    }


_TINY = ModelConfig(num_layers=8, d_model=32, num_heads=2, num_kv_heads=2, d_ff=64, vocab_size=96, compute_dtype="float32")

# Layers of an MLP are those of a rank.
SIZES: dict[str, dict[str, Size]] = {
    "full": {
        "mlp-large": MLPSize(4096, 16384, 4096, layers=4, microbatches=16),
        "mlp-launch-bound": MLPSize(1024, 4096, 512, layers=4, microbatches=16),
        "gpt-1b3": GPTSize(preset("gpt-1b3").model, batch=4, length=2048, microbatches=16),
        "gpt-7b": GPTSize(preset("gpt-7b").model, batch=1, length=2048, microbatches=16),
    },
    "tiny": {
        "mlp-large": MLPSize(64, 128, 32, layers=4, microbatches=8),
        "mlp-launch-bound": MLPSize(32, 64, 16, layers=4, microbatches=8),
        "gpt-1b3": GPTSize(_TINY, batch=1, length=16, microbatches=8),
        "gpt-7b": GPTSize(_TINY, batch=1, length=16, microbatches=8),
    },
}


def schedule_of(text: str, ranks: int, microbatches: int) -> Schedule:
    """By a name of `jgraph.schedule`, with chunks a rank after a colon: `aligned:2`."""
    name, _, chunks = text.partition(":")
    return generate(name, pp=ranks, microbatches=microbatches, chunks=int(chunks or 1))


def torchs(peer: str, size: Size, ranks: int, options: Options) -> Entrant:
    """A schedule of torch.distributed.pipelining, `:compile` for torch.compile."""
    schedule, _, variant = peer.partition(":")
    return Entrant(
        {"system": "torch", "schedule": schedule, "variant": variant},
        "benchmarks.peers.pipelining",
        {"schedule": schedule, "compile": variant == "compile", "size": asdict(size)},
        ranks=ranks,
        missing=missing(ranks, options),
    )


@dataclass(frozen=True)
class Model:
    """A model in parts with its parameters, and a batch.

    Attributes:
        parts, ends, layers: as `jgraph.parallel.pipeline.Pipeline` takes them.
        inputs: of all microbatches.
        x: shape and dtype of what passes between layers.
        compute_dtype: as `Pipeline`'s.
    """

    parts: PipelineModel
    ends: Any
    layers: list[Any]
    inputs: Any
    x: jax.ShapeDtypeStruct
    compute_dtype: Any

    @classmethod
    def of(cls, size: Size, ranks: int) -> "Model":
        return _gpt(size, ranks) if isinstance(size, GPTSize) else _mlp(size)

    def cast(self, tree: Any) -> Any:
        """Parameters as layers and head read them."""
        return jax.tree.map(lambda p: p.astype(self.compute_dtype) if self.compute_dtype and p.ndim > 1 else p, tree)


# MLP


def mlp_layer(params: tuple[jax.Array, jax.Array], x_ND: jax.Array) -> jax.Array:
    a_DF, b_FD = params
    return x_ND + jax.nn.gelu(x_ND @ a_DF, approximate=True) @ b_FD


def half_square(y_ND: jax.Array) -> jax.Array:
    return 0.5e-3 * jnp.sum(jnp.square(y_ND.astype(jnp.float32)))


def mlp_layers(size: MLPSize) -> list[Any]:
    """Parameters in bfloat16, uniform as torch's nn.Linear."""

    @jax.jit
    def layer(key):
        shapes = (size.d_model, size.d_ff), (size.d_ff, size.d_model)
        keys = jax.random.split(key)
        return tuple(
            jax.random.uniform(k, shape, jnp.bfloat16, -(shape[0] ** -0.5), shape[0] ** -0.5)
            for k, shape in zip(keys, shapes, strict=True)
        )

    return [layer(key) for key in jax.random.split(jax.random.key(0), size.layers)]


def _mlp(size: MLPSize) -> Model:
    """Nothing but layers: no embedding, a loss of a pass."""
    parts = PipelineModel(lambda ends, x: x, mlp_layer, lambda ends, y, x: half_square(y))
    shape = size.tokens, size.d_model
    inputs = jax.random.normal(jax.random.key(1), (size.microbatches, *shape), jnp.bfloat16)
    return Model(parts, {}, mlp_layers(size), inputs, jax.ShapeDtypeStruct(shape, jnp.bfloat16), None)


# GPT


def _gpt(size: GPTSize, ranks: int) -> Model:
    """Embedding, head and cross-entropy included."""
    config = size.model
    parts = pipeline_parts(config, ranks)
    make: Callable[[], Any] = jax.jit(lambda: nnx.to_pure_dict(nnx.state(GPT(config, rngs=nnx.Rngs(0)), nnx.Param)))
    ends, layers = parts.split(make())
    shape = size.microbatches, size.batch, size.length + 1
    tokens_MBS = jax.random.randint(jax.random.key(1), shape, 0, config.vocab_size)
    dtype = jnp.dtype(config.compute_dtype)
    return Model(parts, ends, layers, tokens_MBS, jax.ShapeDtypeStruct((size.batch, size.length, config.d_model), dtype), dtype)
