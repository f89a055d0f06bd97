"""LoRA equals the model with merged weights for every use of a weight, or refuses it. New adapters, merging, and parts."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import jgraph
from jgraph.adapters import AdaptedModel, Adapter, separated
from jgraph.autodiff.view import view_of
from jgraph.errors import ConfigError
from jgraph.modules import FunctionalModel

BATCH = jax.random.normal(jax.random.key(0), (5, 6))


@jax.custom_vjp
def own_rule(x: Array, w: Array) -> Array:
    return x @ w


own_rule.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, dy: (dy @ saved[1].T, saved[0].T @ dy))


def there_and_back(x: Array, w: Array) -> Array:
    return jnp.sin(x @ w) @ w.T


def scanned(x: Array, stacked: Array) -> Array:
    return lax.scan(lambda x, w: (there_and_back(x, w), None), x, stacked)[0]


def fixed(x: Array, w: Array) -> Array:
    """Every iteration of the scan has the same weight."""
    return lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=3)[0]


def in_shard_map(x: Array, w: Array) -> Array:
    mesh, whole = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,)), jax.sharding.PartitionSpec()
    return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(whole, whole), out_specs=whole)(x, w)


Use: TypeAlias = Callable[[Array, Array], Array]

SUPPORTED: dict[str, tuple[tuple[int, ...], Use]] = {
    "transposed": ((6, 6), there_and_back),
    "transposed and not square": ((6, 4), there_and_back),
    "first transposed": ((6, 6), lambda x, w: there_and_back(x, w.T)),
    "by einsum": ((6, 4), lambda x, w: jnp.einsum("bn,kn->bk", x @ w, w)),
    "on the left": ((6, 6), lambda x, w: jnp.sin(w @ x.T).T @ w),
    "scanned": ((3, 6, 4), scanned),
    "scanned over another axis": ((6, 3, 4), lambda x, w: scanned(x, jnp.moveaxis(w, 1, 0))),
    "rematerialized": ((6, 4), lambda x, w: jax.checkpoint(there_and_back)(x, w) @ w),
    "heads": ((6, 2, 3), lambda x, w: jnp.einsum("bij,kij->bk", jnp.einsum("bk,kij->bij", x, w), w)),
    "reshaped": ((6, 6), lambda x, w: jnp.einsum("bij,kij->bk", (x @ w).reshape(5, 2, 3), w.reshape(6, 2, 3))),
    "mapped": ((6, 4), jax.vmap(there_and_back, (0, None))),
}
REFUSED: dict[str, tuple[tuple[int, ...], Use]] = {
    "a slice beside": ((6, 4), lambda x, w: (x @ w)[:, :2] + x @ w[:, :2]),
    "one half twice": ((6, 4), lambda x, w: x @ jnp.concatenate([w[:, :2]] * 2, 1)),
    "repeated rows": ((6, 4), lambda x, w: x @ jnp.broadcast_to(w[:1], (6, 4))),
    "reversed rows": ((6, 4), lambda x, w: x @ w[::-1] + x @ w),
    "another reshape": ((6, 4), lambda x, w: x @ w.reshape(4, 6).T + x @ w),
    "a reshape across rows": ((6, 4), lambda x, w: x[:, :3] @ w.T.reshape(3, 8)),
    "other axes": ((6, 6, 6), lambda x, w: jnp.einsum("bij,ijk->bk", jnp.einsum("bk,kij->bij", x, w), w)),
    "rounded to integers": ((6, 4), lambda x, w: x @ w.astype(jnp.int32).astype(jnp.float32)),
    "a matrix for each row": ((5, 6, 4), lambda x, w: jnp.einsum("bk,bkn->bn", x, w)),
    "scaled": ((6, 4), lambda x, w: x @ (2 * w) + x @ w),
    "an elementwise use": ((6, 6), lambda x, w: x @ w + x * jnp.diag(w)),
    "a penalty": ((6, 4), lambda x, w: x @ w + jnp.sum(w**2)),
    "an embedding": ((6, 6), lambda x, w: w[jnp.argsort(x[:, 0])] @ w.T),
    "one weight in a scan": ((6, 6), fixed),
    "in a scan and outside": ((3, 6, 4), lambda x, w: scanned(x, w) @ w[0]),
    "scanned over two axes": ((6, 6, 6), lambda x, w: scanned(scanned(x, w), jnp.moveaxis(w, 1, 0))),
    "a custom gradient beside": ((6, 6), lambda x, w: own_rule(x, w) @ w),
    "shard_map beside": ((6, 6), lambda x, w: in_shard_map(x, w) @ w),
}


def adapted(outputs: Callable[[Array, Any], Array], shapes: Any, *, other: Any = None, **fields: Any) -> AdaptedModel:
    """Adds adapters to all weights of a model of `outputs(x, params)`. `other` is another method of the model."""
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda shape: isinstance(shape, tuple))
    params = structure.unflatten([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in leaves])

    def init() -> Any:
        return jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(1), leaf.shape) / 3, params), {}

    def call(name: str, mode: str, params: Any, carried: Any, key: Array, x: Array) -> Any:
        found = (other if name == "other" else outputs)(x, params)
        return (jnp.mean((found + 0.3) ** 2) if name == "loss" else found), {}

    return jgraph.lora(FunctionalModel(params, {}, init, call), BATCH, **{"rank": 2, "targets": ("*",)} | fields)


def with_one_weight(shape: tuple[int, ...], use: Use) -> AdaptedModel:
    return adapted(lambda x, params: use(x, params["w"]), {"w": shape})


def assert_equals_merged(model: AdaptedModel) -> None:
    """Compares the loss and the gradients of the adapters with those of the base model with merged weights."""
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(2), leaf.shape), model.init()[0])

    def merged(params: Any) -> Array:
        return model.base.loss(model.merge(params), BATCH, jax.random.key(0))[0]

    def losses(params: Any) -> Any:
        own = jax.value_and_grad(lambda params: model.loss(params, BATCH, jax.random.key(0))[0])
        return own(params), jax.value_and_grad(merged)(params)

    (loss, grads), (expected, expected_grads) = jax.jit(losses)(params)
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    found, low = separated(grads)[1], separated(expected_grads)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max())), found, low)
    assert all(bool(leaf.any()) for leaf in jax.tree.leaves(low))


@pytest.mark.parametrize("use", SUPPORTED)
def test_a_weight_and_its_transpose_train_as_merged_weights(use):
    assert_equals_merged(with_one_weight(*SUPPORTED[use]))


@pytest.mark.parametrize("use", REFUSED)
def test_a_weight_with_another_use_is_refused_by_its_name(use):
    with pytest.raises(
        ConfigError, match=r"^`targets` selects w: must .* matmuls, or its transpose; leave it out of the patterns$"
    ):
        with_one_weight(*REFUSED[use])


def test_a_weight_that_is_made_of_two_parameters_is_refused():
    with pytest.raises(ConfigError, match="`targets` selects one: must select parameters with no other use"):
        adapted(lambda x, p: x @ jnp.concatenate([p["one"], p["two"][:, :0]], 1), {"one": (6, 4), "two": (6, 4)})


def test_another_method_may_use_the_transpose_but_not_a_slice():
    def model(other: Use) -> AdaptedModel:
        return adapted(lambda x, p: x @ p["w"], {"w": (6, 6)}, other=lambda x, p: other(x, p["w"]))

    transposed = model(lambda x, w: x @ w.T)
    params = jax.tree.map(lambda leaf: leaf + 0.1, transposed.init()[0])
    expected = BATCH @ transposed.merge(params)["w"].T
    np.testing.assert_allclose(transposed.evaluate("other", params, {}, BATCH), expected, rtol=1e-4)
    with pytest.raises(ConfigError, match="`params` has an adapter of w: must be used only as the weight of matmuls"):
        model(lambda x, w: x @ w[:, :2]).evaluate("other", params, {}, BATCH)


# --- Parts ---


def test_a_parameter_with_the_end_of_another_name_has_its_own_adapter():
    shapes = {"layer": {"w": (6, 6)}, "w": (6, 6)}
    rules = {"layer/w": jgraph.Split(axis=-1, parts=(1, 2)), "w": jgraph.Split(axis=-1, parts=(2, 1))}
    assert_equals_merged(adapted(lambda x, p: x @ p["w"] @ p["layer"]["w"], shapes, rules=rules))


def test_parts_of_the_columns_stay_columns_if_the_weight_is_used_transposed():
    rules = {"w": jgraph.Split(axis=-1, parts=(1, 1))}
    model = adapted(lambda x, p: x[:, :4] @ p["w"].T, {"w": (6, 4)}, rules=rules)
    assert (model.adapters["w"].rows, model.adapters["w"].widths) == (6, (2, 2))
    assert_equals_merged(model)
    with pytest.raises(ConfigError, match="`targets` selects w: must be a matrix if `rules` has parts of its axis -1"):
        adapted(lambda x, p: jnp.einsum("bk,kij->bij", x, p["w"]), {"w": (6, 2, 4)}, rules=rules)


def test_adapters_of_weights_with_several_axes_are_replicated_over_tensor():
    rules = {"w": jgraph.Split(axis=-3)}
    model = adapted(lambda x, p: jnp.einsum("bk,kij->bij", x, p["w"]), {"w": (6, 2, 3)}, rules=rules)
    mesh = jax.make_mesh((1, 2), ("data", "tensor"))
    strategy = jgraph.TensorParallel(jgraph.Replicated(mesh, model.shapes), model.tensor_rules(rules))
    assert set(strategy.splits(2)) == {"w"}


@pytest.mark.parametrize(("parts", "is_split"), [((4, 2), True), ((3, 3), False)])
def test_columns_are_ordered_by_device_only_if_the_parts_are_split(parts, is_split):
    split = jgraph.Split(axis=-1, parts=parts, uneven="replicate")
    adapter, b = Adapter("w", view_of((4, 6)), split), jnp.arange(12.0).reshape(2, 6) + 1
    expected, given = adapter.whole(b), b
    if is_split:
        expected, given = split.by_device(expected, 2), split.by_device(b, 2)
        assert not np.array_equal(given, b)
    np.testing.assert_array_equal(adapter.whole(given, 2), expected)


# --- New adapters, and merging ---


def test_new_adapters_are_uniform_up_to_one_by_the_root_of_k_and_differ_by_weight_and_key():
    shapes = {"one": (6, 6), "two": (6, 6), "wide": (6, 256)}

    def outputs(x: Array, p: Any) -> Array:
        return x @ p["one"] @ p["two"] @ p["wide"]

    def new(key: int) -> dict[str, Array]:
        return {name: a for name, (a, _) in separated(adapted(outputs, shapes, rank=64, key=key).init()[0])[1].items()}

    found, other = new(0), new(1)
    # The largest of 384 magnitudes is below 97% of the range in one of 100,000 draws.
    assert all(0.97 / 6**0.5 < float(jnp.abs(a).max()) <= 1 / 6**0.5 for a in found.values())
    assert all(abs(float(a.mean())) < 0.25 / 6**0.5 for a in found.values())
    assert len({a.tobytes() for a in map(np.asarray, (*found.values(), *other.values()))}) == 6
    jax.tree.map(np.testing.assert_array_equal, found, new(0))


def test_merged_bfloat16_weights_are_rounded_once():
    model = adapted(lambda x, p: x @ p["w"], {"w": (6, 4)}, rank=1, alpha=1)
    weight, a = jnp.ones((6, 4), jnp.bfloat16), jnp.ones((6, 1))
    # 1 + 2**-8 is halfway between two bfloat16 numbers and rounds to 1; the sum is above it.
    merged = model.merged("w", weight, a, jnp.full((1, 4), 2.0**-8 + 2.0**-20))
    assert merged.dtype == jnp.bfloat16
    np.testing.assert_array_equal(merged.astype(jnp.float32), np.full((6, 4), 1 + 2.0**-7, np.float32))
