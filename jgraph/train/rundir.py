"""The files of a run directory, and the settings that may change when its run is resumed."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jgraph.errors import ConfigError, os_errors
from jgraph.train.config import COMPONENTS, DefaultSteps, DefaultValue, OutputConfig, TrainConfig
from jgraph.train.model import is_class_name

ORIGIN = "origin"
"""Subdirectory with copies of the small files of the initial weights and the data, such as a tokenizer."""


class RunDir:
    """Reads and writes the files of a run under one directory, which need not exist yet. Opens no file when it is created.

    Attributes:
        path: The directory.
        config: Path of `config.json`, the configuration as one JSON object.
        metrics: Path of `metrics.jsonl`, one JSON object per logged step.
        checkpoints: Path of `checkpoints/`, with one directory per checkpoint, named by the number of finished steps.
        lock_file: Path of `lock`, the id and host of the process that writes to the directory.
        origin: Path of `origin/`, copies of the small files of the initial weights and the data, such as a tokenizer.
        samples: Path of `samples.jsonl`, one JSON object per text that a run generated at its end.
        tensorboard: Path of `tensorboard/`, TensorBoard event files.
        wandb: Path of `wandb.json`, the id of the run in Weights & Biases.

    Args:
        path: The directory. It need not exist.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config, self.metrics = path / "config.json", path / "metrics.jsonl"
        self.checkpoints, self.lock_file = path / "checkpoints", path / "lock"
        self.origin = path / ORIGIN
        self.samples, self.tensorboard, self.wandb = path / "samples.jsonl", path / "tensorboard", path / "wandb.json"

    def has_checkpoint(self) -> bool:
        """Returns True if `checkpoints/` has a completely written checkpoint. Does not check its data."""
        return self.last_checkpoint() is not None

    def last_checkpoint(self) -> int | None:
        """Returns the step of the newest completely written checkpoint, or None if there is none. Does not check its data."""
        names = os.listdir(self.checkpoints) if self.checkpoints.is_dir() else ()
        return max((int(name) for name in names if name.isdecimal() and name == str(int(name))), default=None)

    def resumes(self, output: OutputConfig) -> bool:
        """Returns True if `output.resume` is True and `checkpoints/` has a completely written checkpoint, damaged or not.

        Such a run resumes from a checkpoint of this directory.

        Args:
            output: The settings of the run.
        """
        return output.resume and self.has_checkpoint()

    def resumed(self, config: TrainConfig) -> TrainConfig:
        """Adapts the learning rate schedule of a configuration to the saved run that it resumes.

        Changes only `extend`, `decay_steps` and a default `warmup_steps` of `optimizer`:

        - If `steps` is that of the saved run and the saved `extend` is `no`, `extend` becomes `no`.
        - If `steps` is that of the saved run and the saved `extend` is not `no`, `extend` becomes the saved one, and a
          `decay_steps` of 0 becomes the saved one. If the given `extend` is neither `no` nor the saved one, nothing changes.
        - If `steps` differs and `extend` is `constant`, a `decay_steps` of 0 becomes the step where the saved schedule ends.
        - If `steps` differs and `extend` is `no`, the method `check` rejects the result.

        A default `warmup_steps` becomes the saved one if that is at most `steps`, except in the first case and if nothing
        changes. Does not check the other settings.

        Args:
            config: The configuration that the user asked for.

        Returns:
            A copy of `config` with the adapted `optimizer`. `config` itself if nothing changes because there is no config.json
            or no checkpoint, or `output.resume` is False.

        Raises:
            ConfigError: If config.json is damaged, or the saved run has another model class, which is not imported.
        """
        if not (self.config.exists() and self.resumes(config.output)):
            return config
        before = _flat_fields(self.fields(), config)
        if (saved := before.get("module", config.module)) != config.module:
            advice = f"pass `module` {saved} to resume it" if is_class_name(saved) else "it cannot be resumed"
            raise self._error(f"holds a run of the model {saved!r}, and `module` is {config.module}; {advice}")
        return _resumed(config, before)

    def check(self, config: TrainConfig, fingerprint: str) -> None:
        """Checks that a run may write in this directory. Writes nothing.

        A new or empty directory is accepted, and with `output.resume` False any run directory. With `output.resume` True, the
        directory may hold the same run, or a run that stopped before its first checkpoint.

        Args:
            config: The configuration of the run, as `resumed` returns it.
            fingerprint: Hash of the data (`Corpus.fingerprint`). The first 12 characters are compared.

        Raises:
            ConfigError: If the path is a file, or a directory with files but no config.json. With `output.resume` True, also if
                config.json is damaged, or the saved run has other data or another value of a setting that may not change. The
                message lists these settings.
        """
        if self.path.exists() and not self.path.is_dir():
            raise self._error("must be a directory, not a file")
        if not self.config.exists():
            if self.path.is_dir() and any(path.name not in ("lock", "lock.tmp") for path in self.path.iterdir()):
                raise self._error("must be a new or empty directory, or a run directory; this one has files but no config.json")
            return
        if config.output.resume and not self._is_free() and (differing := self._differences(config, fingerprint)):
            advice = "use another `run_dir`, or `resume` off to start over and replace that run"
            raise self._error(f"holds a run of another configuration: {'; '.join(differing)}; {advice}")

    def reset(self) -> None:
        """Deletes checkpoints/, metrics.jsonl, samples.jsonl, wandb.json and tensorboard/, so that the run starts over.

        Keeps config.json, origin/ and the lock. Missing files are ignored.

        Raises:
            ConfigError: If a file or the checkpoints cannot be deleted.
        """
        # Renamed first: half-removed checkpoints must not look like damaged ones.
        removed = self.path / "checkpoints.removed"
        shutil.rmtree(removed, ignore_errors=True)
        with os_errors("run_dir", self.path):
            if self.checkpoints.exists():
                self.checkpoints.rename(removed)
                shutil.rmtree(removed)
            for file in (self.metrics, self.samples, self.wandb):
                file.unlink(missing_ok=True)
        shutil.rmtree(self.tensorboard, ignore_errors=True)

    def add_sample(self, step: int, prompt: str, text: str) -> None:
        """Adds a generated text to samples.jsonl. Removes the texts of this step and of later steps, and damaged lines.

        Args:
            step: Number of finished steps of the model that generated the text.
            prompt: The prompt.
            text: The generated text, without the prompt.

        Raises:
            ConfigError: If the file cannot be written.
        """
        earlier = [sample for sample in self.read_samples() if sample["step"] < step]
        lines = [json.dumps(sample) + "\n" for sample in (*earlier, {"step": step, "prompt": prompt, "text": text})]
        replace_text(self.samples, "".join(lines))

    def read_samples(self) -> list[dict[str, Any]]:
        """Reads samples.jsonl.

        Returns:
            One dict per text, in the order of the file, with the keys "step" (int), "prompt" and "text" (str). Empty if there
            is no file. Damaged lines are skipped.
        """
        samples: list[dict[str, Any]] = []
        for line in self.samples.read_text(errors="replace").splitlines() if self.samples.exists() else ():
            with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
                read = json.loads(line)
                samples.append({"step": int(read["step"]), "prompt": str(read["prompt"]), "text": str(read["text"])})
        return samples

    def write(self, config: TrainConfig, corpus: dict[str, Any], versions: dict[str, str]) -> None:
        """Creates the directory and writes config.json atomically.

        Args:
            config: The configuration of the run. Its fields are the top level of the file.
            corpus: Description of the data, the field "corpus" of the file; must be representable in JSON.
            versions: Version by name of package, the field "versions" of the file.

        Raises:
            ConfigError: If the directory or the file cannot be written.
        """
        with os_errors("run_dir", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        replace_json(self.config, config.to_dict() | {"corpus": corpus, "versions": versions})

    def _error(self, wrong: str) -> ConfigError:
        return ConfigError(f"`run_dir` is {self.path}: {wrong}", field="run_dir")

    def _is_free(self) -> bool:
        """True if the run stopped before its first checkpoint, so that another run may replace it."""
        return not self.has_checkpoint() and {"preset", "corpus", "versions"} <= self.fields().keys()

    def fields(self) -> dict[str, Any]:
        """Returns the JSON object in config.json: the fields of the configuration, "corpus" and "versions".

        Raises:
            ConfigError: If the file is damaged or is not a JSON object.
            FileNotFoundError: If there is no such file.
        """
        try:
            fields = json.loads(self.config.read_text())
            if not isinstance(fields, dict):
                raise ValueError("it is not an object")
            flatten(fields)  # raises RecursionError if it is nested too deeply
        except (ValueError, RecursionError) as e:
            raise self._error(f"its config.json is damaged ({e}); name another `run_dir`") from e
        return fields

    def saved_config(self, *, field: str, module: str = "") -> TrainConfig:
        """Returns the configuration of the saved run. Imports its model class, which runs the code of the module.

        Args:
            field: Name of the caller's argument that holds the directory, for errors.
            module: Model class that the caller trusts, as `package.module:Class`. Required for a class outside
                `jgraph_models`, and may be empty otherwise.

        Returns:
            The configuration, without the description of the data and the versions.

        Raises:
            ConfigError: If there is no config.json, it is damaged, or its fields are not those of this version of jgraph. Also
                if `module` is another class than the saved one, or is empty for a class outside `jgraph_models`.
        """
        if not self.config.exists():
            must = "be a run directory, with a config.json and checkpoints/"
            problem = f"must {must}" if self.path.exists() else "no such directory"
            raise ConfigError(f"`{field}` is {self.path}: {problem}", field=field)
        fields = self.fields()
        settings = {name: value for name, value in fields.items() if name not in ("corpus", "versions")}
        return TrainConfig.from_dict(settings, module=module)

    def _differences(self, config: TrainConfig, fingerprint: str) -> list[str]:
        """Returns one text for each difference from the run in this directory."""
        # JSON turns tuples into lists, as in the file.
        new, saved = flatten(json.loads(json.dumps(config.to_dict()))), _flat_fields(self.fields(), config)
        saved_fingerprint = str(saved.get("corpus.fingerprint"))[:12]
        saved = {name: value for name, value in saved.items() if name.partition(".")[0] not in ("corpus", "versions")}
        differing = _differences(new, saved, self.last_checkpoint() or 0)
        if fingerprint[:12] != saved_fingerprint:
            text = f"the text of `data` {' '.join(config.input.data)}, or its token ids,"
            differing.append(f"{text} has fingerprint {fingerprint[:12]} and had {saved_fingerprint}")
        return differing


def replace_json(path: Path, fields: dict[str, Any]) -> None:
    """Writes a JSON file of the run directory atomically, indented by 2. Replaces an existing file.

    Writes PATH.tmp first and renames it.

    Args:
        path: The file. Its directory must exist.
        fields: The JSON object to write.

    Raises:
        ConfigError: If the file cannot be written.
    """
    replace_text(path, json.dumps(fields, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Writes a text file of the run directory atomically. Replaces an existing file.

    Writes PATH.tmp first and renames it.

    Args:
        path: The file. Its directory must exist.
        text: The whole new content.

    Raises:
        ConfigError: If the file cannot be written.
    """
    scratch = path.with_name(path.name + ".tmp")
    with os_errors("run_dir", path):
        scratch.write_text(text)
        os.replace(scratch, path)


def versions() -> dict[str, str]:
    """Returns the installed versions of the packages that affect the compiled step.

    Returns:
        A dict with the keys "jax", "jaxlib", "flax" and "optax", for example `{"jax": "0.7.0", ...}`.
    """
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}


def flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts to one dict with dotted names.

    Args:
        fields: A dict with string keys, perhaps with nested dicts. Not changed.
        prefix: Text before every name of the result.

    Returns:
        A new dict, for example `{"optimizer.beta1": 0.9}` for `{"optimizer": {"beta1": 0.9}}`. An empty nested dict leaves no
        entry.
    """
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _flat_fields(fields: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    """Flattens the fields of a config.json to dotted names.

    Args:
        fields: The fields.
        config: A configuration with the same model class. Its classes define the defaults of fields that an earlier version did
            not write.
    """
    if isinstance(fields.get("model"), dict):
        parts = {name: part for name, part in vars(config).items() if dataclasses.is_dataclass(part)}
        nested = {name: _defaults(part) | fields[name] for name, part in parts.items() if isinstance(fields.get(name), dict)}
        defaults: dict[str, Any] = {}
        for part in (config, *(parts[name] for name in COMPONENTS)):
            defaults |= _defaults(part)
        fields = defaults | fields | nested
    return flatten(fields)


def _defaults(config: Any) -> dict[str, Any]:
    """Returns the constant defaults of a dataclass."""
    defaults = {field.name: field.default for field in dataclasses.fields(config) if field.default is not dataclasses.MISSING}
    nested = {name: vars(value) for name, value in defaults.items() if dataclasses.is_dataclass(value)}
    tuples = {name: list(value) for name, value in defaults.items() if isinstance(value, tuple)}  # as in JSON
    return defaults | nested | tuples


def differences(fields: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a configuration that differ from another configuration.

    Args:
        fields: Fields by name. The fields of a nested dict are compared one by one.
        base: The fields to compare with, in the same form.

    Returns:
        A dict from the dotted name, such as "optimizer.beta1", to the value in `fields`, for each field that is missing in
        `base` or has another value there. Leaves out each `DefaultSteps` and `DefaultValue`, because they depend on other
        fields.
    """
    flat, base = flatten(fields), flatten(base)
    flat = {name: value for name, value in flat.items() if not isinstance(value, DefaultSteps | DefaultValue)}
    return {name: value for name, value in flat.items() if name not in base or base[name] != value}


class Rule(NamedTuple):
    """States whether settings may change when a run is resumed.

    Attributes:
        fields: Names of the settings, separated by spaces. The name of a nested configuration, such as `optimizer`, stands for
            its fields without a rule of their own.
        may: `yes`: these settings may change. `no`: a change is an error. `by extend`: they may change only if
            `optimizer.extend` is `cosine` or `constant`.
        why: The reason, for the table in the guide.
    """

    fields: str
    may: Literal["yes", "no", "by extend"]
    why: str


RULES = (
    Rule("steps", "by extend", "more steps, or fewer, but at least the steps already done"),
    Rule("optimizer.extend optimizer.decay_steps", "by extend", "they set the learning rate of the new steps"),
    Rule("run_dir resume", "yes", "they select the run to resume"),
    Rule("log log_every eval_every eval_batches profile sample_tokens", "yes", "monitoring does not change the training"),
    Rule("checkpoint_every checkpoint_keep hang_seconds on_nonfinite", "yes", "saving and stopping do not change the training"),
    Rule("dp fsdp ep cp tp reshard_after_forward shard_rules", "yes", "same training on other devices, up to rounding"),
    Rule("pp pp_engine chunks schedule memory_limit distributed", "yes", "same training on other devices, up to rounding"),
    Rule(
        "remat graph xla_options compile_cache model.tensor_overlap", "yes", "same training in another program, up to rounding"
    ),
    Rule("model.moe.capacity", "yes", "the capacity changes no step unless tokens are dropped"),
    Rule("fp8.compute", "yes", "calibration and FP8 update the same amax histories"),
    Rule("preset module model", "no", "another model"),
    Rule("init_from continue_from continue_with", "no", "other initial weights"),
    Rule("data data_field data_format data_template data_truncate", "no", "other batches"),
    Rule("data_shuffle data_documents seed batch_size seq_len num_microbatches", "no", "other batches"),
    Rule("optimizer freeze", "no", "the saved optimizer state would not match"),
    Rule("lora", "no", "other trained parameters"),
    Rule("precision fp8 main_params_dtype", "no", "other numerics"),
    Rule("main_grads_dtype decoupled_grad on_dtype_mismatch", "no", "other numerics"),
)
_BY_FIELD = {name: rule for rule in RULES for name in rule.fields.split()}


def rule_of(name: str) -> Rule:
    """Returns the rule that states whether a setting may change when a run is resumed.

    Args:
        name: The dotted name of the setting, for example `optimizer.beta1`.

    Returns:
        The rule in `RULES` for the name, else for the part before the first dot. For an unknown setting, a new rule with `may`
        `no`.
    """
    return _BY_FIELD.get(name) or _BY_FIELD.get(name.partition(".")[0], Rule(name, "no", "unknown"))


def _resumed(config: TrainConfig, before: dict[str, Any]) -> TrainConfig:
    """Sets the learning-rate schedule of a run that is resumed.

    With the same number of steps, the schedule stays the saved one. With another number, `optimizer.extend` decides where the
    schedule ends. The warmup stays the saved one unless the flags set it or the new run is shorter than the warmup.

    Args:
        config: The configuration from the flags.
        before: The saved configuration, flattened to dotted names.

    Returns:
        `config` with another schedule. `_differences` reports a schedule that cannot be resumed.
    """
    flags, saved_extend = config.optimizer, before.get("optimizer.extend", "no")
    saved_decay = before.get("optimizer.decay_steps", 0)
    if "steps" not in before:
        return config  # the config.json is not from a run
    if config.steps == before["steps"]:
        if saved_extend == "no":
            return dataclasses.replace(config, optimizer=dataclasses.replace(flags, extend="no"))
        if flags.extend not in ("no", saved_extend):
            return config
        extend, decay_steps = saved_extend, flags.decay_steps or saved_decay
    elif flags.extend == "no":
        extend, decay_steps = "no", flags.decay_steps  # `_differences` refuses it because of `steps`
    else:
        extend, decay_steps = flags.extend, flags.decay_steps
        if extend == "constant":
            decay_steps = decay_steps or saved_decay or before["steps"]
    warmup_steps = flags.warmup_steps
    if isinstance(warmup_steps, DefaultSteps) and _warmup(before) <= config.steps:
        warmup_steps = before.get("optimizer.warmup_steps", warmup_steps)
    optimizer = dataclasses.replace(flags, extend=extend, decay_steps=decay_steps, warmup_steps=warmup_steps)
    return dataclasses.replace(config, optimizer=optimizer)


def _differences(new: dict[str, Any], before: dict[str, Any], done: int) -> list[str]:
    """Lists the settings that prevent a run from being resumed.

    Args:
        new: The configuration that `_resumed` returned, flattened to dotted names.
        before: The saved configuration, flattened to dotted names.
        done: Number of steps already done.

    Returns:
        One text per setting, with its new and its saved value.
    """
    names = [name for name in new | before if new.get(name) != before.get(name) and rule_of(name).may != "yes"]
    if _is_extended(new, before, done):
        return [_difference(name, new, before) for name in names if rule_of(name).may != "by extend"]
    # The schedule depends on the number of steps. If that number is not allowed, only the number is reported.
    derived, reason = set(), ""
    if new.get("steps") != before.get("steps"):
        if new["steps"] < done:
            reason = f" ({done} are done)"
        elif new["steps"] < _warmup(before):
            reason = f" (the warmup takes {_warmup(before)})"
        elif new["optimizer.extend"] == "no":
            reason = " (set `optimizer.extend` to schedule or constant to choose the learning rate of the new steps)"
        if reason:
            derived |= {"optimizer.extend", "optimizer.decay_steps"}
        if new["steps"] < _warmup(before):
            derived.add("optimizer.warmup_steps")
    return [_difference(name, new, before) + reason * (name == "steps") for name in names if name not in derived]


def _difference(name: str, new: dict[str, Any], before: dict[str, Any]) -> str:
    now, saved = ("empty" if (value := fields.get(name, "absent")) == "" else value for fields in (new, before))
    return f"`{name}` is {now} and was {saved}"


def _is_extended(new: dict[str, Any], before: dict[str, Any], done: int) -> bool:
    """True if the number of steps changes in a way that `_resumed` allows."""
    steps = before.get("steps")
    ends = {"schedule": 0, "cosine": 0, "constant": before.get("optimizer.decay_steps", 0) or steps}
    has_schedule = ends.get(new["optimizer.extend"]) == new["optimizer.decay_steps"]
    fewest = max(done, _warmup(before))
    return has_schedule and steps is not None and new["steps"] != steps and new["steps"] >= fewest


def _warmup(before: dict[str, Any]) -> int:
    saved = before.get("optimizer.warmup_steps", 0)
    return saved if isinstance(saved, int) else 0
