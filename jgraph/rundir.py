"""The run directory: which run it belongs to, and whether this one may go on there."""

import dataclasses
import importlib.metadata
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jgraph.config import TrainConfig, flag
from jgraph.errors import ConfigError

# A run that goes on may change these: the steps that remain compute the same, to rounding where the devices change.
FREE_FIELDS = frozenset(
    {
        "run_dir",
        "resume",
        "log_every",
        "checkpoint_every",
        "checkpoint_keep",
        "on_nonfinite",
        "dp",
        "fsdp",
        "reshard_after_forward",
        "shard_rules",
        "pp",
        "chunks",
        "schedule",
        "memory_limit",
        "remat",
        "distributed",
        "graph",
        "xla_options",
        "profile",
        "sample_tokens",
        "eval_every",
        "eval_batches",
    }
)


@dataclass(frozen=True)
class RunDir:
    """`config.json`, `metrics.jsonl` and `checkpoints/` under one path, which need not exist yet."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def check(self, config: TrainConfig, corpus: dict[str, Any]) -> None:
        """Changes nothing.

        Args:
            config: of this run.
            corpus: its name, fingerprint and sizes, as `write` stores them.

        Raises:
            ConfigError: the path is a file or holds something else than a run, or, with `config.resume`, another run.
        """
        if self.path.exists() and not self.path.is_dir():
            raise _error(f"--run-dir is {self.path}: a file; name a directory")
        if not self.config.exists():
            if self.path.is_dir() and any(self.path.iterdir()):
                raise _error(
                    f"--run-dir is {self.path}: not empty, and not a run directory (no config.json); name a new or empty one"
                )
            return
        if config.resume and (differences := self._differences(config, corpus)):
            raise _error(
                f"--run-dir is {self.path}: holds a run of another configuration: {'; '.join(differences)}; "
                "use another --run-dir, or --no-resume to start over and replace that run"
            )

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
        text = json.dumps(dataclasses.asdict(config) | {"corpus": corpus, "versions": versions}, indent=2)
        scratch = self.path / "config.json.tmp"
        scratch.write_text(text + "\n")
        os.replace(scratch, self.config)

    def read(self) -> tuple[TrainConfig, dict[str, Any], dict[str, str]]:
        """Inverse of `write`. Raises ConfigError where config.json is not one that this version writes."""
        fields = self._read_fields()
        corpus, versions = fields.pop("corpus", {}), fields.pop("versions", {})
        return TrainConfig.from_dict(fields), corpus, versions

    def _read_fields(self) -> dict[str, Any]:
        try:
            fields = json.loads(self.config.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as e:
            raise _error(f"--run-dir is {self.path}: its config.json is damaged ({e}); name another --run-dir") from e
        if not isinstance(fields, dict):
            raise _error(f"--run-dir is {self.path}: its config.json is not an object; name another --run-dir")
        return fields

    def _differences(self, config: TrainConfig, corpus: dict[str, Any]) -> list[str]:
        there = flatten(self._read_fields())
        # Through JSON, so that a tuple there and a list here are the same.
        here = flatten(json.loads(json.dumps(dataclasses.asdict(config) | {"corpus": {"fingerprint": corpus["fingerprint"]}})))
        names = [name for name in here | there if name.partition(".")[0] not in FREE_FIELDS | {"corpus", "versions"}]
        differences = [
            f"{flag(name)} is {_show(here, name)} and was {_show(there, name)}"
            for name in names
            if here.get(name) != there.get(name)
        ]
        now, before = (str(fields.get("corpus.fingerprint"))[:12] for fields in (here, there))
        if now != before:
            differences.append(f"the text of --data {config.data} has fingerprint {now} and had {before}")
        return differences


def flatten(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Fields by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def versions() -> dict[str, str]:
    """Of the packages that decide what a step computes."""
    return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}


def _show(fields: dict[str, Any], name: str) -> str:
    return str(fields[name]) if name in fields else "absent"


def _error(message: str) -> ConfigError:
    return ConfigError(message, field="run_dir")
