"""One step of a pipeline as it ran, in the form of the schedule that was planned, so that both are drawn alike.

    python -m benchmarks.pipeline_trace --work mlp-large            # 4 GPUs; writes benchmarks/results/pipeline_trace.json
    python -m benchmarks.pipeline_trace --draw notes                # from that file: two pictures; needs no GPU

An action is its matrix products, from the first's start to the last's end. Which products are whose stands in the compiled
program: every instruction there says which part of the stage it was made for. Nothing is captured: what is, has no names in a
trace. Of several steps the last is taken, because a GPU that has just rested runs faster.
"""

import json
import re
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import tyro

from benchmarks import harness
from benchmarks.pipeline_program import Program, steps
from benchmarks.works import schedule_of, sizes_of
from jgraph.profile.actions import as_run, costs, measured, planned
from jgraph.schedule import Simulation, draw
from jgraph.schedule.action import DGRAD, FORWARD, WGRAD

STEPS = 10

_MADE_FOR = {"_run_forward": FORWARD, "_run_dgrad": DGRAD, "_run_accumulate": WGRAD}


@dataclass(frozen=True)
class Options:
    """Command line."""

    work: Literal["mlp-large", "mlp-launch-bound"] = "mlp-large"
    """Which work of the pipeline benchmark; MLPs only, whose products are all in the layers."""
    schedule: str = "aligned"
    """One that the aligned runtime plays."""
    xla_option: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE; may be repeated."""
    sizes: str = "full"
    """tiny is for a machine without a GPU."""
    draw: str = ""
    """Draw what was measured into this directory; nothing is run."""
    revision: str = ""
    """Git revision for the JSON, where there is no .git."""


def main(options: Options) -> None:
    if options.draw:
        pictures(Path(options.draw))
        return
    asked = {"task": "trace", "schedule": options.schedule, "ranks": len(jax.devices()), "remat": "nothing", "graph": "off"}
    asked |= {"xla_options": list(options.xla_option), "clock": {"seconds": 0.1, "repeats": 5, "warmup_seconds": 1.0}}
    size = sizes_of(options.sizes, len(jax.devices()))[options.work]
    program = Program.of(asked | {"size": asdict(size)})
    compiled: Any = program.compile(program.pipe.loss_and_grads, program.params, program.inputs)
    run, wait, _ = steps(program, compiled)
    run()
    wait()
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(STEPS):
                run()
                wait()
        trace = jax.profiler.ProfileData.from_file(str(next(Path(directory).rglob("*.xplane.pb"))))
    products = made_for(compiled.as_text())
    ranks = [kernels(plane, products) for plane in gpus(trace)]
    schedule = program.pipe.schedule
    ran = measured(schedule, ranks, "aligned")
    results = {
        "environment": harness.environment(revision=options.revision),
        "device": f"{len(ranks)} x {jax.devices()[0].device_kind}",
        "work": options.work,
        "schedule": options.schedule,
        "microbatches": schedule.num_microbatches,
        "xla_options": list(options.xla_option),
        "costs_ms": {kind: round(ms, 4) for kind, ms in costs(ran).items()},
        "starts_ms": [row.round(4).tolist() for row in ran.starts],
        "ends_ms": [row.round(4).tolist() for row in ran.ends],
    }
    harness.RESULTS.mkdir(exist_ok=True)
    (harness.RESULTS / "pipeline_trace.json").write_text(json.dumps(results) + "\n")
    print(report(results))


def gpus(trace: Any) -> list[Any]:
    """The trace's planes of GPUs, in order."""
    planes = [plane for plane in trace.planes if re.fullmatch(r"/device:GPU:\d+", plane.name)]
    if not planes:
        raise SystemExit("the trace has no GPU in it: this needs GPUs, or --draw with the results of some")
    return sorted(planes, key=lambda plane: int(plane.name.rpartition(":")[2]))


def made_for(hlo: str) -> dict[str, int]:
    """The kind of action that each matrix product of a compiled program was made for, by the instruction's name."""
    found = {}
    for name, op in re.findall(r"%([\w.-]+) = [^\n]*? custom-call\([^\n]*?op_name=\"([^\"]*)\"", hlo):
        kinds = [kind for part, kind in _MADE_FOR.items() if part in op]
        if kinds and "dot_general" in op:
            found[name] = kinds[0]
    return found


def kernels(plane: Any, products: dict[str, int]) -> dict[int, list[tuple[float, float]]]:
    """Start and end in ms of what a GPU ran for products in the last of the steps, by the kind of action."""
    found = defaultdict(list)
    for line in plane.lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                kind = products.get(str(dict(event.stats).get("hlo_op", "")))
                if kind is not None:
                    found[kind].append((event.start_ns / 1e6, (event.start_ns + event.duration_ns) / 1e6))
    return {kind: sorted(times)[-(len(times) // STEPS) :] for kind, times in found.items()}


def both(results: dict[str, Any]) -> tuple[Simulation, Simulation]:
    """The step as planned, with the costs that were measured, and as it ran."""
    schedule = schedule_of(results["schedule"], len(results["starts_ms"]), results["microbatches"]).newest_first()
    return planned(schedule, results["costs_ms"], "aligned"), as_run(schedule, results["starts_ms"], results["ends_ms"])


def report(results: dict[str, Any]) -> str:
    plan, ran = both(results)
    took = ", ".join(f"{kind} {ms:.3f}" for kind, ms in results["costs_ms"].items())
    return (
        f"{results['work']}, {results['schedule']}, {results['device']}: {took} ms; "
        f"planned {plan.makespan:.2f} ms, {plan.bubble:.1%} idle; ran {ran.makespan:.2f} ms, {ran.bubble:.1%} idle"
    )


def pictures(directory: Path) -> None:
    results = json.loads((harness.RESULTS / "pipeline_trace.json").read_text())
    for name, run in zip(("planned", "measured"), both(results), strict=True):
        draw.write_svg(run, directory / f"pipeline-{name}.svg")
    print(report(results))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
