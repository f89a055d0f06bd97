"""The files of a run directory, and whether a run may write to it."""

import contextlib
import importlib.metadata
import json
import os
import shutil
from pathlib import Path
from typing import Any

from jgraph.errors import ConfigError, os_errors
from jgraph.settings import flatten
from jgraph.train._resume import differences, flat_saved, resumed_schedule
from jgraph.train.config import RECORDS, OutputConfig, TrainConfig
from jgraph.train.model import is_class_name

ORIGIN = "origin"
"""Subdirectory with copies of the small files of the initial weights and the data, such as a tokenizer."""


def run_of(continue_from: str) -> tuple[Path, int | None]:
    """Splits RUN/checkpoints/STEP, or RUN alone, into the run directory and the step or None. Does not look for the files."""
    path = Path(continue_from)
    is_step = path.parent.name == "checkpoints" and path.name.isdecimal()
    return (path.parents[1], int(path.name)) if is_step else (path, None)


class RunDir:
    """Reads and writes the files of a run under one directory, which need not exist yet."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.lock_file = path / "lock"
        self.origin = path / ORIGIN
        self.samples = path / "samples.jsonl"
        self.tensorboard = path / "tensorboard"
        self.wandb = path / "wandb.json"

    def has_checkpoint(self) -> bool:
        """Returns True if there is a completely written checkpoint, damaged or not."""
        return self.last_checkpoint() is not None

    def last_checkpoint(self) -> int | None:
        """Returns the step of the newest completely written checkpoint, or None. Does not check its data."""
        names = os.listdir(self.checkpoints) if self.checkpoints.is_dir() else ()
        return max((int(name) for name in names if name.isdecimal() and name == str(int(name))), default=None)

    def resumes(self, output: OutputConfig) -> bool:
        """Returns True if a run with these settings resumes from a checkpoint of this directory."""
        return output.resume and self.has_checkpoint()

    def resumed(self, config: TrainConfig) -> TrainConfig:
        """Adapts the learning rate schedule of a configuration to the saved run that it resumes, if it resumes one.

        Does not import the model class of the saved run, and does not check the other settings.
        """
        if not (self.config.exists() and self.resumes(config.output)):
            return config
        before = flat_saved(self.fields(), config)
        if (saved := before.get("module", config.module)) != config.module:
            advice = f"pass `module` {saved} to resume it" if is_class_name(saved) else "it cannot be resumed"
            raise self._error(f"holds a run of the model {saved!r}, and `module` is {config.module}; {advice}")
        return resumed_schedule(config, before)

    def check(self, config: TrainConfig, fingerprint: str) -> None:
        """Checks that a run with this configuration and data may write in this directory. Writes nothing.

        Allowed are a new or empty directory, the same run, and a run that stopped before its first checkpoint; with `resume`
        off, every run directory.
        """
        if self.path.exists() and not self.path.is_dir():
            raise self._error("must be a directory, not a file")
        if not self.config.exists():
            if self.path.is_dir() and any(path.name not in ("lock", "lock.tmp") for path in self.path.iterdir()):
                raise self._error("must be a new or empty directory, or a run directory; this one has files but no config.json")
            return
        if not config.output.resume:
            return
        fields = self.fields()
        # A run that stopped before its first checkpoint may be replaced.
        is_free = not self.has_checkpoint() and {"preset", "corpus", "versions"} <= fields.keys()
        if not is_free and (differing := differences(config, fields, self.last_checkpoint() or 0, fingerprint)):
            advice = "use another `run_dir`, or `resume` off to start over and replace that run"
            raise self._error(f"holds a run of another configuration: {'; '.join(differing)}; {advice}")

    def reset(self) -> None:
        """Deletes what a run wrote, so that it starts over. Keeps config.json, origin/ and the lock."""
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
        """Adds a generated text to samples.jsonl. Removes texts of this step and of later steps, and damaged lines."""
        earlier = [sample for sample in self.read_samples() if sample["step"] < step]
        lines = [json.dumps(sample) + "\n" for sample in (*earlier, {"step": step, "prompt": prompt, "text": text})]
        replace_text(self.samples, "".join(lines))

    def read_samples(self) -> list[dict[str, Any]]:
        """Reads samples.jsonl: "step", "prompt" and "text" of each text. Skips damaged lines."""
        samples: list[dict[str, Any]] = []
        for line in self.samples.read_text(errors="replace").splitlines() if self.samples.exists() else ():
            with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
                read = json.loads(line)
                samples.append({"step": int(read["step"]), "prompt": str(read["prompt"]), "text": str(read["text"])})
        return samples

    def first_share(self, config: TrainConfig) -> int | None:
        """Returns `sequences_per_device` of the first start of a run with these batches; None for a new run."""
        fields = self.fields() if config.output.resume and self.config.exists() else {}
        batches = ("batch_size", "num_microbatches")
        same = all(fields.get(name) == getattr(config.input, name) for name in batches)
        return fields.get("sequences_per_device") if same else None

    def write(
        self, config: TrainConfig, corpus: dict[str, Any], versions: dict[str, str], placed: TrainConfig | None = None
    ) -> None:
        """Creates the directory and writes config.json atomically. `placed` is a configuration with `auto` replaced."""
        with os_errors("run_dir", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        share = self.first_share(config) or (placed or config).sequences_per_device
        records = corpus, versions, share
        replace_json(self.config, config.to_dict() | dict(zip(RECORDS, records, strict=True)))

    def _error(self, wrong: str) -> ConfigError:
        return ConfigError(f"`run_dir` is {self.path}: {wrong}", field="run_dir")

    def fields(self) -> dict[str, Any]:
        """Returns the JSON object in config.json: the fields of the configuration, and `RECORDS`."""
        try:
            fields = json.loads(self.config.read_text())
            if not isinstance(fields, dict):
                raise ValueError("it is not an object")
            flatten(fields)  # raises RecursionError if it is nested too deeply
        except (ValueError, RecursionError) as e:
            raise self._error(f"its config.json is damaged ({e}); name another `run_dir`") from e
        return fields

    def saved_config(self, *, field: str, module: str = "") -> TrainConfig:
        """Returns the configuration of the saved run. Imports its model class, which `module` names if the caller trusts it.

        The argument `field` of the caller holds the directory. `module` is required for a class outside `jgraph_models`.
        """
        if not self.config.exists():
            must = "be a run directory, with a config.json and checkpoints/"
            problem = f"must {must}" if self.path.exists() else "no such directory"
            raise ConfigError(f"`{field}` is {self.path}: {problem}", field=field)
        return TrainConfig.from_dict(self.fields(), module=module)


def replace_json(path: Path, fields: dict[str, Any]) -> None:
    """Writes a JSON file of the run directory atomically."""
    replace_text(path, json.dumps(fields, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Writes a text file of the run directory atomically: first PATH.tmp, which is renamed."""
    scratch = path.with_name(path.name + ".tmp")
    with os_errors("run_dir", path):
        scratch.write_text(text)
        os.replace(scratch, path)


def versions() -> dict[str, str]:
    """Returns the installed versions of the packages that affect the compiled step."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
