"""Configuration of a run: one frozen dataclass per component, which checks its fields when it is created.

A field has the name of its flag, and its docstring is the help text of the flag. `TrainConfig` checks constraints between
components. `TrainConfig.of` and `TrainConfig.changed` take the fields of all components by name; config.json uses the same
names. This module does not import jax, so that an invalid flag is reported at once.
"""

import ast
import math
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias

from tyro.conf import OmitArgPrefixes, arg

from jgraph.errors import ConfigError, check_choice, check_types, require, require_positive
from jgraph.precision.config import FP8Config
from jgraph.train.model import SettingsHooks, check_import, is_class_name, settings_from, settings_hooks, settings_of

DtypeName: TypeAlias = Literal["bfloat16", "float32"]


class DefaultSteps(int):
    """An int that marks a number of steps as a default, not set by the user.

    `TrainConfig` reduces a default `optimizer.warmup_steps` that is greater than a tenth of `steps` to that tenth.
    """


class DefaultValue(float):
    """A float that marks a hyperparameter of AdamW as a default, not set by the user.

    `OptimizerConfig` replaces it by the default of another optimizer.
    """


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """Training data and the batch of a step."""

    batch_size: int = 32
    """Sequences per step, summed over microbatches and devices."""
    seq_len: int = 256
    """Predicted tokens per sequence."""
    num_microbatches: int = 1
    """Microbatches per step. Their gradients are accumulated before the update. Must divide batch_size."""
    data: tuple[str, ...] = ("python-docs",)
    """Training data: `python-docs`, `python-source`, `synthetic`; files, directories and globs of text, JSON Lines or Parquet;
    Hugging Face datasets, e.g. hf:owner/name; directories of token files (see `python -m jgraph.data`). NAME:WEIGHT sets
    mixture weights, e.g. code:0.7 prose:0.3."""
    data_field: Annotated[str, arg(name="data.field")] = "text"
    """Field of a JSON line, or column of a Parquet file or dataset, with the text."""
    data_format: Annotated[Literal["text", "chat"], arg(name="data.format")] = "text"
    """`chat`: `data` has records with `messages`, or with `prompt` and `completion`, and no text. The loss counts the tokens of
    the assistant. Conversations are packed into rows and stay separate. The default is read from the first record."""
    data_template: Annotated[str, arg(name="data.template")] = ""
    """With the format chat: file of the chat template, in Jinja. Empty means the template of the Hugging Face folder."""
    data_truncate: Annotated[Literal["end", "start", "drop", "error"], arg(name="data.truncate")] = "end"
    """With the format chat: action for a conversation that is longer than a row. `end` and `start` remove its last or first
    tokens. `drop` leaves it out."""
    data_shuffle: Annotated[Literal["windows", "documents"], arg(name="data.shuffle")] = "windows"
    """Unit of shuffling in each epoch. `windows` shuffles windows of the text in its stored order. `documents` shuffles the
    documents first, and then the windows."""
    data_documents: Annotated[Literal["joined", "separate"], arg(name="data.documents")] = "joined"
    """`joined`: tokens attend to earlier documents in their row. `separate`: attention stays within a document, and its last
    token, the end of text, has no target. Always `separate` with the format chat."""

    def __post_init__(self):
        """Turns a string `data` into a tuple of one string, sets `data_documents` for chat data, and checks the fields.

        Raises:
            ConfigError: If a field has the wrong type, a size is not positive, `data` is empty or has an empty string, an
                option of chat data is set for text, or `num_microbatches` does not divide `batch_size`.
        """
        if isinstance(self.data, str):
            object.__setattr__(self, "data", (self.data,))
        check_types(self)
        require_positive(self, "batch_size seq_len num_microbatches")
        require(all(self.data) and bool(self.data), "data", "''", "a corpus name, a text file or a directory of token files")
        if self.data_format == "chat":
            object.__setattr__(self, "data_documents", "separate")
            _must(self, "data_shuffle", self.data_shuffle == "windows", "windows if `data_format` is chat, which shuffles rows")
        for name, default in (("data_template", ""), ("data_truncate", "end")):
            is_default = getattr(self, name) == default
            _must(self, name, self.data_format == "chat" or is_default, f"{default or 'empty'} unless `data_format` is chat")
        _must(
            self,
            "num_microbatches",
            self.batch_size % self.num_microbatches == 0,
            f"a divisor of `batch_size` {self.batch_size}",
        )

    @property
    def tokens_per_step(self) -> int:
        """Number of predicted tokens per step, over all devices: `batch_size` x `seq_len`."""
        return self.batch_size * self.seq_len

    @property
    def microbatch_size(self) -> int:
        """Number of sequences per microbatch, over all devices: `batch_size` / `num_microbatches`."""
        return self.batch_size // self.num_microbatches


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Devices of the run: the axes of the mesh, and how parameters are sharded over them."""

    dp: int = 1
    """Data-parallel replicas. Each processes its shard of the batch."""
    fsdp: int = 1
    """Devices that parameters, gradients and optimizer state are sharded over. Each processes its shard of the batch."""
    ep: int = 1
    """Devices that the experts of a layer are sharded over. Tokens are exchanged between them. Must divide `fsdp`, or `dp` if
    `fsdp` is 1."""
    pp: int = 1
    """Pipeline ranks. Layers and vocabulary are divided between them."""
    cp: int = 1
    """Devices that the tokens of each sequence are divided between. Two times `cp` must divide `seq_len`."""
    tp: int = 1
    """Devices that each matrix is split over: attention heads, hidden units of MLPs and experts, and the vocabulary."""
    reshard_after_forward: bool = False
    """With `fsdp`: gather parameters again for the backward instead of keeping them. Saves memory, adds traffic."""
    shard_rules: tuple[str, ...] = ()
    """With `fsdp`: PATTERN=AXIS, the axis to shard the matching parameters along, e.g. '*/down/kernel=1'."""

    def __post_init__(self):
        """Checks the fields.

        Raises:
            ConfigError: If a field has the wrong type, a number of devices is not positive, `ep` does not divide `fsdp` (`dp`
                if `fsdp` is 1), a rule is not PATTERN=AXIS, or an option of `fsdp` is set while `fsdp` is 1.
        """
        check_types(self)
        require_positive(self, "dp fsdp ep pp cp tp")
        divided, ranks = ("fsdp", self.fsdp) if self.fsdp > 1 else ("dp", self.dp)
        hint = "; experts are sharded over devices of `fsdp` or `dp`" if ranks == 1 else ""
        _must(self, "ep", ranks % self.ep == 0, f"a divisor of `{divided}` {ranks}{hint}")
        _must(self, "reshard_after_forward", self.fsdp > 1 or not self.reshard_after_forward, "False if `fsdp` is 1")
        _must(self, "shard_rules", self.fsdp > 1 or not self.shard_rules, "empty if `fsdp` is 1")
        for rule in self.shard_rules:
            pattern, _, axis = rule.rpartition("=")
            require(bool(pattern) and axis.isdecimal(), "shard_rules", rule, "PATTERN=AXIS, AXIS counted from 0")

    @property
    def shards(self) -> int:
        """Number of devices that parameters are sharded over: the larger of `fsdp` and `ep`.

        If `fsdp` is 1, only the parameters of experts are sharded.
        """
        return max(self.fsdp, self.ep)

    @property
    def num_devices(self) -> int:
        """Number of devices of the run."""
        return self.data_ranks * self.pp * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Number of devices per pipeline rank that process different rows of each microbatch: `dp` x `fsdp`."""
        return self.dp * self.fsdp


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Pipeline schedule and engine, for a run with several pipeline ranks (`--pp`)."""

    chunks: int = 1
    """Stages per pipeline rank."""
    schedule: str = "aligned"
    """Pipeline schedule: aligned, 1f1b, interleaved-1f1b, zb-h1, zb-v, gpipe and others (see
    `python -m jgraph.inspect schedule`), a .csv or .json file, or `auto`. `auto` measures the model and selects the fastest
    schedule that fits."""
    pp_engine: Literal["program", "dispatch"] = "program"
    """`program` compiles one SPMD program for all ranks. `dispatch` compiles one executable per rank and stage, started by the
    host (MPMD)."""
    memory_limit: float = 0.0
    """With `schedule` auto: GiB per device for arrays kept between forward, dgrad and wgrad. 0 means no limit."""

    def __post_init__(self):
        """Checks the fields. Does not check that `schedule` names a schedule.

        Raises:
            ConfigError: If a field has the wrong type, `chunks` is not positive or not allowed with `schedule`, or
                `memory_limit` is negative, infinite, or set although `schedule` is not `auto`.
        """
        check_types(self)
        require_positive(self, "chunks")
        _must(self, "memory_limit", 0 <= self.memory_limit < math.inf, "0 or positive")
        _must(self, "memory_limit", self.schedule == "auto" or not self.memory_limit, "0 unless `schedule` is auto")
        if self.schedule == "auto" or self.schedule.endswith((".csv", ".json")):
            _must(self, "chunks", self.chunks == 1, f"1 with `schedule` {self.schedule}, which sets the number of chunks")
        if self.schedule == "interleaved-1f1b":
            _must(self, "chunks", self.chunks > 1, "at least 2 with `schedule` interleaved-1f1b; for 1, use `schedule` 1f1b")


@dataclass(frozen=True, kw_only=True)
class DtypeConfig:
    """Dtypes of parameters, gradients and matmuls."""

    precision: Literal["bf16", "fp8"] = "bf16"
    """Dtype of the matmuls in the blocks. With fp8, other operations keep the dtype of the model."""
    main_params_dtype: DtypeName = "float32"
    """Dtype of the main parameters, which the optimizer updates."""
    main_grads_dtype: DtypeName = "float32"
    """Dtype of the gradient accumulator, over microbatches and devices."""
    decoupled_grad: bool = False
    """Pass gradients to the optimizer in `main_grads_dtype`, even if the parameters have another dtype."""
    on_dtype_mismatch: Literal["error", "copy"] = "error"
    """If the two dtypes differ without `decoupled_grad`: raise an error, or cast the gradient to the parameter dtype."""

    def __post_init__(self):
        """Checks the types of the fields. Does not check that the dtypes fit together.

        Raises:
            ConfigError: If a field has the wrong type or is not one of its choices.
        """
        check_types(self)

    def check(self) -> None:
        """Checks that parameters and gradients have the same dtype, or that an option handles the difference.

        `TrainConfig` calls this method after the checks of a pipeline, because the messages of those checks give other advice.

        Raises:
            ConfigError: If `main_params_dtype` and `main_grads_dtype` differ, `decoupled_grad` is False and `on_dtype_mismatch`
                is `error`.
        """
        differ = self.main_params_dtype != self.main_grads_dtype and not self.decoupled_grad
        advice = f"set `decoupled_grad` (the optimizer reads {self.main_grads_dtype}) or `on_dtype_mismatch` copy"
        allowed = f"`main_params_dtype` {self.main_params_dtype}; or {advice} (casts the gradient)"
        _must(self, "main_grads_dtype", not differ or self.on_dtype_mismatch == "copy", allowed)

    @property
    def read_dtype(self) -> DtypeName:
        """Dtype of the gradient that the optimizer gets, `bfloat16` or `float32`.

        This is `main_grads_dtype` if `decoupled_grad` is True, and `main_params_dtype` otherwise. The optimizer gets the
        gradient accumulator itself if that has this dtype, and otherwise a cast copy.
        """
        if self.decoupled_grad or self.main_params_dtype == self.main_grads_dtype:
            return self.main_grads_dtype
        return self.main_params_dtype


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """How the step is compiled."""

    graph: Literal["auto", "off", "full"] = "auto"
    """Command buffers (CUDA graphs). `auto`: XLA's default. `off`: none. `full`: every operation that XLA can record, including
    collectives."""
    xla_options: tuple[str, ...] = ()
    """Additional XLA options of the compiled step, as name=value. Checked against the installed XLA."""
    compile_cache: str = ""
    """Directory for compiled programs, which the next start loads, or `off`. Empty means the user's cache directory. Anyone
    with write access to this directory can execute code in this run."""
    remat: Literal["nothing", "wide", "layer"] = "nothing"
    """Recomputation in the backward. `layer` keeps only the input of each layer: saves memory, a third more FLOPs. `wide`
    (pipelines only) recomputes matmuls with an output at least four times as wide as the input, such as the first of an MLP:
    saves memory, 11% more FLOPs."""

    def __post_init__(self):
        """Checks the fields. Does not check that XLA has the options.

        Raises:
            ConfigError: If a field has the wrong type, or an XLA option is not name=value.
        """
        check_types(self)
        for option in self.xla_options:
            require("=" in option, "xla_options", option, "name=value")


@dataclass(frozen=True, kw_only=True)
class InitialConfig:
    """Initial weights of a new run. By default they are random."""

    init_from: str = ""
    """Local Hugging Face folder with the initial weights. Its config.json sets the sizes of the model, and its tokenizer.json
    tokenizes text in `data`. Not needed to resume."""
    continue_from: str = ""
    """Start a new run at step 0 with the latest weights of another run directory, or with RUN/checkpoints/STEP. The settings of
    the model, the tokenizer and the default preset are those of the other run. Not needed to resume."""
    continue_with: Literal["weights", "optimizer"] = "weights"
    """With `continue_from`: `weights` loads the weights and the other state of the model. `optimizer` also loads the moments
    and the step count of the same optimizer."""

    def __post_init__(self):
        """Checks the fields. Does not look for the directories.

        Raises:
            ConfigError: If a field has the wrong type, `init_from` and `continue_from` are both set, or `continue_with` is
                `optimizer` without `continue_from`.
        """
        check_types(self)
        _must(self, "continue_from", not (self.continue_from and self.init_from), "empty if `init_from` is set")
        is_default = self.continue_with == "weights"
        _must(self, "continue_with", bool(self.continue_from) or is_default, "weights unless `continue_from` is set")


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """The run directory and its checkpoints."""

    run_dir: str = ""
    """Output directory. Empty means runs/PRESET. Must be on a disk that all processes share."""
    resume: bool = True
    """Resume from the last checkpoint in the run directory. Off: start over and replace the run in this directory."""
    checkpoint_every: int = 250
    """Steps between checkpoints. The last step is always saved."""
    checkpoint_keep: int = 2
    """Number of checkpoints to keep."""

    def __post_init__(self):
        """Checks the fields.

        Raises:
            ConfigError: If a field has the wrong type, or `checkpoint_every` or `checkpoint_keep` is not positive.
        """
        check_types(self)
        require_positive(self, "checkpoint_every checkpoint_keep")


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Metrics, evaluations, profiles and failures during the run."""

    log_every: int = 10
    """Steps between progress lines and entries in metrics.jsonl. The first step is always logged."""
    log: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Additional destinations of the metrics: TensorBoard event files in the run directory, or Weights & Biases."""
    eval_every: int = 250
    """Steps between evaluations on held-out text. The last step is always evaluated."""
    eval_batches: int = 16
    """Maximum number of batches per evaluation."""
    sample_tokens: int = 256
    """Tokens of sample text generated at the end of the run; 0 for none."""
    profile: str = ""
    """FIRST:STOP, the steps to trace, e.g. 10:13 for steps 11 to 13. The same number of steps is then traced without command
    buffers, to record the names of kernels. Writes profile/profile.html and profile/profile.json in the run directory."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Action if the loss or a gradient is not finite: stop the run, or skip the update and count it."""
    hang_seconds: float = 1800.0
    """Exit with code 75 if the run waits this long for one program on the devices; 0 disables the check. Must be longer than
    the slowest step, and longer than one process may wait for another, for example while the other compiles."""

    def __post_init__(self):
        """Checks the fields.

        Raises:
            ConfigError: If a field has the wrong type, a number of steps or batches is not positive, `sample_tokens` or
                `hang_seconds` is negative, `hang_seconds` is infinite, or `profile` is not FIRST:STOP with FIRST < STOP.
        """
        check_types(self)
        require_positive(self, "log_every eval_every eval_batches")
        _must(self, "sample_tokens", self.sample_tokens >= 0, "0 or positive")
        _must(self, "hang_seconds", 0 <= self.hang_seconds < math.inf, "0 or positive")
        if self.profile:
            first, stop = self.profile_steps
            _must(
                self, "profile", self.profile.replace(":", "", 1).isdecimal() and first < stop, "FIRST:STOP with FIRST < STOP"
            )

    @property
    def profile_steps(self) -> tuple[int, int]:
        """`profile` as (first, stop): steps first + 1 to stop are traced. (0, 0) if `profile` is empty or not FIRST:STOP."""
        first, _, stop = self.profile.partition(":")
        return (int(first), int(stop)) if first.isdecimal() and stop.isdecimal() else (0, 0)


class OptimizerKind(NamedTuple):
    """The defaults of an optimizer of optax. None for a hyperparameter that the optimizer does not have.

    Attributes:
        beta1: Default of `OptimizerConfig.beta1`.
        beta2: Default of `OptimizerConfig.beta2`.
        eps: Default of `OptimizerConfig.eps`.
        weight_decay: Default of `OptimizerConfig.weight_decay`.
        updates: `elements` if every element is updated independently, so that small parameters may share an array. Otherwise
            `parameters`.
    """

    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    updates: Literal["elements", "parameters"] = "elements"


# All defaults except those of adamw are those of optax. config.py does not import optax, because that would import jax.
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


class ParameterGroup(NamedTuple):
    """Parameters with their own learning rate or weight decay.

    Attributes:
        pattern: Shell pattern of the parameter names.
        rate: Factor of the learning rate.
        decay: Weight decay of the matrices; None for that of the optimizer.
    """

    pattern: str
    rate: float = 1.0
    decay: float | None = None


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
    warmup_steps: int = DefaultSteps(100)
    """Steps of linear warmup. The first step has a positive rate. The default is at most a tenth of `steps`."""
    final_learning_rate: float = 0.1
    """Learning rate at the end of a cosine, linear or wsd schedule, as a fraction of the peak."""
    decay_steps: int = 0
    """The schedule ends after this step, and the learning rate stays constant. 0 means `steps`."""
    decay_fraction: float = 0.2
    """With `schedule` wsd: the fraction of the steps with a falling learning rate."""
    extend: Literal["no", "schedule", "cosine", "constant"] = "no"
    """Learning rate of a run that is resumed with another number of `steps`. `schedule` recomputes the schedule over all steps,
    so the rate may jump. `constant` follows the old schedule to its end and stays constant. `cosine` is `schedule` for a
    cosine."""
    beta1: float = DefaultValue(0.9)
    """Decay rate of the first moment."""
    beta2: float = DefaultValue(0.95)
    """Decay rate of the second moment."""
    eps: float = DefaultValue(1e-8)
    """Constant added to the square root of the second moment."""
    weight_decay: float = DefaultValue(0.1)
    """Decoupled weight decay. It applies to matrices, not to vectors such as norm scales."""
    clip_norm: float = 1.0
    """Maximum global norm of the gradient."""
    first_moment_dtype: DtypeName = "float32"
    """Dtype of the first moment."""
    second_moment_dtype: DtypeName = "float32"
    """Dtype of the second moment."""

    def __post_init__(self):
        """Sets `beta1`, `beta2`, `eps` and `weight_decay` to the defaults of the optimizer, and checks the fields.

        A `DefaultValue` of an optimizer other than adamw is replaced. A hyperparameter that the optimizer does not have is 0.

        Raises:
            ConfigError: If a field has the wrong type or is out of range: `learning_rate` and `clip_norm` are positive, `beta1`
                and `beta2` are in [0, 1), `final_learning_rate` is in [0, 1], `decay_fraction` is in (0, 1], and the others are
                not negative. Also if `name` is unknown, the optimizer does not have a hyperparameter that is not 0, `args` or
                `groups` cannot be parsed, `decay_steps` is set while `extend` is `schedule` or `cosine`, or a setting has no
                effect on the schedule.
        """
        check_types(self, prefix="optimizer.")
        check_choice("optimizer.name", self.name, OPTIMIZERS)
        require_positive(self, "learning_rate clip_norm", prefix="optimizer.")
        for field_name, default in OPTIMIZERS[self.name]._asdict().items():
            if field_name == "updates":
                continue
            value = getattr(self, field_name)
            if isinstance(value, DefaultValue) and self.name != "adamw":
                value = DefaultValue(default or 0.0)
                object.__setattr__(self, field_name, value)
            allowed = f"left out with `optimizer.name` {self.name}, which has no {field_name}"
            _must(self, f"optimizer.{field_name}", default is not None or value == 0, allowed)
        if self.name == "adamw":
            require_positive(self, "eps", prefix="optimizer.")
        _must(self, "optimizer.eps", 0 <= self.eps < math.inf, "0 or positive")
        _must(self, "optimizer.warmup_steps", self.warmup_steps >= 0, "0 or positive")
        _must(self, "optimizer.beta1", 0 <= self.beta1 < 1, "in [0, 1)")
        _must(self, "optimizer.beta2", 0 <= self.beta2 < 1, "in [0, 1)")
        _must(self, "optimizer.final_learning_rate", 0 <= self.final_learning_rate <= 1, "in [0, 1]")
        _must(self, "optimizer.decay_steps", self.decay_steps >= 0, "0 or positive")
        stretches = self.extend in ("schedule", "cosine")
        _must(self, "optimizer.decay_steps", not (stretches and self.decay_steps), f"0 if `optimizer.extend` is {self.extend}")
        _must(self, "optimizer.weight_decay", 0 <= self.weight_decay < math.inf, "0 or positive")
        is_cosine, with_schedule = self.schedule == "cosine", f"with `optimizer.schedule` {self.schedule}"
        _must(self, "optimizer.extend", is_cosine or self.extend != "cosine", f"no, schedule or constant {with_schedule}")
        _must(self, "optimizer.decay_fraction", 0 < self.decay_fraction <= 1, "in (0, 1]")
        default = type(self).decay_fraction
        allowed = f"left out {with_schedule}"
        _must(self, "optimizer.decay_fraction", self.schedule == "wsd" or self.decay_fraction == default, allowed)
        if self.schedule in ("constant", "inverse-sqrt"):
            default = type(self).final_learning_rate
            _must(self, "optimizer.final_learning_rate", self.final_learning_rate == default, allowed)
        _ = self.keywords, self.parameter_groups

    @property
    def keywords(self) -> dict[str, Any]:
        """`args` as a dict of Python values by name. Does not check that the optimizer has the names.

        Raises:
            ConfigError: If an item of `args` is not name=value, or its value is not a Python literal.
        """
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
        """`groups`, parsed.

        Raises:
            ConfigError: If an item of `groups` is not PATTERN:rate=FACTOR,decay=VALUE with one of the two or both, a number is
                negative or not finite, or `decay` is set for an optimizer without weight decay.
        """
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


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters beside frozen weights (LoRA). The adapters alone are trained."""

    rank: int = 0
    """Rank of the adapters; 0 for none, which trains all weights. Weights that are stored together, such as queries, keys and
    values, have an adapter each."""
    alpha: float = 16.0
    """Adapters are multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("*/kernel",)
    """Name patterns of the weights with adapters, e.g. '*attention/*'. The default selects all linear layers."""
    base_dtype: DtypeName = "float32"
    """Dtype in which the frozen weights are stored. By default that of the folder that the weights came from."""

    def __post_init__(self):
        """Checks the fields. Does not check that parameters match `targets`.

        Raises:
            ConfigError: If a field has the wrong type, `rank` is negative, `alpha` is not positive, `targets` is empty, or
                another field is set while `rank` is 0.
        """
        check_types(self, prefix="lora.")
        _must(self, "lora.rank", self.rank >= 0, "0 or positive")
        require_positive(self, "alpha", prefix="lora.")
        _must(self, "lora.targets", bool(self.targets), "one or more patterns of parameter names")
        for each in fields(self) if not self.rank else ():
            _must(self, f"lora.{each.name}", getattr(self, each.name) == each.default, "left out if `lora.rank` is 0")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Processes of a distributed run. Slurm and Open MPI set these options; otherwise set the last three together."""

    setup: Literal["auto", "off"] = "auto"
    """`auto` connects to the other processes that Slurm, Open MPI or the options below define. `off` runs one process."""
    coordinator: str = ""
    """HOST:PORT of process 0. All processes must be able to reach it, and the port must be free."""
    num_processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Index of this process, from 0."""

    def __post_init__(self):
        """Checks the fields.

        Raises:
            ConfigError: If a field has the wrong type, only some of `coordinator`, `num_processes` and `process_id` are set,
                they are set while `setup` is `off`, `coordinator` is not HOST:PORT, or `process_id` is not in [0,
                `num_processes`).
        """
        check_types(self, prefix="distributed.")
        flags = {"coordinator": self.coordinator or None, "num_processes": self.num_processes, "process_id": self.process_id}
        given = [name for name, value in flags.items() if value is not None]
        for name, value in flags.items() if given else ():
            require(value is not None, f"distributed.{name}", value, f"set together with `distributed.{given[0]}`")
        if self.num_processes is None or self.process_id is None:
            return
        _must(self, "distributed.setup", self.setup != "off", "auto if `distributed.coordinator` is set")
        host, _, port = self.coordinator.rpartition(":")
        is_address = bool(host) and port.isdecimal() and 0 < int(port) < 2**16
        _must(self, "distributed.coordinator", is_address, "HOST:PORT of process 0")
        require_positive(self, "num_processes", prefix="distributed.")
        allowed = f"at least 0 and less than `distributed.num_processes` {self.num_processes}"
        _must(self, "distributed.process_id", 0 <= self.process_id < self.num_processes, allowed)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Complete configuration of a run of `python -m jgraph.train`. Immutable, with keyword arguments only.

    `TrainConfig.of` takes the fields of all components by name. `python -m jgraph.train --help` describes every field.
    """

    preset: str = ""
    """Named configuration. The other options override it."""
    module: Annotated[str, arg(name="model.module")] = "jgraph_models.gpt:GPT"
    """Model class, Flax NNX or Linen, as `package.module:Class`."""
    model: Any = None
    """Settings of the model: the dataclass that its constructor takes as first argument, or None."""
    steps: int = 1000
    """Number of optimizer steps."""
    seed: int = 0
    """Random seed of the weights and of the data order."""
    freeze: tuple[str, ...] = ()
    """Name patterns of parameters that are not trained, e.g. 'embedding_VD' 'blocks/0/*'."""
    input: Annotated[InputConfig, OmitArgPrefixes] = field(default_factory=InputConfig)
    parallel: Annotated[ParallelConfig, OmitArgPrefixes] = field(default_factory=ParallelConfig)
    pipeline: Annotated[PipelineConfig, OmitArgPrefixes] = field(default_factory=PipelineConfig)
    dtypes: Annotated[DtypeConfig, OmitArgPrefixes] = field(default_factory=DtypeConfig)
    compile: Annotated[CompileConfig, OmitArgPrefixes] = field(default_factory=CompileConfig)
    initial: Annotated[InitialConfig, OmitArgPrefixes] = field(default_factory=InitialConfig)
    output: Annotated[OutputConfig, OmitArgPrefixes] = field(default_factory=OutputConfig)
    monitor: Annotated[MonitorConfig, OmitArgPrefixes] = field(default_factory=MonitorConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    fp8: FP8Config = field(default_factory=FP8Config)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self):
        """Checks constraints between components, and computes defaults that depend on other fields.

        If `model` is None, imports the model class and sets `model` to its default settings, if the class has settings. Sets an
        empty `output.run_dir` to runs/PRESET, or to runs/CLASS without a preset. Reduces a default
        `optimizer.warmup_steps` to a tenth of `steps`.

        Raises:
            ConfigError: If a field has the wrong type or range, two settings exclude each other, or the model class cannot be
                imported.
        """
        check_types(self)
        _must(self, "module", self.module.count(":") == 1 and all(self.module.split(":")), "package.module:Class")
        if self.model is None and (kind := settings_of(self.module)) is not None:
            object.__setattr__(self, "model", kind())
        require_positive(self, "steps")
        _must(self, "seed", 0 <= self.seed < 2**32, "in [0, 2**32)")
        self._check_batch()
        self._check_experts()
        if self.is_pipeline:
            self._check_pipeline()
        self.dtypes.check()
        remat = self.compile.remat
        require(self.is_pipeline or remat != "wide", "remat", remat, "nothing or layer without a pipeline")
        if self.dtypes.precision == "bf16" and self.fp8 != FP8Config():
            name = next(f.name for f in fields(FP8Config) if getattr(self.fp8, f.name) != getattr(FP8Config(), f.name))
            require(False, f"fp8.{name}", getattr(self.fp8, name), "left out if `precision` is bf16")
        if self.monitor.profile:
            first, stop = self.monitor.profile_steps
            needed = first + 2 * (stop - first) + 2
            room = f"in a run of at least {needed} steps (the traced steps twice, and two more); `steps` is {self.steps}"
            require(needed <= self.steps, "profile", self.monitor.profile, room)
        warmup = self.optimizer.warmup_steps
        if not isinstance(warmup, DefaultSteps):
            require(warmup <= self.steps, "optimizer.warmup_steps", warmup, f"at most `steps` {self.steps}")
        elif warmup > self.steps // 10:
            object.__setattr__(self, "optimizer", replace(self.optimizer, warmup_steps=DefaultSteps(self.steps // 10)))
        if not self.output.run_dir:
            run_dir = f"runs/{self.preset or self.module.rpartition(':')[2]}"
            object.__setattr__(self, "output", replace(self.output, run_dir=run_dir))

    def _check_batch(self) -> None:
        """Checks that the sequences of a microbatch can be divided between the data ranks. Raises ConfigError."""
        batch, dp, fsdp, rows = self.input, self.parallel.dp, self.parallel.fsdp, self.input.microbatch_size
        sizes = f"`batch_size` {batch.batch_size}, `num_microbatches` {batch.num_microbatches}"
        require(rows % dp == 0, "dp", dp, f"a divisor of the {rows} sequences of a microbatch ({sizes})")
        divisible = f"such that `dp` {dp} x `fsdp` divides the {rows} sequences of a microbatch ({sizes})"
        require(rows // dp % fsdp == 0, "fsdp", fsdp, divisible)
        cp = self.parallel.cp
        require(cp == 1 or batch.seq_len % (2 * cp) == 0, "cp", cp, f"such that 2 x `cp` divides `seq_len` {batch.seq_len}")
        tokens = rows // dp // fsdp * batch.seq_len
        fewer = f"such that a device has fewer than 2**31 tokens per microbatch; with `seq_len` {batch.seq_len} it has {tokens}"
        require(tokens < 2**31, "batch_size", batch.batch_size, fewer)

    def _check_experts(self) -> None:
        """Checks that the experts of the model can be sharded over `ep` devices. Raises ConfigError."""
        ep, shards, moe = self.parallel.ep, self.parallel.shards, self.hooks.moe
        if ep == 1 or moe is None:
            return
        experts = moe.num_experts
        require(experts > 0, "ep", ep, "1 for a model without experts")
        require(experts % shards == 0, "ep", ep, f"such that {shards} devices divide `model.moe.num_experts` {experts}")

    def _check_pipeline(self) -> None:
        """Checks that a pipeline supports the other settings. Raises ConfigError."""
        # Checked before the rule on different dtypes, because its advice does not work in a pipeline.
        advice = "the parameters may be bfloat16 (`main_params_dtype`)"
        grads_dtype = self.dtypes.main_grads_dtype
        require(grads_dtype == "float32", "main_grads_dtype", grads_dtype, f"float32 in a pipeline; {advice}")
        advice = "a rank gathers its stages once per step; to save memory, use more ranks (`pp`) or `remat` layer"
        reshards = self.parallel.reshard_after_forward
        require(not reshards, "reshard_after_forward", reshards, f"False in a pipeline; {advice}")
        if self.pipeline.pp_engine == "dispatch":
            # The balance loss needs all tokens of a microbatch, and a dispatched executable has only those of its device.
            has_experts = self.hooks.moe is not None and self.hooks.moe.num_experts > 0
            fsdp, dp, profile = self.parallel.fsdp, self.parallel.dp, self.monitor.profile
            for name, size in (("fsdp", fsdp), ("cp", self.parallel.cp), ("tp", self.parallel.tp)):
                require(size == 1, "pp_engine", "dispatch", f"program with `{name}` {size}")
            require(not profile, "pp_engine", "dispatch", f"program with `profile` {profile}")
            require(dp == 1 or not has_experts, "pp_engine", "dispatch", f"program with `dp` {dp}")

    @cached_property
    def hooks(self) -> SettingsHooks:
        """The optional members of the settings of the model that jgraph reads."""
        return settings_hooks(self.module, self.model)

    @property
    def data_options(self) -> dict[str, Any]:
        """Keyword arguments of `jgraph.data.load`, except the data, the tokenizer and the chat template.

        A dict with the keys `field`, `documents`, `format`, `truncate`, `seq_len` and `vocab_size`. `vocab_size` is None if the
        settings of the model have no such field.
        """
        batch, vocab_size = self.input, self.hooks.vocab_size or None
        options = {"field": batch.data_field, "documents": batch.data_documents}
        options |= {"format": batch.data_format, "truncate": batch.data_truncate}
        return options | {"seq_len": batch.seq_len, "vocab_size": vocab_size}

    @property
    def is_pipeline(self) -> bool:
        """True if the step runs a pipeline schedule.

        That is the case with several pipeline ranks (`pp`), or if `chunks`, `schedule` or `pp_engine` is not its default.
        """
        pipeline = self.pipeline
        return (self.parallel.pp, pipeline.chunks, pipeline.schedule, pipeline.pp_engine) != (1, 1, "aligned", "program")

    @property
    def is_sharded(self) -> bool:
        """True if the step uses the strategy `FullySharded`.

        That is the case without a pipeline if `fsdp` or `ep` is greater than 1, or if the dtype of the main parameters or of
        the gradient accumulator is not float32.
        """
        dtypes = self.dtypes.main_params_dtype, self.dtypes.main_grads_dtype
        return not self.is_pipeline and (self.parallel.shards > 1 or dtypes != ("float32", "float32"))

    @property
    def is_delayed(self) -> bool:
        """True if the run has amax histories: FP8 with delayed scaling, or its calibration."""
        return self.dtypes.precision == "fp8" and self.fp8.recipe == "delayed"

    @property
    def is_fp8(self) -> bool:
        """True if matmuls run in FP8. False for bfloat16 and for calibration."""
        return self.dtypes.precision == "fp8" and not self.fp8.calibrates

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Creates a configuration from the fields of all components.

        Args:
            **values: Fields of `TrainConfig` and of its components `input`, `parallel`, `pipeline`, `dtypes`, `compile`,
                `initial`, `output` and `monitor`. A field of a component is given by its own name, for example `batch_size=8`.
                `optimizer`, `lora`, `fp8` and `distributed` are given as an `OptimizerConfig`, `LoRAConfig`, `FP8Config` and
                `DistributedConfig`.
                Fields that are not given have their defaults.

        Returns:
            The checked configuration.

        Raises:
            ConfigError: If a value is invalid, or values exclude each other.
            TypeError: If a name is not that of a field.

        Examples:
            >>> TrainConfig.of(fsdp=2, batch_size=8).parallel.fsdp
            2
        """
        top_level, parts = _by_component(values)
        return cls(**top_level, **{name: COMPONENTS[name](**part) for name, part in parts.items()})

    def changed(self, **values: Any) -> Self:
        """Returns a checked copy with new values of some fields. Does not change this configuration.

        Args:
            **values: Fields of `TrainConfig` and of its components `input`, `parallel`, `pipeline`, `dtypes`, `compile`,
                `initial`, `output` and `monitor`. A field of a component is given by its own name, for example `batch_size=8`.
                `optimizer`, `lora`, `fp8` and `distributed` are replaced as whole dataclasses.

        Returns:
            The new configuration. `model` and `run_dir` keep their values unless they are given, even if this configuration
            derived them from its `module` or `preset`.

        Raises:
            ConfigError: If a value is invalid, or values exclude each other.
            TypeError: If a name is not that of a field.
        """
        top_level, parts = _by_component(values)
        return replace(self, **top_level, **{name: replace(getattr(self, name), **part) for name, part in parts.items()})

    def to_dict(self) -> dict[str, Any]:
        """Returns a copy of all fields as a dict that JSON can represent, the content of config.json.

        Fields of the components `input`, `parallel`, `pipeline`, `dtypes`, `compile`, `initial`, `output` and `monitor` are at
        the top level, for example "batch_size". `model`, `optimizer`, `lora`, `fp8` and `distributed` are nested dicts; `model`
        is None for a model without settings. Tuples stay tuples.
        """
        nested = asdict(self)
        components = [nested.pop(name) for name in COMPONENTS]
        return nested | {name: value for component in components for name, value in component.items()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, module: str = "") -> Self:
        """Restores a configuration from JSON, the inverse of `to_dict`. Imports the model class, which runs its module.

        Args:
            fields: The decoded JSON object of a config.json without "corpus" and "versions". Not changed. Lists become tuples.
                "module", "model", "optimizer", "fp8" and "distributed" are required; other fields have defaults.
            module: Model class that the caller trusts, as `package.module:Class`. Required for a class outside
                `jgraph_models`, and may be empty otherwise.

        Returns:
            The checked configuration.

        Raises:
            ConfigError: If a required field is missing, a field is unknown or invalid, `module` is not the class in `fields`,
                or the class is outside `jgraph_models` and `module` is empty. Also if the class cannot be imported.
        """
        try:
            fields = _with_tuples(fields)
            require(is_class_name(fields["module"]), "module", repr(fields["module"]), "package.module:Class")
            check_import(fields["module"], module)
            kind, model = settings_of(fields["module"]), fields.pop("model")
            model = None if kind is None else settings_from(kind, model)
            parts: dict[str, Any] = {"optimizer": OptimizerConfig(**_with_tuples(fields.pop("optimizer")))}
            parts["distributed"] = DistributedConfig(**fields.pop("distributed"))
            if "lora" in fields:
                parts["lora"] = LoRAConfig(**_with_tuples(fields.pop("lora")))
            parts["fp8"] = FP8Config(**_with_tuples(fields.pop("fp8")))
            return cls.of(**fields, **parts, model=model)
        except (AttributeError, TypeError, KeyError) as e:
            raise ConfigError(f"the configuration does not fit this version of jgraph: {e}", field="run_dir") from e


COMPONENTS: dict[str, Any] = {
    "input": InputConfig,
    "parallel": ParallelConfig,
    "pipeline": PipelineConfig,
    "dtypes": DtypeConfig,
    "compile": CompileConfig,
    "initial": InitialConfig,
    "output": OutputConfig,
    "monitor": MonitorConfig,
}
_COMPONENT_OF = {field.name: name for name, kind in COMPONENTS.items() for field in fields(kind)}
FIELDS = frozenset(_COMPONENT_OF) | {field.name for field in fields(TrainConfig)} - COMPONENTS.keys()
"""Names of all fields, as `TrainConfig.of` takes them."""


def _by_component(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Separates fields of `TrainConfig` from those of its components."""
    top_level: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        target = parts.setdefault(_COMPONENT_OF[name], {}) if name in _COMPONENT_OF else top_level
        target[name] = value
    return top_level, parts


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _must(config: Any, name: str, condition: bool, allowed: str) -> None:
    """Raises ConfigError if `condition` is false for a field. The name may have a prefix."""
    require(condition, name, getattr(config, name.rpartition(".")[2]), allowed)
