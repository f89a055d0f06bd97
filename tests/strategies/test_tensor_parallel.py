"""Tensor parallelism as a strategy: the order of split axes, shardings, Flax models with partition names, and refusals."""

import dataclasses
import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jgraph
from jgraph.errors import ConfigError
from jgraph.layout import named as layout_of
from jgraph.mesh import on_ranks, per_shard
from jgraph.modules import functional
from jgraph.pipeline import Pipelined
from jgraph.schedule import generate
from jgraph.strategies.objective import Objective
from jgraph.strategies.tensor_parallel import in_turns, specs_of
from jgraph.tree import leaf_names
from jgraph.xla import aot
from jgraph.xla.explain import Collectives
from jgraph_models.gpt import GPT, GPTConfig

GPT_SIZES = GPTConfig(
    num_layers=2,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    d_ff=32,
    vocab_size=64,
    mlp="swiglu",
    attention_bias="qkv",
    compute_dtype="float32",
)


def mesh_of(**axes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod([*axes.values()]))]).reshape(tuple(axes.values())), tuple(axes))


def gpt(sizes: GPTConfig = GPT_SIZES) -> Any:
    return functional(lambda: GPT(sizes, rngs=nnx.Rngs(0)), jax.ShapeDtypeStruct((1, 17), jnp.int32), key=0)


# --- Exchanges ---


def chain(params: Any, x: Any) -> Any:
    """Two residual stages of a column- and a row-parallel matmul. Their results depend on the index of the device of a row."""

    def stage(x: Any, up: Any, down: Any) -> Any:
        return in_turns(x, lambda x: jnp.tanh(x @ up), lambda hidden, device: hidden @ down * (1 + device))

    for up, down in params:
        # A norm in a kernel of its own is a barrier as well: XLA cannot add its two gradients in one of its operations.
        x = x + stage(jax.lax.optimization_barrier(jnp.sin(x)), up, down)
    return x


def exchanged(mesh: Mesh, params: Any) -> Any:
    """Returns the jitted loss of `chain` on a mesh and its gradients, with the shardings of its arguments."""
    specs, tokens = specs_of({"*/0": jgraph.Split(axis=-1), "*/1": jgraph.Split(axis=-2)}, params), PartitionSpec("tensor")

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(per_shard(chain, (specs, tokens), tokens)(params, x).astype(jnp.float32) ** 2)

    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (specs, tokens))
    run = on_ranks(jax.value_and_grad(loss, (0, 1)), mesh, (PartitionSpec(), PartitionSpec()), PartitionSpec())
    return jax.jit(run, in_shardings=shardings, out_shardings=(None, shardings))


def matrices(width: int, hidden: int, dtype: str) -> list[Any]:
    """Returns the random matrices of two stages."""
    rng = np.random.default_rng(0)
    shapes = (width, hidden), (hidden, width)
    return [[jnp.asarray(rng.standard_normal(shape) / shape[0] ** 0.5, dtype) for shape in shapes] for _ in range(2)]


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.long)])
def test_rows_in_turns_have_the_loss_and_gradients_of_one_device(devices):
    params, x = matrices(8, 16, "float32"), jnp.asarray(np.random.default_rng(1).standard_normal((8, 3, 8)), "float32")

    def loss(params, x):
        device = jnp.repeat(jnp.arange(devices), 8 // devices)[:, None, None]
        for up, down in params:
            x = x + jnp.tanh(jnp.sin(x) @ up) @ down * (1 + device)
        return jnp.mean(x**2)

    found = exchanged(mesh_of(data=1, tensor=devices), params)(params, x)
    expected = jax.value_and_grad(loss, (0, 1))(params, x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * np.abs(b).max())


def test_results_of_rows_in_turns_are_summed_in_float32():
    """The devices have 256, 1, 1 and 1. In bfloat16, 256 + 1 rounds to 256."""
    spec, mesh = PartitionSpec("tensor"), mesh_of(data=1, tensor=4)

    def run(x, w):
        return per_shard(lambda x, w: in_turns(x, lambda x: x, lambda x, _: x * w), (spec, spec), spec)(x, w)

    # By default, XLA leaves out the rounding between two sums.
    options, shards = {"xla_allow_excess_precision": False}, NamedSharding(mesh, spec)
    run = on_ranks(run, mesh, (PartitionSpec(), PartitionSpec()), PartitionSpec())
    run = jax.jit(run, in_shardings=(shards, shards), compiler_options=options)
    w = jnp.asarray([256, 1, 1, 1], "bfloat16")
    np.testing.assert_array_equal(run(jnp.ones((4, 1), "bfloat16"), w).astype("float32"), 260)


@pytest.mark.target
def test_a_matmul_hides_every_exchange(h200):
    params, x = matrices(2048, 4096, "bfloat16"), jnp.zeros((16, 512, 2048), "bfloat16")
    mesh = Mesh(np.array(aot.devices(2)).reshape(1, 2), ("data", "tensor"))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, x))
    # With library matmuls, XLA can add a gradient in a matmul.
    compiled, _ = aot.compile_for(exchanged(mesh, params), *shapes, compiler_options={"xla_gpu_enable_triton_gemm": False})
    hlo = compiled.as_text()
    sent = re.findall(r"collective-permute-start\(", hlo)
    # Tokens and results of two stages, forward and backward.
    assert len(sent) == 8
    assert not re.search(r" collective-permute\(", hlo)
    assert Collectives.count(compiled).overlapped >= 8


@pytest.mark.long
@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            "lora",
            "`params` has an adapter of blocks/0/attention/out/kernel: must be used only as the weight of matmuls outside",
        ),
        ("fp8", "`loss` has no matmul that can be in FP8 .no matrix is multiplied by a parameter outside `jax.shard_map`"),
    ],
)
def test_transformations_that_do_not_find_the_matmuls_in_turns_say_so(transform, message):
    batch, mesh = jnp.zeros((4, 17), jnp.int32), mesh_of(data=1, tensor=2)

    def lower(sizes):
        model: Any = gpt(sizes)
        rules: Any = GPT.tensor_rules(sizes)
        options: dict[str, Any] = {"fp8": jgraph.FP8Config(emulate=True), "batch": batch}
        if transform == "lora":
            model = jgraph.lora(model, batch, rank=2)
            rules, options = model.tensor_rules(rules), {"freeze": model.frozen}
        strategy = jgraph.TensorParallel(jgraph.Replicated(mesh, model.shapes), rules)
        step = jgraph.train_step(lambda params, x, key: model.loss(params, x, key)[0], optax.sgd(0.1), strategy, **options)
        return step.lower(batch).as_text()

    in_turns = dataclasses.replace(GPT_SIZES, tensor_overlap="turns")
    with pytest.raises(ConfigError, match=message):
        lower(in_turns)
    assert "collective_permute" not in lower(dataclasses.replace(in_turns, tensor_overlap="auto").with_visible_matmuls())


# --- Split ---


def test_an_axis_of_several_parts_is_ordered_by_device():
    # Four queries, two keys and two values, each of two columns.
    split = jgraph.Split(axis=-1, parts=(4, 2, 2))
    ordered = split.by_device(jnp.arange(16)[None], 2)
    assert ordered[0].tolist() == [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]
    assert split.by_part(ordered, 2)[0].tolist() == list(range(16))


def test_an_axis_in_the_middle_is_ordered_without_the_other_axes():
    whole = jnp.arange(2 * 8 * 3).reshape(2, 8, 3)
    split = jgraph.Split(axis=-2, parts=(4, 4))
    ordered = split.by_device(whole, 4)
    np.testing.assert_array_equal(ordered, whole[:, [0, 4, 1, 5, 2, 6, 3, 7]])
    np.testing.assert_array_equal(split.by_part(ordered, 4), whole)


@pytest.mark.parametrize("parts", [(), (4,)])
def test_an_axis_of_one_part_keeps_its_order(parts):
    whole = jnp.arange(8)[None]
    assert jgraph.Split(axis=-1, parts=parts).by_device(whole, 4) is whole


@pytest.mark.parametrize(
    ("split", "length", "message"),
    [
        (jgraph.Split(axis=-2), 6, "`tensor` is 4: must divide the length 6 of w, axis -2"),
        (jgraph.Split(axis=-1, parts=(8, 2, 2)), 96, "`tensor` is 4: must divide the 2 heads or units of w, axis -1"),
    ],
)
def test_units_that_the_devices_cannot_share_are_refused_unless_replicated(split, length, message):
    with pytest.raises(ConfigError) as error:
        split.check("w", length, 4)
    assert (str(error.value), error.value.field) == (message, "tensor")
    replicated = jgraph.Split(axis=split.axis, parts=split.parts, uneven="replicate")
    assert not replicated.check("w", length, 4)
    assert replicated.check("w", 2 * length, 2)


# --- Packing and shardings ---


def random_bits(shapes: Any) -> Any:
    """Returns parameters of random bits: also negative zeros, infinities and NaNs with payloads."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: random.integers(0, 2**32, leaf.shape, np.uint32).view(np.float32), shapes)


@pytest.mark.parametrize("layout", ["replicated", "fsdp", "pipeline"])
def test_pack_and_unpack_invert_each_other_bit_for_bit(layout):
    found, loss = gpt(), lambda params, batch, key: jnp.zeros(())
    if layout == "pipeline":
        order = generate("1f1b", pp=2, microbatches=2)
        inner: Any = Pipelined(mesh_of(pipe=2, tensor=2), found.shapes, order)
        loss = GPT.pipeline_model(GPT_SIZES, 2)
    elif layout == "fsdp":
        inner = jgraph.FullySharded(mesh_of(fsdp=2, tensor=2), found.shapes)
    else:
        inner = jgraph.Replicated(mesh_of(data=1, tensor=2), found.shapes)
    rules = GPT.tensor_rules(GPT_SIZES)
    objective = Objective(loss=loss, layout=layout_of(found.shapes), num_microbatches=2 if layout == "pipeline" else 1)
    bound = jgraph.TensorParallel(inner, rules).bind(objective)
    given = random_bits(found.shapes)
    packed = jax.jit(bound.layout.pack)(given)
    again = jax.device_get(jax.jit(bound.layout.unpack)(packed))
    assert jax.tree.structure(again) == jax.tree.structure(given)
    for name, a, b in zip(leaf_names(given), jax.tree.leaves(again), jax.tree.leaves(given), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint32), b.view(np.uint32), err_msg=name)
    # The comparison would also pass without any order.
    unordered = {pattern: split and dataclasses.replace(split, parts=()) for pattern, split in rules.items()}
    plain = jax.jit(jgraph.TensorParallel(inner, unordered).bind(objective).layout.pack)(given)
    assert any(not np.array_equal(a, b, equal_nan=True) for a, b in zip(*map(jax.tree.leaves, (packed, plain)), strict=True))


def specs(strategy: Any) -> dict[str, tuple]:
    """Returns the PartitionSpec of each parameter by name, as tuples."""
    step = jgraph.train_step(lambda params, batch, key: jnp.zeros(()), optax.adam(0.1), strategy, layout="tree")
    state = step.state.params
    return {name: tuple(leaf.sharding.spec) for name, leaf in zip(leaf_names(state), jax.tree.leaves(state), strict=True)}


def test_columns_and_rows_are_sharded_over_tensor_and_other_axes_over_fsdp():
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    rules = {"up": jgraph.Split(axis=-1), "down": jgraph.Split(axis=-2), "odd": jgraph.Split(axis=-1, uneven="replicate")}
    strategy = jgraph.TensorParallel(jgraph.FullySharded(mesh_of(fsdp=2, tensor=2), shapes), rules)
    found = specs(strategy)
    assert found["up"] == ("fsdp", "tensor")
    # Without tensor parallelism, fsdp takes the first axis of both.
    assert found["down"] == ("tensor", "fsdp")
    assert "tensor" not in found["odd"]


SHAPES = {"up": (64, 256), "down": (256, 64), "odd": (64, 33)}


@pytest.mark.parametrize("fsdp", [2, 4])
def test_fsdp_never_shards_the_axis_of_tensor_in_a_gpt(fsdp):
    found = gpt()
    sharded = jgraph.FullySharded(mesh_of(fsdp=fsdp, tensor=2), found.shapes)
    by_name = specs(jgraph.TensorParallel(sharded, GPT.tensor_rules(GPT_SIZES)))
    assert by_name["blocks/0/attention/qkv/kernel"] == ("fsdp", "tensor")
    assert by_name["blocks/0/attention/out/kernel"] == ("tensor", "fsdp")
    assert by_name["blocks/0/mlp/up/kernel"] == ("fsdp", "tensor")
    assert by_name["blocks/0/mlp/down/kernel"] == ("tensor", "fsdp")
    assert by_name["embedding_VD"] == ("tensor", "fsdp")
    # A bias has only the axis of tensor.
    assert by_name["blocks/0/attention/qkv/bias"] == ("tensor",)


# --- Models with partition names ---


class Named(nnx.Module):
    """An MLP with partition names, written without jgraph."""

    def __init__(self, rngs: nnx.Rngs):
        def named(*names: str | None) -> Any:
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), names, eager_sharding=False)

        self.embedding = nnx.Embed(32, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        bias = nnx.with_partitioning(nnx.initializers.zeros, ("tensor",), eager_sharding=False)
        self.up = nnx.Linear(16, 64, kernel_init=named(None, "tensor"), bias_init=bias, rngs=rngs)
        self.down = nnx.Linear(64, 16, kernel_init=named("tensor", None), rngs=rngs)
        self.head = nnx.Linear(16, 32, rngs=rngs)

    def loss(self, tokens_BS: jax.Array) -> jax.Array:
        x_BTD = self.embedding(tokens_BS[:, :-1])
        x_BTD = x_BTD + self.down(nnx.gelu(self.up(self.norm(x_BTD))))
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(self.head(x_BTD), tokens_BS[:, 1:]))


class NamedLinen(nn.Module):
    """The same MLP in Linen, without a norm."""

    @nn.compact
    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        def named(*names: str | None) -> Any:
            return nn.with_partitioning(nn.initializers.lecun_normal(), names)

        x_BTD = nn.Embed(32, 16)(tokens_BT)
        hidden_BTF = nn.gelu(nn.Dense(64, kernel_init=named(None, "tensor"), name="up")(x_BTD))
        return nn.Dense(32)(x_BTD + nn.Dense(16, kernel_init=named("tensor", None), name="down")(hidden_BTF))

    def loss(self, tokens_BS: jax.Array, train: bool) -> jax.Array:
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(self(tokens_BS[:, :-1]), tokens_BS[:, 1:]))


def tokens(step: int) -> np.ndarray:
    # A skewed distribution, so that the model can learn.
    return (np.random.default_rng(step).geometric(0.2, (8, 9)) % 32).astype(np.int32)


@cache
def initial(model: Any) -> Any:
    """Returns the initial parameters. Made once, because each layout would compile the model's initialization again."""
    return jax.jit(lambda: model.init()[0])()


def trained(model: Any, strategy: Any, steps: int = 20) -> tuple[list[float], list[float], Any, Any]:
    """Returns losses, gradient norms and final parameters, and the state."""

    def loss(params, batch, key):
        return model.loss(params, batch, key, None)[0]

    # SGD, because Adam amplifies the rounding of gradients near zero.
    step = jgraph.train_step(loss, optax.sgd(0.1, momentum=0.9), strategy, clip_norm=1.0)
    run, state, losses, norms = step.compile(tokens(0)), step.init(initial(model)), [], []
    for i in range(steps):
        state, metrics = run(state, step.place(tokens(i)))
        losses.append(float(metrics.loss))
        norms.append(float(metrics.grad_norm))
    return losses, norms, jax.device_get(step.canonical.of(state).params), state


@cache
def named(kind: str) -> tuple[Any, tuple[list[float], list[float], Any, Any]]:
    """Returns a model with partition names, and its results on one device."""
    make = NamedLinen if kind == "Linen" else lambda: Named(nnx.Rngs(0))
    model = functional(make, jax.ShapeDtypeStruct((1, 9), jnp.int32), key=0)
    return model, trained(model, jgraph.Replicated(None, model.shapes))


@pytest.mark.parametrize("kind", ["NNX", pytest.param("Linen", marks=pytest.mark.long)])
@pytest.mark.parametrize("wrapped", [pytest.param({"data": 2}, marks=pytest.mark.once), {"fsdp": 2}], ids=["data", "fsdp"])
def test_a_model_with_partition_names_is_split_and_trains_as_on_one_device(kind, wrapped):
    model, expected = named(kind)
    made = jgraph.FullySharded if "fsdp" in wrapped else jgraph.Replicated
    strategy = jgraph.TensorParallel(made(mesh_of(**wrapped, tensor=2), model.shapes), annotations=model.annotations)
    losses, norms, params, state = trained(model, strategy)
    assert expected[0][-1] < expected[0][0]
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    np.testing.assert_allclose(norms, expected[1], rtol=1e-5)
    for name, a, b in zip(leaf_names(params), *map(jax.tree.leaves, (params, expected[2])), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.abs(b).max(), err_msg=name)
    shapes = {
        name: leaf.sharding.shard_shape(leaf.shape)
        for name, leaf in zip(leaf_names(state.params), jax.tree.leaves(state.params), strict=True)
    }
    rows = 8 if "fsdp" in wrapped else 16
    assert shapes["up/kernel"] == (rows, 32)
    assert shapes["down/kernel"] == (32, rows)


# --- Refusals ---


def one_line(call: Any, field: str) -> str:
    with pytest.raises(ConfigError) as error:
        call()
    assert "\n" not in str(error.value)
    assert error.value.field == field
    return str(error.value)


def test_a_strategy_whose_mesh_has_no_axis_tensor_is_refused():
    found = gpt()
    for inner in (jgraph.Replicated(None, found.shapes), jgraph.Replicated(mesh_of(data=2), found.shapes)):
        message = one_line(lambda inner=inner: jgraph.TensorParallel(inner, GPT.tensor_rules(GPT_SIZES)), "strategy")
        assert repr(inner) in message
        assert "its mesh must have the axis tensor, e.g. jax.make_mesh(" in message


def test_heads_that_the_devices_cannot_share_are_refused_with_the_parameter():
    found = gpt()
    strategy = jgraph.TensorParallel(jgraph.Replicated(mesh_of(data=1, tensor=4), found.shapes), GPT.tensor_rules(GPT_SIZES))
    message = one_line(lambda: jgraph.train_step(lambda *args: jnp.zeros(()), optax.sgd(0.1), strategy), "tensor")
    assert message == "`tensor` is 4: must divide the 2 heads or units of blocks/0/attention/qkv/bias, axis -1"


def test_a_rule_of_fsdp_for_the_axis_of_tensor_is_refused():
    found = gpt()
    sharded = jgraph.FullySharded(mesh_of(fsdp=2, tensor=2), found.shapes, shard_rules=("*/up/kernel=1",))
    strategy = jgraph.TensorParallel(sharded, GPT.tensor_rules(GPT_SIZES))
    message = one_line(lambda: jgraph.train_step(lambda *args: jnp.zeros(()), optax.sgd(0.1), strategy), "shard_rules")
    assert "mlp/up/kernel" in message


def test_the_dispatch_engine_is_refused_on_a_mesh_with_tensor_or_context():
    found, order = gpt(), generate("1f1b", pp=2, microbatches=2)
    model = GPT.pipeline_model(GPT_SIZES, 2)
    for axis in ("tensor", "context"):
        inner: Any = Pipelined(mesh_of(pipe=2, **{axis: 2}), found.shapes, order, engine="dispatch")
        message = one_line(lambda inner=inner: jgraph.train_step(model, optax.sgd(0.1), inner, num_microbatches=2), "engine")
        assert message == f"`engine` is dispatch: must be program on a mesh with the axis {axis}"


def test_a_mesh_with_the_axis_tensor_needs_tensor_parallel():
    found, order = gpt(), generate("1f1b", pp=2, microbatches=2)
    places: list[tuple[Any, Any]] = [
        (lambda *args: jnp.zeros(()), jgraph.Replicated(mesh_of(data=1, tensor=2), found.shapes)),
        (lambda *args: jnp.zeros(()), jgraph.FullySharded(mesh_of(fsdp=2, tensor=2), found.shapes)),
        (GPT.pipeline_model(GPT_SIZES, 2), Pipelined(mesh_of(pipe=2, tensor=2), found.shapes, order)),
    ]
    for loss, strategy in places:
        count = 2 if isinstance(strategy, Pipelined) else 1
        message = one_line(
            lambda loss=loss, strategy=strategy, count=count: jgraph.train_step(
                loss, optax.sgd(0.1), strategy, num_microbatches=count
            ),
            "strategy",
        )
        assert "must be wrapped in jgraph.TensorParallel" in message


def test_a_rule_that_replicates_a_parameter_overrides_its_partition_names():
    shapes = {"w": jax.ShapeDtypeStruct((8, 32), jnp.float32), "v": jax.ShapeDtypeStruct((8, 32), jnp.float32)}
    annotations = dict.fromkeys(shapes, PartitionSpec(None, "tensor"))
    inner = jgraph.Replicated(mesh_of(data=1, tensor=2), shapes)
    assert set(jgraph.TensorParallel(inner, {"w": None}, annotations).splits(2)) == {"v"}


def test_parts_that_do_not_divide_the_axis_are_refused():
    with pytest.raises(ConfigError, match=r"`parts` of a split is \(2, 4\): their sum must divide the length 5 of w, axis -1"):
        jgraph.Split(axis=-1, parts=(2, 4)).check("w", 5, 2)


def test_an_axis_can_be_counted_from_the_front():
    shapes = {"w": jax.ShapeDtypeStruct((8, 12), jnp.float32)}
    strategies = [
        jgraph.TensorParallel(
            jgraph.Replicated(mesh_of(data=1, tensor=2), shapes), {"w": jgraph.Split(axis=axis, parts=(4, 2))}
        )
        for axis in (1, -1)
    ]
    assert [specs(strategy)["w"] for strategy in strategies] == [(None, "tensor")] * 2
    front, back = (strategy.bind(Objective(loss=lambda *_: 0.0, layout=layout_of(shapes))).layout for strategy in strategies)
    tree = {"w": jnp.arange(96.0).reshape(8, 12)}
    np.testing.assert_array_equal(*(jax.jit(layout.pack)(tree)["w"] for layout in (front, back)))
