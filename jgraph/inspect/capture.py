"""Reports the command buffers of a training step or of a user function."""

import dataclasses
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console

from jgraph.cli import Count, File, Name, optional
from jgraph.errors import ConfigError, JgraphError, os_errors, require
from jgraph.precision.config import FP8Config
from jgraph.train.config import TrainConfig
from jgraph.train.model import settings_of
from jgraph.train.presets import PRESETS, preset

if TYPE_CHECKING:
    from jgraph.xla.explain import Explanation


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """Report which operations of a program XLA captures in command buffers, why others stay outside, and its donations."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODULE:NAME", help_behavior_hint="")]
    """The program. A training step: MODULE:CLASS with --preset, MODULE:PRESET, or a preset such as gpt_124m or gpt-124m. Or a
    function without arguments that returns (fn, args) or (fn, args, donate_argnums)."""
    target: Annotated[str | None, optional(str, "GPU"), tyro.conf.arg(help_behavior_hint="")] = None
    """h200, h100 or b200: GPU to compile for; it need not be installed. Default: the device of this machine."""
    preset: Name = None
    """Preset with the sizes of the training step of a MODULE:CLASS."""
    batch_size: Count = None
    """Sequences per step; overrides the preset."""
    seq_len: Count = None
    """Tokens per sequence; overrides the preset."""
    graph: Literal["auto", "off", "full"] = "auto"
    """Command buffers: XLA's default (auto), none (off), or every command that XLA can record on one device (full)."""
    xla_options: tuple[str, ...] = ()
    """Additional XLA options as name=value; appended to those of the preset."""
    precision: Literal["bf16", "fp8"] = "bf16"
    """Dtype of the matmuls of the training step."""
    fp8: FP8Config = field(default_factory=FP8Config)
    json: File = None
    """File for the report as JSON."""

    def __post_init__(self):
        """Validates the sizes and the name of the preset."""
        for name, value in (("batch_size", self.batch_size), ("seq_len", self.seq_len)):
            require(value is None or value >= 1, name, value, "at least 1")
        if self.preset is not None:
            preset(self.preset)


def show_capture(options: CaptureOptions, console: Console) -> None:
    """Compiles the program without running it, writes the report to `options.json` and prints it.

    Args:
        options: The program and how to compile it.
        console: Console for the report.

    Raises:
        JgraphError: If the program does not exist or cannot be compiled, or the file cannot be written.
    """
    try:
        report = _explain(options)
    except (JgraphError, OSError):
        raise
    except (Exception, SystemExit) as e:  # user code and jax may raise any exception
        reason = f"{type(e).__name__}: {e}".strip().splitlines()[0]
        raise ConfigError(f"{options.name} cannot be compiled: {reason}", field="name") from e
    if options.json:
        with os_errors("json", options.json):
            options.json.write_text(report.to_json() + "\n", encoding="utf-8")
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)


def _explain(options: CaptureOptions) -> "Explanation":
    """Compiles the program and returns the report."""
    config = _training_config(options)
    # Imported after the options are checked, because importing jax is slow.
    import jax

    from jgraph.dispatch import check_devices
    from jgraph.xla import compiler_options
    from jgraph.xla.explain import explain

    platform = "gpu"
    if options.target is None:
        check_devices()
        platform = jax.default_backend()
    if config is None:
        chosen = compiler_options(options.graph, options.xla_options, platform=platform)
        fn, args, donated = _example(options.name)
        report = explain(fn, *args, donate_argnums=donated, target=options.target, compiler_options=chosen)
        return dataclasses.replace(report, name=f"{options.name}, {report.name}")
    from jgraph.train.setup import TrainSetup

    setup = TrainSetup.of(config)
    shapes = (setup.step.state, setup.batch())
    report = explain(setup.step.jitted(), *shapes, target=options.target, compiler_options=setup.options(platform))
    name = f"training step of {config.preset} ({config.module}), {config.input.batch_size} x {config.input.seq_len} tokens,"
    notes = report.notes
    if options.target is not None and getattr(config.model, "attention", "") == "xla":
        notes += ("attention is XLA's: a run on the GPU uses cuDNN's, which cannot be compiled without a GPU",)
    return dataclasses.replace(report, name=name, notes=notes)


def _training_config(options: CaptureOptions) -> TrainConfig | None:
    """Returns the training configuration of a model or preset, or None if the name is a function.

    Raises:
        ConfigError: If the name is unknown, or an option does not apply to it.
    """
    module, _, name = options.name.rpartition(":")
    preset_name = name.replace("_", "-")
    sizes = {field: value for field in ("batch_size", "seq_len") if (value := getattr(options, field)) is not None}
    if preset_name in PRESETS and (not module or not hasattr(_import(module), name)):
        base = preset(preset_name)
        if module and base.module.partition(":")[0] != module:
            raise ConfigError(f"{options.name} is not a class: use {module}:CLASS `preset` {preset_name}", field="name")
        if options.preset is not None:
            raise ConfigError(f"{options.name} is a preset: omit `preset` {options.preset}", field="preset")
    elif not module:
        raise ConfigError(f"{name!r} is neither MODULE:NAME nor a preset ({', '.join(PRESETS)})", field="name")
    elif inspect.isclass(_find(options.name)):
        if options.preset is None:
            raise ConfigError(f"{options.name} is a class: select its sizes with `preset` {'|'.join(PRESETS)}", field="preset")
        base, settings = preset(options.preset), settings_of(options.name)
        # The sizes of the preset apply only to models with the same settings class.
        model = base.model if settings and isinstance(base.model, settings) else None
        base = base.changed(module=options.name, model=model)
    else:
        given = [f"`{field}`" for field in ("preset", *sizes) if getattr(options, field) is not None]
        if given:
            raise ConfigError(f"{options.name} is a function and determines all sizes: omit {', '.join(given)}", field="name")
        return None
    if options.target is not None and getattr(base.model, "attention", "") == "auto":
        # cuDNN's attention can be compiled only on the GPU itself, not for another model of GPU.
        base = base.changed(model=dataclasses.replace(base.model, attention="xla"))
    xla_options = (*base.compile.xla_options, *options.xla_options)
    in_fp8 = {"precision": options.precision, "fp8": options.fp8}
    return base.changed(**sizes, **in_fp8, graph=options.graph, xla_options=xla_options)


def _example(name: str) -> tuple[Any, Sequence[Any], Any]:
    """Calls the named user function and returns its function, arguments and donate_argnums."""
    match _find(name)():
        case (fn, (*args,)) if callable(fn):
            return fn, args, ()
        case (fn, (*args,), donated) if callable(fn):
            return fn, args, donated
    raise ConfigError(f"{name}() must return (fn, args) or (fn, args, donate_argnums), with args a tuple", field="name")


def _find(name: str) -> Any:
    """Imports the module of MODULE:NAME and returns the class or function."""
    module, _, attribute = name.rpartition(":")
    found = getattr(_import(module), attribute, None)
    if not callable(found):
        problem = f"has no {attribute!r}" if found is None else f"has {attribute!r}, of type {type(found).__name__}"
        raise ConfigError(f"{module} {problem}: must be a class or a function", field="name")
    return found


def _import(module: str) -> Any:
    """Imports a module; raises ConfigError for any exception."""
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as e:  # the import of a user module may raise any exception
        reason = f"{type(e).__name__}: {e}".splitlines()[0]
        raise ConfigError(f"{module} cannot be imported: {reason}", field="name") from e
