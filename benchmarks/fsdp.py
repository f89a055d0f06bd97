"""Training with sharded state as one program (`jgraph.train --fsdp`) against PyTorch's `fully_shard`, on the GPUs of a machine.

    python -m benchmarks.fsdp --work gpt-1b3 gpt-7b

Every row has a process of its own, and all are timed in turns (`benchmarks/turns.py`), jgraph on one GPU with as many tokens
too. Both sides time whole steps handed over one after the other: forward, backward, clipping, AdamW. Results are written after
every round, those of other works left as they are; `--table` prints what there is.

A process of jgraph's is this script with its request: python -m benchmarks.fsdp '{"task": "time", "config": {...}, ...}'
"""

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
import tyro

from benchmarks import harness
from benchmarks.harness import (
    PARAMETERS,
    Common,
    Table,
    count_gpus,
    fastest,
    line,
    named,
    parameters,
    ratio,
    save_soak,
    spread,
    step_flops,
)
from benchmarks.peers.protocol import Clock, answer, request, take_turns, told
from benchmarks.turns import Entrant, ask, race
from jgraph.device import peak_flops
from jgraph.training.config import TrainConfig
from jgraph.training.metrics import peak_memory_bytes
from jgraph.training.presets import preset
from jgraph.training.setup import TrainSetup
from jgraph.xla import count_launches
from jgraph_models.gpt import GPTConfig

Row = dict[str, Any]
WorkName = Literal["launch-bound", "gpt-1b3", "gpt-7b"]

# B batch of all ranks, S sequence and its next token

SEQUENCES: dict[WorkName, int] = {"launch-bound": 2, "gpt-1b3": 8, "gpt-7b": 2}
ON_ONE_GPU = ("launch-bound", "gpt-1b3")  # the state of the other one leaves little of a GPU
_TINY = GPTConfig(num_layers=4, d_model=64, num_heads=2, num_kv_heads=2, d_ff=128, vocab_size=96, compute_dtype="float32")

# To reach: tokens/s over the fastest torch's, over those of as many single GPUs, and MFU; and no more memory than torch.
LEAST_GAIN = 1.10
LEAST_SCALING = 0.92
LEAST_MFU = {"gpt-7b": 0.54}

FLOPS = "6 x tokens x (weights of matrix products + layers x width x sequence): no embedding, nothing computed again"


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """What to run."""

    work: tuple[WorkName, ...] = ("gpt-1b3", "gpt-7b")
    """Presets that are trained."""
    sizes: Literal["full", "tiny"] = "full"
    """tiny is for a machine without a GPU."""
    sequences: int = 0
    """Of a GPU in a step; 0 for 8 of gpt-1b3, 2 of the others."""
    ranks: int = 0
    """GPUs that share the state; 0 for all that there are."""
    peers: tuple[str, ...] = ("compile", "compile:reshard", "eager")
    """eager or compile (torch.compile of every block and of the loss), `:reshard` to gather again in the backward; none where
    the flag stands alone."""
    graph: Literal["auto", "off", "full"] = "auto"
    """What is captured, as in `python -m jgraph.train`."""
    xla_option: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE for all of jgraph's programs, after the preset's; may be repeated."""
    variant: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE[ NAME=VALUE ...] for one row more; graph=auto|off|full, reshard=yes|no and layout=dp (every GPU has all
    parameters) beside XLA's; may be repeated."""
    one_gpu: Literal["yes", "no"] = "yes"
    """Whether to time on one GPU too what fits there."""
    soak: int = 0
    """Steps of each work, watched for memory and hangs, by the first variant if there is one, into soaks.json; nothing else is
    run."""
    hang_seconds: float = 60.0
    """Longest time of a step of a soak."""
    name: str = "fsdp"


# Running


def main() -> int:
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        asked = request()
        {"time": time_step, "soak": soak_step}[asked["task"]](asked)
        return 0
    options = tyro.cli(Options, description=__doc__)
    results = Table(options, draw)
    if options.table:
        print(results)
        return 0
    ranks = options.ranks or count_gpus() or len(jax.devices())
    if options.soak:
        return max(soak(work, ranks, options) for work in options.work)
    for work in options.work:
        run(work, ranks, options, results)
    print(results)
    return 0


def run(work: WorkName, ranks: int, options: Options, results: Table) -> None:
    """All rows of a work: those that keep parameters take turns with each other, and so do those that gather them again."""
    config = config_of(work, ranks, options)
    entrants = [ours(vary(config, variant), variant, ranks) for variant in ("", *options.variant)]
    if work in ON_ONE_GPU and options.one_gpu == "yes" and ranks > 1:
        alone = replace(config, fsdp=1, batch_size=config.batch_size // ranks)
        entrants += [ours(alone, "", 1, system="one GPU")]
    entrants += [torchs(peer, config, options) for peer in options.peers]
    again = [entrant for entrant in entrants if parameters(entrant.named) == "gathered again"]
    results.begin(work, ranks=ranks, config=asdict(config))
    groups: list[list[Row]] = [[], []]

    def compete(group: int, alike: list[Entrant], number: int) -> int:
        def save(rows: list[Row]) -> None:
            groups[group] = rows
            results.put(work, [*groups[0], *groups[1]])

        clock = Clock(seconds=options.seconds, repeats=options.repeats, warmup_seconds=options.warmup_seconds)
        limits = {"rounds": options.rounds, "together": options.together, "timeout": options.timeout}
        return race(alike, clock, save, **limits, number=number)

    number = compete(0, [entrant for entrant in entrants if entrant not in again], 0)
    if again:
        compete(1, again, number)


def ours(config: TrainConfig, variant: str, ranks: int, system: str = "jgraph") -> Entrant:
    named = {"system": system, "variant": variant, "ranks": ranks}
    return Entrant(named, "benchmarks.fsdp", {"task": "time", "config": asdict(config)})


def torchs(peer: str, config: TrainConfig, options: Options) -> Entrant:
    how, _, reshard = peer.partition(":")
    few = options.sizes == "full" and count_gpus() < config.fsdp
    return Entrant(
        {"system": "torch", "variant": peer, "ranks": config.fsdp},
        "benchmarks.peers.fsdp",
        {"config": asdict(config), "compile": how == "compile", "reshard": reshard == "reshard"},
        ranks=config.fsdp,
        missing=f"skipped: {count_gpus()} of {config.fsdp} GPUs are here" if few else "",
    )


def config_of(work: WorkName, ranks: int, options: Options) -> TrainConfig:
    config = preset(work)
    if options.sizes == "tiny":
        config = replace(config, model=_TINY, seq_len=32)
    return replace(
        config,
        batch_size=ranks * (options.sequences or SEQUENCES[work]),
        fsdp=ranks,
        graph=options.graph,
        xla_options=(*config.xla_options, *options.xla_option),
    )


def vary(config: TrainConfig, variant: str) -> TrainConfig:
    """With the words of a variant."""
    for word in variant.split():
        match word.split("=", 1):
            case ["graph", "auto" | "off" | "full" as graph]:
                config = replace(config, graph=graph)
            case ["reshard", "yes" | "no" as choice]:
                config = replace(config, reshard_after_forward=choice == "yes")
            case ["layout", "dp"]:
                config = replace(config, dp=config.fsdp, fsdp=1)
            case [name, _] if name not in ("graph", "reshard", "layout"):
                config = replace(config, xla_options=(*config.xla_options, word))
            case _:
                raise SystemExit(f"--variant has {word}: must be graph=auto|off|full, reshard=yes|no, layout=dp or XLA's")
    return config


def soak(work: WorkName, ranks: int, options: Options) -> int:
    variant = next(iter(options.variant), "")
    config = vary(config_of(work, ranks, options), variant)
    asked = {"task": "soak", "config": asdict(config), "steps": options.soak, "hang_seconds": options.hang_seconds}
    row = ask("benchmarks.fsdp", asked, timeout=options.timeout)
    named = {"work": f"fsdp {work}", "variant": variant, "graph": config.graph, "ranks": ranks, "steps": options.soak}
    return save_soak(options, named | {"batch_size": config.batch_size}, row)


# In a process of its own


@dataclass
class Program:
    """A compiled step with its devices, state and batch; `run` hands over a step, `wait` returns when all are done."""

    devices: list[Any]
    compiled: Callable[..., Any]
    state: Any
    batch: Any
    metrics: Any = None

    @classmethod
    def of(cls, config: TrainConfig) -> "Program":
        if jax.default_backend() == "gpu":  # or command buffers are left aside while launches are counted
            profiled = "xla_enable_command_buffers_during_profiling=true"
            config = replace(config, xla_options=(*config.xla_options, profiled))
        setup = TrainSetup.of(config)
        devices = jax.devices()[: setup.num_devices]
        answer(device=f"{len(devices)} x {devices[0].device_kind}", xla_options=config.xla_options)
        start = time.perf_counter()
        step = setup.compile_step()
        compiled, report = step.executable, step.capture
        answer(compile_s=time.perf_counter() - start, capture=str(report) if report else None)
        memory = compiled.memory_analysis()
        if memory is not None:
            names = "argument", "temp", "output", "alias"
            answer(**{f"{name}_bytes": getattr(memory, f"{name}_size_in_bytes") for name in names})
        shape = config.batch_size, config.seq_len + 1
        rows_BS = np.random.default_rng(0).integers(0, config.model.vocab_size, shape).astype(np.int32)
        program = cls(devices, compiled, setup.init(), jax.device_put(setup.step.place(rows_BS)))
        jax.block_until_ready(program.state)
        # The state is made in a program that may take more than the step does, and a device's peak cannot be set back.
        answer(init_peak_bytes=program.peak_bytes())
        return program

    def run(self) -> None:
        self.state, self.metrics = self.compiled(self.state, self.batch)

    def wait(self) -> None:
        jax.block_until_ready((self.state, self.metrics))

    def peak_bytes(self) -> int:
        return max(peak_memory_bytes(device) for device in self.devices)

    def result(self) -> Row:
        return {"loss": float(self.metrics.loss), "skipped": int(self.state.skipped)}


def time_step(asked: Row) -> None:
    program = Program.of(TrainConfig.from_dict(asked["config"]))
    program.run()
    program.wait()
    answer(**program.result(), peak_bytes=program.peak_bytes())
    # On a CPU the threads of one step can wait for those of another, in another collective, for ever.
    on_cpu = program.devices[0].platform == "cpu"

    def measure(clock: Clock) -> Row:
        return told((clock.one_by_one if on_cpu else clock.back_to_back)(program.run, program.wait))

    take_turns(measure)
    with count_launches() as count:
        program.run()
        program.wait()
    skipped = program.result()["skipped"]
    answer(launches=count.launches, updates=count.updates, skipped=skipped, peak_bytes=program.peak_bytes())


def soak_step(asked: Row) -> None:
    program = Program.of(TrainConfig.from_dict(asked["config"]))
    for _ in range(3):
        program.run()
        program.wait()
    limits = {name: asked[name] for name in ("steps", "hang_seconds")}
    for row in harness.soak(program.run, program.wait, program.devices, **limits):
        answer(**row, **program.result())


# Table


def tokens_per_second(row: Row, result: Row) -> float:
    """Of all GPUs of the row together."""
    config = result["config"]
    return config["batch_size"] / result["ranks"] * row["ranks"] * config["seq_len"] / row["ms"] * 1e3


def scaling(row: Row, result: Row) -> float | None:
    """Tokens per second over those of as many single GPUs; a GPU has as many tokens in both, so a ratio of times."""
    alone = fastest(result["rows"], "one GPU")
    return alone["ms"] / row["ms"] if alone and row["system"] == "jgraph" else None


def mfu(row: Row, result: Row) -> float | None:
    """Of the datasheet's bfloat16 rate."""
    peak = peak_flops((row.get("device") or "").partition(" x ")[2])
    flops = step_flops(result["config"]) / result["ranks"]  # a GPU's, the same with one
    return flops / row["ms"] * 1e3 / peak if peak else None


def draw(works: dict[str, Any]) -> str:
    parts = [summary(works), *(table(work, result) for work, result in works.items())]
    return "# Sharded training\n\n" + "\n".join("\n".join(lines) + "\n" for lines in parts)


def summary(works: dict[str, Any]) -> list[str]:
    """Of each work two rows: parameters kept for the backward, and gathered again."""
    columns = ["work", "ranks", "parameters", "fastest torch", "tokens/s", "peak GB", "fastest jgraph", "tokens/s", "peak GB"]
    columns += ["torch / jgraph", "to reach", "of N x one GPU", "to reach", "MFU", "to reach"]
    lines = [line(columns), "|---" * len(columns) + "|"]
    for work, result in works.items():
        for how in PARAMETERS:
            rows = [row for row in result["rows"] if parameters(row) == how]
            torch, ours = (fastest(rows, system) for system in ("torch", "jgraph"))
            if not torch and not ours:
                continue
            cells = [work, str(result["ranks"]), how]
            for row in (torch, ours):
                cells += [row["variant"] or "as it comes", f"{tokens_per_second(row, result):,.0f}"] if row else ["not run", ""]
                cells += [gigabytes(row, "peak_bytes") if row else ""]
            if torch and ours:
                cells[-1] += f" <= {gigabytes(torch, 'peak_bytes')}"
            cells += [f"**{ratio(torch, ours)}**" if torch and ours else "", f">= {LEAST_GAIN:g}"]
            cells += [share(scaling, ours, result), f">= {LEAST_SCALING:g}" if work in ON_ONE_GPU else ""]
            cells += [share(mfu, ours, result), f">= {LEAST_MFU[work]:.0%}" if work in LEAST_MFU else ""]
            lines += [line(cells)]
    return lines


def share(of: Callable[[Row, Row], float | None], row: Row | None, result: Row) -> str:
    value = of(row, result) if row else None
    return "" if value is None else f"{value:.1%}"


def gigabytes(row: Row, key: str) -> str:
    return f"{row[key] / 1e9:.2f}" if row.get(key) else ""


def table(work: str, result: Row) -> list[str]:
    env, options, config, rows = (result[key] for key in ("environment", "options", "config", "rows"))
    peers = {how: fastest([row for row in rows if parameters(row) == how], "torch") for how in PARAMETERS}
    ranks = result["ranks"]
    lines = [f"## {work}, {ranks} ranks, {config['batch_size'] // ranks} x {config['seq_len']} tokens a rank", ""]
    lines += [f"{env['date']}, revision {env['revision']}, jax {env.get('jax')}, torch {env.get('torch')}, "]
    lines[-1] += f"{result['device'] or 'device not asked yet'}, sizes {options['sizes']}, graph {config['graph']}, "
    lines[-1] += f"XLA options: {' '.join(config['xla_options']) or 'none'}."
    columns = "variant", "ms a step", "fastest, slowest", "tokens/s", "torch / this", f"of {ranks} x one GPU", "MFU"
    columns = *columns, "peak GB", "temporaries GB", "compile s", "launches, updates", "W", "MHz", "first loss"
    lines += ["", line(list(columns)), "|---" * len(columns) + "|"]
    for row in rows:
        cells = [named(row)]
        if "ms" in row:
            cells += [f"{row['ms']:.2f}", spread(row), f"{tokens_per_second(row, result):,.0f}"]
            cells += [ratio(torch, row) if (torch := peers[parameters(row)]) and row["ranks"] == ranks else ""]
            cells += [share(scaling, row, result), share(mfu, row, result)]
            cells += [gigabytes(row, key) for key in ("peak_bytes", "temp_bytes")]
            if row.get("init_peak_bytes", 0) == row.get("peak_bytes"):
                cells[-2] += " (init)"
            cells += [f"{row['compile_s']:.1f}" if "compile_s" in row else ""]
            cells += [f"{row['launches']}, {row['updates']}" if "launches" in row else ""]
            cells += [f"{row[key]:.0f}" if row.get(key) else "" for key in ("power_watts", "sm_clock_mhz")]
            cells += [f"{row['loss']:.5g}" if "loss" in row else ""]
            cells[-1] += f", {row['skipped']} steps skipped" if row.get("skipped") else ""
        cells += [row["failed"]] if "failed" in row else []
        lines += [line(cells + [""] * (len(columns) - len(cells)))]
    notes = "torch's is the fastest that keeps parameters, or gathers them again, as the row does", f"FLOPs of a step: {FLOPS}"
    notes = *notes, "Peak GB: of the GPU that had most; (init) if the state took more to make than a step"
    notes = *notes, "Compile s of torch is its first step", "Launches, updates: of all GPUs in a step"
    lines += ["", f"{'. '.join(notes)}."]
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
