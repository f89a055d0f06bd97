"""Plain JAX peer: a training step with Flax NNX, optax and `jax.jit` with donated state, on one device or sharded over several.

A variant is a list of words. The first is the model:

- `same`: the model and the loss of jgraph with their kernels. The partitioner cannot split Pallas kernels, so on several
  devices the loss runs in `jax.shard_map` over the batch, and the partitioner gathers the parameters in the compute dtype.
- `stock`: XLA norms, library attention and the cross-entropy of optax over float32 logits. On several devices the partitioner
  shards everything. Sharding constraints keep the activations sharded over the batch.

Further words change one thing each, and combine:

- `nnx`: the state is a nested `nnx.State`. By default it is a pure dict, which needs less host time per call.
- `muon`: `optax.contrib.muon` for the matrices of the blocks.
- `flatten`: the optimizer is wrapped in `optax.flatten`, so that a step has fewer arrays.
- `packed`: the optimizer is wrapped in `jgraph.packed`. `params`: the parameters are packed with `jgraph.Packing`.
- `jit`: the step is compiled by `jgraph.jit` instead of `jax.jit`.
- `off`: no command buffers. `tuned`: the XLA options that MaxText's GPU scripts set. `NAME=VALUE`: an XLA option.

The step is called through `jax.jit`. A call of `lower().compile()` takes as long on the host: 570 us and 600 us for 224 leaves,
and 300 us and 280 us for 78, on a CPU.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jgraph
from benchmarks.peers.protocol import answer, read_request, take_turns
from benchmarks.programs.step import compiled_bytes, first_devices, make_stepper, measure, step_size, tokens_of
from benchmarks.rows import Row
from jgraph.train.config import TrainConfig
from jgraph.train.metrics import peak_memory_bytes
from jgraph.train.optimizer import adamw
from jgraph.xla import compiler_options
from jgraph.xla.options import known
from jgraph_models.gpt import GPT, rotary_of

# B batch, T sequence, S = T + 1, D model, V vocabulary

Tree = Any

OWN = ("packed", "params", "jit")  # words that use jgraph
MODELS, WORDS = ("same", "stock"), ("nnx", "flatten", "muon", *OWN, "off", "tuned")

# From MaxText/configs/a3/llama_2_7b/1vm.sh, without options that set XLA's default and without `xla_gpu_graph_level=0`, which
# disables command buffers: the word `off` does that. Options that the installed XLA no longer has are left out.
TUNED = (
    "xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_enable_triton_gemm=false",
    "xla_gpu_all_reduce_combine_threshold_bytes=134217728",
    "xla_gpu_all_gather_combine_threshold_bytes=134217728",
    "xla_gpu_reduce_scatter_combine_threshold_bytes=67108864",
    "xla_gpu_enable_pipelined_all_gather=true",
    "xla_gpu_enable_pipelined_reduce_scatter=true",
    "xla_gpu_enable_pipelined_all_reduce=true",
    "xla_gpu_enable_while_loop_double_buffering=true",
    "xla_gpu_enable_all_gather_combine_by_dim=false",
    "xla_gpu_enable_reduce_scatter_combine_by_dim=false",
    "xla_disable_hlo_passes=rematerialization",
)


@dataclass(frozen=True)
class PlainStep:
    """A training step that is not compiled yet.

    Attributes:
        init: Makes the state: the parameters and the state of the optimizer.
        step: `step(state, tokens_BS) -> (state, loss)`, jitted. Donates the state.
        state: Shapes of the state, with shardings on a mesh.
        batch: Shape of the token ids [B, S], with its sharding on a mesh.
    """

    init: Callable[[], Tree]
    step: jax.stages.Wrapped
    state: Tree
    batch: jax.ShapeDtypeStruct


def plain_step(config: TrainConfig, words: Sequence[str], mesh: Mesh | None = None, *, platform: str = "cpu") -> PlainStep:
    """Builds the training step of a variant, on one device or sharded over the axis of a mesh."""
    options = xla_options(words, platform)
    model = replace(config.model, **stock_kernels(config, platform)) if "stock" in words else config.model
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: GPT(model, rngs=nnx.Rngs(config.seed))))
    as_tree = (lambda state: state) if "nnx" in words else nnx.to_pure_dict

    def make_params() -> Tree:
        return as_tree(nnx.split(GPT(model, rngs=nnx.Rngs(config.seed)))[1])

    packing = jgraph.Packing.of(jax.eval_shape(make_params)) if "params" in words else None
    transform = optimizer(config, words, packing)

    def stored() -> Tree:
        return packing.pack(make_params()) if packing else make_params()

    def init() -> Tree:
        params = stored()
        return params, transform.init(params)

    def loss(params: Tree, tokens_BS: Array) -> Array:
        gpt = nnx.merge(graphdef, packing.unpack(params) if packing else params)
        return stock_loss(gpt, tokens_BS, mesh) if "stock" in words else gpt.loss(tokens_BS)

    split = loss if mesh is None or "stock" in words else over_batch(loss, mesh, model.compute_dtype)

    def step(state: Tree, tokens_BS: Array) -> tuple[Tree, Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(split)(params, tokens_BS)
        updates, opt_state = transform.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    shapes = jax.eval_shape(init)
    shardings: Any = None
    tokens_BS = jax.ShapeDtypeStruct((config.input.batch_size, config.input.seq_len + 1), jnp.int32)
    if mesh is not None:
        shardings = jax.tree.map(partial(sharding_of, mesh), shapes)
        shapes = jax.tree.map(lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes, shardings)
        tokens_BS = jax.ShapeDtypeStruct(tokens_BS.shape, jnp.int32, sharding=NamedSharding(mesh, P(mesh.axis_names)))
    settings: Any = {"donate_argnums": 0}
    if mesh is not None:
        settings["out_shardings"] = shardings, NamedSharding(mesh, P())
    if "jit" in words:
        jitted: Any = jgraph.jit(step, xla_options=[f"{name}={value}" for name, value in options.items()], **settings)
    else:
        jitted = jax.jit(step, compiler_options=options or None, **settings)
    return PlainStep(jax.jit(init, out_shardings=shardings), jitted, shapes, tokens_BS)


def xla_options(words: Sequence[str], platform: str) -> dict[str, Any]:
    """Returns the XLA options of a variant. The words `off` and `tuned` have no effect on a CPU."""
    model, *others = words or ("",)
    named = [word for word in others if "=" in word]
    if model not in MODELS or set(others) - {*WORDS, *named}:
        allowed = f"{' or '.join(MODELS)}, then any of {', '.join(WORDS)} and XLA options NAME=VALUE"
        raise SystemExit(f"unknown variant {' '.join(words)!r} of jax: use {allowed}")
    tuned = known(TUNED, platform) if "tuned" in others else ()
    return compiler_options("off" if "off" in others else "auto", (*tuned, *named), platform=platform)


def stock_kernels(config: TrainConfig, platform: str) -> dict[str, str]:
    """Returns the model settings without kernels of jgraph. On GPUs, cuDNN's attention is slower for short sequences."""
    is_long = config.preset != "launch-bound"
    return {"norm": "xla", "attention": "cudnn" if platform == "gpu" and is_long else "xla"}


def matrices_of_blocks(params: Tree) -> Tree:
    """Returns the axes of the matrices that Muon orthogonalizes."""
    axes = optax.contrib.MuonDimensionNumbers(0, 1)

    def of(path: Any, leaf: Any) -> Any:
        return axes if leaf.ndim == 2 and "blocks" in jax.tree_util.keystr(path) else None

    return jax.tree.map_with_path(of, params)


def optimizer(config: TrainConfig, words: Sequence[str], packing: jgraph.Packing | None) -> optax.GradientTransformation:
    """Returns clipping and AdamW. With `flatten`, weight decay also applies to vectors: one vector holds everything."""

    def update(decay_mask: Any) -> Any:
        if "muon" in words:
            return optax.contrib.muon(config.optimizer.learning_rate, muon_weight_dimension_numbers=matrices_of_blocks)
        return adamw(config.optimizer, config.steps, decay_mask=decay_mask)

    clip_norm = config.optimizer.clip_norm
    if "packed" in words:
        return jgraph.packed(update, clip_norm=clip_norm)
    decay_mask: Any = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # noqa: E731
    if packing:
        decay_mask = packing.decay_mask()
    if "flatten" in words:
        decay_mask = True
    transform = optax.chain(optax.clip_by_global_norm(clip_norm), update(decay_mask))
    return optax.flatten(transform) if "flatten" in words else transform


def stock_loss(gpt: GPT, tokens_BS: Array, mesh: Mesh | None) -> Array:
    """Computes the mean next-token loss from float32 logits."""

    def constrained(x: Array) -> Array:
        return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(mesh.axis_names)))

    tokens_BT, labels_BT = tokens_BS[:, :-1], tokens_BS[:, 1:]
    rotary_T1K = rotary_of(gpt.config, tokens_BT.shape[1])
    x_BTD = constrained(gpt.embedding_VD[...][tokens_BT].astype(gpt.config.compute_dtype))
    for block in gpt.blocks:
        x_BTD = constrained(block(x_BTD, rotary_T1K))
    logits_BTV = constrained(jnp.matmul(gpt.norm(x_BTD), gpt.output(), preferred_element_type=jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, labels_BT).mean()


def over_batch(loss: Callable[[Tree, Array], Array], mesh: Mesh, dtype: str) -> Callable[[Tree, Array], Array]:
    """Splits a loss over the batch with `jax.shard_map`. Every device uses all parameters, gathered in `dtype`."""
    axes = mesh.axis_names

    def local(params: Tree, tokens_BS: Array) -> Array:
        return jax.lax.pmean(loss(params, tokens_BS), axes)

    # Pallas kernels do not declare the mesh axes that their results vary over, so these are not checked.
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P(), check_vma=False)

    def cast(leaf: Array) -> Array:
        # Sharded, because XLA would otherwise gather the float32 parameter and cast it on every device.
        return jax.lax.with_sharding_constraint(leaf.astype(dtype), sharding_of(mesh, leaf)) if leaf.ndim > 1 else leaf

    def whole(params: Tree, tokens_BS: Array) -> Array:
        return sharded(jax.tree.map(cast, params), tokens_BS)

    return whole


def sharding_of(mesh: Mesh, leaf: Any) -> NamedSharding:
    """Shards the largest axis of a leaf that the number of devices divides."""
    axes = sorted(range(leaf.ndim), key=lambda axis: -leaf.shape[axis])
    axis = next((axis for axis in axes if leaf.shape[axis] % mesh.size == 0), None)
    return NamedSharding(mesh, P() if axis is None else P(*[None] * axis, mesh.axis_names))


def time_plain_jax(request: Row) -> None:
    """Builds and times the step of a config. Entry point of the candidate process."""
    config, words = TrainConfig.from_dict(request["config"]), request["variant"]
    devices = first_devices(config.parallel.shards)
    mesh = Mesh(np.array(devices), ("fsdp",)) if len(devices) > 1 else None
    plain = plain_step(config, words, mesh, platform=devices[0].platform)
    answer(device=f"{len(devices)} x {devices[0].device_kind}")
    state = plain.init()
    tokens_BS = jax.device_put(tokens_of(config), plain.batch.sharding)
    compiled = plain.step.lower(state, tokens_BS).compile()
    answer(**compiled_bytes(compiled), **step_size(compiled, state))

    def advance() -> Array:
        nonlocal state
        state, value = plain.step(state, tokens_BS)
        return value

    run, wait, latest = make_stepper(advance)
    run()
    wait()
    answer(loss=float(latest[0]), peak_bytes=max(map(peak_memory_bytes, devices)))
    take_turns(partial(measure, run, wait, devices[0].platform))


if __name__ == "__main__":
    time_plain_jax(read_request())
