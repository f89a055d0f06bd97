"""Converts a Flax NNX or Linen module into pure functions of its parameters.

The random number streams of the model (dropout) are seeded from the key of each call. Variables that are neither parameters nor
streams, such as running statistics, are mutable state: an argument and a result of each call.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jgraph.errors import ConfigError, require
from jgraph.mesh import with_batch_axes
from jgraph.tree import leaf_names

Tree = Any
Mode = Literal["train", "evaluate"]


@dataclass(frozen=True, eq=False)
class Decoder:
    """Functions that generate text with a KV cache. A Flax module provides them by a method `cached_decoder()`.

    Attributes:
        prepare: `prepare(params, carried)` returns the weights for the other two functions, for example cast and transposed.
            Called once per call of `generate`.
        prefill: `prefill(weights, tokens_BT, lengths_B, slots=, length=)` reads prompts padded on the right to T. Returns the
            float32 logits of the next token, (B, V), and a cache for `slots` tokens per text. Positions stay below `length`.
        decode: `decode(weights, tokens_B, cache, positions_B)` reads one token of each text. Positions count from the start of
            the text. They exceed the last slot once the text outgrows the window; the token then replaces the oldest one.
            Returns the logits of the next token and the updated cache, with the same shapes and dtypes.
    """

    prepare: Callable[[Tree, Tree], Tree]
    prefill: Callable[..., tuple[Array, Tree]]
    decode: Callable[[Tree, Array, Tree, Array], tuple[Array, Tree]]


@dataclass(frozen=True, eq=False)
class FunctionalModel:
    """A Flax model as pure functions. Made by `functional`.

    Attributes:
        shapes: Parameters as a nested dict of `jax.ShapeDtypeStruct`.
        carried: Shapes of the mutable state; empty if there is none.
        init: `init()` returns (parameters, mutable state). Can be jitted.
        call: `call(name, mode, params, carried, key, *args)` returns the result of a method and the mutable state after it.
        annotations: Flax's partition names, a PartitionSpec or None for each parameter name.
        reductions: How `train_step` reduces the mutable state, a tree of names: the `reduction` of an NNX variable, else
            "mean".
        decoder: Result of the module's `cached_decoder()`; None if it has no such method.
    """

    shapes: Tree
    carried: Tree
    init: Callable[[], tuple[Tree, Tree]]
    call: Callable[..., tuple[Any, Tree]]
    annotations: dict[str, PartitionSpec | None] = field(default_factory=dict)
    decoder: Decoder | None = None
    reductions: Tree = field(default_factory=dict)

    def new_state(self, shardings: Tree = None) -> Tree:
        """Returns the initial mutable state with these shardings. Computes no parameters."""
        return jax.jit(lambda: self.init()[1], out_shardings=shardings)() if jax.tree.leaves(self.carried) else self.carried

    def loss(self, params: Tree, batch: Tree, key: Array, carried: Tree = None) -> tuple[Array, Tree]:
        """Computes the module's `loss(batch)` in training mode. The loss may reduce over `jgraph.BATCH_AXES`.

        Args:
            params: Parameters, like `shapes`.
            batch: The argument of the module's `loss`.
            key: Seeds dropout.
            carried: Mutable state, like `self.carried`. Can be omitted if that is empty.

        Returns:
            The loss, and the mutable state after it.

        Raises:
            ConfigError: If the model has mutable state and `carried` is empty.
        """
        carried = carried or {}
        if (names := leaf_names(self.carried)) and not jax.tree.leaves(carried):
            raise ConfigError(
                f"`carried` is empty: must have {', '.join(names[:3])}, ...; pass `carried=model.carried` to train_step and "
                "the fourth argument of your loss to model.loss",
                field="carried",
            )
        return with_batch_axes(partial(self.call, "loss", "train"))(params, carried, key, batch)

    def evaluate(self, name: str, params: Tree, carried: Tree, *args: Any) -> Any:
        """Calls a method in evaluation mode: without dropout, with running statistics, without changes of the mutable state.

        Args:
            name: Name of the method.
            params: Parameters, like `shapes`.
            carried: Mutable state, like `self.carried`.
            *args: Arguments of the method.

        Returns:
            The result of the method.
        """
        return with_batch_axes(partial(self.call, name, "evaluate"))(params, carried, jax.random.key(0), *args)[0]


def functional(make: Callable[[], Any], batch: Any = None, *, key: int = 0) -> FunctionalModel:
    """Converts a Flax module into pure functions of its parameters, for `train_step`. Only traces the module.

    Replaces `nnx.split` and `nnx.merge` for NNX, and `init` and `apply` for Linen. Dropout uses the key of each call.

    Args:
        make: A function without arguments that returns an NNX module, with its parameters, or a Linen module.
        batch: Arrays or shapes of a batch, the argument of the module's `loss`. Required for a Linen module, to initialize its
            parameters.
        key: Seed of the parameters of a Linen module.

    Returns:
        The model, with `shapes` of the parameters, `carried` state, `init`, `loss`, `evaluate` and Flax's `annotations`.

    Raises:
        ConfigError: If `make` is not such a function, or a Linen module has no `loss` or no `batch`.

    Examples:
        >>> class Line(nnx.Module):
        ...     def __init__(self, rngs):
        ...         self.linear = nnx.Linear(2, 1, rngs=rngs)
        ...     def loss(self, batch):
        ...         return jnp.mean((self.linear(batch["x"]) - batch["y"]) ** 2)
        >>> model = jgraph.functional(lambda: Line(nnx.Rngs(0)))
        >>> params, carried = model.init()
        >>> value, carried = model.loss(params, {"x": jnp.ones((4, 2)), "y": jnp.ones((4, 1))}, jax.random.key(0), carried)
    """
    _check_make(make)
    found: list[Any] = []

    def build() -> nnx.Module | None:
        found.append(make())
        return found[0] if isinstance(found[0], nnx.Module) else None

    shapes, made = nnx.eval_shape(build), found[0]
    if isinstance(made, nn.Module):
        if not callable(getattr(made, "loss", None)):
            message = f"`make` returns {type(made).__name__}: must return a module with a method loss(batch)"
            raise ConfigError(message, field="make")
        if batch is None:
            raise ConfigError("`batch` is None: must be arrays or shapes of a batch for a Linen module", field="batch")
        return _linen(made, batch, key)
    if not isinstance(made, nnx.Module):
        raise ConfigError(f"`make` returns {made!r}: must return a Flax module, nnx.Module or linen.Module", field="make")
    return _nnx(make, shapes)


def _check_make(make: Any) -> None:
    """Raises ConfigError unless `make` can be called without arguments."""
    fits = callable(make) and not isinstance(make, nnx.Module | nn.Module)
    description = type(make).__name__ if callable(make) else repr(make)
    require(fits, "make", description, "a function that returns a module, e.g. lambda: Model(nnx.Rngs(0))")
    try:
        inspect.signature(partial(make.__init__, None) if isinstance(make, type) else make).bind()
    except TypeError as e:
        name = getattr(make, "__name__", repr(make))
        message = f"`make` is {name} ({e}): must take no arguments, e.g. lambda: {name}(nnx.Rngs(0))"
        raise ConfigError(message, field="make") from None
    except ValueError:  # a function without a signature
        pass


def _nnx(make: Callable[[], nnx.Module], model: Any) -> FunctionalModel:
    def split(model: Any) -> tuple[Any, Tree, Tree, Tree]:
        graphdef, *states = nnx.split(model, nnx.Param, nnx.RngState, ...)
        return graphdef, *map(nnx.to_pure_dict, states)

    def reduction(variable: nnx.Variable) -> str:
        return variable.get_metadata().get("reduction", "mean")

    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model, nnx.Param)))
    state = nnx.state(model, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))
    reductions = nnx.to_pure_dict(jax.tree.map(reduction, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))
    graphs = {}
    for mode, set_mode in (("evaluate", model.eval), ("train", model.train)):
        set_mode()
        graphs[mode], shapes, streams, carried = split(model)

    def init() -> tuple[Tree, Tree]:
        _, params, _, carried = split(make())
        return params, carried

    def call(name: str, mode: Mode, params: Tree, carried: Tree, key: Array, *args: Any) -> tuple[Any, Tree]:
        model = nnx.merge(graphs[mode], params, _seeded(streams, key), carried)
        found = getattr(model, name)(*args)
        return found, split(model)[3]

    return FunctionalModel(shapes, carried, init, call, _named(shapes, specs), _decoder(model), reductions)


def _named(shapes: Tree, specs: Tree) -> dict[str, PartitionSpec | None]:
    """Returns PartitionSpecs by parameter name."""
    leaves = jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    return dict(zip(leaf_names(shapes), leaves, strict=True))


def _decoder(module: Any) -> Decoder | None:
    return module.cached_decoder() if hasattr(module, "cached_decoder") else None


def _seeded(streams: Tree, key: Array) -> Tree:
    """Returns new random number streams for a call, each with its own key."""

    def seed(index: int, leaf: Any) -> Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros(leaf.shape, leaf.dtype)
        stream_key = jax.random.fold_in(key, index)
        return jax.random.split(stream_key, leaf.shape) if leaf.shape else stream_key

    leaves, structure = jax.tree.flatten(streams)
    return structure.unflatten([seed(index, leaf) for index, leaf in enumerate(leaves)])


def _linen(module: nn.Module, batch: Any, seed: int) -> FunctionalModel:
    @with_batch_axes
    def boxed(batch: Any) -> Tree:
        return module.init(jax.random.key(seed), batch, method="loss", **_mode(module, "loss", "train"))

    def split(variables: Tree) -> tuple[Tree, Tree]:
        carried = dict(nn.meta.unbox(variables))
        return carried.pop("params"), carried

    def init() -> tuple[Tree, Tree]:
        return split(boxed(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), batch)))

    def call(name: str, mode: Mode, params: Tree, carried: Tree, key: Array, *args: Any) -> tuple[Any, Tree]:
        # Linen derives all other streams from `params`.
        options: Any = {"method": name, "rngs": {"params": key}, **_mode(module, name, mode)}
        if mode == "train" and carried:
            return module.apply({"params": params, **carried}, *args, mutable=list(carried), **options)
        return module.apply({"params": params, **carried}, *args, **options), carried

    abstract = jax.eval_shape(boxed, batch)
    shapes, carried = jax.eval_shape(split, abstract)
    specs = nn.get_partition_spec(abstract)["params"]
    reductions = jax.tree.map(lambda _: "mean", carried)
    return FunctionalModel(shapes, carried, init, call, _named(shapes, specs), _decoder(module), reductions)


def _mode(module: nn.Module, name: str, mode: Mode) -> dict[str, bool]:
    """Returns the argument `train` if the method has it: by convention, Linen modules take the mode as this argument."""
    return {"train": mode == "train"} if "train" in inspect.signature(getattr(module, name)).parameters else {}
