"""Layouts: descriptions, round trips, composition, and frozen parameters."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jgraph.errors import ConfigError
from jgraph.layout import Layout, Packing, Shard, Stacked, alone, described, named, packed, sharded

LAYERS = 5
TREE = {
    "embed": (37, 8),
    "norm": {"scale": (8,)},
    "router": {"kernel": (8, 3)},
    "scalar": (),
    "blocks": [{"qkv": {"kernel": (8, 16)}, "up": (8, 24), "norm": {"scale": (8,), "bias": (8,)}}] * LAYERS,
}


def is_shape(leaf: Any) -> bool:
    return isinstance(leaf, tuple)


def arrays() -> Any:
    """Returns parameters of random bits, also negative zeros, infinities and NaNs."""
    random = np.random.default_rng(0)

    def bits(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(random.integers(0, 2**32, shape, np.uint32).view(np.float32))

    return jax.tree.map(bits, TREE, is_leaf=is_shape)


def own(*frozen: str) -> Layout:
    return named(jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), TREE, is_leaf=is_shape), frozen)


def split(tree: Any) -> tuple[Any, list[Any]]:
    return {name: tree[name] for name in tree if name != "blocks"}, tree["blocks"]


def join(outer: Any, layers: list[Any]) -> Any:
    return outer | {"blocks": layers}


def stacked(first: Layout, over_ranks: dict[str, int] | None = None, **mesh: int) -> Stacked:
    """Stacks five layers on two ranks: ranks 0 and 1 have chunks of 2 and 1, 1 and 1 layers."""
    places = [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 1, 0), (0, 1, 0)]
    return Stacked(first, split, join, places, over_ranks or {}, {"pipe": 2, "fsdp": 2} | mesh)


CHAINS = {
    "packed": [packed(100)],
    "packed, sharded": [packed(100), sharded(4)],
    "sharded evenly": [sharded(4, uneven="replicate")],
    "stacked": [stacked],
    "stacked, packed": [stacked, packed(100)],
    "stacked, sharded, packed": [stacked, sharded(2, uneven="replicate"), packed(100)],
}
FROZEN = {"nothing": (), "one": ("embed",), "one layer": tuple(f"blocks/1/{n}" for n in ("qkv/kernel", "up", "norm/scale"))}


def layout_of(chain: str, *frozen: str) -> Layout:
    layout = first = own(*frozen)
    for make in CHAINS[chain]:
        layout = layout.then(stacked(first) if make is stacked else make)
    return layout


def assert_same_bits(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint32), np.asarray(y).view(np.uint32))


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("chain", CHAINS)
def test_unpack_inverts_pack_bit_for_bit_and_the_description_is_true(chain, frozen):
    layout, tree = layout_of(chain, *FROZEN[frozen]), arrays()
    found = jax.jit(layout.pack)(tree)
    assert {name: array.shape for name, array in found.items()} == {name: p.shape for name, p in layout.params.items()}
    assert_same_bits(jax.jit(layout.unpack)(found), tree)


@pytest.mark.parametrize("frozen", ["one", "one layer"])
@pytest.mark.parametrize("chain", CHAINS)
def test_gradients_and_moments_have_no_frozen_parameters(chain, frozen):
    layout = layout_of(chain, *FROZEN[frozen])
    names = [name for name, param in layout.own.params.items() if name not in FROZEN[frozen]]
    moments = layout.own.unpack({name: array for name, array in layout.own.pack(arrays()).items() if name in names})
    found = jax.jit(layout.trained.pack)(moments)
    assert set(found) == {name for name, param in layout.params.items() if param.is_trained}
    assert {array.dtype for array in found.values()} == {jnp.dtype("float32")}
    assert_same_bits(jax.jit(layout.trained.unpack)(found), moments)


def test_moments_in_bfloat16_keep_their_dtype_beside_frozen_layers():
    layout = layout_of("stacked, packed", *FROZEN["one layer"])
    whole = {name: array.astype(jnp.bfloat16) for name, array in layout.own.pack(arrays()).items()}
    moments = layout.own.unpack({name: whole[name] for name in whole if name not in FROZEN["one layer"]})
    assert {array.dtype for array in layout.trained.pack(moments).values()} == {jnp.dtype("bfloat16")}


def test_the_rows_of_frozen_layers_are_masked_and_other_arrays_are_not():
    layout = layout_of("stacked", *FROZEN["one layer"])
    mask = layout.params["layers/0/1/up"].mask()
    assert mask is not None
    # Rank 0 has the frozen layer 1 at this place. Rank 1 has no layer there.
    assert (mask.shape, mask.ravel().tolist()) == ((2, 1, 1), [False, False])
    assert not layout.params["layers/0/1/up"].is_trained
    assert layout.params["layers/0/0/up"].mask() is None


def test_padding_is_zero():
    layout = layout_of("packed, sharded")
    ones = jax.tree.map(jnp.ones_like, arrays())
    sums = {name: float(array.sum()) for name, array in layout.pack(ones).items()}
    assert sum(sums.values()) == sum(leaf.size for leaf in jax.tree.leaves(ones))
    assert any(param.padding for param in layout.params.values())


def test_weight_decay_applies_to_matrices_only_also_in_stacked_arrays():
    decayed = {name.rpartition("/")[2] for name, param in layout_of("stacked").params.items() if param.decays}
    assert decayed == {"embed", "kernel", "up"}
    assert {name for name, p in own().params.items() if p.is_cast and "router" in name} == set()


def test_a_parameter_of_scanned_layers_decays_in_a_pipeline_as_on_one_device():
    first = named({"gain": jax.ShapeDtypeStruct((4, 8), jnp.float32)})

    def unstack(tree: Any) -> tuple[Any, list[Any]]:
        return {}, [{"gain": tree["gain"][i]} for i in range(4)]

    def stack(_: Any, layers: list[Any]) -> Any:
        return {"gain": jnp.stack([layer["gain"] for layer in layers])}

    places = [(i // 2, 0, i % 2) for i in range(4)]
    layout = first.then(Stacked(first, unstack, stack, places, {}, {"pipe": 2}))
    assert first.params["gain"].decays
    assert {param.decays for param in layout.params.values()} == {True}
    tree = {"gain": jnp.arange(32.0).reshape(4, 8)}
    assert_same_bits(layout.unpack(layout.pack(tree)), tree)


def test_an_axis_on_a_mesh_axis_follows_its_parameter_through_every_layout():
    first = own()
    layout = first.then(described(lambda name, param: param.placed(1, "tensor") if name.endswith("up") else param))
    layout = layout.then(stacked(first)).then(sharded(2, uneven="replicate")).then(packed(100))
    param = layout.params["layers/0/0/up"]
    assert param.spec == PartitionSpec("pipe", "fsdp", "tensor")
    assert param.rank_spec == PartitionSpec("pipe", "fsdp")
    assert Shard.from_param(param, lead=1) == Shard(0, partitioned=PartitionSpec(None, "tensor"))


@pytest.mark.parametrize(("tensor", "spec"), [(2, (("pipe", "tensor"),)), (8, ("pipe",))])
def test_a_vocabulary_is_split_over_ranks_and_over_tensor_if_both_divide_it(tensor, spec):
    first = named(
        {"embed": jax.ShapeDtypeStruct((24, 8), jnp.float32), "blocks": [jax.ShapeDtypeStruct((8,), jnp.float32)] * LAYERS}
    )
    layout = first.then(described(lambda name, param: param.placed(0, "tensor") if name == "embed" else param))
    layout = layout.then(stacked(first, {"embed": 0}, tensor=tensor))
    assert layout.params["outer/embed"].spec == PartitionSpec(*spec)


def test_layers_that_share_an_array_must_agree_on_the_sharded_axis():
    first, axes = own(), {"blocks/0/up": 0, "blocks/2/up": 1}  # the first layers of both ranks
    wanted = first.then(described(lambda name, param: dataclasses.replace(param, wanted=axes.get(name, "any"))))
    with pytest.raises(ConfigError, match="blocks/2/up along axis 1: must be the axis of blocks/0/up, which shares an array"):
        wanted.then(stacked(first))


def test_an_axis_that_the_split_of_a_model_cannot_follow_is_refused():
    first = named({"gain": jax.ShapeDtypeStruct((2, 3, 8), jnp.float32)})

    def unstack(tree: Any) -> tuple[Any, list[Any]]:
        return {}, list(tree["gain"].reshape(2, 24))

    wanted = first.then(described(lambda _, param: dataclasses.replace(param, wanted=2)))
    must = "must be an axis that PipelineModel.split leaves unchanged"
    with pytest.raises(ConfigError, match=rf"^`shard_rules` shards gain along axis 2: {must}$") as error:
        wanted.then(Stacked(first, unstack, join, [(0, 0, 0), (1, 0, 0)], {}, {"pipe": 2, "fsdp": 2}))
    assert error.value.field == "shard_rules"


def test_a_place_that_is_padding_on_every_rank_holds_zeros():
    first = named({"blocks": [jax.ShapeDtypeStruct((3,), jnp.float32)] * LAYERS})
    places = [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 1, 0), (0, 1, 0)]  # nothing at chunk 1, place 1
    layout = first.then(Stacked(first, lambda tree: ({}, tree["blocks"]), lambda _, layers: {"blocks": layers}, places, {}, {}))
    found = layout.pack({"blocks": [jnp.ones(3)] * LAYERS})
    assert not found["layers/1/1"].any()


def test_arrays_that_must_stay_alone_are_not_packed():
    assert "blocks/0/norm/scale" in own().then(alone(["blocks/0/norm/scale"])).then(packed()).params
    assert list(own().then(alone()).then(packed()).params) == list(own().params)


def test_a_small_array_with_a_wanted_axis_is_sharded_and_not_packed():
    wanted = described(lambda name, param: dataclasses.replace(param, wanted=1 if name == "embed" else "any"))
    layout = own().then(wanted).then(packed()).then(sharded(2))
    assert layout.params["embed"].spec == PartitionSpec(None, "fsdp")


def test_frozen_layers_are_packed_apart_from_trained_ones():
    layout = layout_of("stacked, packed", *FROZEN["one layer"], "blocks/0/norm/scale")
    digest = re.compile(" [0-9a-f]{8}$")  # of the leaves
    groups = {digest.sub("", name): param.trained for name, param in layout.params.items() if "vectors" in name}
    assert groups == {
        "layers/small vectors (float32)": (True, True),
        "layers/small frozen vectors (float32)": (False, False),
        "layers/small partly frozen vectors 01 (float32)": (False, True),
    }


def test_packing_and_the_layout_join_the_same_parameters():
    tree = arrays()
    packing, layout = Packing.of(tree, small=100), layout_of("packed")
    assert_same_bits(packing.pack(tree), layout.pack(tree))
    assert packing.decay_mask() == {name: param.decays for name, param in layout.params.items()}
