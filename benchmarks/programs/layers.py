"""Times the forward and backward of the layers of a model, without embedding, head and optimizer.

Weights and gradients are bfloat16, except those of routers, which are float32.
"""

# B batch, T sequence, D model

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.peers.protocol import answer, read_request, take_turns
from benchmarks.programs.step import compiled_bytes, first_devices, make_stepper
from benchmarks.rows import Row
from jgraph.train.config import TrainConfig
from jgraph.train.metrics import peak_memory_bytes
from jgraph.tree import is_router, path_name
from jgraph.xla import compile_and_report, compiler_options
from jgraph_models.gpt import Block, GPTConfig, norm_kernel, rotary_of

Tree = Any


def layers(config: GPTConfig, length: int) -> tuple[Any, Tree]:
    """Returns the layers as a function of parameters and residual stream, and their parameters."""
    dtype, kernel = jnp.dtype(config.compute_dtype), norm_kernel(config)

    def make() -> Any:
        return nnx.List([Block(config, rngs=nnx.Rngs(i)) for i in range(config.num_layers)])

    graph = nnx.split(nnx.eval_shape(make), nnx.Param, ...)[0]

    @jax.jit
    def init() -> tuple[Tree, Tree]:
        _, params, carried = nnx.split(make(), nnx.Param, ...)
        params = jax.tree_util.tree_map_with_path(cast, nnx.to_pure_dict(params))
        return params, nnx.to_pure_dict(carried)

    def cast(path: Any, leaf: jax.Array) -> jax.Array:
        return leaf if is_router(path_name(path)) else leaf.astype(dtype)

    params, carried = init()
    table = rotary_of(config, length)

    def call(params: Tree, x_BTD: jax.Array) -> jax.Array:
        add_BTD: Any = None
        for block in nnx.merge(graph, params, carried):
            x_BTD, add_BTD = block.parts(x_BTD, add_BTD, table, None, kernel)
        return x_BTD + add_BTD

    return call, params


def time_layers(request: Row) -> None:
    """Entry point of the candidate process."""
    config = TrainConfig.from_dict(request["config"])
    device, model = first_devices(1)[0], config.model
    call, params = layers(model, config.input.seq_len)
    shape = config.input.batch_size, config.input.seq_len, model.d_model
    x_BTD, dy_BTD = (jax.random.normal(jax.random.key(i), shape, jnp.dtype(model.compute_dtype)) for i in range(2))

    @jax.jit
    def backward(params: Tree, x_BTD: jax.Array, dy_BTD: jax.Array) -> Tree:
        return jax.vjp(call, params, x_BTD)[1](dy_BTD)

    options = compiler_options(config.compile.graph, config.compile.xla_options, platform=device.platform)
    compiled, capture = compile_and_report(backward.lower(params, x_BTD, dy_BTD), options)
    run, wait, _ = make_stepper(lambda: compiled(params, x_BTD, dy_BTD))
    run()
    wait()
    answer(device=device.device_kind, capture=str(capture) if capture else None, **compiled_bytes(compiled))
    take_turns(lambda timer: timer.back_to_back(run, wait))
    answer(peak_bytes=peak_memory_bytes(device))


if __name__ == "__main__":
    time_layers(read_request())
