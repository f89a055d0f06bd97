"""What a run is: frozen dataclasses, checked once where they are made. No jax here, so that a wrong flag is told in no time.

A field's docstring is the help text of its flag.
"""

import math
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal, Self, TypeAlias

from jgraph.errors import ConfigError, check_types, require, require_positive
from jgraph.precision.config import FP8Config
from jgraph.training.model import check_import, is_class_name, settings_from, settings_of

DtypeName: TypeAlias = Literal["bfloat16", "float32"]


class Usual(int):
    """A number of steps that nobody asked for. It shrinks with the run; one that was asked for does not."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up, cosine decay and clipping by global norm."""

    learning_rate: float = 3e-4
    """Peak learning rate."""
    warmup_steps: int = Usual(100)
    """Steps of linear warm-up; the first already moves. If not given, at most a tenth of `steps`."""
    final_learning_rate: float = 0.1
    """Where the cosine ends, as a fraction of the peak."""
    decay_steps: int = 0
    """Steps after which the cosine has ended, and the rate stays; 0 for `steps`."""
    extend: Literal["no", "cosine", "constant"] = "no"
    """How the rate goes on where a run goes on with other `steps` than before: by a cosine over all of them from the beginning,
    so that it jumps to where that is by now; or along the old cosine to its end, and constant from there."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices (not of vectors such as norm scales)."""
    clip_norm: float = 1.0
    """Largest global norm of the gradient."""
    first_moment_dtype: DtypeName = "float32"
    """Dtype in which the mean of gradients is kept."""
    second_moment_dtype: DtypeName = "float32"
    """Dtype in which the mean of squared gradients is kept."""

    def __post_init__(self):
        check_types(self, prefix="optimizer.")
        require_positive(self, "learning_rate eps clip_norm", prefix="optimizer.")
        must = partial(_must, self, "optimizer.")
        must("warmup_steps", self.warmup_steps >= 0, "0 or positive")
        must("beta1", 0 <= self.beta1 < 1, "in [0, 1)")
        must("beta2", 0 <= self.beta2 < 1, "in [0, 1)")
        must("final_learning_rate", 0 <= self.final_learning_rate <= 1, "in [0, 1]")
        must("decay_steps", self.decay_steps >= 0, "0 or positive")
        must("decay_steps", self.extend != "cosine" or not self.decay_steps, "0 where `optimizer.extend` is cosine")
        must("weight_decay", 0 <= self.weight_decay < math.inf, "0 or positive")


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Says which process of a run this is. Slurm and Open MPI tell it; elsewhere, the last three go together."""

    setup: Literal["auto", "off"] = "auto"
    """`auto` connects to the other processes if Slurm, Open MPI or the three below tell of any; `off` never does."""
    coordinator: str = ""
    """HOST:PORT at which process 0 can be reached by all; the port must be free there."""
    num_processes: int | None = None
    """Processes of the run."""
    process_id: int | None = None
    """Which of them this one is, from 0."""

    def __post_init__(self):
        check_types(self, prefix="distributed.")
        flags = {"coordinator": self.coordinator or None, "num_processes": self.num_processes, "process_id": self.process_id}
        given = [name for name, value in flags.items() if value is not None]
        for name, value in flags.items() if given else ():
            require(value is not None, f"distributed.{name}", value, f"given where `distributed.{given[0]}` is")
        if self.num_processes is None or self.process_id is None:
            return
        must = partial(_must, self, "distributed.")
        must("setup", self.setup != "off", "auto where `distributed.coordinator` is given")
        host, _, port = self.coordinator.rpartition(":")
        is_address = bool(host) and port.isdecimal() and 0 < int(port) < 2**16
        must("coordinator", is_address, "HOST:PORT, as all processes reach process 0")
        require_positive(self, "num_processes", prefix="distributed.")
        allowed = f"at least 0 and less than `distributed.num_processes` {self.num_processes}"
        must("process_id", 0 <= self.process_id < self.num_processes, allowed)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Says everything about a run of `python -m jgraph.train`: each field is a flag, and its docstring that flag's help."""

    preset: str = ""
    """Named configuration that the others override."""
    module: str = "jgraph_models.gpt:GPT"
    """Class of the model, Flax NNX or Linen: `package.module:Class`."""
    model: Any = None
    """Settings of the model: the dataclass that its constructor takes first, if it takes one."""
    steps: int = 1000
    """Optimizer steps of the whole run."""
    batch_size: int = 32
    """Sequences per step, over all microbatches."""
    seq_len: int = 256
    """Tokens per sequence that the model predicts."""
    num_microbatches: int = 1
    """Slices of the batch whose gradients are summed before the update; must divide batch_size."""
    dp: int = 1
    """Replicas of the model, each with its part of the batch."""
    fsdp: int = 1
    """Devices that share parameters, gradients and optimizer state, each with its part of the batch too."""
    ep: int = 1
    """Devices that a layer's experts are spread over; tokens are sent to them. They are of those of `fsdp`, or of `dp` where
    `fsdp` is 1, and must divide them."""
    reshard_after_forward: bool = False
    """With `fsdp`: gather the parameters a second time for the backward, instead of keeping them: less memory, more traffic."""
    shard_rules: tuple[str, ...] = ()
    """With `fsdp`: PATTERN=AXIS, the axis along which parameters that match are sharded, e.g. '*/down/kernel=1'."""
    freeze: tuple[str, ...] = ()
    """Patterns of the names of parameters that are not trained, e.g. 'embedding_VD' 'blocks/0/*'."""
    main_params_dtype: DtypeName = "float32"
    """Dtype of the parameters that the optimizer updates."""
    main_grads_dtype: DtypeName = "float32"
    """Dtype in which gradients are summed, over microbatches and over devices."""
    decoupled_grad: bool = False
    """The optimizer reads gradients in `main_grads_dtype` though the parameters have another one."""
    on_dtype_mismatch: Literal["error", "copy"] = "error"
    """Where these two dtypes differ and the gradient is not decoupled: refuse, or cast it to the parameters' dtype."""
    precision: Literal["bf16", "fp8"] = "bf16"
    """Dtype in which the blocks multiply matrices; with fp8, all else stays as the model computes it."""
    pp: int = 1
    """Ranks of the pipeline, each with its part of the layers and of the vocabulary."""
    chunks: int = 1
    """Stages of each pipeline rank."""
    schedule: str = "aligned"
    """aligned, 1f1b, interleaved-1f1b, zb-h1, zb-v, gpipe and others (`python -m jgraph.inspect schedule`); a .csv or
    .json file; or `auto`, which measures and takes the fastest that fits."""
    pp_engine: Literal["program", "dispatch", "auto"] = "program"
    """What plays the schedule: one program over all ranks, or executables of each rank that the host hands over; `auto` times
    the best of both, of all schedules with `schedule` auto, and keeps the faster one with the run."""
    memory_limit: float = 0.0
    """With `schedule` auto: GiB of a device for arrays that wait between the parts of the backward; 0 for no limit."""
    remat: Literal["nothing", "wide", "layer"] = "nothing"
    """`layer` keeps only the input of a layer, and computes the rest again in the backward: less memory, a third more FLOPs.
    In a pipeline, `wide` computes products again that widen by four or more, as an MLP's first: less memory, 11% more FLOPs."""
    data: tuple[str, ...] = ("python-docs",)
    """`python-docs`, `python-source`, `synthetic`, files, directories and globs of text, JSON Lines or Parquet, directories of
    token files (see `python -m jgraph.data`); NAME:WEIGHT for a mixture, e.g. code:0.7 prose:0.3."""
    data_field: str = "text"
    """Field of a JSON line, or column of a Parquet file, that holds the text."""
    data_shuffle: Literal["windows", "documents"] = "windows"
    """What comes in another order in each epoch: `windows` of the text, whose documents follow each other as they are, or the
    `documents` and then windows of those."""
    data_documents: Literal["joined", "separate"] = "joined"
    """Whether the tokens of a document see those of other documents before it in their row. `separate`: they do not, as if each
    document had a row to itself, and its last token, the end of text, predicts nothing."""
    init_from: str = ""
    """A Hugging Face folder whose weights the run begins with. Its config.json says the model's sizes, and its tokenizer.json
    reads `data` that is text. A run that goes on does not read it again."""
    continue_from: str = ""
    """Another run's directory, with whose newest weights this run begins, at step 0; or RUN/checkpoints/STEP. The model's
    settings, the tokenizer and, if none is given, the preset are that run's. A run that goes on does not read it again."""
    continue_with: Literal["weights", "optimizer"] = "weights"
    """With `continue_from`: the weights and what the model carries, or the optimizer's moments and their count too."""
    run_dir: str = ""
    """Where everything is written; runs/PRESET when empty. On a disk that all processes share."""
    seed: int = 0
    """Seeds the weights and the order of the data."""
    resume: bool = True
    """Go on from the last checkpoint of the run directory; off, it starts over and replaces what is there."""
    graph: Literal["auto", "off", "full", "measure"] = "auto"
    """Command buffers (CUDA graphs): XLA's default, none, or all that it can record, collectives between devices included; or
    `measure`, which times the step with each before the run begins and takes the fastest."""
    xla_options: tuple[str, ...] = ()
    """Further XLA options of the compiled step, as name=value; checked against the installed XLA."""
    compile_cache: str = ""
    """Where compiled programs are kept for the next start: a directory, or `off`. Empty for the user's cache. Whoever can write
    there can run code in a run that reads it."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when the loss or a gradient is not finite: stop the run, or skip that update and count it."""
    log_every: int = 10
    """Steps between progress lines and entries in metrics.jsonl (and one of the first step)."""
    log: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where those entries go too: TensorBoard's event files in the run directory, a run of Weights & Biases."""
    eval_every: int = 250
    """Steps between evaluations on held-out text (and one at the end)."""
    eval_batches: int = 16
    """Largest number of batches in an evaluation."""
    checkpoint_every: int = 250
    """Steps between checkpoints (and one at the end)."""
    checkpoint_keep: int = 2
    """Checkpoints kept."""
    hang_seconds: float = 1800.0
    """End the run (exit code 75) where it waits so long for one program of the devices; 0 never does. More than the slowest
    step takes, and than one process keeps the others waiting, as where it compiles what they have compiled already."""
    profile: str = ""
    """FIRST:STOP, the steps to trace: those after the FIRST up to STOP, e.g. 10:13 for the 11th to the 13th, as they are
    captured, then as many without capture, where kernels have names; profile/profile.html and profile.json are written in
    the run directory."""
    sample_tokens: int = 256
    """Length of the text generated at the end; 0 for none."""
    fp8: FP8Config = field(default_factory=FP8Config)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def __post_init__(self):
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
        self._check_experts(must)
        must("reshard_after_forward", self.fsdp > 1 or not self.reshard_after_forward, "unset where `fsdp` is 1")
        must("shard_rules", self.fsdp > 1 or not self.shard_rules, "empty where `fsdp` is 1")
        for rule in self.shard_rules:
            pattern, _, axis = rule.rpartition("=")
            require(bool(pattern) and axis.isdecimal(), "shard_rules", rule, "PATTERN=AXIS with an axis from 0")
        if self.is_pipeline:
            # Before the rule on differing dtypes, whose advice it would refuse.
            advice = "whose products add onto float32; parameters may be bfloat16 (`main_params_dtype`)"
            must("main_grads_dtype", self.main_grads_dtype == "float32", f"float32 in a pipeline, {advice}")
            advice = "where a rank gathers its stages once a step; for less memory, take more ranks (`pp`) or `remat` layer"
            must("reshard_after_forward", not self.reshard_after_forward, f"unset in a pipeline, {advice}")
            for name, usual in self._of_program.items():
                is_usual = getattr(self, name) == usual
                must("pp_engine", self.pp_engine != "dispatch" or is_usual, f"program with `{name}` {getattr(self, name)}")
        differ = self.main_params_dtype != self.main_grads_dtype and not self.decoupled_grad
        must(
            "main_grads_dtype",
            not differ or self.on_dtype_mismatch == "copy",
            f"`main_params_dtype` {self.main_params_dtype}, or take `decoupled_grad` (the optimizer reads "
            f"{self.main_grads_dtype}), or `on_dtype_mismatch` copy (one cast more)",
        )
        must("remat", self.is_pipeline or self.remat != "wide", "nothing or layer where `pp` is 1")
        must("memory_limit", 0 <= self.memory_limit < math.inf, "0 or positive")
        must("memory_limit", self.schedule == "auto" or not self.memory_limit, "0 where `schedule` is not auto")
        if self.schedule == "auto" or self.schedule.endswith((".csv", ".json")):
            must("chunks", self.chunks == 1, f"1 with `schedule` {self.schedule}, which says it itself")
        if self.schedule == "interleaved-1f1b":
            must("chunks", self.chunks > 1, "at least 2 with `schedule` interleaved-1f1b; with 1, take `schedule` 1f1b")
        must("continue_from", not (self.continue_from and self.init_from), "empty where `init_from` is given")
        must("continue_with", bool(self.continue_from) or self.continue_with == "weights", "given with `continue_from` only")
        for option in self.xla_options:
            require("=" in option, "xla_options", option, "name=value")
        if self.precision == "bf16" and self.fp8 != FP8Config():
            name = next(f.name for f in fields(FP8Config) if getattr(self.fp8, f.name) != getattr(FP8Config(), f.name))
            require(False, f"fp8.{name}", getattr(self.fp8, name), "left out where `precision` is bf16")
        if self.profile:
            first, stop = self.profile_steps
            must("profile", self.profile.replace(":", "", 1).isdecimal() and first < stop, "FIRST:STOP with FIRST < STOP")
            needed = first + 2 * (stop - first) + 2
            room = f"in a run of at least {needed} steps (the window twice, and two more); `steps` is {self.steps}"
            must("profile", needed <= self.steps, room)
        warmup = self.optimizer.warmup_steps
        if not isinstance(warmup, Usual):
            require(warmup <= self.steps, "optimizer.warmup_steps", warmup, f"at most `steps` {self.steps}")
        elif warmup > self.steps // 10:
            object.__setattr__(self, "optimizer", replace(self.optimizer, warmup_steps=Usual(self.steps // 10)))
        if not self.run_dir:
            object.__setattr__(self, "run_dir", f"runs/{self.preset or self.module.rpartition(':')[2]}")

    def _check_experts(self, must: Any) -> None:
        """Raises ConfigError where experts cannot be spread over so many devices."""
        if self.ep == 1:
            return
        among = "fsdp" if self.fsdp > 1 else "dp"
        ranks = getattr(self, among)
        must("ep", ranks % self.ep == 0, f"a divisor of `{among}` {ranks}")
        if (moe := getattr(self.model, "moe", None)) is None:
            return
        experts = getattr(moe, "num_experts", 0)
        must("ep", experts > 0, "1 for a model without experts")
        ranks = self.shards
        must("ep", experts % ranks == 0, f"such that {ranks} devices divide the `model.moe.num_experts` {experts}")

    @property
    def shards(self) -> int:
        """Devices that share some parameters: all of them, or the experts alone where `fsdp` is 1."""
        return max(self.fsdp, self.ep)

    @property
    def replicas(self) -> int:
        """Devices that have the same parameters, each with its part of the batch."""
        return self.dp * self.fsdp // self.shards

    @property
    def known_graph(self) -> Literal["auto", "off", "full"]:
        """`graph`, where nothing is left to measure; else `auto`."""
        return "auto" if self.graph == "measure" else self.graph

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def profile_steps(self) -> tuple[int, int]:
        """First step of `profile` and the one to stop at; (0, 0) where nothing is to be traced."""
        first, _, stop = self.profile.partition(":")
        return (int(first), int(stop)) if first.isdecimal() and stop.isdecimal() else (0, 0)

    @property
    def read_dtype(self) -> DtypeName:
        """Dtype of the gradient that the optimizer reads; where it is `main_grads_dtype`, that gradient is the accumulator."""
        if self.decoupled_grad or self.main_params_dtype == self.main_grads_dtype:
            return self.main_grads_dtype
        return self.main_params_dtype

    @property
    def is_sharded(self) -> bool:
        """Whether `jgraph.parallel.fsdp` makes and sums gradients; on one device too, where other dtypes are asked for."""
        return not self.is_pipeline and (self.shards > 1 or (self.main_params_dtype, self.main_grads_dtype) != ("float32",) * 2)

    @property
    def is_pipeline(self) -> bool:
        """Whether the step plays a schedule; it does on one rank too, where anything about it was asked for."""
        return (self.pp, self.chunks, self.schedule, self.pp_engine) != (1, 1, "aligned", "program")

    @property
    def is_delayed(self) -> bool:
        """Whether arrays in FP8 are scaled by the amax of the steps before."""
        return self.precision == "fp8" and self.fp8.recipe == "delayed"

    @property
    def pp_engines(self) -> tuple[str, ...]:
        """What may play the schedule."""
        if self.pp_engine != "auto":
            return (self.pp_engine,)
        can_dispatch = all(getattr(self, name) == usual for name, usual in self._of_program.items())
        return ("program", "dispatch") if can_dispatch else ("program",)

    @property
    def _of_program(self) -> dict[str, Any]:
        """What only one program does, by field: its value where nothing of the kind is asked for."""
        # A mixture's balance loss is of all tokens of a microbatch, and a device that is handed its own knows of no others.
        mixture = bool(getattr(getattr(self.model, "moe", None), "num_experts", 0))
        return {"fsdp": 1, "profile": ""} | ({"dp": 1} if mixture else {})

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, module: str = "") -> Self:
        """Restores a configuration from the JSON of its `dataclasses.asdict`.

        Args:
            fields: Fields by name.
            module: Model class that the caller named; empty if the caller named none.

        Raises:
            ConfigError: If a field is missing, unknown or wrong, or the model class may not be imported (`check_import`).
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
            raise ConfigError(f"config is not one of this version of jgraph: {e}", field="run_dir") from e


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _must(config: Any, prefix: str, name: str, condition: bool, allowed: str) -> None:
    """Raises ConfigError where a field does not meet its condition."""
    require(condition, prefix + name, getattr(config, name), allowed)
