"""One training step on one GPU: jgraph against PyTorch, the same model, dtype policy, optimizer and clipping.

    python -m benchmarks.single_gpu --presets launch-bound gpt-124m gpt-1b3

Every variant runs in a process of its own, one after the other; the first runs again at the end of its preset, so that the
table shows by how much the card drifted. The PyTorch model is the one that the parity tests hold against ours.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.harness import Timing, environment, time_steps, write_results
from jgraph.config import TrainConfig
from jgraph.metrics import flops_per_step, peak_flops
from jgraph.presets import preset

Run = Callable[[], object]

VARIANTS = (
    "jgraph",
    "jgraph --graph off",
    "torch eager",
    "torch CUDA graph",
    "torch.compile",
    "torch.compile + CUDA graph",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    presets: tuple[str, ...] = ("launch-bound", "gpt-124m", "gpt-1b3")
    """Configurations to time."""
    steps: int = 20
    """Fewest steps in a repeat."""
    seconds: float = 0.5
    """Shortest time of a repeat; it has more steps where they are short."""
    repeats: int = 5
    """Repeats, of which the median is taken."""
    warmup_seconds: float = 3.0
    """Time that each variant runs before it is timed."""
    name: str = "single_gpu"
    """Results go to benchmarks/results/NAME.json and .md."""
    revision: str = ""
    """Git revision for the JSON, where there is no .git."""
    mode: Literal["table", "variant"] = "table"
    """`variant` times one variant of one preset in this process and prints JSON; the table's own use."""
    variant: str = VARIANTS[0]
    """The variant for `--mode variant`."""


def main() -> int:
    options = tyro.cli(Options, description=__doc__)
    if options.mode == "variant":
        print(json.dumps(time_variant(options.presets[0], options.variant, options)))
        return 0
    results: dict[str, Any] = {"environment": environment(revision=options.revision), "options": asdict(options), "presets": {}}
    for name in options.presets:
        rows = [in_own_process(name, variant, options) for variant in VARIANTS]
        again = in_own_process(name, VARIANTS[0], options)
        results["presets"][name] = {"config": asdict(preset(name)), "variants": rows, "first variant again": again}
        write_results(options.name, results, table(results))
        print(table(results), flush=True)
    return 0


def in_own_process(name: str, variant: str, options: Options) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.single_gpu", "--mode", "variant", "--presets", name, "--variant", variant]
    command += ["--steps", str(options.steps), "--repeats", str(options.repeats)]
    command += ["--seconds", str(options.seconds), "--warmup-seconds", str(options.warmup_seconds)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    if done.returncode:
        return {"variant": variant, "error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    row = json.loads(done.stdout.splitlines()[-1])
    print(f"{name} {variant}: {row['ms']:.3f} ms", flush=True)
    return row


def time_variant(name: str, variant: str, options: Options) -> dict[str, Any]:
    """Builds, warms and times one variant; the row of the JSON."""
    config = preset(name)
    if variant.startswith("jgraph"):
        run, wait, finish = jgraph_step(replace(config, graph="off" if variant.endswith("off") else "auto"))
    else:
        run, wait, finish = torch_step(config, variant)
    timing: Timing = time_steps(
        run,
        wait,
        steps=options.steps,
        seconds=options.seconds,
        repeats=options.repeats,
        warmup_seconds=options.warmup_seconds,
    )
    facts = finish()
    flops_per_second = flops_per_step(config) / timing.ms * 1e3
    peak = peak_flops(facts["device"])
    return {
        "variant": variant,
        **asdict(timing),
        "tflops": flops_per_second / 1e12,
        "mfu": flops_per_second / peak if peak else None,
        **facts,
    }


def jgraph_step(config: TrainConfig) -> tuple[Run, Run, Callable[[], dict[str, Any]]]:
    """The step of `python -m jgraph.train`, on one batch of random tokens."""
    import jax

    from jgraph.assembly import Assembly
    from jgraph.metrics import peak_memory_bytes

    assembly = Assembly.of(config)
    compiled, report = assembly.compile_step(config.batch_size)
    shape = (config.batch_size, config.seq_len + 1)
    tokens_BS = jax.random.randint(jax.random.key(1), shape, 0, config.model.vocab_size)
    latest: dict[str, Any] = {"state": assembly.init()}

    def run():
        latest["state"], latest["metrics"] = compiled(latest["state"], tokens_BS)

    def finish():
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return {
            "device": jax.devices()[0].device_kind,
            "loss": float(latest["metrics"].loss),
            "peak_bytes": peak_memory_bytes(jax.devices()[0]),
            # What XLA allots to the step itself: arguments, temporaries and outputs that alias nothing.
            "step_bytes": analysis.argument_size_in_bytes
            + analysis.temp_size_in_bytes
            + analysis.output_size_in_bytes
            - analysis.alias_size_in_bytes,
            "capture": str(report),
        }

    return run, lambda: jax.block_until_ready(latest["metrics"]), finish


def torch_step(config: TrainConfig, variant: str) -> tuple[Run, Run, Callable[[], dict[str, Any]]]:
    """The same step in PyTorch: fused AdamW, clipping by global norm, gradients set to None; whole-step CUDA graph if asked."""
    import torch

    from tests.parity.torch_gpt import GPT

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = GPT(config.model).cuda()
    o = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=o.learning_rate,
        betas=(o.beta1, o.beta2),
        eps=o.eps,
        weight_decay=o.weight_decay,
        fused=True,
        capturable=True,
    )
    tokens_BS = torch.randint(0, config.model.vocab_size, (config.batch_size, config.seq_len + 1), device="cuda")
    with torch.no_grad():
        model.loss(tokens_BS)  # makes the rotary table, outside of what is compiled
    loss_fn = torch.compile(model.loss) if "compile" in variant else model.loss
    latest: dict[str, Any] = {}

    def step():
        optimizer.zero_grad(set_to_none=True)
        latest["loss"] = loss_fn(tokens_BS)
        latest["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm)
        optimizer.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    run = step
    if "graph" in variant:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay

    def finish():
        return {
            "device": torch.cuda.get_device_name(),
            "loss": float(latest["loss"]),
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }

    return run, torch.cuda.synchronize, finish


def table(results: dict[str, Any]) -> str:
    """Markdown: a table a preset, and the ratio that counts, the fastest PyTorch variant over jgraph."""
    env = results["environment"]
    lines = ["# One training step on one GPU", ""]
    lines += [f"{env['date']}, revision {env['revision']}, jax {env.get('jax')}, torch {env.get('torch')}.", ""]
    for name, result in results["presets"].items():
        rows = [row for row in result["variants"] if "ms" in row]
        ours = next((row for row in rows if row["variant"] == VARIANTS[0]), None)
        peers = [row["ms"] for row in rows if row["variant"].startswith("torch")]
        if not ours:
            continue
        drift = result["first variant again"].get("ms", float("nan")) / ours["ms"] - 1
        shape = f"{result['config']['batch_size']}x{result['config']['seq_len']} tokens"
        lines += [f"## {name}, {shape}, {ours['device']}", ""]
        lines += ["| variant | ms, median | fastest, slowest | TFLOP/s | MFU | peak GB | W | MHz |"]
        lines += ["|---|---|---|---|---|---|---|---|"]
        lines += [_row(row) for row in result["variants"]]
        ratio = f"{min(peers) / ours['ms']:.3f}" if peers else "no peer ran"
        lines += [
            "",
            f"Fastest PyTorch / jgraph: **{ratio}**. jgraph run again at the end: {drift:+.1%}. {ours['capture']}",
            "",
        ]
    return "\n".join(lines)


def _row(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {row['variant']} | did not run: {row['error']} | | | | | | |"
    cells = [
        row["variant"],
        f"{row['ms']:.3f}",
        f"{min(row['repeats_ms']):.3f}, {max(row['repeats_ms']):.3f}",
        f"{row['tflops']:.0f}",
        f"{row['mfu']:.1%}" if row["mfu"] else "",
        f"{row['peak_bytes'] / 1e9:.2f}",
        f"{row['power_watts']:.0f}" if row["power_watts"] else "",
        f"{row['sm_clock_mhz']:.0f}" if row["sm_clock_mhz"] else "",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
