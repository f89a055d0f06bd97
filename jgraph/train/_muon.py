"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) with matrices that are shared over the devices."""

import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import DTypeLike

from jgraph.step.matrices import map_matrices
from jgraph.types import OptState, Params, TreeOf


def muon(dtype: DTypeLike, given: Mapping[str, Any]) -> optax.GradientTransformation:
    """Returns `optax.contrib.muon(**given)`, whose devices orthogonalize whole matrices, with matmuls in `dtype`.

    The dimension numbers in `given` are a function, and are the last two axes. State and arguments are those of optax.
    """
    made = optax.contrib.muon(**given)
    bound = inspect.signature(optax.contrib.muon).bind(**given)
    bound.apply_defaults()
    a = bound.arguments

    def labels(params: Params) -> TreeOf[str]:
        axes = jax.tree.leaves_with_path(a["muon_weight_dimension_numbers"](params), is_leaf=_is_dimension_numbers)
        matrices = {path for path, _ in axes}
        return jax.tree.map_with_path(lambda path, _: "muon" if path in matrices else "adam", params)

    parts = {
        "muon": optax.chain(
            _orthogonalized_momentum(dtype, a),
            optax.stateless(lambda updates, params: jax.tree.map(lambda update: update * _scale(update, a), updates)),
            optax.add_decayed_weights(a["weight_decay"], a["weight_decay_mask"]),
            optax.scale_by_learning_rate(a["learning_rate"]),
        ),
        "adam": optax.adamw(
            a["learning_rate"] if a["adam_learning_rate"] is None else a["adam_learning_rate"],
            a["adam_b1"],
            a["adam_b2"],
            a["eps"],
            a["adam_eps_root"],
            a["mu_dtype"],
            a["adam_weight_decay"],
            nesterov=a["nesterov"],
        ),
    }
    return optax.GradientTransformation(made.init, optax.partition(parts, labels).update)  # pyright: ignore[reportArgumentType]


def _is_dimension_numbers(value: object) -> bool:
    return isinstance(value, optax.contrib.MuonDimensionNumbers)


def _orthogonalized_momentum(dtype: DTypeLike, a: Mapping[str, Any]) -> optax.GradientTransformation:
    """Returns `optax.contrib.scale_by_muon`, which this function calls on batches of whole matrices, without momentum."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, OptState]:
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, a["beta"], 1)
        momentum = optax.tree.bias_correction(mu, a["beta"], optax.safe_increment(count) if a["nesterov"] else count)
        if a["nesterov"]:
            corrected = optax.tree.bias_correction(updates, a["beta"], count)
            momentum = jax.tree.map(lambda m, g: a["beta"] * m + (1 - a["beta"]) * g, momentum, corrected)

        def orthogonalized(matrices: Array) -> Array:
            one = optax.contrib.scale_by_muon(
                state.ns_coeffs,
                a["ns_steps"],
                beta=0.0,
                eps=a["eps"],
                nesterov=False,
                preconditioning=a["preconditioning"],
                weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(-2, -1),
            )
            return one.update(matrices, one.init(matrices))[0]  # pyright: ignore[reportReturnType]

        # Cast before the matrices move to their devices. Any, because optax annotates its trees as any iterables.
        cast: Any = optax.tree.cast(momentum, dtype)
        found: Any = map_matrices(orthogonalized, cast)
        found = optax.tree.cast(found, jnp.float32)
        if a["adaptive"]:
            found = jax.tree.map(lambda m, o: jnp.sum(m * o) * o, momentum, found)
        return found, state._replace(count=count, mu=optax.tree.cast(mu, a["mu_dtype"]))

    return optax.GradientTransformation(lambda params: None, update)  # pyright: ignore[reportArgumentType], muon has the state


def _scale(update: Array, a: Mapping[str, Any]) -> float:
    """Returns the factor of an orthogonal update [..., m, n] that optax uses."""
    m, n = update.shape[-2:]
    return max(1, n / m) ** 0.5 if a["consistent_rms"] is None else max(m, n) ** 0.5 * a["consistent_rms"]
