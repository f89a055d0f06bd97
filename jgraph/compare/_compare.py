"""Times two programs in turns, and reports on both: `jgraph.compare`."""

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jgraph.compare._difference import Difference, difference
from jgraph.compare._program import Program, Running
from jgraph.errors import ConfigError, of_type, require
from jgraph.page import render
from jgraph.timing import Timer, in_round
from jgraph.xla import CaptureReport
from jgraph.xla._buffers import show_bytes
from jgraph.xla.explain import Memory

_OF_CPU = "times of a CPU, not of a GPU; on a CPU, the host time can contain computation"


@dataclass(frozen=True)
class Measurement:
    """The measurements of one program of `compare`.

    Attributes:
        name: The name of the program.
        device: Number and kind of its devices, e.g. `1 x NVIDIA H200`.
        platform: `cpu` or `gpu`.
        step_ms: Milliseconds of a call without a wait between calls, one per round.
        host_ms: Milliseconds of the host to dispatch a call to an idle device, one per round.
        memory: Memory of the program. None if XLA does not report it.
        capture: Command buffers of the program. None on a CPU, or if XLA gave no report.
    """

    name: str
    device: str
    platform: str
    step_ms: tuple[float, ...]
    host_ms: tuple[float, ...]
    memory: Memory | None
    capture: CaptureReport | None


@dataclass(frozen=True)
class Comparison:
    """The report of `compare`. `str` formats it as a table.

    Attributes:
        f: The first program.
        g: The second program.
        difference: The difference between the results of their first calls.
    """

    f: Measurement
    g: Measurement
    difference: Difference

    @property
    def ratios(self) -> tuple[float, ...]:
        """The time of `f` divided by the time of `g`, one ratio per round. Above 1 if `g` is faster."""
        return tuple(a / b for a, b in zip(self.f.step_ms, self.g.step_ms, strict=True))

    def to_json(self) -> str:
        """Returns the report as the text of a JSON object.

        The keys are f, g, difference and ratios. Nested dataclasses are objects with their fields as keys; `memory` also has
        the key total. None becomes null.
        """
        fields: dict[str, Any] = dataclasses.asdict(self) | {"ratios": self.ratios}
        for name, each in (("f", self.f), ("g", self.g)):
            if each.memory is not None:
                fields[name]["memory"] = each.memory.to_dict()
        return json.dumps(fields)

    def to_html(self) -> str:
        """Returns the report as a page that needs no server and no other file.

        The page has the table, the times of each round, and the operations outside command buffers.
        """
        from jgraph._version import __version__  # imported here, because sources without an installation have no version

        names = [self.f.name, self.g.name]
        rounds = zip(self.f.step_ms, self.g.step_ms, self.f.host_ms, self.g.host_ms, self.ratios, strict=True)
        return render(
            "jgraph.compare",
            {
                "title": f"{names[0]} and {names[1]}",
                "about": {
                    "versions": {"jax": jax.__version__, "jgraph": __version__},
                    "notes": list(self._notes()),
                },
                "names": names,
                "rows": list(self._rows()),
                "rounds": list(rounds),
                "captures": [[each.name, str(each.capture)] for each in (self.f, self.g) if each.capture],
            },
        )

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        """Yields the name of each fact, and its text for each program."""

        def row(name: str, text: Callable[[Measurement], str]) -> tuple[str, str, str]:
            return name, text(self.f), text(self.g)

        yield row("step, ms", lambda each: _range(each.step_ms))
        yield row("host, ms", lambda each: _range(each.host_ms))
        yield row("memory", lambda each: show_bytes(each.memory.total) if each.memory else "unknown")
        yield row("captured", _captured)
        yield row("device", lambda each: each.device)

    def _notes(self) -> Iterator[str]:
        yield f"{self.f.name} takes {_range(self.ratios)} times as long as {self.g.name}"
        yield f"results: {self.difference}"
        if on_cpu := [each.name for each in (self.f, self.g) if each.platform == "cpu"]:
            yield f"{' and '.join(on_cpu)}: {_OF_CPU}"

    def __str__(self) -> str:
        rows = [("", self.f.name, self.g.name), *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *self._notes()])


def compare(
    f: Callable[..., Any] | Program,
    g: Callable[..., Any] | Program,
    *args: Any,
    donate_argnums: int | Sequence[int] = (),
    rounds: int = 5,
    seconds: float = 0.3,
) -> Comparison:
    """Runs two programs in turns, and compares their times, host times, memory, capture and results.

    Both are compiled and warm before the first turn. In each round, each program has one turn, and the order alternates. A turn
    starts with copies of the arguments, made before the clock starts. An argument that a program donates is replaced, after
    each call, by the first element of the result with the same structure, shapes and dtypes: a step continues from its own
    state. Programs on a GPU are compiled twice, because XLA reports command buffers only with an option for dumps.

    Args:
        f: A function, a jitted function, or a compiled program, such as a step of `TrainStep.compile`. Or a `jgraph.Program`:
            one of these with arguments of its own. A function that is not jitted is jitted with `jax.jit`, which drops updates
            of Flax NNX modules: pass `nnx.jit(f)`.
        g: The second program, like `f`. The two may return different trees; their results are then not compared.
        *args: The positional arguments of `f` and `g`. Left out if both are a `Program`. They stay valid.
        donate_argnums: Indices of the positional arguments to donate. Only for functions that are not jitted.
        rounds: Number of turns of each program, at least 1.
        seconds: Duration of a repeat. A turn takes 6 times as long: a warm-up of two, three repeats and the host times.

    Returns:
        The comparison. `print` shows it as a table, `to_html()` returns a page.

    Raises:
        ConfigError: If an argument has a value that is not allowed, a donated argument has no counterpart in the result, an
            array was donated to an earlier call, or JAX runs in several processes.

    Examples:
        >>> def f(x):
        ...     return jnp.sum(x * x)
        >>> def g(x):
        ...     return jnp.vdot(x, x)
        >>> found = jgraph.compare(f, g, jnp.ones(100), rounds=1, seconds=0.001)  # print it
        >>> found.difference.absolute
        0.0
    """
    require(isinstance(rounds, int) and rounds >= 1, "rounds", rounds, "at least 1")
    require(seconds > 0, "seconds", seconds, "positive")
    if jax.process_count() > 1:
        raise ConfigError(f"JAX runs in {jax.process_count()} processes: compare programs in one process", field="")
    programs = _programs({"f": f, "g": g}, args, donate_argnums)
    labels = [program.label for program in programs.values()]
    if labels[0] == labels[1]:
        labels = [f"{label} ({field})" for label, field in zip(labels, programs, strict=True)]
    running = [Running(program) for program in programs.values()]
    first, second = (each.start() for each in running)
    timer = Timer(seconds=seconds, repeats=3, warmup_seconds=2 * seconds)
    times: list[list[tuple[float, float]]] = [[], []]
    for number in range(rounds):
        for which in in_round((0, 1), number):
            times[which].append(running[which].turn(timer))
    of_f, of_g = map(_measurement, labels, running, times)
    return Comparison(of_f, of_g, difference(first, second, (labels[0], labels[1])))


def _programs(
    given: dict[str, Callable[..., Any] | Program], args: Sequence[Any], donate_argnums: int | Sequence[int]
) -> dict[str, Program]:
    """Returns the programs by argument name. Functions get the arguments of the call."""
    if all(isinstance(each, Program) for each in given.values()) and (args or donate_argnums not in ((), [])):
        field = "args" if args else "donate_argnums"
        raise ConfigError(f"`{field}` must be left out: both programs are a jgraph.Program with its own", field=field)
    found = dict[str, Program]()
    for field, each in given.items():
        require(callable(each) or isinstance(each, Program), field, of_type(each), "a function or a jgraph.Program")
        found[field] = each if isinstance(each, Program) else Program(each, args, donate_argnums)
    return found


def _measurement(label: str, running: Running, times: Sequence[tuple[float, float]]) -> Measurement:
    step_ms, host_ms = zip(*times, strict=True)
    device = running.devices[0]
    kind = f"{len(running.devices)} x {device.device_kind}"
    return Measurement(label, kind, device.platform, step_ms, host_ms, running.memory, running.capture)


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def _captured(each: Measurement) -> str:
    if each.capture is not None:
        report = each.capture
        return f"{report.captured} of {report.total} thunks, in {report.command_buffers} command buffers"
    return "a CPU has no command buffers" if each.platform == "cpu" else "unknown"
