"""Plain JAX peer: a training step with Flax NNX, optax and `jax.jit` with donated state and default XLA options.

Variants: `same` uses the kernels and the loss of jgraph. `stock` uses XLA norms, library attention and the cross-entropy of
optax over float32 logits. The state is a pure dict, which needs less host time per call than a nested `nnx.State`. `flatten`
wraps the optimizer in `optax.flatten`, so that a step has fewer arrays.
"""

from dataclasses import replace

import jax
import numpy as np
import optax
from flax import nnx

from benchmarks.peers.protocol import answer, read_request, take_turns
from benchmarks.programs.step import compiled_bytes, make_stepper
from benchmarks.rows import Row
from jgraph.train.config import TrainConfig
from jgraph.train.metrics import peak_memory_bytes
from jgraph.train.optimizer import adamw
from jgraph_models.gpt import GPT


def time_plain_jax(request: Row) -> None:
    """Builds and times the step of a config. Entry point of the candidate process.

    Args:
        request: `config`, a stored config, and `variant`, a list with `same` or `stock`, and optionally `flatten`.
    """
    config, variant = TrainConfig.from_dict(request["config"]), request["variant"]
    is_stock = "stock" in variant
    model = config.model
    if is_stock:
        model = replace(model, norm="xla", attention="cudnn" if jax.default_backend() == "gpu" else "xla")
        if config.preset == "launch-bound":
            model = replace(model, attention="xla")  # faster than cuDNN for sequences of 128 tokens
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: GPT(model, rngs=nnx.Rngs(0))))

    is_flat = "flatten" in variant  # one vector, so weight decay cannot select the matrices
    decay_mask = True if is_flat else lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    transform = optax.chain(
        optax.clip_by_global_norm(config.optimizer.clip_norm), adamw(config.optimizer, config.steps, decay_mask=decay_mask)
    )
    if is_flat:
        transform = optax.flatten(transform)

    @jax.jit
    def init():
        params = nnx.to_pure_dict(nnx.split(GPT(model, rngs=nnx.Rngs(0)))[1])
        return params, transform.init(params)

    def loss(params, tokens_BS):
        state = jax.tree.map(lambda leaf: leaf, shapes)
        nnx.replace_by_pure_dict(state, params)
        gpt = nnx.merge(graphdef, state)
        if not is_stock:
            return gpt.loss(tokens_BS)
        logits_BTV = gpt.logits(tokens_BS[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BS[:, 1:]).mean()

    def step(state, tokens_BS):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, tokens_BS)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    device = jax.devices()[0]
    answer(device=f"1 x {device.device_kind}")
    state = init()
    shape = config.input.batch_size, config.input.seq_len + 1
    tokens_BS = jax.device_put(np.random.default_rng(0).integers(0, model.vocab_size, shape).astype(np.int32))
    jitted = jax.jit(step, donate_argnums=0)
    answer(**compiled_bytes(jitted.lower(state, tokens_BS).compile()))

    def advance():
        nonlocal state
        state, value = jitted(state, tokens_BS)
        return value

    run, wait, latest = make_stepper(advance)
    run()
    wait()
    answer(loss=float(latest[0]), peak_bytes=peak_memory_bytes(device))
    take_turns(lambda timer: timer.on_platform(run, wait, device.platform))


if __name__ == "__main__":
    time_plain_jax(read_request())
