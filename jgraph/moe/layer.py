"""`MoE`: a mixture of experts in the place of an MLP, for any Flax NNX model."""

# B batch, T sequence, N = B * T tokens, K experts of a token, R = N * K rows, E experts, D model, F hidden of an expert

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jgraph.errors import require
from jgraph.moe import dispatch, exchange, losses, router
from jgraph.moe.config import MoEConfig
from jgraph.moe.experts import experts, shared
from jgraph.scopes import scope

_INIT = nnx.initializers.normal(0.02)


class MoE(nnx.Module):
    """Sends each token through some of many SwiGLU experts, in the place of an MLP. No token is dropped, unless asked for.

    Where a strategy spreads experts over devices (`FullySharded.experts`), a device has some of them and is sent rows.

    The router's losses, times their coefficients, are in the gradient (`losses.attach`), not in the value of the model's loss.

    >>> moe = jgraph.MoE(16, 32, jgraph.MoEConfig(num_experts=4), rngs=nnx.Rngs(0))
    >>> moe(jnp.ones((2, 8, 16))).shape
    (2, 8, 16)

    Its state is carried from step to step, and reduced over microbatches and devices by the `reduction` of its variables. After
    a step it tells of the step: `jgraph.moe.statistics`.

    Attributes:
        router_DE, up_EDF2, down_EFD: parameters, float32; with shared experts also `shared_up_DF2` and `shared_down_FD`.
        tokens_E: tokens of each expert.
        unseen_E: minus the number of steps since an expert last had a token, so that a maximum reduces it.
        entropy, balance, z: of the router; both losses without their coefficients.
        dropped: rows that were not sent to the device of their expert, because there was no place.
        overflow: places that one device needed at another, where it had fewer and none is to be dropped; else 0. It halts the
            training (`train_step`), and what a step with dropped rows computed does not count.
        bias_E: with the router `sigmoid`; it is changed by `tokens_E` when the next step begins.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        config: MoEConfig,
        *,
        rngs: nnx.Rngs,
        kernel_init: Any = _INIT,
        down_init: Any = None,
    ):
        """
        Args:
            d_model: width of x.
            d_ff: hidden width of an expert, where `config.d_ff` is 0.
            config: experts and router.
            rngs: for the parameters.
            kernel_init, down_init: initializers; `down_init` of the matrices whose result is added to the stream.

        Raises:
            ConfigError: `config` has no experts.
        """
        require(config.num_experts > 0, "model.moe.num_experts", config.num_experts, "positive in a layer of experts")
        self.config, self.use_running_average = config, False  # the name by which `train()` and `eval()` tell a module
        E, D, F, down_init = config.num_experts, d_model, config.d_ff or d_ff, down_init or kernel_init
        self.router_DE = nnx.Param(kernel_init(rngs.params(), (D, E), jnp.float32))
        self.up_EDF2 = nnx.Param(kernel_init(rngs.params(), (E, D, 2 * F), jnp.float32))
        self.down_EFD = nnx.Param(down_init(rngs.params(), (E, F, D), jnp.float32))
        if shared_F := config.shared_experts * F:
            self.shared_up_DF2 = nnx.Param(kernel_init(rngs.params(), (D, 2 * shared_F), jnp.float32))
            self.shared_down_FD = nnx.Param(down_init(rngs.params(), (shared_F, D), jnp.float32))
        self.tokens_E = nnx.Variable(jnp.zeros(E, jnp.int32), reduction="sum")
        self.unseen_E = nnx.Variable(jnp.zeros(E, jnp.int32), reduction="max")
        self.entropy, self.balance, self.z = (nnx.Variable(jnp.zeros(()), reduction="mean") for _ in range(3))
        self.dropped = nnx.Variable(jnp.zeros((), jnp.int32), reduction="sum")
        self.overflow = nnx.Variable(jnp.zeros((), jnp.int32), reduction="halt")
        if config.router == "sigmoid":
            # All microbatches make the same of it.
            self.bias_E = nnx.Variable(jnp.zeros(E), reduction="max")

    def __call__(self, x_BTD: Array, *, weight: Array | float = 1.0, axes: Sequence[str] | None = None) -> Array:
        """Returns the weighted sum of what the experts of each token make of it, of the shape and dtype of x.

        Args:
            x_BTD: any leading dimensions.
            weight: what the router's losses count: the weight of the microbatch's loss, where that is a sum (`jgraph.Loss`).
            axes: mesh axes whose devices share a microbatch; None: those of `data` and `fsdp` that the call is under.
        """
        config, dtype = self.config, x_BTD.dtype
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        with scope("router"):
            logits_NE = router.logits(x_ND, self.router_DE[...].astype(jnp.float32))
            bias_E = None
            if config.router == "sigmoid":
                bias_E = router.balanced(self.bias_E[...], self.tokens_E[...], config.bias_rate)
            found = router.route(logits_NE, config, bias_E)
        weights = self.up_EDF2[...].astype(dtype), self.down_EFD[...].astype(dtype)
        if len(weights[0]) < config.num_experts:
            y_ND, overflow = exchange.through(x_ND, found, *weights, config)
        else:
            y_ND, overflow = through(x_ND, found, *weights), exchange.Overflow(*[jnp.zeros((), jnp.int32)] * 2)
        if config.shared_experts:
            with scope("experts"):
                y_ND += shared(x_ND, self.shared_up_DF2[...].astype(dtype), self.shared_down_FD[...].astype(dtype))
        if not self.use_running_average:
            self.dropped.set_value(overflow.dropped)
            self.overflow.set_value(overflow.needed if config.overflow == "replay" else jnp.zeros_like(overflow.needed))
            with scope("router"):
                y_ND = self._train(y_ND, found, logits_NE, bias_E, weight, losses.axes_here() if axes is None else axes)
        return y_ND.reshape(x_BTD.shape)

    def _train(
        self, y: Array, found: router.Routing, logits_NE: Array, bias_E: Array | None, weight: Any, axes: Sequence[str]
    ) -> Array:
        """Attaches the losses and writes the state."""
        config = self.config
        balance = losses.balance_loss(found.probabilities, found.counts, axes)
        z = losses.z_loss(logits_NE)
        if config.balance_loss or config.z_loss:
            y = losses.attach(y, weight * (config.balance_loss * balance + config.z_loss * z))
        if bias_E is not None:
            self.bias_E.set_value(bias_E)
        self.tokens_E.set_value(found.counts)
        self.unseen_E.set_value(jnp.where(found.counts > 0, 0, self.unseen_E[...] - 1))
        for place, value in (self.entropy, router.entropy(found.probabilities)), (self.balance, balance), (self.z, z):
            place.set_value(jax.lax.stop_gradient(value))
        return y


def through(x_ND: Array, found: router.Routing, up_EDF2: Array, down_EFD: Array) -> Array:
    """Returns what the experts make of each token by a routing, as a weighted sum, in x's dtype."""
    copies = found.experts.shape[1]
    with scope("dispatch"):
        order = dispatch.order_of(found.experts, found.counts)
        x_RD: Any = dispatch.dispatched(x_ND, order, copies)
        weights_R: Any = dispatch.dispatched(found.weights.reshape(-1), order, 1)
    with scope("experts"):
        y_RD = experts(x_RD, weights_R, up_EDF2, down_EFD, found.counts)
    with scope("combine"):
        return dispatch.combined(y_RD, order, copies)
