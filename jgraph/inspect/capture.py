"""Shows which parts of a training step, or of a function of one's own, become command buffers."""

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
from jgraph.training.config import TrainConfig
from jgraph.training.model import settings_of
from jgraph.training.presets import PRESETS, preset

if TYPE_CHECKING:
    from jgraph.xla.explain import Explanation


@dataclass(frozen=True, kw_only=True)
class CaptureOptions:
    """Say what of a program becomes command buffers, what stays outside and why, and what became of donated buffers."""

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODULE:NAME", help_behavior_hint="")]
    """A model's training step: MODULE:CLASS with --preset, MODULE:PRESET or a preset alone (gpt_124m or gpt-124m). Or a
    function without arguments that returns (fn, args) or (fn, args, donate_argnums)."""
    target: Annotated[str | None, optional(str, "GPU"), tyro.conf.arg(help_behavior_hint="")] = None
    """h200, h100 or b200: compile for that GPU without having one; left out, for the device at hand."""
    preset: Name = None
    """Sizes of the training step of a MODULE:CLASS."""
    batch_size: Count = None
    """Sequences per step, instead of the preset's."""
    seq_len: Count = None
    """Tokens per sequence, instead of the preset's."""
    graph: Literal["auto", "off", "full"] = "auto"
    """Command buffers: XLA's default, none, or all that XLA can record on one device."""
    xla_options: tuple[str, ...] = ()
    """Further XLA options as name=value, besides those of the preset."""
    precision: Literal["bf16", "fp8"] = "bf16"
    """Dtype in which the training step multiplies matrices."""
    fp8: FP8Config = field(default_factory=FP8Config)
    json: File = None
    """Write the report here."""

    def __post_init__(self):
        for name, value in (("batch_size", self.batch_size), ("seq_len", self.seq_len)):
            require(value is None or value >= 1, name, value, "at least 1")
        if self.preset is not None:
            preset(self.preset)


def show_capture(options: CaptureOptions, console: Console) -> None:
    """Compiles the program, runs nothing, writes the report to the file that was asked for, and prints it.

    Raises:
        JgraphError: there is no such program, it cannot be compiled as asked, or a file cannot be written.
    """
    try:
        report = _explain(options)
    except (JgraphError, OSError):
        raise
    except (Exception, SystemExit) as e:  # of the user's code, or of jax about it
        said = f"{type(e).__name__}: {e}".strip().splitlines()[0]
        raise ConfigError(f"{options.name} cannot be compiled: {said}", field="name") from e
    if options.json:
        with os_errors("json", options.json):
            options.json.write_text(report.to_json() + "\n", encoding="utf-8")
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)


def _explain(options: CaptureOptions) -> "Explanation":
    config = _training_config(options)
    # Only now: jax takes its time.
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
    from jgraph.training.setup import TrainSetup

    setup = TrainSetup.of(config)
    shapes = (setup.step.state, setup.batch())
    report = explain(setup.step.jitted(), *shapes, target=options.target, compiler_options=setup.options(platform))
    name = f"training step of {config.preset} ({config.module}), {config.batch_size} x {config.seq_len} tokens,"
    notes = report.notes
    if options.target is not None and getattr(config.model, "attention", "") == "xla":
        notes += ("attention is XLA's: cuDNN's, which a run on the GPU would take, cannot be compiled without one",)
    return dataclasses.replace(report, name=name, notes=notes)


def _training_config(options: CaptureOptions) -> TrainConfig | None:
    """Returns the run whose step is meant; None if the name is not that of a model or preset."""
    module, _, name = options.name.rpartition(":")
    called = name.replace("_", "-")
    sizes = {field: value for field in ("batch_size", "seq_len") if (value := getattr(options, field)) is not None}
    if called in PRESETS and (not module or not hasattr(_import(module), name)):
        base = preset(called)
        if module and base.module.partition(":")[0] != module:
            raise ConfigError(f"{options.name} names no class: give {module}:CLASS `preset` {called}", field="name")
        if options.preset is not None:
            raise ConfigError(f"{options.name} is a preset: leave out `preset` {options.preset}", field="preset")
    elif not module:
        raise ConfigError(f"{name!r} is neither MODULE:NAME nor a preset ({', '.join(PRESETS)})", field="name")
    elif inspect.isclass(_find(options.name)):
        if options.preset is None:
            raise ConfigError(f"{options.name} is a class: give its sizes, `preset` {'|'.join(PRESETS)}", field="preset")
        base, settings = preset(options.preset), settings_of(options.name)
        # In the preset's sizes, if it has the same settings.
        model = base.model if settings and isinstance(base.model, settings) else None
        base = dataclasses.replace(base, module=options.name, model=model)
    else:
        given = [f"`{field}`" for field in ("preset", *sizes) if getattr(options, field) is not None]
        if given:
            raise ConfigError(f"{options.name} is no class, and says everything: leave out {', '.join(given)}", field="name")
        return None
    if options.target is not None and getattr(base.model, "attention", "") == "auto":
        # cuDNN's attention cannot be compiled without a GPU, also where there is one of another kind.
        base = dataclasses.replace(base, model=dataclasses.replace(base.model, attention="xla"))
    xla_options = (*base.xla_options, *options.xla_options)
    in_fp8 = {"precision": options.precision, "fp8": options.fp8}
    return dataclasses.replace(base, **sizes, **in_fp8, graph=options.graph, xla_options=xla_options)


def _example(name: str) -> tuple[Any, Sequence[Any], Any]:
    """Returns function, arguments and donate_argnums, as the function of that name gives them."""
    match _find(name)():
        case (fn, (*args,)) if callable(fn):
            return fn, args, ()
        case (fn, (*args,), donated) if callable(fn):
            return fn, args, donated
    raise ConfigError(f"{name}() must return (fn, args) or (fn, args, donate_argnums), args a tuple", field="name")


def _find(name: str) -> Any:
    module, _, attribute = name.rpartition(":")
    found = getattr(_import(module), attribute, None)
    if not callable(found):
        what = "nothing" if found is None else f"no function but a {type(found).__name__}"
        raise ConfigError(f"{module} has {what} called {attribute!r}: must be a class or a function", field="name")
    return found


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as e:  # whatever the module does when it is imported
        said = f"{type(e).__name__}: {e}".splitlines()[0]
        raise ConfigError(f"{module} cannot be imported from here: {said}", field="name") from e
