import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jgraph.layout import Packing

# Vectors and matrices on both sides of `small=8`, with names out of order.
PARAMS = {
    "scale": jnp.arange(3.0),
    "block": {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.arange(2.0), "big": jnp.arange(12.0).reshape(3, 4)},
    "large": jnp.arange(9.0),
    "head": jnp.arange(4.0).reshape(2, 2),
}
PACKING = Packing.of(PARAMS, small=8)

shapes = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)
trees = st.recursive(
    st.tuples(shapes, st.sampled_from(["float32", "bfloat16", "int32"])).map(lambda leaf: np.ones(leaf[0], leaf[1])),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.sampled_from("abcd"), children, max_size=3),
    max_leaves=8,
)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(a, e)


@pytest.mark.long
@settings(max_examples=25)
@given(tree=trees, small=st.integers(0, 70))
def test_unpack_inverts_pack(tree, small):
    leaves, structure = jax.tree.flatten(tree)
    # All entries of the tree differ, so that a swap is detected. bfloat16 counts to 256 exactly.
    starts = np.cumsum([0, *(leaf.size for leaf in leaves)])
    leaves = [
        jnp.asarray(np.arange(leaf.size).reshape(leaf.shape) + n, leaf.dtype) for leaf, n in zip(leaves, starts, strict=False)
    ]
    tree = structure.unflatten(leaves)
    packing = Packing.of(tree, small=small)
    assert_same(packing.unpack(packing.pack(tree)), tree)


def test_small_leaves_share_an_array_and_large_leaves_do_not():
    packed = PACKING.pack(PARAMS)
    assert {name: array.shape for name, array in packed.items()} == {
        "small matrices (float32)": (6 + 4,),
        "small vectors (float32)": (3 + 2,),
        "block/big": (3, 4),
        "large": (9,),
    }


def test_a_large_leaf_is_not_copied():
    packed = PACKING.pack(PARAMS)
    assert packed["block/big"] is PARAMS["block"]["big"]
    assert packed["large"] is PARAMS["large"]


def test_a_leaf_as_large_as_the_limit_is_large():
    params = {"a": jnp.ones(7), "b": jnp.ones(8), "c": jnp.ones(7)}
    assert set(Packing.of(params, small=8).pack(params)) == {"small vectors (float32)", "b"}


def test_frozen_and_trained_leaves_do_not_share_an_array():
    packed = Packing.of(PARAMS, small=8, frozen=("block/w", "scale")).pack(PARAMS)
    assert {name: array.shape for name, array in packed.items()} == {
        "small frozen matrices (float32)": (2, 3),
        "small matrices (float32)": (2, 2),
        "small frozen vectors (float32)": (3,),
        "small vectors (float32)": (2,),
        "block/big": (3, 4),
        "large": (9,),
    }


def test_a_single_small_leaf_keeps_its_shape():
    params = {"w": jnp.ones((2, 3))}
    packed = Packing.of(params).pack(params)
    assert {name: array.shape for name, array in packed.items()} == {"small matrices (float32)": (2, 3)}


def test_dtypes_do_not_share_an_array():
    params = [jnp.ones(2, jnp.float32), jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float32)]
    packed = Packing.of(params).pack(params)
    assert {name: array.shape for name, array in packed.items()} == {
        "small vectors (float32)": (4,),
        "small vectors (bfloat16)": (2,),
    }


def test_matrices_decay_and_vectors_do_not_large_or_small():
    assert PACKING.decay_mask() == {
        "small matrices (float32)": True,
        "small vectors (float32)": False,
        "block/big": True,
        "large": False,
    }


@pytest.mark.long
def test_scales_and_biases_of_stacked_layers_do_not_decay():
    stacked = {"norm": {"scale": jnp.ones((4, 8))}, "up": {"kernel": jnp.ones((4, 8, 2)), "bias": jnp.ones((4, 2))}}
    one = jax.tree.map(lambda leaf: leaf[0], stacked)

    def decayed(params):
        packing = Packing.of(params)
        packed = packing.pack(jax.tree.map(jnp.zeros_like, params))
        shares = {name: jnp.full_like(packed[name], decays) for name, decays in packing.decay_mask().items()}
        return jax.tree.map(lambda leaf: bool(leaf.all()), packing.unpack(shares))

    assert decayed(stacked) == decayed(one) == {"norm": {"scale": False}, "up": {"kernel": True, "bias": False}}


@pytest.mark.long
def test_gradients_through_unpack_equal_the_gradients_of_the_tree():
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32), PARAMS)

    def loss(params):
        return sum(jnp.sum(w * p**2) for w, p in zip(jax.tree.leaves(weights), jax.tree.leaves(params), strict=True))

    packed = jax.grad(lambda packed: loss(PACKING.unpack(packed)))(PACKING.pack(PARAMS))
    assert_same(PACKING.unpack(packed), jax.grad(loss)(PARAMS))


def test_the_gradient_of_a_group_is_one_concatenation():
    gradient = jax.jit(jax.grad(lambda packed: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(PACKING.unpack(packed)))))
    text = gradient.lower(PACKING.pack(PARAMS)).as_text()
    assert text.count("stablehlo.concatenate") == 2
    assert "stablehlo.pad" not in text


def test_a_packing_can_be_made_from_shapes():
    assert Packing.of(jax.eval_shape(lambda: PARAMS), small=8) == PACKING


def test_a_tree_of_another_structure_is_refused():
    with pytest.raises(ValueError, match="Dict key mismatch"):
        PACKING.pack(PARAMS | {"extra": jnp.ones(1)})
