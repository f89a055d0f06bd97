"""A schedule as one program (`jgraph.parallel.pipeline`) against torch.distributed.pipelining, and against its actions alone.

    python -m benchmarks.pipeline --work mlp-large mlp-launch-bound gpt-1b3

Every row has a process of its own, and all are timed in turns (`benchmarks/turns.py`). Both sides time loss and gradients of a
step, each step waited for; back to back once, at the end. Results are written after every round, those of other works left as
they are, so a table can be made in several runs; `--table` prints what there is.

Forward, dgrad and wgrad are timed alone on one GPU. Played by `jgraph.schedule.simulate` they give the time of a step that has
nothing but its actions and its bubble, which the measured one is compared with: in lockstep for the aligned runtime, by data
flow for the general one.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import jax
import numpy as np
import tyro

from benchmarks.harness import Common, Table, count_gpus, fastest, line, ratio, save_soak, spread
from benchmarks.peers.protocol import Clock
from benchmarks.turns import Entrant, ask, race
from benchmarks.works import Size, schedule_of, size_from, sizes_of
from jgraph.schedule import Costs, simulate, tabulate
from jgraph.schedule.action import DGRAD, FORWARD

Row = dict[str, Any]
WorkName = Literal["mlp-large", "mlp-launch-bound", "gpt-1b3", "gpt-7b"]

# To reach: fastest torch / jgraph, and ms / what the actions take alone.
LEAST_GAIN = {"mlp-large": 1.09, "mlp-launch-bound": 3.0, "gpt-1b3": 1.10, "gpt-7b": 1.10}
MOST_OVERHEAD = 1.03


@dataclass(frozen=True, kw_only=True)
class Options(Common):
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
    actions: Literal["yes", "no"] = "yes"
    """Whether actions are timed alone too."""
    soak: int = 0
    """Steps of each work by the first schedule, watched for memory and hangs, into soaks.json; nothing else is run."""
    hang_seconds: float = 60.0
    """Longest time of a step of a soak."""
    name: str = "pipeline"


# Running


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    results = Table(options, draw)
    if options.table:
        print("\n".join(summary(results.works)))
        return 0
    ranks = options.ranks or count_gpus() or len(jax.devices())
    if options.soak:
        return max(soak(work, ranks, options) for work in options.work)
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
    results.begin(work, ranks=ranks, size=size, actions={})
    alone = results.works[work]["actions"]
    for text in options.schedules if options.actions == "yes" else ():
        if (chunks := str(chunks_of(text, ranks, size))) not in alone:
            asked = asked_of("actions", work, text, ranks, options)
            alone[chunks] = ask("benchmarks.pipeline_program", asked, timeout=options.timeout)
            print(f"{work}: {chunks} chunks: {alone[chunks]}", flush=True)

    def save(rows: list[Row]) -> None:
        chunks = {row["schedule"]: str(chunks_of(row["schedule"], ranks, size)) for row in rows if row["system"] == "jgraph"}
        results.put(work, [row | compare(row, alone.get(chunks.get(row["schedule"], "")), ranks, size) for row in rows])

    ours = [(text, "") for text in options.schedules]
    ours += [(text, variant) for text in options.schedules[:1] for variant in options.variant]
    entrants = [jgraphs(asked_of("time", work, text, ranks, options, variant), variant) for text, variant in ours]
    entrants += [torchs(peer, size, ranks, options) for peer in options.peers]
    limits = {"rounds": options.rounds, "together": options.together, "timeout": options.timeout}
    race(entrants, clock(options), save, **limits)


def jgraphs(asked: Row, variant: str) -> Entrant:
    named = {"system": "jgraph", "schedule": asked["schedule"], "variant": variant, "xla_options": asked["xla_options"]}
    return Entrant(named, "benchmarks.pipeline_program", asked)


def torchs(peer: str, size: Row, ranks: int, options: Options) -> Entrant:
    schedule, _, compiled = peer.partition(":")
    few = options.sizes == "full" and count_gpus() < ranks
    return Entrant(
        {"system": "torch", "schedule": schedule, "variant": compiled},
        "benchmarks.peers.pipelining",
        {"schedule": schedule, "compile": compiled == "compile", "size": size},
        ranks=ranks,
        missing=f"skipped: {count_gpus()} of {ranks} GPUs are here" if few else "",
    )


def asked_of(task: str, work: WorkName, schedule: str, ranks: int, options: Options, variant: str = "") -> Row:
    return {
        "task": task,
        "schedule": schedule,
        "ranks": ranks,
        "size": asdict(size_of(work, ranks, options)),
        "graph": options.graph,
        "xla_options": [*options.xla_option, *variant.split()],
        "remat": options.remat,
        "clock": asdict(clock(options)),
    }


def clock(options: Options) -> Clock:
    return Clock(seconds=options.seconds, repeats=options.repeats, warmup_seconds=options.warmup_seconds)


def soak(work: WorkName, ranks: int, options: Options) -> int:
    variant = next(iter(options.variant), "")
    asked = asked_of("soak", work, options.schedules[0], ranks, options, variant)
    asked |= {"steps": options.soak, "hang_seconds": options.hang_seconds}
    row = ask("benchmarks.pipeline_program", asked, timeout=options.timeout)
    named = {"work": f"pipeline {work}", "variant": variant, "ranks": ranks, "steps": options.soak}
    return save_soak(options, named | {name: asked[name] for name in ("schedule", "graph", "xla_options", "size")}, row)


# What a step would take that is nothing but its actions


def chunks_of(schedule: str, ranks: int, size: Row) -> int:
    return len(schedule_of(schedule, ranks, size["microbatches"]).placement[0])


def compare(row: Row, actions: Row | None, ranks: int, size: Row) -> Row:
    """Milliseconds of the actions with their bubble, and of what else was timed alone, by how often a step has it."""
    if not actions or "ms" not in row or "wgrad_ms" not in actions:
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
    tables = tabulate(schedule_of(name, ranks, size["microbatches"]))
    passed = {"activation": FORWARD, "gradient": DGRAD}
    kinds, used = tables.table.kind, [(source, pool) for source, pool in tables.arrivals if source != "same"]
    if runtime == "general":
        return len(kinds) * len({source for source, _ in used})
    return sum(int(np.any(kinds == passed[pool], axis=1).sum()) for _, pool in used)


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
        cells += [f"**{ratio(torch, ours)}**" if torch and ours else "", f">= {LEAST_GAIN[work]:g}"]
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
            cells += [f"{row['ms']:.2f}", spread(row), ratio(peer, row) if peer else ""]
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
