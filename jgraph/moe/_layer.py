"""`MoE`: a Flax NNX layer with a mixture of experts, which replaces an MLP."""

# B batch, T sequence, N = B * T tokens, E experts, D model, F hidden of an expert

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jgraph.errors import require
from jgraph.kernels.swiglu import swiglu
from jgraph.moe import _experts, _router
from jgraph.moe.config import MoEConfig
from jgraph.scopes import scope

_INIT = nnx.initializers.normal(0.02)


class MoE(nnx.Module):
    """Routes each token to a few of many SwiGLU experts, in place of an MLP.

    E is the number of experts, D the width of the model, F the hidden width of an expert. A row is one token for one of its
    experts. If a strategy shards the experts over devices (`FullySharded.experts`), a device holds some of the experts, and
    rows are sent to the device of their expert. The expert capacity limits the rows from one device to another. No row is
    dropped unless `config.overflow` is "drop".

    The losses of the router (load-balancing loss and z-loss), times their coefficients, add to the gradient of the model's
    loss, but not to its value.

    The variables that are not parameters are state. A call in training mode writes them, and `train_step` carries them from
    step to step. The `reduction` of each variable defines its reduction over microbatches and devices.
    `jgraph.moe.statistics.statistics` reads the state after a step.

    Attributes:
        config: Settings of the experts and the router.
        use_running_average: False in training mode, True in evaluation mode. Flax's `train()` and `eval()` set it.
        router_DE: Parameter, float32 [D, E].
        up_EDF2: Parameter, float32 [E, D, 2F]; the F columns of gate before the F columns of up.
        down_EFD: Parameter, float32 [E, F, D].
        shared_up_DF2: Parameter of the shared experts, float32 [D, 2F'] for F' = `config.shared_experts` * F; absent without
            them.
        shared_down_FD: Parameter of the shared experts, float32 [F', D]; absent without them.
        tokens_E: int32 [E], number of tokens of each expert.
        unseen_E: int32 [E], minus the number of steps since each expert last had a token. Negative, so that it is reduced by a
            maximum.
        entropy: float32 scalar, mean entropy of the router in nats.
        balance: float32 scalar, load-balancing loss without its coefficient.
        z: float32 scalar, z-loss without its coefficient.
        dropped: int32 scalar, number of rows beyond the expert capacity. They were dropped, or the step was halted.
        overflow: int32 scalar. If rows exceeded the capacity and `config.overflow` is "replay", the maximum number of rows from
            one device to another; else 0. A positive value halts the step: `train_step` changes nothing and does not count it.
        bias_E: float32 [E], bias of the router "sigmoid"; absent for other routers. The next step first updates it from
            `tokens_E`.

    Examples:
        >>> moe = jgraph.MoE(16, 32, jgraph.MoEConfig(num_experts=4), rngs=nnx.Rngs(0))
        >>> moe(jnp.ones((2, 8, 16))).shape
        (2, 8, 16)
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        config: MoEConfig,
        *,
        rngs: nnx.Rngs,
        kernel_init: nnx.Initializer = _INIT,
        down_init: nnx.Initializer | None = None,
    ):
        """Initializes the parameters at random, and the state with zeros. The layer is in training mode.

        Args:
            d_model: D, the width of the tokens.
            d_ff: Hidden width of an expert if `config.d_ff` is 0; else unused.
            config: Settings of the experts and the router.
            rngs: Random number generators; each parameter draws a key from the stream `params`.
            kernel_init: Initializer of the router and of the first matrices of the experts (gate and up); by default, a normal
                distribution with the standard deviation 0.02.
            down_init: Initializer of the second matrices of the experts (down); None for `kernel_init`.

        Raises:
            ConfigError: If `config.num_experts` is 0.
        """
        require(config.num_experts > 0, "model.moe.num_experts", config.num_experts, "positive for jgraph.MoE")
        self.config, self.use_running_average = config, False  # Flax' `train()` and `eval()` set `use_running_average`.
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
            # Reduced by a maximum, which changes nothing: every microbatch computes the same bias.
            self.bias_E = nnx.Variable(jnp.zeros(E), reduction="max")

    def __call__(self, x_BTD: Array, *, weight: Array | float = 1.0) -> Array:
        """Computes the weighted sum of the experts of each token, plus the shared experts.

        In training mode (`use_running_average` is False), replaces the values of the state variables, and attaches the losses
        of the router to the result: backward adds their gradients to the gradient of the loss. With sharded experts, a
        collective over the mesh axis `fsdp`: call it under `jax.shard_map` on every device of the axis.

        Args:
            x_BTD: Tokens [..., D], bfloat16 or float32; any leading axes. The experts compute in this dtype, and the router in
                float32.
            weight: Factor of the router's losses, a scalar; 1 if the loss of the microbatch is a mean. If it is a sum over
                tokens (`jgraph.Loss`), pass its weight, so that the losses of the router have the same scale.

        Returns:
            An array with the shape and dtype of `x_BTD`.
        """
        config, dtype = self.config, x_BTD.dtype
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        with scope("router"):
            logits_NE = _router.logits(x_ND, self.router_DE[...].astype(jnp.float32))
            bias_E = None
            if config.router == "sigmoid":
                bias_E = _router.updated_bias(self.bias_E[...], self.tokens_E[...], config.bias_rate)
            found = _router.route(logits_NE, config, bias_E)
        weights = self.up_EDF2[...].astype(dtype), self.down_EFD[...].astype(dtype)
        if len(weights[0]) < config.num_experts:
            y_ND, overflow = _experts.sharded_mixture(x_ND, found, *weights, config)
        else:
            y_ND, overflow = _experts.mixture(x_ND, found, *weights), _experts.Overflow(*[jnp.zeros((), jnp.int32)] * 2)
        if config.shared_experts:
            with scope("experts"):
                hidden_NF = swiglu(x_ND @ self.shared_up_DF2[...].astype(dtype))
                y_ND += hidden_NF @ self.shared_down_FD[...].astype(dtype)
        if not self.use_running_average:
            self.dropped.set_value(overflow.dropped)
            self.overflow.set_value(overflow.needed if config.overflow == "replay" else jnp.zeros_like(overflow.needed))
            with scope("router"):
                y_ND = self._train(y_ND, found, logits_NE, bias_E, weight)
        return y_ND.reshape(x_BTD.shape)

    def _train(self, y: Array, found: _router.Routing, logits_NE: Array, bias_E: Array | None, weight: Array | float) -> Array:
        """Attaches the losses of the router to y, and writes the state."""
        config = self.config
        balance, z = _router.balance_loss(found.probabilities, found.counts), _router.z_loss(logits_NE)
        if config.balance_loss or config.z_loss:
            y = _router.attach(y, weight * (config.balance_loss * balance + config.z_loss * z))
        if bias_E is not None:
            self.bias_E.set_value(bias_E)
        self.tokens_E.set_value(found.counts)
        self.unseen_E.set_value(jnp.where(found.counts > 0, 0, self.unseen_E[...] - 1))
        for place, value in (self.entropy, _router.entropy(found.probabilities)), (self.balance, balance), (self.z, z):
            place.set_value(jax.lax.stop_gradient(value))
        return y
