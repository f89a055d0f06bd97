"""Compiled programs kept on disk, so that a second start does not compile them again.

jax keeps the executables. Beside them is kept what XLA tells only while it compiles: the report of what was captured. Where XLA
dumps to is no part of jax's key, so the dump behind a report can have a new directory at every start.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jgraph.errors import os_errors

_HIT = "/jax/compilation_cache/cache_hits"
_CONFIG: Any = jax.config  # whose options a type checker does not see
_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclass
class Compiles:
    """What jax compiled: `programs`, of them `hits` out of the cache, in `seconds`; those of several threads are added up."""

    programs: int = 0
    hits: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"compiled {self.programs} XLA programs in {self.seconds:.1f} s (summed over threads), "
            f"{self.hits} of them loaded from the compile cache"
        )


def user_cache() -> Path:
    """Returns the project's part of the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jgraph"


def enable(directory: Path | None = None, *, field: str = "directory") -> str:
    """Turns on jax's persistent compilation cache in this process, for programs of every size; returns where it is.

    Args:
        directory: where programs are kept. None: where jax was told to keep them, else in the user's cache. Whoever can write
            there can run code in every process that reads it.
        field: The argument that holds the directory, for errors.

    Raises:
        ConfigError: the directory cannot be made or written.
    """
    place = str(directory or _CONFIG.jax_compilation_cache_dir or user_cache() / "compiled")
    if "://" not in place:
        place = str(Path(place).expanduser().absolute())
        with os_errors(field, place):
            Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
    jax.config.update("jax_compilation_cache_dir", place)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # else jax stays with the directory that it used first
    return place


@contextlib.contextmanager
def watch() -> Iterator[Compiles]:
    """Counts what jax compiles in its block, on all threads.

    >>> with watch() as compiles:
    ...     compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    >>> compiles.programs
    1
    """
    found, lock = Compiles(), threading.Lock()

    def on_event(event: str, duration_secs: Any = 0.0, **_: str | int) -> None:
        with lock:
            found.hits += event == _HIT
            if event == _COMPILED:
                found.programs, found.seconds = found.programs + 1, found.seconds + duration_secs

    jax.monitoring.register_event_listener(on_event)
    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_listener(on_event)
        jax.monitoring.unregister_event_duration_listener(on_event)


@contextlib.contextmanager
def for_elsewhere() -> Iterator[None]:
    """Keeps jax quiet about programs for devices that are not here: it cannot read those back, and compiles again."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Error reading persistent compilation cache entry")
        yield


def report_file(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, options: Mapping[str, object]) -> Path | None:
    """Returns where the report of a program is kept, there or not; None where there is no cache on this machine.

    Its name hashes what jax's own key holds: the program without lines of source, `options` but for dumps, versions, devices.
    """
    directory = _CONFIG.jax_compilation_cache_dir
    shardings = jax.tree.leaves((compiled.output_shardings, compiled.input_shardings))
    if not (directory and _CONFIG.jax_enable_compilation_cache and shardings) or "://" in directory:
        return None
    devices = shardings[0].device_set
    device = min(devices, key=lambda device: device.id)
    versions = [jax.__version__, importlib.metadata.version("jaxlib"), device.client.platform_version]
    told = [sorted(options.items()), versions, device.device_kind, len(devices), os.environ.get("XLA_FLAGS", "")]
    key = hashlib.sha256((lowered.as_text() + repr(told)).encode()).hexdigest()
    return Path(directory) / "capture" / f"{key}.json"
