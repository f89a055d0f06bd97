"""Reads the state of the routers of a model after a step, on the host."""

# L layers, E experts

from typing import Any

import jax
import numpy as np

from jgraph.tree import PyTree, path_name

Statistics = dict[str, np.ndarray]

_NAMES = ("tokens_E", "unseen_E", "entropy", "balance", "z", "dropped")


def statistics(carried: PyTree) -> dict[str, Statistics]:
    """Returns the statistics of each mixture of experts after a step.

    Args:
        carried: The mutable state of the model.

    Returns:
        By the path of a layer in the model, the arrays `tokens_E`, `unseen_E`, `entropy`, `balance`, `z` and `dropped` that
        `MoE` describes. `entropy`, `balance` and `z` are means over the microbatches. Stacked layers have a leading axis of
        layers.
    """
    layers: dict[str, Statistics] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(carried):
        layer, _, name = path_name(path).rpartition("/")
        layers.setdefault(layer, {})[name] = leaf
    found = {layer: own for layer, own in layers.items() if own.keys() >= set(_NAMES)}
    return {layer: {name: np.asarray(own[name]) for name in _NAMES} for layer, own in found.items()}


def summary(carried: PyTree) -> dict[str, Any]:
    """Returns a few numbers about the routers for a log; empty for a model without mixtures.

    `moe_load` is the number of tokens of each expert over an even share, averaged over layers; `moe_max_load` is the largest of
    any layer. `moe_dropped` sums the dropped rows of all layers. `moe_entropy` (nats), `moe_balance_loss` and `moe_z_loss`
    (without coefficients) are averaged over layers.
    """
    layers = list(statistics(carried).values())
    if not layers:
        return {}
    tokens_LE = np.concatenate([np.atleast_2d(own["tokens_E"]) for own in layers]).astype(float)
    loads_LE = tokens_LE / np.maximum(tokens_LE.mean(1, keepdims=True), 1 / tokens_LE.shape[1])

    def mean(name: str) -> float:
        return float(np.mean(np.concatenate([own[name].ravel() for own in layers])))

    return {
        "moe_load": [round(load, 4) for load in loads_LE.mean(0).tolist()],
        "moe_max_load": float(loads_LE.max()),
        "moe_entropy": mean("entropy"),
        "moe_balance_loss": mean("balance"),
        "moe_z_loss": mean("z"),
        "moe_dropped": sum(int(own["dropped"].sum()) for own in layers),
    }


def dead_experts(carried: PyTree, steps: int = 100) -> dict[str, list[int]]:
    """Returns the experts that have had no token for `steps` steps, by the path of their layer. Omits layers without any."""
    found = {}
    for layer, own in statistics(carried).items():
        for i, unseen_E in enumerate(np.atleast_2d(own["unseen_E"])):
            if len(experts := np.flatnonzero(unseen_E <= -steps)):
                found[f"{layer}/{i}" if own["unseen_E"].ndim > 1 else layer] = experts.tolist()
    return found
