"""Binds a strategy to the loss: with packed, padded and stacked parameters if the transform is elementwise."""

from dataclasses import replace
from typing import Literal

from jgraph.errors import ConfigError, check_choice
from jgraph.layout import alone, each
from jgraph.step.probe import check_elementwise, why_not_elementwise
from jgraph.step.transform import Elementwise, Transform, check_transform, in_float32, make_transform
from jgraph.step.update import Optimizer
from jgraph.strategies.base import BoundStrategy, Strategy
from jgraph.strategies.objective import Objective
from jgraph.types import Arrays, Params


def bind(
    transform: Transform | Elementwise, strategy: Strategy, objective: Objective, layout: Literal["auto", "tree"]
) -> tuple[BoundStrategy, Optimizer[Params] | Optimizer[Arrays]]:
    """Binds the strategy, and describes how the transform updates its parameters. Checks `transform` and `layout`."""
    check_transform(transform)
    check_choice("layout", layout, ("auto", "tree"))
    if not isinstance(transform, Elementwise):
        bound, reason = _bind_plain(transform, strategy, objective, layout)
        own = in_float32(transform)
        proof = "is elementwise"
    else:
        if layout == "tree":
            raise ConfigError("`layout` is tree: must be auto with jgraph.elementwise", field="layout")
        check_elementwise(transform, strategy.shapes)
        bound, reason = strategy.bind(objective), ""
        own = in_float32(make_transform(transform, {name: p.decays for name, p in bound.layout.trained.params.items()}))
        proof = "is declared elementwise"
    trained = bound.layout.trained
    if reason:
        return bound, Optimizer(own, trained, f"updates the model's own tree, because {reason}")
    unchanged = each(lambda name, param: None)(trained.params)
    return bound, Optimizer(own, unchanged, f"updates packed parameters, because the transform {proof}", moments=trained)


def _bind_plain(
    transform: Transform, strategy: Strategy, objective: Objective, layout: Literal["auto", "tree"]
) -> tuple[BoundStrategy, str]:
    """Binds the strategy for a transform without a declaration. Also returns why its parameters are not packed, or ""."""
    in_tree = replace(objective, layout=objective.layout.then(alone()))
    reason = "`layout` is tree" if layout == "tree" else why_not_elementwise(transform, objective.layout)
    bound = strategy.bind(in_tree if reason else objective)
    if not reason and (reason := why_not_elementwise(transform, objective.layout, bound.layout)):
        bound = strategy.bind(in_tree)
    return bound, reason
