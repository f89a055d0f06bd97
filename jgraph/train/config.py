"""Configuration of a run, as frozen dataclasses that check their fields when they are created.

The docstring of a field is the help text of its flag. This module does not import jax, so that an invalid flag is reported at
once.
"""

import math
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, Self, TypeAlias

from jgraph.errors import ConfigError, check_types, require, require_positive
from jgraph.precision.config import FP8Config
from jgraph.train.model import check_import, is_class_name, settings_from, settings_of

DtypeName: TypeAlias = Literal["bfloat16", "float32"]


class DefaultSteps(int):
    """A default number of steps. `TrainConfig` reduces it in short runs, unlike a number that the user set."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warmup, cosine decay and clipping by global norm."""

    learning_rate: float = 3e-4
    """Peak learning rate."""
    warmup_steps: int = DefaultSteps(100)
    """Steps of linear warmup. The first step has a positive rate. The default is at most a tenth of `steps`."""
    final_learning_rate: float = 0.1
    """Learning rate at the end of the cosine, as a fraction of the peak."""
    decay_steps: int = 0
    """The cosine ends after this step, and the learning rate stays constant. 0 means `steps`."""
    extend: Literal["no", "cosine", "constant"] = "no"
    """Learning rate of a run that is resumed with another number of `steps`. `cosine` recomputes the cosine over all steps, so
    the rate jumps. `constant` follows the old cosine to its end and stays constant."""
    beta1: float = 0.9
    """Decay rate of the first moment."""
    beta2: float = 0.95
    """Decay rate of the second moment."""
    eps: float = 1e-8
    """Constant added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled weight decay. It applies to matrices, not to vectors such as norm scales."""
    clip_norm: float = 1.0
    """Maximum global norm of the gradient."""
    first_moment_dtype: DtypeName = "float32"
    """Dtype of the first moment."""
    second_moment_dtype: DtypeName = "float32"
    """Dtype of the second moment."""

    def __post_init__(self):
        """Checks the fields. Raises ConfigError."""
        check_types(self, prefix="optimizer.")
        require_positive(self, "learning_rate eps clip_norm", prefix="optimizer.")
        must = partial(_must, self, "optimizer.")
        must("warmup_steps", self.warmup_steps >= 0, "0 or positive")
        must("beta1", 0 <= self.beta1 < 1, "in [0, 1)")
        must("beta2", 0 <= self.beta2 < 1, "in [0, 1)")
        must("final_learning_rate", 0 <= self.final_learning_rate <= 1, "in [0, 1]")
        must("decay_steps", self.decay_steps >= 0, "0 or positive")
        must("decay_steps", self.extend != "cosine" or not self.decay_steps, "0 if `optimizer.extend` is cosine")
        must("weight_decay", 0 <= self.weight_decay < math.inf, "0 or positive")


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
        """Checks the fields. Raises ConfigError."""
        check_types(self, prefix="distributed.")
        flags = {"coordinator": self.coordinator or None, "num_processes": self.num_processes, "process_id": self.process_id}
        given = [name for name, value in flags.items() if value is not None]
        for name, value in flags.items() if given else ():
            require(value is not None, f"distributed.{name}", value, f"set together with `distributed.{given[0]}`")
        if self.num_processes is None or self.process_id is None:
            return
        must = partial(_must, self, "distributed.")
        must("setup", self.setup != "off", "auto if `distributed.coordinator` is set")
        host, _, port = self.coordinator.rpartition(":")
        is_address = bool(host) and port.isdecimal() and 0 < int(port) < 2**16
        must("coordinator", is_address, "HOST:PORT of process 0")
        require_positive(self, "num_processes", prefix="distributed.")
        allowed = f"at least 0 and less than `distributed.num_processes` {self.num_processes}"
        must("process_id", 0 <= self.process_id < self.num_processes, allowed)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Complete configuration of a run of `python -m jgraph.train`. Each field is a flag."""

    preset: str = ""
    """Named configuration. The other options override it."""
    module: str = "jgraph_models.gpt:GPT"
    """Model class, Flax NNX or Linen, as `package.module:Class`."""
    model: Any = None
    """Settings of the model: the dataclass that its constructor takes as first argument, or None."""
    steps: int = 1000
    """Number of optimizer steps."""
    batch_size: int = 32
    """Sequences per step, summed over microbatches and devices."""
    seq_len: int = 256
    """Predicted tokens per sequence."""
    num_microbatches: int = 1
    """Microbatches per step. Their gradients are accumulated before the update. Must divide batch_size."""
    dp: int = 1
    """Data-parallel replicas. Each processes its shard of the batch."""
    fsdp: int = 1
    """Devices that parameters, gradients and optimizer state are sharded over. Each processes its shard of the batch."""
    ep: int = 1
    """Devices that the experts of a layer are sharded over. Tokens are exchanged between them. Must divide `fsdp`, or `dp` if
    `fsdp` is 1."""
    reshard_after_forward: bool = False
    """With `fsdp`: gather parameters again for the backward instead of keeping them. Saves memory, adds traffic."""
    shard_rules: tuple[str, ...] = ()
    """With `fsdp`: PATTERN=AXIS, the axis to shard the matching parameters along, e.g. '*/down/kernel=1'."""
    freeze: tuple[str, ...] = ()
    """Name patterns of parameters that are not trained, e.g. 'embedding_VD' 'blocks/0/*'."""
    main_params_dtype: DtypeName = "float32"
    """Dtype of the main parameters, which the optimizer updates."""
    main_grads_dtype: DtypeName = "float32"
    """Dtype of the gradient accumulator, over microbatches and devices."""
    decoupled_grad: bool = False
    """Pass gradients to the optimizer in `main_grads_dtype`, even if the parameters have another dtype."""
    on_dtype_mismatch: Literal["error", "copy"] = "error"
    """If the two dtypes differ without `decoupled_grad`: raise an error, or cast the gradient to the parameter dtype."""
    precision: Literal["bf16", "fp8"] = "bf16"
    """Dtype of the matmuls in the blocks. With fp8, other operations keep the dtype of the model."""
    pp: int = 1
    """Pipeline ranks. Layers and vocabulary are divided between them."""
    chunks: int = 1
    """Stages per pipeline rank."""
    schedule: str = "aligned"
    """Pipeline schedule: aligned, 1f1b, interleaved-1f1b, zb-h1, zb-v, gpipe and others (see
    `python -m jgraph.inspect schedule`), a .csv or .json file, or `auto`. `auto` measures the model and selects the fastest
    schedule that fits."""
    pp_engine: Literal["program", "dispatch", "auto"] = "program"
    """`program` compiles one SPMD program for all ranks. `dispatch` compiles one executable per rank and stage, started by the
    host (MPMD). `auto` times both and stores the faster one in the run directory. With `schedule` auto, it times the best
    schedule of each."""
    memory_limit: float = 0.0
    """With `schedule` auto: GiB per device for arrays kept between forward, dgrad and wgrad. 0 means no limit."""
    remat: Literal["nothing", "wide", "layer"] = "nothing"
    """Recomputation in the backward. `layer` keeps only the input of each layer: saves memory, a third more FLOPs. `wide`
    (pipelines only) recomputes matmuls with an output at least four times as wide as the input, such as the first of an MLP:
    saves memory, 11% more FLOPs."""
    data: tuple[str, ...] = ("python-docs",)
    """Training data: `python-docs`, `python-source`, `synthetic`; files, directories and globs of text, JSON Lines or Parquet;
    Hugging Face datasets, e.g. hf:owner/name; directories of token files (see `python -m jgraph.data`). NAME:WEIGHT sets
    mixture weights, e.g. code:0.7 prose:0.3."""
    data_field: str = "text"
    """Field of a JSON line, or column of a Parquet file or dataset, with the text."""
    data_shuffle: Literal["windows", "documents"] = "windows"
    """Unit of shuffling in each epoch. `windows` shuffles windows of the text in its stored order. `documents` shuffles the
    documents first, and then the windows."""
    data_documents: Literal["joined", "separate"] = "joined"
    """`joined`: tokens attend to earlier documents in their row. `separate`: attention stays within a document, and its last
    token, the end of text, has no target."""
    init_from: str = ""
    """Local Hugging Face folder with the initial weights. Its config.json sets the sizes of the model, and its tokenizer.json
    tokenizes text in `data`. Not needed to resume."""
    continue_from: str = ""
    """Start a new run at step 0 with the latest weights of another run directory, or with RUN/checkpoints/STEP. The settings of
    the model, the tokenizer and the default preset are those of the other run. Not needed to resume."""
    continue_with: Literal["weights", "optimizer"] = "weights"
    """With `continue_from`: load the weights and other model state (`weights`), or the moments and step count of Adam, too."""
    run_dir: str = ""
    """Output directory. Empty means runs/PRESET. Must be on a disk that all processes share."""
    seed: int = 0
    """Random seed of the weights and of the data order."""
    resume: bool = True
    """Resume from the last checkpoint in the run directory. Off: start over and replace the run in this directory."""
    graph: Literal["auto", "off", "full"] = "auto"
    """Command buffers (CUDA graphs). `auto`: XLA's default. `off`: none. `full`: every operation that XLA can record, including
    collectives."""
    xla_options: tuple[str, ...] = ()
    """Additional XLA options of the compiled step, as name=value. Checked against the installed XLA."""
    compile_cache: str = ""
    """Directory for compiled programs, which the next start loads, or `off`. Empty means the user's cache directory. Anyone
    with write access to this directory can execute code in this run."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Action if the loss or a gradient is not finite: stop the run, or skip the update and count it."""
    log_every: int = 10
    """Steps between progress lines and entries in metrics.jsonl. The first step is always logged."""
    log: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Additional destinations of the metrics: TensorBoard event files in the run directory, or Weights & Biases."""
    eval_every: int = 250
    """Steps between evaluations on held-out text. The last step is always evaluated."""
    eval_batches: int = 16
    """Maximum number of batches per evaluation."""
    checkpoint_every: int = 250
    """Steps between checkpoints. The last step is always saved."""
    checkpoint_keep: int = 2
    """Number of checkpoints to keep."""
    hang_seconds: float = 1800.0
    """Exit with code 75 if the run waits this long for one program on the devices; 0 disables the check. Must be longer than
    the slowest step, and than the delay of one process by another, for example while the other compiles."""
    profile: str = ""
    """FIRST:STOP, the steps to trace, e.g. 10:13 for steps 11 to 13. The same number of steps is then traced without command
    buffers, to record the names of kernels. Writes profile/profile.html and profile/profile.json in the run directory."""
    sample_tokens: int = 256
    """Tokens of sample text generated at the end of the run; 0 for none."""
    fp8: FP8Config = field(default_factory=FP8Config)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self):
        """Checks the fields and fills in those that depend on others. Raises ConfigError."""
        if isinstance(self.data, str):
            object.__setattr__(self, "data", (self.data,))
        check_types(self)
        must = partial(_must, self, "")
        must("module", self.module.count(":") == 1 and all(self.module.split(":")), "package.module:Class")
        if self.model is None and (kind := settings_of(self.module)) is not None:
            object.__setattr__(self, "model", kind())
        counts = "steps batch_size seq_len num_microbatches dp fsdp ep pp chunks log_every eval_every eval_batches"
        require_positive(self, f"{counts} checkpoint_every checkpoint_keep")
        must("sample_tokens", self.sample_tokens >= 0, "0 or positive")
        must("hang_seconds", 0 <= self.hang_seconds < math.inf, "0 or positive")
        must("seed", 0 <= self.seed < 2**32, "in [0, 2**32)")
        require(all(self.data) and bool(self.data), "data", "''", "a corpus name, a text file or a directory of token files")
        must("num_microbatches", self.batch_size % self.num_microbatches == 0, f"a divisor of `batch_size` {self.batch_size}")
        rows = self.batch_size // self.num_microbatches
        of = f"`batch_size` {self.batch_size}, `num_microbatches` {self.num_microbatches}"
        must("dp", rows % self.dp == 0, f"a divisor of the {rows} sequences of a microbatch ({of})")
        shared = f"such that `dp` {self.dp} x `fsdp` divides the {rows} sequences of a microbatch ({of})"
        must("fsdp", rows // self.dp % self.fsdp == 0, shared)
        tokens = rows // self.dp // self.fsdp * self.seq_len
        allowed = (
            f"such that a device has fewer than 2**31 tokens per microbatch; with `seq_len` {self.seq_len} it has {tokens}"
        )
        must("batch_size", tokens < 2**31, allowed)
        self._check_experts(must)
        must("reshard_after_forward", self.fsdp > 1 or not self.reshard_after_forward, "False if `fsdp` is 1")
        must("shard_rules", self.fsdp > 1 or not self.shard_rules, "empty if `fsdp` is 1")
        for rule in self.shard_rules:
            pattern, _, axis = rule.rpartition("=")
            require(bool(pattern) and axis.isdecimal(), "shard_rules", rule, "PATTERN=AXIS, AXIS counted from 0")
        if self.is_pipeline:
            # Checked before the rule on different dtypes, because its advice does not work in a pipeline.
            advice = "the parameters may be bfloat16 (`main_params_dtype`)"
            must("main_grads_dtype", self.main_grads_dtype == "float32", f"float32 in a pipeline; {advice}")
            advice = "a rank gathers its stages once per step; to save memory, use more ranks (`pp`) or `remat` layer"
            must("reshard_after_forward", not self.reshard_after_forward, f"False in a pipeline; {advice}")
            for name, default in self._program_only.items():
                is_default = getattr(self, name) == default
                must("pp_engine", self.pp_engine != "dispatch" or is_default, f"program with `{name}` {getattr(self, name)}")
        differ = self.main_params_dtype != self.main_grads_dtype and not self.decoupled_grad
        must(
            "main_grads_dtype",
            not differ or self.on_dtype_mismatch == "copy",
            f"`main_params_dtype` {self.main_params_dtype}; or set `decoupled_grad` (the optimizer reads "
            f"{self.main_grads_dtype}) or `on_dtype_mismatch` copy (casts the gradient)",
        )
        must("remat", self.is_pipeline or self.remat != "wide", "nothing or layer without a pipeline")
        must("memory_limit", 0 <= self.memory_limit < math.inf, "0 or positive")
        must("memory_limit", self.schedule == "auto" or not self.memory_limit, "0 unless `schedule` is auto")
        if self.schedule == "auto" or self.schedule.endswith((".csv", ".json")):
            must("chunks", self.chunks == 1, f"1 with `schedule` {self.schedule}, which sets the number of chunks")
        if self.schedule == "interleaved-1f1b":
            must("chunks", self.chunks > 1, "at least 2 with `schedule` interleaved-1f1b; for 1, use `schedule` 1f1b")
        must("continue_from", not (self.continue_from and self.init_from), "empty if `init_from` is set")
        must(
            "continue_with",
            bool(self.continue_from) or self.continue_with == "weights",
            "weights unless `continue_from` is set",
        )
        for option in self.xla_options:
            require("=" in option, "xla_options", option, "name=value")
        if self.precision == "bf16" and self.fp8 != FP8Config():
            name = next(f.name for f in fields(FP8Config) if getattr(self.fp8, f.name) != getattr(FP8Config(), f.name))
            require(False, f"fp8.{name}", getattr(self.fp8, name), "left out if `precision` is bf16")
        if self.profile:
            first, stop = self.profile_steps
            must("profile", self.profile.replace(":", "", 1).isdecimal() and first < stop, "FIRST:STOP with FIRST < STOP")
            needed = first + 2 * (stop - first) + 2
            room = f"in a run of at least {needed} steps (the traced steps twice, and two more); `steps` is {self.steps}"
            must("profile", needed <= self.steps, room)
        warmup = self.optimizer.warmup_steps
        if not isinstance(warmup, DefaultSteps):
            require(warmup <= self.steps, "optimizer.warmup_steps", warmup, f"at most `steps` {self.steps}")
        elif warmup > self.steps // 10:
            object.__setattr__(self, "optimizer", replace(self.optimizer, warmup_steps=DefaultSteps(self.steps // 10)))
        if not self.run_dir:
            object.__setattr__(self, "run_dir", f"runs/{self.preset or self.module.rpartition(':')[2]}")

    def _check_experts(self, must: Any) -> None:
        """Checks that experts can be sharded over `ep` devices. Raises ConfigError."""
        if self.ep == 1:
            return
        among = "fsdp" if self.fsdp > 1 else "dp"
        ranks = getattr(self, among)
        both = "; experts are sharded over devices of `fsdp` or `dp`" if ranks == 1 else ""
        must("ep", ranks % self.ep == 0, f"a divisor of `{among}` {ranks}{both}")
        if (moe := getattr(self.model, "moe", None)) is None:
            return
        experts = getattr(moe, "num_experts", 0)
        must("ep", experts > 0, "1 for a model without experts")
        ranks = self.shards
        must("ep", experts % ranks == 0, f"such that {ranks} devices divide `model.moe.num_experts` {experts}")

    @property
    def shards(self) -> int:
        """Number of devices that parameters are sharded over; only those of experts if `fsdp` is 1."""
        return max(self.fsdp, self.ep)

    @property
    def replicas(self) -> int:
        """Number of devices with the same parameter shards and different shards of the batch."""
        return self.dp * self.fsdp // self.shards

    @property
    def tokens_per_step(self) -> int:
        """Number of predicted tokens per step."""
        return self.batch_size * self.seq_len

    @property
    def profile_steps(self) -> tuple[int, int]:
        """`profile` as (first, stop): steps first + 1 to stop are traced. (0, 0) without a profile."""
        first, _, stop = self.profile.partition(":")
        return (int(first), int(stop)) if first.isdecimal() and stop.isdecimal() else (0, 0)

    @property
    def read_dtype(self) -> DtypeName:
        """Dtype of the gradient passed to the optimizer. If it is `main_grads_dtype`, the accumulator itself is passed."""
        if self.decoupled_grad or self.main_params_dtype == self.main_grads_dtype:
            return self.main_grads_dtype
        return self.main_params_dtype

    @property
    def is_sharded(self) -> bool:
        """True if the step uses `jgraph.strategies.sharding`: for sharded parameters, or for dtypes other than float32."""
        return not self.is_pipeline and (self.shards > 1 or (self.main_params_dtype, self.main_grads_dtype) != ("float32",) * 2)

    @property
    def is_pipeline(self) -> bool:
        """True if the step runs a pipeline schedule: with several ranks, or on one rank with a pipeline option set."""
        return (self.pp, self.chunks, self.schedule, self.pp_engine) != (1, 1, "aligned", "program")

    @property
    def is_delayed(self) -> bool:
        """True if FP8 scales come from the amax of earlier steps (delayed scaling)."""
        return self.precision == "fp8" and self.fp8.recipe == "delayed"

    @property
    def pp_engines(self) -> tuple[str, ...]:
        """The engines to choose from."""
        if self.pp_engine != "auto":
            return (self.pp_engine,)
        can_dispatch = all(getattr(self, name) == default for name, default in self._program_only.items())
        return ("program", "dispatch") if can_dispatch else ("program",)

    @property
    def _program_only(self) -> dict[str, Any]:
        """Fields that only the engine `program` supports, with the value that both engines support."""
        # The balance loss needs all tokens of a microbatch, and a dispatched executable has only those of its device.
        mixture = bool(getattr(getattr(self.model, "moe", None), "num_experts", 0))
        return {"fsdp": 1, "profile": ""} | ({"dp": 1} if mixture else {})

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, module: str = "") -> Self:
        """Restores a configuration from JSON, the inverse of `dataclasses.asdict`.

        Args:
            fields: The decoded JSON object.
            module: Model class that the caller named; empty if the caller named none.

        Returns:
            The configuration.

        Raises:
            ConfigError: If a field is missing, unknown or invalid, or the model class may not be imported (`check_import`).
        """
        try:
            fields = _with_tuples(fields)
            require(is_class_name(fields["module"]), "module", repr(fields["module"]), "package.module:Class")
            check_import(fields["module"], module)
            kind, model = settings_of(fields["module"]), fields.pop("model")
            model = None if kind is None else settings_from(kind, model)
            parts: dict[str, Any] = {"optimizer": OptimizerConfig(**fields.pop("optimizer"))}
            parts["distributed"] = DistributedConfig(**fields.pop("distributed"))
            parts["fp8"] = FP8Config(**_with_tuples(fields.pop("fp8")))
            return cls(**fields, **parts, model=model)
        except (AttributeError, TypeError, KeyError) as e:
            raise ConfigError(f"the configuration does not fit this version of jgraph: {e}", field="run_dir") from e


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _must(config: Any, prefix: str, name: str, condition: bool, allowed: str) -> None:
    """Raises ConfigError if `condition` is false for a field."""
    require(condition, prefix + name, getattr(config, name), allowed)
