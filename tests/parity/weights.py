"""One set of weights for both GPTs: arrays under PyTorch's names, each matrix (outputs, inputs) as PyTorch keeps it."""

import jax
import numpy as np
import torch
from flax import nnx

from benchmarks.peers import torch_gpt, torch_moe
from jgraph_models.gpt import GPT, GPTConfig

PyTree = object


def shapes(config: GPTConfig) -> PyTree:
    """Our parameters as a tree of `jax.ShapeDtypeStruct`."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))), nnx.Param))


def draw(config: GPTConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 weights under which every part matters: activations of order one, and no two entries of a norm's scale alike."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in named(shapes(config), lambda leaf: np.zeros(leaf.shape)).items():
        noise = rng.standard_normal(shape.shape)
        weights[name] = (1 + 0.2 * noise if shape.ndim == 1 else noise / shape.shape[1] ** 0.5).astype(np.float32)
    return weights


def named(params: PyTree, convert=np.asarray) -> dict[str, np.ndarray]:
    """Our tree -> {PyTorch's name: array}."""
    arrays = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        name, transposed = _torch_name(path)
        arrays[name] = convert(leaf).T if transposed else convert(leaf)
    return arrays


def tree(config: GPTConfig, weights: dict[str, np.ndarray]) -> PyTree:
    """Inverse of `named`, float32. Fresh arrays: a step may take their buffers."""

    def leaf(path, shape):
        name, transposed = _torch_name(path)
        array = weights[name].T if transposed else weights[name]
        assert array.shape == shape.shape, f"{name} is {array.shape}, ours {shape.shape}"
        return jax.numpy.array(array)

    return jax.tree_util.tree_map_with_path(leaf, shapes(config))


def torch_model(config: GPTConfig, weights: dict[str, np.ndarray], dtype: torch.dtype) -> torch_gpt.GPT:
    """PyTorch's GPT with these weights; loading is strict, so that none is left as it was."""
    model = (torch_moe if config.moe.num_experts else torch_gpt).GPT(config)
    model.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
    return model.to(dtype)


def _torch_name(path: tuple) -> tuple[str, bool]:
    """(`blocks.0.attention.qkv.kernel`) -> (`blocks.0.qkv.weight`, transposed)."""
    name = jax.tree_util.keystr(path, simple=True, separator=".").replace(".attention.", ".")
    if name.endswith(".kernel"):
        return name.replace(".mlp.", ".").replace(".kernel", ".weight"), True
    if ".mlp." in name:
        return name.replace(".mlp.", ".moe.").rpartition("_")[0], False
    return {"embedding_VD": ("embedding", False), "head_DV": ("head", True)}.get(name, (name, False))
