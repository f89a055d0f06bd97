"""Keeps compiled programs on disk, so that the next process does not compile them again.

JAX stores the executables. This module stores the capture report of each executable, because XLA dumps the thunks only when it
compiles. The dump directory is not part of JAX's cache key, so every compilation can use a new directory.
"""

import hashlib
import importlib.metadata
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jgraph.errors import os_errors
from jgraph.xla.options import OptionValue

_CONFIG: Any = jax.config  # type checkers do not see its options
UNREADABLE = "Error reading persistent compilation cache entry"
"""JAX's warning about a program for a device that is not present. JAX cannot load it, and compiles it again."""


def user_cache() -> Path:
    """Returns `$XDG_CACHE_HOME/jgraph`, or `~/.cache/jgraph` if the variable is unset or empty. Does not create it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jgraph"


def enable(directory: Path | None = None, *, field: str = "directory") -> str:
    """Enables JAX's persistent compilation cache for programs of every size. Returns its absolute path or URL."""
    place = str(directory or _CONFIG.jax_compilation_cache_dir or user_cache() / "compiled")
    if "://" not in place:
        place = str(Path(place).expanduser().absolute())
        with os_errors(field, place):
            # Anybody who can write there can run code in every process that reads it.
            Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
    jax.config.update("jax_compilation_cache_dir", place)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX otherwise keeps using its first directory
    return place


def report_file(lowered: jax.stages.Lowered, compiled: jax.stages.Compiled, options: Mapping[str, OptionValue]) -> Path | None:
    """Returns the file for the capture report of a program, which need not exist. None if JAX's cache is off or at a URL."""
    directory = _CONFIG.jax_compilation_cache_dir
    # Empty for a program with neither arguments nor results.
    shardings = jax.tree.leaves((compiled.output_shardings, compiled.input_shardings))
    if not (directory and _CONFIG.jax_enable_compilation_cache and shardings) or "://" in directory:
        return None
    # The inputs of JAX's own cache key: the program without source lines, options (without those for dumps), versions,
    # XLA_FLAGS and devices.
    devices = shardings[0].device_set
    device = min(devices, key=lambda device: device.id)
    versions = [jax.__version__, importlib.metadata.version("jaxlib"), device.client.platform_version]
    inputs = [sorted(options.items()), versions, device.device_kind, len(devices), os.environ.get("XLA_FLAGS", "")]
    key = hashlib.sha256((lowered.as_text() + repr(inputs)).encode()).hexdigest()
    return Path(directory) / "capture" / f"{key}.json"
