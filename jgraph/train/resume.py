"""Rules for resuming a run: the settings that may change, and the learning rate if the number of steps changes."""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

from jgraph.train.config import DefaultSteps, TrainConfig


class Rule(NamedTuple):
    """States whether settings may change when a run is resumed.

    Attributes:
        fields: Names of the settings, separated by spaces. The name of a nested configuration covers the fields without a rule
            of their own.
        may: `yes`; `no`; or `by extend`, which requires `optimizer.extend`.
        why: The reason, for the table in the guide.
    """

    fields: str
    may: Literal["yes", "no", "by extend"]
    why: str


RULES = (
    Rule("steps", "by extend", "more steps, or fewer, but at least the steps already done"),
    Rule("optimizer.extend optimizer.decay_steps", "by extend", "they set the learning rate of the new steps"),
    Rule("run_dir resume", "yes", "they select the run to resume"),
    Rule("log log_every eval_every eval_batches profile sample_tokens", "yes", "monitoring does not change the training"),
    Rule("checkpoint_every checkpoint_keep hang_seconds on_nonfinite", "yes", "saving and stopping do not change the training"),
    Rule("dp fsdp ep reshard_after_forward shard_rules", "yes", "same training on other devices, up to rounding"),
    Rule("pp pp_engine chunks schedule memory_limit distributed", "yes", "same training on other devices, up to rounding"),
    Rule("remat graph xla_options compile_cache", "yes", "same training in another program, up to rounding"),
    Rule("model.moe.capacity", "yes", "the capacity changes no step unless tokens are dropped"),
    Rule("preset module model", "no", "another model"),
    Rule("init_from continue_from continue_with", "no", "other initial weights"),
    Rule("data data_field data_shuffle data_documents seed batch_size seq_len num_microbatches", "no", "other batches"),
    Rule("optimizer freeze", "no", "the saved optimizer state would not match"),
    Rule("precision fp8 main_params_dtype", "no", "other numerics"),
    Rule("main_grads_dtype decoupled_grad on_dtype_mismatch", "no", "other numerics"),
)
_BY_FIELD = {name: rule for rule in RULES for name in rule.fields.split()}


def rule_of(name: str) -> Rule:
    """Returns the rule of a setting.

    Args:
        name: The dotted name, for example `optimizer.beta1`.

    Returns:
        The rule of the name, else of its first part. Unknown settings may not change.
    """
    return _BY_FIELD.get(name) or _BY_FIELD.get(name.partition(".")[0], Rule(name, "no", "unknown"))


def resumed(config: TrainConfig, before: dict[str, Any]) -> TrainConfig:
    """Sets the learning-rate schedule of a run that is resumed.

    With the same number of steps, the schedule stays the saved one. With another number, `optimizer.extend` decides where the
    cosine ends. The warmup stays the saved one unless the flags set it or the new run is shorter than the warmup.

    Args:
        config: The configuration from the flags.
        before: The saved configuration, flattened to dotted names.

    Returns:
        `config` with another schedule. `differences` reports a schedule that cannot be resumed.
    """
    flags, saved_extend = config.optimizer, before.get("optimizer.extend", "no")
    saved_decay = before.get("optimizer.decay_steps", 0)
    if "steps" not in before:
        return config  # `before` is not a run's configuration
    if config.steps == before["steps"]:
        if saved_extend == "no":
            return config.changed(optimizer=replace(flags, extend="no"))
        if flags.extend not in ("no", saved_extend):
            return config
        extend, decay_steps = saved_extend, flags.decay_steps or saved_decay
    elif flags.extend == "no":
        extend, decay_steps = "no", flags.decay_steps  # `differences` refuses it because of `steps`
    else:
        extend, decay_steps = flags.extend, flags.decay_steps
        if extend == "constant":
            decay_steps = decay_steps or saved_decay or before["steps"]
    warmup_steps = flags.warmup_steps
    if isinstance(warmup_steps, DefaultSteps) and _warmup(before) <= config.steps:
        warmup_steps = before.get("optimizer.warmup_steps", warmup_steps)
    optimizer = replace(flags, extend=extend, decay_steps=decay_steps, warmup_steps=warmup_steps)
    return config.changed(optimizer=optimizer)


def differences(here: dict[str, Any], before: dict[str, Any], done: int) -> list[str]:
    """Lists the settings that prevent a run from being resumed.

    Args:
        here: The configuration that `resumed` returned, flattened to dotted names.
        before: The saved configuration, flattened to dotted names.
        done: Number of steps already done.

    Returns:
        One text per setting, with its new and its saved value.
    """
    names = [name for name in here | before if here.get(name) != before.get(name) and rule_of(name).may != "yes"]
    if _is_extended(here, before, done):
        return [_difference(name, here, before) for name in names if rule_of(name).may != "by extend"]
    # The schedule follows from the steps. If those are refused, it is not reported as well.
    derived, reason = set(), ""
    if here.get("steps") != before.get("steps"):
        if here["steps"] < done:
            reason = f" ({done} are done)"
        elif here["steps"] < _warmup(before):
            reason = f" (the warmup takes {_warmup(before)})"
        elif here["optimizer.extend"] == "no":
            reason = " (set `optimizer.extend` to cosine or constant to choose the learning rate of the new steps)"
        if reason:
            derived |= {"optimizer.extend", "optimizer.decay_steps"}
        if here["steps"] < _warmup(before):
            derived.add("optimizer.warmup_steps")
    return [_difference(name, here, before) + reason * (name == "steps") for name in names if name not in derived]


def _difference(name: str, here: dict[str, Any], before: dict[str, Any]) -> str:
    now, saved = ("empty" if (value := fields.get(name, "absent")) == "" else value for fields in (here, before))
    return f"`{name}` is {now} and was {saved}"


def _is_extended(here: dict[str, Any], before: dict[str, Any], done: int) -> bool:
    """True if the number of steps changes in a way that `resumed` allows."""
    steps = before.get("steps")
    ends = {"cosine": 0, "constant": before.get("optimizer.decay_steps", 0) or steps}
    has_schedule = ends.get(here["optimizer.extend"]) == here["optimizer.decay_steps"]
    fewest = max(done, _warmup(before))
    return has_schedule and steps is not None and here["steps"] != steps and here["steps"] >= fewest


def _warmup(before: dict[str, Any]) -> int:
    saved = before.get("optimizer.warmup_steps", 0)
    return saved if isinstance(saved, int) else 0
