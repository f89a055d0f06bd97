"""Reports the command buffers of a training step or of a user function."""

import contextlib
import dataclasses
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, get_args, get_type_hints

import tyro

from jgraph.cli import Count, File, Name, as_flags, example, fields_of, find, interruptible, optional, reason
from jgraph.device import DEVICES
from jgraph.errors import ConfigError, JgraphError, os_errors, require
from jgraph.precision.config import FP8Config
from jgraph.train.config import TrainConfig
from jgraph.train.model import settings_of
from jgraph.train.presets import PRESETS, preset

if TYPE_CHECKING:
    from jgraph.xla.explain import Explanation

_FP8 = FP8Config()
_Graph = Literal["auto", "off", "full"]


def capture(
    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODULE:NAME", help_behavior_hint="")],
    /,
    *,
    target: Annotated[str | None, optional(str, "GPU"), tyro.conf.arg(help_behavior_hint="")] = None,
    preset: Name = None,
    batch_size: Count = None,
    seq_len: Count = None,
    num_microbatches: Count = None,
    dp: Count = None,
    fsdp: Count = None,
    ep: Count = None,
    pp: Count = None,
    cp: Count = None,
    tp: Count = None,
    graph: _Graph = "auto",
    xla_options: tuple[str, ...] = (),
    precision: Literal["bf16", "fp8"] = "bf16",
    fp8: FP8Config = _FP8,
    json: File = None,
) -> None:
    """Report which operations of a program XLA captures in command buffers, why others stay outside, and its donations.

    The program is compiled but does not run. The report is printed as text.

    Args:
        name: The program. A training step: a preset such as gpt-124m, or MODULE:CLASS with --preset. Or MODULE:FUNCTION
            or FILE.py:FUNCTION, a function without arguments that returns (fn, args) or (fn, args, donate_argnums).
        target: h200, h100 or b200, a GPU to compile for; this machine need not have it. Default: the device of this machine.
        preset: Preset with the sizes of the training step of a MODULE:CLASS.
        batch_size: Sequences per step, at least 1; overrides the preset. Not for a FUNCTION.
        seq_len: Tokens per sequence, at least 1; overrides the preset. Not for a FUNCTION.
        num_microbatches: Microbatches per step, 1 by default. Not for a FUNCTION. The same holds for the next six flags, which
            have the meaning that they have for `python -m jgraph.train`.
        dp: Data-parallel replicas.
        fsdp: Devices that parameters, gradients and optimizer state are sharded over.
        ep: Devices that experts are sharded over.
        pp: Pipeline ranks.
        cp: Devices that the tokens of each sequence are divided between.
        tp: Devices that each matrix is split over.
        graph: Command buffers: XLA's default (auto), none (off), or every command that XLA can record on one device (full).
        xla_options: Additional XLA options as name=value; appended to those of the preset.
        precision: Dtype of the matmuls of the training step. No effect on a FUNCTION.
        fp8: Settings of the FP8 matmuls. No effect on a FUNCTION.
        json: File for the report as a JSON object with the keys name, device, capture, donations, memory, fp8,
            collectives and notes. Replaced if it exists.

    Raises:
        JgraphError: If the program does not exist or cannot be compiled, an option does not apply to it, the GPU is unknown or
            its compiler is not installed, or the file cannot be written.
    """
    given = {"batch_size": batch_size, "seq_len": seq_len, "num_microbatches": num_microbatches}
    given |= {"dp": dp, "fsdp": fsdp, "ep": ep, "pp": pp, "cp": cp, "tp": tp}
    sizes = {field: size for field, size in given.items() if size is not None}
    for field, size in sizes.items():
        require(size >= 1, field, size, "at least 1")
    try:
        config = _training_config(name, preset, sizes)
        if config is not None:
            options = (*config.compile.xla_options, *xla_options)
            config = config.changed(**sizes, precision=precision, fp8=fp8, graph=graph, xla_options=options)
        report = _explain(name, config, target, graph, xla_options)
    except (JgraphError, OSError):
        raise
    except (Exception, SystemExit) as e:  # user code and jax may raise any exception
        raise ConfigError(f"{name} cannot be compiled: {reason(e)}", field="name") from e
    if json:
        with os_errors("json", json):
            json.write_text(report.to_json() + "\n", encoding="utf-8")
    print(as_flags(str(report), fields_of(capture)))


def _explain(
    name: str, config: TrainConfig | None, target: str | None, graph: _Graph, xla_options: Sequence[str]
) -> "Explanation":
    """Compiles the training step of `config`, or the user function `name` if `config` is None, and returns the report."""
    # Imported after the arguments are checked, because importing jax is slow.
    import jax

    from jgraph.dispatch import check_devices
    from jgraph.xla import aot, compiler_options
    from jgraph.xla.explain import explain

    if target is None:
        check_devices()
    platform = "gpu" if target is not None else jax.default_backend()
    if config is None:
        chosen = compiler_options(graph, xla_options, platform=platform)
        fn, args, donated = example(name, find(name)())
        with interruptible(f"compiling {name}"):
            report = explain(fn, *args, donate_argnums=donated, target=target, compiler_options=chosen)
        return dataclasses.replace(report, name=f"{name}, {report.name}")
    from jgraph.train.setup import TrainSetup

    if target is not None and config.parallel.num_devices > 1:
        # The mesh of the step needs as many devices as ranks, before it is moved to the target. JAX refuses the setting if its
        # devices are known already; too few devices are then an error of the setup.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", config.parallel.num_devices)
    notes = ()
    # With `cp`, attention is a Pallas kernel.
    is_library = config.parallel.cp == 1 and config.hooks.attention in ("auto", "xla")
    if target is not None and is_library:
        # cuDNN's attention can be compiled only on the GPU itself, not for another model of GPU.
        kernel, about = _attention_for(target, config)
        config = config.changed(model=dataclasses.replace(config.model, attention=kernel))
        notes = (f"attention is {about}: a run on the GPU uses cuDNN's, which cannot be compiled without a GPU",)
    with interruptible("tracing the model"):
        setup = TrainSetup.from_config(config)
        step = setup.step
        batch = setup.batch()
        if target is not None and step.mesh is not None:
            step = step.on(aot.devices(step.num_devices, gpu=target))
            batch = step.placed_shapes(batch)
    with interruptible("compiling the training step"):
        report = explain(step.jitted(), step.state, batch, target=target, compiler_options=setup.options(platform))
    title = f"training step of {config.preset} ({config.module}), {config.input.batch_size} x {config.input.seq_len} tokens,"
    title += f" on {setup.step.num_devices} devices," if setup.step.num_devices > 1 else ""
    return dataclasses.replace(report, name=title, notes=report.notes + notes)


def _attention_for(target: str, config: TrainConfig) -> tuple[str, str]:
    """Returns the attention for an absent GPU, and its description: XLA's, or a kernel that holds no scores, as cuDNN's."""
    import jax

    is_hopper = any(device.aot == target and device.capability == (9, 0) for device in DEVICES)
    is_offered = "flash" in get_args(get_type_hints(type(config.model)).get("attention"))
    is_supported = config.hooks.compute_dtype == "bfloat16" and config.hooks.head_size <= 128
    if is_hopper and is_offered and is_supported and jax.__version_info__ >= (0, 11):
        return "flash", "jgraph's, which needs as much memory"
    return "xla", "XLA's"


def _training_config(name: str, preset_name: str | None, sizes: dict[str, int]) -> TrainConfig | None:
    """Returns the configuration of a model or preset, or None if the name is a function. `sizes` override the preset."""
    chosen = None if preset_name is None else preset(preset_name)
    module, _, attribute = name.rpartition(":")
    if name in PRESETS:
        if chosen is not None:
            raise ConfigError(f"{name} is a preset: leave out `preset` {preset_name}", field="preset")
        return preset(name)
    if not module:
        raise ConfigError(f"{attribute!r} is neither MODULE:NAME nor a preset ({', '.join(PRESETS)})", field="name")
    if inspect.isclass(find(name)):
        if chosen is None:
            raise ConfigError(f"{name} is a class: select its sizes with `preset`, one of {', '.join(PRESETS)}", field="preset")
        # The sizes of the preset apply only to models with the same settings class.
        settings = settings_of(name)
        model = chosen.model if settings and isinstance(chosen.model, settings) else None
        return dataclasses.replace(chosen, module=name, model=model)
    given = [*sizes] if chosen is None else ["preset", *sizes]
    if given:
        fields = ", ".join(f"`{field}`" for field in given)
        raise ConfigError(f"{name} is a function and determines all sizes: leave out {fields}", field="name")
    return None
