"""Configuration of a run: `TrainConfig`, one frozen dataclass per component, and constraints between components.

A component is defined in a file without JAX beside the code that it configures, so that a wrong flag is reported at once. A
field has the name of its flag, and its docstring is the help text of the flag. `TrainConfig.from_fields` and `changed` take the
fields of all components by name; config.json uses the same names.
"""

from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any, Self

from tyro.conf import OmitArgPrefixes, arg

from jgraph.errors import ConfigError, check_types, require, require_positive
from jgraph.precision.config import FP8Config
from jgraph.settings import check_field, may_change
from jgraph.train._distributed_config import DistributedConfig
from jgraph.train._initial_config import InitialConfig
from jgraph.train._input_config import InputConfig
from jgraph.train._monitor_config import MonitorConfig
from jgraph.train._optimizer_config import OptimizerConfig
from jgraph.train._output_config import OutputConfig
from jgraph.train._setup_config import CompileConfig, DtypeConfig, LoRAConfig, ParallelConfig, PipelineConfig
from jgraph.train.model import SettingsHooks, check_import, settings_from, settings_hooks, settings_of


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Complete configuration of a run of `python -m jgraph.train`. Immutable, with keyword arguments only.

    `TrainConfig.from_fields` takes the fields of all components by name. `python -m jgraph.train --help` describes every field.
    """

    preset: str = ""
    """Named configuration. The other options override it."""
    module: Annotated[str, arg(name="model.module")] = "jgraph_models.gpt:GPT"
    """Model class, Flax NNX or Linen, as `package.module:Class`."""
    model: Any = None
    """Settings of the model: the dataclass that its constructor takes as first argument, or None."""
    steps: int = may_change(1000, "more steps, or fewer, but at least the steps already done", by_extend=True)
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
        check_types(self)
        check_field(self, "module", self.module.count(":") == 1 and all(self.module.split(":")), "package.module:Class")
        if self.model is None and (kind := settings_of(self.module)) is not None:
            object.__setattr__(self, "model", kind())
        require_positive(self, "steps")
        check_field(self, "seed", 0 <= self.seed < 2**32, "in [0, 2**32)")
        self._check_batch()
        self._check_experts()
        if self.is_pipeline:
            self._check_pipeline()
        self._check_base()
        self.dtypes.check()
        remat = self.compile.remat
        require(self.is_pipeline or remat != "wide", "remat", remat, "nothing, layer or offload without a pipeline")
        require(not self.is_pipeline or remat != "offload", "remat", remat, "nothing, layer or wide in a pipeline")
        self._check_fp8()
        self._check_profile()
        self._set_warmup()
        if not self.output.run_dir:
            run_dir = f"runs/{self.preset or self.module.rpartition(':')[2]}"
            object.__setattr__(self, "output", replace(self.output, run_dir=run_dir))

    def _check_batch(self) -> None:
        """Checks that the sequences of a microbatch can be divided between the data ranks."""
        batch = self.input
        dp = self.parallel.sizes["dp"]
        fsdp = self.parallel.sizes["fsdp"]
        rows = self.input.microbatch_size
        sizes = f"`batch_size` {batch.batch_size}, `num_microbatches` {batch.num_microbatches}"
        require(rows % dp == 0, "dp", dp, f"a divisor of the {rows} sequences of a microbatch ({sizes})")
        divisible = f"such that `dp` {dp} x `fsdp` divides the {rows} sequences of a microbatch ({sizes})"
        require(rows // dp % fsdp == 0, "fsdp", fsdp, divisible)
        cp = self.parallel.cp
        require(cp == 1 or batch.seq_len % (2 * cp) == 0, "cp", cp, f"such that 2 x `cp` divides `seq_len` {batch.seq_len}")
        tokens = self.sequences_per_device * batch.seq_len
        fewer = f"such that a device has fewer than 2**31 tokens per microbatch; with `seq_len` {batch.seq_len} it has {tokens}"
        require(tokens < 2**31, "batch_size", batch.batch_size, fewer)

    def _check_experts(self) -> None:
        """Checks that the experts of the model can be sharded over `ep` devices."""
        ep = self.parallel.ep
        shards = self.parallel.shards
        moe = self.hooks.moe
        if ep == 1 or moe is None:
            return
        experts = moe.num_experts
        require(experts > 0, "ep", ep, "1 for a model without experts")
        require(experts % shards == 0, "ep", ep, f"such that {shards} devices divide `model.moe.num_experts` {experts}")

    def _check_base(self) -> None:
        """Checks that there are frozen weights to refer to."""
        is_given = self.initial.init_from or self.initial.continue_from
        missing = "frozen weights (`lora.rank` or `freeze`)" if is_given else "given weights (`init_from` or `continue_from`)"
        is_possible = bool(is_given and (self.lora.rank or self.freeze))
        base = self.output.checkpoint_base
        require(base == "copy" or is_possible, "checkpoint_base", base, f"copy in a run without {missing}")

    def _check_fp8(self) -> None:
        if self.dtypes.precision == "bf16" and self.fp8 != FP8Config():
            name = next(f.name for f in fields(FP8Config) if getattr(self.fp8, f.name) != getattr(FP8Config(), f.name))
            require(False, f"fp8.{name}", getattr(self.fp8, name), "left out if `precision` is bf16")

    def _check_profile(self) -> None:
        if self.monitor.profile:
            first, stop = self.monitor.profile_steps
            needed = first + 2 * (stop - first) + 2
            room = f"in a run of at least {needed} steps (the traced steps twice, and two more); `steps` is {self.steps}"
            require(needed <= self.steps, "profile", self.monitor.profile, room)

    def _set_warmup(self) -> None:
        """Checks the warmup, and reduces one that nobody set to a tenth of `steps`."""
        warmup = self.optimizer.warmup_steps
        if "warmup_steps" not in self.optimizer.unset:
            require(warmup <= self.steps, "optimizer.warmup_steps", warmup, f"at most `steps` {self.steps}")
        elif warmup > self.steps // 10:
            object.__setattr__(self, "optimizer", self.optimizer.with_defaults(warmup_steps=self.steps // 10))

    def _check_pipeline(self) -> None:
        """Checks that a pipeline supports the other settings."""
        # Checked before the rule on different dtypes, because its advice does not work in a pipeline.
        advice = "the parameters may be bfloat16 (`main_params_dtype`)"
        grads_dtype = self.dtypes.main_grads_dtype
        require(grads_dtype == "float32", "main_grads_dtype", grads_dtype, f"float32 in a pipeline; {advice}")
        advice = "a rank gathers its stages once per step; to save memory, use more ranks (`pp`) or `remat` layer"
        gather_per = self.parallel.gather_per
        require(gather_per != "pass", "gather_per", gather_per, f"step in a pipeline; {advice}")
        if self.pipeline.pp_engine == "dispatch":
            # The balance loss needs all tokens of a microbatch, and a dispatched executable has only those of its device.
            has_experts = self.hooks.moe is not None and self.hooks.moe.num_experts > 0
            dp = self.parallel.sizes["dp"]
            profile = self.monitor.profile
            for name in ("fsdp", "cp", "tp"):
                size = self.parallel.sizes[name]
                require(size == 1, "pp_engine", "dispatch", f"program with `{name}` {size}")
            require(not profile, "pp_engine", "dispatch", f"program with `profile` {profile}")
            require(dp == 1 or not has_experts, "pp_engine", "dispatch", f"program with `dp` {dp}")

    @cached_property
    def hooks(self) -> SettingsHooks:
        """The optional members of the settings of the model that jgraph reads."""
        return settings_hooks(self.module, self.model)

    @property
    def data_options(self) -> dict[str, Any]:
        """Keyword arguments of `jgraph.data.load`, except the data, the tokenizer and the chat template."""
        batch = self.input
        return {
            "field": batch.data_field,
            "documents": batch.data_documents,
            "format": batch.data_format,
            "truncate": batch.data_truncate,
            "seq_len": batch.seq_len,
            "vocab_size": self.hooks.vocab_size or None,
        }

    @property
    def sequences_per_device(self) -> int:
        """Sequences of a microbatch that a device gets. Devices of `tp` and `cp` get the same."""
        return self.input.microbatch_size // self.parallel.data_ranks

    @property
    def is_pipeline(self) -> bool:
        """True if the step runs a pipeline schedule, also on one rank."""
        pipeline = self.pipeline
        return (self.parallel.pp, pipeline.chunks, pipeline.schedule, pipeline.pp_engine) != (1, 1, "aligned", "program")

    @property
    def is_sharded(self) -> bool:
        """True if the step uses the strategy `FullySharded`, which also stores parameters and gradients in other dtypes."""
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
    def from_fields(cls, **values: Any) -> Self:
        """Creates a configuration from the fields of all components by name. Nested components are given as dataclasses.

        Examples:
            >>> TrainConfig.from_fields(fsdp=2, batch_size=8).parallel.fsdp
            2
        """
        top_level, parts = _by_component(values)
        return cls(**top_level, **{name: COMPONENTS[name](**part) for name, part in parts.items()})

    def changed(self, **values: Any) -> Self:
        """Returns a checked copy with new values of some fields, named as in `from_fields`.

        `model` and `run_dir` keep their values, even if they were derived from `module` or `preset`.
        """
        top_level, parts = _by_component(values)
        return replace(self, **top_level, **{name: replace(getattr(self, name), **part) for name, part in parts.items()})

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of config.json: fields of `COMPONENTS` at the top level, and other components nested."""
        nested = asdict(self)
        del nested["optimizer"]["unset"]
        components = [nested.pop(name) for name in COMPONENTS]
        return nested | {name: value for component in components for name, value in component.items()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any], *, module: str = "") -> Self:
        """Restores a configuration from the content of config.json. Ignores `RECORDS`.

        Imports the model class, which runs its module. The caller names a class outside `jgraph_models` that it trusts.
        """
        try:
            fields = {name: value for name, value in _with_tuples(fields).items() if name not in RECORDS}
            check_import(fields["module"], module)
            kind = settings_of(fields["module"])
            model = fields.pop("model")
            model = None if kind is None else settings_from(kind, model)
            # Earlier versions had no LoRA.
            kinds = {name: kind for name, kind in _NESTED.items() if name != "lora" or name in fields}
            parts = {name: kind(**_with_tuples(fields.pop(name))) for name, kind in kinds.items()}
            return cls.from_fields(**fields, **parts, model=model)
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
RECORDS = ("corpus", "versions", "sequences_per_device")
"""Names in config.json that are not fields of the configuration."""
# In config.json, each is an object of its own.
_NESTED = {"optimizer": OptimizerConfig, "distributed": DistributedConfig, "lora": LoRAConfig, "fp8": FP8Config}
_COMPONENT_OF = {field.name: name for name, kind in COMPONENTS.items() for field in fields(kind)}
FIELDS = frozenset(_COMPONENT_OF) | {field.name for field in fields(TrainConfig)} - COMPONENTS.keys()
"""Names of all fields, as `TrainConfig.from_fields` takes them."""


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
