"""`MoE`: a Flax NNX layer with a mixture of experts, which replaces an MLP."""

# B batch, T sequence, N = B * T tokens, E experts, D model, F hidden of an expert

import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.sharding import PartitionSpec

from jgraph.errors import require
from jgraph.kernels.swiglu import swiglu
from jgraph.mesh import Axis, axis_names, is_bound, partitioned, per_shard, summable, token_axes
from jgraph.moe import _experts, _router
from jgraph.moe.config import MoEConfig
from jgraph.scopes import scope

_INIT = nnx.initializers.normal(0.02)
_CONTEXT, _TENSOR = Axis.CONTEXT.value, Axis.TENSOR.value

# Mesh axes of the axes of the parameters: hidden units are split over `tensor`.
_SHARDS = {
    "router_DE": PartitionSpec(),
    "up_EDF2": PartitionSpec(None, None, _TENSOR),
    "down_EFD": PartitionSpec(None, _TENSOR),
    "shared_up_DF2": PartitionSpec(None, _TENSOR),
    "shared_down_FD": PartitionSpec(_TENSOR),
}


class MoE(nnx.Module):
    """Routes each token to a few of many SwiGLU experts, in place of an MLP.

    E is the number of experts, D the width of the model, F the hidden width of an expert. A row is one token for one of its
    experts. If a strategy shards the experts over devices (`FullySharded.experts`), a device holds some of the experts, and
    rows are sent to the device of their expert. The expert capacity limits the rows from one device to another. No row is
    dropped unless `config.overflow` is "drop".

    On a mesh with the axis `context`, each device routes its own tokens: a share of the axis in front of D. On a mesh with the
    axis `tensor`, each device computes its share of the hidden units of every expert. `jgraph.TensorParallel` splits the
    parameters without a rule.

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
        self.config = config
        self.use_running_average = False  # Flax' `train()` and `eval()` set it.
        down_init = down_init or kernel_init
        E, D, F = config.num_experts, d_model, config.d_ff or d_ff
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
        bias_E = None
        if self.config.router == "sigmoid":
            with scope("router"):
                bias_E = _router.updated_bias(self.bias_E[...], self.tokens_E[...], self.config.bias_rate)
        params = {name: getattr(self, name)[...] for name in _SHARDS if hasattr(self, name)}
        shards = {name: _SHARDS[name] for name in params}
        # Like the residual stream, so that devices of the axis `tensor` gather tokens and reduce-scatter results.
        tokens = token_axes(x_BTD.shape)
        tensor = partitioned(_TENSOR)
        shared = next((axis for axis, names in enumerate(tokens) if _TENSOR in axis_names(names)), None)

        def on_shard(x_BTD: Array, params: dict[str, Array], bias_E: Array | None) -> tuple[Array, dict[str, Array]]:
            dtype = x_BTD.dtype
            if tensor > 1 and shared is not None:
                x_BTD = lax.all_gather(summable(x_BTD), _TENSOR, axis=shared, tiled=True).astype(dtype)
            y_BTD, found = self._computed(x_BTD, params, bias_E)
            if tensor > 1 and shared is not None:
                y_BTD = lax.psum_scatter(summable(y_BTD), _TENSOR, scatter_dimension=shared, tiled=True).astype(dtype)
            elif tensor > 1:
                y_BTD = lax.psum(summable(y_BTD), _TENSOR).astype(dtype)
            return y_BTD, found

        run = per_shard(on_shard, (tokens, shards, PartitionSpec()), (tokens, PartitionSpec()))
        y_BTD, found = run(x_BTD, params, bias_E)
        if not self.use_running_average:
            with scope("router"):
                # Outside of `per_shard`, because the cotangent of the losses is 1 for all devices together.
                y_BTD = self._train(y_BTD, found, bias_E, weight)
        return y_BTD

    def _computed(self, x_BTD: Array, params: dict[str, Array], bias_E: Array | None) -> tuple[Array, dict[str, Array]]:
        """Computes the layer on the tokens and hidden units of a device. Devices of the axis `tensor` have the same tokens.

        Returns the sum over these units, and the new values of state that does not depend on old state; {} in evaluation mode.
        """
        config = self.config
        dtype = x_BTD.dtype
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        with scope("router"):
            logits_NE = _router.logits(x_ND, params["router_DE"].astype(jnp.float32))
            found = _router.route(logits_NE, config, bias_E)
        weights = params["up_EDF2"].astype(dtype), params["down_EFD"].astype(dtype)
        if len(weights[0]) < config.num_experts:
            y_ND, overflow = _experts.sharded_mixture(x_ND, found, *weights, config)
        else:
            y_ND = _experts.mixture(x_ND, found, *weights)
            zero = jnp.zeros((), jnp.int32)
            overflow = _experts.Overflow(zero, zero)
        if config.shared_experts:
            with scope("experts"):
                hidden_NF = swiglu(x_ND @ params["shared_up_DF2"].astype(dtype))
                y_ND += hidden_NF @ params["shared_down_FD"].astype(dtype)
        y_BTD = y_ND.reshape(x_BTD.shape)
        if self.use_running_average:
            return y_BTD, {}
        with scope("router"):
            values = {
                "tokens_E": found.counts,
                "entropy": _router.entropy(found.probabilities),
                "balance": _router.balance_loss(found.probabilities, found.counts),
                "z": _router.z_loss(logits_NE),
                "dropped": overflow.dropped,
                "overflow": overflow.needed if config.overflow == "replay" else jnp.zeros_like(overflow.needed),
            }
            return y_BTD, {name: _over_context(getattr(self, name), value) for name, value in values.items()}

    def _train(self, y: Array, found: dict[str, Array], bias_E: Array | None, weight: Array | float) -> Array:
        """Attaches the losses of the router to y, and writes the state."""
        config = self.config
        if config.balance_loss or config.z_loss:
            y = _router.attach(y, weight * (config.balance_loss * found["balance"] + config.z_loss * found["z"]))
        if bias_E is not None:
            self.bias_E.set_value(bias_E)
        self.unseen_E.set_value(jnp.where(found["tokens_E"] > 0, 0, self.unseen_E[...] - 1))
        for name, value in found.items():
            getattr(self, name).set_value(lax.stop_gradient(value))
        return y


def _over_context(variable: nnx.Variable, value: Array) -> Array:
    """Reduces a new value of a state variable over the axis `context`, as a step reduces it over data ranks."""
    if not is_bound(_CONTEXT):
        return value
    reduce = {"sum": lax.psum, "mean": lax.pmean, "halt": lax.pmax}[variable.get_metadata()["reduction"]]
    return reduce(value, _CONTEXT)
