"""The run directory: its files, its lock, and the checks that a run may write there."""

import contextlib
import dataclasses
import errno
import fcntl
import importlib.metadata
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from jgraph.errors import ConfigError, os_errors
from jgraph.train.config import COMPONENTS, OutputConfig, TrainConfig
from jgraph.train.model import is_class_name
from jgraph.train.resume import differences, resumed


class RunDir:
    """Paths of a run under one directory, which need not exist yet.

    Attributes:
        path: The directory.
        config: The configuration, `config.json`.
        metrics: The logged steps, `metrics.jsonl`.
        checkpoints: The checkpoints, `checkpoints/`.
        lock_file: Process that writes in the directory, `lock`.
        capacity: The expert capacity that the run has grown to, `capacity.json`.
        origin: Files that came with the initial weights or the data, such as a tokenizer, `origin/`.
        samples: Texts generated at the end of the run, `samples.jsonl`.
        tensorboard: Event files, `tensorboard/`.
        wandb: The id of the run in Weights & Biases, `wandb.json`.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config, self.metrics = path / "config.json", path / "metrics.jsonl"
        self.checkpoints, self.lock_file = path / "checkpoints", path / "lock"
        self.capacity = path / "capacity.json"
        self.origin = path / "origin"
        self.samples, self.tensorboard, self.wandb = path / "samples.jsonl", path / "tensorboard", path / "wandb.json"

    def has_checkpoint(self) -> bool:
        """True if there is a complete checkpoint, damaged or not."""
        return self.last_checkpoint() is not None

    def last_checkpoint(self) -> int | None:
        """Returns the step of the newest complete checkpoint, damaged or not; None if there is none."""
        there = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        return max((int(path.name) for path in there if path.name.isdecimal()), default=None)

    def resumes(self, output: OutputConfig) -> bool:
        """True if a run with these settings resumes from a checkpoint in this directory."""
        return output.resume and self.has_checkpoint()

    @contextlib.contextmanager
    def locked(self, warn: Callable[[str], object]) -> Iterator[None]:
        """Creates the directory and locks it against other processes. Call `check` first, because this creates a file.

        The operating system releases the lock when the process ends. The text of the file names the process. On a file system
        without locks, the text alone decides.

        Args:
            warn: Called with a warning if a process on another machine did not release the lock.

        Raises:
            ConfigError: If another process holds the lock.
        """
        with os_errors("run_dir", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with os_errors("run_dir", self.lock_file):
            file = self._open_locked()
        try:
            if (left := _holder(file)) and left["host"] != socket.gethostname():
                warn(
                    f"`run_dir` is {self.path}: process {left['pid']} on {left['host']} wrote there and did not exit cleanly; "
                    "if it still runs there, stop one of the two"
                )
            with os_errors("run_dir", self.lock_file):
                file.truncate(0)
                file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
                file.flush()
            yield
        finally:
            # Removed before the lock is released, so that the next process creates a new file.
            self.lock_file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the directory is not empty, or the disk of the lock file is full
                self.path.rmdir()
            with contextlib.suppress(OSError):
                file.close()

    def _open_locked(self) -> TextIO:
        while True:
            file = self.lock_file.open("a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self.lock_file.exists() and os.path.samestat(os.fstat(file.fileno()), self.lock_file.stat()):
                    return file
            except BlockingIOError:
                raise self._held(file, "wait until it ends") from None
            except OSError as e:
                if e.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                    raise
                holder = _holder(file)
                if not holder or (holder["host"] == socket.gethostname() and not _is_alive(holder["pid"])):
                    return file
                raise self._held(file, f"if it has ended, remove {self.lock_file}") from e
            # The owner removed the file before it was locked.
            file.close()

    def _held(self, file: TextIO, advice: str) -> ConfigError:
        holder = _holder(file)
        who = f"process {holder['pid']} on {holder['host']}" if holder else "another process"
        file.close()
        return self._error(f"{who} is writing there; {advice}, or name another `run_dir`")

    def resumed(self, config: TrainConfig) -> TrainConfig:
        """Returns the configuration to resume with: the learning rate schedule continues that of the saved run.

        Returns `config` unchanged if there is no checkpoint to resume from.

        Raises:
            ConfigError: If the saved run has another model class. It is not imported.
        """
        if not (self.config.exists() and self.resumes(config.output)):
            return config
        before = self._before(config)
        if (saved := before.get("module", config.module)) != config.module:
            advice = f"pass `module` {saved} to resume it" if is_class_name(saved) else "it cannot be resumed"
            raise self._error(f"holds a run of the model {saved!r}, and `module` is {config.module}; {advice}")
        return resumed(config, before)

    def check(self, config: TrainConfig, fingerprint: str) -> None:
        """Checks that a run may write in this directory.

        Args:
            config: The configuration of the run.
            fingerprint: The fingerprint of its data.

        Raises:
            ConfigError: If the path is a file, is not a run directory, or holds another run that `resume` would continue.
        """
        if self.path.exists() and not self.path.is_dir():
            raise self._error("a file; name a directory")
        if not self.config.exists():
            if self.path.is_dir() and any(path != self.lock_file for path in self.path.iterdir()):
                raise self._error("not empty, and not a run directory (no config.json); name a new or empty one")
            return
        if config.output.resume and not self._is_free() and (differing := self._differences(config, fingerprint)):
            advice = "use another `run_dir`, or `resume` off to start over and replace that run"
            raise self._error(f"holds a run of another configuration: {'; '.join(differing)}; {advice}")

    def reset(self) -> None:
        """Removes checkpoints, metrics and samples, so that the run starts over. The config stays until `write` replaces it."""
        # Renamed first: half-removed checkpoints must not look like damaged ones.
        removed = self.path / "checkpoints.removed"
        shutil.rmtree(removed, ignore_errors=True)
        with os_errors("run_dir", self.path):
            if self.checkpoints.exists():
                self.checkpoints.rename(removed)
                shutil.rmtree(removed)
            for file in (self.metrics, self.samples, self.wandb, self.capacity):
                file.unlink(missing_ok=True)
        shutil.rmtree(self.tensorboard, ignore_errors=True)

    def add_sample(self, step: int, prompt: str, text: str) -> None:
        """Adds a text generated after `step` steps. Texts of this step and later ones are dropped."""
        kept = [sample for sample in self.read_samples() if sample["step"] < step]
        lines = [json.dumps(sample) + "\n" for sample in (*kept, {"step": step, "prompt": prompt, "text": text})]
        replace_text(self.samples, "".join(lines))

    def read_samples(self) -> list[dict[str, Any]]:
        """Returns the generated texts, each with "step", "prompt" and "text". Damaged lines are skipped."""
        samples: list[dict[str, Any]] = []
        for line in self.samples.read_text(errors="replace").splitlines() if self.samples.exists() else ():
            with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
                read = json.loads(line)
                samples.append({"step": int(read["step"]), "prompt": str(read["prompt"]), "text": str(read["text"])})
        return samples

    def write(self, config: TrainConfig, corpus: dict[str, Any], versions: dict[str, str]) -> None:
        """Writes config.json atomically: the fields of the configuration, "corpus" and "versions"."""
        with os_errors("run_dir", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        replace_json(self.config, config.to_dict() | {"corpus": corpus, "versions": versions})

    def _error(self, wrong: str) -> ConfigError:
        return ConfigError(f"`run_dir` is {self.path}: {wrong}", field="run_dir")

    def _is_free(self) -> bool:
        """True if the run there stopped before its first checkpoint, so that another run may replace it."""
        return not self.has_checkpoint() and {"preset", "corpus", "versions"} <= self.fields().keys()

    def fields(self) -> dict[str, Any]:
        """Returns the fields of config.json. Raises ConfigError if the file is damaged."""
        try:
            fields = json.loads(self.config.read_text())
            if not isinstance(fields, dict):
                raise ValueError("it is not an object")
            flatten(fields)  # raises RecursionError if it is nested too deeply
        except (ValueError, RecursionError) as e:
            raise self._error(f"its config.json is damaged ({e}); name another `run_dir`") from e
        return fields

    def saved_config(self, *, field: str, module: str = "") -> TrainConfig:
        """Returns the configuration of the saved run.

        Args:
            field: Argument that named the directory, for errors.
            module: Model class that the caller named; empty if the caller named none.

        Raises:
            ConfigError: If there is no run, or as `TrainConfig.from_dict`.
        """
        if not self.config.exists():
            must = "be a run directory, with a config.json and checkpoints/"
            wrong = f"must {must}" if self.path.exists() else "no such directory"
            raise ConfigError(f"`{field}` is {self.path}: {wrong}", field=field)
        fields = self.fields()
        own = {name: value for name, value in fields.items() if name not in ("corpus", "versions")}
        return TrainConfig.from_dict(own, module=module)

    def _differences(self, config: TrainConfig, fingerprint: str) -> list[str]:
        """Returns one text for each difference from the run in this directory."""
        # JSON turns tuples into lists, as in the file.
        here, there = flatten(json.loads(json.dumps(config.to_dict()))), self._before(config)
        had = str(there.get("corpus.fingerprint"))[:12]
        there = {name: value for name, value in there.items() if name.partition(".")[0] not in ("corpus", "versions")}
        told = differences(here, there, self.last_checkpoint() or 0)
        if fingerprint[:12] != had:
            told.append(f"the text of `data` {' '.join(config.input.data)} has fingerprint {fingerprint[:12]} and had {had}")
        return told

    def _before(self, config: TrainConfig) -> dict[str, Any]:
        """Returns the saved fields by dotted name. Fields that an earlier version lacked have their defaults."""
        fields = self.fields()
        if isinstance(fields.get("model"), dict):
            parts = {name: part for name, part in vars(config).items() if dataclasses.is_dataclass(part)}
            nested = {
                name: _defaults(part) | fields[name] for name, part in parts.items() if isinstance(fields.get(name), dict)
            }
            defaults: dict[str, Any] = {}
            for part in (config, *(parts[name] for name in COMPONENTS)):
                defaults |= _defaults(part)
            fields = defaults | fields | nested
        return flatten(fields)


def replace_json(path: Path, fields: dict[str, Any]) -> None:
    """Replaces a JSON file of the run directory, as `replace_text`."""
    replace_text(path, json.dumps(fields, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Replaces a file of the run directory atomically. Raises ConfigError if it cannot be written."""
    scratch = path.with_name(path.name + ".tmp")
    with os_errors("run_dir", path):
        scratch.write_text(text)
        os.replace(scratch, path)


def flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dictionaries to dotted names."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def versions() -> dict[str, str]:
    """Returns the versions of the packages that affect the compiled step."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}


def _defaults(config: Any) -> dict[str, Any]:
    """Returns the constant defaults of a dataclass, or an empty dict for another object."""
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    nested = {name: vars(own) for name, own in defaults.items() if dataclasses.is_dataclass(own)}
    return defaults | nested


def _holder(file: TextIO) -> dict[str, Any] | None:
    """Returns the pid and host in a lock file, or None if it has none."""
    file.seek(0)
    try:
        holder = json.loads(file.read())
        return {"pid": int(holder["pid"]), "host": str(holder["host"])}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
