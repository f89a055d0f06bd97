"""The files of a run directory, and whether a run may write to it."""

import contextlib
import importlib.metadata
import json
import os
import shutil
from pathlib import Path
from typing import Any

from jgraph.errors import ConfigError, os_errors
from jgraph.train._output_config import OutputConfig
from jgraph.train.config import TrainConfig, flatten
from jgraph.train.model import is_class_name
from jgraph.train.resume import differences, flat_saved, resumed_schedule

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
        before = flat_saved(self.fields(), config)
        if (saved := before.get("module", config.module)) != config.module:
            advice = f"pass `module` {saved} to resume it" if is_class_name(saved) else "it cannot be resumed"
            raise self._error(f"holds a run of the model {saved!r}, and `module` is {config.module}; {advice}")
        return resumed_schedule(config, before)

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
        saved = flat_saved(self.fields(), config)
        saved_fingerprint = str(saved.get("corpus.fingerprint"))[:12]
        saved = {name: value for name, value in saved.items() if name.partition(".")[0] not in ("corpus", "versions")}
        differing = differences(config, saved, self.last_checkpoint() or 0)
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
