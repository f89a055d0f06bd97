"""Converts a Flax NNX or Linen module into pure functions of its parameters.

The random number streams of the model (dropout) are seeded from the key of each call. Variables that are neither parameters nor
streams, such as running statistics, are mutable state: an argument and a result of each call.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jgraph.errors import ConfigError, require, shown
from jgraph.mesh import with_batch_axes
from jgraph.tree import leaf_names
from jgraph.types import Annotations, Batch, Carried, Key, Leaf, Params, Reduction, Reductions, Shardings, Specs, Tree

Mode = Literal["train", "evaluate"]

# The prepared parameters of a decoder, and its cache of earlier tokens.
Weights = TypeVar("Weights", bound=Tree)
Cache = TypeVar("Cache", bound=Tree)

FlaxModule: TypeAlias = nnx.Module | nn.Module


@dataclass(frozen=True, eq=False)
class Decoder(Generic[Weights, Cache]):
    """Functions that generate text with a KV cache. A Flax module provides them by a method `cached_decoder()`.

    All three functions are traced inside `jax.jit`. B texts, T tokens of the longest prompt, V vocabulary. Logits are float32
    [B, V] and belong to the token after the last one that was read. The cache is a pytree of arrays of the decoder's choice.

    Attributes:
        prepare: `prepare(params, carried)` takes the parameters and the mutable state of the model. Returns a pytree of weights
            for the other two functions, for example cast and transposed. Called once per call of `generate`.
        prefill: `prefill(weights, tokens_BT, lengths_B, slots=, length=)` reads the prompts. `tokens_BT` has int32 token ids,
            padded on the right to T. `lengths_B` has the number of tokens of each prompt. `slots` is the number of tokens per
            text that the cache must hold, at least T. `length` exceeds every position that `decode` will get, e.g. for the size
            of a table of positions. Both are Python ints. Returns (logits, cache).
        decode: `decode(weights, tokens_B, cache, positions_B)` reads one int32 token of each text, at its int32 position in the
            text, from 0. A position of `slots` or more means that the text outgrew the cache; the token then replaces the
            oldest one. Returns (logits, new cache). The new cache must have the shapes and dtypes of the old one, which is
            donated.
    """

    prepare: Callable[[Params, Carried], Weights]
    prefill: Callable[..., tuple[Array, Cache]]
    decode: Callable[[Weights, Array, Cache, Array], tuple[Array, Cache]]


@dataclass(frozen=True, eq=False)
class FunctionalModel:
    """A Flax model as pure functions. Made by `functional`.

    Attributes:
        shapes: Parameters as a nested dict of `jax.ShapeDtypeStruct`.
        carried: The mutable state as a nested dict of `jax.ShapeDtypeStruct`: Flax variables that are neither parameters nor
            random number streams, such as running statistics. Empty if there is none.
        init: `init()` returns a new tuple (parameters, mutable state): nested dicts of arrays like `shapes` and `carried`. The
            values depend only on the seed: for Linen the argument `key` of `functional`, for NNX the one that `make` uses. Can
            be jitted.
        call: `call(name, mode, params, carried, key, *args)` calls the method `name` of the module with `args`. `mode` is
            "train" or "evaluate". `key` is the `jax.random` key that seeds dropout. Returns (result of the method, mutable
            state after it).
        annotations: Flax's partition names: the PartitionSpec of each parameter, or None without one, by parameter name such
            as `blocks/0/kernel`.
        decoder: Result of the module's `cached_decoder()`; None if it has no such method.
        reductions: How `train_step` combines the mutable state of microbatches and devices: a tree like `carried` of "mean",
            "sum", "max", "last" (of the last microbatch) or "halt" (the maximum of integers that stop the training if one is
            positive). Taken from the metadata `reduction` of an NNX variable. Without it and for Linen, "mean" for floating
            arrays and "last" for others.
    """

    shapes: Params
    carried: Carried
    init: Callable[[], tuple[Params, Carried]]
    call: Callable[..., tuple[Any, Carried]]
    annotations: Annotations = field(default_factory=dict)
    decoder: Decoder | None = None
    reductions: Reductions = field(default_factory=dict)

    def new_state(self, shardings: Shardings = None) -> Carried:
        """Computes the initial mutable state, without the parameters.

        Args:
            shardings: A tree like `carried` of shardings, or one sharding for all arrays. None for the default device.

        Returns:
            New arrays in a tree like `carried`. Empty if the model has no mutable state.
        """
        return jax.jit(lambda: self.init()[1], out_shardings=shardings)() if jax.tree.leaves(self.carried) else self.carried

    def loss(self, params: Params, batch: Batch, key: Key, carried: Carried = None) -> tuple[Array, Carried]:
        """Computes the module's `loss(batch)` in training mode, with dropout and updates of the mutable state.

        The loss may use collectives over the mesh axes `jgraph.BATCH_AXES`, also outside `jax.shard_map`.

        Args:
            params: Parameters, arrays in a tree like `self.shapes`. Not donated.
            batch: The argument of the module's `loss`, a pytree of arrays.
            key: A `jax.random` key, which seeds dropout.
            carried: Mutable state, arrays in a tree like `self.carried`. Not changed. Can be omitted if `self.carried` is
                empty.

        Returns:
            A tuple of the result of the module's `loss`, and the mutable state after the call, a tree like `self.carried`.

        Raises:
            ConfigError: If the model has mutable state and `carried` is empty, or the loss reduces over a mesh axis that is
                neither bound nor in `BATCH_AXES`, or an NNX module has no method `loss`.
        """
        carried = carried or {}
        if (names := leaf_names(self.carried)) and not jax.tree.leaves(carried):
            raise ConfigError(
                f"`carried` is empty: must have {', '.join(names[:3])}, ...; pass `carried=model.carried` to train_step and "
                "the fourth argument of your loss to model.loss",
                field="carried",
            )
        return with_batch_axes(partial(self.call, "loss", "train"))(params, carried, key, batch)

    def evaluate(self, name: str, params: Params, carried: Carried, *args: Tree) -> Any:
        """Calls a method in evaluation mode: without dropout, with running statistics, without changes of the mutable state.

        Args:
            name: Name of the method of the module, e.g. `loss` or `logits`.
            params: Parameters, arrays in a tree like `self.shapes`. Not donated.
            carried: Mutable state, arrays in a tree like `self.carried`. Not changed.
            *args: Positional arguments of the method, pytrees of arrays.

        Returns:
            The result of the method.

        Raises:
            AttributeError: If the module has no such method.
            ConfigError: If the method reduces over a mesh axis that is neither bound nor in `BATCH_AXES`.
        """
        return with_batch_axes(partial(self.call, name, "evaluate"))(params, carried, jax.random.key(0), *args)[0]


def functional(make: Callable[[], FlaxModule], batch: Batch = None, *, key: int = 0) -> FunctionalModel:
    """Converts a Flax module into pure functions of its parameters, for `train_step`. Only traces the module.

    Replaces `nnx.split` and `nnx.merge` for NNX, and `init` and `apply` for Linen. Dropout uses the key of each call. If a
    Linen method has an argument `train`, it receives True in training mode and False in evaluation mode.

    Args:
        make: A function without arguments that returns an NNX module, with its parameters, or a Linen module. Called once now,
            under `nnx.eval_shape`, and for NNX once in each call of `init` of the result.
        batch: A pytree of arrays or `jax.ShapeDtypeStruct`, the argument of the module's `loss`. Only shapes and dtypes are
            used. Required for a Linen module, to initialize its parameters. Ignored for an NNX module.
        key: Integer seed of the parameters of a Linen module. Ignored for an NNX module, which seeds itself.

    Returns:
        The model as pure functions. Among its attributes are the shapes of the parameters (`shapes`) and of the mutable state
        (`carried`), and the functions `init()`, `loss(params, batch, key, carried)` and
        `evaluate(name, params, carried, *args)`. No arrays are created.

    Raises:
        ConfigError: If `make` cannot be called without arguments or returns no Flax module, or for a Linen module without a
            method `loss` or without `batch`.

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
    found: list[FlaxModule] = []

    def build() -> nnx.Module | None:
        found.append(make())
        return found[0] if isinstance(found[0], nnx.Module) else None

    shapes = nnx.eval_shape(build)
    made = found[0]
    if isinstance(made, nn.Module):
        _check_loss(made)
        if batch is None:
            raise ConfigError("`batch` is None: must be arrays or shapes of a batch for a Linen module", field="batch")
        return _linen(made, batch, key)
    if shapes is None:
        raise ConfigError(f"`make` returns {shown(made)}: must return a Flax module, nnx.Module or linen.Module", field="make")
    return _nnx(make, shapes)


def _check_make(make: Callable[[], FlaxModule]) -> None:
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


def _nnx(make: Callable[[], FlaxModule], model: nnx.Module) -> FunctionalModel:
    def split(model: FlaxModule) -> tuple[nnx.GraphDef, Params, Tree, Carried]:
        graphdef, *states = nnx.split(model, nnx.Param, nnx.RngState, ...)
        params, streams, carried = map(nnx.to_pure_dict, states)
        return graphdef, params, streams, carried

    def reduction(variable: nnx.Variable) -> str:
        return variable.get_metadata().get("reduction", "")

    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model, nnx.Param)))
    state = nnx.state(model, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))
    reductions = nnx.to_pure_dict(jax.tree.map(reduction, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))
    graphs = {}
    for mode, set_mode in (("evaluate", model.eval), ("train", model.train)):
        set_mode()
        graphs[mode], shapes, streams, carried = split(model)
    reductions = jax.tree.map(lambda kind, leaf: kind or _default_reduction(leaf), reductions, carried)

    def init() -> tuple[Params, Carried]:
        _, params, _, carried = split(make())
        return params, carried

    def call(name: str, mode: Mode, params: Params, carried: Carried, key: Key, *args: Tree) -> tuple[Any, Carried]:
        model = nnx.merge(graphs[mode], params, _seeded(streams, key), carried)
        if name == "loss":
            _check_loss(model)
        found = getattr(model, name)(*args)
        return found, split(model)[3]

    return FunctionalModel(shapes, carried, init, call, _named(shapes, specs), _decoder(model), reductions)


def _default_reduction(leaf: Leaf) -> Reduction:
    """A mean of integers, such as a counter, is no integer."""
    return "mean" if jnp.issubdtype(leaf.dtype, jnp.inexact) else "last"


def _named(shapes: Params, specs: Specs) -> Annotations:
    leaves = jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    return dict(zip(leaf_names(shapes), leaves, strict=True))


def _decoder(module: FlaxModule) -> Decoder | None:
    make = getattr(module, "cached_decoder", None)
    found = None if make is None else make()
    if not isinstance(found, Decoder | None):
        must = f"its cached_decoder() must return a jgraph.Decoder, not a {type(found).__name__}"
        raise ConfigError(f"`make` returns {type(module).__name__}: {must}", field="make")
    return found


def _seeded(streams: Tree, key: Key) -> Tree:
    """Returns new random number streams for a call, each with its own key."""

    def seed(index: int, leaf: Array | jax.ShapeDtypeStruct) -> Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros(leaf.shape, leaf.dtype)
        stream_key = jax.random.fold_in(key, index)
        return jax.random.split(stream_key, leaf.shape) if leaf.shape else stream_key

    leaves, structure = jax.tree.flatten(streams)
    return structure.unflatten([seed(index, leaf) for index, leaf in enumerate(leaves)])


def _linen(module: nn.Module, batch: Batch, seed: int) -> FunctionalModel:
    @with_batch_axes
    def boxed(batch: Batch) -> Mapping[str, Mapping[str, Tree]]:
        return module.init(jax.random.key(seed), batch, method="loss", **_mode(module, "loss", "train"))

    def split(variables: Mapping[str, Mapping[str, Tree]]) -> tuple[Params, Carried]:
        carried = dict(nn.meta.unbox(variables))
        return carried.pop("params"), carried

    def init() -> tuple[Params, Carried]:
        return split(boxed(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), batch)))

    def call(
        name: str, mode: Mode, params: Mapping[str, Tree], carried: Mapping[str, Mapping[str, Tree]], key: Key, *args: Tree
    ) -> tuple[Any, Carried]:
        # Linen derives all other streams from `params`.
        options: Any = {"method": name, "rngs": {"params": key}, **_mode(module, name, mode)}
        if mode == "train" and carried:
            return module.apply({"params": params, **carried}, *args, mutable=list(carried), **options)
        return module.apply({"params": params, **carried}, *args, **options), carried

    abstract = jax.eval_shape(boxed, batch)
    shapes, carried = jax.eval_shape(split, abstract)
    specs = nn.get_partition_spec(abstract)["params"]
    reductions = jax.tree.map(_default_reduction, carried)
    return FunctionalModel(shapes, carried, init, call, _named(shapes, specs), _decoder(module), reductions)


def _check_loss(module: FlaxModule) -> None:
    if not callable(getattr(module, "loss", None)):
        message = f"`make` returns {type(module).__name__}: must return a module with a method loss(batch)"
        raise ConfigError(message, field="make")


def _mode(module: nn.Module, name: str, mode: Mode) -> dict[str, bool]:
    """Returns the argument `train` if the method has it: by convention, Linen modules take the mode as this argument."""
    return {"train": mode == "train"} if "train" in inspect.signature(getattr(module, name)).parameters else {}
