"""Keeps compiled programs on disk, so that the next process does not compile them again.

JAX stores the executables. This module stores the capture report of each executable, because XLA dumps the thunks only when it
compiles. The dump directory is not part of JAX's cache key, so every compilation can use a new directory.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jgraph.errors import os_errors
from jgraph.xla.options import OptionValue

_CONFIG: Any = jax.config  # type checkers do not see its options
UNREADABLE = "Error reading persistent compilation cache entry"
"""JAX's warning about a program for a device that is not present. JAX cannot load it, and compiles it again."""
_HIT = "/jax/compilation_cache/cache_hits"
_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclass
class Compiles:
    """Counts of the programs that JAX compiled or loaded. `str` formats them as one line for the log.

    Attributes:
        programs: The number of programs that were compiled or loaded from JAX's compilation cache.
        hits: The number of programs loaded from the cache.
        seconds: Time in seconds to compile and load all of them, summed over threads.
    """

    programs: int = 0
    hits: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"jitted programs: {self.programs - self.hits} compiled and {self.hits} loaded from the compile cache "
            f"in {self.seconds:.1f} s (sum over threads)"
        )


def user_cache() -> Path:
    """Returns `$XDG_CACHE_HOME/jgraph`, or `~/.cache/jgraph` if the variable is unset or empty. Does not create it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jgraph"


def enable(directory: Path | None = None, *, field: str = "directory") -> str:
    """Enables JAX's persistent compilation cache in this process, for programs of every size and compilation time.

    Creates the directory, readable by this user only, and changes `jax.config`.

    Args:
        directory: Directory for compiled programs. Anybody who can write there can run code in every process that reads it.
            None: `jax.config.jax_compilation_cache_dir` if set (a path or URL), otherwise `~/.cache/jgraph/compiled`, with
            $XDG_CACHE_HOME in place of `~/.cache` if set.
        field: The name of the caller's argument that contains the directory, for the error.

    Returns:
        The absolute path or the URL of the cache.

    Raises:
        ConfigError: If the directory cannot be created or written. The directory of a URL is not checked.
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
    compilation_cache.reset_cache()  # JAX otherwise keeps using its first directory
    return place


@contextlib.contextmanager
def watch() -> Iterator[Compiles]:
    """Counts the programs that JAX compiles or loads from its cache inside a `with` block, on all threads.

    Yields:
        The counts. They start at 0, grow during the block, and stay fixed after it.

    Examples:
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


def report_file(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, options: Mapping[str, OptionValue]) -> Path | None:
    """Returns the path of the JSON file for the capture report of a program: the command buffers that XLA built for it.

    The name is a hash of the inputs of JAX's own cache key: the program without source lines, options, versions, XLA_FLAGS and
    devices. Creates nothing.

    Args:
        lowered: The program before compilation.
        compiled: The same program after compilation.
        options: The XLA options that it was compiled with, by name, without those for dumps.

    Returns:
        `capture/HASH.json` in JAX's compilation cache directory; the file need not exist. None if JAX's compilation cache is
        off or at a URL, or the program has neither arguments nor results.
    """
    directory = _CONFIG.jax_compilation_cache_dir
    shardings = jax.tree.leaves((compiled.output_shardings, compiled.input_shardings))
    if not (directory and _CONFIG.jax_enable_compilation_cache and shardings) or "://" in directory:
        return None
    devices = shardings[0].device_set
    device = min(devices, key=lambda device: device.id)
    versions = [jax.__version__, importlib.metadata.version("jaxlib"), device.client.platform_version]
    inputs = [sorted(options.items()), versions, device.device_kind, len(devices), os.environ.get("XLA_FLAGS", "")]
    key = hashlib.sha256((lowered.as_text() + repr(inputs)).encode()).hexdigest()
    return Path(directory) / "capture" / f"{key}.json"
