"""Compares README's loop with the best loop of plain JAX, on the launch-bound step, with `jgraph.compare` in one process.

python -m benchmarks run loop
python -m benchmarks run loop --sizes tiny --rounds 1 --seconds 0.01     # on a CPU

Each comparison is printed when it ends, and has a work of its own. A turn of a program takes 6 times `--seconds`:

- `loop`: plain JAX and `jgraph.train_step` with plain `optax.adamw`.
- `declared`: `jgraph.train_step` with plain `optax.adamw` and with `jgraph.elementwise(optax.adamw)`.
- `command`: plain JAX and the step of `python -m jgraph.train`, as in the benchmark `single_gpu`.

All programs have the same model, loss, parameters, batch and schedule of the learning rate. The step of the command line has
the XLA options of the preset, and does not decay vectors. To give them to the other two as well:

python -m benchmarks run loop --xla-options xla_gpu_experimental_force_split_k=1 \
    --plain "same flatten xla_gpu_experimental_force_split_k=1"
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax
import optax
from flax import nnx
from jax import Array

import jgraph
from benchmarks.peers.plain_jax import plain_step
from benchmarks.programs.step import tokens_of
from benchmarks.rows import Row, row_name, spread
from benchmarks.runner import Benchmark, Options, Work
from benchmarks.tables import Section, against_first, number
from benchmarks.works import preset_config
from jgraph.train.config import TrainConfig
from jgraph.train.optimizer import learning_rate
from jgraph.train.setup import TrainSetup
from jgraph_models.gpt import GPT

Tree = Any
Name = Literal["loop", "declared", "command"]

# The programs of a comparison.
PAIRS: dict[Name, tuple[str, str]] = {
    "loop": ("plain", "loop"),
    "declared": ("loop", "declared"),
    "command": ("plain", "command"),
}


@dataclass(frozen=True, kw_only=True)
class LoopOptions(Options):
    """Flags of the benchmark."""

    comparisons: tuple[Name, ...] = ("loop", "declared", "command")
    """Comparisons to run, in this order."""
    plain: str = "same flatten"
    """Variant of plain JAX, see `benchmarks/peers/plain_jax.py`. The default is the fastest one of `single_gpu`."""
    xla_options: tuple[str, ...] = ()
    """XLA options of README's step, as NAME=VALUE. Those of plain JAX are words of its variant."""


class Programs:
    """The programs of the comparisons, from the same parameters and the same batch."""

    def __init__(self, config: TrainConfig, plain: str, xla_options: tuple[str, ...]):
        self.config = config
        self.variant = plain
        self.xla_options = xla_options
        self._plain = plain_step(config, plain.split(), platform=jax.default_backend())
        self._state = self._plain.init()
        self._tokens_BS = jax.device_put(tokens_of(config))
        rate = learning_rate(config.optimizer, config.steps)
        settings = config.optimizer
        self._adamw = optax.adamw(
            rate, float(settings.beta1), float(settings.beta2), float(settings.eps), weight_decay=float(settings.weight_decay)
        )

    def plain(self) -> jgraph.Program:
        """Returns the step of plain JAX."""
        return jgraph.Program(
            self._plain.step, (self._state, self._tokens_BS), name=f"jax {self.variant}", result=lambda out: (out[1], out[0][0])
        )

    def loop(self) -> jgraph.Program:
        """Returns README's step with plain optax."""
        return self._step(self._adamw, "optax.adamw")

    def declared(self) -> jgraph.Program:
        """Returns README's step with a declared transform."""
        return self._step(jgraph.elementwise(self._adamw), "elementwise")

    def command(self) -> jgraph.Program:
        """Returns the step of the command line."""
        setup = TrainSetup.from_config(self.config)
        return self._compared(setup.step, setup.compile_step(), setup.init(), "jgraph.train")

    def _step(self, transform: Any, name: str) -> jgraph.Program:
        graphdef, _ = nnx.split(nnx.eval_shape(lambda: GPT(self.config.model, rngs=nnx.Rngs(self.config.seed))))

        def loss(params: Tree, tokens_BS: Array, key: Array) -> Array:
            return nnx.merge(graphdef, params).loss(tokens_BS)

        params, _ = self._state
        strategy = jgraph.Replicated(None, params)
        step = jgraph.train_step(loss, transform, strategy, clip_norm=self.config.optimizer.clip_norm)
        run = step.compile(self._tokens_BS, xla_options=self.xla_options)
        return self._compared(step, run, step.init(params), name)

    def _compared(
        self, step: jgraph.TrainStep, run: jgraph.CompiledStep, state: jgraph.TrainState, name: str
    ) -> jgraph.Program:
        print(run.optimizer, flush=True)

        def result(out: tuple[jgraph.TrainState, jgraph.StepMetrics]) -> Tree:
            return out[1].loss, step.canonical.of(out[0]).params

        return jgraph.Program(run, (state, step.place(self._tokens_BS)), name=name, result=result)


def works(options: LoopOptions) -> Iterator[Work]:
    """Yields one work per comparison. The programs that it compares stay for the next one."""
    programs = Programs(preset_config("launch-bound", options), options.plain, options.xla_options)
    makers = {"plain": programs.plain, "loop": programs.loop, "declared": programs.declared, "command": programs.command}
    made: dict[str, jgraph.Program] = {}
    for name in options.comparisons:
        for each in PAIRS[name]:
            made[each] = made.get(each) or makers[each]()
        first, second = PAIRS[name]
        yield Work(name, {"ranks": 1}, rows=compared(made[first], made[second], options))


def compared(f: jgraph.Program, g: jgraph.Program, options: LoopOptions) -> list[Row]:
    """Compares two programs, and returns their rows. The second one has the difference of the results."""
    found = jgraph.compare(f, g, rounds=options.rounds, seconds=options.seconds)
    print(found, end="\n\n", flush=True)
    return [row(found.f), row(found.g) | {"difference": str(found.difference)}]


def row(measured: jgraph.Measurement) -> Row:
    """Returns the row of one program in a results file."""
    return {
        "system": "jax" if measured.name.startswith("jax ") else "jgraph",
        "variant": measured.name.removeprefix("jax "),
        "ms": statistics.median(measured.step_ms),
        "repeats_ms": measured.step_ms,
        "host_ms": statistics.median(measured.host_ms),
        "repeats_host_ms": measured.host_ms,
        "device": measured.device,
        "capture": str(measured.capture),
        **({"step_bytes": measured.memory.total} if measured.memory else {}),
    }


def section(name: str, result: Row) -> Section:
    """Returns the table layout of a comparison."""
    columns = {
        "program": row_name,
        "step, ms": number("ms", ".4f"),
        "fastest, slowest, ms": spread,
        "time / first": against_first(result),
        "host, ms": number("host_ms", ".3f"),
        "difference of the results": lambda row: row.get("difference", ""),
    }
    return Section(name, columns)


BENCHMARK = Benchmark("README's loop", __doc__, LoopOptions, works, section)
