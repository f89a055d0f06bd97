"""Hugging Face folders: reading, writing, and errors before anything is loaded."""

import dataclasses
import functools
import itertools
import json
import os
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import jgraph
from jgraph import evaluate, export, sample
from jgraph.data import Tokenizer as Reader, load as load_corpus
from jgraph.data._texts import check_links
from jgraph.errors import ConfigError, DataError
from jgraph.interop.folder import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, Folder, read, replaced
from jgraph.interop.load import load_parameters
from jgraph.interop.names import Part
from jgraph.interop.write import write
from jgraph.moe import MoEConfig
from jgraph.train.__main__ import parse
from jgraph.train.config import TrainConfig
from jgraph.train.initial import dtype_of_source, initial_weights, tokenizer_warning
from jgraph.train.presets import preset
from jgraph.train.setup import TrainSetup
from jgraph.tree import leaf_names
from jgraph_models.gpt import GPT, GPTConfig
from jgraph_models.hugging_face import HUGGING_FACE
from tests import chats, tiny

pytestmark = pytest.mark.once

LLAMA = GPTConfig(
    num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, d_ff=48, vocab_size=256, mlp="swiglu", head="untied",
    compute_dtype="float32",
)  # fmt: skip
SCALING = {"rope_scaling": "llama3", "rope_factor": 32.0, "rope_original_length": 64}
QWEN2 = dataclasses.replace(LLAMA, attention_bias="qkv", head="tied")
QWEN3 = dataclasses.replace(LLAMA, qk_norm="head", head_dim=24, scan_layers=True)
MIXTRAL = dataclasses.replace(LLAMA, moe=MoEConfig(num_experts=3))
QWEN3_MOE = dataclasses.replace(QWEN3, moe=MoEConfig(num_experts=3, experts_per_token=1, d_ff=16, weights="as-they-are"))


def shapes(config):
    """Returns the shapes of the model's parameters, by name."""
    tree = jgraph.functional(lambda: GPT(config, rngs=nnx.Rngs(0))).shapes
    return dict(zip(leaf_names(tree), (leaf.shape for leaf in jax.tree.leaves(tree)), strict=True))


def drawn(config):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes(config).items()}


def make(path, config=LLAMA, **choices):
    """Writes a folder of random weights. Returns the folder and the weights."""
    arrays = drawn(config)
    choices = {"dtype": "float32"} | choices
    write(path, HUGGING_FACE.config(config, {}), HUGGING_FACE.parts(config), arrays.__getitem__, **choices)
    return Folder(path, field="init_from"), arrays


def check(folder, config=LLAMA):
    folder.check(HUGGING_FACE, folder.settings(HUGGING_FACE, config))


# --- Reading and writing ---


@pytest.mark.parametrize(
    "config",
    [LLAMA, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE],
    ids=["llama", "qwen2", "qwen3, scanned", "mixtral", "qwen3_moe, scanned"],
)
def test_parameters_and_slices_are_read_bit_for_bit(config, tmp_path):
    folder, arrays = make(tmp_path / "f", config)
    check(folder, config)
    rng = np.random.default_rng(1)
    for name, own in HUGGING_FACE.parts(config).items():
        array = arrays[name]
        bounds = [sorted(rng.choice(size + 1, 2, replace=False)) for size in array.shape]
        for index in [(slice(None),) * array.ndim, tuple(slice(int(a), int(b)) for a, b in bounds)]:
            np.testing.assert_array_equal(read(folder, own, array.shape, np.float32, index), array[index])


def test_a_folder_of_several_files_equals_one_of_a_single_file(tmp_path):
    one, _ = make(tmp_path / "one")
    several, _ = make(tmp_path / "several", file_bytes=20_000)
    check(several)
    files = [load_file(file) for file in several.path.glob("*.safetensors")]
    whole = load_file(one.path / WEIGHTS_FILE)
    assert len(files) > 2
    assert sorted(itertools.chain(*files)) == sorted(whole)
    for own in files:
        jax.tree.map(np.testing.assert_array_equal, own, {name: whole[name] for name in own})


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([4], [[4]]),
        ([1, 3, 1], [[1, 3], [1]]),  # the first file is full exactly
        ([1, 4, 4], [[1], [4], [4]]),
        ([2, 3, 1, 1], [[2], [3, 1], [1]]),
        ([9, 1], [[9], [1]]),  # no empty file before a tensor above the limit
        ([1, 9, 3, 1], [[1], [9], [3, 1]]),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_ends_before_the_first_tensor_that_does_not_fit(sizes, expected, dtype, tmp_path):
    parts = {f"w{i}": (Part(f"t{i}", (size,), (0,)),) for i, size in enumerate(sizes)}
    arrays = {f"w{i}": np.full(size, i, np.float32) for i, size in enumerate(sizes)}
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    write(tmp_path / "f", {}, parts, arrays.__getitem__, dtype=dtype, file_bytes=4 * itemsize)
    names = [f"model-{i:05d}-of-{len(expected):05d}.safetensors" for i in range(1, len(expected) + 1)]
    names = [WEIGHTS_FILE] if len(expected) == 1 else names
    assert sorted(path.name for path in (tmp_path / "f").glob("*.safetensors")) == names
    found = {name: load_file(tmp_path / "f" / name) for name in names}
    assert [[tensor.size for _, tensor in sorted(own.items())] for own in found.values()] == expected
    assert {name: tensor[0] for own in found.values() for name, tensor in own.items()} == {
        f"t{i}": i for i in range(len(sizes))
    }
    index = tmp_path / "f" / INDEX_FILE
    assert index.exists() is (len(names) > 1)
    if index.exists():
        assert json.loads(index.read_text()) == {
            "metadata": {"total_size": itemsize * sum(sizes)},
            "weight_map": {tensor: name for name, own in found.items() for tensor in own},
        }


def test_a_device_reads_only_its_shards(tmp_path, monkeypatch):
    folder, arrays = make(tmp_path / "f")
    where = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("fsdp",)), PartitionSpec("fsdp"))
    like = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where) for name, a in arrays.items()}
    sizes = []
    given = Folder.read
    monkeypatch.setattr(Folder, "read", lambda *args: sizes.append((found := given(*args)).size) or found)
    loaded = load_parameters(folder, HUGGING_FACE.parts(LLAMA), like)
    assert sum(sizes) == sum(a.size for a in arrays.values())
    assert max(sizes) == max(a.size for a in arrays.values()) // 4
    jax.tree.map(np.testing.assert_array_equal, loaded, arrays)


PUBLISHED = {name: preset(name).model for name in ("llama3-1b", "llama3-8b", "qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b")}


@pytest.mark.parametrize(
    "config",
    [*PUBLISHED.values(), QWEN2, dataclasses.replace(LLAMA, **SCALING), MIXTRAL, QWEN3_MOE],
    ids=[*PUBLISHED, "qwen2", "llama scaled", "mixtral", "qwen3_moe"],
)
def test_settings_survive_config_json(config):
    found = HUGGING_FACE.settings(json.loads(json.dumps(HUGGING_FACE.config(config, {}))))
    assert replaced(config, found) == config
    free = {"attention", "norm", "compute_dtype", "scan_layers", "loss_chunk", "head_precision", "tensor_overlap"}
    assert found.keys() == {field.name for field in dataclasses.fields(config)} - free, (
        "config.json determines all other fields"
    )
    trained_by = {"z_loss", "bias_rate", "capacity", "overflow"}
    assert not config.moe.num_experts or found["moe"].keys() == {*vars(config.moe)} - trained_by


def test_without_a_preset_a_run_computes_in_the_dtype_of_its_folder(tmp_path):
    for dtype in ("bfloat16", "float32"):
        make(tmp_path / dtype, dtype=dtype)
        assert parse(["--init-from", str(tmp_path / dtype)]).model.compute_dtype == dtype
    for flags, expected in ((("--preset", "cpu-tiny"), "float32"), (("--model.compute-dtype", "float32"), "float32")):
        assert parse(["--init-from", str(tmp_path / "bfloat16"), *flags]).model.compute_dtype == expected


def test_an_exported_config_keeps_other_fields_of_the_original():
    base = {"eos_token_id": 7, "rope_parameters": {"rope_theta": 1.0}, "hidden_size": 1}
    written = HUGGING_FACE.config(LLAMA, base)
    assert (written["eos_token_id"], written["hidden_size"], "rope_parameters" in written) == (7, 32, False)


def test_a_tied_head_may_be_in_the_folder(tmp_path):
    folder, _ = make(tmp_path / "f", QWEN2)
    tensors = load_file(folder.path / WEIGHTS_FILE)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}, folder.path / WEIGHTS_FILE)
    check(Folder(folder.path, field="init_from"), QWEN2)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(255, 256)])
def test_a_tied_head_that_differs_from_the_embedding_is_refused_with_the_remedy(tmp_path, rows):
    folder, _ = make(tmp_path / "f", QWEN2)
    tensors = load_file(folder.path / WEIGHTS_FILE)
    head = tensors["model.embed_tokens.weight"].copy()
    head[rows] += 1
    save_file(tensors | {"lm_head.weight": head}, folder.path / WEIGHTS_FILE)
    with pytest.raises(ConfigError, match=r"lm_head.weight differs from model.embed_tokens.weight.*set the field") as error:
        check(Folder(folder.path, field="init_from"), QWEN2)
    assert "\n" not in str(error.value)
    save_file(tensors | {"lm_head.weight": head[:-1]}, folder.path / WEIGHTS_FILE)
    with pytest.raises(ConfigError, match="differs from"):
        check(Folder(folder.path, field="init_from"), QWEN2)


@pytest.mark.parametrize(("config", "theta"), [(LLAMA, 1e4), (MIXTRAL, 1e6)], ids=["llama", "mixtral"])
def test_a_missing_rope_theta_has_the_default_of_the_architecture(config, theta):
    written = HUGGING_FACE.config(config, {})
    del written["rope_theta"]
    assert HUGGING_FACE.settings(written)["rope_theta"] == theta


def test_the_number_of_experts_has_two_names():
    written = HUGGING_FACE.config(QWEN3_MOE, {})
    renamed = {"num_local_experts" if name == "num_experts" else name: value for name, value in written.items()}
    assert HUGGING_FACE.settings(renamed) == HUGGING_FACE.settings(written)


@pytest.mark.parametrize(
    ("name", "setting", "default"),
    [("norm_topk_prob", "weights", "as-they-are"), ("router_aux_loss_coef", "balance_loss", 0.001)],
)
def test_a_missing_field_of_a_mixture_has_the_default_of_transformers(name, setting, default):
    other = dataclasses.replace(QWEN3_MOE, moe=dataclasses.replace(QWEN3_MOE.moe, weights="normalized", balance_loss=0.5))
    written = HUGGING_FACE.config(other, {})
    for missing in ({name: None}, {}):
        fields = {own: value for own, value in written.items() if own != name} | missing
        assert HUGGING_FACE.settings(fields)["moe"][setting] == default


@pytest.mark.parametrize(
    ("router", "weights", "normalized"),
    [
        ("softmax-topk", "normalized", True),
        ("softmax-topk", "as-they-are", False),
        ("topk-softmax", "normalized", True),
        ("topk-softmax", "as-they-are", True),
    ],
)
def test_an_export_sets_norm_topk_prob(router, weights, normalized):
    moe = dataclasses.replace(QWEN3_MOE.moe, router=router, weights=weights)
    assert HUGGING_FACE.config(dataclasses.replace(QWEN3_MOE, moe=moe), {})["norm_topk_prob"] is normalized


# --- Errors ---


def edit_config(**changes):
    def edit(path):
        fields = json.loads((path / CONFIG_FILE).read_text()) | changes
        (path / CONFIG_FILE).write_text(json.dumps({name: value for name, value in fields.items() if value != "gone"}))

    return edit


def edit_tensors(change, file=WEIGHTS_FILE):
    def edit(path):
        tensors = load_file(path / file)
        change(tensors)
        save_file(tensors, path / file)

    return edit


def cut_off(path):
    (path / WEIGHTS_FILE).write_bytes((path / WEIGHTS_FILE).read_bytes()[:-100])


def pickled(path):
    (path / WEIGHTS_FILE).rename(path / "pytorch_model.bin")


def file_missing(path):
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}))


def index_wrong(path):
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": {"lm_head": WEIGHTS_FILE}}))


ROPE = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}
WRONG = {
    "no folder": (lambda path: shutil.rmtree(path), "no such folder"),
    "no config.json": (lambda path: (path / CONFIG_FILE).unlink(), "has no config.json"),
    "config.json cut off": (lambda path: (path / CONFIG_FILE).write_text('{"a": '), "config.json cannot be read"),
    "config.json is a list": (lambda path: (path / CONFIG_FILE).write_text("[]"), "config.json is not an object"),
    "another architecture": (edit_config(architectures=["MambaForCausalLM"]), "`architectures` is MambaForCausalLM"),
    "no architecture": (edit_config(architectures="gone", model_type="gone"), "`architectures` is missing"),
    "no size": (edit_config(hidden_size="gone"), "`hidden_size` is missing"),
    "a size of the wrong type": (edit_config(hidden_size="wide"), "wide"),
    "sliding windows": (edit_config(use_sliding_window=True), "`use_sliding_window` is True"),
    "sliding layers": (edit_config(layer_types=["full_attention", "sliding_attention"]), "`layer_types`"),
    "another rotation": (edit_config(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "`rope_type` is yarn"),
    "an older name of it": (edit_config(rope_scaling={"type": "linear", "factor": 4.0}), "`rope_type` is linear"),
    "half a scaling": (edit_config(**ROPE), "`original_max_position_embeddings` is missing"),
    "part of a head rotated": (edit_config(partial_rotary_factor=0.5), "`partial_rotary_factor` is 0.5"),
    "another activation": (edit_config(hidden_act="gelu"), "`hidden_act` is gelu"),
    "biases": (edit_config(attention_bias=True), "`attention_bias` is True"),
    "biases of the mlp": (edit_config(mlp_bias=True), "`mlp_bias` is True"),
    "dropout": (edit_config(attention_dropout=0.1), "`attention_dropout` is 0.1"),
    "cut for several GPUs": (edit_config(pretraining_tp=2), "`pretraining_tp` is 2"),
    "quantized": (edit_config(quantization_config={"bits": 4}), "`quantization_config`"),
    "a tensor missing": (edit_tensors(lambda t: t.pop("model.norm.weight")), "has no tensor model.norm.weight"),
    "a tensor more": (edit_tensors(lambda t: t.update(extra=t["model.norm.weight"].copy())), "the model does not have: extra"),
    "a tensor transposed": (
        edit_tensors(lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T.copy()})),
        "lm_head.weight has shape [32, 256]: must be [256, 32]",
    ),
    "integers": (
        edit_tensors(lambda t: t.update({"lm_head.weight": t["lm_head.weight"].astype(np.int8)})),
        "lm_head.weight is I8",
    ),
    "cut off": (cut_off, "model.safetensors cannot be read"),
    "a pickle": (pickled, "pytorch_model.bin is a pickle"),
    "a pickle under another name": (lambda p: (p / WEIGHTS_FILE).write_bytes(b"\x80\x02}q\x00."), "cannot be read"),
    "a file missing": (file_missing, "model-00001-of-00002.safetensors cannot be read"),
    "an index of something else": (index_wrong, "has no tensor lm_head, which"),
    "an index without names": (lambda path: (path / INDEX_FILE).write_text("{}"), "has no `weight_map`"),
}


def a_pipe(path):
    (path / WEIGHTS_FILE).unlink()
    os.mkfifo(path / WEIGHTS_FILE)


WRONG["a pipe without a writer"] = (a_pipe, "model.safetensors cannot be read")
WRONG_MIXTURE = {
    "an expert's tensor missing": (
        edit_tensors(lambda t: t.pop("model.layers.1.mlp.experts.2.up_proj.weight")),
        "has no tensor model.layers.1.mlp.experts.2.up_proj.weight",
    ),
    "a number of experts missing": (edit_config(num_experts="gone"), "`num_experts` is missing"),
    "more for a token than there are": (edit_config(num_experts_per_tok=4), "`model.moe.experts_per_token` is 4"),
    "layers without experts": (edit_config(mlp_only_layers=[0]), "`mlp_only_layers` is [0]"),
    "every other layer without": (edit_config(decoder_sparse_step=2), "`decoder_sparse_step` is 2"),
    "sliding windows of Mixtral": (
        edit_config(architectures=["MixtralForCausalLM"], sliding_window=4096),
        "`sliding_window` is 4096",
    ),
}


@pytest.mark.parametrize("wrong", WRONG | WRONG_MIXTURE)
def test_a_wrong_folder_is_refused_with_the_reason(wrong, tmp_path):
    edit, message = (WRONG | WRONG_MIXTURE)[wrong]
    config = QWEN3_MOE if wrong in WRONG_MIXTURE else LLAMA
    make(tmp_path / "f", config)
    edit(tmp_path / "f")
    with pytest.raises(ConfigError) as error:
        check(Folder(tmp_path / "f", field="init_from"), config)
    assert error.value.field == "init_from"
    assert message in str(error.value)


@pytest.fixture
def unbuilt(tmp_path, monkeypatch):
    """Returns the folder of a Qwen3-MoE, and makes GPT raise."""

    @functools.wraps(GPT.__init__)  # keeps its signature
    def built(*args, **kwargs):
        raise AssertionError("a model was built")

    make(tmp_path / "f", QWEN3_MOE)
    monkeypatch.setattr(GPT, "__init__", built)
    return tmp_path / "f"


SIZES = "num_hidden_layers hidden_size num_attention_heads num_key_value_heads vocab_size intermediate_size head_dim"
SIZES += " num_experts num_experts_per_tok moe_intermediate_size max_position_embeddings"
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED["original_max_position_embeddings"] = 64
WRONG_VALUES = {
    **dict.fromkeys(SIZES.split(), ("x", 1.5, True, -1, [1], {}, 10**12, 10**400)),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "router_aux_loss_coef"), ("x", True, -1.0, [1], 10**400, np.inf, np.nan)),
    **dict.fromkeys(("tie_word_embeddings", "norm_topk_prob"), ("false", 0, [], {})),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), ("x", 5, ["x"], True)),
    **dict.fromkeys(("architectures", "layer_types"), ("LlamaForCausalLM", 5, [5], {})),
    "eos_token_id": ("x", -1, 1.5, True, {}),
    "dtype": (5, ["float32"], {}),
    "torch_dtype": (5, ["float32"], {}),
}
WRONG_ROPE = {name: ("x", -1, True, [1], 10**400) for name in SCALED if name != "rope_type"} | {"rope_type": (5, [], {})}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_a_field_of_config_json_with_a_wrong_type_or_value_is_refused_with_its_name(name, unbuilt):
    written = json.loads((unbuilt / CONFIG_FILE).read_text())
    for value in WRONG_VALUES[name]:
        (unbuilt / CONFIG_FILE).write_text(json.dumps(written | {"dtype": None} | {name: value}))
        with pytest.raises(ConfigError) as error:
            jgraph.load(unbuilt)
        assert error.value.field == "run"
        assert f"config.json: `{name}` is {value!r}"[:60] in str(error.value)


@pytest.mark.parametrize("name", WRONG_ROPE)
def test_a_field_of_rope_scaling_with_a_wrong_type_or_value_is_refused_with_its_name(name):
    written = HUGGING_FACE.config(LLAMA, {})
    assert HUGGING_FACE.settings(written | {"rope_scaling": SCALED})["rope_original_length"] == 64
    for value in WRONG_ROPE[name]:
        with pytest.raises(ConfigError) as error:
            HUGGING_FACE.settings(written | {"rope_scaling": SCALED | {name: value}})
        assert error.value.field == name


@pytest.mark.parametrize("command", ["sample", "evaluate", "train"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 1_000_000}, "has no tensor model.layers.2."),
        ({"num_experts": 1_000_000}, "mlp.gate.weight has shape [3, 32]: must be [1000000, 32]"),
        ({"vocab_size": 2**31 - 1}, "must be [2147483647, 32]"),
    ],
    ids=["layers", "experts", "vocabulary"],
)
def test_a_folder_with_contradicting_sizes_is_refused_before_a_model_is_built(command, changes, message, unbuilt, capsys):
    edit_config(**changes)(unbuilt)
    began = time.process_time()
    act = {
        "sample": lambda path: sample.main([path, "--prompt", "a"]),
        "evaluate": lambda path: evaluate.main([path, "--data", "synthetic"]),
        "train": lambda path: train(unbuilt.with_name("run"), "--init-from", path),
    }[command]
    assert act(str(unbuilt)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    assert time.process_time() - began < 5, "a million layers take minutes"


@pytest.mark.parametrize(
    "path", ["../other.safetensors", "{tmp_path}/other.safetensors", "a/../../other.safetensors", "..", ""]
)
def test_an_index_with_a_file_outside_the_folder_is_refused(path, tmp_path):
    make(tmp_path / "f")
    tensors = load_file(tmp_path / "f" / WEIGHTS_FILE)
    (tmp_path / "f" / WEIGHTS_FILE).rename(tmp_path / "other.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, path.format(tmp_path=tmp_path))}
    (tmp_path / "f" / INDEX_FILE).write_text(json.dumps(index))
    (tmp_path / "f" / "a").mkdir()
    with pytest.raises(ConfigError, match=r"must be the name of a file in the folder|cannot be read") as error:
        check(Folder(tmp_path / "f", field="init_from"))
    assert error.value.field == "init_from"


def test_symbolic_links_are_followed_as_in_the_hugging_face_cache(tmp_path):
    make(tmp_path / "f")
    blobs = tmp_path / "blobs"
    (tmp_path / "f").rename(blobs)
    (tmp_path / "snapshot").mkdir()
    for file in blobs.iterdir():
        (tmp_path / "snapshot" / file.name).symlink_to(f"../blobs/{file.name}")
    check(Folder(tmp_path / "snapshot", field="init_from"))


def test_a_folder_may_be_the_root(tmp_path):
    check_links(Path("/"), tmp_path)


@pytest.mark.long
def test_links_lead_into_the_blobs_of_a_hub_cache_and_nowhere_else(tmp_path):
    make(tmp_path / "f")
    chats.save_tokenizer(tmp_path / "f", chats.CHATML)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "f").rename(tmp_path / "models--a--b" / "blobs")
    for file in (tmp_path / "models--a--b" / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    check(Folder(snapshot, field="init_from"))
    assert Reader.of(snapshot).chat() is not None
    (tmp_path / "secret").write_text("secret")

    def read_all(folder):
        check(Folder(folder, field="init_from"))
        Reader.of(folder)

    for name in ("chat_template.jinja", "added_tokens.json", "additional_chat_templates/a.jinja", WEIGHTS_FILE, CONFIG_FILE):
        link, kept = snapshot / name, snapshot / "kept"
        link.parent.mkdir(exist_ok=True)
        if link.exists():
            link.rename(kept)
        link.symlink_to(tmp_path / "secret")
        with pytest.raises((ConfigError, DataError), match=rf"{link.name} is a link to .*secret: must lead into the folder"):
            read_all(snapshot)
        link.unlink()
        if kept.exists():
            kept.rename(link)


def test_files_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        make(tmp_path / "f")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "f").iterdir()} == {0o640}


def test_the_ids_that_end_a_text_are_those_of_the_generation_config_else_of_the_config(tmp_path):
    folder, _ = make(tmp_path / "f")
    config = json.loads((folder.path / CONFIG_FILE).read_text())
    (folder.path / CONFIG_FILE).write_text(json.dumps(config | {"eos_token_id": 7}))
    assert Folder(folder.path, field="run").ends == [7]
    (folder.path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert Folder(folder.path, field="run").ends == [2, 5]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"mlp": "gelu"}, "model.mlp"),
        ({"qk_norm": "head", "attention_bias": "qkv"}, "model.attention_bias"),
        ({"moe": MIXTRAL.moe, "attention_bias": "qkv"}, "model.attention_bias"),
        ({"moe": MoEConfig(num_experts=3, router="sigmoid")}, "model.moe.router"),
        ({"moe": MoEConfig(num_experts=3, shared_experts=1)}, "model.moe.shared_experts"),
        ({"moe": MoEConfig(num_experts=3, weights_scale=2.5)}, "model.moe.weights_scale"),
        ({"moe": QWEN3_MOE.moe}, "model.moe.weights"),
    ],
)
def test_a_model_without_an_architecture_cannot_be_written(changes, field):
    with pytest.raises(ConfigError) as error:
        HUGGING_FACE.config(dataclasses.replace(LLAMA, **changes), {})
    assert error.value.field == field


def test_a_failed_write_leaves_no_file(tmp_path):
    def parameter(name):
        if name == "head_DV":
            raise OSError("gone")
        return drawn(LLAMA)[name]

    with pytest.raises(OSError, match="gone"):
        write(tmp_path / "f", {}, HUGGING_FACE.parts(LLAMA), parameter, dtype="float32", file_bytes=20_000)
    assert not any(tmp_path.iterdir())


def test_two_processes_that_write_a_folder_do_not_mix_their_files(tmp_path, monkeypatch):
    arrays, to = drawn(LLAMA), tmp_path / "f"
    seen = []

    def parameter(name):
        if not seen:
            seen.extend(path.name for path in tmp_path.iterdir())
            with monkeypatch.context() as patch:
                patch.setattr(os, "getpid", lambda: -1)
                write(to, HUGGING_FACE.config(LLAMA, {}), HUGGING_FACE.parts(LLAMA), arrays.__getitem__, dtype="float32")
        return np.zeros_like(arrays[name])

    with pytest.raises((ConfigError, OSError)):
        write(to, HUGGING_FACE.config(LLAMA, {}), HUGGING_FACE.parts(LLAMA), parameter, dtype="float32")
    assert len(seen) == 1
    assert seen[0].startswith("."), "hidden from file managers and globs"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    np.testing.assert_array_equal(load_file(to / WEIGHTS_FILE)["model.norm.weight"], arrays["norm/scale"])


# --- Runs ---

FLAGS = ("--batch-size", "4", "--seq-len", "32", "--log-every", "1", "--eval-batches", "1", "--sample-tokens", "0")


def train(run_dir, *flags):
    from jgraph.train.__main__ import main

    return main([*FLAGS, "--run-dir", str(run_dir), "--data", "python-docs", *flags])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model.d-model", "64"), "--model.d-model is 64: must be 32, as in --init-from"),
        (("--model.moe.num-experts", "2"), "--model.moe.num-experts is 2: must be 0, as in --init-from"),
        (("--model.module", "tests.own:Normed"), "--model.module is tests.own:Normed: must have the attribute hugging_face"),
    ],
)
def test_a_flag_that_contradicts_the_folder_is_refused_in_one_line(flags, message, tmp_path, capsys):
    make(tmp_path / "f")
    assert train(tmp_path / "run", "--init-from", str(tmp_path / "f"), *flags) == 2
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert message in err
    assert not (tmp_path / "run").exists()


def test_a_folder_does_not_determine_how_a_router_is_trained(tmp_path):
    make(tmp_path / "f", MIXTRAL)
    model = dataclasses.replace(MIXTRAL, moe=dataclasses.replace(MIXTRAL.moe, balance_loss=0.5, z_loss=0.1))
    config = TrainConfig.from_fields(init_from=str(tmp_path / "f"), model=model)
    assert initial_weights(config) is not None


@pytest.mark.long
def test_a_mixture_starts_with_the_weights_of_a_folder_and_the_initial_state(tmp_path):
    folder, arrays = make(tmp_path / "f", MIXTRAL)
    config = TrainConfig.from_fields(model=MIXTRAL, fsdp=2, batch_size=2, seq_len=16, init_from=str(folder.path))
    setup, weights = TrainSetup.from_config(config), initial_weights(config)
    assert weights
    state = weights.load(setup)
    params, began = setup.step.canonical.of(state).params, setup.model.init()[1]
    assert leaf_names(state.carried) == leaf_names(began)
    jax.tree.map(np.testing.assert_array_equal, state.carried, began)
    loaded = jgraph.load(folder.path)
    for of in (params, loaded.params):
        for name, leaf in zip(leaf_names(of), jax.tree.leaves(of), strict=True):
            np.testing.assert_array_equal(leaf, arrays[name])
    jax.tree.map(np.testing.assert_array_equal, loaded.carried, began)


def test_a_folder_that_lacks_a_tensor_leaves_no_run_directory(tmp_path, capsys):
    make(tmp_path / "f")
    edit_tensors(lambda tensors: tensors.pop("model.norm.weight"))(tmp_path / "f")
    assert train(tmp_path / "run", "--init-from", str(tmp_path / "f")) == 2
    assert "has no tensor model.norm.weight" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def byte_tokenizer():
    """Returns a tokenizer with one token per byte. Token ids differ from byte values."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


# Freezes all parameters except the last norm, and the learning rate is too small to change it.
UNCHANGED = ("--freeze", "[!n]*", "--optimizer.learning-rate", "1e-30")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the directory and flags of a two-step run that starts from a bfloat16 folder and changes no weight."""
    path = tmp_path_factory.mktemp("interop")
    make(path / "folder", dtype="bfloat16")
    byte_tokenizer().save(str(path / "folder" / "tokenizer.json"))
    flags = ("--init-from", str(path / "folder"), "--steps", "2", "--checkpoint-every", "1", *UNCHANGED)
    assert train(path / "run", *flags) == 0
    return path, flags


@pytest.mark.long
def test_a_run_resumes_without_its_folder(run, tmp_path):
    path, flags = run
    shutil.copytree(path / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    before = tiny.losses(tmp_path / "run")
    (path / "folder").rename(path / "elsewhere")
    try:
        assert train(tmp_path / "run", *flags) == 0
    finally:
        (path / "elsewhere").rename(path / "folder")
    assert tiny.losses(tmp_path / "run") == before


@pytest.mark.long
def test_untrained_weights_are_exported_bit_for_bit(run, tmp_path, capsys):
    path, _ = run
    assert export.main([str(path / "run"), "--to", str(tmp_path / "out"), "--step", "1"]) == 0
    assert capsys.readouterr().out.startswith("step 1 of ")
    before, after = load_file(path / "folder" / WEIGHTS_FILE), load_file(tmp_path / "out" / WEIGHTS_FILE)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        np.testing.assert_array_equal(tensor.view(np.uint16), after[name].view(np.uint16))
    assert json.loads((path / "folder" / CONFIG_FILE).read_text()) == json.loads((tmp_path / "out" / CONFIG_FILE).read_text())


def test_an_export_and_adapters_have_the_dtype_of_the_folder_that_the_run_began_from(tmp_path):
    make(tmp_path / "half", dtype="bfloat16")
    make(tmp_path / "full", dtype="float32")
    for name, dtype in (("half", "bfloat16"), ("full", "float32")):
        flags = ("--lora.rank", "2", "--run-dir", str(tmp_path / "run"))
        assert parse(["--init-from", str(tmp_path / name), *flags]).lora.base_dtype == dtype
        origin = tmp_path / f"run-{name}" / "origin"
        origin.mkdir(parents=True)
        shutil.copyfile(tmp_path / name / CONFIG_FILE, origin / CONFIG_FILE)
        assert dtype_of_source("", str(origin.parent), "") == dtype
    assert dtype_of_source("", str(tmp_path), "") == "float32"


@pytest.mark.long
def test_text_is_tokenized_by_the_folder_and_exports_contain_the_tokenizer(run, tmp_path):
    path, _ = run
    tokenizer = path / "folder" / "tokenizer.json"
    corpus = load_corpus("python-docs", seq_len=32, vocab_size=256, tokenizer=tokenizer)
    assert json.loads((path / "run" / "config.json").read_text())["corpus"]["fingerprint"] == corpus.fingerprint
    assert export.main([str(path / "run"), "--to", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()


@pytest.mark.long
def test_a_damaged_checkpoint_is_not_exported(run, tmp_path, capsys):
    path, _ = run
    shutil.copytree(path / "run", tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints" / "2" / "state" / "d").rglob("*"):
        contents = file.read_bytes()
        file.write_bytes(contents[: len(contents) // 2] + bytes(len(contents) - len(contents) // 2))
    assert export.main([str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert (len(err.splitlines()), "2 is damaged (" in err, (tmp_path / "out").exists()) == (1, True, False)


def test_data_with_another_tokenizer_is_reported(tmp_path):
    make(tmp_path / "f")
    of_bytes = TrainConfig.from_fields(init_from=str(tmp_path / "f"), model=LLAMA)
    assert "is read as bytes" in tokenizer_warning(of_bytes)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "train-0.bin").touch()
    of_tokens = of_bytes.changed(data=str(tmp_path / "tokens"))
    for place in ("f", "tokens"):
        (tmp_path / place / "tokenizer.json").write_text("{}")
    assert tokenizer_warning(of_tokens) == ""
    (tmp_path / "f" / "tokenizer.json").write_text("{ }")
    assert "another tokenizer.json" in tokenizer_warning(of_tokens)


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "message"),
    [(("--to", "{run}"), "--to is "), (("--to", "{out}", "--step", "7"), "--step is 7: must be one of 1, 2")],
)
def test_an_impossible_export_is_refused_in_one_line(run, flags, message, tmp_path, capsys):
    path, _ = run
    places = {"run": path / "run", "out": tmp_path / "out"}
    assert export.main([str(path / "run"), *(flag.format(**places) for flag in flags)]) == 2
    err = capsys.readouterr().err
    assert (len(err.splitlines()), message in err) == (1, True)
    assert not (tmp_path / "out").exists()


def test_a_directory_without_a_run_cannot_be_exported(tmp_path, capsys):
    assert export.main([str(tmp_path), "--to", str(tmp_path / "out")]) == 2
    assert "must be a run directory" in capsys.readouterr().err
