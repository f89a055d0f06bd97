"""A schedule as one program (`jgraph.pipeline`) against torch.distributed.pipelining, and against its actions alone.

    python -m benchmarks.pipeline --work mlp-large mlp-launch-bound gpt-1b3

Every row has a process of its own that is ended after a time-out; the peers run first. Both sides time loss and gradients of a
step, each step waited for, and back to back. Results are written after every row, those of other works left as they are, so a
table can be made in several runs; `--table` prints what there is.

Forward, dgrad and wgrad are timed alone on one GPU. Played by `jgraph.schedule.simulate` they give the time of a step that has
nothing but its actions and its bubble, which the measured one is compared with: in lockstep for the aligned runtime, by data
flow for the general one.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
import tyro

from benchmarks.harness import Table, count_gpus, environment, fastest, line, merge, print_soak, ratio, spread
from benchmarks.peers.protocol import Clock, ask
from benchmarks.works import Size, schedule_of, size_from, sizes_of
from jgraph.schedule import Costs, simulate, tick_table
from jgraph.schedule.action import DGRAD, FORWARD

Row = dict[str, Any]
WorkName = Literal["mlp-large", "mlp-launch-bound", "gpt-1b3", "gpt-7b"]

# To reach: fastest torch / jgraph, and ms / what the actions take alone.
LEAST_GAIN = {"mlp-large": 1.09, "mlp-launch-bound": 3.0, "gpt-1b3": 1.10, "gpt-7b": 1.10}
MOST_OVERHEAD = 1.03


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    work: tuple[WorkName, ...] = ("mlp-large", "mlp-launch-bound", "gpt-1b3")
    """What is trained; 4 MLP layers a rank."""
    sizes: Literal["full", "tiny"] = "full"
    """tiny is for a machine without a GPU."""
    ranks: int = 0
    """Of the pipeline; 0 for all GPUs that there are."""
    microbatches: int = 0
    """Of a step; 0 for 16, on a machine without a GPU 8."""
    schedules: tuple[str, ...] = ("aligned", "aligned:2", "zb-h1", "1f1b")
    """Schedules of `jgraph.schedule`, with chunks per rank after a colon; none where the flag stands alone."""
    peers: tuple[str, ...] = (
        "Schedule1F1B",
        "ScheduleInterleavedZeroBubble",
        "ScheduleZBVZeroBubble",
        "ScheduleDualPipeV",
        "Schedule1F1B:compile",
        "ScheduleInterleavedZeroBubble:compile",
        "ScheduleZBVZeroBubble:compile",
        "ScheduleDualPipeV:compile",
    )
    """Schedules of torch.distributed.pipelining, `:compile` for torch.compile; none where the flag stands alone."""
    graph: Literal["auto", "off", "full"] = "auto"
    """What is captured, as in `python -m jgraph.train`."""
    xla_option: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE for all of jgraph's programs; may be repeated."""
    variant: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE[ NAME=VALUE ...] for one row more of the first schedule; may be repeated."""
    remat: Literal["nothing", "layer"] = "nothing"
    """What of a layer is made again in its backward."""
    quick: bool = False
    """The first schedule and the first peer only."""
    soak: int = 0
    """Steps of the first work by the first schedule, watched for memory and hangs; nothing else is run."""
    table: bool = False
    """Print the results that there are; nothing is run."""
    seconds: float = 0.5
    """Shortest time of a repeat."""
    repeats: int = 5
    """Repeats, of which the median is taken."""
    warmup_seconds: float = 1.0
    """Time that each row runs before it is timed."""
    timeout: float = 240.0
    """Seconds after which a process is ended."""
    hang_seconds: float = 60.0
    """Longest time of a step of a soak."""
    revision: str = ""
    """Git revision for the JSON, where there is no .git."""
    name: str = "pipeline"
    """Results go to benchmarks/results/NAME.json and .md."""


# Running


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    results = Table(options.name, draw)
    if options.table:
        print("\n".join(summary(results.works)))
        return 0
    ranks = options.ranks or count_gpus() or len(jax.devices())
    if options.soak:
        return soak(options, ranks)
    for work in options.work:
        run(work, ranks, options, results)
    print(results)
    return 0


def size_of(work: WorkName, ranks: int, options: Options) -> Size:
    size = sizes_of(options.sizes, ranks)[work]
    return replace(size, microbatches=options.microbatches) if options.microbatches else size


def run(work: WorkName, ranks: int, options: Options, results: Table) -> None:
    """All rows of a work."""
    size = asdict(size_of(work, ranks, options))
    schedules, peers = (some[: 1 if options.quick else None] for some in (options.schedules, options.peers))
    about = {"environment": environment(revision=options.revision), "options": asdict(options), "ranks": ranks}
    results.begin(work, **about, size=size, actions={})
    for peer in peers:
        results.add(work, ask_torch(peer, size, ranks, options))
    for chunks in dict.fromkeys(chunks_of(text, ranks, size) for text in schedules):
        text = next(text for text in schedules if chunks_of(text, ranks, size) == chunks)
        row = ask_jgraph("actions", work, text, ranks, options)
        results.works[work]["actions"][str(chunks)] = row
        print(f"{work}: {chunks} chunks: {row}", flush=True)
    for text, variant in [*((text, "") for text in schedules), *((text, v) for text in schedules[:1] for v in options.variant)]:
        row = ask_jgraph("time", work, text, ranks, options, variant)
        actions = results.works[work]["actions"][str(chunks_of(text, ranks, size))]
        results.add(work, row | compare(row, actions, ranks, size))


def ask_torch(peer: str, size: Row, ranks: int, options: Options) -> Row:
    schedule, _, compiled = peer.partition(":")
    named = {"system": "torch", "schedule": schedule, "variant": compiled}
    if options.sizes == "full" and count_gpus() < ranks:
        return named | {"failed": f"skipped: {count_gpus()} of {ranks} GPUs are here"}
    asked = {"schedule": schedule, "compile": compiled == "compile", "clock": clock(options), "sizes": {"": size}}
    rows, failure = ask("benchmarks.peers.pipelining", asked, ranks=ranks, timeout=options.timeout)
    return merge(rows, failure) | named


def ask_jgraph(task: str, work: WorkName, schedule: str, ranks: int, options: Options, variant: str = "", **more: Any) -> Row:
    asked = {
        "task": task,
        "schedule": schedule,
        "ranks": ranks,
        "size": asdict(size_of(work, ranks, options)),
        "graph": options.graph,
        "xla_options": [*options.xla_option, *variant.split()],
        "remat": options.remat,
        "clock": clock(options),
    }
    rows, failure = ask("benchmarks.pipeline_program", asked | more, timeout=options.timeout)
    named = {"system": "jgraph", "schedule": schedule, "variant": variant, "xla_options": asked["xla_options"]}
    return named | merge(rows, failure)


def clock(options: Options) -> Row:
    return asdict(Clock(seconds=options.seconds, repeats=options.repeats, warmup_seconds=options.warmup_seconds))


def soak(options: Options, ranks: int) -> int:
    work, schedule = options.work[0], options.schedules[0]
    asked = {"steps": options.soak, "hang_seconds": options.hang_seconds}
    row = ask_jgraph("soak", work, schedule, ranks, options, **asked)
    return print_soak(f"{work}, {schedule}, {ranks} ranks", row, options.soak, "same_loss")


# What a step would take that is nothing but its actions


def chunks_of(schedule: str, ranks: int, size: Row) -> int:
    return len(schedule_of(schedule, ranks, size["microbatches"]).placement[0])


def compare(row: Row, actions: Row, ranks: int, size: Row) -> Row:
    """Milliseconds of the actions with their bubble, and of what else was timed alone, by how often a step has it."""
    if "ms" not in row or "wgrad_ms" not in actions:
        return {}
    schedule = schedule_of(row["schedule"], ranks, size["microbatches"])
    costs = Costs(actions["forward_ms"], actions["dgrad_ms"], actions["wgrad_ms"])
    played = simulate(schedule, costs, execution="lockstep" if row["runtime"] == "aligned" else "dataflow")
    ticks = simulate(schedule, costs, execution="neighbours").makespan
    count = dict.fromkeys(("head", "embed", "embed_backward"), size["microbatches"])
    count |= {"psum": 1, "permute": permutes(row["schedule"], row["runtime"], ranks, size)}
    rest = {name: n * actions[f"{name}_ms"] for name, n in count.items() if f"{name}_ms" in actions}
    if row["runtime"] == "general":
        rest["waiting for neighbours"] = max(ticks - played.makespan, 0.0)
    rest["not told"] = row["ms"] - played.makespan - sum(rest.values())
    return {"busy_ms": float(played.busy.mean()), "actions_ms": played.makespan, "bubble": played.bubble, "rest_ms": rest}


def permutes(name: str, runtime: str, ranks: int, size: Row) -> int:
    """How many a step has: the general runtime's in every tick, the aligned one's where ranks have made what is passed on."""
    table = tick_table(schedule_of(name, ranks, size["microbatches"]))
    passed = {"activation": FORWARD, "gradient": DGRAD}
    used = {
        (source, pool)
        for source in ("previous", "next")
        for pool in passed
        if (getattr(table.arrivals[source], pool) >= 0).any()
    }
    if runtime == "general":
        return len(table.kind) * len({source for source, _ in used})
    return sum(int(np.any(table.kind == passed[pool], axis=1).sum()) for _, pool in used)


# Table


def draw(works: dict[str, Any]) -> str:
    parts = [summary(works), *(table(work, result) for work, result in works.items())]
    return "# Pipelines\n\n" + "\n".join("\n".join(lines) + "\n" for lines in parts)


def label(row: Row) -> str:
    return " ".join(filter(None, (row["schedule"], row["variant"])))


def summary(works: dict[str, Any]) -> list[str]:
    columns = ["work", "ranks", "fastest torch", "ms", "fastest jgraph", "ms", "torch / jgraph", "to reach", "ms / actions"]
    lines = [line([*columns, "to reach"]), "|---" * (len(columns) + 1) + "|"]
    for work, result in works.items():
        cells = [work, str(result["ranks"])]
        torch, ours = (fastest(result["rows"], system) for system in ("torch", "jgraph"))
        for row in (torch, ours):
            cells += [label(row), f"{row['ms']:.2f}"] if row else ["none ran", ""]
        cells += [f"**{ratio(torch, ours, 'ms')}**" if torch and ours else "", f">= {LEAST_GAIN[work]:g}"]
        cells += [overhead(ours) if ours else "", f"<= {MOST_OVERHEAD:g}"]
        lines += [line(cells)]
    return lines


def overhead(row: Row) -> str:
    return f"{row['ms'] / row['actions_ms']:.3f}" if "actions_ms" in row else ""


def table(work: str, result: Row) -> list[str]:
    env, ranks, size, rows = (result[key] for key in ("environment", "ranks", "size", "rows"))
    options, peer, flops = result["options"], fastest(rows, "torch"), size_from(size).flops
    lines = [f"## {work}, {size_from(size).layers} layers, {size['microbatches']} microbatches, {ranks} ranks", ""]
    lines += [f"{env['date']}, revision {env['revision']}, jax {env.get('jax')}, torch {env.get('torch')}, "]
    lines[-1] += f"{result['device'] or 'device not asked yet'}, sizes {options['sizes']}, graph {options['graph']}, "
    lines[-1] += f"remat {options['remat']}, XLA options: {' '.join(options['xla_option']) or 'none'}."
    columns = "schedule", "ms a step", "fastest, slowest", "torch / jgraph", "back to back", "host ms", "ms / actions"
    columns = *columns, "TFLOP/s a GPU", "peak GB", "temporaries GB", "compile s", "launches, updates", "loss"
    lines += ["", line(list(columns)), "|---" * len(columns) + "|"]
    for row in rows:
        cells = [f"{row['system']} {label(row)}"]
        if "ms" in row:
            cells += [f"{row['ms']:.2f}", spread(row), ratio(peer, row, "ms") if peer else ""]
            cells += [f"{row[key]:.2f}" if key in row else "" for key in ("stream_ms", "host_ms")]
            cells += [overhead(row), f"{flops / ranks / row['ms'] / 1e9:.0f}"]
            cells += [f"{row[key] / 1e9:.2f}" if row.get(key) else "" for key in ("peak_bytes", "temp_bytes")]
            cells += [f"{row['compile_s']:.1f}" if "compile_s" in row else ""]
            cells += [f"{row['launches']}, {row['updates']}" if "launches" in row else ""]
            cells += [f"{row['loss']:.6g}" if "loss" in row else ""]
        cells += [row["failed"]] if "failed" in row else []
        lines += [line(cells + [""] * (len(columns) - len(cells)))]
    return [*lines, *actions_table(result)]


def actions_table(result: Row) -> list[str]:
    """What was timed alone, and what a step is made of."""
    lines = []
    for chunks, actions in result["actions"].items():
        times = ", ".join(f"{key[:-3]} {value:.3f}" for key, value in actions.items() if key.endswith("_ms"))
        lines += ["", f"Alone, {chunks} chunk{'s' * (chunks != '1')} a rank, ms: {times}{actions.get('failed', '')}."]
    rows = [row for row in result["rows"] if "actions_ms" in row]
    if not rows:
        return lines
    names = [*dict.fromkeys(name for row in rows for name in row["rest_ms"] if name != "not told"), "not told"]
    lines += ["", line(["schedule", "ms", "actions", "bubble", *names]), "|---" * (4 + len(names)) + "|"]
    for row in rows:
        cells = [label(row), f"{row['ms']:.2f}", f"{row['busy_ms']:.2f}", f"{row['actions_ms'] - row['busy_ms']:.2f}"]
        lines += [line(cells + [f"{row['rest_ms'][name]:.2f}" if name in row["rest_ms"] else "" for name in names])]
    note = "Each is as often as a step has it times its time alone, so what overlaps with actions makes `not told` negative."
    return [*lines, "", f"{note} Launches and updates are those of all GPUs."]


if __name__ == "__main__":
    raise SystemExit(main())
