"""The settings that may change when a run resumes, and the learning rate schedule of a run with more or fewer steps.

A setting may change if `may_change` made its field. Configurations are compared as flat dicts with dotted names, because
another version of jgraph may have written the saved one.
"""

import dataclasses
import json
from typing import Any

from jgraph.settings import Rule, flatten, resume_rules
from jgraph.train.config import COMPONENTS, RECORDS, OptimizerConfig, TrainConfig
from jgraph.train.model import Experts


def rules_of(config: TrainConfig) -> dict[str, Rule]:
    """Returns the rule of each setting, by dotted name. Those of `moe` hold for every model class."""
    return resume_rules(config, inline=COMPONENTS) | resume_rules(Experts(), prefix="model.moe.")


def flat_saved(fields: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    """Flattens the fields of a config.json. Adds the defaults of fields that an earlier version did not write.

    `config` has the same model class.
    """
    if isinstance(fields.get("model"), dict):
        parts = {name: part for name, part in vars(config).items() if dataclasses.is_dataclass(part)}
        nested = {name: _defaults(part) | fields[name] for name, part in parts.items() if isinstance(fields.get(name), dict)}
        defaults: dict[str, Any] = {}
        for part in (config, *(parts[name] for name in COMPONENTS)):
            defaults |= _defaults(part)
        fields = defaults | fields | nested
    return flatten(fields)


def _defaults(config: Any) -> dict[str, Any]:
    """Returns the constant defaults of a dataclass, as in JSON."""
    defaults = {field.name: field.default for field in dataclasses.fields(config) if field.default is not dataclasses.MISSING}
    nested = {name: vars(value) for name, value in defaults.items() if dataclasses.is_dataclass(value)}
    tuples = {name: list(value) for name, value in defaults.items() if isinstance(value, tuple)}
    unset = OptimizerConfig().unset if isinstance(config, OptimizerConfig) else {}
    return defaults | nested | tuples | dict(unset)


def resumed_schedule(config: TrainConfig, saved: dict[str, Any]) -> TrainConfig:
    """Adapts `extend`, `decay_steps` and an unset `warmup_steps` of `optimizer` to the saved run.

    With the same number of steps, the schedule stays the saved one. With another number, `optimizer.extend` decides where the
    schedule ends. `differences` reports a schedule that cannot be resumed.
    """
    flags = config.optimizer
    if "steps" not in saved:
        return config  # the config.json is not from a run
    saved_extend = saved.get("optimizer.extend", "no")
    saved_decay = saved.get("optimizer.decay_steps", 0)
    extend = flags.extend
    decay_steps = flags.decay_steps
    if config.steps == saved["steps"]:
        if saved_extend == "no":
            return _with_optimizer(config, extend="no")
        if extend not in ("no", saved_extend):
            return config
        extend = saved_extend
        decay_steps = decay_steps or saved_decay
    elif extend == "constant":
        decay_steps = decay_steps or saved_decay or saved["steps"]
    schedule = {"extend": extend, "decay_steps": decay_steps}
    if "warmup_steps" in flags.unset and _warmup(saved) <= config.steps:
        return _with_optimizer(config, **schedule, warmup_steps=saved.get("optimizer.warmup_steps", flags.warmup_steps))
    return _with_optimizer(config, **schedule)


def _with_optimizer(config: TrainConfig, **values: Any) -> TrainConfig:
    return config.changed(optimizer=dataclasses.replace(config.optimizer, **values))


def differences(config: TrainConfig, fields: dict[str, Any], done: int, fingerprint: str) -> list[str]:
    """Lists what prevents a run from being resumed after `done` steps: settings and data, with new and saved values.

    `fields` is the content of its config.json, and `fingerprint` that of the new data.
    """
    saved = flat_saved(fields, config)
    before = str(saved.get("corpus.fingerprint"))[:12]
    saved = {name: value for name, value in saved.items() if name.partition(".")[0] not in RECORDS}
    # JSON turns tuples into lists, as in the file.
    new = flatten(json.loads(json.dumps(config.to_dict())))
    rules = rules_of(config)
    may = {name: rules[name].may if name in rules else "no" for name in new | saved}
    if new.get("main_params_dtype") != "float32":
        may["offload"] = "no"  # the checkpoint has float32 parameters only with `offload`
    is_extended = _is_extended(new, saved, done)
    allowed = ("yes", "by extend") if is_extended else ("yes",)
    # The schedule depends on the number of steps. If that number is not allowed, only the number is reported.
    reason = "" if is_extended else _wrong_steps(new, saved, done)
    derived = {"optimizer.extend", "optimizer.decay_steps"} if reason else set[str]()
    if not is_extended and new["steps"] != saved.get("steps") and new["steps"] < _warmup(saved):
        derived.add("optimizer.warmup_steps")
    names = [name for name in may if new.get(name) != saved.get(name) and may[name] not in allowed and name not in derived]
    texts = [_difference(name, new, saved) + (reason if name == "steps" else "") for name in names]
    if fingerprint[:12] != before:
        text = f"the text of `data` {' '.join(config.input.data)}, or its token ids,"
        texts.append(f"{text} has fingerprint {fingerprint[:12]} and had {before}")
    return texts


def _wrong_steps(new: dict[str, Any], saved: dict[str, Any], done: int) -> str:
    """Returns why the number of steps may not change to the new one, in parentheses; empty if `steps` is not the reason."""
    if new["steps"] == saved.get("steps"):
        return ""
    if new["steps"] < done:
        return f" ({done} are done)"
    if new["steps"] < _warmup(saved):
        return f" (the warmup takes {_warmup(saved)})"
    if new["optimizer.extend"] == "no":
        return " (set `optimizer.extend` to schedule or constant to choose the learning rate of the new steps)"
    return ""


def _difference(name: str, new: dict[str, Any], saved: dict[str, Any]) -> str:
    now, before = ("empty" if (value := fields.get(name, "absent")) == "" else value for fields in (new, saved))
    return f"`{name}` is {now} and was {before}"


def _is_extended(new: dict[str, Any], saved: dict[str, Any], done: int) -> bool:
    """True if the number of steps changes in a way that `resumed_schedule` allows."""
    steps = saved.get("steps")
    ends = {"schedule": 0, "cosine": 0, "constant": saved.get("optimizer.decay_steps", 0) or steps}
    has_schedule = ends.get(new["optimizer.extend"]) == new["optimizer.decay_steps"]
    fewest = max(done, _warmup(saved))
    return has_schedule and steps is not None and new["steps"] != steps and new["steps"] >= fewest


def _warmup(saved: dict[str, Any]) -> int:
    steps = saved.get("optimizer.warmup_steps", 0)
    return steps if isinstance(steps, int) else 0
