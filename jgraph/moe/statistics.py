"""Reads the state of the routers of a model after a step, on the host."""

# L layers, E experts

from typing import Any

import jax
import numpy as np

from jgraph.tree import PyTree, path_name

Statistics = dict[str, np.ndarray]

_NAMES = ("tokens_E", "unseen_E", "entropy", "balance", "z", "dropped")


def statistics(carried: PyTree) -> dict[str, Statistics]:
    """Reads the statistics of each mixture of experts after a step.

    Args:
        carried: The mutable state of the model.

    Returns:
        The arrays `tokens_E`, `unseen_E`, `entropy`, `balance`, `z` and `dropped` of `MoE`, by the path of the layer.
        `entropy`, `balance` and `z` are means over microbatches. Stacked layers have a leading axis of layers.
    """
    layers: dict[str, Statistics] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(carried):
        layer, _, name = path_name(path).rpartition("/")
        layers.setdefault(layer, {})[name] = leaf
    mixtures = {layer: state for layer, state in layers.items() if state.keys() >= set(_NAMES)}
    return {layer: {name: np.asarray(state[name]) for name in _NAMES} for layer, state in mixtures.items()}


def summary(carried: PyTree) -> dict[str, Any]:
    """Summarizes the routers for a log. Returns an empty dict for a model without mixtures.

    `moe_load` is the number of tokens of each expert divided by an even share, averaged over layers. `moe_max_load` is the
    maximum over experts and layers. `moe_dropped` is the sum of dropped rows over layers. `moe_entropy` (nats),
    `moe_balance_loss` and `moe_z_loss` (without coefficients) are averaged over layers.
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


def dead_experts(carried: PyTree, steps: int = 100) -> dict[str, list[int]]:
    """Finds the experts without a token in the last steps.

    Args:
        carried: The mutable state of the model.
        steps: Minimum number of steps without a token.

    Returns:
        The indices of the dead experts, by the path of their layer. Layers without dead experts are omitted.
    """
    dead = {}
    for layer, state in statistics(carried).items():
        for i, unseen_E in enumerate(np.atleast_2d(state["unseen_E"])):
            if len(experts := np.flatnonzero(unseen_E <= -steps)):
                dead[f"{layer}/{i}" if state["unseen_E"].ndim > 1 else layer] = experts.tolist()
    return dead
