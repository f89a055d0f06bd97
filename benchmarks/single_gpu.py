"""One training step on one GPU: jgraph against PyTorch, the same model, dtype policy, optimizer and clipping.

    python -m benchmarks.single_gpu --presets launch-bound gpt-124m
    python -m benchmarks.single_gpu --presets gpt-1b3 --together 2     # no more of it fit in an H200 at a time

The variants have a process each and are timed in turns (`benchmarks/turns.py`). The PyTorch model is the one that the parity
tests hold against ours.

A process of a variant is this script with its request: python -m benchmarks.single_gpu '{"variant": "jgraph", "config": {...}}'
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import tyro

from benchmarks.harness import Common, Table, count_gpus, fastest, line, named, ratio, spread, step_flops
from benchmarks.peers.protocol import Clock, answer, begin, take_turns, told
from benchmarks.turns import Entrant, race
from jgraph.device import peak_flops
from jgraph.training.config import TrainConfig
from jgraph.training.presets import preset
from jgraph_models.gpt import GPTConfig

Row = dict[str, Any]
Run = Callable[[], object]

# The first is in every comparison.
VARIANTS = (
    "jgraph",
    "jgraph graph=off",
    "torch eager",
    "torch CUDA graph",
    "torch compile",
    "torch compile + CUDA graph",
)
_TINY = GPTConfig(num_layers=2, d_model=32, num_heads=2, num_kv_heads=2, d_ff=64, vocab_size=96, compute_dtype="float32")


@dataclass(frozen=True, kw_only=True)
class Options(Common):
    """What to run."""

    presets: tuple[str, ...] = ("launch-bound", "gpt-124m", "gpt-1b3")
    """Configurations to time."""
    variants: tuple[str, ...] = VARIANTS
    """Of each; the first one is what all others are compared with."""
    sizes: Literal["full", "tiny"] = "full"
    """tiny is for a machine without a GPU."""
    name: str = "single_gpu"


def main() -> int:
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        time_variant(json.loads(sys.argv[1]))
        return 0
    options = tyro.cli(Options, description=__doc__)
    results = Table(options, draw)
    for name in () if options.table else options.presets:
        config = preset(name)
        if options.sizes == "tiny":
            config = replace(config, model=_TINY, seq_len=32, xla_options=())
        results.begin(name, ranks=1, config=asdict(config))
        race(
            [entrant(variant, config) for variant in options.variants],
            Clock(seconds=options.seconds, repeats=options.repeats, warmup_seconds=options.warmup_seconds),
            lambda rows, name=name: results.put(name, rows),
            rounds=options.rounds,
            together=options.together,
            timeout=options.timeout,
        )
    print(results)
    return 0


def entrant(variant: str, config: TrainConfig) -> Entrant:
    system, _, how = variant.partition(" ")
    missing = "skipped: no GPU here" if system == "torch" and not count_gpus() else ""
    request = {"variant": variant, "config": asdict(config)}
    return Entrant({"system": system, "variant": how}, "benchmarks.single_gpu", request, missing=missing)


# In a process of its own


def time_variant(asked: Row) -> None:
    config, ours = TrainConfig.from_dict(asked["config"]), asked["variant"].startswith("jgraph")
    run, wait, finish = jgraph_step(config, asked["variant"]) if ours else torch_step(config, asked["variant"])
    take_turns(lambda clock: told(clock.back_to_back(run, wait)))
    finish()


def jgraph_step(config: TrainConfig, variant: str) -> tuple[Run, Run, Run]:
    """The step of `python -m jgraph.train`, on one batch of random tokens."""
    import jax

    from jgraph.training.metrics import peak_memory_bytes
    from jgraph.training.setup import TrainSetup

    begin()
    setup = TrainSetup.of(replace(config, graph="off" if variant.endswith("graph=off") else "auto"))
    step = setup.compile_step()
    compiled, report = step.executable, step.capture
    shape = (config.batch_size, config.seq_len + 1)
    tokens_BS = jax.random.randint(jax.random.key(1), shape, 0, config.model.vocab_size)
    latest: dict[str, Any] = {"state": setup.init()}

    def run():
        latest["state"], latest["metrics"] = compiled(latest["state"], tokens_BS)

    def wait():
        jax.block_until_ready(latest["metrics"])

    def finish():
        analysis = compiled.memory_analysis()
        assert analysis is not None
        # What XLA allots to the step itself: arguments, temporaries and outputs that alias nothing.
        step_bytes = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
        step_bytes += analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        answer(loss=float(latest["metrics"].loss), peak_bytes=peak_memory_bytes(jax.devices()[0]), step_bytes=step_bytes)

    run()
    wait()
    answer(device=jax.devices()[0].device_kind, capture=str(report))
    return run, wait, finish


def torch_step(config: TrainConfig, variant: str) -> tuple[Run, Run, Run]:
    """The same step in PyTorch: fused AdamW, clipping by global norm, gradients set to None; whole-step CUDA graph if asked."""
    import torch

    from tests.parity.torch_gpt import GPT

    begin()
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
        torch.cuda.empty_cache()  # what the steps before the capture left: the graph has a pool of its own, others need room

    def finish():
        answer(loss=float(latest["loss"]), peak_bytes=torch.cuda.max_memory_allocated())

    answer(device=torch.cuda.get_device_name())
    return run, torch.cuda.synchronize, finish


# Table


def draw(works: dict[str, Any]) -> str:
    """A table a preset; what every variant took longer than ours, by rounds."""
    lines = ["# One training step on one GPU", ""]
    for name, result in works.items():
        env, config, rows = (result[key] for key in ("environment", "config", "rows"))
        ours = rows[0] if rows else {}
        shape = f"{config['batch_size']}x{config['seq_len']} tokens"
        lines += [f"## {name}, {shape}, {result['device']}", ""]
        lines += [f"{env['date']}, revision {env['revision']}, jax {env.get('jax')}, torch {env.get('torch')}.", ""]
        columns = ["variant", "ms, median", "fastest, slowest", "this / jgraph", "TFLOP/s", "MFU", "peak GB", "W", "MHz"]
        lines += [line(columns), "|---" * len(columns) + "|"]
        for row in rows:
            cells = [named(row)]
            if "ms" in row:
                rate = step_flops(config) / row["ms"] * 1e3
                peak = peak_flops(row.get("device", ""))
                cells += [f"{row['ms']:.3f}", spread(row), "" if row is ours else ratio(row, ours)]
                cells += [f"{rate / 1e12:.0f}", f"{rate / peak:.1%}" if peak else ""]
                cells += [f"{row['peak_bytes'] / 1e9:.2f}" if row.get("peak_bytes") else ""]
                cells += [f"{row[key]:.0f}" if row.get(key) else "" for key in ("power_watts", "sm_clock_mhz")]
            cells += [row["failed"]] if "failed" in row else []
            lines += [line(cells + [""] * (len(columns) - len(cells)))]
        peer, ran = fastest(rows, "torch"), sum(row["system"] == "torch" and "ms" in row for row in rows)
        best = f"Fastest of {ran} PyTorch variants that ran / jgraph: **{ratio(peer, ours)}**." if peer else "No peer ran."
        lines += ["", f"{best} {ours.get('capture', '')}", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
