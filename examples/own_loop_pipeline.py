"""A custom training loop with a pipeline: a model in three functions, and a zero-bubble schedule that delays weight gradients.

JAX_NUM_CPU_DEVICES=4 python examples/own_loop_pipeline.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jgraph
from jgraph.schedule import generate

LAYERS, WIDTH, MICROBATCHES = 8, 32, 8


def make_params():
    keys = jax.random.split(jax.random.key(0), LAYERS + 1)
    layers = [{"kernel": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5} for key in keys[:-1]]
    return {"embed": jax.random.normal(keys[-1], (2, WIDTH)), "layers": layers, "head": jnp.zeros((WIDTH, 1))}


def embed(outer, batch):
    return batch["x"] @ outer["embed"]


def layer(params, x):
    return x + 0.3 * jax.nn.gelu(x @ params["kernel"])


def head(outer, x, batch):
    return jnp.mean((x @ outer["head"] - batch["y"]) ** 2)


def split(params):
    """Returns the parameters of embedding and head, and a list with the parameters of each layer."""
    return {"embed": params["embed"], "head": params["head"]}, params["layers"]


def join(outer, layers):
    return outer | {"layers": layers}


ranks = min(4, jax.device_count())
mesh = jax.make_mesh((ranks,), ("pipe",), devices=jax.devices()[:ranks])
model = jgraph.PipelineModel(embed, layer, head, split=split, join=join)
schedule = generate("zb-h1", pp=ranks, microbatches=MICROBATCHES)
strategy = jgraph.Pipelined(mesh, jax.eval_shape(make_params), schedule)
step = jgraph.train_step(model, optax.adam(3e-3), strategy, num_microbatches=MICROBATCHES)
rng = np.random.default_rng(0)


def batch():
    x = rng.standard_normal((256, 2), np.float32)
    return {"x": x, "y": x[:, :1] * x[:, 1:]}


run, state = step.compile(batch()), step.init(make_params)
print(step, schedule.name, f"{schedule.num_ticks} ticks")
for i in range(101):
    state, metrics = run(state, step.place(batch()))
    if i % 25 == 0:
        print(f"step {i}: loss {float(metrics.loss):.4f}")
