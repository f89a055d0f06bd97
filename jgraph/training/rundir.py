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

from jgraph.errors import ConfigError
from jgraph.training.config import TrainConfig

# A run that goes on may change these: the steps that remain compute the same, to rounding where the devices change.
_FREE = (
    "run_dir resume log_every checkpoint_every checkpoint_keep compile_cache on_nonfinite dp fsdp reshard_after_forward "
    "shard_rules pp pp_engine chunks schedule memory_limit remat distributed graph xla_options profile sample_tokens "
    "eval_every eval_batches hang_seconds"
)
FREE_FIELDS = frozenset(_FREE.split())


class RunDir:
    """`config.json`, `metrics.jsonl` and `checkpoints/` under one path, which need not exist yet.

    Beside them lies what was measured: `graph.json`, `engine.json`; and under `origin/` what came with the weights or the data
    that the run began with, such as a tokenizer.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config, self.metrics = path / "config.json", path / "metrics.jsonl"
        self.checkpoints, self.lock_file = path / "checkpoints", path / "lock"
        self.measured, self.engine = path / "graph.json", path / "engine.json"
        self.origin = path / "origin"

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
        self.path.mkdir(parents=True, exist_ok=True)
        with self._open_locked() as file:
            if (left := _holder(file)) and left["host"] != socket.gethostname():
                warn(
                    f"`run_dir` is {self.path}: process {left['pid']} on {left['host']} wrote there and did not end well; "
                    "if it still runs there, stop one of the two"
                )
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n")
            file.flush()
            try:
                yield
            finally:
                # While it is locked: who opens it from now on makes a new one.
                self.lock_file.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # nothing was written, if it is empty
                    self.path.rmdir()

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
        if config.resume and not self._is_free() and (differences := self._differences(config, fingerprint)):
            advice = "use another `run_dir`, or `resume` off to start over and replace that run"
            raise self._error(f"holds a run of another configuration: {'; '.join(differences)}; {advice}")

    def reset(self) -> None:
        """Removes checkpoints and metrics, so that the run starts over. The config stays until `write` replaces it."""
        # Renamed first: half-removed checkpoints must not look like damaged ones.
        removed = self.path / "checkpoints.removed"
        shutil.rmtree(removed, ignore_errors=True)
        if self.checkpoints.exists():
            self.checkpoints.rename(removed)
            shutil.rmtree(removed)
        self.metrics.unlink(missing_ok=True)

    def write(self, config: TrainConfig, corpus: dict[str, Any], versions: dict[str, str]) -> None:
        """Makes the directory and writes config.json in one go: the fields of the config, then "corpus" and "versions"."""
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
        if isinstance(fields.get("data"), str):  # as versions wrote it where there was one
            fields["data"] = [fields["data"]]
        return fields

    def _differences(self, config: TrainConfig, fingerprint: str) -> list[str]:
        """Returns the differences from the run that is there, one text each."""
        fields = self.fields()
        # What an earlier version did not have was as it is by default.
        if isinstance(model := fields.get("model"), dict):
            fields = _defaults(config) | fields | {"model": _defaults(config.model) | model}
        # Through JSON, so that a tuple there and a list here are the same.
        here, there = (flatten(json.loads(json.dumps(own))) for own in (dataclasses.asdict(config), fields))
        names = [name for name in here | there if name.partition(".")[0] not in FREE_FIELDS | {"corpus", "versions"}]
        differences = [
            f"`{name}` is {here.get(name, 'absent')} and was {there.get(name, 'absent')}"
            for name in names
            if here.get(name) != there.get(name)
        ]
        if fingerprint[:12] != (before := str(there.get("corpus.fingerprint"))[:12]):
            differences.append(
                f"the text of `data` {' '.join(config.data)} has fingerprint {fingerprint[:12]} and had {before}"
            )
        return differences


def replace_json(path: Path, fields: dict[str, Any]) -> None:
    """Writes a file in one go."""
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(json.dumps(fields, indent=2) + "\n")
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
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


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
