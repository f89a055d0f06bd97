"""Optional members of a user's model, its class and its settings: checked, documented, and read in one place."""

import ast
import re
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import jax.numpy as jnp
import pytest

import jgraph
from jgraph.errors import ConfigError
from jgraph.moe.config import MoEConfig
from jgraph.train._validation import flops_per_step
from jgraph.train.config import TrainConfig
from jgraph.train.hooks import Model, ModelHooks, model_hooks
from jgraph.train.model import Experts, ModelSettings, SettingsHooks, settings_hooks
from jgraph.train.setup import TrainSetup
from jgraph_models.gpt import GPT
from jgraph_models.gpt_config import GPTConfig
from tests import own

ROOT = Path(__file__).parents[2]
PIPELINE = {"pp": 2, "num_microbatches": 2}
MODULE = "tests.own:Normed"
HAVE = f"`module` is {MODULE}: must have"
NAMES = {each.name for kind in (ModelHooks, SettingsHooks) for each in fields(kind)} | {"remat", "cached_decoder"}


def members(protocol):
    return {name for name in {*vars(protocol), *get_type_hints(protocol)} if not name.startswith("_")}


def setup(**changes):
    return TrainSetup.from_config(TrainConfig.from_fields(module=MODULE, batch_size=4, seq_len=16, **changes))


def refused(make):
    with pytest.raises(ConfigError) as error:
        make()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_protocols_have_the_hooks_and_the_built_in_model_has_all_of_them():
    assert members(Model) | members(ModelSettings) == NAMES | {"loss", "logits"}
    assert {each.name for each in fields(SettingsHooks)} == members(ModelSettings)
    assert [name for name in members(ModelSettings) if not hasattr(GPTConfig, name)] == []
    assert [name for name in members(Model) - {"remat"} if not hasattr(GPT, name)] == []
    assert {each.name for each in fields(Experts)} < {each.name for each in fields(MoEConfig)}


def test_the_guide_has_one_row_per_hook():
    page = (ROOT / "notes/guide/model.md").read_text(encoding="utf-8")
    table = page[page.index("| member | of |") :].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)", table, re.MULTILINE)
    assert sorted(rows) == sorted(members(Model) | members(ModelSettings))


def looked_up():
    """Yields the file, the object and the name of each `hasattr` and `getattr` with a constant name in jgraph."""
    for path in (ROOT / "jgraph").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr"):
                where, name, *_ = node.args
                if isinstance(name, ast.Constant):
                    yield path.relative_to(ROOT / "jgraph").as_posix(), ast.unparse(where), name.value


def test_hooks_are_looked_up_in_one_place():
    own_lookups = {("modules.py", "module", "cached_decoder"), ("train/_functional.py", "made", "remat")}
    found = {each for each in looked_up() if each[2] in NAMES or re.search(r"\bconfig\.model$|settings|find_model", each[1])}
    assert found == own_lookups


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tensor_rules", {"*": None}, f"{HAVE} tensor_rules(...), a method that returns a Mapping (it is a dict)"),
        ("pipeline_model", "no", f"{HAVE} pipeline_model(...), a method that returns a PipelineModel (it is a str)"),
        ("splits_sequences", "no", f"`{MODULE}.splits_sequences` is 'no': must be True or False"),
        ("hugging_face", {}, f"{HAVE} the attribute hugging_face, a HuggingFace (it is a dict)"),
    ],
)
def test_a_hook_of_the_class_with_another_type_is_refused(monkeypatch, name, value, message):
    monkeypatch.setattr(own.Normed, name, value, raising=False)
    assert refused(setup) == message


@pytest.mark.parametrize(
    ("name", "method", "changes", "reason"),
    [
        ("tensor_rules", lambda config: [], {"tp": 2}, "Mapping (TypeError: it returns [])"),
        ("tensor_rules", lambda self, config: {}, {"tp": 2}, "Mapping (TypeError: "),
        ("pipeline_model", lambda config, ranks: None, PIPELINE, "PipelineModel (TypeError: it returns None)"),
    ],
)
def test_a_hook_of_the_class_that_returns_another_type_is_refused(monkeypatch, name, method, changes, reason):
    monkeypatch.setattr(own.Normed, name, staticmethod(method), raising=False)
    message = refused(lambda: setup(**changes))
    assert message.startswith(f"{HAVE} {name}(...), a method that returns a {reason}")


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({"vocab_size": "256"}, "`model.vocab_size` is '256': must be an integer"),
        ({"scan_layers": "no"}, "`model.scan_layers` is 'no': must be True or False"),
        ({"flops": 1e9}, f"{HAVE} flops(...), a method that returns a Real (it is a float)"),
        ({"in_fp8": True}, f"{HAVE} in_fp8(...), a method that returns a SimpleNamespace (it is a bool)"),
        ({"moe": SimpleNamespace(num_experts="8")}, "`model.moe.num_experts` is '8': must be an integer"),
    ],
)
def test_a_setting_with_the_name_of_a_hook_and_another_type_is_refused(hooks, message):
    assert refused(lambda: TrainConfig.from_fields(module=MODULE, model=SimpleNamespace(**hooks))) == message


@pytest.mark.parametrize("name", ["in_fp8", "with_visible_matmuls"])
def test_a_method_of_the_settings_that_returns_no_settings_is_refused(name):
    @dataclass(frozen=True)
    class Forgets(own.Settings):
        pass

    setattr(Forgets, name, lambda self: None)
    reason = "a method that returns a Forgets (TypeError: it returns None)"
    assert refused(lambda: setup(precision="fp8", model=Forgets())) == f"{HAVE} {name}(...), {reason}"


def test_a_compute_dtype_that_does_not_exist_is_refused():
    @dataclass(frozen=True)
    class Misspelled(own.Settings):
        compute_dtype: str = "float17"

    assert "compute_dtype (TypeError: " in refused(lambda: setup(fsdp=2, model=Misspelled()))


def test_the_flops_of_the_settings_are_a_number():
    @dataclass(frozen=True)
    class Counting(own.Settings):
        result: float | None = 5.0

        def flops(self, sequences, length):
            return self.result and sequences * length * self.result

    assert flops_per_step(setup(model=Counting())) == 4 * 16 * 5.0
    assert "flops(...)" in refused(lambda: flops_per_step(setup(model=Counting(result=None))))


def test_a_remat_that_is_not_the_name_of_a_choice_is_refused(monkeypatch):
    monkeypatch.setattr(own.Normed, "remat", lambda self: None, raising=False)
    assert refused(lambda: setup(remat="layer")).startswith(f"`remat` is layer: must be nothing for {MODULE}")


def test_a_cached_decoder_of_another_type_is_refused(monkeypatch):
    monkeypatch.setattr(own.Normed, "cached_decoder", lambda self: {}, raising=False)
    assert refused(setup) == "`make` returns Normed: its cached_decoder() must return a jgraph.Decoder, not a dict"


def test_missing_hooks_have_defaults_that_change_nothing(monkeypatch):
    settings, hooks = own.Settings(), settings_hooks(MODULE, own.Settings())
    assert hooks.in_fp8(settings) is settings is hooks.with_visible_matmuls(settings)
    assert settings_hooks(MODULE, None) == SettingsHooks()
    monkeypatch.setattr(own.Normed, "pipeline_model", None, raising=False)
    assert model_hooks(MODULE) == ModelHooks()
    assert model_hooks(MODULE).tensor_rules(settings) == {}


def test_settings_of_another_meaning_are_left_alone():
    hooks = settings_hooks(MODULE, SimpleNamespace(attention=5, moe=True, vocab_size=None))
    assert (hooks.moe, hooks.vocab_size) == (Experts(), 0)


def test_hooks_are_those_of_the_built_in_model():
    config = GPTConfig(vocab_size=300, mlp="swiglu", moe=MoEConfig(num_experts=4))
    hooks = settings_hooks("jgraph_models.gpt:GPT", config)
    assert hooks.moe == Experts(4, 2, 1.5)
    assert (hooks.vocab_size, hooks.compute_dtype and jnp.dtype(hooks.compute_dtype)) == (300, jnp.bfloat16)
    assert hooks.in_fp8(config).norm == "backward"
    assert all(isinstance(rule, jgraph.Split) for rule in model_hooks("jgraph_models.gpt:GPT").tensor_rules(config).values())
