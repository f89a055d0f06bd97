"""Tests that invalid arguments of a training step raise an error with the names of the argument and the leaf."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from optax import contrib

import jgraph

PARAMS = {"layer": {"w": jnp.ones((6, 2)), "b": jnp.zeros(2)}}
BATCH = {"x": jnp.ones((8, 6))}
CARRIED = {"stats": {"mean": jnp.zeros(2), "count": jnp.zeros((), jnp.int32)}}
REDUCTIONS = {"stats": {"mean": "mean", "count": "sum"}}
KEY = jax.random.key(3)
LINEAR = nnx.Linear(6, 2, rngs=nnx.Rngs(0))
SGD = optax.sgd(0.1)


def loss(params, batch, key):
    return jnp.mean((batch["x"] @ params["layer"]["w"] + params["layer"]["b"]) ** 2)


def carrying(params, batch, key, carried):
    return jgraph.Loss(loss(params, batch, key), carried=carried)


def one_device(params=PARAMS):
    return jgraph.Replicated(None, params)


def step_of(loss=loss, transform=SGD, strategy=None, **arguments):
    return jgraph.train_step(loss, transform, strategy or one_device(), **arguments)


def carrying_step(loss=carrying, **arguments):
    return step_of(loss, carried=CARRIED, reductions=REDUCTIONS, **arguments)


def with_leaf(tree, path, leaf):
    first, *rest = path.split("/")
    return tree | {first: with_leaf(tree[first], "/".join(rest), leaf) if rest else leaf}


def assert_refused(call, field, *words):
    with pytest.raises((jgraph.ConfigError, jgraph.ShapeError)) as error:
        call()
    assert error.value.field == field
    assert all(word in str(error.value) for word in (*words, "must")), str(error.value)
    assert "\n" not in str(error.value)


# --- Parameters and carried state of `init` ---

INVALID_PARAMETERS = {
    "another shape": (with_leaf(PARAMS, "layer/w", jnp.ones((6, 3))), "`layer/w`", "float32[6, 3]", "[6, 2]"),
    "a missing leaf": ({"layer": {"w": PARAMS["layer"]["w"]}}, "`layer/b`"),
    "another leaf": (with_leaf(PARAMS, "head", jnp.ones(3)), "`head`"),
    "other containers": (with_leaf(PARAMS, "layer", tuple(PARAMS["layer"].values())), "`layer/b`"),
    "integers": (with_leaf(PARAMS, "layer/b", jnp.zeros(2, jnp.int32)), "`layer/b`", "int32[2]", "`carried`", "`freeze`"),
    "bools": (with_leaf(PARAMS, "layer/b", np.zeros(2, bool)), "`layer/b`", "bool[2]", "`carried`"),
    "a string": (with_leaf(PARAMS, "layer/b", "zeros"), "`layer/b`", "'zeros'"),
    "nothing": (None, "`layer/b`"),
}


@pytest.mark.parametrize("case", INVALID_PARAMETERS)
def test_init_refuses_parameters_that_do_not_match_the_strategy(case):
    params, *words = INVALID_PARAMETERS[case]
    assert_refused(lambda: step_of().init(params), "params", "`params`", *words)


def test_init_refuses_a_function_that_returns_mismatched_parameters():
    params, *words = INVALID_PARAMETERS["another shape"]
    assert_refused(lambda: step_of().init(lambda: params), "params", *words)


def test_init_accepts_floats_of_any_precision():
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    state = step_of().init(low)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}


def test_init_accepts_parameters_in_a_callable_module():
    step = step_of(lambda module, batch, key: jnp.mean(module(batch["x"]) ** 2), strategy=one_device(LINEAR))
    state, _ = step.compile(BATCH)(step.init(LINEAR), BATCH)
    assert state.step == 1


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_])
def test_a_strategy_with_parameters_that_are_not_floats_is_refused(dtype):
    params = with_leaf(PARAMS, "layer/b", jnp.zeros(2, dtype))
    words = "`layer/b`", jnp.dtype(dtype).name, "`carried`", "`freeze`"
    assert_refused(lambda: step_of(strategy=one_device(params)), "strategy", *words)


INVALID_CARRIED = {
    "nothing": (None, "stats/count"),
    "a missing leaf": ({"stats": {"mean": jnp.zeros(2)}}, "`stats/count`"),
    "another shape": (with_leaf(CARRIED, "stats/mean", jnp.zeros(3)), "`stats/mean`", "float32[3]", "float32[2]"),
    "another dtype": (with_leaf(CARRIED, "stats/count", jnp.zeros(())), "`stats/count`", "float32[]", "int32[]"),
}


@pytest.mark.parametrize("case", INVALID_CARRIED)
def test_init_refuses_carried_state_that_does_not_match_the_step(case):
    carried, *words = INVALID_CARRIED[case]
    assert_refused(lambda: carrying_step().init(PARAMS, carried), "carried", "`carried`", *words)


def test_init_refuses_carried_state_for_a_step_without_carried_state():
    assert_refused(lambda: step_of().init(PARAMS, CARRIED), "carried", "`stats/count`")


def test_init_accepts_python_numbers_as_carried_scalars():
    state = carrying_step().init(PARAMS, with_leaf(CARRIED, "stats/count", 3))
    assert state.carried["stats"]["count"] == 3


# --- The loss ---

INVALID_RETURNS = {
    "nothing": ({}, "stats/count"),
    "a missing leaf": ({"stats": {"mean": jnp.zeros(2)}}, "`stats/count`"),
    "another leaf": (with_leaf(CARRIED, "more", jnp.zeros(())), "`more`"),
    "another shape": (with_leaf(CARRIED, "stats/mean", jnp.zeros(3)), "`stats/mean`", "float32[3]", "float32[2]"),
    "another dtype": (with_leaf(CARRIED, "stats/count", jnp.zeros(())), "`stats/count`", "float32[]", "int32[]"),
}


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("case", INVALID_RETURNS)
def test_a_loss_that_returns_mismatched_carried_state_is_refused_at_compile_time(case, num_microbatches):
    carried, *words = INVALID_RETURNS[case]
    step = carrying_step(lambda *args: jgraph.Loss(loss(*args[:3]), carried=carried), num_microbatches=num_microbatches)
    assert_refused(lambda: step.compile(BATCH), "loss", "`loss`", *words)


def test_a_loss_that_does_not_return_its_carried_state_is_refused():
    step = carrying_step(lambda *args: loss(*args[:3]))
    assert_refused(lambda: step.compile(BATCH), "loss", "jgraph.Loss", "stats/count")


def test_a_loss_that_returns_undeclared_carried_state_is_refused():
    step = step_of(lambda *args: jgraph.Loss(loss(*args), carried=CARRIED))
    assert_refused(lambda: step.compile(BATCH), "loss", "`stats/count`")


def test_a_loss_may_return_python_numbers_as_carried_scalars():
    step = carrying_step(lambda *args: jgraph.Loss(loss(*args[:3]), carried=with_leaf(args[3], "stats/count", 3)))
    state, _ = step.compile(BATCH)(step.init(PARAMS, CARRIED), BATCH)
    assert state.carried["stats"]["count"] == 3


def test_a_weight_that_is_not_a_scalar_is_refused():
    step = step_of(lambda *args: jgraph.Loss(loss(*args), weight=jnp.ones(8)))
    assert_refused(lambda: step.compile(BATCH), "loss", "weight", "[8]")


INVALID_LOSSES = {
    "no function": (lambda: step_of(None), "None"),
    "a pipeline's model on one device": (lambda: step_of(jgraph.PipelineModel(loss, loss, loss)), "PipelineModel"),
    "too few arguments": (lambda: step_of(lambda params, batch: 0.0), "(params, batch, key)"),
    "carried state that is not declared": (lambda: step_of(carrying), "(params, batch, key, carried)", "pass `carried`"),
    "no argument for carried state": (lambda: carrying_step(loss), "(params, batch, key, carried)"),
}


@pytest.mark.parametrize("case", INVALID_LOSSES)
def test_a_loss_with_a_wrong_signature_is_refused_when_the_step_is_created(case):
    call, *words = INVALID_LOSSES[case]
    assert_refused(call, "loss", "`loss`", *words)


# --- The batch ---

INVALID_BATCHES = {
    "a float": (BATCH | {"scale": 0.5}, "0.5", "`scale`"),
    "an integer": (BATCH | {"scale": 2}, "2", "`scale`"),
    "a string": (BATCH | {"name": "train"}, "'train'", "`name`"),
    "an array of strings": (BATCH | {"names": np.array(["a"] * 8)}, "<U1", "`names`"),
    "an array without rows": (BATCH | {"scale": np.float32(3)}, "[]", "`scale`"),
    "rows that microbatches cannot share": (BATCH | {"y": jnp.ones((7, 2))}, "[7, 2]", "`y`"),
    "another number of rows": (BATCH | {"y": jnp.ones((4, 2))}, "4 rows at `y`", "8 in its first"),
    "nothing": (None, "None"),
}


@pytest.mark.parametrize("case", INVALID_BATCHES)
def test_a_batch_leaf_that_cannot_be_split_into_microbatches_is_refused(case):
    batch, *words = INVALID_BATCHES[case]
    assert_refused(lambda: step_of(num_microbatches=2).compile(batch), "batch", "`batch`", *words)


def test_placing_a_batch_with_another_number_of_rows_is_refused():
    step = step_of(strategy=jgraph.Replicated(mesh("data"), PARAMS), num_microbatches=2)
    assert_refused(lambda: step.place(BATCH | {"y": np.ones((4, 2))}), "batch", "4 rows at `y`", "8 in its first")


def test_a_batch_that_is_not_divided_may_have_other_first_axes():
    lowered = step_of().lower(BATCH | {"edges": jnp.ones((5, 2))})
    assert "tensor<5x2xf32>" in lowered.as_text()


def test_a_batch_leaf_may_be_none():
    step_of().lower(BATCH | {"mask": None})


# --- The call of a compiled step ---


def mesh(axis, devices=1):
    return jax.make_mesh((devices,), (axis,), devices=jax.devices()[:devices])


class Tensor:
    """Like a tensor of PyTorch, which has a dtype that NumPy does not know."""

    shape, dtype = (8, 6), "torch.float32"

    def numpy(self):
        return np.ones(self.shape)


STRATEGIES = {"one device": one_device(), "two devices": jgraph.Replicated(mesh("data", 2), PARAMS)}
CALLS = {
    "parameters": (lambda state, batch: (PARAMS, batch), "state", "dict", "step.init(params)"),
    "swapped arguments": (lambda state, batch: (batch, state), "state", "dict", "swapped"),
    "another optimizer's state": (
        lambda state, batch: (step_of(transform=optax.adam(1)).init(PARAMS), batch),
        "state",
        "`opt_st",
    ),
    "another shape": (
        lambda state, batch: (dataclasses.replace(state, params={"w": jnp.ones(2)}), batch),
        "state",
        "`params/small matrices (float32)`",
    ),
    "no batch": (lambda state, batch: (state, None), "batch", "None"),
    "a batch without a leaf": (lambda state, batch: (state, {}), "batch", "`x`", "`step.compile` again"),
    "a batch with another leaf": (lambda state, batch: (state, batch | {"y": batch["x"]}), "batch", "`y`"),
    "another dtype": (lambda state, batch: (state, {"x": batch["x"].astype(int)}), "batch", "int32[", "float32[", "`x`"),
    "a tensor of PyTorch": (lambda state, batch: (state, {"x": Tensor()}), "batch", "torch.float32[8, 6]", "`x`", ".numpy()"),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CALLS)
def test_a_call_with_wrong_arguments_is_explained_and_leaves_the_state(case, strategy):
    arguments, field, *words = CALLS[case]
    step = step_of(strategy=STRATEGIES[strategy])
    run, state, batch = step.compile(BATCH), step.init(PARAMS), step.place(BATCH)
    assert_refused(lambda: run(*arguments(state, batch)), field, f"`{field}`", *words)
    assert run(state, batch)[0].step == 1


def test_a_call_of_a_step_that_is_not_compiled_is_explained():
    step = step_of()
    assert_refused(lambda: step(step.init(PARAMS), BATCH), "step", "run = step.compile(batch)")


def test_a_call_with_another_number_of_rows_is_explained():
    step = step_of()
    run, state = step.compile(BATCH), step.init(PARAMS)
    smaller = {"x": BATCH["x"][:4]}
    assert_refused(lambda: run(state, smaller), "batch", "`x`", "float32[4, 6]", "float32[8, 6]", "`step.compile` again")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_state_that_was_donated_is_explained(strategy, capfd):
    step = step_of(strategy=STRATEGIES[strategy])
    run, state, batch = step.compile(BATCH), step.init(PARAMS), step.place(BATCH)
    run(state, batch)
    assert_refused(lambda: run(state, batch), "state", "`state` was donated", "state, metrics = run(state, batch)")
    assert "INVALID_ARGUMENT" not in capfd.readouterr().err


def test_a_step_accepts_a_state_of_numpy_arrays():
    step = step_of()
    state = jax.tree.map(np.asarray, step.init(PARAMS))
    assert step.compile(BATCH)(state, BATCH)[0].step == 1


# --- Other arguments ---


def sharded(**arguments):
    return step_of(strategy=jgraph.FullySharded(mesh("fsdp"), PARAMS, **arguments))


def bare():
    return jgraph.functional(lambda: nnx.Linear(6, 2, rngs=nnx.Rngs(0)))


MISTAKES = {
    "transform='adam'": (lambda: step_of(transform="adam"), "transform", "'adam'"),
    "transform=optax.adam": (lambda: step_of(transform=optax.adam), "transform", "optax.adam(1e-3)"),
    "transform=nnx.Optimizer": (lambda: step_of(transform=nnx.Optimizer(LINEAR, SGD, wrt=nnx.Param)), "transform", "its `tx`"),
    "mesh and shapes swapped": (lambda: jgraph.FullySharded(PARAMS, mesh("fsdp")), "mesh", "dict", "before the shapes"),
    "a mesh without fsdp": (lambda: jgraph.FullySharded(mesh("data"), PARAMS), "mesh", 'jax.make_mesh((n,), ("fsdp",))'),
    "a mesh without tensor": (lambda: jgraph.TensorParallel(one_device(), {}), "strategy", '("data", "tensor")'),
    "a long strategy": (lambda: step_of(strategy={"w": jnp.ones((30, 30))}), "strategy", "of type dict"),
    "a long fp8": (lambda: step_of(fp8={"w": jnp.ones((30, 30))}, batch=BATCH), "fp8", "of type dict"),
    "a model without loss": (lambda: bare().loss(bare().init()[0], BATCH, KEY), "make", "Linear", "method loss"),
    "lora of a function": (lambda: jgraph.lora(loss, BATCH, rank=2), "model", "jgraph.functional"),
    "strategy=a mesh": (lambda: step_of(strategy=mesh("data")), "strategy", "jgraph.Replicated"),
    "strategy=a class": (lambda: step_of(strategy=jgraph.Replicated), "strategy", "jgraph.Replicated"),
    "strategy of a number": (lambda: step_of(strategy=one_device({"w": 1.0})), "strategy", "1.0", "`w`"),
    "num_microbatches=True": (lambda: step_of(num_microbatches=True), "num_microbatches", "True"),
    "num_microbatches=2.0": (lambda: step_of(num_microbatches=2.0), "num_microbatches", "2.0"),
    "clip_norm='1'": (lambda: step_of(clip_norm="1"), "clip_norm", "'1'"),
    "clip_norm=True": (lambda: step_of(clip_norm=True), "clip_norm", "True"),
    "key='x'": (lambda: step_of(key="x"), "key", "'x'"),
    "key=None": (lambda: step_of(key=None), "key", "None"),
    "key of two keys": (lambda: step_of(key=jax.random.split(jax.random.key(0))), "key", "[2]"),
    "params_dtype='foo'": (lambda: step_of(params_dtype="foo"), "params_dtype", "'foo'"),
    "params_dtype=int32": (lambda: step_of(params_dtype=jnp.int32), "params_dtype", "int32"),
    "params_dtype=float64": (lambda: step_of(params_dtype=jnp.float64), "params_dtype", "float64", "float32", "bfloat16"),
    "params_dtype=float8": (lambda: step_of(params_dtype="float8_e4m3fn"), "params_dtype", "float8_e4m3fn", "bfloat16"),
    "grads_dtype=float64": (lambda: step_of(grads_dtype=np.float64), "grads_dtype", "float64", "float32"),
    "frozen_dtype=float64": (lambda: step_of(frozen_dtype=float), "frozen_dtype", "float64", "float32"),
    "grads_dtype=None": (lambda: step_of(grads_dtype=None), "grads_dtype", "None"),
    "read_dtype='foo'": (lambda: step_of(read_dtype="foo"), "read_dtype", "'foo'"),
    "freeze='layer*'": (lambda: step_of(freeze="layer*"), "freeze", "'layer*'"),
    "freeze=None": (lambda: step_of(freeze=None), "freeze", "None"),
    "freeze=(1,)": (lambda: step_of(freeze=(1,)), "freeze", "(1,)"),
    "reductions of another leaf": (
        lambda: step_of(carrying, carried=CARRIED, reductions={"stats": {"mean": "mean"}}),
        "reductions",
        "`stats/count`",
    ),
    "a mean of integers": (
        lambda: step_of(carrying, carried=CARRIED),
        "reductions",
        "mean",
        "int32[]",
        "`stats/count`",
        "last",
    ),
    "a sum of bools": (lambda: step_of(carrying, carried={"b": np.zeros(2, bool)}, reductions="sum"), "reductions", "bool[2]"),
    "a maximum of keys": (lambda: step_of(carrying, carried={"k": KEY}, reductions="max"), "reductions", "key<fry>[]", "last"),
    "reductions=None": (lambda: step_of(carrying, carried=CARRIED, reductions=None), "reductions", "`stats/count`"),
    "carried of numbers": (lambda: step_of(carrying, carried={"count": 0.0}), "carried", "0.0", "`count`"),
    "fp8='delayed'": (lambda: step_of(fp8="delayed", batch=BATCH), "fp8", "'delayed'"),
    "xla_options of a string": (lambda: step_of().compile(BATCH, xla_options="a=b"), "xla_options", "'a=b'"),
    "shard_rules='layer/w=1'": (lambda: sharded(shard_rules="layer/w=1"), "shard_rules", "'layer/w=1'"),
    "shard_rules of a name": (lambda: sharded(shard_rules=("layer/w=x",)), "shard_rules", "'layer/w=x'"),
    "shard_rules below zero": (lambda: sharded(shard_rules=("layer/w=-1",)), "shard_rules", "'layer/w=-1'"),
    "compute_dtype='foo'": (lambda: sharded(compute_dtype="foo"), "compute_dtype", "'foo'"),
    "experts='2'": (lambda: sharded(experts="2"), "experts", "'2'"),
    "schedule='gpipe'": (lambda: jgraph.Pipelined(mesh("pipe"), PARAMS, "gpipe"), "schedule", "'gpipe'"),
    "fp8 of a number": (lambda: jgraph.fp8(3), "fn", "3"),
    "config='delayed'": (lambda: jgraph.fp8(loss, "delayed"), "config", "'delayed'"),
    "keep=0": (lambda: jgraph.Checkpoints("/nowhere", keep=0), "keep", "0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_invalid_argument_is_refused_by_its_name(mistake):
    call, field, *words = MISTAKES[mistake]
    assert_refused(call, field, f"`{field}`", *words)


@pytest.mark.parametrize("key", [np.int64(3), jax.random.PRNGKey(3), jax.random.key(3)], ids=["int64", "raw", "typed"])
def test_a_seed_a_raw_key_and_a_typed_key_are_accepted(key):
    def noisy(params, batch, key):
        return loss(params, batch, key) + jax.random.normal(key)

    step_of(noisy, key=key).lower(BATCH)


def test_compiler_options_of_a_graphed_callable_must_be_a_mapping():
    with pytest.raises(jgraph.CallableError, match="`compiler_options` is list: must be") as error:
        jgraph.make_graphed_callables(lambda w, x: x @ w, jnp.ones((2, 3)), (jnp.ones((4, 2)),), compiler_options=["a=b"])
    assert error.value.field == "compiler_options"


# --- Arguments of optax transforms ---


@pytest.mark.parametrize("declare", [lambda transform: transform, jgraph.elementwise], ids=["plain", "elementwise"])
def test_a_line_search_is_refused_because_it_needs_the_loss_function(declare):
    assert_refused(
        lambda: step_of(transform=declare(optax.lbfgs())).compile(BATCH), "transform", "`value_fn`", "`value`", "`grad`"
    )


def test_a_transform_that_needs_an_unavailable_argument_is_refused_with_its_name():
    transform = contrib.sam(SGD, optax.chain(contrib.normalize(), SGD), opaque_mode=True)
    assert_refused(lambda: step_of(transform=transform).lower(BATCH), "transform", "`grad_fn`", "`value`")


def test_a_transform_without_extra_arguments_is_accepted():
    def update(updates, state, params=None):
        return updates, state

    step_of(transform=optax.GradientTransformation(lambda params: (), update)).lower(BATCH)


def test_other_errors_of_a_transform_propagate_unchanged():
    def update(updates, state, params=None):
        raise TypeError("of its own")

    with pytest.raises(TypeError, match="of its own"):
        step_of(transform=optax.GradientTransformation(lambda params: (), update)).lower(BATCH)
