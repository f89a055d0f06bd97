"""Settings of the strategy and of the compiled step, which `setup.py` builds. No JAX."""

import math
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from jgraph.errors import check_types, require, require_positive
from jgraph.settings import OTHER_DEVICES, OTHER_PROGRAM, check_field, may_change

DtypeName: TypeAlias = Literal["bfloat16", "float32"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Devices of the run: the axes of the mesh, and how parameters are sharded over them."""

    dp: int | Literal["auto"] = may_change(1, OTHER_DEVICES)
    """Data-parallel replicas, or `auto` (see `--fsdp`). Each processes its shard of the batch."""
    fsdp: int | Literal["auto"] = may_change(1, OTHER_DEVICES)
    """Devices that parameters, gradients and optimizer state are sharded over. Each processes its shard of the batch. `auto`
    takes all devices that the other options leave. A run that resumes on fewer devices divides its microbatches."""
    ep: int = may_change(1, OTHER_DEVICES)
    """Devices that the experts of a layer are sharded over. Tokens are exchanged between them. Must divide `fsdp`, or `dp` if
    `fsdp` is 1."""
    pp: int = may_change(1, OTHER_DEVICES)
    """Pipeline ranks. Layers and vocabulary are divided between them."""
    cp: int = may_change(1, OTHER_DEVICES)
    """Devices that the tokens of each sequence are divided between. Two times `cp` must divide `seq_len`."""
    tp: int = may_change(1, OTHER_DEVICES)
    """Devices that each matrix is split over: attention heads, hidden units of MLPs and experts, and the vocabulary."""
    gather_per: Literal["step", "pass"] = may_change("step", OTHER_DEVICES)
    """With `fsdp`: gather parameters once per `step`, or in every `pass` of every microbatch, forward and again backward (more
    traffic, less memory)."""
    shard_rules: tuple[str, ...] = may_change((), OTHER_DEVICES)
    """With `fsdp`: PATTERN=AXIS, the axis to shard the matching parameters along, e.g. '*/down/kernel=1'."""

    def __post_init__(self):
        check_types(self)
        require_positive(self, "ep pp cp tp")
        for name in ("dp", "fsdp"):
            size = getattr(self, name)
            check_field(self, name, size == "auto" or (type(size) is int and size > 0), "positive, or auto")
        for rule in self.shard_rules:
            pattern, _, axis = rule.rpartition("=")
            require(bool(pattern) and axis.isdecimal(), "shard_rules", rule, "PATTERN=AXIS, AXIS counted from 0")
        check_field(self, "dp", self.dp != "auto" or self.fsdp != "auto", "a number if `fsdp` is auto")
        if not self.auto:
            self._check_sharding()

    def _check_sharding(self) -> None:
        """Checks options that depend on the number of data ranks."""
        fsdp = self.sizes["fsdp"]
        divided, ranks = ("fsdp", fsdp) if fsdp > 1 else ("dp", self.data_ranks)
        hint = "; experts are sharded over devices of `fsdp` or `dp`" if ranks == 1 else ""
        check_field(self, "ep", ranks % self.ep == 0, f"a divisor of `{divided}` {ranks}{hint}")
        check_field(self, "gather_per", fsdp > 1 or self.gather_per == "step", "step if `fsdp` is 1")
        check_field(self, "shard_rules", fsdp > 1 or not self.shard_rules, "empty if `fsdp` is 1")

    @property
    def auto(self) -> str:
        """The option that is `auto`; empty if none is."""
        return next((name for name in ("dp", "fsdp") if getattr(self, name) == "auto"), "")

    @property
    def sizes(self) -> dict[str, int]:
        """Devices by option. The product is the number of devices. `auto` counts as 1."""
        sizes = {"dp": self.dp, "pp": self.pp, "fsdp": self.fsdp, "cp": self.cp, "tp": self.tp}
        return {name: 1 if size == "auto" else size for name, size in sizes.items()}

    @property
    def shards(self) -> int:
        """Devices that parameters are sharded over. If `fsdp` is 1, only the parameters of experts are sharded."""
        return max(self.sizes["fsdp"], self.ep)

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def data_ranks(self) -> int:
        """Devices per pipeline rank that process different rows of each microbatch."""
        return self.sizes["dp"] * self.sizes["fsdp"]


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Pipeline schedule and engine, for a run with several pipeline ranks (`--pp`)."""

    chunks: int = may_change(1, OTHER_DEVICES)
    """Stages per pipeline rank."""
    schedule: str = may_change("aligned", OTHER_DEVICES)
    """Pipeline schedule: aligned, 1f1b, interleaved-1f1b, zb-h1, zb-v, gpipe and others (see
    `python -m jgraph.inspect schedule`), a .csv or .json file, or `auto`. `auto` measures the model and selects the fastest
    schedule that fits."""
    pp_engine: Literal["program", "dispatch"] = may_change("program", OTHER_DEVICES)
    """`program` compiles one SPMD program for all ranks. `dispatch` compiles one executable per rank and stage, started by the
    host (MPMD)."""
    memory_limit: float = may_change(0.0, OTHER_DEVICES)
    """With `schedule` auto: GiB per device for arrays kept between forward, dgrad and wgrad. 0 means no limit."""

    def __post_init__(self):
        check_types(self)
        require_positive(self, "chunks")
        check_field(self, "memory_limit", 0 <= self.memory_limit < math.inf, "0 or positive")
        check_field(self, "memory_limit", self.schedule == "auto" or not self.memory_limit, "0 unless `schedule` is auto")
        if self.schedule == "auto" or self.schedule.endswith((".csv", ".json")):
            check_field(self, "chunks", self.chunks == 1, f"1 with `schedule` {self.schedule}, which sets the number of chunks")
        if self.schedule == "interleaved-1f1b":
            allowed = "at least 2 with `schedule` interleaved-1f1b; for 1, use `schedule` 1f1b"
            check_field(self, "chunks", self.chunks > 1, allowed)


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
        check_types(self)

    def check(self) -> None:
        """Checks that parameters and gradients have the same dtype, or that an option handles the difference.

        `TrainConfig` calls it after the checks of a pipeline, because the messages of those checks give other advice.
        """
        differ = self.main_params_dtype != self.main_grads_dtype and not self.decoupled_grad
        advice = f"set `decoupled_grad` (the optimizer reads {self.main_grads_dtype}) or `on_dtype_mismatch` copy"
        allowed = f"`main_params_dtype` {self.main_params_dtype}; or {advice} (casts the gradient)"
        check_field(self, "main_grads_dtype", not differ or self.on_dtype_mismatch == "copy", allowed)

    @property
    def read_dtype(self) -> DtypeName:
        """Dtype of the gradient that the optimizer gets: the accumulator itself if it has this dtype, else a cast copy."""
        if self.decoupled_grad or self.main_params_dtype == self.main_grads_dtype:
            return self.main_grads_dtype
        return self.main_params_dtype


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """How the step is compiled."""

    graph: Literal["auto", "off", "full"] = may_change("auto", OTHER_PROGRAM)
    """Command buffers (CUDA graphs). `auto`: XLA's default. `off`: none. `full`: every operation that XLA can record, including
    collectives."""
    xla_options: tuple[str, ...] = may_change((), OTHER_PROGRAM)
    """Additional XLA options of the compiled step, as name=value. Checked against the installed XLA."""
    compile_cache: str = may_change("", OTHER_PROGRAM)
    """Directory for compiled programs, which the next start loads, or `off`. Empty means the user's cache directory. Anyone
    with write access to this directory can execute code in this run."""
    remat: Literal["nothing", "wide", "layer", "offload"] = may_change("nothing", OTHER_PROGRAM)
    """Recomputation in the backward. `layer` keeps only the input of each layer: saves memory, a third more FLOPs. `wide`
    (pipelines only) recomputes matmuls with an output at least four times as wide as the input, such as the first of an MLP:
    saves memory, 11% more FLOPs. `offload` recomputes like `wide`, and keeps the results of other matmuls and of attention in
    pinned host memory."""
    offload: Literal["nothing", "optimizer"] = may_change("nothing", OTHER_PROGRAM)
    """`optimizer` keeps the optimizer state in pinned host memory: moments, and float32 copies of the parameters if
    `main_params_dtype` is bfloat16. A run with bfloat16 parameters may not change it."""

    def __post_init__(self):
        check_types(self)
        for option in self.xla_options:
            require("=" in option, "xla_options", option, "name=value")


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
        check_types(self, prefix="lora.")
        check_field(self, "lora.rank", self.rank >= 0, "0 or positive")
        require_positive(self, "alpha", prefix="lora.")
        check_field(self, "lora.targets", bool(self.targets), "one or more patterns of parameter names")
        for each in fields(self) if not self.rank else ():
            check_field(self, f"lora.{each.name}", getattr(self, each.name) == each.default, "left out if `lora.rank` is 0")
