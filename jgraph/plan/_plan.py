"""Searches the layouts of a model on a number of GPUs: which fit, how fast each may be, and its command line."""

import dataclasses
import itertools
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jgraph.device import DEVICES, Device
from jgraph.errors import ConfigError, JgraphError, check_choice, require
from jgraph.plan._compile import Compiled, compile_steps
from jgraph.plan._lifetimes import Attention
from jgraph.plan._memory import Memory, Predictor, State
from jgraph.plan._speed import Speed, estimate
from jgraph.train.config import TrainConfig
from jgraph.train.presets import PRESETS
from jgraph.xla import aot

# JAX uses this share of the memory of a GPU with XLA_CLIENT_MEM_FRACTION=0.93, and three quarters by default.
USABLE, USED_BY_DEFAULT = 0.93, 0.75
# Part of the predicted peak that is added before it is compared with the memory. Measured and compiled steps of the present
# loss need up to 8% (`benchmarks/results/plans.json`). Pipelines are compared with three compiled steps, which need up to 8%.
MARGIN, MARGIN_OF_PIPELINES, MARGIN_OF_XLA_ATTENTION = 0.1, 0.2, 0.36
BEST, TRIES = 3, 6
"""Layouts with a command line, and layouts that are compiled at most to find them."""
AXES = ("dp", "fsdp", "ep", "pp", "cp", "tp")
_FLAGS = (*AXES, "num_microbatches", "remat", "precision")

Precision = Literal["bf16", "fp8", "both"]
Check = Literal["arithmetic", "compiler"]


@dataclass(frozen=True)
class Option:
    """A layout with its fastest choice of recomputation and microbatches that fits, or else that with the least memory.

    Attributes:
        config: The complete configuration.
        memory: Predicted bytes of each GPU.
        speed: Estimated speed.
        fits: True if the predicted peak with the margin is at most the usable memory.
        command: Command line of the run, without data.
        compiled: The compiled step. None if it was not compiled.
    """

    config: TrainConfig
    memory: Memory
    speed: Speed
    fits: bool
    command: str
    compiled: Compiled | None = None

    @property
    def layout(self) -> str:
        """The axes with several devices, as flags."""
        sizes = {axis: getattr(self.config.parallel, axis) for axis in AXES}
        return " ".join(f"--{axis} {size}" for axis, size in sizes.items() if size > 1) or "one GPU"


@dataclass(frozen=True)
class Plan:
    """The layouts of a model on a number of GPUs. Made by `jgraph.plan`. `str` formats it as a table.

    Attributes:
        name: The preset or the folder.
        gpu: Short name of the GPU.
        gpus: Number of GPUs.
        tokens: Tokens of a step.
        params: Number of parameters.
        usable: Bytes of a GPU that JAX uses at most.
        options: The options that fit, fastest first, and then the others, that with the least memory first.
        refused: Number of layouts by the reason why the configuration or the model refuses them.
        check: `compiler` if the fastest layouts were compiled.
    """

    name: str
    gpu: str
    gpus: int
    tokens: int
    params: int
    usable: float
    options: tuple[Option, ...]
    refused: dict[str, int]
    check: Check = "arithmetic"

    @property
    def best(self) -> tuple[Option, ...]:
        """The three fastest options that fit. With `check` compiler, the compiled ones."""
        return tuple(option for option in self.options if self._is_confirmed(option))[:BEST]

    def _is_confirmed(self, option: Option) -> bool:
        if self.check == "arithmetic":
            return option.fits
        peak = option.compiled and option.compiled.peak
        return peak is not None and peak <= self.usable

    def __str__(self) -> str:
        from jgraph.plan._report import text

        return text(self)


def plan(
    source: str | Path | TrainConfig,
    *,
    gpu: str = "h100",
    gpus: int = 8,
    batch_size: int | None = None,
    seq_len: int | None = None,
    finetune: Literal["full", "lora"] = "full",
    precision: Precision = "bf16",
    check: Check = "arithmetic",
) -> Plan:
    """Predicts the memory and estimates the speed of every layout of a model on a number of GPUs.

    The state of each GPU is exact. Temporary arrays are predicted from traces of a few layers, and speeds are estimates.

    Args:
        source: A preset, the path of a Hugging Face folder, or a configuration. Of a configuration, axes, microbatches,
            recomputation and precision are replaced.
        gpu: `h100`, `h200` or `b200`.
        gpus: Number of GPUs. Eight share a node.
        batch_size: Sequences per step. By default those of the preset, but at least one for each GPU.
        seq_len: Tokens per sequence; None for those of the preset.
        finetune: `full` trains all weights, `lora` trains adapters of rank 16.
        precision: Dtype of the matmuls of the layers: `bf16`, `fp8`, or `both` to compare them.
        check: `arithmetic` compiles nothing. `compiler` compiles the fastest layouts that fit for the GPU, which need not be
            present: until three fit by XLA's buffer assignment, or six were compiled. Each compiles in a process of its own.

    Returns:
        The options, of which `best` has the three fastest that fit.

    Raises:
        ConfigError: If an argument has a value that is not allowed, or the model refuses all layouts.
        TargetError: If `check` is compiler, and NVIDIA's compiler is not installed.

    Examples:
        >>> found = jgraph.plan("gpt-124m", gpu="h200", gpus=1)
        >>> found.best[0].fits, found.options[0].config.parallel.num_devices
        (True, 1)
    """
    device = _device(gpu)
    require(gpus >= 1, "gpus", gpus, "at least 1")
    check_choice("finetune", finetune, ("full", "lora"))
    check_choice("precision", precision, ("bf16", "fp8", "both"))
    check_choice("check", check, ("arithmetic", "compiler"))
    if check == "compiler":
        aot.devices(gpu=gpu)  # raises an error now if there is no compiler
    base = _base(source, seq_len, finetune)
    base = base.changed(batch_size=batch_size or max(base.input.batch_size, gpus))
    usable = usable_of(gpu)
    predictor = Predictor(device, attention_of(base))
    found: list[Option] = []
    refused: Counter[str] = Counter()
    for each in ("bf16", "fp8") if precision == "both" else (precision,):
        # The first layouts, with the smallest state, give a bound for the others.
        for sizes in sorted(layouts(base, gpus), key=lambda sizes: sizes["dp"] * sizes["cp"]):
            try:
                found.append(_best(base, sizes | {"precision": each}, predictor, usable))
            except JgraphError as e:
                refused[str(e)] += 1
    if not found:
        raise ConfigError(f"`gpus` is {gpus}: no layout is possible ({next(iter(refused))})", field="gpus")
    order = sorted(found, key=lambda o: (not o.fits, -o.speed.tokens_per_second if o.fits else o.memory.peak))
    name = base.preset if isinstance(source, TrainConfig) else str(source)
    tokens = base.input.batch_size * base.input.seq_len
    planned = Plan(name, gpu, gpus, tokens, predictor.params, usable, tuple(order), dict(refused))
    return _confirmed(planned) if check == "compiler" else planned


def _confirmed(plan: Plan) -> Plan:
    """Compiles the fastest options that fit, until the compiler confirms enough of them or has tried enough."""
    found = dataclasses.replace(plan, check="compiler")
    waiting = [i for i, option in enumerate(plan.options) if option.fits][:TRIES]
    while waiting and (missing := BEST - len(found.best)):
        chosen, waiting = waiting[:missing], waiting[missing:]
        options = list(found.options)
        for i, compiled in zip(chosen, compile_steps([options[i].config for i in chosen], plan.gpu), strict=True):
            options[i] = dataclasses.replace(options[i], compiled=compiled)
        found = dataclasses.replace(found, options=tuple(options))
    return found


def layouts(config: TrainConfig, gpus: int) -> Iterator[dict[str, int]]:
    """Yields the sizes of the axes of each layout on `gpus` devices."""
    moe = config.hooks.moe
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    for dp, fsdp, pp, cp in itertools.product(divisors, repeat=4):
        tp, rest = divmod(gpus, dp * fsdp * pp * cp)
        if rest or not tp:
            continue
        ranks = fsdp if fsdp > 1 else dp
        for ep in divisors if moe is not None and moe.num_experts else (1,):
            if ranks % ep == 0:
                yield {"dp": dp, "fsdp": fsdp, "ep": ep, "pp": pp, "cp": cp, "tp": tp}


def _best(base: TrainConfig, fields: Mapping[str, object], predictor: Predictor, usable: float) -> Option:
    """Returns the fastest choice of recomputation and microbatches that fits, or that with the least memory."""
    candidates = _candidates(base, fields)
    smallest = candidates[-1]
    bound = predictor.at_least(smallest)
    state = State(round(bound), 0) if bound > usable else predictor.state(smallest)

    def option(config: TrainConfig) -> Option:
        # The state decides, if it does not fit itself.
        memory = Memory(state.total, 0, 0, 0, 0) if state.total > usable else predictor.memory(config)
        return _option(config, memory, state, predictor, usable)

    least = option(smallest)
    if not least.fits:
        return least
    times = [(estimate(config, predictor.device, state, predictor.params).step, i) for i, config in enumerate(candidates)]
    found = (option(candidates[i]) for _, i in sorted(times))
    return next(each for each in found if each.fits)


def predict(config: TrainConfig, gpu: str) -> Option:
    """Predicts the memory and the speed of one configuration, as it is. Raises ConfigError if the model refuses it."""
    predictor = Predictor(_device(gpu), attention_of(config))
    memory = predictor.memory(config)
    return _option(config, memory, predictor.state(config), predictor, usable_of(gpu))


def usable_of(gpu: str) -> float:
    """Returns the bytes of a GPU that JAX uses at most."""
    return USABLE * aot.memory_of(gpu)


def _option(config: TrainConfig, memory: Memory, state: State, predictor: Predictor, usable: float) -> Option:
    fits = memory.peak * (1 + margin(config)) <= usable
    speed = estimate(config, predictor.device, state, predictor.params)
    return Option(config, memory, speed, fits, command(config, memory, usable))


def margin(config: TrainConfig) -> float:
    """Returns the part of a predicted peak that is added before it is compared with the memory."""
    if attention_of(config) == "xla":
        return MARGIN_OF_XLA_ATTENTION
    return MARGIN_OF_PIPELINES if config.is_pipeline else MARGIN


def attention_of(config: TrainConfig) -> Attention:
    """Returns the attention that runs on the GPU: cuDNN's in bfloat16, unless the settings of the model ask for another."""
    is_cudnn = config.hooks.attention != "xla" and str(config.hooks.compute_dtype) == "bfloat16"
    return "cudnn" if is_cudnn else "xla"


def _candidates(base: TrainConfig, fields: Mapping[str, object]) -> list[TrainConfig]:
    """Returns the configurations of a layout that the configuration accepts. Raises its error if there is none."""
    found: list[TrainConfig] = []
    error: JgraphError | None = None
    counts = [2**i for i in range(base.input.batch_size.bit_length()) if base.input.batch_size % 2**i == 0]
    for count, remat in itertools.product(counts, ("nothing", "layer")):
        try:
            found.append(base.changed(**fields, num_microbatches=count, remat=remat))
        except JgraphError as e:
            error = error or e
    if not found:
        assert error is not None, "there is a candidate"
        raise error
    return found


def command(config: TrainConfig, memory: Memory, usable: float) -> str:
    """Returns the command line of a run with a configuration, without data."""
    source = ["--init-from", config.initial.init_from] if config.initial.init_from else ["--preset", config.preset]
    default = TrainConfig()
    words = [*source, "--batch-size", str(config.input.batch_size), "--seq-len", str(config.input.seq_len)]
    if config.lora.rank:
        words += ["--lora.rank", str(config.lora.rank)]
    for name in _FLAGS:
        for part in (config.parallel, config.input, config.compile, config.dtypes):
            if hasattr(part, name) and getattr(part, name) != getattr(getattr(default, _PARTS[type(part).__name__]), name):
                words += [f"--{name.replace('_', '-')}", str(getattr(part, name))]
    is_larger = memory.peak * (1 + margin(config)) > usable / USABLE * USED_BY_DEFAULT
    fraction = f"XLA_CLIENT_MEM_FRACTION={USABLE} " if is_larger else ""
    return f"{fraction}python -m jgraph.train {shlex.join(words)}"


_PARTS = {"ParallelConfig": "parallel", "InputConfig": "input", "CompileConfig": "compile", "DtypeConfig": "dtypes"}


def _device(gpu: str) -> Device:
    devices = {device.aot: device for device in DEVICES if device.aot}
    check_choice("gpu", gpu, tuple(devices))
    return devices[gpu]


def check_source(source: str | Path, name: str) -> None:
    """Raises ConfigError if there is no such preset or folder. `name` is the argument as its user knows it."""
    is_known = str(source) in PRESETS or Path(source).is_dir()
    require(is_known, name, source, f"a preset ({', '.join(PRESETS)}) or a Hugging Face folder")


def _base(source: str | Path | TrainConfig, seq_len: int | None, finetune: str) -> TrainConfig:
    """Returns the configuration of a run on one device."""
    flags: list[str] = [] if seq_len is None else ["--seq-len", str(seq_len)]
    flags += ["--lora.rank", "16"] if finetune == "lora" else []
    if isinstance(source, TrainConfig):
        changes: dict[str, Any] = {} if seq_len is None else {"seq_len": seq_len}
        if finetune == "lora":
            changes["lora"] = dataclasses.replace(source.lora, rank=source.lora.rank or 16)
        return source.changed(**changes, **dict.fromkeys(AXES, 1))
    from jgraph.train.__main__ import parse  # imported here, because it imports tyro

    check_source(source, "source")
    origin = ["--preset", str(source)] if str(source) in PRESETS else ["--init-from", str(source)]
    config = parse([*origin, *flags], "python -m jgraph.plan")
    assert config is not None, "no flag asks for help"
    return config
