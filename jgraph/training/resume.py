"""What a run may change when it goes on: one table by field; and how its rate goes on where it has other steps than before."""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

from jgraph.training.config import TrainConfig, Usual


class Rule(NamedTuple):
    """Says whether fields may change when a run goes on.

    Attributes:
        fields: their names; that of a nested configuration means all in it that no rule names.
        may: `yes`, `no`, or `by extend`: where `optimizer.extend` says how the rate goes on.
        why: in a few words, for the guide.
    """

    fields: str
    may: Literal["yes", "no", "by extend"]
    why: str


RULES = (
    Rule("steps", "by extend", "more steps, or fewer, but not fewer than are done"),
    Rule("optimizer.extend optimizer.decay_steps", "by extend", "follow from the steps"),
    Rule("run_dir resume", "yes", "they say which run goes on"),
    Rule("log log_every eval_every eval_batches profile sample_tokens", "yes", "looking changes no step"),
    Rule("checkpoint_every checkpoint_keep hang_seconds on_nonfinite", "yes", "nor do saving and stopping"),
    Rule("dp fsdp ep reshard_after_forward shard_rules", "yes", "the same steps over other devices, to rounding"),
    Rule("pp pp_engine chunks schedule memory_limit distributed", "yes", "the same steps over other devices, to rounding"),
    Rule("remat graph xla_options compile_cache", "yes", "the same steps as another program, to rounding"),
    Rule("model.moe.capacity", "yes", "room for rows, which changes no step unless rows are dropped"),
    Rule("preset module model", "no", "another model"),
    Rule("init_from continue_from continue_with", "no", "another beginning"),
    Rule("data data_field data_shuffle data_documents seed batch_size seq_len num_microbatches", "no", "other batches"),
    Rule("optimizer freeze", "no", "another optimizer, whose state would not be this one's"),
    Rule("precision fp8 main_params_dtype", "no", "other numbers"),
    Rule("main_grads_dtype decoupled_grad on_dtype_mismatch", "no", "other numbers"),
)
_BY_FIELD = {name: rule for rule in RULES for name in rule.fields.split()}


def rule_of(name: str) -> Rule:
    """Returns the rule for a field by its dotted name."""
    return _BY_FIELD.get(name) or _BY_FIELD.get(name.partition(".")[0], Rule(name, "no", "unknown"))


def resumed(config: TrainConfig, before: dict[str, Any]) -> TrainConfig:
    """Returns a run that goes on, with the rate that follows from what it was before.

    Where its steps are those of before, so is the rate, however it came about. Where they are others, `optimizer.extend` says
    where the cosine ends, and the warm-up is that of before unless one is asked for.

    Args:
        before: the fields of the run so far, by dotted name.
    """
    asked, was = config.optimizer, before.get("optimizer.extend", "no")
    had = before.get("optimizer.decay_steps", 0)
    if "steps" not in before:
        return config  # which is no run's
    if config.steps == before["steps"]:
        if was == "no":
            return replace(config, optimizer=replace(asked, extend="no"))
        if asked.extend not in ("no", was):
            return config
        extend, decay_steps = was, asked.decay_steps or had
    elif asked.extend == "no":
        extend, decay_steps = "no", asked.decay_steps  # which is refused, for its steps alone
    else:
        extend, decay_steps = asked.extend, asked.decay_steps
        if extend == "constant":
            decay_steps = decay_steps or had or before["steps"]
    warmup_steps = asked.warmup_steps
    if isinstance(warmup_steps, Usual):
        warmup_steps = before.get("optimizer.warmup_steps", warmup_steps)
    optimizer = replace(asked, extend=extend, decay_steps=decay_steps, warmup_steps=warmup_steps)
    return replace(config, optimizer=optimizer)


def differences(here: dict[str, Any], before: dict[str, Any], done: int) -> list[str]:
    """Returns what a run may not change and did, a text each.

    Args:
        here, before: fields by dotted name, of `resumed` and of the run so far.
        done: steps that are done.
    """
    extends = _extends(here, before, done)
    names = [name for name in here | before if rule_of(name).may == "no" or (rule_of(name).may != "yes" and not extends)]
    if here.get("steps") != before.get("steps") and here["optimizer.extend"] == "no":
        names = [name for name in names if name not in ("optimizer.extend", "optimizer.decay_steps")]  # they follow from it
    told = {name: f"`{name}` is {here.get(name, 'absent')} and was {before.get(name, 'absent')}" for name in names}
    if "steps" in told and here["steps"] < done:
        told["steps"] += f" ({done} are done)"
    elif "steps" in told and here["optimizer.extend"] == "no":
        told["steps"] += " (`optimizer.extend` cosine or constant would say how the rate goes on)"
    return [told[name] for name in names if here.get(name) != before.get(name)]


def _extends(here: dict[str, Any], before: dict[str, Any], done: int) -> bool:
    """Returns whether a run has other steps than before, and may: with a cosine that ends where `resumed` has it end."""
    steps = before.get("steps")
    ends = {"cosine": 0, "constant": before.get("optimizer.decay_steps", 0) or steps}
    is_said = ends.get(here["optimizer.extend"]) == here["optimizer.decay_steps"]
    return is_said and steps is not None and here["steps"] != steps and here["steps"] >= done
