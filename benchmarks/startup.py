"""Seconds from the start of a process to the end of its first training step, by phase: jgraph, plain JAX and torch.compile.

python -m benchmarks.startup --out startup.json --presets launch-bound gpt-124m
python -m benchmarks.startup --out startup.json --presets cpu-tiny --variants jgraph "jax same" --sizes tiny    # on a CPU

Each variant runs in a process of its own, first with empty caches of compiled programs, and then again with full ones. A row
has these seconds:

- `build_s`: imports, and tracing the model to build its functions or layers.
- `trace_s`: JAX traces and lowers programs. `compile_s`: XLA compiles them, or loads them from the cache. Both are sums of the
  time in which at least one thread does it, so the two can overlap.
- `first_step_s`: everything, from the start of the process to the result of the first step. `ms` is the same, for
  `python -m benchmarks compare`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.rows import Row
from benchmarks.runner import Options, store
from benchmarks.works import preset_config, vary

# Names of JAX's events by key of the row.
EVENTS = {
    "trace_s": ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration"),
    "compile_s": ("backend_compile_duration",),
}
CACHES = ("JAX_COMPILATION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH")


@dataclass(frozen=True, kw_only=True)
class StartupOptions:
    """Flags of the benchmark."""

    out: Path
    """JSON file of the rows. Presets that do not run again stay in it."""
    presets: tuple[str, ...] = ("launch-bound", "gpt-124m")
    """Presets to start."""
    variants: tuple[str, ...] = ("jgraph", "jgraph num_microbatches=8", "jax same", "torch compile")
    """Variants of each preset, as in `single_gpu`. A variant that does not fit the preset gets a row with the reason."""
    sizes: Literal["full", "tiny"] = "full"
    """Use `tiny` on a machine without a GPU."""
    timeout: float = 200
    """Seconds of a process."""
    revision: str = ""
    """Git revision to store in the results, for a copy of the sources without .git."""


def main(options: StartupOptions) -> None:
    """Starts every variant twice, and writes the file after each preset.

    Args:
        options: Flags.
    """
    for preset in options.presets:
        rows = [row for variant in options.variants for row in started_twice(preset, variant, options)]
        store(options.out, preset, options, rows, device=next((row["device"] for row in rows if "device" in row), None))


def started_twice(preset: str, variant: str, options: StartupOptions) -> Iterator[Row]:
    """Yields the rows of a variant with empty and with full caches, and prints them."""
    system, _, settings = variant.partition(" ")
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder, name)) for name in CACHES}
        for caches_are in ("empty caches", "full caches"):
            row = {"system": system, "variant": f"{settings} {caches_are}".strip()}
            row |= in_process(preset, variant, options, caches)
            print(preset, json.dumps(row), flush=True)
            yield row


def in_process(preset: str, variant: str, options: StartupOptions, caches: dict[str, str]) -> Row:
    """Returns the seconds of a new process, or the reason why it failed."""
    command = [sys.executable, "-m", "benchmarks.startup", "child", preset, variant, options.sizes, str(time.time())]
    try:
        done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True, timeout=options.timeout)
    except subprocess.TimeoutExpired:
        return {"failed": f"not finished after {options.timeout} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    row = json.loads(done.stdout.splitlines()[-1])
    return row | {"ms": row["first_step_s"] * 1e3}


# --- The process of a variant ---


def child(preset: str, variant: str, sizes: str, began: float) -> None:
    """Builds a variant, runs its first step, and prints the row."""
    config = preset_config(preset, Options(sizes=sizes))  # pyright: ignore[reportArgumentType]
    system, _, settings = variant.partition(" ")
    if system == "torch":
        print(json.dumps(torch_row(variant, config, began)))
        return
    import jax

    intervals: dict[str, list[tuple[float, float]]] = {name: [] for name in EVENTS}

    def on_event(event: str, duration_secs: float, **_: Any) -> None:
        end = time.time()
        for name, events in EVENTS.items():
            if event.rsplit("/", 1)[-1] in events:
                intervals[name].append((end - duration_secs, end))

    jax.monitoring.register_event_duration_secs_listener(on_event)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    make = jgraph_first if system == "jgraph" else plain_first
    first, built = make(config, settings)
    jax.block_until_ready(first())
    seconds = {name: union(found) for name, found in intervals.items()}
    row = {"build_s": built - began, **seconds, "first_step_s": time.time() - began}
    print(json.dumps(row | {"device": f"1 x {jax.devices()[0].device_kind}"}))


def jgraph_first(config: Any, settings: str) -> tuple[Callable[[], Any], float]:
    """Returns the first step of the command line, compiled when called, and the time when it is built."""
    import jax

    from benchmarks.programs.step import tokens_of
    from jgraph.train.setup import TrainSetup

    setup = TrainSetup.from_config(vary(config.changed(graph="auto"), settings))
    built = time.time()

    def first() -> Any:
        init = setup.compile_init()
        run = setup.compile_step()
        return run(init(), jax.device_put(setup.step.place(tokens_of(config))))

    return first, built


def plain_first(config: Any, settings: str) -> tuple[Callable[[], Any], float]:
    """Returns the first step of plain JAX, compiled when called, and the time when it is built."""
    import jax

    from benchmarks.peers.plain_jax import plain_step
    from benchmarks.programs.step import tokens_of

    plain = plain_step(config, settings.split(), platform=jax.default_backend())
    built = time.time()
    return lambda: plain.step(plain.init(), tokens_of(config)), built


def torch_row(variant: str, config: Any, began: float) -> Row:
    """Returns the row of PyTorch: the first step of `torch.compile`, without a CUDA graph."""
    import torch

    from benchmarks.peers.single_gpu import build_model

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model, optimizer = build_model(variant, config)
    shape = config.input.batch_size, config.input.seq_len + 1
    tokens = torch.randint(0, config.model.vocab_size, shape, device="cuda")
    with torch.no_grad():
        model.loss(tokens)  # creates the rotary table before compilation
    built = time.time()
    loss = torch.compile(model.loss)(tokens)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
    optimizer.step()
    torch.cuda.synchronize()
    return {"build_s": built - began, "first_step_s": time.time() - began, "device": f"1 x {torch.cuda.get_device_name()}"}


def union(intervals: Sequence[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals: traces are nested, and threads compile at once."""
    total, end = 0.0, 0.0
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5]))
    else:
        main(tyro.cli(StartupOptions, description=__doc__))
