"""Shared weights of both GPTs: arrays with PyTorch's names and PyTorch's matrix layout (outputs, inputs)."""

import jax
import numpy as np
import torch
from flax import nnx

from benchmarks.peers import torch_gpt, torch_moe
from jgraph_models.gpt import GPT, GPTConfig

PyTree = object


def shapes(config: GPTConfig) -> PyTree:
    """Returns the parameters of the JAX model as a tree of `jax.ShapeDtypeStruct`."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))), nnx.Param))


def draw(config: GPTConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random float32 weights with activations of order one and different entries in every norm scale."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in named(shapes(config), lambda leaf: np.zeros(leaf.shape)).items():
        noise = rng.standard_normal(shape.shape)
        weights[name] = (1 + 0.2 * noise if shape.ndim == 1 else noise / shape.shape[1] ** 0.5).astype(np.float32)
    return weights


def named(params: PyTree, convert=np.asarray) -> dict[str, np.ndarray]:
    """Converts a JAX parameter tree to {PyTorch name: array}."""
    arrays = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name, transposed = _torch_name(path)
        arrays[name] = convert(leaf).T if transposed else convert(leaf)
    return arrays


def tree(config: GPTConfig, weights: dict[str, np.ndarray]) -> PyTree:
    """Inverts `named`. Returns new float32 arrays, because a step may donate them."""

    def leaf(path, shape):
        name, transposed = _torch_name(path)
        array = weights[name].T if transposed else weights[name]
        assert array.shape == shape.shape, f"{name} is {array.shape}, expected {shape.shape}"
        return jax.numpy.array(array)

    return jax.tree_util.tree_map_with_path(leaf, shapes(config))


def torch_model(config: GPTConfig, weights: dict[str, np.ndarray], dtype: torch.dtype) -> torch_gpt.GPT:
    """Returns the PyTorch GPT with these weights. Strict loading checks that every weight is set."""
    model = (torch_moe if config.moe.num_experts else torch_gpt).GPT(config)
    model.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    return model.to(dtype)


def _torch_name(path: tuple) -> tuple[str, bool]:
    """Converts a path such as `blocks.0.attention.qkv.kernel` to (`blocks.0.qkv.weight`, whether it is transposed)."""
    name = jax.tree_util.keystr(path, simple=True, separator=".").replace(".attention.", ".")
    if name.endswith(".kernel"):
        return name.replace(".mlp.", ".").replace(".kernel", ".weight"), True
    if ".mlp." in name:
        return name.replace(".mlp.", ".moe.").rpartition("_")[0], False
    return {"embedding_VD": ("embedding", False), "head_DV": ("head", True)}.get(name, (name, False))
