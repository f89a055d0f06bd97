"""An order among gradients, said by the forward pass: nothing goes on from one of them before all are there."""

from typing import Any

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from jgraph.trace import replay

_NAME = "_jgraph_joined"


@jax.custom_vjp
def joined(x: Array, *weights: Array) -> tuple[Array, ...]:
    """Returns its arguments. Differentiated, what is computed from the gradient of one waits for the gradients of all.

    Put before what sends x to other devices, with the weights that its rows are multiplied with there: the gradients of these
    weights are then computed while the gradient of x is on its way, where XLA's scheduler would leave them for the end. The
    split backward passes it over, as there such gradients come late.
    """
    return checkpoint_name(x, _NAME), *weights


def _forward(x: Array, *weights: Array) -> tuple[tuple[Array, ...], None]:
    return joined(x, *weights), None


def _backward(_: None, gradients: tuple[Array, ...]) -> Any:
    return lax.optimization_barrier(gradients)


joined.defvjp(_forward, _backward)


def is_joined(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation is a call of `joined`."""
    return eqn.primitive.name in replay.CUSTOM and [inner.params.get("name") for inner in replay.body(eqn).eqns] == [_NAME]
