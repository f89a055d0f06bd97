"""LoRA adapters in PEFT folders: writing, reading, and errors. Comparisons with PEFT itself are in tests/finetune."""

import contextlib
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jgraph
from jgraph import export
from jgraph.adapters import AdaptedModel, Adapter, joined, separated
from jgraph.autodiff.view import view_of
from jgraph.data import write_tokens
from jgraph.errors import ConfigError
from jgraph.interop import Part
from jgraph.interop.adapter import CONFIG_FILE, WEIGHTS_FILE, AdapterFolder, adapter_parts, write_adapter
from jgraph.train import evaluation
from jgraph.train._functional import functional_model
from jgraph.train.config import LoRAConfig, TrainConfig
from jgraph.train.loaded import open_adapter
from jgraph.tree import is_adapter, leaf_names
from jgraph_models.hugging_face import HUGGING_FACE
from tests.interop import test_interop
from tests.interop.test_interop import LLAMA, QWEN3, make, train

pytestmark = pytest.mark.once

RANK, ALPHA = 3, 6.0
PREFIX = "base_model.model.model.layers."
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 12)).astype(np.int32)


def make_adapter(path, config, targets=("*/kernel",), **changes):
    """Writes a folder of random adapters. Returns the model and the arrays by name."""
    model = functional_model(TrainConfig.from_fields(model=config, lora=LoRAConfig(rank=RANK, alpha=ALPHA, targets=targets)))
    assert isinstance(model, AdaptedModel)
    shapes = dict(zip(leaf_names(model.shapes), jax.tree.leaves(model.shapes), strict=True))
    rng = np.random.default_rng(1)
    arrays = {name: rng.standard_normal(shapes[name].shape, np.float32) / 5 for name in shapes if is_adapter(name)}
    options = {"rank": RANK, "alpha": ALPHA, "base": "base"} | changes
    write_adapter(path, HUGGING_FACE.parts(config), model.adapters, arrays.__getitem__, **options)
    return model, arrays


def flat(tree):
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))


def logits(loaded):
    return np.asarray(loaded.model.evaluate("logits", loaded.params, loaded.carried, TOKENS))


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def merged_folder(base, adapter, to, scale):
    """Copies a folder, and adds scale * lora_B lora_A to its tensors."""
    shutil.copytree(base, to)
    tensors, low = load_file(base / "model.safetensors"), load_file(adapter / WEIGHTS_FILE)
    for name in [name for name in low if name.endswith("lora_A.weight")]:
        weight = name.removeprefix("base_model.model.").replace("lora_A.", "")
        tensors[weight] += scale * low[name.replace("lora_A", "lora_B")] @ low[name]
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3, scanned"])
def test_adapters_are_written_and_loaded_bit_for_bit(config, tmp_path):
    make(tmp_path / "base", config)
    _, arrays = make_adapter(tmp_path / "adapter", config)
    loaded = jgraph.load(tmp_path / "base", adapter=tmp_path / "adapter")
    assert isinstance(loaded.model, AdaptedModel)
    assert (loaded.config.lora.rank, loaded.config.lora.alpha) == (RANK, ALPHA)
    found, stacked = flat(loaded.params), {}
    for name, array in arrays.items():  # the layers of a loaded folder are not stacked
        is_stacked = config.scan_layers
        stacked |= {name.replace("blocks/", f"blocks/{i}/"): array[i] for i in range(2)} if is_stacked else {name: array}
    for name in filter(is_adapter, leaf_names(loaded.model.shapes)):
        np.testing.assert_array_equal(found[name], stacked.pop(name))
    assert not stacked


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3, scanned"])
def test_each_projection_of_a_fused_parameter_has_its_matrices(config, tmp_path):
    _, arrays = make_adapter(tmp_path / "adapter", config)
    tensors = load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    assert len(tensors) == 2 * 7 * 2
    name, index = ("blocks/{}", 1) if config.scan_layers else ("blocks/1/{}", ...)
    queries, keys = 4 * config.head_size, 2 * config.head_size
    sizes = {"q_proj": (0, 0, queries), "k_proj": (1, queries, keys), "v_proj": (2, queries + keys, keys)}
    for projection, (number, start, size) in sizes.items():
        a, b = (arrays[name.format(f"attention/qkv/kernel_lora_{m}")][index] for m in "ab")
        of = f"{PREFIX}1.self_attn.{projection}"
        np.testing.assert_array_equal(tensors[f"{of}.lora_A.weight"], a[:, number * RANK : (number + 1) * RANK].T)
        np.testing.assert_array_equal(tensors[f"{of}.lora_B.weight"], b[:, start : start + size].T)


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        (("*/kernel",), "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        (("*attention/*/kernel",), "q_proj k_proj v_proj o_proj"),
        (("blocks/1/mlp/down/kernel",), "model.layers.1.mlp.down_proj"),
    ],
)
def test_target_modules_name_exactly_the_layers_with_adapters(targets, modules, tmp_path):
    make_adapter(tmp_path / "adapter", LLAMA, targets)
    config = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert sorted(config.pop("target_modules")) == sorted(modules.split())
    assert config == {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "base", "r": 3, "lora_alpha": 6,
        "bias": "none", "lora_dropout": 0.0, "inference_mode": True,
    }  # fmt: skip


@pytest.mark.parametrize(("base", "written"), [("owner/model", "owner/model"), ("", None)])
@pytest.mark.parametrize(("alpha", "kind"), [(16.0, int), (1.5, float)])
def test_the_base_and_alpha_are_written_as_peft_writes_them(base, written, alpha, kind, tmp_path):
    write_adapter(tmp_path / "adapter", {}, {}, {}.__getitem__, rank=2, alpha=alpha, base=base)
    config = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert config["base_model_name_or_path"] == written
    assert (config["lora_alpha"], type(config["lora_alpha"])) == (alpha, kind)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, (8, 8.0)), ({"r": 2}, (2, 8.0)), ({"lora_alpha": 4}, (8, 4.0)), ({"r": None, "lora_alpha": None}, (8, 8.0))],
)
def test_a_missing_rank_or_alpha_is_8_as_in_peft(fields, expected, tmp_path):
    (tmp_path / CONFIG_FILE).write_text(json.dumps(fields))
    assert AdapterFolder(tmp_path, field="adapter").rank_and_alpha() == expected


UNSUPPORTED = """alora_invocation_tokens alpha_pattern arrow_config fan_in_fan_out kasa_config layer_replication lora_bias
    modules_to_save rank_pattern target_parameters trainable_token_indices use_bdlora use_dora use_qalora"""


@pytest.mark.parametrize("name", UNSUPPORTED.split())
def test_a_feature_that_is_not_supported_may_only_be_off(name, tmp_path):
    for number, value in enumerate((False, None, [], {}, True, ["x"], {"x": 1})):
        path = tmp_path / str(number)
        path.mkdir()
        (path / CONFIG_FILE).write_text(json.dumps({name: value}))
        is_refused = pytest.raises(ConfigError, match=f"`{name}` is .*: must be left out, false, null or empty")
        with is_refused if value else contextlib.nullcontext():
            AdapterFolder(path, field="adapter").rank_and_alpha()


@pytest.mark.parametrize(
    "targets", [pytest.param(("*/kernel",), marks=pytest.mark.long), ("blocks/0/attention/*",)], ids=["all", "some"]
)
def test_a_loaded_adapter_computes_the_logits_of_merged_tensors(targets, tmp_path):
    make(tmp_path / "base")
    make_adapter(tmp_path / "adapter", LLAMA, targets)
    loaded = jgraph.load(tmp_path / "base", adapter=tmp_path / "adapter")
    merged = jgraph.load(merged_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", ALPHA / RANK))
    plain = logits(jgraph.load(tmp_path / "base"))
    assert_close(logits(loaded), logits(merged))
    assert np.abs(logits(loaded) - plain).max() > 0.1


def test_rank_stabilized_adapters_are_scaled_by_the_root_of_the_rank(tmp_path):
    make(tmp_path / "base")
    make_adapter(tmp_path / "adapter", LLAMA)
    edit_config(use_rslora=True)(tmp_path / "adapter")
    loaded = jgraph.load(tmp_path / "base", adapter=tmp_path / "adapter")
    merged = jgraph.load(merged_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", ALPHA / RANK**0.5))
    assert_close(logits(loaded), logits(merged))


def test_layers_without_an_adapter_have_zeros_in_a_fused_parameter(tmp_path):
    make(tmp_path / "base")
    _, arrays = make_adapter(tmp_path / "adapter", LLAMA)
    edit_tensors(lambda tensors: [tensors.pop(name) for name in list(tensors) if "q_proj" not in name])(tmp_path / "adapter")
    loaded = jgraph.load(tmp_path / "base", adapter=tmp_path / "adapter")
    assert loaded.config.lora.targets == ("blocks/0/attention/qkv/kernel", "blocks/1/attention/qkv/kernel")
    found = flat(loaded.params)
    a, b = (arrays[f"blocks/0/attention/qkv/kernel_lora_{m}"].copy() for m in "ab")
    a[:, RANK:], b[:, 32:] = 0, 0
    np.testing.assert_array_equal(found["blocks/0/attention/qkv/kernel_lora_a"], a)
    np.testing.assert_array_equal(found["blocks/0/attention/qkv/kernel_lora_b"], b)


# --- Errors ---


def edit_config(**changes):
    def edit(path):
        fields = json.loads((path / CONFIG_FILE).read_text())
        (path / CONFIG_FILE).write_text(json.dumps(fields | changes))

    return edit


def edit_tensors(change):
    return test_interop.edit_tensors(change, WEIGHTS_FILE)


def head_of(tensors):
    return {f"base_model.model.lm_head.lora_{m}.weight": tensors[name] for m, name in (("A", A0), ("B", B0))}


A0, B0 = (f"{PREFIX}0.self_attn.q_proj.lora_{m}.weight" for m in "AB")
WRONG = {
    "another method": (edit_config(peft_type="LOHA"), "`peft_type` is LOHA: must be lora"),
    "DoRA": (edit_config(use_dora=True), "`use_dora` is True: must be left out, false, null or empty"),
    "ranks": (edit_config(rank_pattern={"q_proj": 4}), "`rank_pattern` is {'q_proj': 4}"),
    "scales": (edit_config(alpha_pattern={"q_proj": 4}), "`alpha_pattern` is {'q_proj': 4}"),
    "biases": (edit_config(bias="all"), "`bias` is all: must be none"),
    "other weights": (edit_config(modules_to_save=["lm_head"]), "`modules_to_save` is ['lm_head']"),
    "base weights": (edit_config(init_lora_weights="pissa"), "`init_lora_weights` is pissa: must be true"),
    "rank": (edit_config(r="3"), "`r` is '3': must be an integer"),
    "alpha": (edit_config(lora_alpha=0), "`lora_alpha` is 0.0: must be positive"),
    "another rank": (edit_config(r=4), "has shape [3, 32]: must be [4, 32] by its adapter_config.json"),
    "unknown tensor": (
        edit_tensors(lambda tensors: tensors.update({A0.replace("lora_A", "lora_magnitude_vector"): np.ones(32)})),
        "lora_magnitude_vector.weight: must have LoRA matrices of the layers of the model only",
    ),
    "incomplete": (edit_tensors(lambda tensors: tensors.pop(B0)), f"has no tensor {B0}"),
    "empty": (edit_tensors(lambda tensors: tensors.clear()), "adapter_model.safetensors has no tensor"),
    "head": (
        edit_tensors(lambda tensors: tensors.update(head_of(tensors))),
        "does not fit the model: `lora.targets` selects head_DV: must select parameters with no other use",
    ),
    "no config": (lambda path: (path / CONFIG_FILE).unlink(), "has no adapter_config.json"),
    "no tensors": (lambda path: (path / WEIGHTS_FILE).unlink(), "adapter_model.safetensors cannot be read"),
    "no folder": (shutil.rmtree, "no such folder"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_adapter_that_cannot_be_loaded_is_refused_with_the_reason(wrong, tmp_path):
    change, message = WRONG[wrong]
    make(tmp_path / "base")
    make_adapter(tmp_path / "adapter", LLAMA, ("blocks/*/attention/*",))
    change(tmp_path / "adapter")
    with pytest.raises(ConfigError) as error:
        jgraph.load(tmp_path / "base", adapter=tmp_path / "adapter")
    assert error.value.field == "adapter"
    assert (message in str(error.value), len(str(error.value).splitlines())) == (True, 1)


@pytest.mark.parametrize(
    "part",
    [
        Part("embed.weight", (8, 4), (0, 0)),  # not transposed
        Part("conv.weight", (8, 4, 1), (0, 0, 0), "transposed"),
        Part("gate.weight", (4, 4), (0, 0), "transposed"),  # one of two tensors, but the adapter has one part
    ],
)
def test_a_parameter_that_is_not_one_linear_layer_per_part_has_no_peft_format(part):
    with pytest.raises(ConfigError, match="`targets` selects w, which has no PEFT format"):
        adapter_parts({"w": (part,)}, {"w": Adapter("w", view_of((4, 8)), None)}, RANK)


def test_a_run_with_lora_takes_no_adapter(tmp_path):
    with pytest.raises(ConfigError, match=r"`adapter` is .*: must be left out for a run with LoRA"):
        open_adapter(tmp_path, TrainConfig.from_fields(lora=LoRAConfig(rank=2)))


# --- Runs ---


def evaluation_options(path):
    """Writes files of random tokens. Returns arguments of `evaluate`."""
    (path / "tokens").mkdir()
    for part in ("train", "heldout"):
        write_tokens(path / "tokens" / f"{part}-0.bin", [np.random.default_rng(0).integers(0, 256, 2000)], vocab_size=256)
    return {"data": str(path / "tokens"), "seq_len": 16, "batch_size": 4, "eval_batches": 2}


FLAGS = ("--steps", "2", "--optimizer.learning-rate", "0.1", "--lora.rank", "2", "--lora.base-dtype", "float32")


@pytest.fixture(scope="module", params=["unrolled", "scanned"])
def run(request, tmp_path_factory):
    """Returns a directory with a folder `base`, and a LoRA run `run` that starts from it."""
    path = tmp_path_factory.mktemp("adapters")
    make(path / "base", LLAMA)
    flags = ("--model.scan-layers",) if request.param == "scanned" else ()
    assert train(path / "run", "--init-from", str(path / "base"), *FLAGS, *flags) == 0
    return path


@pytest.mark.long
def test_a_run_is_exported_merged_and_as_an_adapter_with_the_same_logits(run, tmp_path):
    for weights in ("merged", "adapter"):
        flags = ("--weights", weights, "--dtype", "float32")
        assert export.main([str(run / "run"), "--to", str(tmp_path / weights), *flags]) == 0
    expected = logits(jgraph.load(run / "run"))
    stored = run / "run" / "checkpoints"
    bytes_of = {name: sum(f.stat().st_size for f in (stored / name).rglob("d/*")) for name in ("base/0", "2")}
    assert bytes_of["2"] < bytes_of["base/0"]
    assert np.abs(logits(jgraph.load(run / "base")) - expected).max() > 0.1
    assert_close(logits(jgraph.load(tmp_path / "merged")), expected)
    assert_close(logits(jgraph.load(run / "base", adapter=tmp_path / "adapter")), expected)
    fields = json.loads((tmp_path / "adapter" / CONFIG_FILE).read_text())
    assert fields["base_model_name_or_path"] == str(run / "base")


@pytest.mark.long
def test_text_and_evaluation_of_an_adapter_equal_those_of_merged_weights(tmp_path):
    make(tmp_path / "base")
    make_adapter(tmp_path / "adapter", LLAMA)
    merged_folder(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", ALPHA / RANK)
    tokens = [
        list(jgraph.stream(loaded.model, loaded.params, [[3, 4, 5]], max_tokens=6, temperature=0, carried=loaded.carried))
        for loaded in (
            jgraph.load(tmp_path / "base", adapter=tmp_path / "adapter"),
            jgraph.load(tmp_path / "merged"),
        )
    ]
    np.testing.assert_array_equal(*tokens)
    options = evaluation_options(tmp_path)
    merged = evaluation.evaluate(tmp_path / "merged", **options)
    for layout in ({}, {"fsdp": 2, "tp": 2}):
        found = evaluation.evaluate(tmp_path / "base", adapter=tmp_path / "adapter", **options, **layout)
        np.testing.assert_allclose(found.loss, merged.loss, rtol=1e-5)
        assert found.source == f"{tmp_path / 'base'} with {tmp_path / 'adapter'}"


@pytest.mark.long
def test_a_run_without_lora_has_no_adapter_to_export(tmp_path, capsys):
    assert train(tmp_path / "run", "--steps", "1") == 0
    capsys.readouterr()
    assert export.main([str(tmp_path / "run"), "--to", str(tmp_path / "out"), "--weights", "adapter"]) == 2
    assert capsys.readouterr().err == "jgraph.export: error: --weights is adapter: must be merged for a run without LoRA\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_run_without_lora_takes_an_adapter(tmp_path):
    make(tmp_path / "base")
    frozen = ("--freeze", "[!n]*", "--optimizer.learning-rate", "1e-30", "--steps", "1")
    assert train(tmp_path / "run", "--init-from", str(tmp_path / "base"), *frozen) == 0
    make_adapter(tmp_path / "adapter", LLAMA)
    of_run, of_folder = (jgraph.load(tmp_path / name, adapter=tmp_path / "adapter") for name in ("run", "base"))
    assert jax.tree.structure(joined(*separated(of_run.params))) == jax.tree.structure(of_run.params)
    np.testing.assert_array_equal(logits(of_run), logits(of_folder))
    options = evaluation_options(tmp_path)
    losses = [evaluation.evaluate(tmp_path / name, adapter=tmp_path / "adapter", **options).loss for name in ("run", "base")]
    assert losses[0] == losses[1] != evaluation.evaluate(tmp_path / "base", **options).loss
