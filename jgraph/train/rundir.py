"""The run directory: which run it belongs to, and whether this one may go on there."""

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
from jgraph.train.config import TrainConfig
from jgraph.train.model import is_class_name
from jgraph.train.resume import differences, resumed


class RunDir:
    """`config.json`, `metrics.jsonl` and `checkpoints/` under one path, which need not exist yet.

    Beside them lie the measured pipeline engine, `engine.json`; the capacity that the run grew to, `capacity.json`; and
    under `origin/` what came with the weights or the data that the run began with, such as a tokenizer. `samples.jsonl` has the
    texts generated at an end of the run; `tensorboard/` and `wandb.json` are of `log`.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config, self.metrics = path / "config.json", path / "metrics.jsonl"
        self.checkpoints, self.lock_file = path / "checkpoints", path / "lock"
        self.engine = path / "engine.json"
        self.capacity = path / "capacity.json"
        self.origin = path / "origin"
        self.samples, self.tensorboard, self.wandb = path / "samples.jsonl", path / "tensorboard", path / "wandb.json"

    def has_checkpoint(self) -> bool:
        """Returns whether any checkpoint was written to its end, damaged or not."""
        return self.last_checkpoint() is not None

    def last_checkpoint(self) -> int | None:
        """Returns the step of the newest checkpoint that was written to its end, damaged or not; None where there is none."""
        there = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        return max((int(path.name) for path in there if path.name.isdecimal()), default=None)

    @contextlib.contextmanager
    def locked(self, warn: Callable[[str], object]) -> Iterator[None]:
        """Makes the directory and keeps other processes from writing in it. `check` comes first: this makes a file there.

        The operating system's lock on the file ends with the process, however it ends; the file's text says whose it is. Where
        the disk knows no locks, the text alone decides.

        Args:
            warn: is told, in one line, of a process on another machine that left its lock without ending it.

        Raises:
            ConfigError: another process has the lock.
        """
        with os_errors("run_dir", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with os_errors("run_dir", self.lock_file):
            file = self._open_locked()
        try:
            if (left := _holder(file)) and left["host"] != socket.gethostname():
                warn(
                    f"`run_dir` is {self.path}: process {left['pid']} on {left['host']} wrote there and did not end well; "
                    "if it still runs there, stop one of the two"
                )
            with os_errors("run_dir", self.lock_file):
                file.truncate(0)
                file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
                file.flush()
            yield
        finally:
            # While it is locked: a process that opens the file from now on makes a new one.
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
                raise self._held(file, f"if it is there no more, remove {self.lock_file}") from e
            # Its owner removed it in between.
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
        if not (config.resume and self.config.exists() and self.has_checkpoint()):
            return config
        before = self._before(config)
        if (saved := before.get("module", config.module)) != config.module:
            advice = f"pass `module` {saved} to resume it" if is_class_name(saved) else "it cannot be resumed"
            raise self._error(f"holds a run of the model {saved!r}, and `module` is {config.module}; {advice}")
        return resumed(config, before)

    def check(self, config: TrainConfig, fingerprint: str) -> None:
        """Raises ConfigError if a run of this configuration, on the text of this fingerprint, may not write there.

        It may not where the path is a file or holds something else than a run, or, with `config.resume`, checkpoints of another
        run.
        """
        if self.path.exists() and not self.path.is_dir():
            raise self._error("a file; name a directory")
        if not self.config.exists():
            if self.path.is_dir() and any(path != self.lock_file for path in self.path.iterdir()):
                raise self._error("not empty, and not a run directory (no config.json); name a new or empty one")
            return
        if config.resume and not self._is_free() and (differing := self._differences(config, fingerprint)):
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
        """Writes a text generated after `step` steps; those of this step and later ones are dropped."""
        kept = [sample for sample in self.read_samples() if sample["step"] < step]
        lines = [json.dumps(sample) + "\n" for sample in (*kept, {"step": step, "prompt": prompt, "text": text})]
        _replace(self.samples, "".join(lines))

    def read_samples(self) -> list[dict[str, Any]]:
        """Returns the texts generated so far, each with its "step" and "prompt". What is no such line is left out."""
        samples: list[dict[str, Any]] = []
        for line in self.samples.read_text(errors="replace").splitlines() if self.samples.exists() else ():
            with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
                read = json.loads(line)
                samples.append({"step": int(read["step"]), "prompt": str(read["prompt"]), "text": str(read["text"])})
        return samples

    def write(self, config: TrainConfig, corpus: dict[str, Any], versions: dict[str, str]) -> None:
        """Makes the directory and writes config.json in one go: the fields of the config, then "corpus" and "versions"."""
        with os_errors("run_dir", self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        replace_json(self.config, dataclasses.asdict(config) | {"corpus": corpus, "versions": versions})

    def _error(self, wrong: str) -> ConfigError:
        return ConfigError(f"`run_dir` is {self.path}: {wrong}", field="run_dir")

    def _is_free(self) -> bool:
        """Returns whether a run stopped before its first checkpoint: nothing can go on from there, so another may start."""
        return not self.has_checkpoint() and {"preset", "corpus", "versions"} <= self.fields().keys()

    def fields(self) -> dict[str, Any]:
        """Returns config.json: the fields of the config, "corpus" and "versions". Raises ConfigError where it is damaged."""
        try:
            fields = json.loads(self.config.read_text())
            if not isinstance(fields, dict):
                raise ValueError("it is not an object")
            flatten(fields)  # which ends as json does where it is nested too deeply
        except (ValueError, RecursionError) as e:
            raise self._error(f"its config.json is damaged ({e}); name another `run_dir`") from e
        model = fields.get("model")
        if isinstance(model, dict) and "module" in model:  # as versions wrote it where it was one of the model's settings
            module = model.pop("module")
            fields["module"] = "jgraph_models.gpt:GPT" if module == "models.gpt:GPT" else module
        if fields.get("graph") == "measure":  # a choice that earlier versions had
            fields["graph"] = "auto"
        if isinstance(fields.get("data"), str):  # as versions wrote it where there was one
            fields["data"] = [fields["data"]]
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
        """Returns the differences from the run that is there, one text each."""
        # Through JSON, so that a tuple there and a list here are the same.
        here, there = flatten(json.loads(json.dumps(dataclasses.asdict(config)))), self._before(config)
        had = str(there.get("corpus.fingerprint"))[:12]
        there = {name: value for name, value in there.items() if name.partition(".")[0] not in ("corpus", "versions")}
        told = differences(here, there, self.last_checkpoint() or 0)
        if fingerprint[:12] != had:
            told.append(f"the text of `data` {' '.join(config.data)} has fingerprint {fingerprint[:12]} and had {had}")
        return told

    def _before(self, config: TrainConfig) -> dict[str, Any]:
        """Returns the fields of the run that is there, by dotted name."""
        fields = self.fields()
        # What an earlier version did not have was as it is by default.
        if isinstance(fields.get("model"), dict):
            parts = {name: own for name, own in vars(config).items() if dataclasses.is_dataclass(own)}
            nested = {name: _defaults(own) | fields[name] for name, own in parts.items() if isinstance(fields.get(name), dict)}
            fields = _defaults(config) | fields | nested
        return flatten(fields)


def replace_json(path: Path, fields: dict[str, Any]) -> None:
    """Replaces a file of the run directory atomically. Raises ConfigError if it cannot be written."""
    _replace(path, json.dumps(fields, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    scratch = path.with_name(path.name + ".tmp")
    with os_errors("run_dir", path):
        scratch.write_text(text)
        os.replace(scratch, path)


def flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns fields by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def versions() -> dict[str, str]:
    """Returns the versions of the packages that decide what a step computes."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}


def _defaults(config: Any) -> dict[str, Any]:
    """Returns the defaults of a dataclass's fields, as far as they have a constant; none of what is no dataclass."""
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}
    nested = {name: vars(own) for name, own in defaults.items() if dataclasses.is_dataclass(own)}
    return defaults | nested


def _holder(file: TextIO) -> dict[str, Any] | None:
    """Returns pid and host in a lock file; None where it says nothing: its owner ended well or has not written yet."""
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
