"""Reads the state of the routers of a model after a step, on the host."""

# L layers, E experts

import jax
import numpy as np

from jgraph.tree import path_name
from jgraph.types import Carried

Statistics = dict[str, np.ndarray]

# Variables of the layer, which `jgraph.MoE` describes. With stacked layers, they have a leading axis of layers.
_NAMES = ("tokens_E", "unseen_E", "entropy", "balance", "z", "dropped")


def statistics(carried: Carried) -> dict[str, Statistics]:
    """Returns NumPy arrays by name of each `jgraph.MoE` layer, such as `blocks/0/mlp`, after a step. Waits for the step."""
    layers: dict[str, Statistics] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(carried):
        layer, _, name = path_name(path).rpartition("/")
        layers.setdefault(layer, {})[name] = leaf
    mixtures = {layer: state for layer, state in layers.items() if state.keys() >= set(_NAMES)}
    return {layer: {name: np.asarray(state[name]) for name in _NAMES} for layer, state in mixtures.items()}


def summary(carried: Carried) -> dict[str, float | list[float]]:
    """Returns JSON values on the routers of all layers for a log; empty without `jgraph.MoE` layers. Waits for the step."""
    layers = list(statistics(carried).values())  # all with the same number of experts
    if not layers:
        return {}
    tokens_LE = np.concatenate([np.atleast_2d(state["tokens_E"]) for state in layers]).astype(float)
    # The load of an expert is its number of tokens divided by the mean over the experts of its layer.
    loads_LE = tokens_LE / np.maximum(tokens_LE.mean(1, keepdims=True), 1 / tokens_LE.shape[1])

    def mean(name: str) -> float:
        return float(np.mean(np.concatenate([state[name].ravel() for state in layers])))

    return {
        "moe_load": [round(load, 4) for load in loads_LE.mean(0).tolist()],
        "moe_max_load": float(loads_LE.max()),
        "moe_entropy": mean("entropy"),
        "moe_balance_loss": mean("balance"),
        "moe_z_loss": mean("z"),
        "moe_dropped": sum(int(state["dropped"].sum()) for state in layers),
    }


def dead_experts(carried: Carried, steps: int = 100) -> dict[str, list[int]]:
    """Returns the experts without a token in the last `steps` steps, by layer. The name of a stacked layer has its index."""
    dead = {}
    for layer, state in statistics(carried).items():
        for i, unseen_E in enumerate(np.atleast_2d(state["unseen_E"])):
            if len(experts := np.flatnonzero(unseen_E <= -steps)):  # minus the number of steps without a token
                dead[f"{layer}/{i}" if state["unseen_E"].ndim > 1 else layer] = experts.tolist()
    return dead
