"""What a step's carried state says of its routers, on the host."""

from typing import Any

import jax
import numpy as np

from jgraph.tree import path_name

NAMES = ("tokens_E", "unseen_E", "entropy", "balance", "z", "dropped")

Statistics = dict[str, np.ndarray]


def statistics(carried: Any) -> dict[str, Statistics]:
    """Returns each layer's numbers after a step, by the layer's path in the model: `tokens_E` is the load of its experts.

    `entropy`, `balance` and `z` are means over the step's microbatches. Of stacked layers, arrays have a first axis of layers.
    """
    layers: dict[str, Statistics] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(carried):
        layer, _, name = path_name(path).rpartition("/")
        layers.setdefault(layer, {})[name] = leaf
    found = {layer: own for layer, own in layers.items() if own.keys() >= set(NAMES)}
    return {layer: {name: np.asarray(own[name]) for name in NAMES} for layer, own in found.items()}


def summary(carried: Any) -> dict[str, Any]:
    """Returns what a step's routers did in a few numbers, for a log; nothing where there are no mixtures.

    `moe_load` is each expert's share of the tokens over an even share, the mean of all layers; `moe_max_load` the largest of
    any layer. `moe_dropped` counts rows that were not sent to their expert, of all layers. The losses are without their
    coefficients, the entropy is in nats; of all three the mean of the layers.
    """
    layers = list(statistics(carried).values())
    if not layers:
        return {}
    tokens_LE = np.concatenate([own["tokens_E"].reshape(-1, own["tokens_E"].shape[-1]) for own in layers]).astype(float)
    loads_LE = tokens_LE / np.maximum(tokens_LE.mean(1, keepdims=True), 1 / tokens_LE.shape[1])

    def mean(name: str) -> float:
        return float(np.mean(np.concatenate([own[name].reshape(-1) for own in layers])))

    return {
        "moe_load": [round(load, 4) for load in loads_LE.mean(0).tolist()],
        "moe_max_load": float(loads_LE.max()),
        "moe_entropy": mean("entropy"),
        "moe_balance_loss": mean("balance"),
        "moe_z_loss": mean("z"),
        "moe_dropped": sum(int(own["dropped"].sum()) for own in layers),
    }


def starved(carried: Any, steps: int = 100) -> dict[str, list[int]]:
    """Returns the experts that had no token for so many steps, by the layer's path; layers without such are left out."""
    found = {}
    for layer, own in statistics(carried).items():
        unseen = own["unseen_E"].reshape(-1, own["unseen_E"].shape[-1])
        for i, row in enumerate(unseen):
            if len(experts := np.flatnonzero(row <= -steps)):
                found[f"{layer}/{i}" if own["unseen_E"].ndim > 1 else layer] = experts.tolist()
    return found
