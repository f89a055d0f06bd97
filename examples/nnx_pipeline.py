"""A pipeline of NNX layers: `nnx.split` and `nnx.merge` turn the layers of a Flax model into functions of their parameters.

JAX_NUM_CPU_DEVICES=4 python examples/nnx_pipeline.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jgraph
from jgraph.schedule import generate

LAYERS, WIDTH = 4, 32


class Block(nnx.Module):
    """A residual MLP. All layers of a pipeline have the same shapes."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    """The whole model, which also runs without a pipeline."""

    def __init__(self, rngs):
        self.embed, self.head = nnx.Linear(2, WIDTH, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def loss(self, batch):
        x = self.embed(batch["x"])
        for block in self.blocks:
            x = block(x)
        return jnp.mean((self.head(x) - batch["y"]) ** 2)


MODEL = jgraph.functional(lambda: Model(nnx.Rngs(0)))


def pipeline_model():
    model = nnx.eval_shape(lambda: Model(nnx.Rngs(0)))
    # Structures without arrays, which `nnx.merge` joins with the parameters of a module.
    embed, block, head = (nnx.split(module)[0] for module in (model.embed, model.blocks[0], model.head))
    return jgraph.PipelineModel(
        embed=lambda outer, batch: nnx.merge(embed, outer["embed"])(batch["x"]),
        layer=lambda params, x: nnx.merge(block, params)(x),
        head=lambda outer, x, batch: jnp.mean((nnx.merge(head, outer["head"])(x) - batch["y"]) ** 2),
        split=lambda params: ({name: params[name] for name in ("embed", "head")}, list(params["blocks"].values())),
        join=lambda outer, layers: outer | {"blocks": dict(enumerate(layers))},
    )


def batch_of(rng, rows=256):
    x = rng.standard_normal((rows, 2), np.float32)
    return {"x": x, "y": x[:, :1] * x[:, 1:]}


def train(steps, ranks, microbatches=4):
    mesh = jax.make_mesh((ranks,), ("pipe",), devices=jax.devices()[:ranks])
    strategy = jgraph.Pipelined(mesh, MODEL.shapes, generate("aligned", pp=ranks, microbatches=microbatches))
    step = jgraph.train_step(pipeline_model(), optax.adam(1e-3), strategy, num_microbatches=microbatches)
    batch = batch_of(np.random.default_rng(0))
    run, state = step.compile(batch), step.init(lambda: MODEL.init()[0])
    for i in range(steps):
        state, metrics = run(state, step.place(batch))
        if i % 20 == 0:
            print(f"step {i}: loss {metrics.loss:.4f}")
    return step.canonical.of(state).params


if __name__ == "__main__":
    params = train(101, ranks=min(4, jax.device_count()))
    print(f"held-out loss of the whole model {MODEL.evaluate('loss', params, {}, batch_of(np.random.default_rng(1))):.4f}")
