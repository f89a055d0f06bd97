"""Optimizers by name, parameter groups and schedules, against optax applied by hand and against formulas."""

import dataclasses
import functools
import inspect
import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jgraph
from jgraph.checkpoint import Checkpoints
from jgraph.errors import ConfigError
from jgraph.step import TrainStep
from jgraph.step.transform import Elementwise
from jgraph.train.__main__ import parse
from jgraph.train._optimizer_config import OPTIMIZERS
from jgraph.train.config import OptimizerConfig, TrainConfig
from jgraph.train.optimizer import learning_rate, moments_in, optimizer, restart_schedule
from jgraph.train.presets import preset
from jgraph.train.rundir import RunDir
from jgraph.train.setup import TrainSetup
from jgraph_models.gpt_config import GPTConfig
from tests import tiny
from tests.interop.test_interop import make
from tests.train.test_pipeline_training import batches_of, initial_state, trained
from tests.train.test_resharding import restored

MODEL = GPTConfig(num_layers=2, d_model=16, num_heads=2, num_kv_heads=2, d_ff=32, vocab_size=64, compute_dtype="float32")
STEPS = 3


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / 4


def parameters() -> Any:
    layers = {str(i): {"kernel": normal(i, 8, 8), "bias": normal(i + 5, 8), "scale": jnp.ones((8,))} for i in range(2)}
    return {"layers": layers, "embedding": normal(10, 16, 8), "head_DV": normal(11, 8, 12)}


def loss(params: Any, tokens: jax.Array, key: Any = None) -> jax.Array:
    x = params["embedding"][tokens]
    for layer in params["layers"].values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"]) * layer["scale"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x @ params["head_DV"], tokens % 12))


BATCH = jnp.arange(16)
MATRICES = {
    "layers": {str(i): {"kernel": True, "bias": False, "scale": False} for i in range(2)},
    "embedding": True,
    "head_DV": True,
}


def by_hand(transform: optax.GradientTransformation, params: Any, steps: int = STEPS) -> Any:
    """Returns the parameters after steps of optax with `jax.grad`."""
    state = transform.init(params)

    @jax.jit
    def step(params, state):
        grads = jax.grad(loss)(params, BATCH)
        updates, state = transform.update(grads, state, params, value=loss(params, BATCH))  # pyright: ignore[reportCallIssue]
        return optax.apply_updates(params, updates), state

    transform = optax.with_extra_args_support(transform)
    for _ in range(steps):
        params, state = step(params, state)
    return params


def ours(config: OptimizerConfig, params: Any, steps: int = STEPS, strategy: Any = None, **options: Any) -> Any:
    """Returns the parameters after steps of `jgraph.train_step`, on one device without a strategy."""
    strategy = strategy or jgraph.Replicated(None, params)
    step = jgraph.train_step(loss, optimizer(config, steps, params), strategy, **options)
    run, state, batch = step.compile(BATCH), step.init(params), step.place(BATCH)
    for _ in range(steps):
        state, _ = run(state, batch)
    return jax.jit(step.bound.layout.unpack)(state.params)


def assert_near(found: Any, expected: Any, start: Any = None):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, expected)
    if start is not None:  # the updates are far larger than the tolerance
        moved = jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), expected, start))
        assert min(moved) > 1e-4


def constructor(name: str) -> Any:
    return getattr(optax, name, None) or getattr(optax.contrib, name)


def muon_axes(params: Any) -> Any:
    axes = optax.contrib.MuonDimensionNumbers(0, 1)
    layers = {name: {"kernel": axes, "bias": None, "scale": None} for name in params["layers"]}
    return {"layers": layers, "embedding": None, "head_DV": None}


# --- Optimizers ---


ELEMENTWISE = [name for name, kind in OPTIMIZERS.items() if kind.updates == "elements"]
# The others differ in the names and defaults of their arguments only.
OFTEN = ("adamw", "muon")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in OFTEN)) for name in OPTIMIZERS])
def test_an_optimizer_without_other_settings_equals_the_optimizer_of_optax(name):
    config = OptimizerConfig(name=name, learning_rate=0.01, warmup_steps=2)
    takes = inspect.signature(constructor(name)).parameters
    settings: dict[str, Any] = {mask: MATRICES for mask in ("mask", "weight_decay_mask") if mask in takes}
    settings |= {"b2": 0.95, "weight_decay": 0.1} if name == "adamw" else {}
    settings |= {"muon_weight_dimension_numbers": muon_axes} if name == "muon" else {}
    schedule = optax.warmup_cosine_decay_schedule(0.005, 0.01, 2, STEPS, 0.001)
    expected = by_hand(constructor(name)(schedule, **settings), parameters())
    assert_near(ours(config, parameters()), expected, None if name in ("lars", "adafactor") else parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_defaults_are_those_of_optax(name):
    takes = {key: parameter.default for key, parameter in inspect.signature(constructor(name)).parameters.items()}
    keys = {"beta1": ("b1", "adam_b1"), "beta2": ("b2", "adam_b2"), "eps": ("eps",)}
    keys["weight_decay"] = ("weight_decay", "weight_decay_rate")
    for field, names in keys.items():
        found = [takes[key] or 0.0 for key in names if key in takes]
        expected = {"beta2": 0.95, "weight_decay": 0.1}.get(field) if name == "adamw" else None
        assert getattr(OPTIMIZERS[name], field) == (expected or next(iter(found), None)), field


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"name": "lion", "beta1": 0.8, "beta2": 0.7, "weight_decay": 0.3},
            lambda rate: optax.lion(rate, b1=0.8, b2=0.7, weight_decay=0.3, mask=MATRICES),
        ),
        (
            {"name": "sgd", "args": ("momentum=0.9", "nesterov=True")},
            lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True),
        ),
        (
            {"name": "adafactor", "weight_decay": 0.1, "args": ("min_dim_size_to_factor=4", "momentum=0.5")},
            lambda rate: optax.adafactor(rate, 4, weight_decay_rate=0.1, weight_decay_mask=MATRICES, momentum=0.5),
        ),
        (
            {"name": "muon", "beta1": 0.8, "beta2": 0.7, "weight_decay": 0.3, "args": ("ns_steps=3", "preconditioning='aol'")},
            lambda rate: optax.contrib.muon(
                rate,
                ns_steps=3,
                weight_decay=0.3,
                preconditioning="aol",
                adam_b1=0.8,
                adam_b2=0.7,
                muon_weight_dimension_numbers=muon_axes,
            ),
        ),
        (
            {"name": "muon", "args": ("ns_coeffs='dion'", "adaptive=True", "consistent_rms=0.2", "nesterov=False")},
            lambda rate: optax.contrib.muon(
                rate,
                ns_coeffs="dion",
                adaptive=True,
                consistent_rms=0.2,
                nesterov=False,
                muon_weight_dimension_numbers=muon_axes,
            ),
        ),
        (
            {"name": "adamw", "eps": 1e-3, "args": ("nesterov=True", "eps_root=1e-6")},
            lambda rate: optax.adamw(rate, b2=0.95, eps=1e-3, eps_root=1e-6, weight_decay=0.1, mask=MATRICES, nesterov=True),
        ),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_flags_and_arguments_are_passed_to_optax(settings, expected):
    config = OptimizerConfig(learning_rate=0.01, warmup_steps=0, schedule="constant", **settings)
    result = by_hand(expected(0.01), parameters())
    assert_near(ours(config, parameters()), result, parameters())
    plain = by_hand(constructor(config.name)(0.01), parameters())
    assert max(jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), result, plain))) > 1e-4


@pytest.mark.long
def test_the_default_optimizer_has_the_program_of_adamw_with_a_cosine():
    config = TrainConfig.from_fields(steps=9, batch_size=4, seq_len=8, model=MODEL)

    def adamw(matrices: Any) -> optax.GradientTransformation:
        schedule = optax.warmup_cosine_decay_schedule(3e-4, 3e-4, 0, 9, 3e-4 * 0.1)
        return optax.chain(
            moments_in(optax.scale_by_adam(0.9, 0.95, 1e-8), "float32", "float32"),
            optax.add_decayed_weights(0.1, mask=matrices),
            optax.scale_by_learning_rate(schedule),
        )

    step = TrainSetup.from_config(config).step
    decays = {name: param.decays for name, param in step.bound.layout.params.items()}
    before = with_transform(step, adamw(decays))
    batch = jax.ShapeDtypeStruct((4, 9), jnp.int32)
    assert step.update.optimizer.moments is not None
    assert step.lower(batch).as_text() == before.lower(batch).as_text()
    changed = with_transform(step, optax.adamw(3e-4))
    assert step.lower(batch).as_text() != changed.lower(batch).as_text()


def with_transform(step: TrainStep, transform: Any) -> TrainStep:
    optimizer = dataclasses.replace(step.update.optimizer, transform=transform)
    return dataclasses.replace(step, update=dataclasses.replace(step.update, optimizer=optimizer))


def test_small_parameters_share_an_array_only_if_the_optimizer_updates_elements():
    kinds = {name: isinstance(optimizer(OptimizerConfig(name=name), 9, parameters()), Elementwise) for name in OPTIMIZERS}
    assert {name for name, shares in kinds.items() if not shares} == {"adafactor", "lamb", "lars", "muon"}
    grouped = optimizer(OptimizerConfig(groups=("*bias:rate=2",)), 9, parameters())
    assert not isinstance(grouped, Elementwise)


def bytes_of_state(name: str) -> float:
    """Returns the bytes of the optimizer state per element of a large matrix."""
    shapes = {"mlp": {"kernel": jax.ShapeDtypeStruct((1024, 2048), jnp.float32)}}
    step = jgraph.train_step(
        lambda params, batch, key: jnp.sum(params["mlp"]["kernel"]),
        optimizer(OptimizerConfig(name=name), 9, shapes),
        jgraph.Replicated(None, shapes),
    )
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.state.opt_state)) / 2**21


def test_the_guide_has_the_bytes_of_the_state_of_every_optimizer():
    page = (tiny.ROOT / "notes" / "guide" / "optimizer.md").read_text()
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (\d+) \|", page, re.MULTILINE)
    named = {name: int(size) for names, size in rows for name in re.findall(r"\w+", names)}
    assert named == {name: round(bytes_of_state(name)) for name in OPTIMIZERS}


@pytest.mark.parametrize("name", ["lion", "muon", "adafactor"])
def test_frozen_parameters_have_no_state_and_groups_apply_to_the_others(name):
    config = OptimizerConfig(name=name, learning_rate=0.01, warmup_steps=0, groups=("*/0/*:rate=0.5", "*:decay=0.2"))
    step = jgraph.train_step(
        loss, optimizer(config, STEPS, parameters()), jgraph.Replicated(None, parameters()), freeze=("embedding", "*/1/*")
    )
    run, state = step.compile(BATCH), step.init(parameters())
    assert {leaf.shape for leaf in jax.tree.leaves(state.opt_state)}.isdisjoint({(16, 8)})
    for _ in range(STEPS):
        state, _ = run(state, BATCH)
    found, start = step.bound.layout.unpack(state.params), parameters()
    same = jax.tree.map(lambda a, b: bool((a == b).all()), found, start)
    frozen = {"embedding": True, "head_DV": False}
    assert same == frozen | {
        "layers": {"0": dict.fromkeys(same["layers"]["0"], False), "1": dict.fromkeys(same["layers"]["1"], True)}
    }


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_moments_are_float32_and_updated_in_place_with_bfloat16_parameters(name):
    step = jgraph.train_step(
        loss,
        optimizer(OptimizerConfig(name=name), 9, parameters()),
        jgraph.Replicated(None, parameters()),
        params_dtype=jnp.bfloat16,
    )
    step.compile(BATCH)  # checks that the state is updated in place
    assert {leaf.dtype.name for leaf in jax.tree.leaves(step.state.params)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(step.state.opt_state)} == {"float32", "int32"}


def test_lion_stores_its_moment_in_bfloat16():
    lion = optimizer(OptimizerConfig(name="lion", first_moment_dtype="bfloat16"), 9, parameters())
    step = jgraph.train_step(loss, lion, jgraph.Replicated(None, parameters()))
    step.compile(BATCH)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(step.state.opt_state)} == {"bfloat16", "int32"}


def muon_parameters(**settings: Any) -> set[str]:
    """Returns the names of the parameters with a momentum of muon, without the index of the layer."""
    model = dataclasses.replace(MODEL, **settings)
    config = TrainConfig.from_fields(batch_size=4, seq_len=8, model=model, optimizer=OptimizerConfig(name="muon"))
    state: Any = TrainSetup.from_config(config).step.state.opt_state
    names = jgraph.tree.leaf_names(state.inner_states["muon"].inner_state[0].mu)
    return {name.replace("blocks/0/", "blocks/").replace("blocks/1/", "blocks/") for name in names}


def test_muon_orthogonalizes_the_matrices_of_the_blocks():
    kernels = {"blocks/attention/qkv/kernel", "blocks/attention/out/kernel", "blocks/mlp/up/kernel", "blocks/mlp/down/kernel"}
    assert muon_parameters(head="untied") == kernels
    assert muon_parameters(scan_layers=True) == kernels


def test_muon_orthogonalizes_every_expert():
    experts = {"blocks/mlp/up_EDF2", "blocks/mlp/down_EFD"}
    attention = {"blocks/attention/qkv/kernel", "blocks/attention/out/kernel"}
    moe = jgraph.MoEConfig(num_experts=4, experts_per_token=2, d_ff=16)
    assert muon_parameters(mlp="swiglu", moe=moe) == experts | attention


@pytest.mark.long
def dtypes_of_products(config: OptimizerConfig, **settings: Any) -> set[str]:
    """Returns the dtypes of the matmuls of an update."""
    transform: Any = optimizer(config, STEPS, parameters(), **settings)
    state = transform.init(parameters())
    text = str(jax.make_jaxpr(transform.update)(parameters(), state, parameters()))
    return set(re.findall(r":(\w+)\[[\d,]*\] = dot_general", text))


def test_muon_multiplies_matrices_in_the_dtype_of_the_model():
    assert dtypes_of_products(OptimizerConfig(name="muon"), compute_dtype="bfloat16") == {"bf16"}
    assert dtypes_of_products(OptimizerConfig(name="muon"), compute_dtype="float32") == {"f32"}
    assert dtypes_of_products(OptimizerConfig(name="muon", matrix_dtype="float32"), compute_dtype="bfloat16") == {"f32"}
    with pytest.raises(ConfigError, match=r"`optimizer.matrix_dtype` is bfloat16: must be auto with `optimizer.name` lion"):
        OptimizerConfig(name="lion", matrix_dtype="bfloat16")


def test_muon_updates_stacked_layers_as_separate_layers():
    layers = [{"kernel": normal(i, 8, 12), "scale": normal(i + 2, 8)} for i in range(2)]
    grads = [jax.tree.map(jnp.sin, layer) for layer in layers]
    config = OptimizerConfig(name="muon", learning_rate=0.01, warmup_steps=0)

    def updates(params: Any, grads: Any, *, stacked: bool) -> Any:
        transform: Any = optimizer(config, 9, params, stacked=stacked)
        return transform.update(grads, transform.init(params), params)[0]

    stack = partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
    separate = updates(dict(enumerate(layers)), dict(enumerate(grads)), stacked=False)
    together = updates(stack(*layers), stack(*grads), stacked=True)
    assert_near(together, stack(*separate.values()))
    assert float(jnp.abs(together["kernel"]).std()) > 1e-3  # the first update of Adam has the same size for all elements
    assert float(jnp.abs(together["scale"]).std()) < 1e-5


# --- Parameter groups ---


@pytest.mark.long
def test_groups_scale_the_learning_rate_and_replace_the_decay():
    groups = ("embedding:rate=0.1,decay=0", "*/0/*:rate=0", "*kernel:decay=0.5", "*/1/*:rate=2")
    config = OptimizerConfig(learning_rate=0.01, warmup_steps=0, schedule="linear", groups=groups)

    def adamw(rate: float, decay: float = 0.1) -> optax.GradientTransformation:
        schedule = optax.linear_schedule(0.01 * rate, 0.001 * rate, STEPS)
        mask = lambda tree: jax.tree.map(lambda leaf: leaf.ndim == 2, tree)  # noqa: E731
        return optax.adamw(schedule, b2=0.95, weight_decay=decay, mask=mask)

    labels = {
        "layers": {"0": dict.fromkeys(("kernel", "bias", "scale"), "still"), "1": {"kernel": "k", "bias": "b", "scale": "b"}},
        "embedding": "embedding",
        "head_DV": "rest",
    }
    parts: Any = {"still": optax.set_to_zero(), "k": adamw(1, 0.5), "b": adamw(2), "embedding": adamw(0.1, 0), "rest": adamw(1)}
    found = ours(config, parameters())
    assert_near(found, by_hand(optax.partition(parts, labels), parameters()))
    np.testing.assert_array_equal(found["layers"]["0"]["kernel"], parameters()["layers"]["0"]["kernel"])
    assert float(jnp.abs(found["layers"]["1"]["bias"] - parameters()["layers"]["1"]["bias"]).max()) > 0.01


@pytest.mark.long
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_groups_without_a_change_have_no_effect(name):
    config = OptimizerConfig(name=name, learning_rate=0.01, warmup_steps=0)
    assert_near(ours(dataclasses.replace(config, groups=("*:rate=1",)), parameters()), ours(config, parameters()))


# --- Schedules ---


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize(
    ("schedule", "formula"),
    [
        ("cosine", lambda x, s, w: 0.1 + 0.9 * (1 + math.cos(math.pi * x)) / 2),
        ("linear", lambda x, s, w: 1 - 0.9 * x),
        ("constant", lambda x, s, w: 1.0),
        ("wsd", lambda x, s, w: 1 - 0.9 * max(0.0, (s - 16) / 4)),
        ("inverse-sqrt", lambda x, s, w: math.sqrt(w / s) if w > 1 else math.sqrt(1 / (1 + s))),
    ],
)
def test_a_schedule_has_its_formula_and_is_constant_after_its_end(schedule, formula, warmup):
    rate = learning_rate(OptimizerConfig(learning_rate=2.0, warmup_steps=warmup, schedule=schedule), 20)
    assert [float(rate(step)) for step in range(warmup)] == pytest.approx([0.5, 0.875, 1.25, 1.625][:warmup])
    expected = [2 * formula((step - warmup) / (20 - warmup), step, max(1, warmup)) for step in range(warmup, 21)]
    assert [float(rate(step)) for step in range(warmup, 21)] == pytest.approx(expected, rel=1e-5)
    assert float(rate(20)) == float(rate(1000))
    longer = learning_rate(OptimizerConfig(learning_rate=2.0, warmup_steps=warmup, schedule=schedule, decay_steps=20), 50)
    assert [float(longer(step)) for step in range(60)] == [float(rate(step)) for step in range(60)]


def test_the_decay_of_wsd_takes_its_fraction_of_the_steps():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, schedule="wsd", decay_fraction=0.5, final_learning_rate=0.0)
    assert [float(learning_rate(config, 10)(step)) for step in (2, 5, 6, 10)] == pytest.approx([1, 1, 0.8, 0])
    whole = dataclasses.replace(config, decay_fraction=1.0)
    assert [float(learning_rate(whole, 10)(step)) for step in (2, 6, 10)] == pytest.approx([1, 0.5, 0])


@pytest.mark.parametrize("groups", [(), ("*kernel:rate=0.5",)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_schedule_of_every_optimizer_can_be_restarted(name, groups):
    config = OptimizerConfig(name=name, schedule="linear", warmup_steps=4, groups=groups)
    transform: Any = optimizer(config, 20, parameters())
    transform = transform.make(MATRICES) if isinstance(transform, Elementwise) else transform
    state = transform.init(parameters())

    def counts(state: Any) -> list[int]:
        is_count = lambda node: isinstance(node, optax.ScaleByScheduleState)  # noqa: E731
        return [int(node.count) for node in jax.tree.leaves(state, is_leaf=is_count) if is_count(node)]

    counted = jax.tree.map(lambda leaf: leaf + 3 if leaf.dtype == jnp.int32 else leaf, state)
    assert set(counts(counted)) == {3}
    restarted = restart_schedule(counted)
    assert set(counts(restarted)) == {0}
    assert jax.tree.structure(restarted) == jax.tree.structure(state)


# --- Devices and checkpoints ---


# The updates of these are small with the rate of the others.
RATES = {"adafactor": 0.3, "adagrad": 1.0, "lamb": 0.1, "lars": 10.0, "radam": 1.0, "rmsprop": 0.1, "sgd": 1.0, "yogi": 0.1}


def config_of(name: str, steps: int = STEPS, **fields: Any) -> TrainConfig:
    # With a small eps, rounding decides the sign of an update if the gradient is nearly zero.
    eps: dict[str, Any] = {} if OPTIMIZERS[name].eps is None else {"eps": 1e-3}
    settings: dict[str, Any] = {"learning_rate": RATES.get(name, 0.01), "warmup_steps": 1, **eps} | fields.pop("settings", {})
    # Two layers only for the two stages of a pipeline, because compilation takes most of the time.
    model = dataclasses.replace(MODEL, num_layers=fields.get("pp", 1))
    fields = {"steps": steps, "batch_size": 8, "seq_len": 16, "seed": 2, "model": model} | fields
    return TrainConfig.from_fields(**fields, optimizer=OptimizerConfig(name=name, **settings))


@functools.cache
def one_device(name: str, model: GPTConfig, groups: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    run = trained(config_of(name, settings={"groups": groups}, model=model))
    start, found = dataclasses.replace(run, state=initial_state(run.setup)).weights(), run.weights()
    assert min(np.abs(found[path] - start[path]).max() for path in found) > 5e-4  # 50 times the tolerance of the comparison
    return found


def assert_equals_one_device(name: str, layout: dict[str, Any], groups: tuple[str, ...] = ()):
    config = config_of(name, settings={"groups": groups}, **layout)
    found, expected = trained(config).weights(), one_device(name, config.model, groups)
    assert list(found) == list(expected)
    for path, leaf in found.items():
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-5, atol=1e-5, err_msg=path)


LAYOUTS: dict[str, dict[str, Any]] = {"fsdp": {"fsdp": 2}, "pp": {"pp": 2, "num_microbatches": 2}, "tp": {"tp": 2}}
WHOLE = [
    pytest.param(name, layout, marks=[] if (name, layout) == ("muon", "fsdp") else pytest.mark.long)
    for name in OPTIMIZERS
    if name not in ELEMENTWISE
    for layout in LAYOUTS
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "layout"), WHOLE)
def test_an_optimizer_of_whole_arrays_on_several_devices_equals_one_device(name, layout):
    assert_equals_one_device(name, LAYOUTS[layout])


# An update that reads only its own element has the same result in every layout: one layout each, and matrices without a GPT.
# The tests of layouts and those of groups train a GPT with AdamW in all of them.
@pytest.mark.long
@pytest.mark.parametrize(("name", "axis"), list(zip(ELEMENTWISE, len(ELEMENTWISE) * ["fsdp", "tensor"], strict=False)))
def test_an_optimizer_of_elements_on_two_devices_equals_one_device(name, axis):
    config, start = config_of(name).optimizer, parameters()
    strategy: Any = jgraph.FullySharded(jax.make_mesh((2,), ("fsdp",)), start)
    if axis == "tensor":
        replicas = jgraph.Replicated(jax.make_mesh((1, 2), ("data", "tensor")), start)
        strategy = jgraph.TensorParallel(replicas, {"*kernel": jgraph.Split(axis=-1), "embedding": jgraph.Split(axis=0)})
    expected = ours(config, start)
    assert_near(ours(config, start, strategy=strategy), expected)
    assert min(jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), expected, start))) > 5e-4


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_on_several_devices_equal_one_device(layout):
    assert_equals_one_device("adamw", LAYOUTS[layout], ("embedding*:rate=0.1,decay=0", "*/0/*:rate=2"))


GROUPS = ("--optimizer.groups", "*embedding*:rate=0.1,decay=0", "*kernel:decay=0.2")
RUNS = {
    "muon": ("--optimizer.name", "muon"),
    "adafactor": ("--optimizer.name", "adafactor", "--optimizer.args", "min_dim_size_to_factor=8", "momentum=0.9"),
    "lion": ("--optimizer.name", "lion", *GROUPS),
}


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_equals_one_without_a_stop(tmp_path, name):
    flags = RUNS[name]
    assert tiny.train(tmp_path / "whole", *flags, "--steps", "4") == 0
    first = ("--steps", "2", "--optimizer.decay-steps", "4", "--optimizer.warmup-steps", "0")
    assert tiny.train(tmp_path / "parts", *flags, *first) == 0
    more = ("--steps", "4", "--optimizer.extend", "constant", "--optimizer.decay-steps", "4", "--optimizer.warmup-steps", "0")
    assert tiny.train(tmp_path / "parts", *flags, *more) == 0
    assert [entry["loss"] for entry in tiny.entries(tmp_path / "parts")] == [
        entry["loss"] for entry in tiny.entries(tmp_path / "whole")
    ]


def parsed(*flags: str) -> TrainConfig:
    config = parse(list(flags))
    assert config is not None
    return config


def advanced(setup: TrainSetup, state: Any, steps: range) -> tuple[Any, list[float]]:
    """Returns the state after `steps`, and their losses. Donates `state`."""
    step, batches, losses = setup.compile_step(), batches_of(setup.config), []
    for i in steps:
        state, metrics = step(state, setup.step.place(batches[i]))
        losses.append(float(metrics.loss))
    return state, losses


# The state of muon is in parts, like that of lion with groups.
@pytest.mark.long
@pytest.mark.parametrize(("name", "layout"), [("adafactor", ("--fsdp", "2", "--tp", "2")), ("lion", ("--fsdp", "2"))])
def test_a_checkpoint_of_other_devices_resumes_in_a_pipeline(tmp_path, name, layout):
    flags = (*RUNS[name], "--model.num-layers", "2", "--num-microbatches", "2", "--optimizer.warmup-steps", "0", "--steps", "4")
    flags = (*tiny.FLAGS, *flags, "--model.vocab-size", "64", "--model.compute-dtype", "float32", "--run-dir", str(tmp_path))
    one, before, after = (TrainSetup.from_config(parsed(*flags, *more)) for more in ((), layout, ("--pp", "2")))
    _, expected = advanced(one, initial_state(one), range(4))
    state, losses = advanced(before, initial_state(before), range(2))
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(2, before.step.canonical.of(state))
    checkpoints.close()
    _, more = advanced(after, restored(tmp_path, after), range(2, 4))
    np.testing.assert_allclose([*losses, *more], expected, rtol=1e-4)


@pytest.mark.long
def test_a_new_run_continues_with_the_state_of_the_same_optimizer_only(tmp_path, capsys):
    assert tiny.train(tmp_path / "lion", *RUNS["lion"], "--steps", "2") == 0
    with_state = ("--continue-from", str(tmp_path / "lion"), "--continue-with", "optimizer", "--steps", "2")
    assert tiny.train(tmp_path / "same", *RUNS["lion"], *with_state) == 0
    assert tiny.train(tmp_path / "other", "--optimizer.name", "sgd", *with_state) == 2
    assert "error: --optimizer.name is sgd: must be lion, as in --continue-from" in capsys.readouterr().err
    assert tiny.train(tmp_path / "other", *RUNS["lion"][:2], *with_state) == 2
    assert "error: --optimizer.groups is empty: must be *embedding*:rate=0.1,decay=0 " in capsys.readouterr().err


# --- Configuration ---


def test_a_default_becomes_that_of_the_optimizer_and_a_set_value_stays():
    tiny_preset = preset("cpu-tiny").optimizer
    assert (tiny_preset.beta2, tiny_preset.weight_decay) == (0.99, 0.1)
    changed = dataclasses.replace(tiny_preset, name="nadamw", beta1=0.5)
    assert (changed.beta1, changed.beta2, changed.eps, changed.weight_decay) == (0.5, 0.999, 1e-8, 1e-4)
    sgd = dataclasses.replace(tiny_preset, name="sgd")
    assert (sgd.beta1, sgd.beta2, sgd.eps, sgd.weight_decay) == (0, 0, 0, 0)
    saved = TrainConfig.from_fields(optimizer=sgd).to_dict()["optimizer"]
    assert OptimizerConfig(**saved) == sgd


def test_a_configuration_with_groups_is_restored_from_its_config_file(tmp_path):
    config = TrainConfig.from_fields(optimizer=OptimizerConfig(name="lion", args=(), groups=("*kernel:rate=0.5",)))
    run_dir = RunDir(tmp_path)
    run_dir.write(config, {}, {})
    assert run_dir.saved_config(field="run").optimizer == config.optimizer


WRONG = [
    ({"name": "sdg"}, "`optimizer.name` is 'sdg': must be one of adamw, adam, "),
    ({"name": "sgd", "beta2": 0.9}, "`optimizer.beta2` is 0.9: must be left out with `optimizer.name` sgd, which has no beta2"),
    ({"name": "adam", "weight_decay": 0.1}, "`optimizer.weight_decay` is 0.1: must be left out with `optimizer.name` adam"),
    ({"args": ("nesterov",)}, "`optimizer.args` is nesterov: must be name=value"),
    ({"args": ("nesterov=yes",)}, "`optimizer.args` is nesterov=yes: must be name=value with a Python literal"),
    ({"groups": ("*kernel",)}, "`optimizer.groups` is *kernel: must be PATTERN:rate=FACTOR,decay=VALUE"),
    ({"groups": ("*kernel:rate=-1",)}, "`optimizer.groups` is *kernel:rate=-1: must be "),
    ({"groups": ("*kernel:rates=1",)}, "`optimizer.groups` is *kernel:rates=1: must be "),
    ({"groups": ("*kernel:rate=1,rate=2",)}, "`optimizer.groups` is *kernel:rate=1,rate=2: must be "),
    ({"name": "sgd", "groups": ("*:decay=0",)}, "`optimizer.groups` is *:decay=0: must be without decay with "),
    ({"schedule": "step"}, "`optimizer.schedule` is 'step': must be one of cosine, linear, constant, wsd, inverse-sqrt"),
    ({"schedule": "linear", "extend": "cosine"}, "`optimizer.extend` is cosine: must be no, schedule or constant with "),
    ({"decay_fraction": 0.5}, "`optimizer.decay_fraction` is 0.5: must be left out with `optimizer.schedule` cosine"),
    ({"schedule": "wsd", "decay_fraction": 0.0}, "`optimizer.decay_fraction` is 0.0: must be in (0, 1]"),
    ({"schedule": "constant", "final_learning_rate": 0.0}, "`optimizer.final_learning_rate` is 0.0: must be left out with "),
    ({"extend": "schedule", "decay_steps": 5}, "`optimizer.decay_steps` is 5: must be 0 if `optimizer.extend` is schedule"),
    ({"args": ("b1=0.5",)}, "`optimizer.args` has 'b1': must be one of eps_root, nesterov with `optimizer.name` adamw"),
    ({"name": "yogi", "args": ("momentum=0",)}, "`optimizer.args` has 'momentum': must be left out with `optimizer.name` yogi"),
    ({"name": "sgd", "args": ("momentum='x'",)}, "`optimizer.args` is momentum='x': must be arguments that sgd takes ("),
    ({"groups": ("x*:rate=1",)}, "`optimizer.groups` has 'x*', which matches no parameter: must match one of "),
    ({"name": "sgd", "first_moment_dtype": "bfloat16"}, "`optimizer.first_moment_dtype` is bfloat16: must be float32 with "),
    ({"name": "lion", "second_moment_dtype": "bfloat16"}, "`optimizer.second_moment_dtype` is bfloat16: must be float32 with "),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[str(settings) for settings, _ in WRONG])
def test_a_wrong_setting_is_refused_in_one_line_that_names_it(settings, message):
    with pytest.raises(ConfigError) as error:
        optimizer(OptimizerConfig(**settings), 9, parameters())
    assert str(error.value).startswith(message)
    assert error.value.field == message.split("`")[1]
    assert "\n" not in str(error.value)


def test_presets_have_other_rates_for_given_weights_and_for_adapters():
    assert preset("llama3-1b").optimizer.learning_rate == 3e-4
    assert preset("llama3-1b", trains="given weights").optimizer.learning_rate == 2e-5
    assert preset("cpu-tiny", trains="adapters").optimizer.learning_rate == 2e-4


@pytest.mark.long
def test_a_run_has_a_rate_for_its_trained_parameters_unless_the_flag_sets_it(tmp_path):
    RunDir(tmp_path / "run").write(preset("cpu-tiny"), {}, {})
    make(tmp_path / "folder")
    run, folder = ("--continue-from", str(tmp_path / "run")), ("--init-from", str(tmp_path / "folder"))
    lora, rate = ("--lora.rank", "2"), ("--optimizer.learning-rate", "1e-3")
    for flags, expected in (
        *((run, 3e-3), ((*run, *lora), 2e-4), (folder, 2e-5), ((*folder, *lora), 2e-4), ((*folder, *rate), 1e-3)),
        *(((*folder, "--preset", "llama3-1b", "--model.attention", "auto"), 2e-5), (lora, 2e-4), ((*lora, *rate), 1e-3)),
    ):
        config = parsed(*flags, "--run-dir", str(tmp_path / "new"))
        assert config.optimizer.learning_rate == expected
    assert parsed().optimizer.learning_rate == 3e-3
