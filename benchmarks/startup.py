"""Seconds from the start of a process to the end of its first training step, by phase: jgraph, plain JAX and torch.compile.

python -m benchmarks run startup --presets launch-bound gpt-124m
python -m benchmarks run startup --presets cpu-tiny --variants jgraph "jax same" --sizes tiny    # on a CPU

Each variant runs in a process of its own, first with empty caches of compiled programs, and then again with full ones. A row
has the seconds of the phases of `jgraph.xla.startup.Startup`, which do not overlap, as `imports_s`, `trace_s`, `compile_s`,
`state_s` and `step_s`. `torch.compile` has `imports_s` only, which includes building its layers. `first_step_s` is everything,
from the start of the process to the result of the first step. `ms` is the same, for `python -m benchmarks compare`.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import answer, read_request
from benchmarks.rows import Row, row_name
from benchmarks.runner import Benchmark, Options, Work
from benchmarks.tables import Section, number
from benchmarks.turns import Candidate, run_once
from benchmarks.works import preset_config, vary
from jgraph.train.config import TrainConfig

# Key of the row by phase.
KEYS = {
    "imports and data": "imports_s",
    "tracing": "trace_s",
    "XLA": "compile_s",
    "initial state": "state_s",
    "first step": "step_s",
}
CACHES = ("JAX_COMPILATION_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH")


@dataclass(frozen=True, kw_only=True)
class StartupOptions(Options):
    """Flags of the benchmark."""

    presets: tuple[str, ...] = ("launch-bound", "gpt-124m")
    """Presets to start."""
    variants: tuple[str, ...] = ("jgraph", "jgraph num_microbatches=8", "jax same", "torch compile")
    """Variants of each preset, as in `single_gpu`. A variant that does not fit the preset gets a row with the reason."""


def works(options: StartupOptions) -> Iterator[Work]:
    """Yields one work per preset."""
    for preset in options.presets:
        rows = (row for variant in options.variants for row in started_twice(preset, variant, options))
        yield Work(preset, {"ranks": 1}, rows=rows)


def started_twice(preset: str, variant: str, options: StartupOptions) -> Iterator[Row]:
    """Yields the rows of a variant with empty and with full caches."""
    system, _, settings = variant.partition(" ")
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder, name)) for name in CACHES}
        for caches_are in ("empty caches", "full caches"):
            labels = {"system": system, "variant": f"{settings} {caches_are}".strip()}
            request = {"preset": preset, "variant": variant, "sizes": options.sizes, "began": time.monotonic()}
            yield run_once(Candidate(labels, "benchmarks.startup", request, environment=caches), timeout=options.timeout)


def section(name: str, result: Row) -> Section:
    """Returns the table layout of a work."""
    columns = {"variant": row_name, "first step, s": number("first_step_s", ".1f")}
    return Section(name, columns | {f"{phase}, s": number(key, ".1f") for phase, key in KEYS.items()})


BENCHMARK = Benchmark("Start of a process", __doc__, StartupOptions, works, section)


# --- The process of a variant ---


def start(request: Row) -> None:
    """Builds a variant and runs its first step. Entry point of the candidate process."""
    config = preset_config(request["preset"], Options(sizes=request["sizes"]))
    system, _, settings = request["variant"].partition(" ")
    row = torch_row if system == "torch" else jax_row
    answered = row(system, settings, config, request["began"])
    answer(**answered, ms=answered["first_step_s"] * 1e3)


def jax_row(system: str, settings: str, config: TrainConfig, began: float) -> Row:
    """Returns the row of jgraph or of plain JAX."""
    import jax

    from jgraph.xla.startup import Startup, watch

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    make = jgraph_parts if system == "jgraph" else plain_parts
    with watch() as compiles:
        startup = Startup(began, compiles)
        init, step = make(config, settings)
        startup.enter("initial state")
        state = jax.block_until_ready(init())
        startup.enter("first step")
        jax.block_until_ready(step(state))
        seconds = startup.seconds()
    row = {KEYS[name]: length for name, length in seconds.items()} | {"first_step_s": sum(seconds.values())}
    return row | {"device": f"1 x {jax.devices()[0].device_kind}"}


def jgraph_parts(config: TrainConfig, settings: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Returns the functions of the initial state and of the step, as the command line compiles them."""
    import jax

    from benchmarks.programs.step import tokens_of
    from jgraph.train.setup import TrainSetup

    setup = TrainSetup.from_config(vary(config.changed(graph="auto"), settings))
    init = setup.compile_init()
    run = setup.compile_step()
    return init, lambda state: run(state, jax.device_put(setup.step.place(tokens_of(config))))


def plain_parts(config: TrainConfig, settings: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """Returns the functions of the initial state and of the step of plain JAX, compiled when called."""
    import jax

    from benchmarks.peers.plain_jax import plain_step
    from benchmarks.programs.step import tokens_of

    plain = plain_step(config, settings.split(), platform=jax.default_backend())
    return plain.init, lambda state: plain.step(state, tokens_of(config))


def torch_row(system: str, settings: str, config: TrainConfig, began: float) -> Row:
    """Returns the row of PyTorch: the first step of `torch.compile`, without a CUDA graph."""
    import torch

    from benchmarks.peers.single_gpu import build_model
    from benchmarks.peers.torch_run import device_name

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda"):
        model, optimizer = build_model(f"{system} {settings}", config)
    shape = config.input.batch_size, config.input.seq_len + 1
    tokens = torch.randint(0, config.model.vocab_size, shape, device="cuda")
    with torch.no_grad():
        model.loss(tokens)  # creates the rotary table before compilation
    built = time.monotonic()
    loss = torch.compile(model.loss)(tokens)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
    optimizer.step()
    torch.cuda.synchronize()
    return {
        "imports_s": built - began,
        "first_step_s": time.monotonic() - began,
        "device": f"1 x {device_name()}",
    }


if __name__ == "__main__":
    start(read_request())
