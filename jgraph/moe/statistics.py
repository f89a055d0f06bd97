"""Reads the state of the routers of a model after a step, on the host."""

# L layers, E experts

import jax
import numpy as np

from jgraph.tree import path_name
from jgraph.types import Carried

Statistics = dict[str, np.ndarray]

_NAMES = ("tokens_E", "unseen_E", "entropy", "balance", "z", "dropped")


def statistics(carried: Carried) -> dict[str, Statistics]:
    """Reads the statistics of each mixture of experts after a step. Waits until the step has computed them.

    Args:
        carried: The mutable state of the model after the step, a tree of arrays.

    Returns:
        A dict {path: {name: NumPy array}} with an entry for each `jgraph.MoE` layer, such as `blocks/0/mlp`; empty for a model
        without such layers. Stacked layers share one entry, and their arrays have a leading axis of layers. E is the number of
        experts. The names of an entry are:

        - `tokens_E`: int32 [E], number of tokens of each expert in the step.
        - `unseen_E`: int32 [E], 0 for an expert with a token in the step, and -n if its last n steps had none.
        - `entropy`: float32 scalar, entropy of the router in nats, averaged over tokens and microbatches.
        - `balance`: float32 scalar, load-balancing loss without its coefficient, averaged over microbatches.
        - `z`: float32 scalar, z-loss without its coefficient, averaged over microbatches.
        - `dropped`: int32 scalar, number of rows that were dropped because they exceeded the expert capacity. A row is one
          token for one of its experts.
    """
    layers: dict[str, Statistics] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(carried):
        layer, _, name = path_name(path).rpartition("/")
        layers.setdefault(layer, {})[name] = leaf
    mixtures = {layer: state for layer, state in layers.items() if state.keys() >= set(_NAMES)}
    return {layer: {name: np.asarray(state[name]) for name in _NAMES} for layer, state in mixtures.items()}


def summary(carried: Carried) -> dict[str, float | list[float]]:
    """Summarizes the routers of all layers after a step, for a log. Waits until the step has computed the state.

    Args:
        carried: The mutable state of the model after the step, a tree of arrays. All `jgraph.MoE` layers must have the same
            number of experts.

    Returns:
        A dict of JSON values; empty for a model without `jgraph.MoE` layers. The load of an expert is its number of tokens
        divided by the mean over the experts of its layer. The keys are:

        - `moe_load`: list of floats, the load of each expert, averaged over layers and rounded to 4 decimals.
        - `moe_max_load`: float, the largest load of any expert in any layer.
        - `moe_entropy`: float, entropy of the routers in nats, averaged over layers.
        - `moe_balance_loss` and `moe_z_loss`: floats, the losses without coefficients, averaged over layers.
        - `moe_dropped`: int, number of rows in all layers that were dropped because they exceeded the expert capacity. A row is
          one token for one of its experts.
    """
    layers = list(statistics(carried).values())
    if not layers:
        return {}
    tokens_LE = np.concatenate([np.atleast_2d(state["tokens_E"]) for state in layers]).astype(float)
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
    """Finds the experts that had no token in the last steps. Waits until the step has computed the state.

    Args:
        carried: The mutable state of the model after a step, a tree of arrays.
        steps: Minimum number of successive steps without a token.

    Returns:
        A dict from the path of a layer, such as `blocks/0/mlp`, to the indices of its dead experts in ascending order. For
        stacked layers, the path is followed by `/` and the index of the layer in the stack. Layers without dead experts are
        omitted.
    """
    dead = {}
    for layer, state in statistics(carried).items():
        for i, unseen_E in enumerate(np.atleast_2d(state["unseen_E"])):
            if len(experts := np.flatnonzero(unseen_E <= -steps)):
                dead[f"{layer}/{i}" if state["unseen_E"].ndim > 1 else layer] = experts.tolist()
    return dead
