"""Fields of configurations: their rules for a run that resumes, the check of one field, and dicts with dotted names."""

from collections.abc import Collection
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar

from jgraph.errors import require

_T = TypeVar("_T")

OTHER_DEVICES = "same training on other devices, up to rounding"
OTHER_PROGRAM = "same training in another program, up to rounding"


@dataclass(frozen=True)
class Rule:
    """States whether a setting may change when a run resumes, and why. `by extend`: only with another number of steps."""

    may: Literal["yes", "no", "by extend"]
    why: str = ""


_FIXED = Rule("no")


def may_change(default: _T, why: str, *, by_extend: bool = False) -> _T:
    """Makes a field of a dataclass that may change when a run resumes. Without it, a field may not change."""
    return field(default=default, metadata={"resume": Rule("by extend" if by_extend else "yes", why)})


def resume_rules(config: Any, *, inline: Collection[str] = (), prefix: str = "") -> dict[str, Rule]:
    """Returns the rule of each field of a dataclass, by dotted name. Names in fields of `inline` have no prefix."""
    rules: dict[str, Rule] = {}
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value):
            rules |= resume_rules(value, prefix=prefix if each.name in inline else f"{prefix}{each.name}.")
        else:
            rules[prefix + each.name] = each.metadata.get("resume", _FIXED)
    return rules


def check_field(config: object, name: str, condition: bool, allowed: str) -> None:
    """Raises ConfigError if `condition` is false for a field. The name may have a prefix, such as `optimizer.`."""
    require(condition, name, getattr(config, name.rpartition(".")[2]), allowed)


def flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts to one dict with dotted names, such as `optimizer.beta1`. An empty dict leaves no entry."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def differing(fields: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields, by dotted name, that are missing in `base` or have another value there."""
    flat, base = flatten(fields), flatten(base)
    return {name: value for name, value in flat.items() if name not in base or base[name] != value}
