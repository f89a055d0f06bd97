"""Defines example stages for the tests of `split_backward`."""

# B batch, T sequence, D model, F hidden

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jgraph.kernels.grouped import grouped_dot
from jgraph_models.gpt import GPT, Block, GPTConfig
from jgraph_models.rotary import rotary

B, T, D, F, V, LAYERS = 2, 16, 32, 64, 40, 3


@dataclass(frozen=True)
class Stage:
    """A stage, its arguments, and the number of parameter leaves that are delayed by default."""

    run: Callable[..., Any]
    params: Any
    x: Any
    extra: tuple[Any, ...] = ()
    delayed: int | None = None


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    # NumPy compiles nothing. This runs at import, in every process that collects tests.
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def hidden(seed: int = 1) -> jax.Array:
    return normal(seed, B, T, D)


def mlp_params(*lead: int) -> dict[str, jax.Array]:
    return {
        "up": normal(2, *lead, D, F, scale=D**-0.5),
        "down": normal(3, *lead, F, D, scale=F**-0.5),
        "bias": normal(4, *lead, D),
    }


def mlp(p, x):
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"] + p["bias"]


def layer(i):
    return partial(jax.tree.map, lambda a: a[i])


def config(**fields: Any) -> GPTConfig:
    sizes = {"num_layers": LAYERS, "d_model": D, "num_heads": 4, "num_kv_heads": 4, "d_ff": F, "vocab_size": V}
    return GPTConfig(**(sizes | {"compute_dtype": "float32"} | fields))


def of_module(module: nnx.Module, call: Callable[..., Any] | None = None, **fields: Any) -> Stage:
    graph, params = nnx.split(module)
    call = call or (lambda module, x: module(x))
    return Stage(lambda p, x: call(nnx.merge(graph, p), x), params, hidden(), **fields)


def gpt_block(**fields: Any) -> Stage:
    settings = config(**fields)
    table = rotary(T, settings.head_size, settings.rope_theta)
    return of_module(Block(settings, rngs=nnx.Rngs(0)), lambda block, x: block(x, table), delayed=4)


def grouped_attention() -> Stage:
    params = {"q": normal(2, D, 4, 8), "kv": normal(3, D, 2, 2, 8), "o": normal(4, 4, 8, D)}

    def run(p, x):
        q = jnp.einsum("btd,dhk->bthk", x, p["q"])
        k, v = jnp.einsum("btd,dcgk->cbtgk", x, p["kv"])
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return jnp.einsum("bthk,hkd->btd", y, p["o"])

    return Stage(run, params, hidden(), delayed=3)


def experts() -> Stage:
    params = {"router": normal(1, D, 3), "up": normal(2, 3, D, F, scale=0.2), "down": normal(3, 3, F, D, scale=0.2)}

    def run(p, x):
        tokens = x.reshape(-1, D)
        scores = jax.nn.softmax(tokens @ p["router"])
        chosen = jnp.argmax(scores, -1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=3).astype(jnp.int32)
        hidden = jax.nn.gelu(jax.lax.ragged_dot(tokens[order], p["up"], sizes))
        out = jax.lax.ragged_dot(hidden, p["down"], sizes)
        back = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
        return x + (back * scores.max(-1, keepdims=True)).reshape(x.shape)

    return Stage(run, params, hidden(), delayed=3)


def grouped_params(*lead: int, seed: int = 0, width: int = D) -> dict[str, jax.Array]:
    shapes = {"router": (width, 3), "up": (3, width, 2 * F), "down": (3, F, width)}
    return {name: normal(seed + i, *lead, *shape, scale=D**-0.5) for i, (name, shape) in enumerate(shapes.items())}


def grouped_mlp(p, x):
    """Routes each token to two of three SwiGLU experts, with grouped matmuls."""
    tokens = x.reshape(-1, x.shape[-1])
    weights, chosen = jax.lax.top_k(jax.nn.softmax(tokens @ p["router"]), 2)
    order = jnp.argsort(chosen.ravel())
    sizes = jnp.bincount(chosen.ravel(), length=3).astype(jnp.int32)
    gate, up = jnp.split(grouped_dot(tokens[order // 2], p["up"], sizes), 2, axis=-1)
    out = grouped_dot(jax.nn.silu(gate) * up, p["down"], sizes)
    back = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(-1, 2, x.shape[-1])
    return x + jnp.sum(back * weights[..., None], 1).reshape(x.shape)


def grouped(transform: Callable[..., Any] = lambda fn: fn) -> Stage:
    return Stage(transform(grouped_mlp), grouped_params(), hidden(), delayed=3)


def grouped_scan() -> Stage:
    def run(p, x):
        return jax.lax.scan(lambda x, p: (grouped_mlp(p, x), None), x, p)[0]

    return Stage(run, grouped_params(2), hidden(), delayed=3)


def dropout() -> Stage:
    def run(p, x, key):
        h = jax.nn.gelu(x @ p["up"])
        return x + jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0) @ p["down"]

    params = mlp_params()
    return Stage(run, {name: params[name] for name in ("up", "down")}, hidden(), (jax.random.key(5),), delayed=2)


def tied() -> Stage:
    def run(p, x, tokens):
        return mlp(p["mlp"], x + p["table"][tokens]) @ p["table"].T

    tokens = jax.random.randint(jax.random.key(7), (B, T), 0, V)
    return Stage(run, {"mlp": mlp_params(), "table": normal(6, V, D)}, hidden(), (tokens,), delayed=2)


def scanned(checkpoint: Callable[..., Any] | None = None) -> Stage:
    body = mlp if checkpoint is None else checkpoint(mlp)
    return Stage(lambda p, x: jax.lax.scan(lambda x, p: (body(p, x), None), x, p)[0], mlp_params(LAYERS), hidden(), delayed=2)


def scanned_nnx() -> Stage:
    settings = config(scan_layers=True)
    table = rotary(T, settings.head_size, settings.rope_theta)

    def call(model, x):
        step = nnx.scan(lambda x, block: block(x, table), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return step(x, model.blocks)

    return of_module(GPT(settings, rngs=nnx.Rngs(0)), call, delayed=4)


def shared_function(transform: Callable[..., Any]) -> Stage:
    """Two layers that call one function; jax traces it once."""
    body = transform(mlp)
    return Stage(lambda p, x: body(layer(1)(p), body(layer(0)(p), x)), mlp_params(2), hidden(), delayed=2)


def linen() -> Stage:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            heads = nn.DenseGeneral((4, 8))(nn.LayerNorm()(x))
            return x + nn.Dense(D)(nn.relu(heads).reshape(*x.shape[:-1], 32))

    params = Model().init(jax.random.key(0), hidden())
    return Stage(Model().apply, params, hidden(), delayed=2)


def attention_nnx() -> Stage:
    module = nnx.MultiHeadAttention(4, D, decode=False, rngs=nnx.Rngs(0))
    return of_module(module, delayed=4)


def einsum_nnx() -> Stage:
    return of_module(nnx.Einsum("btd,dhk->bthk", (D, 4, 8), (4, 8), rngs=nnx.Rngs(0)), delayed=1)


def convolution() -> Stage:
    return of_module(nnx.Conv(D, D, (3,), rngs=nnx.Rngs(0)), delayed=1)


def twice() -> Stage:
    return Stage(lambda p, x: mlp(p, mlp(p, x) * 0.5), mlp_params(), hidden(), delayed=2)


def trees() -> Stage:
    def run(p, x, mask):
        left, right = x["left"] @ p["w"][0], x["right"] @ p["w"][1]
        return {"sum": (left + right) * mask, "left": jnp.tanh(left), "count": mask.astype(jnp.int32)}

    x = {"left": hidden(1), "right": hidden(2)}
    params = {"w": [normal(3, D, F), normal(4, D, F)], "step": jnp.int32(3), "unused": normal(5, 2)}
    return Stage(run, params, x, (jnp.ones((T, 1)),), delayed=2)


def weight_on_the_left() -> Stage:
    return Stage(lambda p, x: jnp.einsum("fd,btd->bft", p["w"], x), {"w": normal(2, F, D)}, hidden(), delayed=1)


def weight_in_pieces() -> Stage:
    """A weight that is reshaped, sliced and transposed before its matmuls."""

    def run(p, x):
        w = p["w"].reshape(D, 2, F)
        first, second = w[:, 0], w[:, 1].T
        return jnp.einsum("btf,fd->btd", jnp.tanh(x @ first), second)

    return Stage(run, {"w": normal(2, D * 2 * F, scale=0.2)}, hidden(), delayed=1)


def normalized_weight() -> Stage:
    """A normalized weight; its gradient passes through the norm."""

    def run(p, x):
        return x @ (p["w"] / jnp.linalg.norm(p["w"], axis=0))

    return Stage(run, {"w": normal(2, D, F)}, hidden(), delayed=1)


def mapped() -> Stage:
    def run(p, x):
        return jax.vmap(lambda x: mlp(p, x))(x)

    return Stage(run, mlp_params(), hidden(), delayed=2)


def branching() -> Stage:
    """A matmul in a branch is not delayed; a matmul outside is."""

    def run(p, x):
        x = jax.lax.cond(x[0, 0, 0] > 0, lambda x: x @ p["w"], lambda x: x * 2, x)
        return x @ p["v"]

    return Stage(run, {"w": normal(2, D, D), "v": normal(3, D, D)}, hidden(), delayed=1)


STAGES: dict[str, Callable[[], Stage]] = {
    "mlp": lambda: Stage(mlp, mlp_params(), hidden(), delayed=2),
    "gpt block": gpt_block,
    "gpt block, swiglu": lambda: gpt_block(mlp="swiglu", num_kv_heads=2),
    "grouped attention": grouped_attention,
    "experts": experts,
    "grouped experts": grouped,
    "grouped experts, checkpoint": lambda: grouped(jax.checkpoint),
    "grouped experts, scan": grouped_scan,
    "dropout": dropout,
    "tied embedding": tied,
    "scan": scanned,
    "scan of checkpoints": lambda: scanned(jax.checkpoint),
    "nnx.scan": scanned_nnx,
    "checkpoint": lambda: Stage(jax.checkpoint(mlp), mlp_params(), hidden(), delayed=2),
    "checkpoint that keeps products": lambda: Stage(
        jax.checkpoint(mlp, policy=jax.checkpoint_policies.dots_saveable), mlp_params(), hidden(), delayed=2
    ),
    "one checkpoint for two layers": lambda: shared_function(jax.checkpoint),
    "one jit for two layers": lambda: shared_function(jax.jit),
    "linen": linen,
    "nnx.MultiHeadAttention": attention_nnx,
    "nnx.Einsum": einsum_nnx,
    "nnx.Conv": convolution,
    "weight used twice": twice,
    "trees": trees,
    "weight on the left": weight_on_the_left,
    "weight in pieces": weight_in_pieces,
    "normalized weight": normalized_weight,
    "vmap": mapped,
    "cond": branching,
}


def gradients_by_vjp(stage: Stage, dy: Any) -> tuple[Any, Any]:
    """Returns the gradients of params and x by a jitted `jax.vjp`."""

    def run(params, x, dy):
        return jax.vjp(lambda p, x: stage.run(p, x, *stage.extra), params, x)[1](dy)

    return jax.jit(run)(stage.params, stage.x, dy)


def gradient_like(y: Any) -> Any:
    """Returns a random dy, float0 for integer leaves."""
    leaves, tree = jax.tree.flatten(y)
    drawn = [
        normal(100 + i, *leaf.shape).astype(leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else jnp.zeros(leaf.shape, jax.dtypes.float0)
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(tree, drawn)
