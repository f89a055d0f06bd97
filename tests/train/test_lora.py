"""LoRA: adapters alone are trained, with the same losses on every layout, with FP8 base weights, and after a restart."""

import dataclasses
import functools
import json
import types
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jgraph
from jgraph.adapters import AdaptedModel, separated
from jgraph.checkpoint import Checkpoints
from jgraph.errors import ConfigError
from jgraph.precision.config import FP8Config
from jgraph.train._callbacks import GradientChecks
from jgraph.train._functional import functional_model
from jgraph.train.config import LoRAConfig, TrainConfig
from jgraph.train.evaluation import evaluate as jgraph_evaluate
from jgraph.train.initial import initial_weights
from jgraph.train.rundir import RunDir
from jgraph.train.setup import TrainSetup
from jgraph.tree import leaf_names
from tests.interop.test_interop import make, train
from tests.train.test_pipeline_training import config_of, trained as train_all

STEPS = 3
LORA = LoRAConfig(rank=4, alpha=8, base_dtype="float32")
# Every engine and both kinds of schedules of a pipeline, and every two of `fsdp`, `tp` and `pp`.
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp=4": {"fsdp": 4},
    "tp=2 cp=2": {"tp": 2, "cp": 2},
    "tp=2 fsdp=2 resharded": {"tp": 2, "fsdp": 2, "gather_per": "pass", "num_microbatches": 2},
    "pp=2 tp=2": {"pp": 2, "tp": 2, "num_microbatches": 2},
    "pp=2 fsdp=2 zb-h1": {"pp": 2, "fsdp": 2, "num_microbatches": 2, "schedule": "zb-h1"},
    "pp=2 dispatch": {"pp": 2, "num_microbatches": 2, "pp_engine": "dispatch", "schedule": "1f1b"},
}


def trained(model: dict[str, Any] | None = None, **fields: Any) -> tuple[TrainSetup, Any, list[float]]:
    values: dict[str, Any] = {"num_microbatches": 1, "lora": LORA} | fields
    config = config_of(**{"num_layers": 2, "steps": STEPS} | values)
    if model is not None:
        config = config.changed(model=dataclasses.replace(config.model, **model))
    found = train_all(config)
    return found.setup, found.state, found.losses


@functools.cache
def on_one_device(lora: LoRAConfig = LORA, num_layers: int = 2) -> tuple[TrainSetup, Any, list[float]]:
    return trained(lora=lora, num_layers=num_layers)


@pytest.mark.long
def test_adapters_alone_have_moments_and_change():
    setup, state, _ = on_one_device()
    before, after = (setup.step.canonical.of(each) for each in (setup.init(), state))
    assert isinstance(setup.model, AdaptedModel)
    adapters = [name for name in leaf_names(setup.model.shapes) if "_lora_" in name]
    assert len(adapters) == 2 * len(setup.model.adapters) == 16
    assert leaf_names(after.opt_state[0].mu) == adapters
    for name, old, new in zip(leaf_names(before.params), *map(jax.tree.leaves, (before.params, after.params)), strict=True):
        assert bool(jnp.array_equal(old, new)) is (name not in adapters)


def test_matrices_a_have_a_gradient_of_zero_at_step_1_without_a_warning():
    warned: list[str] = []
    setup, reporter = (
        TrainSetup.from_config(config_of(num_microbatches=1, lora=LORA)),
        types.SimpleNamespace(warn=warned.append),
    )
    checks = GradientChecks(setup, None, reporter, 0)  # pyright: ignore[reportArgumentType]
    checks._names = ["0/kernel_lora_a", "0/kernel_lora_b"]  # of an optimizer with unpacked arrays
    metrics: Any = types.SimpleNamespace(loss=1.0, grad_norm=0.0, grad_square_sums=[0.0, 0.0])
    checks.finished([(1, metrics)])
    assert [text.partition(" is zero")[0] for text in warned] == ["step 1: the gradient of 0/kernel_lora_b"]
    checks.finished([(2, metrics)])
    assert [text.partition(" is zero")[0] for text in warned[1:]] == ["step 2: the gradient of 0/kernel_lora_a"]


def test_base_weights_are_stored_in_the_base_dtype():
    setup = TrainSetup.from_config(config_of(num_microbatches=1, lora=LoRAConfig(rank=2, base_dtype="bfloat16")))
    base, low = separated(setup.step.canonical.shapes().params)
    assert {leaf.dtype for leaf in jax.tree.leaves(base)} == {jnp.dtype(jnp.bfloat16)}
    assert {leaf.dtype for leaf in jax.tree.leaves(low)} == {jnp.dtype(jnp.float32)}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_device(layout):
    num_layers = LAYOUTS[layout].get("pp", 1)  # compilation takes most of the time
    setup, state, losses = trained(**LAYOUTS[layout], num_layers=num_layers)
    canonical = setup.step.canonical.of(state)
    one, its_state, expected = on_one_device(num_layers=num_layers)
    its = one.step.canonical.of(its_state)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert jax.tree.structure(canonical) == jax.tree.structure(its)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), canonical.params, its.params)
    jax.tree.map(np.testing.assert_array_equal, setup.step.canonical.back(canonical), state)


PIPELINE = {"pp": 2, "num_microbatches": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ({"scan_layers": True}, ({"fsdp": 4}, PIPELINE)),
        ({"mlp": "swiglu", "num_kv_heads": 1, "head": "untied"}, (PIPELINE | {"fsdp": 2},)),
    ],
    ids=["stacked", "parts"],
)
def test_models_with_stacked_layers_and_other_parts_train_as_on_one_device(model, layouts):
    expected = trained(model)[2]
    for layout in layouts:
        np.testing.assert_allclose(trained(model, **layout)[2], expected, rtol=1e-5)


# --- FP8 ---

FP8 = {"precision": "fp8", "fp8": FP8Config(recipe="delayed", history=4)}


def test_base_weights_are_in_fp8_and_adapters_are_not():
    setup = TrainSetup.from_config(config_of(num_layers=2, **{"num_microbatches": 1, "lora": LORA} | FP8))
    products = setup.step.bound.loss.trace.products  # pyright: ignore[reportAttributeAccessIssue]
    reasons = {product.name.partition("#")[0]: product.kept for product in products}
    assert {reason for name, reason in reasons.items() if name.endswith("/kernel")} == {""}
    assert {reason for name, reason in reasons.items() if "_lora_" in name} == {"an adapter"}


@pytest.mark.long
def test_fp8_base_weights_train_on_every_layout_as_on_one_device():
    expected = trained(None, **FP8, num_microbatches=2)[2]
    for layout in ({"fsdp": 4, "num_microbatches": 2}, PIPELINE):
        np.testing.assert_allclose(trained(None, **FP8, **layout)[2], expected, rtol=2e-3)


# --- Initial weights ---


@pytest.mark.parametrize("layout", [{}, pytest.param({"fsdp": 4}, marks=pytest.mark.long), {"pp": 2, "schedule": "1f1b"}])
def test_the_weights_beside_adapters_are_the_frozen_leaves_of_a_checkpoint(layout):
    canonical = TrainSetup.from_config(config_of(num_layers=2, **{"num_microbatches": 2, "lora": LORA} | layout)).step.canonical
    names = {
        f".params{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(canonical.shapes().params)
    }
    assert canonical.frozen == {name for name in names if "_lora_" not in name}
    assert len(canonical.frozen) > 8


def saved(path: Any, lora: LoRAConfig) -> tuple[TrainConfig, Any]:
    """Writes a run of three steps. Returns its configuration and its canonical state."""
    setup, state, _ = on_one_device(lora)
    canonical = setup.step.canonical.of(state)
    RunDir(path).write(setup.config, {"name": "text", "fingerprint": "0" * 64, "train_tokens": 9, "heldout_tokens": 1}, {})
    checkpoints = Checkpoints(RunDir(path).checkpoints, 1, frozen=setup.step.canonical.frozen)
    checkpoints.save(STEPS, canonical)
    checkpoints.close()
    return setup.config, canonical


def continued(path: Any, config: TrainConfig, **fields: Any) -> Any:
    """Returns the canonical initial state of a run that continues from `path`."""
    config = config.changed(continue_from=str(path), run_dir=f"{path}-more", **fields)
    setup, weights = TrainSetup.from_config(config), initial_weights(config)
    assert weights is not None
    try:
        return setup.step.canonical.of(weights.load(setup))
    finally:
        weights.close()


@pytest.mark.once
@pytest.mark.parametrize("layout", [{}, pytest.param({"fsdp": 4}, marks=pytest.mark.long)])
def test_adapters_are_added_to_the_weights_of_another_run(tmp_path, layout):
    config, there = saved(tmp_path / "run", LoRAConfig())
    base, low = separated(continued(tmp_path / "run", config, lora=LORA, **layout).params)
    jax.tree.map(np.testing.assert_array_equal, base, there.params)
    assert len(low) == 8
    assert all(a.any() and not b.any() for a, b in low.values())


@pytest.mark.long
@pytest.mark.parametrize("layout", [{}, pytest.param({"fsdp": 4}, marks=pytest.mark.long)])
def test_the_adapters_of_another_run_are_merged_or_taken_over(tmp_path, layout):
    config, there = saved(tmp_path / "run", LORA)
    same = continued(tmp_path / "run", config, **layout)
    jax.tree.map(np.testing.assert_array_equal, same.params, there.params)
    model = functional_model(config)
    assert isinstance(model, AdaptedModel)
    merged = continued(tmp_path / "run", config, lora=LoRAConfig(), **layout).params
    base, low = separated(there.params)
    for name, leaf, expected, old in zip(
        leaf_names(base), *map(jax.tree.leaves, (merged, model.merge(there.params), base)), strict=True
    ):
        if name not in low:
            np.testing.assert_array_equal(leaf, old)
            continue
        # An element is a sum of rank products, scaled and added to the weight. Each of these operations rounds once.
        a, b = low[name]
        size = jnp.abs(old) + model.scale * model.adapters[name].change(jnp.abs(a), jnp.abs(b)).reshape(old.shape)
        limit = (LORA.rank + 3) * np.finfo(np.float32).eps * size
        assert (jnp.abs(leaf - expected) <= limit).all()
        assert jnp.abs(leaf - old).max() > 100 * limit.max()
    again, low = separated(continued(tmp_path / "run", config, lora=LoRAConfig(rank=2, base_dtype="float32"), **layout).params)
    jax.tree.map(np.testing.assert_array_equal, again, merged)
    assert {a.shape[-1] for a, _ in low.values()} == {2, 6}


@pytest.mark.long
def test_the_optimizer_state_of_other_adapters_is_refused(tmp_path):
    config, _ = saved(tmp_path / "run", LORA)
    with pytest.raises(ConfigError, match="`continue_with` is optimizer: must be weights, because the other run trained other"):
        continued(tmp_path / "run", config, lora=LoRAConfig(), continue_with="optimizer")


@pytest.mark.long
def test_a_run_starts_with_a_folder_resumes_is_evaluated_and_samples(tmp_path, capsys):
    folder, arrays = make(tmp_path / "folder")
    flags = ("--init-from", str(folder.path), "--lora.rank", "4", "--lora.base-dtype", "float32", "--fsdp", "2")
    assert train(tmp_path / "run", *flags, "--steps", "2") == 0
    capsys.readouterr()
    assert train(tmp_path / "run", *flags, "--steps", "4", "--optimizer.extend", "constant") == 0
    shown = capsys.readouterr().out
    assert "resumed from step 2" in shown
    assert "35,616 parameters, 3,712 of them trained" in shown
    loaded = jgraph.load(tmp_path / "run")
    base, low = separated(loaded.params)
    for name, leaf in zip(leaf_names(base), jax.tree.leaves(base), strict=True):
        np.testing.assert_array_equal(leaf, arrays[name])
    assert all(b.any() for _, b in low.values())
    evaluated = jgraph_evaluate(tmp_path / "run")
    assert abs(evaluated.loss - last_evaluation(tmp_path / "run")) < 1e-5
    tokens = jnp.arange(8)[None]
    adapted: Any = loaded.model
    merged = jax.jit(lambda params: adapted.base.evaluate("logits", adapted.merge(params), {}, tokens))(loaded.params)
    found = jax.jit(partial(adapted.evaluate, "logits"))(loaded.params, {}, tokens)
    np.testing.assert_allclose(found, merged, atol=1e-4)


def last_evaluation(path: Any) -> float:
    entries = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [entry["eval_loss"] for entry in entries if "eval_loss" in entry][-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lora.rank", "-1"), "--lora.rank is -1: must be 0 or positive"),
        (("--lora.alpha", "8"), "--lora.alpha is 8.0: must be left out if --lora.rank is 0"),
        (("--lora.rank", "2", "--lora.targets", "*/nothing"), "'*/nothing', which matches no parameter"),
        (
            ("--lora.rank", "2", "--lora.targets", "*/scale"),
            "must select parameters with no other use than as the",
        ),
        (
            ("--lora.rank", "2", "--lora.targets", "head_DV"),
            "must select parameters with no other use than as the",
        ),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line(flags, message, tmp_path, capsys):
    assert train(tmp_path / "run", *flags, "--model.head", "untied") == 2
    out, err = capsys.readouterr()
    assert {*out.splitlines()} <= {"reading the data", "tracing the model"}
    assert len(err.splitlines()) == 1
    assert message in err


def test_adapters_of_embedding_and_head_are_refused_in_a_pipeline():
    class Head(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.head = nnx.Linear(4, 2, rngs=rngs)

        def loss(self, x: jax.Array) -> jax.Array:
            return jnp.mean(self.head(x) ** 2)

    adapted = jgraph.lora(jgraph.functional(lambda: Head(nnx.Rngs(0))), jnp.ones((3, 4)), rank=2)
    pipeline = jgraph.PipelineModel(
        lambda outer, x: x, lambda params, x: x, lambda outer, x, batch: jnp.mean(x), split=lambda params: (params, [])
    )
    with pytest.raises(ConfigError, match="`targets` selects head/kernel: must select only parameters of layers in a pipeline"):
        adapted.pipeline(pipeline)


@pytest.mark.long
@pytest.mark.parametrize("layout", [{}, {"fsdp": 2}, PIPELINE, FP8])
def test_no_weight_gradient_of_a_frozen_weight_is_computed(layout):
    def flops(rank: int) -> float:
        fields = {"num_layers": layout.get("pp", 1), "num_microbatches": 1, "lora": LoRAConfig(rank=rank), "seq_len": 64}
        config = config_of(**fields | layout)
        wide = dataclasses.replace(config.model, d_model=256, d_ff=1024)
        return TrainSetup.from_config(config.changed(model=wide)).compile_step().executable.cost_analysis()["flops"]

    # Without attention, two of the three matmuls per weight remain.
    assert flops(2) / flops(0) < 0.75


class Odd(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.heads = nnx.LinearGeneral(4, (2, 3), rngs=rngs, use_bias=False)
        self.left = nnx.Param(jax.random.normal(rngs.params(), (5, 6)))
        self.partial = nnx.Param(jnp.ones((3, 4)))
        self.tied = nnx.Param(jnp.ones((2, 2)))

    def loss(self, x: jax.Array) -> jax.Array:
        return jnp.mean(self.outputs(x) ** 2)

    def outputs(self, x: jax.Array) -> jax.Array:
        y = self.left[...] @ self.heads(x).reshape(-1, 6).T
        return (y @ self.partial[...])[:, :2] @ self.tied[...] + (y @ self.partial[:, :2]) * self.tied[0]


@pytest.mark.long
def test_weights_in_other_layouts_have_adapters():
    model, x = jgraph.functional(lambda: Odd(nnx.Rngs(0))), jax.random.normal(jax.random.key(1), (3, 4))
    adapted = jgraph.lora(model, x, rank=2, targets=("heads/*", "left"))
    assert {name: (a.rows, a.columns) for name, a in adapted.adapters.items()} == {"heads/kernel": (4, 6), "left": (6, 5)}
    params = jax.tree.map(lambda leaf: leaf + 0.1 * jax.random.normal(jax.random.key(2), leaf.shape), adapted.init()[0])
    base, low = separated(params)
    a, b = low["left"]
    merged = jax.jit(adapted.merge)(params)
    np.testing.assert_allclose(merged["left"], base["left"] + 8 * (a @ b).T, rtol=1e-5)
    expected, found = (jax.jit(partial(of.evaluate, "outputs")) for of in (model, adapted))
    np.testing.assert_allclose(found(params, {}, x), expected(merged, {}, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["partial", "tied"])
def test_weights_with_other_uses_are_refused(name):
    model = jgraph.functional(lambda: Odd(nnx.Rngs(0)))
    with pytest.raises(
        ConfigError, match=f"`targets` selects {name}: must select parameters with no other use than as the whole"
    ):
        jgraph.lora(model, jnp.ones((3, 4)), rank=2, targets=(name,))
