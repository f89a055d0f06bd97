"""Settings of the optimizer, and the optimizers by name. No JAX, hence no optax."""

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, Self

from tyro.conf import Fixed, Suppress, arg

from jgraph.errors import check_choice, check_types, require, require_positive
from jgraph.settings import check_field, may_change
from jgraph.train._setup_config import DtypeName


class OptimizerKind(NamedTuple):
    """The defaults of an optimizer of optax. None for a hyperparameter that the optimizer does not have."""

    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    # `elements`: every element is updated independently, so that small parameters may share an array.
    updates: Literal["elements", "parameters"] = "elements"


# All defaults except those of adamw are those of optax.
OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": OptimizerKind(0.9, 0.95, 1e-8, 0.1),
    "adam": OptimizerKind(0.9, 0.999, 1e-8),
    "adabelief": OptimizerKind(0.9, 0.999, 1e-16),
    "adafactor": OptimizerKind(eps=1e-30, weight_decay=0.0, updates="parameters"),
    "adagrad": OptimizerKind(eps=1e-7),
    "adamax": OptimizerKind(0.9, 0.999, 1e-8),
    "adamaxw": OptimizerKind(0.9, 0.999, 1e-8, 1e-4),
    "adan": OptimizerKind(0.98, 0.92, 1e-8, 0.0),
    "ademamix": OptimizerKind(0.9, 0.999, 1e-8, 0.0),
    "amsgrad": OptimizerKind(0.9, 0.999, 1e-8),
    "lamb": OptimizerKind(0.9, 0.999, 1e-6, 0.0, updates="parameters"),
    "lars": OptimizerKind(eps=0.0, weight_decay=0.0, updates="parameters"),
    "lion": OptimizerKind(0.9, 0.99, None, 1e-3),
    "muon": OptimizerKind(0.9, 0.999, 1e-8, 0.0, updates="parameters"),
    "nadam": OptimizerKind(0.9, 0.999, 1e-8),
    "nadamw": OptimizerKind(0.9, 0.999, 1e-8, 1e-4),
    "radam": OptimizerKind(0.9, 0.999, 1e-8),
    "rmsprop": OptimizerKind(eps=1e-8),
    "sgd": OptimizerKind(),
    "signum": OptimizerKind(),
    "yogi": OptimizerKind(0.9, 0.999, 1e-3),
}


_NEW_RATE = "they set the learning rate of the new steps"
# A number that nobody set. `OptimizerConfig` replaces it by the one of adamw, and then follows the optimizer and `steps`.
_UNSET: Any = None
_HYPERPARAMETERS = ("beta1", "beta2", "eps", "weight_decay")
_DEFAULTS = {name: getattr(OPTIMIZERS["adamw"], name) for name in _HYPERPARAMETERS} | {"warmup_steps": 100}


class ParameterGroup(NamedTuple):
    """Parameters with their own learning rate or weight decay."""

    pattern: str
    rate: float = 1.0  # factor of the learning rate
    decay: float | None = None  # weight decay of the matrices; None for that of the optimizer


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, learning rate schedule and clipping by global norm."""

    name: Annotated[str, arg(metavar=f"{{{','.join(OPTIMIZERS)}}}")] = "adamw"
    """Optimizer of optax. The defaults below are those of adamw. Other optimizers have the defaults of optax."""
    args: tuple[str, ...] = ()
    """Further arguments of the optax optimizer, as name=value with Python literals, e.g. momentum=0.9 nesterov=True."""
    groups: tuple[str, ...] = ()
    """PATTERN:rate=FACTOR,decay=VALUE: learning rate factor and weight decay of parameters by name pattern, e.g.
    'embedding*:rate=0.1,decay=0'. The first match applies."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "inverse-sqrt"] = "cosine"
    """Learning rate after the warmup. `wsd` (warmup, stable, decay) is constant, and then falls linearly. `inverse-sqrt` falls
    with the square root of the step."""
    warmup_steps: int = _UNSET
    """Steps of linear warmup. The first step has a positive rate. The default is at most a tenth of `steps`."""
    final_learning_rate: float = 0.1
    """Learning rate at the end of a cosine, linear or wsd schedule, as a fraction of the peak."""
    decay_steps: int = may_change(0, _NEW_RATE, by_extend=True)
    """The schedule ends after this step, and the learning rate stays constant. 0 means `steps`."""
    decay_fraction: float = 0.2
    """With `schedule` wsd: the fraction of the steps with a falling learning rate."""
    extend: Literal["no", "schedule", "cosine", "constant"] = may_change("no", _NEW_RATE, by_extend=True)
    """Learning rate of a run that is resumed with another number of `steps`. `schedule` recomputes the schedule over all steps,
    so the rate may jump. `constant` follows the old schedule to its end and stays constant. `cosine` is `schedule` for a
    cosine."""
    beta1: float = _UNSET
    """Decay rate of the first moment."""
    beta2: float = _UNSET
    """Decay rate of the second moment."""
    eps: float = _UNSET
    """Constant added to the square root of the second moment."""
    weight_decay: float = _UNSET
    """Decoupled weight decay. It applies to matrices, not to vectors such as norm scales."""
    clip_norm: float = 1.0
    """Maximum global norm of the gradient."""
    first_moment_dtype: DtypeName = "float32"
    """Dtype of the first moment."""
    second_moment_dtype: DtypeName = "float32"
    """Dtype of the second moment."""
    matrix_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the matmuls of muon. `auto` is bfloat16 if the model computes in bfloat16, else float32."""

    unset: Suppress[Fixed[Mapping[str, float]]] = field(default_factory=dict, compare=False, repr=False)
    """Numbers that nobody set, by name of the field. A field with another value than here has been set. Not in config.json."""

    def __post_init__(self):
        unset = {name: value for name, value in self.unset.items() if getattr(self, name) == value}
        unset |= {name: value for name, value in _DEFAULTS.items() if getattr(self, name) is None}
        self._set_unset(unset)
        check_types(self, prefix="optimizer.")
        check_choice("optimizer.name", self.name, OPTIMIZERS)
        require_positive(self, "learning_rate clip_norm", prefix="optimizer.")
        self._follow_optimizer(unset)
        self._check_hyperparameters()
        self._check_schedule()
        _ = self.keywords, self.parameter_groups

    def _set_unset(self, unset: Mapping[str, float]) -> None:
        for name, value in (*unset.items(), ("unset", unset)):
            object.__setattr__(self, name, value)

    def _follow_optimizer(self, unset: Mapping[str, float]) -> None:
        """Replaces unset numbers by the defaults of the optimizer. A hyperparameter that the optimizer does not have is 0."""
        for name in _HYPERPARAMETERS:
            default = getattr(OPTIMIZERS[self.name], name)
            if name in unset and self.name != "adamw":
                self._set_unset({**self.unset, name: default or 0.0})
            allowed = f"left out with `optimizer.name` {self.name}, which has no {name}"
            check_field(self, f"optimizer.{name}", default is not None or getattr(self, name) == 0, allowed)

    def with_defaults(self, **values: float) -> Self:
        """Returns a copy with other numbers that another setting may still replace, such as a short warmup for few `steps`."""
        return replace(self, **values, unset={**self.unset, **values})

    def _check_hyperparameters(self) -> None:
        if self.name == "adamw":
            require_positive(self, "eps", prefix="optimizer.")
        check_field(self, "optimizer.eps", 0 <= self.eps < math.inf, "0 or positive")
        muon_only = self.name == "muon" or self.matrix_dtype == "auto"
        check_field(self, "optimizer.matrix_dtype", muon_only, f"auto with `optimizer.name` {self.name}, which has no matmuls")
        check_field(self, "optimizer.warmup_steps", self.warmup_steps >= 0, "0 or positive")
        check_field(self, "optimizer.beta1", 0 <= self.beta1 < 1, "in [0, 1)")
        check_field(self, "optimizer.beta2", 0 <= self.beta2 < 1, "in [0, 1)")
        check_field(self, "optimizer.weight_decay", 0 <= self.weight_decay < math.inf, "0 or positive")

    def _check_schedule(self) -> None:
        check_field(self, "optimizer.final_learning_rate", 0 <= self.final_learning_rate <= 1, "in [0, 1]")
        check_field(self, "optimizer.decay_steps", self.decay_steps >= 0, "0 or positive")
        fits = self.decay_steps == 0 or self.extend in ("no", "constant")
        check_field(self, "optimizer.decay_steps", fits, f"0 if `optimizer.extend` is {self.extend}")
        with_schedule = f"with `optimizer.schedule` {self.schedule}"
        is_cosine = self.schedule == "cosine"
        check_field(self, "optimizer.extend", is_cosine or self.extend != "cosine", f"no, schedule or constant {with_schedule}")
        check_field(self, "optimizer.decay_fraction", 0 < self.decay_fraction <= 1, "in (0, 1]")
        default = type(self).decay_fraction
        allowed = f"left out {with_schedule}"
        check_field(self, "optimizer.decay_fraction", self.schedule == "wsd" or self.decay_fraction == default, allowed)
        if self.schedule in ("constant", "inverse-sqrt"):
            default = type(self).final_learning_rate
            check_field(self, "optimizer.final_learning_rate", self.final_learning_rate == default, allowed)

    @property
    def keywords(self) -> dict[str, Any]:
        """`args` as Python values by name. Does not check that the optimizer has the names."""
        found = {}
        for item in self.args:
            name, equals, text = item.partition("=")
            require(bool(equals) and name.isidentifier(), "optimizer.args", item, "name=value")
            try:
                found[name] = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                require(False, "optimizer.args", item, "name=value with a Python literal such as 0.9, True or \"'text'\"")
        return found

    @property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        groups = []
        for item in self.groups:
            pattern, _, text = item.rpartition(":")
            pairs = [pair.partition("=") for pair in text.split(",")]
            try:
                values = {key: float(value) for key, _, value in pairs}
            except ValueError:
                values = {}
            fits = bool(pattern and values) and len(values) == len(pairs) and values.keys() <= {"rate", "decay"}
            fits = fits and all(0 <= value < math.inf for value in values.values())
            require(fits, "optimizer.groups", item, "PATTERN:rate=FACTOR,decay=VALUE, with one or both, 0 or positive")
            has_decay = OPTIMIZERS[self.name].weight_decay is not None
            allowed = f"without decay with `optimizer.name` {self.name}, which has no weight_decay"
            require(has_decay or "decay" not in values, "optimizer.groups", item, allowed)
            groups.append(ParameterGroup(pattern, **values))
        return tuple(groups)
