"""Pipelines have the training results of one device for any ranks and schedule. Wrong configurations are refused."""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jgraph.data import Batches
from jgraph.errors import ConfigError, OrderError
from jgraph.pipeline import _autotune, choose
from jgraph.pipeline._strategy import BoundPipeline
from jgraph.schedule import NAMES, generate
from jgraph.step.state import TrainState
from jgraph.train import _validation
from jgraph.train.config import OptimizerConfig, TrainConfig
from jgraph.train.setup import TrainSetup
from jgraph_models.gpt import GPT, GPTConfig
from tests import tiny
from tests.schedule.strategies import to_csv

pytestmark = pytest.mark.long

VOCAB = 61  # prime, so no number of ranks divides it
MICROBATCHES = 4


class Unsplit(GPT):
    """A model without pipeline support."""

    pipeline_model = None


def config_of(*, num_layers: int = 5, head: Any = "tied", module: str = "jgraph_models.gpt:GPT", **fields: Any) -> TrainConfig:
    return TrainConfig.from_fields(
        **{"steps": 5, "batch_size": 8, "num_microbatches": MICROBATCHES, "seq_len": 16} | fields,
        module=module,
        model=GPTConfig(
            num_layers=num_layers,
            d_model=32,
            num_heads=2,
            num_kv_heads=2,
            d_ff=64,
            vocab_size=VOCAB,
            head=head,
            compute_dtype="float32",
        ),
        # With AdamW's default eps, rounding decides the sign of an update if the gradient is nearly zero.
        optimizer=OptimizerConfig(eps=1e-3, warmup_steps=1, learning_rate=1e-2),
    )


def batches_of(config: TrainConfig) -> Batches:
    # A skewed distribution, so that the model can learn. All ids occur.
    tokens = np.random.default_rng(0).geometric(0.1, 4000) % VOCAB
    return Batches(tokens.astype(np.uint8), batch_size=config.input.batch_size, seq_len=config.input.seq_len, seed=0)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A setup, its state after all steps, and the losses and gradient norms of the steps."""

    setup: TrainSetup
    state: TrainState
    losses: list[float]
    grad_norms: list[float]

    def weights(self) -> dict[str, np.ndarray]:
        """Returns the parameters in the model's layout, by name."""
        tree = jax.device_get(jax.jit(self.setup.step.bound.layout.unpack)(self.state.params))
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


_INITIAL: dict[Any, Any] = {}


def initial_state(setup: TrainSetup) -> TrainState:
    """Returns the state before the first step. Computes the weights of a model once on one device, not for every layout."""
    config = setup.config
    model = (config.module, config.model, config.seed, config.lora)
    if model not in _INITIAL:
        _INITIAL[model] = jax.jit(setup.model.init)()
    return setup.step.init(*_INITIAL[model])


def trained(config: TrainConfig, batch: Callable[[np.ndarray], Any] = np.asarray) -> Trained:
    """Trains for all steps. `batch` makes a batch of tokens [B, S]."""
    setup, batches = TrainSetup.from_config(config), batches_of(config)
    # compile_step also checks that every leaf of the state is updated in place.
    step = setup.compile_step()
    state, losses, grad_norms = initial_state(setup), [], []
    for i in range(config.steps):
        state, metrics = step(state, setup.step.place(batch(batches[i])))
        losses.append(float(metrics.loss))
        grad_norms.append(float(metrics.grad_norm))
    return Trained(setup, state, losses, grad_norms)


@functools.cache
def of_one_device(num_layers: int = 3, head: str = "tied") -> Trained:
    return trained(config_of(num_layers=num_layers, head=head))


def assert_same(ours: Trained, theirs: Trained):
    assert theirs.setup.step.mesh is None
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-5)
    np.testing.assert_allclose(ours.grad_norms, theirs.grad_norms, rtol=1e-5)
    weights, expected = ours.weights(), theirs.weights()
    assert list(weights) == list(expected)
    for name, leaf in weights.items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


def assert_evaluated_as(ours: Trained, theirs: Trained):
    """Compares the loss of a batch and the logits of one row, which cannot be sharded over replicas."""
    batch = batches_of(ours.setup.config)[0].astype(np.int32)
    held, one = (
        [
            jax.jit(partial(_validation.loss, run.setup))(run.state, _validation.place_whole(run.setup, batch)),
            jax.jit(partial(_validation.logits, run.setup))(run.state, _validation.place_whole(run.setup, batch[:1])),
        ]
        for run in (ours, theirs)
    )
    assert held[1].shape == (1, batch.shape[1], VOCAB)
    np.testing.assert_allclose(held[0], one[0], rtol=1e-5)
    np.testing.assert_allclose(held[1], one[1], rtol=1e-4, atol=1e-5)


def staged(config: TrainConfig) -> tuple[TrainSetup, BoundPipeline]:
    setup = TrainSetup.from_config(config)
    assert isinstance(setup.step.bound, BoundPipeline)
    return setup, setup.step.bound


# --- Equality with one device ---


@pytest.mark.parametrize("layout", [{"fsdp": 2, "dp": 2}, {"tp": 2, "cp": 2}, {"pp": 2, "chunks": 2}], ids=str)
def test_the_initial_state_of_every_layout_has_the_weights_of_one_device(layout):
    setup = TrainSetup.from_config(config_of(num_layers=4, num_microbatches=2, **layout))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), setup.init(), initial_state(setup))


@pytest.mark.once
def test_a_pipeline_has_the_losses_weights_and_evaluation_of_one_device():
    ours = trained(config_of(pp=2, dp=2, chunks=1, schedule="zb-h1", num_layers=3, head="untied"))
    assert isinstance(ours.setup.step.bound, BoundPipeline)
    pipeline = ours.setup.step.bound.pipeline
    assert (pipeline.schedule.name, pipeline.runtime) == ("zb-h1", "general")
    assert ours.setup.step.num_devices == 4
    assert all(leaf.sharding.device_set == set(jax.devices()[:4]) for leaf in jax.tree.leaves(ours.state))
    assert_same(ours, of_one_device(3, "untied"))
    assert_evaluated_as(ours, of_one_device(3, "untied"))
    # The model's tree has no padding of vocabulary and layers. pack restores the padding with zeros.
    bound = ours.setup.step.bound
    again = jax.jit(lambda params: bound.layout.pack(bound.layout.unpack(params)))(ours.state.params)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(ours.state.params), jax.device_get(again))


@pytest.mark.once
def test_sharded_stages_with_biases_and_head_norms_have_the_results_of_one_device():
    model = dataclasses.replace(
        config_of(num_layers=2, head="untied").model,
        mlp="swiglu",
        num_kv_heads=1,
        head_dim=24,
        attention_bias="qkv",
        qk_norm="head",
        rope_scaling="llama3",
        rope_original_length=16,
    )
    one, ours = (trained(config_of(**ranks).changed(model=model)) for ranks in ({}, {"pp": 2, "fsdp": 2}))
    assert_same(ours, one)
    assert any("bias" in name for name in one.weights())


@pytest.mark.once
def test_a_pipeline_uses_the_schedule_from_a_file(tmp_path):
    path, schedule = tmp_path / "schedule.csv", generate("1f1b", pp=2, microbatches=MICROBATCHES)
    path.write_text(to_csv(schedule))
    _, bound = staged(config_of(pp=2, schedule=str(path)))
    assert [order.to_list() for order in bound.pipeline.schedule] == [order.to_list() for order in schedule]


# --- Schedule `auto` ---


@pytest.fixture
def short_measurements(monkeypatch):
    """Shortens every measurement."""
    monkeypatch.setattr(_autotune, "_SECONDS", 0.001)


@pytest.mark.once
def test_auto_chooses_a_schedule_that_fits_and_trains(short_measurements):
    ours = trained(config_of(pp=2, schedule="auto", num_layers=3, head="untied"))
    assert isinstance(ours.setup.step.bound, BoundPipeline)
    assert ours.setup.step.bound.pipeline.schedule.name in NAMES
    assert ours.losses[-1] < ours.losses[0] - 0.2
    assert_same(ours, of_one_device(3, "untied"))


def shapes_of(config: TrainConfig) -> jax.ShapeDtypeStruct:
    rows = config.input.batch_size // config.input.num_microbatches
    return jax.ShapeDtypeStruct((config.input.num_microbatches, rows, config.input.seq_len + 1), np.int32)


@pytest.mark.once
def test_auto_uses_measured_times_and_respects_the_memory_limit(short_measurements):
    config = config_of(pp=2, num_layers=4)
    _, bound = staged(config)
    shared = []

    def share(value: float) -> float:
        shared.append(value)
        return 1e-3

    parts = _autotune.measure(bound.pipeline, shapes_of(config), share=share)
    assert (parts.forward, parts.dgrad, parts.wgrad, parts.head) == (1e-3, 1e-3, 1e-3, 0.0)
    assert len(shared) == 3
    assert all(value > 0 for value in shared)

    def chosen(limit: float | None):
        return choose(bound.pipeline, shapes_of(config), parts=parts, memory_limit=limit)

    free = chosen(None)
    assert {candidate.name for candidate in free.candidates} <= set(NAMES)
    assert {candidate.chunks for candidate in free.candidates if candidate.peak_bytes is not None} == {1, 2}
    assert free.candidates[0].verdict == "fastest that fits"
    assert free.candidates[0].name == free.schedule.name
    least = min(candidate.peak_bytes for candidate in free.candidates if candidate.peak_bytes is not None)
    tight = chosen(least)
    assert tight.candidates[0].peak_bytes == least
    with pytest.raises(OrderError, match="no schedule fits into"):
        chosen(least - 1)


@pytest.mark.once
def test_auto_tries_one_chunk_if_there_are_too_few_layers_for_two():
    config = config_of(pp=2, num_layers=3)
    _, bound = staged(config)
    parts = _autotune.Parts(1e-3, 1e-3, 1e-3)
    found = choose(bound.pipeline, shapes_of(config), parts=parts, memory_limit=None)
    assert {candidate.chunks for candidate in found.candidates if candidate.peak_bytes is not None} == {1}


@pytest.mark.once
def test_auto_with_the_dispatch_engine_times_the_loss(short_measurements):
    setup = TrainSetup.from_config(config_of(pp=2, schedule="auto", pp_engine="dispatch", num_layers=2))
    assert isinstance(setup.step.bound, BoundPipeline)
    assert setup.step.bound.engine == "dispatch"
    _, bound = staged(config_of(pp=2, num_layers=2))
    parts = _autotune.measure(bound.pipeline, shapes_of(setup.config), engine="dispatch")
    assert parts.head > 0


# --- Errors ---


def refused(error: type[Exception], message: str, **fields: Any) -> Exception:
    with pytest.raises(error, match=message) as info:
        TrainSetup.from_config(config_of(**fields))
    assert len(str(info.value).splitlines()) == 1
    return info.value


@pytest.mark.parametrize(
    ("field", "message", "fields"),
    [
        ("schedule", r"`schedule` is zbh1: must be auto, one of .*aligned.*, or a \.csv or \.json file", {"schedule": "zbh1"}),
        ("pp", "`pp` is 6: must be such that `pp` x `chunks` 1 is at most the 5 layers", {"pp": 6}),
        ("pp", "`pp` is 2: must be such that `pp` x `chunks` 3 is at most the 5 layers", {"chunks": 3}),
        ("dp", r"`dp` 4 `pp` 4 needs 16 devices, but only \d+ are available", {"dp": 4, "pp": 4, "batch_size": 16}),
        (
            "pp",
            r"`pp` is 2: must be 1 for tests\.train\.test_pipeline_training:Unsplit, which has no pipeline_model",
            {"module": "tests.train.test_pipeline_training:Unsplit"},
        ),
    ],
)
def test_a_wrong_pipeline_is_refused_with_the_field_to_change(field, message, fields):
    error = refused(ConfigError, message, **{"pp": 2} | fields)
    assert isinstance(error, ConfigError)
    assert error.field == field


@pytest.mark.once
@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (r"3 layers for 4 stages \(2 ranks x 2 chunks\): every stage needs a layer", {"schedule": "zb-v", "num_layers": 3}),
        ("zb-h1 with chunks=2: supports only 1 chunk per rank", {"schedule": "zb-h1", "chunks": 2}),
        (r"`schedule` is no/such\.csv: cannot be read as a schedule \(No such", {"schedule": "no/such.csv"}),
        (
            r"no schedule fits into 1 bytes per rank; the smallest is .*; raise the memory limit",
            {"schedule": "auto", "memory_limit": 2.0**-30},
        ),
    ],
)
def test_a_schedule_that_does_not_fit_the_model_is_refused(short_measurements, message, fields):
    refused(OrderError, message, pp=2, **fields)


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, MICROBATCHES), (2, 6)])
def test_a_schedule_file_for_another_pipeline_is_refused(tmp_path, ranks, microbatches):
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(generate("1f1b", pp=ranks, microbatches=microbatches)))
    message = f"`schedule` .*schedule.csv has {ranks} ranks and {microbatches} microbatches: must have `pp` 2 and "
    error = refused(ConfigError, message + "`num_microbatches` 4", pp=2, schedule=str(path))
    assert isinstance(error, ConfigError)
    assert error.field == "schedule"


@pytest.mark.once
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--schedule", "zbh1"), "--schedule is zbh1: must be auto, one of"),
        (("--schedule", "no/such.csv"), "--schedule is no/such.csv: cannot be read as a schedule (No such"),
    ],
)
def test_a_run_with_a_missing_schedule_ends_with_one_line(tmp_path, capsys, flags, message):
    assert tiny.train(tmp_path / "run", "--pp", "2", "--model.num-layers", "2", *flags) == 2
    err = capsys.readouterr().err
    assert err.startswith("jgraph.train: error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


# --- A run ---

FLAGS = (
    *("--model.num-layers", "2", "--model.vocab-size", "257", "--model.compute-dtype", "float32", "--pp", "2"),
    *("--num-microbatches", "2", "--steps", "8", "--eval-every", "5", "--checkpoint-every", "4"),
)


@pytest.mark.once
def test_a_run_prints_its_pipeline_and_resumes_with_the_same_losses(tmp_path: Path, capsys):
    run_dir = tmp_path / "run"
    assert tiny.train(run_dir, *FLAGS, "--sample-tokens", "8") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "pipeline: aligned (aligned runtime), 2 ranks x 1 chunks, " in out
    assert " GiB predicted, " in out
    assert " compiled" in out
    assert "sample text for the held-out prompt" in out
    whole = tiny.losses(run_dir)
    assert whole[-1][1] < whole[0][1]
    (run_dir / "checkpoints" / "8").rename(tmp_path / "aside")
    assert tiny.train(run_dir, *FLAGS) == 0
    assert "resumed from step 4" in capsys.readouterr().out
    assert tiny.losses(run_dir) == whole


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory_limit": 1.0}, "`memory_limit` is 1.0: must be 0 unless `schedule` is auto"),
        ({"schedule": "auto", "chunks": 2}, "`chunks` is 2: must be 1 with `schedule` auto, which sets the number of chunks"),
        ({"schedule": "mine.csv", "chunks": 2}, "`chunks` is 2: must be 1 with `schedule` mine.csv"),
    ],
)
def test_a_field_without_effect_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig.from_fields(**fields)
