import contextlib
import copy
import dataclasses
import json
import subprocess
import sys

import pytest

from jgraph.errors import ConfigError, JgraphError
from jgraph.moe import MoEConfig
from jgraph.train.config import OptimizerConfig, TrainConfig
from jgraph.train.initial import check_alike
from jgraph.train.presets import PRESETS, preset
from jgraph_models.gpt import GPTConfig

NAN, INF = float("nan"), float("inf")

# Cases: wrong fields, the field that the error names, and its message.
MODEL = [
    ({"num_layers": 0}, "model.num_layers", "`model.num_layers` is 0: must be positive"),
    ({"d_model": -128}, "model.d_model", "`model.d_model` is -128: must be positive"),
    ({"num_heads": 0}, "model.num_heads", "`model.num_heads` is 0: must be positive"),
    ({"num_kv_heads": 0}, "model.num_kv_heads", "`model.num_kv_heads` is 0: must be positive"),
    ({"d_ff": 0}, "model.d_ff", "`model.d_ff` is 0: must be positive"),
    ({"vocab_size": 0}, "model.vocab_size", "`model.vocab_size` is 0: must be positive"),
    ({"rope_theta": INF}, "model.rope_theta", "`model.rope_theta` is inf: must be positive"),
    ({"norm_eps": 0.0}, "model.norm_eps", "`model.norm_eps` is 0.0: must be positive"),
    ({"loss_chunk": -1}, "model.loss_chunk", "`model.loss_chunk` is -1: must be 0 or positive"),
    ({"num_heads": 3}, "model.num_heads", "`model.num_heads` is 3: must be a divisor of `model.d_model` 128"),
    ({"d_model": 12, "num_heads": 4}, "model.num_heads", "`model.num_heads` is 4: must be such that the head size 3 is even"),
    ({"num_kv_heads": 3}, "model.num_kv_heads", "`model.num_kv_heads` is 3: must be a divisor of `model.num_heads` 4"),
    ({"head_dim": 7}, "model.head_dim", "`model.head_dim` is 7: must be even, or 0"),
    (
        {"head_dim": 136, "attention": "cudnn"},
        "model.head_dim",
        "`model.head_dim` is 136: must be such that the head size 136 is a multiple of 8 and at most 128 for cuDNN attention, "
        "or choose `model.attention` xla",
    ),
    (
        {"rope_scaling": "llama3", "rope_low_freq_factor": 4.0},
        "model.rope_low_freq_factor",
        "`model.rope_low_freq_factor` is 4.0: must be below `model.rope_high_freq_factor` 4.0",
    ),
    (
        {"rope_factor": 32.0},
        "model.rope_factor",
        "`model.rope_factor` is 32.0: must be 8.0 where `model.rope_scaling` is none",
    ),
    (
        {"attention": "cudnn", "d_model": 48},
        "model.num_heads",
        "`model.num_heads` is 4: must be such that the head size 12 is a multiple of 8 and at most 128 for cuDNN attention, "
        "or choose `model.attention` xla",
    ),
    (
        {"attention": "cudnn", "d_model": 1024},
        "model.num_heads",
        "`model.num_heads` is 4: must be such that the head size 256 is a multiple of 8 and at most 128 for cuDNN attention, "
        "or choose `model.attention` xla",
    ),
    (
        {"attention": "cudnn", "compute_dtype": "float32"},
        "model.compute_dtype",
        "`model.compute_dtype` is float32: must be bfloat16 for cuDNN attention, or choose `model.attention` xla",
    ),
    (
        {"attention": "fused", "num_kv_heads": 2},
        "model.num_kv_heads",
        "`model.num_kv_heads` is 2: must be `model.num_heads` 4 for `model.attention` fused",
    ),
    (
        {"head_precision": "fp8", "loss_chunk": 24},
        "model.loss_chunk",
        "`model.loss_chunk` is 24: must be a multiple of 16 for `model.head_precision` fp8",
    ),
]
OPTIMIZER = [
    ({"learning_rate": 0.0}, "optimizer.learning_rate", "`optimizer.learning_rate` is 0.0: must be positive"),
    ({"learning_rate": NAN}, "optimizer.learning_rate", "`optimizer.learning_rate` is nan: must be positive"),
    ({"eps": 0.0}, "optimizer.eps", "`optimizer.eps` is 0.0: must be positive"),
    ({"clip_norm": -1.0}, "optimizer.clip_norm", "`optimizer.clip_norm` is -1.0: must be positive"),
    ({"warmup_steps": -1}, "optimizer.warmup_steps", "`optimizer.warmup_steps` is -1: must be 0 or positive"),
    ({"beta1": 1.0}, "optimizer.beta1", "`optimizer.beta1` is 1.0: must be in [0, 1)"),
    ({"beta2": -0.1}, "optimizer.beta2", "`optimizer.beta2` is -0.1: must be in [0, 1)"),
    (
        {"final_learning_rate": 1.5},
        "optimizer.final_learning_rate",
        "`optimizer.final_learning_rate` is 1.5: must be in [0, 1]",
    ),
    ({"weight_decay": -0.1}, "optimizer.weight_decay", "`optimizer.weight_decay` is -0.1: must be 0 or positive"),
    ({"weight_decay": INF}, "optimizer.weight_decay", "`optimizer.weight_decay` is inf: must be 0 or positive"),
]
TRAIN = [
    ({"module": "jgraph_models.gpt"}, "module", "`module` is jgraph_models.gpt: must be package.module:Class"),
    ({"module": "jgraph_models.gpt:"}, "module", "`module` is jgraph_models.gpt:: must be package.module:Class"),
    ({"steps": 0}, "steps", "`steps` is 0: must be positive"),
    ({"batch_size": 0}, "batch_size", "`batch_size` is 0: must be positive"),
    ({"seq_len": 0}, "seq_len", "`seq_len` is 0: must be positive"),
    ({"num_microbatches": 0}, "num_microbatches", "`num_microbatches` is 0: must be positive"),
    ({"log_every": 0}, "log_every", "`log_every` is 0: must be positive"),
    ({"eval_every": 0}, "eval_every", "`eval_every` is 0: must be positive"),
    ({"eval_batches": 0}, "eval_batches", "`eval_batches` is 0: must be positive"),
    ({"checkpoint_every": 0}, "checkpoint_every", "`checkpoint_every` is 0: must be positive"),
    ({"checkpoint_keep": 0}, "checkpoint_keep", "`checkpoint_keep` is 0: must be positive"),
    ({"sample_tokens": -1}, "sample_tokens", "`sample_tokens` is -1: must be 0 or positive"),
    ({"seed": -1}, "seed", "`seed` is -1: must be in [0, 2**32)"),
    ({"seed": 2**32}, "seed", "`seed` is 4294967296: must be in [0, 2**32)"),
    ({"data": ""}, "data", "`data` is '': must be a corpus name, a text file or a directory of token files"),
    (
        {"batch_size": 32, "num_microbatches": 5},
        "num_microbatches",
        "`num_microbatches` is 5: must be a divisor of `batch_size` 32",
    ),
    (
        {"steps": 8, "optimizer": OptimizerConfig(warmup_steps=9)},
        "optimizer.warmup_steps",
        "`optimizer.warmup_steps` is 9: must be at most `steps` 8",
    ),
    (
        {"pp": 2, "schedule": "interleaved-1f1b"},
        "chunks",
        "`chunks` is 1: must be at least 2 with `schedule` interleaved-1f1b; for 1, use `schedule` 1f1b",
    ),
    ({"xla_options": ("xla_dump_to",)}, "xla_options", "`xla_options` is xla_dump_to: must be name=value"),
]
TRAIN += [
    ({"graph": "on"}, "graph", "`graph` is 'on': must be one of auto, off, full"),
    ({"steps": "5"}, "steps", "`steps` is '5': must be an integer"),
    ({"steps": True}, "steps", "`steps` is True: must be an integer"),
    ({"resume": "no"}, "resume", "`resume` is 'no': must be True or False"),
    ({"freeze": "embedding_VD"}, "freeze", "`freeze` is 'embedding_VD': must be a tuple of strings"),
]
MIXTURE = GPTConfig(mlp="swiglu", moe=MoEConfig(num_experts=6))
TRAIN += [
    ({"ep": 0}, "ep", "`ep` is 0: must be positive"),
    ({"fsdp": 0}, "fsdp", "`fsdp` is 0: must be positive, or auto"),
    ({"dp": "all"}, "dp", "`dp` is all: must be positive, or auto"),
    ({"dp": "auto", "fsdp": "auto"}, "dp", "`dp` is auto: must be a number if `fsdp` is auto"),
    ({"ep": 2}, "ep", "`ep` is 2: must be a divisor of `dp` 1; experts are sharded over devices of `fsdp` or `dp`"),
    ({"fsdp": 4, "ep": 3}, "ep", "`ep` is 3: must be a divisor of `fsdp` 4"),
    ({"dp": 2, "ep": 2}, "ep", "`ep` is 2: must be 1 for a model without experts"),
    (
        {"fsdp": 4, "ep": 2, "model": MIXTURE},
        "ep",
        "`ep` is 2: must be such that 4 devices divide `model.moe.num_experts` 6",
    ),
    (
        {"dp": 2, "ep": 2, "pp": 2, "pp_engine": "dispatch", "model": MIXTURE},
        "pp_engine",
        "`pp_engine` is dispatch: must be program with `dp` 2",
    ),
]
WRONG = [
    (kind, *case) for kind, cases in ((GPTConfig, MODEL), (OptimizerConfig, OPTIMIZER), (TrainConfig, TRAIN)) for case in cases
]


@pytest.mark.parametrize(("kind", "fields", "field", "message"), WRONG, ids=[f"{w[2]}-{i}" for i, w in enumerate(WRONG)])
def test_a_wrong_value_is_refused_with_its_field_and_the_allowed_values(kind, fields, field, message):
    with pytest.raises(ConfigError) as error:
        getattr(kind, "from_fields", kind)(**fields)
    assert (error.value.field, str(error.value)) == (field, message)


@pytest.mark.parametrize(("steps", "warmup"), [(8, 0), (60, 6), (1000, 100), (100_000, 100)])
def test_the_default_warmup_is_at_most_a_tenth_of_the_run(steps, warmup):
    assert TrainConfig.from_fields(steps=steps).optimizer.warmup_steps == warmup


@pytest.mark.parametrize("name", PRESETS)
def test_the_warmup_of_a_preset_shrinks_only_with_a_shorter_run(name):
    assert preset(name).optimizer.warmup_steps == {"cpu-tiny": 50, "gpt-moe-tiny": 50, "launch-bound": 100}.get(name, 500)
    assert preset(name).changed(steps=80).optimizer.warmup_steps == 8


def test_a_warmup_of_the_whole_run_is_allowed():
    assert TrainConfig.from_fields(steps=8, optimizer=OptimizerConfig(warmup_steps=8)).optimizer.warmup_steps == 8


@pytest.mark.parametrize("fields", [{}, {"decoupled_grad": True}, {"on_dtype_mismatch": "copy"}])
def test_bfloat16_main_grads_in_a_pipeline_are_refused_before_other_checks(fields):
    with pytest.raises(ConfigError, match="must be float32 in a pipeline") as error:
        TrainConfig.from_fields(pp=2, main_grads_dtype="bfloat16", **fields)
    assert error.value.field == "main_grads_dtype"


def test_a_second_gather_in_a_pipeline_is_refused_and_remat_suggested():
    with pytest.raises(ConfigError, match="`remat` layer") as error:
        TrainConfig.from_fields(pp=2, fsdp=2, gather_per="pass")
    assert error.value.field == "gather_per"


def test_the_dispatch_engine_refuses_experts_with_data_parallelism():
    with pytest.raises(ConfigError, match=r"must be program with `dp` 2") as error:
        preset("gpt-moe-tiny").changed(pp=2, dp=2, num_microbatches=2, pp_engine="dispatch")
    assert error.value.field == "pp_engine"


def test_remat_wide_is_allowed_only_in_a_pipeline():
    with pytest.raises(ConfigError) as error:
        TrainConfig.from_fields(remat="wide")
    assert error.value.field == "remat"
    assert TrainConfig.from_fields(remat="wide", schedule="zb-h1").is_pipeline


def test_a_changed_copy_is_checked_too():
    with pytest.raises(ConfigError, match="`steps` is 0"):
        TrainConfig().changed(steps=0)


@pytest.mark.parametrize("kind", [GPTConfig, OptimizerConfig, TrainConfig])
def test_a_config_cannot_be_changed_after_its_checks(kind):
    config = kind()
    name = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, 1)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (GPTConfig, {"num_kv_heads": 1}),
        (GPTConfig, {"attention": "cudnn", "d_model": 512}),
        (GPTConfig, {"attention": "xla", "d_model": 1024}),
        (OptimizerConfig, {"warmup_steps": 0, "beta1": 0.0, "final_learning_rate": 1.0, "weight_decay": 0.0}),
        (TrainConfig, {"seed": 2**32 - 1, "sample_tokens": 0, "num_microbatches": 32, "xla_options": ("a=b=c",)}),
    ],
)
def test_values_at_the_limits_are_allowed(kind, fields):
    config = getattr(kind, "from_fields", kind)(**fields)
    found = getattr(config, "to_dict", lambda: vars(config))()
    assert {name: found[name] for name in fields} == fields


def test_config_error_is_a_jgraph_error():
    assert issubclass(ConfigError, JgraphError)


def test_tokens_per_step_counts_predicted_tokens():
    assert TrainConfig.from_fields(batch_size=4, seq_len=32, num_microbatches=2).input.tokens_per_step == 128


def test_the_run_directory_follows_the_preset_unless_named():
    assert TrainConfig.from_fields(preset="gpt-124m").output.run_dir == "runs/gpt-124m"
    assert TrainConfig.from_fields(preset="gpt-124m", run_dir="elsewhere").output.run_dir == "elsewhere"


def through_json(config):
    """Returns the fields after a round trip through JSON, as in `config.json`."""
    return json.loads(json.dumps(config.to_dict()))


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_survives_json(name):
    config = preset(name).changed(xla_options=("xla_a=1", "xla_b=2"), num_microbatches=2)
    assert TrainConfig.from_dict(through_json(config)) == config


@pytest.mark.parametrize("section", ["model", "optimizer", None])
def test_a_saved_config_with_a_field_of_another_version_is_refused_with_its_name(section):
    saved = through_json(TrainConfig())
    (saved[section] if section else saved)["wheels"] = 4
    with pytest.raises(ConfigError, match=r"does not fit this version of jgraph: .*'wheels'"):
        TrainConfig.from_dict(saved)


def test_a_saved_config_without_its_model_is_refused():
    saved = through_json(TrainConfig())
    del saved["model"]
    with pytest.raises(ConfigError, match="'model'"):
        TrainConfig.from_dict(saved)


def test_a_saved_config_with_a_wrong_value_is_refused_with_its_field():
    with pytest.raises(ConfigError, match="`steps` is 0") as error:
        TrainConfig.from_dict(through_json(TrainConfig()) | {"steps": 0})
    assert error.value.field == "steps"


def test_only_dtype_overlap_and_the_training_of_routers_may_differ_from_the_initial_weights():
    allowed = set()
    for section, kind in (("", GPTConfig), ("moe.", MoEConfig)):
        for name in (field.name for field in dataclasses.fields(kind)):
            there = copy.deepcopy(GPTConfig())
            object.__setattr__(there.moe if section else there, name, "another")
            with contextlib.suppress(ConfigError):
                check_alike(GPTConfig(), there, "as there")
                allowed.add(section + name)
    assert allowed == {"compute_dtype", "tensor_overlap", "moe.balance_loss", "moe.z_loss", "moe.bias_rate"}


# --- Presets ---


def test_documented_presets_exist():
    assert {"cpu-tiny", "launch-bound", "gpt-124m", "gpt-350m", "gpt-1b3", "gpt-7b"} <= set(PRESETS)
    assert {"llama3-1b", "llama3-8b", "qwen3-0.6b", "qwen3-8b"} <= set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_stores_its_name(name):
    assert preset(name).preset == name


def test_a_configuration_without_a_preset_has_an_empty_preset_name():
    assert (TrainConfig().preset, TrainConfig().output.run_dir) == ("", "runs/GPT")


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"cpu-tiny", "gpt-moe-tiny"}))
def test_a_preset_for_a_gpu_has_sizes_that_cudnn_supports(name):
    assert preset(name).model.check_cudnn() is None


def test_an_unknown_preset_is_refused_with_the_known_names():
    with pytest.raises(ConfigError) as error:
        preset("gpt-5")
    assert error.value.field == "preset"
    assert str(error.value).startswith("`preset` is gpt-5: must be one of ")
    assert all(name in str(error.value) for name in PRESETS)


def test_a_configuration_is_checked_without_importing_jax():
    heavy = "jax", "flax", "optax", "numpy"
    code = f"import jgraph, jgraph.train.presets, jgraph.errors, sys; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
