"""A Flax model as pure functions of its parameters: any NNX module, or a Linen one.

Random number streams of the model (dropout) are seeded from the key of each call. What is neither a parameter nor a stream,
such as running statistics, is carried: it goes in and comes out.
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

from jgraph.errors import ConfigError
from jgraph.mesh import with_batch_axes
from jgraph.tree import leaf_names

Tree = Any
Mode = Literal["train", "evaluate"]


@dataclass(frozen=True, eq=False)
class Decoder:
    """The functions that generate text with a KV cache. A Flax module provides one by a method `cached_decoder()`.

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
        shapes: of the parameters, a nested dict of `jax.ShapeDtypeStruct`s.
        carried: shapes of its other state; empty where it has none.
        init: `init()` makes (parameters, carried state); can be jitted.
        call: `call(name, mode, params, carried, key, *args)` returns a method's result and the carried state after it.
        annotations: Flax's partition names, a PartitionSpec or None by the name of a parameter.
        reductions: how the carried state is reduced, a tree of names for `train_step`: what an NNX variable has as `reduction`,
            else "mean".
        decoder: that of the module's `cached_decoder()`; None where it has none.
    """

    shapes: Tree
    carried: Tree
    init: Callable[[], tuple[Tree, Tree]]
    call: Callable[..., tuple[Any, Tree]]
    annotations: dict[str, PartitionSpec | None] = field(default_factory=dict)
    decoder: Decoder | None = None
    reductions: Tree = field(default_factory=dict)

    def new_state(self, shardings: Tree = None) -> Tree:
        """Returns the carried state as the model makes it, where it should lie. Makes no parameters."""
        return jax.jit(lambda: self.init()[1], out_shardings=shardings)() if jax.tree.leaves(self.carried) else self.carried

    def loss(self, params: Tree, batch: Tree, key: Array, carried: Tree = None) -> tuple[Array, Tree]:
        """Computes the module's `loss(batch)` in training mode. The loss may reduce over `jgraph.BATCH_AXES`.

        Args:
            params: Parameters, like `shapes`.
            batch: The argument of the module's `loss`.
            key: Seeds dropout.
            carried: Carried state, like `self.carried`; may be omitted if that is empty.

        Returns:
            The loss, and the carried state after it.

        Raises:
            ConfigError: If the model carries state and `carried` is empty.
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
        """Calls a method in evaluation: without dropout, with the running statistics, which stay. Returns its result."""
        return with_batch_axes(partial(self.call, name, "evaluate"))(params, carried, jax.random.key(0), *args)[0]


def functional(make: Callable[[], Any], batch: Any = None, *, key: int = 0) -> FunctionalModel:
    """Turns a Flax module into pure functions of its parameters, for `train_step`. Traces the module; computes nothing.

    Does the work of `nnx.split` and `nnx.merge` or of Linen's `init` and `apply`, in one way for both. Dropout takes the key
    of each call.

    >>> class Line(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.linear = nnx.Linear(2, 1, rngs=rngs)
    ...     def loss(self, batch):
    ...         return jnp.mean((self.linear(batch["x"]) - batch["y"]) ** 2)
    >>> model = jgraph.functional(lambda: Line(nnx.Rngs(0)))
    >>> params, carried = model.init()
    >>> value, carried = model.loss(params, {"x": jnp.ones((4, 2)), "y": jnp.ones((4, 1))}, jax.random.key(0), carried)

    Args:
        make: A function without arguments that makes the NNX module, with its parameters, or the Linen module.
        batch: Arrays or shapes of a batch, the argument of the module's `loss`. Required for a Linen module, which makes its
            parameters from it.
        key: Seed of the parameters of a Linen module.

    Returns:
        A `FunctionalModel`: `shapes` of the parameters and `carried` state, `init`, `loss`, `evaluate`, Flax's `annotations`.

    Raises:
        ConfigError: If `make` is not such a function, or a Linen module has no `loss` or no `batch`.
    """
    _check_make(make)
    found: list[Any] = []
    shapes = nnx.eval_shape(lambda: found.append(made := make()) or (made if isinstance(made, nnx.Module) else None))
    made = found[0]
    if isinstance(made, nn.Module):
        if not callable(getattr(made, "loss", None)):
            raise ConfigError(
                f"`make` returns {type(made).__name__}: must return a module with a method loss(batch)", field="make"
            )
        if batch is None:
            raise ConfigError("`batch` is None: must be arrays or shapes of a batch for a Linen module", field="batch")
        return _linen(made, batch, key)
    if not isinstance(made, nnx.Module):
        raise ConfigError(f"`make` returns {made!r}: must return a Flax module, nnx.Module or linen.Module", field="make")
    return _nnx(make, shapes)


def _check_make(make: Any) -> None:
    """Raises ConfigError unless `make` can be called without arguments to make a module."""
    if isinstance(make, nnx.Module | nn.Module) or not callable(make):
        what = type(make).__name__ if callable(make) else repr(make)
        raise ConfigError(
            f"`make` is {what}: must be a function that makes a module, e.g. lambda: Model(nnx.Rngs(0))", field="make"
        )
    try:
        if isinstance(make, type):
            inspect.signature(make.__init__).bind(None)
        else:
            inspect.signature(make).bind()
    except TypeError as e:
        name = getattr(make, "__name__", repr(make))
        raise ConfigError(
            f"`make` is {name} ({e}): must take no arguments, e.g. lambda: {name}(nnx.Rngs(0))", field="make"
        ) from None
    except ValueError:  # a function without a signature
        pass


def _nnx(make: Callable[[], nnx.Module], model: Any) -> FunctionalModel:
    def split(model: Any) -> tuple[Any, Tree, Tree, Tree]:
        graphdef, *states = nnx.split(model, nnx.Param, nnx.RngState, ...)
        return graphdef, *map(nnx.to_pure_dict, states)

    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model, nnx.Param)))
    state = nnx.state(model, nnx.Not(nnx.Any(nnx.Param, nnx.RngState)))
    reductions = nnx.to_pure_dict(jax.tree.map(_reduction, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))
    graphs = {}
    for mode, turn in (("evaluate", model.eval), ("train", model.train)):
        turn()
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
    """Returns PartitionSpecs by the name of their parameter."""
    leaves = jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    return dict(zip(leaf_names(shapes), leaves, strict=True))


def _reduction(variable: nnx.Variable) -> str:
    return variable.get_metadata().get("reduction", "mean")


def _decoder(module: Any) -> Decoder | None:
    make = getattr(module, "cached_decoder", None)
    return None if make is None else make()


def _seeded(streams: Tree, key: Array) -> Tree:
    """Returns the random number streams of a model as a call begins: each with a key of its own, none drawn from."""

    def seed(index: int, leaf: Any) -> Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros(leaf.shape, leaf.dtype)
        own = jax.random.fold_in(key, index)
        return jax.random.split(own, leaf.shape) if leaf.shape else own

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
        # Streams that are not named here begin from this one.
        how: Any = {"method": name, "rngs": {"params": key}, **_mode(module, name, mode)}
        if mode == "train" and carried:
            return module.apply({"params": params, **carried}, *args, mutable=list(carried), **how)
        return module.apply({"params": params, **carried}, *args, **how), carried

    abstract = jax.eval_shape(boxed, batch)
    shapes, carried = jax.eval_shape(split, abstract)
    specs = nn.get_partition_spec(abstract)["params"]
    reductions = jax.tree.map(lambda _: "mean", carried)
    return FunctionalModel(shapes, carried, init, call, _named(shapes, specs), _decoder(module), reductions)


def _mode(module: nn.Module, name: str, mode: Mode) -> dict[str, bool]:
    """Returns `train=` for a method that takes it, as Linen's models tell training from evaluation."""
    return {"train": mode == "train"} if "train" in inspect.signature(getattr(module, name)).parameters else {}
