"""Records a profile page of any JAX program: `jgraph.record`."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jgraph.errors import os_errors, require
from jgraph.page import render
from jgraph.processes import is_process_zero
from jgraph.profile import report
from jgraph.xla.launches import traced


@contextlib.contextmanager
def record(path: str | os.PathLike[str]) -> Iterator[None]:
    """Profiles the JAX programs that run in a `with` block, and writes a page with the time of each kernel.

    Runs JAX's profiler, and waits for all live arrays at the end of the block. The page shows the last step but one, so run at
    least three. `jax.profiler.StepTraceAnnotation` marks steps. Without marks, each execution of the program with the longest
    time is a step. Example:

        with jgraph.record("page.html"):
            for batch in batches:
                state = step(state, batch)

    If the block raises an exception, no page is written. With several processes, only process 0 writes a page.

    Args:
        path: The HTML file to write. Its directory is created if missing. An existing file is replaced.

    Yields:
        None. The page is written at the end of the block.

    Raises:
        ConfigError: If the file cannot be written.
        JgraphError: If a profiler is already running when the block begins.
        ProfileError: If no program ran on a device in the block.
    """
    page = Path(path)
    require(not page.is_dir(), "path", path, "a file")
    with os_errors("path", page):
        page.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="jgraph-record-") as directory:
        with traced(directory):
            yield
        if is_process_zero():
            text = render("jgraph.profile", report.of_trace(Path(directory)))
            with os_errors("path", page):
                page.write_text(text, encoding="utf-8")
