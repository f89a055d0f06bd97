"""Imports a model class by name, reads its settings, and reports errors of its code in one line. No JAX here."""

import contextlib
import importlib
import inspect
import re
import traceback
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from jgraph.errors import ConfigError, JgraphError, check_types, require
from jgraph.settings import may_change

R = TypeVar("R")


@dataclass(frozen=True)
class Experts:
    """What jgraph reads of `moe` in the settings of a model. Each field is optional there."""

    num_experts: int = 0
    experts_per_token: int = 1
    # Factor of the expert buffers. After a step that exceeds it, the run continues with a larger factor.
    capacity: float | None = may_change(None, "the capacity changes no step unless tokens are dropped")


class ModelSettings(Protocol):
    """Settings of a model: the dataclass that its constructor takes as first argument.

    jgraph reads these attributes and methods of the settings. Each is optional, which a Protocol cannot express, and None
    counts as missing. `SettingsHooks` has the defaults.
    """

    vocab_size: int
    """Rows of the embedding, compared with the vocabulary of the data. If missing, the data is not checked."""

    compute_dtype: str
    """Name of the dtype that sharded matrices are cast to before they are gathered and used. If missing, they are not cast.

    Without a preset, a run that starts with the weights of a Hugging Face folder sets it to the dtype of the folder.
    """

    scan_layers: bool
    """True if parameters of layers are stacked along a first axis, for Muon. If missing, each layer has its own."""

    attention: str
    """Attention kernel. With `auto`, unless in float32, `jgraph.inspect` and `jgraph.plan` set another one to compile for a GPU
    that is not present: `flash` where it runs, if the annotation offers it, or else `xla`.

    If missing or another value, they compile the model as it is.
    """

    moe: Experts
    """Settings of experts, for example a `jgraph.MoEConfig`. If missing, the model has no experts."""

    num_layers: int
    """Number of equal layers. `jgraph.plan` traces two and four of them. If missing, it traces the whole model."""

    d_model: int
    """Width of the residual stream, for transfers that `jgraph.plan` estimates. If missing, those of `tp` and `pp` are 0."""

    num_kv_heads: int
    """Heads of keys and values, for the transfers of `cp` that `jgraph.plan` estimates. If missing, they are 0."""

    head_size: int
    """Width of a head, as `num_kv_heads`."""

    def flops(self, sequences: int, length: int) -> float:
        """Computes the FLOPs of loss and gradients, for the logged model FLOPs utilization.

        If missing, three times the FLOPs of the matmuls in the traced loss are logged.

        Args:
            sequences: Number of sequences of a step.
            length: Number of predicted tokens per sequence.

        Returns:
            The FLOPs of all sequences.
        """
        ...

    def in_fp8(self) -> Self:
        """Adapts the settings to `--precision fp8`, after calibration. If missing, the settings do not change.

        Returns:
            Settings of the same class, with the same parameters.
        """
        ...

    def with_visible_matmuls(self) -> Self:
        """Adapts the settings to FP8 and LoRA, which do not find matmuls inside `jax.shard_map`.

        If missing, the settings do not change.

        Returns:
            Settings of the same class, with the same parameters.

        Raises:
            ConfigError: If a setting requires such matmuls.
        """
        ...


@dataclass(frozen=True)
class SettingsHooks:
    """The members of `ModelSettings` that the settings of a model have, and a default for each other member.

    Methods take the settings as their first argument.
    """

    vocab_size: int = 0
    compute_dtype: str | type | None = None
    scan_layers: bool = False
    attention: str | None = None
    moe: Experts | None = None
    num_layers: int = 0
    d_model: int = 0
    num_kv_heads: int = 0
    head_size: int = 0
    flops: Callable[[ModelSettings, int, int], float] | None = None
    in_fp8: Callable[[ModelSettings], ModelSettings] = lambda settings: settings
    with_visible_matmuls: Callable[[ModelSettings], ModelSettings] = lambda settings: settings


def settings_hooks(module: str, settings: ModelSettings | None) -> SettingsHooks:
    """Resolves the hooks in the settings of a model. Their methods raise ConfigError if they return another type."""
    kind = type(settings)
    found = present(SettingsHooks, settings, module, flops=Real, in_fp8=kind, with_visible_matmuls=kind)
    if "moe" in found:
        found["moe"] = Experts(**present(Experts, found["moe"], module))
        check_types(found["moe"], prefix="model.moe.")
    hooks = SettingsHooks(**found)
    check_types(hooks, prefix="model.")
    return hooks


def present(hooks: type, source: Any, module: str, **methods: type) -> dict[str, Any]:
    """Returns the attributes of `source`, a class or an object, that are fields of the dataclass `hooks`, and are not None.

    A method of `methods` is checked: its result has this type. Methods of an object take it as their first argument.
    """
    found = {each.name: getattr(source, each.name, None) for each in fields(hooks)}
    found = {name: value for name, value in found.items() if value is not None}
    owner = source if isinstance(source, type) else type(source)
    for name in methods.keys() & found.keys():
        found[name] = _checked(module, name, getattr(owner, name, found[name]), methods[name])
    return found


def _checked(module: str, name: str, method: Callable[..., R], result: type[R]) -> Callable[..., R]:
    must = f"have {name}(...), a method that returns a {result.__name__}"
    if not callable(method):
        raise ConfigError(f"`module` is {module}: must {must} (it is a {type(method).__name__})", field="module")

    def call(*args: Any) -> R:
        with model_errors(module, must):
            found = method(*args)
            if not isinstance(found, result):
                raise TypeError(f"it returns {found!r}")
        return found

    return call


def find_model(name: str) -> Any:
    """Imports the model class `package.module:Class`, which runs the code of the module."""
    module, _, class_name = name.partition(":")
    with model_errors(name, "be package.module:Class, with a module that can be imported from here"):
        return getattr(importlib.import_module(module), class_name)


def is_class_name(name: object) -> bool:
    """Returns True for `package.module:Class`. Does not import the class."""
    return isinstance(name, str) and re.fullmatch(r"[\w.]+:\w+", name) is not None


def is_built_in(name: str) -> bool:
    """Returns True if the class is in `jgraph_models`. Does not import it."""
    return re.split(r"[.:]", name)[0] == "jgraph_models"


def check_import(saved: str, named: str) -> None:
    """Checks that a saved configuration names a model class, and that it may be imported.

    An import runs the code of the module, and the author of a saved configuration may not be trusted. A class outside
    `jgraph_models` must therefore be named by the caller too.
    """
    require(is_class_name(saved), "module", repr(saved), "package.module:Class")
    if is_built_in(saved):
        require(named in ("", saved), "module", named, f"{saved}, as in the run's config.json, or left out")
    elif named != saved:
        raise ConfigError(
            f"`module` is {saved} in the run's config.json: an import runs its code, so it is imported only if you name it; "
            f"if you trust it, pass `module` {saved}",
            field="module",
        )


def settings_of(name: str) -> type | None:
    """Imports a model class and returns the annotated type of its first argument, if that is a dataclass."""
    found = find_model(name)
    try:
        # The signature of an NNX class itself accepts anything.
        hints = typing.get_type_hints(found.__init__)
        _, *names = inspect.signature(found.__init__).parameters
        first = hints.get(names[0]) if names else None
    except (NameError, TypeError, ValueError):
        return None
    return first if isinstance(first, type) and is_dataclass(first) else None


def settings_from(kind: type, fields: dict[str, Any]) -> Any:
    """Restores model settings from a dict, the inverse of `dataclasses.asdict`. Supports one level of nested dataclasses."""
    hints = typing.get_type_hints(kind)
    return kind(
        **{
            name: hints[name](**value) if isinstance(value, dict) and is_dataclass(hints.get(name)) else value
            for name, value in fields.items()
        }
    )


def _described(error: Exception) -> str:
    """Describes an error in one line, with the last traceback frame in the user's code."""
    ours = str(Path(__file__).parent)
    places = [
        f" at {frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((ours, "<")) and not {"site-packages", "importlib"} & set(Path(frame.filename).parts)
    ]
    line = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {line}{places[-1] if places else ''}"


@contextlib.contextmanager
def model_errors(name: str, must: str) -> Iterator[None]:
    """Converts exceptions of a user's model into a ConfigError of one line, which names the line of the user's code.

    `must` is the requirement that the class does not meet, for example `have loss(tokens_BS)`.
    """
    try:
        yield
    except JgraphError:
        raise
    except Exception as e:
        raise ConfigError(f"`module` is {name}: must {must} ({_described(e)})", field="module") from e
